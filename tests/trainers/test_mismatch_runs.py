"""Training-inference mismatch: by hand, where it is measured, and what is done about one that is too large."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from games import make_trainer, settings
from transformers import TrainerCallback

from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.sampling.mismatch import Conditions, Mismatch, MismatchMeter, SamplerMismatchError, explain
from agile_trainers.sampling.sampler import _multiplies_in_tf32
from agile_trainers.trainers import MultiTurnGRPOConfig
from agile_trainers.trainers.trainer import MultiTurnTrainer

MEAN, MAX = (f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))
SCORED = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 2}
"""The old policy is scored: a batch is split into two updates."""
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
PATHS = {
    "loss": {},
    "loss-micro-batches": ACCUMULATED,
    "loss-iterations": {**ACCUMULATED, "num_iterations": 2, "max_steps": 2},
    "loss-two-batches": {
        **ACCUMULATED, "gradient_accumulation_steps": 4, "steps_per_generation": 2,
        "train_dataset": Dataset.from_dict({"number": list(range(8))}),
    },
    "loss-turns": {**ACCUMULATED, "importance_sampling_level": "turn", "turn_ratio_pooling": "sum"},
    "scored": SCORED,
    "scored-penalty": {"beta": 0.1, "kl_placement": "reward"},
}  # fmt: skip


def logs(trainer: MultiTurnTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer: MultiTurnTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def be_noisy(trainer: MultiTurnTrainer, scale: float = 0.5) -> None:
    """Noise that is no dropout module, as of a router with jitter: on in training, off while sampling."""

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + scale * torch.randn_like(output) if module.training else output

    trainer.accelerator.unwrap_model(trainer.model).get_base_model().model.norm.register_forward_hook(hook)


# -------------------------------------------------------------------------------------------------------------- by hand


def test_two_forward_passes_by_hand() -> None:
    meter = MismatchMeter(Accelerator(cpu=True))
    sampled = torch.tensor([[-1.0, -2.0, 0.0, -3.0], [-1.0, -1.0, 0.0, 0.0]])
    ours = torch.tensor([[-1.5, -2.0, 9.0, -2.0], [-1.25, float("nan"), 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool()
    turn_ids = torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1]])
    meter.open()
    meter.add(ours, sampled, mask, turn_ids, torch.tensor([False, True]))
    meter.add(ours[:1], sampled[:1] - 1.0, mask[:1], turn_ids[:1], torch.tensor([True]))
    mismatch = meter.read()
    # .5, 0 and 1 in a full row, .25 in a padded one; then .5, 1 and 2 in a padded one.
    assert mismatch is not None and mismatch.tokens == 7
    expected = Mismatch(
        5.25 / 7, 2.0, 7, full_rows=1.5 / 3, padded_rows=3.75 / 4, first_turns=2.25 / 5, later_turns=3.0 / 2
    )
    assert vars(mismatch) == pytest.approx(vars(expected))
    assert not meter.is_open
    meter.open()
    meter.add(ours, sampled, mask & False, turn_ids, torch.tensor([False, True]))
    assert meter.read() is None


@pytest.mark.parametrize("value", [float("nan"), -math.inf])
def test_a_log_prob_that_is_no_number_is_within_no_bound(value: float) -> None:
    meter = MismatchMeter(Accelerator(cpu=True))
    meter.open()
    ones = torch.ones(1, 1, dtype=torch.bool)
    meter.add(torch.tensor([[value]]), torch.tensor([[-1.0]]), ones, torch.zeros(1, 1, dtype=torch.long), ones[0])
    mismatch = meter.read()
    assert mismatch is not None and not mismatch.maximum <= 1e9 and not mismatch.mean <= 1e9


USUAL: dict[str, Any] = {
    "settings": SamplingSettings(), "scored_at": 1.0, "sampler": torch.float32, "trainer": torch.float32,
    "model_type": "qwen3",
}  # fmt: skip
EVEN = {"full_rows": 0.25, "padded_rows": 0.25, "first_turns": 0.25, "later_turns": 0.25}
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "parts", "first", "cause", "exact"),
    [
        ({"scored_at": 0.5}, {}, 0.3, "sampled at temperature 1.0 and scored at temperature 0.5", True),
        ({"settings": SamplingSettings(top_p=0.9, min_new_tokens=2)}, {}, 0.3, "qwen3) adds noise in training", True),
        (
            {"settings": SamplingSettings(repetition_penalty=1.5)}, {}, 0.3,
            "vllm_importance_sampling_correction=True makes up for repetition_penalty=1.5", False,
        ),
        ({"dropout": True}, {}, 0.3, "disable_dropout=False", False),
        ({"vllm": True}, {}, 0.01, "the engine seems to serve a stale adapter", True),
        ({}, {}, 0.01, "the first batch agreed", True),
        ({"sampler": BF16}, {}, 0.3, "the sampler computes in torch.bfloat16", False),
        ({"sampler": BF16, "trainer": BF16}, {}, 0.01, "both compute in torch.bfloat16", False),
        ({"quantized": True}, {}, 0.3, "the base is quantized", False),
        ({"tf32": True}, {}, 0.3, "rounded to TF32", False),
        ({"vllm": True}, {}, 0.3, "the base model in memory is not the one in its folder", True),
        ({}, {"full_rows": 0.0}, 0.3, "only rows with left padding differ", True),
        ({}, {"first_turns": 0.0}, 0.3, "only turns after the first differ", True),
        ({}, {}, 0.3, "qwen3) adds noise in training", True),
    ],
)  # fmt: skip
def test_the_likely_cause(
    changes: dict[str, Any], parts: dict[str, float], first: float, cause: str, exact: bool
) -> None:
    conditions = Conditions(**{**USUAL, **changes})
    text = explain(Mismatch(0.25, 1.0, 9, **{**EVEN, **parts}), 0.1, conditions, first)
    assert cause in text and "0.25 nats a token (at most 1), more than max_logprob_gap=0.1" in text
    assert conditions.exact == exact


# ------------------------------------------------------------------------------------------------------ where it is read


@pytest.mark.parametrize("path", PATHS)
def test_every_batch_is_compared_once(embedded_model: Path, tmp_path: Path, path: str) -> None:
    trainer = make_trainer(embedded_model, tmp_path, **PATHS[path])
    close, steps = trainer.mismatch.close, []
    trainer.mismatch.close = lambda **known: (steps.append(trainer.state.global_step), close(**known))[1]  # type: ignore
    trainer.train()
    assert steps == [0, 0] if path == "loss-two-batches" else steps == [0]
    assert logs(trainer, MEAN) and 0 <= max(logs(trainer, MEAN)) < 1e-5
    assert max(logs(trainer, MEAN)) <= max(logs(trainer, MAX)) < 1e-4


@pytest.mark.parametrize("path", PATHS)
def test_a_trainer_that_computes_something_else_stops_before_the_first_update(
    embedded_model: Path, tmp_path: Path, path: str
) -> None:
    trainer = make_trainer(embedded_model, tmp_path, **PATHS[path])
    be_noisy(trainer)
    before = weights(trainer)
    with pytest.raises(SamplerMismatchError, match=r"max_logprob_gap=0\.001.*adds noise in training"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_ppo_compares_too(embedded_model: Path, tmp_path: Path) -> None:
    from ppo_games import make_ppo

    trainer = make_ppo(embedded_model, tmp_path / "quiet", max_steps=1)
    trainer.train()
    assert logs(trainer, MEAN)[0] < 1e-5
    trainer = make_ppo(embedded_model, tmp_path / "noisy", max_steps=1)
    be_noisy(trainer)
    with pytest.raises(SamplerMismatchError):
        trainer.train()


# ------------------------------------------------------------------------------------------------- what is done about it


def test_the_bound_is_the_users_to_move(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, max_logprob_gap=1e-9)
    with pytest.raises(SamplerMismatchError, match="max_logprob_gap=1e-09"):
        trainer.train()
    trainer = make_trainer(embedded_model, tmp_path, max_logprob_gap=9.0)
    be_noisy(trainer)
    trainer.train()
    assert logs(trainer, MEAN)[0] > 1e-2


def test_what_changes_the_distribution_only_warns(
    embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(embedded_model, tmp_path, max_logprob_gap=1e-3, repetition_penalty=1.5)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "repetition_penalty=1.5 changes" in caplog.text
    assert logs(trainer, MEAN)[0] > 1e-3


class Cool(TrainerCallback):
    """From some step on, samples at another temperature than the trainer scores at."""

    def __init__(self, step: int, temperature: float = 0.5) -> None:
        self.step, self.temperature = step, temperature

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            args.temperature = self.temperature


def test_after_a_first_batch_that_agreed_a_mismatch_warns_once(
    embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(embedded_model, tmp_path, max_steps=3, callbacks=[Cool(1)])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count("sampled at temperature 0.5 and scored at temperature 1.0") == 1
    mismatches = logs(trainer, MEAN)
    assert mismatches[0] < 1e-5 and min(mismatches[1:]) > 1e-2


def shift_the_samplers(trainer: MultiTurnTrainer, unread: bool) -> list[int]:
    """Let the sampler's log-probs be wrong in rows without an advantage above .9, or in the others; count the former."""
    credit, measure = trainer.batches.assign, trainer._open_mismatch
    advantages: list[torch.Tensor] = []
    count: list[int] = []

    def remember(*given: Any) -> Any:
        judged, assigned = credit(*given)
        advantages.append(assigned.advantages)
        return judged, assigned

    def shifted(batch: Any, scores: Any, trained: torch.Tensor) -> None:
        rows = (advantages[-1].abs() <= 0.9).all(dim=1)
        count.append(int(rows.sum()))
        batch.sampling_logprobs[rows == unread] -= 1.0  # in place: the training batch holds the same tensor
        measure(batch, scores, trained)

    trainer.batches.assign = remember  # type: ignore[method-assign]
    trainer._open_mismatch = shifted  # type: ignore[method-assign]
    return count


