"""Fills TRL's table of completions with the episodes of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from agile_trainers.checkpoints.disclosure import masked
from agile_trainers.types import Message, Trajectory


@dataclass
class Evaluated:
    """The episodes and metrics of an evaluation."""

    trajectories: list[Trajectory]
    """Episodes of this process."""
    places: list[int]
    """Their indices among the episodes of all processes."""
    metrics: dict[str, float]
    """Metrics over all processes."""
    rewards: list[list[float]]
    """Rewards of this process, per episode and reward function; NaN without a reward."""
    columns: dict[str, list[Any]]
    """Columns that reward functions logged with ``log_extra``, of all processes."""


def shown_messages(trajectory: Trajectory) -> list[Message]:
    """Return what a table of completions shows of an episode: its conversation, and after it what was said beside it.

    The roles of the latter, such as discarded answers, begin with "aside" and a number.
    """
    return [
        *trajectory.messages,
        *(
            {**message, "role": f"aside {number}: {message['role']}"}
            for number, said in enumerate(trajectory.asides, 1)
            for message in said
        ),
    ]


@contextmanager
def completions_table(
    tables: dict[str, Any],
    played: Evaluated,
    names: Sequence[str],
    folder: Path,
    step: int,
    prefix: str,
    *,
    writes: bool,
) -> Iterator[None]:
    """Make TRL's ``log`` show and write the episodes of an evaluation; those of training are kept.

    TRL writes one file for each step. The training episodes of that step stay in it; the evaluation's go to a file of their
    own, whose name ends in ``prefix``.

    Args:
        tables: TRL's ``_logs``, which its ``log`` reads inside the context.
        played: The episodes. They have no advantages, which the table shows as NaN.
        names: Names of the reward functions.
        folder: ``output_dir``.
        step: Optimizer steps so far.
        prefix: Prefix of the evaluation's metrics.
        writes: True on the process that writes it.
    """
    prompts, completions, rewards = (
        masked(gather_object(part))
        for part in (
            [t.prompt for t in played.trajectories],
            [*map(shown_messages, played.trajectories)],
            played.rewards,
        )
    )
    path = folder / "completions" / f"completions_{step:05d}.parquet"
    aside, training = path.with_suffix(".training"), dict(tables)
    if writes and path.exists():
        path.rename(aside)
    tables.update(
        images=[],
        prompt=prompts,
        completion=completions,
        rewards={name: [row[place] for row in rewards] for place, name in enumerate(names)},
        advantages=[float("nan")] * len(prompts),
        extra=masked(played.columns),
    )
    try:
        yield
    finally:
        tables.update(training)
        if writes:
            if path.exists():
                path.rename(path.with_stem(f"{path.stem}_{prefix}"))
            if aside.exists():
                aside.rename(path)
