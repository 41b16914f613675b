"""Training with vLLM rollouts: the policy that samples is the one that is trained, and little is moved to keep it so."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import recorded

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from datasets import Dataset
from games import Chatter, Lucky, draw_batch, loss_and_gradients, make_trainer, relative_error, settings
from hub_push import IDS
from hub_runs import run
from hub_server import running_hub
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from vllm.lora.request import LoRARequest

from agile_trainers.rollout.generators import GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.vllm.engine import VllmEngine, VllmGenerator
from agile_trainers.sampling.mismatch import SamplerMismatchError
from agile_trainers.sampling.sampler import shared_engine
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig, MultiTurnPPOTrainer
from agile_trainers.trainers.trainer import MultiTurnTrainer

VLLM: dict[str, Any] = {"use_vllm": True, "stop_strings": None}
MISMATCH = "sampling/sampling_logp_difference"


def logs(trainer: MultiTurnTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def base_answers(trainer: MultiTurnTrainer) -> list[float]:
    """Log-probabilities of what the engine's base model says without any adapter. On CPU its weights are packed away."""
    assert trainer.sampler.vllm is not None
    engine = trainer.sampler.vllm.engine
    adapter, engine.adapter = engine.adapter, None
    engine.engine.reset_prefix_cache()
    generator = VllmGenerator(engine, eos_token_ids=[], settings=SamplingSettings(do_sample=False))
    for episode in range(4):
        generator.submit(GenerationRequest(episode, [5 + episode, 9, 30], 20, lambda n: [0.0] * n))
    answers = sorted((o for _ in range(20) for o in generator.step()), key=lambda output: output.episode)
    engine.adapter = adapter
    return [logprob for output in answers for logprob in output.logprobs]


