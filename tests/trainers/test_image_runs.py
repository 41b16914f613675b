"""Training on images: gradients, micro-batches, adapters, processes, resumed runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpointed_runs import assert_same, check_resumed
from games import Gradients, draw_batch, loss_and_gradients, make_trainer, relative_error
from image_episodes import native_inputs, native_log_probs, saved
from pictures import Pictures
from ppo_games import make_ppo, wake
from several_processes import launch
from transformers import AutoProcessor
from trl.trainer.utils import use_adapter

from agile_trainers.records.reader import open_records
from agile_trainers.trainers.setup import prepare_images

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import Gallery, make_image_model

KINDS = ["idefics3", "qwen2_vl", "qwen3_vl"]
"""One with positions of one axis, one of three, one that adds to later layers too."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model and processor of each kind, as folders."""
    made = {}
    for name in KINDS:
        if name.startswith("qwen"):
            pytest.importorskip("torchvision")
        made[name] = saved(name, tmp_path_factory.mktemp(name))
    return made


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_the_model_itself(folders, tmp_path, name, monkeypatch):
    """The loss of the first update is linear in the log-probs, whose gradient transformers' own forward pass gives."""
    trainer = make_trainer(folders[name], tmp_path, environment=Gallery, gradient_checkpointing=name == "qwen3_vl")
    played, make = [], trainer.batches.make
    monkeypatch.setattr(
        trainer.batches, "make", lambda models, of, *a, **k: played.append(of) or make(models, of, *a, **k)
    )
    batch = draw_batch(trainer)
    _, ours = loss_and_gradients(trainer, batch)
    assert trainer.model.training
    episodes = played[0].trajectories
    assert len({len(episode.pictures[0]) for episode in episodes}) > 1
    processor = AutoProcessor.from_pretrained(folders[name])
    trainer.model.zero_grad()
    loss = torch.tensor(0.0)
    for row, episode in enumerate(episodes):
        length = len(episode.completion_ids)
        weights = batch["advantages"][row, :length] * batch["tool_mask"][row, :length]
        loss = (
            loss - (weights * native_log_probs(trainer.model, processor, episode)).sum() / batch["num_items_in_batch"]
        )
    loss.backward()
    native = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert relative_error(ours, native) < 1e-4


@pytest.mark.parametrize(
    ("name", "changes"),
    [("idefics3", {}), ("qwen2_vl", {"history": "observations:1"})],
    ids=["one path", "several paths"],
)
def test_micro_batches_change_no_gradient(folders, tmp_path, name, changes):
    steps, mismatches = [], []
    for size in (4, 1):
        gradients = Gradients()
        trainer = make_trainer(
            folders[name], tmp_path / str(size), environment=Gallery, callbacks=[gradients], num_iterations=2, max_steps=2,
            per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, num_generations=2, **changes,
        )  # fmt: skip
        trainer.train()
        steps.append(gradients.steps)
        mismatches.append(trainer.state.log_history[0]["sampling/sampling_logp_difference/max"])
    assert max(mismatches) < 1e-4
    for ours, theirs in zip(*steps, strict=True):
        assert relative_error(theirs, ours) < 1e-4


def test_values_of_a_critic_are_those_of_the_model_itself(folders, tmp_path, monkeypatch):
    """Read from padded rows of an update, and by transformers' own forward pass from pixels."""
    trainer = make_ppo(folders["qwen2_vl"], tmp_path, environment=Gallery)
    wake(trainer)
    processor, base = AutoProcessor.from_pretrained(folders["qwen2_vl"]), trainer.model.get_base_model()
    make, found = trainer.batches.make, []

    def made(models: Any, played: Any, *args: Any, **kwargs: Any) -> Any:
        head = base.value_head.modules_to_save["critic"]
        with torch.no_grad(), use_adapter(trainer.model, "critic"):  # before the critic learns
            hidden = [
                base.base_model(**native_inputs(processor, it)).last_hidden_state[0] for it in played.trajectories
            ]
            expected = [
                [float(head(states[len(it.prompt_ids) + turn.start - 1])) for turn in it.turns]
                for states, it in zip(hidden, played.trajectories, strict=True)
            ]
        result = make(models, played, *args, **kwargs)
        found.append((result.values, torch.tensor(expected)))
        return result

    monkeypatch.setattr(trainer.batches, "make", made)
    draw_batch(trainer)
    ((values, expected),) = found
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)


def test_a_process_without_images_waits_for_no_encoder(folders, tmp_path):
    """Two processes, of which one has the episodes with images, make the update of one."""
    script = Path(__file__).with_name("images_two_processes.py")
    results = []
    for processes in (1, 2):
        output = launch(script, processes, folders["idefics3"], tmp_path / str(processes), {"half": {}})
        results.append(torch.load(output / "half" / "result.pt"))
    assert [result["processes"] for result in results] == [1, 2]
    for one, two in zip(results[0]["gradients"], results[1]["gradients"], strict=True):
        assert relative_error(two, one) < 1e-4


def test_a_killed_run_goes_on_bit_for_bit(folders, tmp_path):
    """In the middle of a generation batch; with the next one under way, whose images are rendered again."""
    options: dict[str, Any] = {
        "environment": Gallery, "max_steps": 3, "per_device_train_batch_size": 4, "steps_per_generation": 2,
        "optim": "adamw_torch", "learning_rate": 1e-2, "batches_ahead": 1,
    }  # fmt: skip
    check_resumed(lambda name, **more: make_trainer(folders["qwen2_vl"], tmp_path / name, **options, **more), 1)