def test_a_resumed_run_warns(embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It got past its first batch, and must not be stopped by a mismatch that only warned before."""
    changes = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(embedded_model, tmp_path, max_steps=1, **changes).train()
    trainer = make_trainer(embedded_model, tmp_path, max_steps=2, **changes)
    be_noisy(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert "more than max_logprob_gap=0.001" in caplog.text and trainer.state.global_step == 2


@pytest.mark.parametrize("changes", [{}, SCORED], ids=["loss", "scored"])
def test_rows_that_are_not_read_do_not_count(embedded_model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {"skip_zero_advantage": True, "zero_advantage_eps": 0.9, "seed": 5, **changes}
    trainer = make_trainer(embedded_model, tmp_path, **changes)
    left_out = shift_the_samplers(trainer, unread=True)
    trainer.train()
    assert 0 < left_out[0] < 8 and logs(trainer, MEAN)[0] < 1e-5
    trainer = make_trainer(embedded_model, tmp_path, **changes)
    shift_the_samplers(trainer, unread=False)
    with pytest.raises(SamplerMismatchError):
        trainer.train()


def test_dropout_that_was_asked_for_is_no_error(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, disable_dropout=False)
    be_noisy(trainer, 0.2)
    trainer.train()
    assert logs(trainer, MEAN)[0] > 1e-3


@pytest.mark.parametrize(
    ("changes", "exact"),
    [({}, True), ({"top_k": 5}, True), ({"repetition_penalty": 1.1}, False), ({"bf16": True}, False)],
)
def test_what_is_compared_exactly(embedded_model: Path, tmp_path: Path, changes: dict[str, Any], exact: bool) -> None:
    assert make_trainer(embedded_model, tmp_path, **changes).sampler.conditions().exact == exact


def test_tf32_is_seen() -> None:
    assert not _multiplies_in_tf32()
    torch.set_float32_matmul_precision("high")
    try:
        assert _multiplies_in_tf32()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not _multiplies_in_tf32()


def test_max_logprob_gap_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_logprob_gap.* 0"):
        MultiTurnGRPOConfig(**settings(tmp_path, max_logprob_gap=0))
    with pytest.raises(ValueError, match="max_logprob_gap"):
        MultiTurnGRPOConfig(output_dir=str(tmp_path), bf16=False, max_logprob_gap=0.2).without_environment()
