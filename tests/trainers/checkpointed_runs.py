"""Runs that are saved, killed and resumed, for the tests of checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from games import Chatter, Long, Uneven, make_trainer
from ppo_games import make_ppo
from transformers import TrainerCallback

SAVING = {"save_strategy": "steps", "save_steps": 1}


class Told(Chatter):
    """Chatter whose length and reward a dataset row decides, so that the order of the rows matters."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        observation = super().reset((seed or 0) + options["number"])
        self.length = 1 + options["number"] % 3
        return observation

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return observation, reward * self.length, *rest


class Falling(Chatter):
    """Pays less with each step of the run, so that the first evaluation is the best."""

    penalty = 0.0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return observation, reward - Falling.penalty, *rest


class Falls(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Falling.penalty = float(state.global_step)

    on_step_end = on_train_begin


BEST: dict[str, Any] = {
    "environment": Falling, "eval_strategy": "steps", "eval_steps": 1, "num_eval_episodes": 2,
    "load_best_model_at_end": True, "save_total_limit": 1, **SAVING,
}  # fmt: skip
"""Options of a run that ends with the policy of its first evaluation."""


CASES: dict[str, dict[str, Any]] = {
    # A generation batch serves four optimizer steps: two passes over four micro-batches, two at a time.
    "grpo": {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
        "max_steps": 5, "beta": 0.1, "reference_adapter": True, "use_adaptive_entropy": True,
        "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0,
        "optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "diagnosis_interval": 2,
    },
    # Shuffled rows over more than one epoch of four steps; a generation batch serves two steps.
    "reinforce": {
        "algorithm": "reinforce", "num_generations": 1, "per_device_train_batch_size": 4, "steps_per_generation": 2,
        "max_steps": 5, "environment": Told, "train_dataset": Dataset.from_dict({"number": list(range(16))}),
        "optim": "adamw_torch", "learning_rate": 1e-2,
    },
    "ppo": {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 3,
        "critic_learning_rate": 2e-2, "beta": 0.1, "optim": "adamw_torch", "learning_rate": 1e-2, "diagnosis_interval": 50,
    },
    # What is drawn depends on which groups were informative so far; a generation batch serves two steps.
    "tasks": {
        "num_generations": 2, "per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 3,
        "environment": Uneven, "train_dataset": Dataset.from_dict({"number": list(range(6))}), "task_column": "number",
        "task_sampling": "adaptive", "resample_zero_advantage_groups": 1,
    },
    # Contexts are rewritten, with questions; a batch has episodes of one path and of several.
    "rewritten": {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2,
        "environment": Long, "history": "games:takes_notes", "max_turns": 6, "optim": "adamw_torch", "learning_rate": 1e-2,
    },
    "whole-model": {
        "lora": False, "per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 3, "beta": 0.1,
        "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0,
    },
}  # fmt: skip


def make(case: str, model: Path, folder: Path, **changes: Any) -> Any:
    settings = {**CASES[case], **changes}
    return make_ppo(model, folder, **settings) if case == "ppo" else make_trainer(model, folder, **settings)


class Killed(BaseException):
    """What nothing in the trainer expects."""


class KillBefore(TrainerCallback):
    """Ends the run as its next step begins, so that only what was saved before is left."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def run_until(step: int, case: str, model: Path, folder: Path, *, resume: Any = None, **changes: Any) -> Any:
    """Train and be killed after ``step`` steps, unless the run is over by then. Saved is what a resume needs: that step."""
    last = {**CASES[case], **changes}["max_steps"]
    saving = {**SAVING, "save_steps": step} if step <= last else {}
    trainer = make(case, model, folder, callbacks=[KillBefore(step)], **{**saving, **changes})
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Killed:
        trainer.engine.pool.close()
    return trainer


class SaveOnce(TrainerCallback):
    """Saves after one step, and not at the end."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.step


def check_resumed(make: Callable[..., Any], step: int) -> tuple[Any, Any]:
    """Train whole, and go on from what was saved after a step, as if killed then: the same weights, to the bit.

    Args:
        make: Makes a trainer that saves nothing, given a name for its folder, and further options.
        step: The last one before the kill.

    Returns:
        The trainers of the whole run and of the resumed one.
    """
    whole = make("whole", callbacks=[SaveOnce(step)], **SAVING)
    whole.train()
    again = make("run")
    again.train(resume_from_checkpoint=str(Path(whole.args.output_dir, f"checkpoint-{step}")))
    assert_same(weights(again), weights(whole))
    return whole, again


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Everything that is trained, and the reference."""
    found = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad or ".ref." in n}
    if trainer.ref_model is not None:
        found |= {f"reference.{n}": p.detach().clone() for n, p in trainer.ref_model.named_parameters()}
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys() and left
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def press_ctrl_c() -> None:
    """Interrupt this thread, and return when the handler has run: no interrupt comes late, no two become one."""
    signal.raise_signal(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ())  # runs the handlers of what has arrived
