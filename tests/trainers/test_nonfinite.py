"""A gradient that is not finite costs its step, never the run; weights that are not finite are never saved."""

from __future__ import annotations

import copy
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from checkpointed_runs import SAVING, assert_same, make, weights
from games import Chatter, make_trainer
from ppo_games import make_ppo
from safetensors.torch import load_file
from transformers import TrainerCallback

from agile_trainers import MultiTurnGRPOConfig
from agile_trainers.checkpoints.integrity import newest_complete
from agile_trainers.monitor.nonfinite import MOST_SKIPPED_IN_A_ROW, NonFiniteError
from agile_trainers.step.credit import TARGETS, Credit, CreditAssignment, CreditInputs, Judged

RUN = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2,
    "lr_scheduler_type": "linear", "weight_decay": 0.1, "steps_per_generation": 2, "num_iterations": 1,
}  # fmt: skip


class Poison(TrainerCallback):
    """Makes one gradient NaN or infinite in chosen steps, and keeps the whole state before and after every step."""

    def __init__(self, steps: tuple[int, ...], value: float = float("nan")):
        self.steps, self.value, self.step = steps, value, -1
        self.before: list[Any] = []
        self.after: list[Any] = []

    def attach(self, trainer: Any) -> Any:
        self.trainer = trainer
        parameter = next(p for p in trainer.model.parameters() if p.requires_grad)
        parameter.register_hook(lambda gradient: gradient * self.value if self.step in self.steps else gradient)
        trainer.add_callback(self)
        return trainer

    def state(self) -> Any:
        optimizer, schedule = self.trainer.optimizer.state_dict(), self.trainer.lr_scheduler.state_dict()
        return weights(self.trainer), copy.deepcopy(optimizer["state"]), dict(schedule)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.before.append(self.state())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after.append(self.state())


@pytest.mark.parametrize(
    ("case", "value", "clip"),
    [("grpo", nan, 0.0), ("grpo", inf, 0.0), ("ppo", inf, 1.0), ("whole-model", nan, 1.0)],
)
def test_a_step_without_a_finite_gradient_changes_nothing(embedded_model, tmp_path, case, value, clip):
    poison = Poison((0, 2), value)
    trainer = poison.attach(make(case, embedded_model, tmp_path, **{**RUN, "max_steps": 3, "max_grad_norm": clip}))
    trainer.train()
    assert trainer.state.global_step == 3
    for step, (before, after) in enumerate(zip(poison.before, poison.after, strict=True)):
        skipped = step in poison.steps
        same = [name for name in before[0] if torch.equal(before[0][name], after[0][name])]
        assert (len(same) == len(before[0])) == skipped, f"weights of step {step}"
        assert (before[2] == after[2]) == skipped, f"schedule of step {step}"
        if skipped:
            torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
    counts = [entry["skipped_steps"] for entry in trainer.state.log_history if "skipped_steps" in entry]
    assert counts == [1, 1, 2]