def test_ten_updates_move_the_adapter_alone(
    embedded_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(embedded_model, tmp_path, max_steps=10, learning_rate=1.0, **VLLM)
    theirs, ours = base_answers(trainer), dict(trainer.model.get_base_model().named_parameters())
    base = {name: weight.clone() for name, weight in ours.items() if "lora_" not in name}
    trainer.train()
    assert len(logs(trainer, f"{MISMATCH}/max")) == 10
    assert max(logs(trainer, f"{MISMATCH}/max")) < 1e-3
    # The policy moved: under the first adapter the last answers had other log-probabilities.
    trainer.sampler.vllm.sync = lambda: 0  # type: ignore[method-assign]
    trainer.sampler.vllm.engine.load_adapter(
        {
            name: torch.zeros_like(weight) if "lora_B" in name else weight
            for name, weight in get_peft_model_state_dict(trainer.model).items()
        },
        trainer.model.peft_config["default"],
    )
    with pytest.raises(SamplerMismatchError, match="the base model without the adapter"):
        draw_batch(trainer)
    assert base_answers(trainer) == theirs
    assert all(torch.equal(ours[name], weight) for name, weight in base.items())
    adapter = sum(weight.nbytes for weight in get_peft_model_state_dict(trainer.model).values())
    full = sum(weight.nbytes for weight in base.values())
    assert set(logs(trainer, "vllm/sync_bytes")) == {adapter}
    with capfd.disabled():
        print(
            f"\nmoved before each of 10 updates: {adapter} bytes; a full sync: {full}, {full / adapter:.1f} times as many"
        )


def test_making_an_engine_leaves_the_random_state_of_the_run(embedded_model: Path, tmp_path: Path) -> None:
    """vLLM sets its own seed, the same on all ranks, from which dropout and a critic would be drawn whatever ``seed`` is."""
    drawn = []
    for use_vllm in (False, True):
        with make_trainer(embedded_model, tmp_path, seed=3, use_vllm=use_vllm, stop_strings=None):
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_a_success_is_replayed_and_counts_as_no_mismatch(embedded_model: Path, tmp_path: Path) -> None:
    """Its log-probabilities are those of the policy that sampled it, which are not compared with today's."""
    trainer = make_trainer(
        embedded_model, tmp_path, environment=Lucky, train_dataset=Dataset.from_dict({"number": [0, 1]}),
        replay_successes=2, max_steps=6, learning_rate=1.0, **VLLM,
    )  # fmt: skip
    trainer.train()
    assert any(logs(trainer, "replay/groups")) and max(logs(trainer, f"{MISMATCH}/max")) < 1e-3


def test_a_model_trained_whole_is_moved_whole(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, lora=False, max_steps=4, learning_rate=0.5, **VLLM)
    before = base_answers(trainer)
    trainer.train()
    assert max(logs(trainer, f"{MISMATCH}/max")) < 1e-3
    assert base_answers(trainer) != before
    assert set(logs(trainer, "vllm/sync_bytes")) == {sum(weight.nbytes for weight in trainer.model.parameters())}


def test_ppo_hands_over_its_policy_and_nothing_of_its_critic(embedded_model: Path, tmp_path: Path) -> None:
    trainer = MultiTurnPPOTrainer(
        str(embedded_model),
        args=MultiTurnPPOConfig(
            **{**settings(tmp_path, max_steps=4, learning_rate=0.5, beta=0.1, reference_adapter=True, **VLLM)}
            | {"num_generations": 1, "stop_strings": list("aeiou01234 !")}
        ),
        environment=Chatter,
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian"),
    )
    handed: list[set[str]] = []
    load = trainer.sampler.vllm.engine.load_adapter

    def seen(weights: dict[str, torch.Tensor], config: LoraConfig) -> int:
        handed.append({*weights})
        return load(weights, config)

    trainer.sampler.vllm.engine.load_adapter = seen  # type: ignore[method-assign]
    trainer.train()
    assert {"default", "critic", "ref"} <= set(trainer.model.peft_config)
    policy = get_peft_model_state_dict(trainer.model, adapter_name="default")
    assert all(names == set(policy) for names in handed) and len(handed) == 3, (
        "the first rollout has it from construction"
    )
    assert not any("critic" in name or "value_head" in name or "ref" in name.split(".") for name in policy)
    assert set(logs(trainer, "vllm/sync_bytes")) == {sum(weight.nbytes for weight in policy.values())}
    assert max(logs(trainer, f"{MISMATCH}/max")) < 1e-3


def test_an_adapter_in_shares_is_handed_over_whole(embedded_model: Path, tmp_path: Path) -> None:
    """FSDP2's shares, here of one process: vLLM gets plain tensors with the same values."""
    trainer = make_trainer(embedded_model, tmp_path, **VLLM)
    expected = {name: weight.clone() for name, weight in get_peft_model_state_dict(trainer.model).items()}
    fully_shard(trainer.model, mesh=init_device_mesh("cpu", (1,)))
    assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    handed: list[dict[str, torch.Tensor]] = []
    trainer.sampler.vllm.engine.load_adapter = lambda weights, config: handed.append(weights) or 0  # type: ignore[method-assign]
    trainer.sampler.vllm.sync()
    assert handed[0].keys() == expected.keys()
    for name, weight in handed[0].items():
        assert not isinstance(weight, DTensor) and torch.equal(weight, expected[name])


def test_agreement_leaves_the_gradient_as_it_is(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, vllm_importance_sampling_mode="token_truncate", **VLLM)
    batch = draw_batch(trainer)
    mask = batch["tool_mask"] > 0
    assert (batch["importance_sampling_ratio"][mask] - 1).abs().max() < 1e-3
    assert (batch["importance_sampling_ratio"][~mask] == 1).all()
    _, corrected = loss_and_gradients(trainer, batch)
    trainer.vllm_importance_sampling_correction = False
    del batch["old_per_token_logps"]
    _, plain = loss_and_gradients(trainer, batch)
    assert relative_error(corrected, plain) < 1e-4


@pytest.mark.parametrize("mode", ["token_truncate", "turn_truncate", "sequence_mask"])
def test_weights_by_hand_when_the_temperature_differs(mode: str, embedded_model: Path, tmp_path: Path) -> None:
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5, **VLLM}
    trainer = make_trainer(embedded_model, tmp_path, **options)
    trainer.args.temperature = 0.8  # of the sampler; the trainer scores at 1
    with pytest.raises(SamplerMismatchError, match=r"sampled at temperature 0\.8 and scored at temperature 1\.0"):
        draw_batch(trainer)
    batch = draw_batch(trainer)  # an error in the first batch alone
    trainer.model.eval()
    width = batch["prompt_ids"].size(1)
    for row in range(len(batch["prompt_ids"])):
        columns = [batch[f"{part}_mask"][row].bool() for part in ("prompt", "completion")]
        ids = torch.cat([batch["prompt_ids"][row][columns[0]], batch["completion_ids"][row][columns[1]]])
        with torch.no_grad():
            logits = trainer.model(input_ids=ids[None]).logits[0, columns[0].sum() - 1 : -1].double()
        tokens = ids[columns[0].sum() :, None]
        scores, samples = ((logits / t).log_softmax(-1).gather(1, tokens)[:, 0] for t in (1.0, 0.8))
        turn_ids, weights = batch["turn_ids"][row][: len(tokens)], batch["importance_sampling_ratio"][row]
        units = {"token": range(len(tokens)), "turn": turn_ids, "sequence": [0] * len(tokens)}[mode.split("_")[0]]
        for i in range(len(tokens)):
            if turn_ids[i] < 0:
                assert weights[i] == 1
                continue
            same = [j for j in range(len(tokens)) if turn_ids[j] >= 0 and units[j] == units[i]]
            ratio = (scores - samples)[same].sum().exp().item()
            limited = min(ratio, 1.5) if "truncate" in mode else ratio * (ratio <= 1.5)
            assert weights[i].item() == pytest.approx(limited, rel=2e-3)
    assert width


def test_without_correction_nothing_is_scored_for_it(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, vllm_importance_sampling_correction=False, **VLLM)
    batch = draw_batch(trainer)
    assert not {"importance_sampling_ratio", "old_per_token_logps"} & set(batch)
    loss_and_gradients(trainer, batch)


