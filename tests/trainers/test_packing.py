"""Packed against padded rows through the trainers: gradients, metrics, values, checkpoints and the decision itself."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import check_resumed, make
from games import draw_batch, loss_and_gradients, make_trainer, relative_error
from ppo_games import make_ppo, wake
from torch._dynamo.utils import counters

from agile_trainers.embedded import make_tokenizer
from agile_trainers.packing.packer import Cost, PackingState
from agile_trainers.types import StopReason, Trajectory, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import architectures

MAKERS = {
    "grpo": make_trainer,
    "reinforce": lambda *args, **options: make_trainer(*args, algorithm="reinforce", num_generations=1, **options),
    "ppo": make_ppo,
}
BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
PADDED = PackingState(checked=True, refused="a test")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "token level, KL, entropy": ("grpo", {"beta": 0.1, "entropy_coef": 0.05}),
    "sequence level": ("grpo", {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"}),
    "whole model": ("grpo", {"lora": False, "beta": 0.1}),
    "turns multiplied": ("grpo", {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum", "beta": 0.1}),
    "reinforce": ("reinforce", {"kl_placement": "reward", "beta": 0.1}),
    "ppo": ("ppo", {}),
    "ppo, values of tokens": ("ppo", {"advantage_granularity": "token"}),
    "ppo, mean of a turn's values": ("ppo", {"turn_value_position": "mean"}),
    "checkpointing": ("ppo", {"gradient_checkpointing": True}),
    "reentrant checkpointing": (
        "ppo", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def draw(trainer: Any) -> dict[str, torch.Tensor]:
    """A batch of four groups' episodes, some of which share turns, and weights that have moved since."""
    batch = draw_batch(trainer)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if name in batch:
            batch[name] = batch[name] + 0.2 * torch.randn(batch[name].shape, generator=torch.Generator().manual_seed(0))
    trainer.critic.count_turns([batch])
    return batch


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics_equal_those_of_padded_rows(embedded_model, tmp_path, case):
    algorithm, options = CASES[case]
    trainer = MAKERS[algorithm](
        embedded_model, tmp_path, num_iterations=2, sequence_packing="prefix", **{**BATCH, **options}
    )
    if algorithm == "ppo":
        wake(trainer)
    batch = draw(trainer)
    assert trainer.packer.packs
    if options.get("gradient_checkpointing"):
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    results = []
    for state in (trainer.packer.state, PADDED):
        trainer.packer.state = state
        trainer._metrics["train"].clear()
        widths: list[tuple[int, int]] = []
        hook = trainer.model.register_forward_pre_hook(
            lambda _, __, kwargs, widths=widths: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        loss, gradients = loss_and_gradients(trainer, dict(batch))
        hook.remove()
        metrics = {
            name: values[-1] for name, values in trainer._metrics["train"].items() if not name.startswith("time")
        }
        results.append((loss, gradients, metrics, widths))
    (loss, gradients, metrics, packed), (padded_loss, padded_gradients, padded_metrics, padded) = results
    assert [rows for rows, _ in packed] == [1] and [rows for rows, _ in padded] == [8]
    assert packed[0][1] < 0.8 * padded[0][0] * padded[0][1], "the rows share no token: the test is empty"
    torch.testing.assert_close(loss, padded_loss, rtol=1e-5, atol=1e-6)
    assert relative_error(gradients, padded_gradients) < 1e-5
    assert metrics == pytest.approx(padded_metrics, rel=1e-4, abs=1e-5, nan_ok=True) and "entropy" in metrics


@pytest.mark.parametrize("algorithm", MAKERS)
def test_scores_and_values_of_a_generation_batch_are_the_same(embedded_model, tmp_path, algorithm):
    """Old, reference and critic passes; the training-inference mismatch is measured on the packed ones."""
    batches = []
    for mode in ("prefix", "none"):
        options = {"beta": 0.1, "num_iterations": 2, "sequence_packing": mode, "per_device_train_batch_size": 4}
        trainer = MAKERS[algorithm](embedded_model, tmp_path / mode, **options)
        batches.append(draw_batch(trainer))
        assert trainer.packer.packs == (mode == "prefix")
    counted = batches[0]["tool_mask"] * batches[0]["completion_mask"] > 0
    names = ["old_per_token_logps", "ref_per_token_logps"]
    for name in names:
        ours, theirs = (batch[name][counted] for batch in batches)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert ours.abs().min() > 0
    if algorithm == "ppo":
        for name in ("old_values", "value_targets"):
            torch.testing.assert_close(batches[0][name], batches[1][name], rtol=0, atol=1e-5)


def test_a_run_that_is_killed_while_packing_continues_bitwise(embedded_model, tmp_path):
    """In the middle of a generation batch; what the first batch decided is not decided again."""

    def made(name, **more):
        trainer = make("grpo", embedded_model, tmp_path / name, sequence_packing="prefix", **more)
        if name == "run":
            trainer.packer._difference = None  # would fail if it were called
        return trainer

    _, resumed = check_resumed(made, 3)
    assert resumed.packer.state == PackingState(checked=True) and resumed.packer.packs


def test_auto_packs_where_it_pays_and_not_on_a_tiny_model(embedded_model, tmp_path, monkeypatch):
    trainer = make_trainer(embedded_model, tmp_path / "tiny", **BATCH)
    draw_batch(trainer)
    assert trainer.packer.needs_check and not trainer.packer.packs
    monkeypatch.setattr(Cost, "pays", lambda self, mask, trie: True)
    trainer = make_trainer(embedded_model, tmp_path / "large", **BATCH)
    draw_batch(trainer)
    assert trainer.packer.packs


@pytest.mark.parametrize("mode", ["auto", "prefix"])
def test_rows_that_would_differ_stay_padded_with_a_warning(embedded_model, tmp_path, mode, monkeypatch, caplog):
    """A model whose attention is not the one that is packed."""
    from agile_trainers.packing import attention, packer

    monkeypatch.setattr(Cost, "pays", lambda self, mask, trie: True)
    right = attention.trie_attention
    monkeypatch.setattr(attention, "trie_attention", lambda q, k, v, trie, scale: right(q, k, v, trie, 2 * scale))
    warnings: list[str] = []
    monkeypatch.setattr(packer.logger, "warning", lambda text, *values: warnings.append(text % values))
    trainer = make_trainer(embedded_model, tmp_path, sequence_packing=mode, **BATCH)
    if mode == "prefix":
        with pytest.raises(ValueError, match="sequence_packing='prefix' does not fit"):
            draw_batch(trainer)
        return
    draw_batch(trainer)
    assert not trainer.packer.packs and "differ by" in warnings[0] and len(warnings) == 1


def test_a_router_loss_keeps_padded_rows(tmp_path, monkeypatch):
    """It is an average over all tokens, shared ones included; loss and gradient are those of TRL's own forward pass."""
    model, warnings = tmp_path / "model", []
    architectures.make_model("mixtral").save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    monkeypatch.setattr("agile_trainers.packing.packer.logger.warning", lambda text, *v: warnings.append(text % v))
    options = {"lora": False, "router_aux_loss_coef": 0.5, "num_iterations": 2, **BATCH}
    with pytest.raises(ValueError, match=r"sequence_packing='prefix'.*router"):
        make_trainer(model, tmp_path / "prefix", sequence_packing="prefix", **options)
    trainer = make_trainer(model, tmp_path, **options)
    assert len(warnings) == 1 and "router" in warnings[0] and trainer.aux_loss_enabled
    batch = draw_batch(trainer)
    assert not trainer.packer.packs and not trainer.packer.needs_check
    loss, gradients = loss_and_gradients(trainer, dict(batch))
    trainer.packer.reading = lambda model, *_: model
    trls, expected = loss_and_gradients(trainer, dict(batch))
    assert relative_error(gradients, expected) < 1e-5 and loss == pytest.approx(trls.item(), rel=1e-5)
    trainer.router_aux_loss_coef = 0.0
    without, _ = loss_and_gradients(trainer, dict(batch))
    assert loss - without > 0.1


@pytest.mark.slow
def test_packed_rows_of_many_shapes_are_not_compiled_for_each(embedded_model, tmp_path):
    """TorchDynamo captures graphs for the first shapes, with sizes that may vary, and none for later ones."""
    trainer = make_trainer(
        embedded_model, tmp_path, torch_compile=True, torch_compile_backend="eager", sequence_packing="prefix",
        max_steps=7, diagnosis_interval=0, max_logprob_gap=1e9, max_model_length=1024,
    )  # fmt: skip
    chance, graphs = random.Random(0), []
    for prompt, longest in [(40, 8), (60, 12), (90, 26), (35, 31), (120, 14), (77, 50), (200, 60)]:
        starts = [[chance.randrange(10, 90) for _ in range(prompt)] for _ in range(2)]
        episodes = [sampled(chance, starts[seed], longest - 2 * member, seed) for seed in (0, 1) for member in range(4)]
        trainer.update(episodes)
        assert trainer.packer.packs
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs[2:])) == 1, graphs


def sampled(chance: random.Random, prompt: list[int], length: int, seed: int) -> Trajectory:
    """An episode of one turn of arbitrary tokens."""
    tokens, turn = [chance.randrange(10, 90) for _ in range(length)], Turn(0, length, "", "length", chance.random(), "")
    return Trajectory(list(prompt), tokens, [0.0] * length, [turn], StopReason.TERMINATED, seed=seed)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"disable_dropout": False}, "dropout"), ({"sequence_packing": "some"}, "must be one of")],
)
def test_runs_that_cannot_be_packed_are_refused(embedded_model, tmp_path, options, reason):
    with pytest.raises(ValueError, match=f"sequence_packing.*{reason}"):
        make_trainer(embedded_model, tmp_path, lora={"lora_dropout": 0.1}, **{"sequence_packing": "prefix", **options})