def test_too_many_in_a_row_end_the_run_and_leave_it_whole(embedded_model, tmp_path):
    """What is saved meanwhile is finite, the count is part of it, and the run goes on from it."""
    forever = Poison(tuple(range(1, 100)))
    trainer = forever.attach(make("grpo", embedded_model, tmp_path, **{**RUN, **SAVING, "max_steps": 20}))
    with pytest.raises(
        NonFiniteError, match=rf"{MOST_SKIPPED_IN_A_ROW} optimizer steps in a row, up to step 6.*learning_rate"
    ):
        trainer.train()
    newest, skipped = newest_complete(tmp_path)
    assert newest.name == "checkpoint-5" and skipped == []
    saved = load_file(newest / "adapter_model.safetensors")
    assert all(torch.isfinite(value).all() for value in saved.values())
    assert_same(saved, load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors"))

    again = Poison((5,)).attach(make("grpo", embedded_model, tmp_path, **{**RUN, "max_steps": 20}))
    with pytest.raises(NonFiniteError, match="up to step 6"):
        again.train(resume_from_checkpoint=True)
    healthy = make("grpo", embedded_model, tmp_path, **{**RUN, "max_steps": 6})
    healthy.train(resume_from_checkpoint=True)
    assert healthy.guard.skipped == 4 and healthy.guard.in_a_row == 0


class Break(TrainerCallback):
    """Makes a weight NaN after the second step, as an optimizer that overflows does."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            parameter = next(p for p in kwargs["model"].parameters() if p.requires_grad)
            parameter.data.flatten()[0] = float("nan")


@pytest.mark.parametrize("case", ["grpo", "whole-model"])
def test_weights_that_are_not_finite_are_not_saved(embedded_model, tmp_path, case):
    settings: dict[str, Any] = {**RUN, **SAVING, "max_steps": 4, "save_total_limit": 1}
    trainer = make(case, embedded_model, tmp_path, callbacks=[Break()], **settings)
    with pytest.raises(NonFiniteError, match=r"not finite at step 2 \(first: .*\); no checkpoint of them is saved"):
        trainer.train()
    assert newest_complete(tmp_path)[0].name == "checkpoint-1"
    assert [path.name for path in Path(tmp_path).glob("**/checkpoint-*")] == ["checkpoint-1"]


class Lottery(Chatter):
    """Chatter whose answers win or lose a fortune."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, 1e38 if reward > 0.5 else -1e38, *rest


class Refund(Chatter):
    """Chatter of two turns, of which the first loses what the second wins."""

    def step(self, action):
        observation, *_, info = super().step(action)
        return observation, -3e38 if self.turn == 1 else 3e38, self.turn == 2, False, info


@pytest.mark.parametrize("make_one", [make_ppo, partial(make_trainer, scale_rewards="none")], ids=["ppo", "grpo"])
def test_rewards_too_large_for_the_loss_are_named_before_it(embedded_model, tmp_path, make_one):
    """The critic's squared error, or the norm of the gradient, was infinite, and steps were skipped up to the error."""
    trainer = make_one(embedded_model, tmp_path, environment=Lottery)
    with pytest.raises(ValueError, match=r"turns reach 1e\+38 and (advantages|value_targets) .*Divide the rewards"):
        trainer.train()


def test_a_rules_own_columns_may_hold_anything(tmp_path):
    """Infinite numbers for turns that do not count, or no numbers: only what the loss squares is bounded."""
    mask = torch.tensor([[True, True], [True, False]])
    rewards, none = mask.float(), torch.zeros(2, dtype=torch.int64)
    turns = CreditInputs(rewards, mask, none.bool(), mask.long(), mask.long(), none)
    columns = {"seen": rewards > 0.5, "log_prior": torch.where(mask, 0.0, -inf), "place": mask.long()}
    judged = Judged(turns, Credit(rewards - 0.5, {}, columns), zero=torch.zeros(1, dtype=torch.bool))
    assign = CreditAssignment(
        lambda _: judged.credit,
        MultiTurnGRPOConfig(bf16=False, use_cpu=True, output_dir=str(tmp_path)),
        Accelerator(cpu=True),
    )
    assert assign.finish(judged).columns == columns
    columns[TARGETS] = rewards * 1e38
    with pytest.raises(ValueError, match="value_targets 1e"):
        assign.finish(judged)


def test_a_turns_reward_that_leaves_float32_is_named(embedded_model, tmp_path):
    """The last turn's 3e38 and a function's 3e38, where the episode has 3e38 in all."""

    def generous(completions, **_):
        return [3e38] * len(completions)

    trainer = make_trainer(embedded_model, tmp_path, environment=Refund, reward_funcs=generous)
    with pytest.raises(ValueError, match=r"reward of a turn, .* exceeds 3\.4e\+38"):
        trainer.train()