def test_episodes_that_are_not_scored_do_not_count(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, skip_zero_advantage=True, zero_advantage_eps=0.9, **VLLM)
    batch = draw_batch(trainer)
    unread = (batch["advantages"].abs() <= 0.9).all(dim=1)
    assert unread.any() and not unread.all()
    assert (batch["importance_sampling_ratio"][unread] == 1).all()
    assert trainer._metrics["train"][f"{MISMATCH}/max"][-1] < 1e-3
    loss_and_gradients(trainer, batch)


def test_greedy_evaluation_is_the_transformers_generators(embedded_model: Path, tmp_path: Path) -> None:
    episodes = {}
    for name, options in (("vllm", {"use_vllm": True}), ("transformers", {})):
        trainer = make_trainer(embedded_model, tmp_path / name, num_eval_episodes=12, eval_greedy=True, **options)
        engine = trainer.sampler.vllm and trainer.sampler.vllm.engine
        trainer.evaluate()
        assert (trainer.sampler.vllm and trainer.sampler.vllm.engine) is engine
        episodes[name] = recorded(tmp_path / name, "eval")
    for ours, theirs in zip(episodes["vllm"], episodes["transformers"], strict=True):
        assert ours["turns"] == theirs["turns"]


def test_the_saved_policy_is_served_as_it_is(embedded_model: Path, tmp_path: Path) -> None:
    """Issue 4: vLLM loads the policy folder as a LoRA, with the trainer's log-probabilities."""
    trainer = make_trainer(embedded_model, tmp_path / "run", max_steps=3, learning_rate=1.0, **VLLM)
    trainer.train()
    trainer.save_model(str(tmp_path / "policy"))
    engine = trainer.sampler.vllm.engine
    engine.adapter = LoRARequest("saved", 1000, str(tmp_path / "policy"))
    assert engine.engine.add_lora(engine.adapter)
    generator = VllmGenerator(engine, eos_token_ids=[], settings=SamplingSettings())
    prompt = [5, 9, 30, 41]
    generator.submit(GenerationRequest(0, prompt, 12, lambda n: [0.3] * n))
    (output,) = [output for _ in range(12) for output in generator.step()]
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    for model in (PeftModel.from_pretrained(base, tmp_path / "policy"), trainer.model):
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_pushed_policy_is_served_as_it_is(embedded_model: Path, tmp_path: Path) -> None:
    """The same of what was pushed to a Hub, which leaves a critic out."""
    with running_hub() as hub:
        run(hub, "push", embedded_model, tmp_path)
        files = hub.repositories["tester/run"][-1]["files"]
    for name, content in files.items():
        path = tmp_path / "pushed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert "adapter_model.safetensors" in files and not any(name.startswith("critic") for name in files)
    engine = VllmEngine(
        str(embedded_model), dtype=torch.float32, max_model_length=64, max_batch_size=32, max_lora_rank=8
    )
    engine.adapter = LoRARequest("pushed", 1, str(tmp_path / "pushed"))
    assert engine.engine.add_lora(engine.adapter)
    generator = VllmGenerator(engine, eos_token_ids=[], settings=SamplingSettings(do_sample=False))
    for end in range(1, IDS.size(1) + 1):
        generator.submit(GenerationRequest(end - 1, IDS[0, :end].tolist(), 1, lambda n: [0.0] * n))
    expected = torch.load(tmp_path / "logits.pt")[0].log_softmax(-1)
    for output in generator.step():
        assert output.token_ids == [expected[output.episode].argmax().item()]
        assert output.logprobs == pytest.approx([expected[output.episode].max().item()], abs=1e-4)
    assert generator.pending == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_base_is_refused_with_what_can_serve_it(bits: int, embedded_model: Path, tmp_path: Path) -> None:
    quantized = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    with pytest.raises(ValueError, match=r"vLLM 0\.\S+ on CPU cannot serve .* 'bitsandbytes'.*use_vllm=False.*awq"):
        MultiTurnGRPOTrainer(
            str(embedded_model),
            args=MultiTurnGRPOConfig(**settings(tmp_path, **VLLM)),
            environment=Chatter,
            quantization_config=quantized,
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )


def test_the_trainers_of_a_search_use_the_engine_of_the_first(embedded_model: Path, tmp_path: Path) -> None:
    """One after another; each samples with its own policy, and so does the first one afterwards."""
    first = make_trainer(embedded_model, tmp_path / "first", **VLLM)
    assert first.sampler.vllm is not None
    engine = first.sampler.vllm.engine
    with shared_engine(first.args, lender=first.sampler):
        for seed in (1, 2):
            trial = make_trainer(
                embedded_model, tmp_path / f"{seed}", learning_rate=1.0, max_steps=2, seed=seed, **VLLM
            )
            assert trial.sampler.vllm.engine is engine
            trial.train()
            assert max(logs(trial, f"{MISMATCH}/max")) < 1e-3
        longer = make_trainer(embedded_model, tmp_path / "longer", max_model_length=200, **VLLM)
        assert longer.sampler.vllm.engine is not engine
    draw_batch(first)
    assert first._metrics["train"][f"{MISMATCH}/max"][-1] < 1e-3
