"""Keeps the successes of a run, and puts them into groups that have none (``replay_successes``)."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from agile_trainers.records.plain import DEEPEST_MESSAGE, LARGEST, Plain, content_digest
from agile_trainers.train_batch import own_rows
from agile_trainers.types import StopReason, Trajectory, Turn

_NUMBERS = ("prompt_ids", "completion_ids", "sampling_logprobs", "paths")
"""Fields of an episode that are JSON as they are; to walk through them takes as long as the rest."""


class Told(NamedTuple):
    """Start and worth of an episode, which all processes compare."""

    start: str
    """Digest of the environment and the row that it started from."""
    worth: float
    """Infinite for a success and minus infinite for a failure; the reward where the environment does not report success."""
    reward: float
    """NaN where nothing rewards it; it is then neither kept nor compared."""


@dataclass
class Kept:
    """An episode that may take a place in a group."""

    worth: float
    rewards: list[float]
    """(F,), of the reward functions."""
    episode: str
    """The trajectory as JSON: a fifth of the memory of Python's numbers."""


@dataclass
class Taken:
    """The places that successes take in a generation batch."""

    episodes: dict[int, Trajectory]
    """Successes that take places of this process, by place in it."""
    rewards: dict[int, list[float]]
    """Rewards (F,) of the successes of all processes, by place among all."""


class Successes:
    """The latest success from each start: an environment and a row of the data set.

    Where all members of a group fail and no turn of any has an advantage, so that nothing would be learned from them, the
    success that is kept from their start takes the place of the last one. It is trained on as a demonstration with known
    log-probabilities (:mod:`agile_trainers.objectives.demonstrations`). Where the environment does not report success, the
    best return counts as one.

    Args:
        count: Number of starts. Beyond it, the one that succeeded least recently leaves.
        members: Members of a group.
        accelerator: The trainer's. All processes keep the same.
    """

    def __init__(self, count: int, members: int, accelerator: Accelerator) -> None:
        self._count, self._members, self._accelerator = count, members, accelerator
        self._kept: dict[str, Kept] = {}
        """By start, the latest last."""

    def exchange(
        self, trajectories: Sequence[Trajectory], rewards: torch.Tensor, totals: torch.Tensor, zero: Sequence[bool]
    ) -> tuple[Taken, dict[str, float]]:
        """Find what takes places in a generation batch, and keep the batch's own successes for later ones.

        Args:
            trajectories: The episodes of this process.
            rewards: (B, F), of all processes.
            totals: (B,), the reward of each episode; NaN where nothing rewards it.
            zero: Whether each group, of all processes, is a zero-advantage group.

        Returns:
            The places, and the metrics ``replay/groups``, the share of groups that get a success, and ``replay/kept``.
        """
        own = own_rows(self._accelerator, len(trajectories))
        here, numbers = range(own.start, own.stop), totals[own].tolist()
        told = gather_object([_told(one, total) for one, total in zip(trajectories, numbers, strict=True)])
        taking, best = self._compare([Told(*one) for one in told], zero)
        taken = Taken(
            {
                place - own.start: kept_episode(self._kept[start].episode)
                for place, start in taking.items()
                if place in here
            },
            {place: self._kept[start].rewards for place, start in taking.items()},
        )
        fresh = [
            (
                told[place][0],
                Kept(told[place][1], rewards[place].tolist(), episode_json(trajectories[place - own.start])),
            )
            for place in best
            if place in here
        ]
        for start, kept in gather_object(fresh):
            self._kept.pop(start, None)
            self._kept[start] = kept
        for start in list(self._kept)[: -self._count]:
            del self._kept[start]
        groups = len(told) // self._members
        return taken, {"replay/groups": len(taking) / groups, "replay/kept": float(len(self._kept))}

    def _compare(self, told: Sequence[Told], zero: Sequence[bool]) -> tuple[dict[int, str], list[int]]:
        """Return the start whose success takes each place, and the places of episodes to keep, one of a group at most."""
        taking, best = dict[int, str](), list[int]()
        for first in range(0, len(told), self._members):
            group = told[first : first + self._members]
            start = group[0].start
            places = [place for place, one in enumerate(group, first) if not isnan(one.reward)]
            chosen = max(places, key=lambda place: told[place][1:], default=None)
            worth = -inf if chosen is None else told[chosen].worth
            if start in self._kept and self._kept[start].worth > worth:
                if zero[first // self._members]:
                    taking[first + len(group) - 1] = start
            elif chosen is not None and worth > -inf:
                best.append(chosen)
        return taking, best

    # ---------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Return what is kept, as JSON."""
        kept = ((start, vars(one)) for start, one in self._kept.items())
        return {
            start: one | {"worth": _written(one["worth"]), "rewards": [*map(_written, one["rewards"])]}
            for start, one in kept
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`.

        Raises:
            ValueError: If an episode in it cannot be read.
        """
        for one in state.values():
            kept_episode(one["episode"])
        self._kept = {
            start: Kept(_number(one["worth"], inf), [_number(reward, nan) for reward in one["rewards"]], one["episode"])
            for start, one in state.items()
        }


def _told(trajectory: Trajectory, total: float) -> Told:
    start = content_digest([trajectory.environment_name, trajectory.options], trajectory.seed)
    success = trajectory.success
    worth = total if success is None else inf if success else -inf
    return Told(start, worth, total)


def _written(number: float) -> float | None:
    """Return a number as JSON knows it."""
    return number if isfinite(number) else None


def _number(value: float | None, missing: float) -> float:
    return missing if value is None else value


def episode_json(trajectory: Trajectory) -> str:
    """Return an episode as JSON, without its instance of the environment."""
    plain = Plain(1 << 62, DEEPEST_MESSAGE + 3)  # a message is in the list of an observation, of a turn, of all turns
    fields = vars(trajectory) | {"environment": None, "read_again": None, "pictures": None}
    fields["reset_info"] = Plain(LARGEST)(trajectory.reset_info)  # which may be larger than any memory
    fields["turns"] = [vars(turn) | {"info": Plain(LARGEST)(turn.info)} for turn in trajectory.turns]
    if trajectory.kept is not None:
        fields["kept"] = [b64encode(kept).decode() for kept in trajectory.kept]
    return json.dumps({name: value if name in _NUMBERS else plain(value) for name, value in fields.items()})


def kept_episode(text: str) -> Trajectory:
    """Return the episode that :func:`episode_json` wrote, as a demonstration.

    Raises:
        ValueError: If it is none.
    """
    try:
        fields = json.loads(text)
        turns = [Turn(**turn) for turn in fields.pop("turns")]
        kept, reason = fields.pop("kept"), StopReason(fields.pop("stop_reason"))
        sets = None if kept is None else [b64decode(one) for one in kept]
        return Trajectory(**{**fields, "turns": turns, "stop_reason": reason, "kept": sets, "demonstration": True})
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no episode: {type(error).__name__}: {error}") from error