def test_what_is_pushed_reads_images(folders, tmp_path):
    """The model alone, and a checkpoint below it."""
    trainer = make_trainer(
        folders["qwen2_vl"], tmp_path / "run", environment=Gallery, max_steps=1, save_strategy="steps", save_steps=1
    )
    trainer.train()
    trainer.save_model()
    for folder, below in ((tmp_path / "run", None), (tmp_path / "run" / "checkpoint-1", "last-checkpoint")):
        pushed = trainer.hub._stage(folder, below)
        found = AutoProcessor.from_pretrained(pushed)
        assert type(found) is type(AutoProcessor.from_pretrained(folders["qwen2_vl"]))
        assert found.image_processor.to_dict() == trainer.processing_class.image_processor.to_dict()


def test_environments_in_processes_show_the_same_images(folders, tmp_path):
    steps = []
    for processes in (0, 2):
        gradients = Gradients()
        trainer = make_trainer(
            folders["idefics3"], tmp_path / str(processes), environment=Pictures, callbacks=[gradients],
            environment_processes=processes,
        )  # fmt: skip
        trainer.train()
        trainer.close()
        steps.append(gradients.steps[0])
    assert_same(*steps)


class SamePictures(Pictures):
    """All episodes have the return 0, so that no group has an advantage."""

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, _, *others = super().step(action)
        return shown, 0.0, *others


def test_images_of_replaced_groups_are_written(folders, tmp_path):
    """Each image that the records name is there, those of the groups that others replaced among them."""
    trainer = make_trainer(
        folders["idefics3"], tmp_path, environment=SamePictures, max_steps=1, resample_zero_advantage_groups=1
    )
    trainer.train()
    (run,) = open_records(tmp_path)
    episodes = list(run.episodes())
    assert len(episodes) == 2 * trainer.args.generation_batch_size and all(
        run.image(digest) for episode in episodes for digest in re.findall(r"image:(\w{32})", json.dumps(episode))
    )


def test_the_encoder_is_frozen_and_adapters_are_in_the_language_part(folders, tmp_path):
    trainer = make_trainer(folders["idefics3"], tmp_path / "lora", environment=Gallery)
    adapted = [name for name, p in trainer.model.named_parameters() if "lora_" in name]
    assert adapted and all("text_model" in name for name in adapted)
    trainer.train()
    whole = make_trainer(folders["idefics3"], tmp_path / "whole", environment=Gallery, lora=False)
    before = {name: p.clone() for name, p in whole.model.named_parameters()}
    assert {name for name, p in whole.model.named_parameters() if p.requires_grad and "text_model" not in name} <= {
        "lm_head.weight"
    }
    whole.train()
    changed = {name for name, p in whole.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all(name.startswith(("model.text_model", "lm_head")) for name in changed)
    whole.save_model(str(tmp_path / "saved"))
    again = make_trainer(tmp_path / "saved", tmp_path / "again", environment=Gallery)
    assert "lm_head.bias" not in dict(again.model.get_base_model().state_dict())
    with pytest.raises(ValueError, match=r"layers in the image encoder, such as .*lora_target_scope='language_model'"):
        make_trainer(folders["idefics3"], tmp_path / "all", environment=Gallery, lora={"exclude_modules": ["lm_head"]})


def test_what_vllm_cannot_be_shown_is_refused():
    """vLLM is not installed where this runs, so that the trainer's constructor would say that first."""
    gemma, _ = make_image_model("gemma3")
    with pytest.raises(
        ValueError, match=r"shows images to idefics3, .*not to 'gemma3', whose image tokens see each other"
    ):
        prepare_images(SimpleNamespace(use_vllm=True), None, gemma, None)
    model, _ = make_image_model("idefics3")
    good = {"offload_policy_during_rollout": False, "vllm_tensor_parallel_size": 1, "vllm_model_impl": "vllm"}
    bad = {"offload_policy_during_rollout": True, "vllm_tensor_parallel_size": 2, "vllm_model_impl": "transformers"}
    for name, value in bad.items():
        with pytest.raises(
            ValueError, match=rf"{name}={value!r} is not known to work with images.* Set {name}={good[name]!r}"
        ):
            prepare_images(SimpleNamespace(use_vllm=True, **good | {name: value}), None, model, None)


def test_a_teacher_reads_text(folders, tmp_path):
    with pytest.raises(ValueError, match=r"teacher='policy' reads text, .* pass the processor's tokenizer"):
        make_trainer(folders["idefics3"], tmp_path, environment=Gallery, teacher="policy", teacher_hint="hint")


def test_rows_with_images_are_padded_and_it_is_said(folders, tmp_path, caplog):
    with pytest.raises(ValueError, match=r"sequence_packing='prefix' cannot pack .* reads images"):
        make_trainer(folders["idefics3"], tmp_path / "prefix", environment=Gallery, sequence_packing="prefix")
    with caplog.at_level("INFO"):
        make_trainer(folders["idefics3"], tmp_path / "auto", environment=Gallery)
    assert "reads images" in caplog.text
