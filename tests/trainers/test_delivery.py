"""The policy that samples is the one that was moved to the sampler; what goes wrong on the way is named at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from games import make_trainer
from planted_deliveries import CAUSES, plant, suspect_every_batch
from quick import bf16_products

from agile_trainers.sampling.delivery import Delivery
from agile_trainers.sampling.mismatch import SamplerMismatchError
from agile_trainers.trainers.trainer import MultiTurnTrainer

MEAN = "sampling/sampling_logp_difference/mean"
PLAYS: dict[str, Any] = {"max_new_tokens": 12, "stop_strings": None, "max_steps": 3}
BF16 = {"bf16": True, "learning_rate": 1.0}
WARM = {"init_lora_weights": False}
"""An adapter that is not zero at its start: the base is another policy."""


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(autouse=True)
def _quick_products() -> Iterator[None]:
    with bf16_products():
        yield


def logs(trainer: MultiTurnTrainer) -> list[float]:
    return [entry[MEAN] for entry in trainer.state.log_history if MEAN in entry]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=f"{name}-loss") for name in CAUSES),
        # Whatever the cause, log-probabilities come from a pass of their own, or are rounded, or both.
        pytest.param("a part", {"num_iterations": 2}, id="a part-scored"),
        pytest.param("a layer", BF16, id="a layer-bf16"),
        pytest.param("late", {"num_iterations": 2, **BF16}, id="late-scored-bf16"),
    ],
)
def test_a_delivery_that_fails_is_named_at_its_first_batch(
    embedded_model: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Before an update; a late policy is the right one in the first batch."""
    trainer = make_trainer(embedded_model, tmp_path, lora=WARM, **{**PLAYS, **options})
    plant(trainer, name)
    with pytest.raises(SamplerMismatchError) as failure:
        trainer.train()
    first = trainer.num_iterations if name == "late" else 0
    assert trainer.state.global_step == first and len(logs(trainer)) == min(first, 1)
    said = re.fullmatch(
        f"The sampler plays another policy than the one that is trained: ({CAUSES[name]}[^.]*)[.] It differs by (\\S+) nats "
        "a token from the trainer, and by (\\S+) from that[.] See docs/rollouts.md[.]",
        str(failure.value),
    )
    assert said and " or " not in said[1].replace("late, or", "")
    assert float(said[3]) < (0.1 if "bf16" in options else 1e-3) * float(said[2])


@pytest.mark.parametrize("name", ["late", "not arrived"])
def test_a_snapshot_that_plays_in_place_of_another(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With batches ahead, the policy that should have played is not the one that is trained by now."""
    trainer = make_trainer(embedded_model, tmp_path, lora=WARM, batches_ahead=1, **{**PLAYS, "max_steps": 5})
    ahead, snapshots = trainer.rollouts.ahead, trainer.batches.snapshots
    assert ahead is not None and snapshots is not None
    holding = ahead._holding
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def another(version: int) -> Any:
        kept.update(snapshots.weights)
        if version < 2 or name == "not arrived":
            return holding(version) if name == "late" else trainer.use_adapter(None)
        monkeypatch.setitem(snapshots.weights, -1, kept[version - 1])
        return snapshots.holding(-1)

    ahead._versions = type(ahead._versions)(ahead._version.__getitem__, ahead._playing, another)
    with pytest.raises(SamplerMismatchError, match=CAUSES[name]):
        trainer.train()
    assert trainer.state.global_step == (3 if name == "late" else 0)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"learning_rate": 1e-3, "model_init_kwargs": {"dtype": "bfloat16"}},
        {"batches_ahead": 1}, {"top_k": 10, "num_iterations": 2, "max_steps": 3},
    ],
    ids=str,
)  # fmt: skip
def test_no_healthy_run_is_stopped(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """In bf16 too, where a difference of rounding is nearer to no other policy."""
    left = suspect_every_batch(monkeypatch)
    trainer = make_trainer(
        embedded_model, tmp_path, lora=WARM, **{**PLAYS, **BF16, "max_turns": 2, "max_steps": 2, **changes}
    )
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps and len(left) > 5
    assert min(left) > 0.9


def test_nothing_is_computed_where_sampler_and_trainer_agree(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 never; in bf16 at the first batch. Weights that hardly move are rounded as before, on every processor."""
    looked, find = [], Delivery.find
    # A mean over a thousand tokens, of short episodes.
    rounded = {**BF16, "learning_rate": 1e-4, "max_new_tokens": 32, "max_turns": 1, "per_device_train_batch_size": 32}
    monkeypatch.setattr(Delivery, "find", lambda *given, **known: (looked.append(known), find(*given, **known))[1])
    for options, expected in (({}, []), (rounded, [{"exact": False, "thorough": False}])):
        make_trainer(
            embedded_model, tmp_path / str(len(options)), lora=WARM, **{**PLAYS, "max_steps": 2, **options}
        ).train()
        assert looked == expected


def test_a_cause_that_is_known_stops_a_resumed_run(embedded_model: Path, tmp_path: Path) -> None:
    """Other mismatches only warn there."""
    saved = {**PLAYS, "save_strategy": "steps", "save_steps": 1}
    make_trainer(embedded_model, tmp_path, lora=WARM, **{**saved, "max_steps": 1}).train()
    trainer = make_trainer(embedded_model, tmp_path, lora=WARM, **saved)
    plant(trainer, "not arrived")
    with pytest.raises(SamplerMismatchError, match=CAUSES["not arrived"]):
        trainer.train(resume_from_checkpoint=True)


def test_a_wider_bound_lets_another_policy_play(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, lora=WARM, max_logprob_gap=20.0, **PLAYS)
    plant(trainer, "not arrived")
    trainer.train()
    assert min(logs(trainer)) > 0.1


def test_a_model_that_is_trained_whole_is_not_searched(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, lora=False, max_logprob_gap=1e-9)
    with pytest.raises(SamplerMismatchError, match="max_logprob_gap=1e-09"):
        trainer.train()
