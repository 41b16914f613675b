"""`max_batch_kl` withholds the further updates of a batch that has moved the policy too far, and nothing else."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from checkpointed_runs import SAVING, assert_same, check_resumed, weights
from games import make_trainer
from transformers import TrainerCallback

from agile_trainers.step.loss import LossPass
from agile_trainers.step.movement import BatchBound
from agile_trainers.train_batch import TrainBatch

FOUR: dict[str, Any] = {
    "num_iterations": 4, "max_steps": 8, "learning_rate": 0.1, "optim": "adamw_torch", "weight_decay": 0.1,
    "lr_scheduler_type": "linear", "logging_steps": 1,
}  # fmt: skip
"""Steps that move far: two batches of four updates each."""


def a_pass(log_probs: list[list[float]], old: list[list[float]], counted: list[list[int]]) -> LossPass:
    mask = torch.tensor(counted)
    empty = torch.zeros_like(mask)
    batch = TrainBatch(
        *(empty,) * 3, mask, mask, empty, empty.float(), empty.float(), torch.tensor(1),
        old_per_token_logps=torch.tensor(old),
    )  # fmt: skip
    return LossPass(batch, {}, log_probs=torch.tensor(log_probs))


@pytest.mark.parametrize(("limit", "beyond"), [(0.2, False), (0.14, True)])
def test_the_divergence_by_hand(limit, beyond):
    """Ratios 2, 1/2 and 1 of three tokens; a fourth does not enter the loss, and a repeated pass counts once."""
    two = math.log(2.0)
    bound, layer = BatchBound(limit, Accelerator(cpu=True)), torch.nn.Linear(2, 1)
    layer(torch.ones(2)).sum().backward()
    bound.add(a_pass([[two - 1, -9.0]], [[-1.0, -1.0]], [[1, 0]]))
    put_back = bound.remember()
    bound.add(a_pass([[9.0]], [[0.0]], [[1]]))
    put_back()
    bound.add(a_pass([[-two, -3.0]], [[0.0, -3.0]], [[1, 1]]))
    measured = bound.withhold(layer)
    assert measured["batch_kl"] == pytest.approx((2 - 1 - two + 0.5 - 1 + two) / 3, abs=1e-6)
    assert measured["withheld_updates"] == beyond and (layer.weight.grad is None) == beyond
    assert bound.withhold(layer)["batch_kl"] == 0, "an update begins anew"


class States(TrainerCallback):
    """Keeps weights, the optimizer's state and the schedule after every step."""

    def attach(self, trainer: Any) -> Any:
        self.trainer, self.kept = trainer, [(weights(trainer), {}, 0)]
        trainer.add_callback(self)
        return trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = copy.deepcopy(self.trainer.optimizer.state_dict()["state"])
        self.kept.append((weights(self.trainer), optimizer, self.trainer.lr_scheduler.last_epoch))


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_a_bound_that_is_never_reached_changes_nothing(embedded_model, tmp_path):
    trained = {}
    for name, options in {"unset": {}, "far": {"max_batch_kl": 1e9}}.items():
        trained[name] = make_trainer(embedded_model, tmp_path / name, **FOUR, **options)
        trained[name].train()
    assert_same(weights(trained["far"]), weights(trained["unset"]))
    assert not any(logged(trained["far"], "withheld_updates")) and not logged(trained["unset"], "batch_kl")
    moved = logged(trained["far"], "batch_kl")
    assert len(moved) == 8 and moved[0] == moved[4] == 0 and min(moved[1:4]) > 0


@pytest.mark.parametrize("case", ["one", "accumulated", "turns", "whole"])
def test_a_batch_that_moved_too_far_gets_no_further_update(embedded_model, tmp_path, case):
    """Its weights and moments stay, weight decay included; the schedule goes on, and the next batch is trained on."""
    options: dict[str, Any] = {
        "one": {}, "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "turns": {"importance_sampling_level": "turn", "turn_ratio_pooling": "mean"}, "whole": {"lora": False},
    }[case]  # fmt: skip
    states = States()
    trainer = states.attach(make_trainer(embedded_model, tmp_path, max_batch_kl=1e-9, **FOUR, **options))
    trainer.train()
    assert trainer.state.global_step == 8
    assert logged(trainer, "withheld_updates") == [0, 1, 1, 1] * 2
    moved = logged(trainer, "batch_kl")
    assert moved[1] == moved[2] == moved[3] > 1e-9 == moved[0] + 1e-9
    for step, (before, after) in enumerate(zip(states.kept, states.kept[1:], strict=False)):
        same = all(torch.equal(before[0][name], after[0][name]) for name in before[0])
        assert same == (step % 4 > 0), step
        if step % 4:
            torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
        assert after[2] == step + 1


@pytest.mark.parametrize("kill", [2, 3, 5])
def test_a_run_that_is_killed_in_a_withheld_batch_resumes_to_the_bit(embedded_model, tmp_path, kill):
    def make(name: str, callbacks: Any = None) -> Any:
        settings = {**FOUR, **SAVING, "max_batch_kl": 1e-9}
        return make_trainer(embedded_model, tmp_path / name, callbacks=callbacks, **settings)

    whole, again = check_resumed(make, kill)
    assert logged(again, "withheld_updates") == logged(whole, "withheld_updates") == [0, 1, 1, 1] * 2
    assert logged(again, "batch_kl") == logged(whole, "batch_kl")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_batch_kl": 0.3, "num_iterations": 1}, "each batch is one update"),
        ({"max_batch_kl": 0.0}, "max_batch_kl must be"),
        ({"max_batch_kl": 0.3, "fp16": True, "use_cpu": False}, "scaler"),
    ],
)
def test_a_bound_without_effect_is_refused(embedded_model, tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        make_trainer(embedded_model, tmp_path, **{"num_iterations": 4, **options})
