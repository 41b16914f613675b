"""TRL's table of completions, filled with the episodes of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from agile_trainers.types import Trajectory


@dataclass
class Evaluated:
    """What an evaluation came to."""

    trajectories: list[Trajectory]
    """Of this process."""
    places: list[int]
    """Their places among those of all processes."""
    metrics: dict[str, float]
    """Of all processes."""
    rewards: list[list[float]]
    """Of this process: one per episode and reward function, NaN where there is none."""
    columns: dict[str, list[Any]]
    """Of all processes: what reward functions logged with ``log_extra``."""


@contextmanager
def completions_table(trainer: Any, played: Evaluated, prefix: str) -> Iterator[None]:
    """Have TRL's ``log`` show and write an evaluation's episodes; those of training are kept.

    TRL writes one file for each step. The training episodes of that step stay in it; the evaluation's go to a file of their
    own, whose name ends in ``prefix``.

    Args:
        trainer: Logs inside the context.
        played: The episodes. They have no advantages, which the table shows as NaN.
        prefix: Of the evaluation.
    """
    if not trainer.log_completions:
        yield
        return
    prompts, completions, rewards = (
        gather_object(part)
        for part in ([t.prompt for t in played.trajectories], [t.messages for t in played.trajectories], played.rewards)
    )
    shown = {
        "images": [],
        "prompt": prompts,
        "completion": completions,
        "rewards": {name: [row[place] for row in rewards] for place, name in enumerate(trainer.reward_func_names)},
        "advantages": [float("nan")] * len(prompts),
        "extra": played.columns,
    }
    path = Path(trainer.args.output_dir, "completions", f"completions_{trainer.state.global_step:05d}.parquet")
    aside = path.with_suffix(".training")
    writes, training = trainer.accelerator.is_main_process, trainer._logs
    if writes and path.exists():
        path.rename(aside)
    trainer._logs = shown
    try:
        yield
    finally:
        trainer._logs = training
        if writes:
            if path.exists():
                path.rename(path.with_stem(f"{path.stem}_{prefix}"))
            if aside.exists():
                aside.rename(path)
