"""Simulates when generation batches end, from the durations of their turns alone; ``ahead_clock.py`` compares with it.

Nothing of the library is used here. Durations are ``work[batch][episode][turn]``; a group is ``MEMBERS`` episodes in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import chain
from random import Random

Episode = Sequence[float]
Work = Sequence[Sequence[Episode]]

MEAN = 3.0
"""Mean length of an episode."""
TAILS = ("Pareto", "lognormal")
"""Distributions of lengths: ``Pareto`` with shape 1.5, whose variance is infinite; ``lognormal`` with sigma 1."""


def episodes(tail: str, seed: int) -> Iterator[list[float]]:
    """Draw episodes without end: heavy-tailed lengths, in equal turns of at most 1."""
    chance = Random(f"{tail} {seed}")
    while True:
        drawn = chance.paretovariate(1.5) if tail == "Pareto" else MEAN * chance.lognormvariate(-0.5, 1.0)
        turns = -int(-drawn // 1)
        yield [drawn / turns] * turns


def batches(source: Iterator[list[float]], count: int, size: int) -> list[list[list[float]]]:
    """Take some batches of episodes."""
    return [[next(source) for _ in range(size)] for _ in range(count)]


def recurrence(lengths: Sequence[Sequence[float]], ahead: int, slots: int, update: float) -> float:
    """Return when the last update ends, of episodes of one turn that play on during updates.

    Batch ``g`` begins when the update of batch ``g - ahead - 1`` has ended. An episode takes the slot that is free first, in
    the order of the episodes. The update of ``g`` starts when that of ``g - 1`` and the episodes of ``g`` have ended.
    """
    free = [0.0] * slots
    trained: list[float] = []
    for number, batch in enumerate(lengths):
        begin = trained[number - ahead - 1] if number > ahead else 0.0
        ends = []
        for length in batch:
            ends.append(max(free[0], begin) + length)
            heapreplace(free, ends[-1])
        trained.append(max(ends + trained[-1:]) + update)
    return trained[-1]


def makespan(
    work: Work, ahead: int, slots: int, update: float, *, plays_on: bool = True, most_open: int | None = None
) -> float:
    """Return when the last update ends, of episodes that ask for a slot again after each turn.

    Args:
        work: Durations; an episode without turns ends as it begins.
        ahead: A batch begins when the update of the batch ``ahead + 1`` places before it has ended.
        slots: Turns that are computed at once, first come first served.
        update: Duration of an update.
        plays_on: False: an update stops all turns; those under way begin again after it, in the order of the episodes.
        most_open: Batches that have begun and were not trained on yet, at most. Default: no limit of its own.
    """
    waiting: deque[tuple[int, int, int]] = deque()
    computing: list[tuple[float, int, int, int]] = []
    left = [sum(map(bool, batch)) for batch in work]
    now, begun, trained, update_ends = 0.0, 0, 0, float("inf")
    while True:
        while begun < len(work) and begun - trained <= ahead and (most_open is None or begun - trained < most_open):
            waiting.extend((begun, number, 0) for number, turns in enumerate(work[begun]) if turns)
            begun += 1
        while waiting and len(computing) < slots:
            batch, number, turn = waiting.popleft()
            heappush(computing, (now + work[batch][number][turn], batch, number, turn))
        if trained < begun and left[trained] == 0 and update_ends == float("inf"):
            update_ends = now + update
            if not plays_on:
                waiting = deque(sorted([*waiting, *(one[1:] for one in computing)]))
                computing = []
        if not computing or update_ends <= computing[0][0]:
            now, update_ends, trained = update_ends, float("inf"), trained + 1
            if trained == len(work):
                return now
            continue
        now, batch, number, turn = heappop(computing)
        if turn + 1 < len(work[batch][number]):
            waiting.append((batch, number, turn + 1))
        else:
            left[batch] -= 1


@dataclass
class Discarding:
    """The course of a run that trains on groups in the order in which they end."""

    makespan: float = 0.0
    started: list[float] = field(default_factory=list)
    """Length of each group that began: the mean of its episodes."""
    trained: list[float] = field(default_factory=list)
    discarded: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Share of the ended groups that were discarded."""
        return len(self.discarded) / (len(self.discarded) + len(self.trained))

    @property
    def bias(self) -> float:
        """Mean length of the groups that were trained on, over that of those that began."""
        return mean(self.trained) / mean(self.started)


def discarding(
    source: Iterator[list[float]], ahead: int, slots: int, update: float, *, updates: int, groups: int, members: int
) -> Discarding:
    """Simulate the rule that keeps all slots busy and discards what is too old.

    A group begins when a slot is free and nothing waits for it. Groups are trained on in the order in which they end, by
    updates of ``groups``; those whose policy is more than ``ahead`` updates old when they are taken are discarded.
    """
    result = Discarding()
    played: list[list[list[float]]] = []
    versions: list[int] = []
    left: list[int] = []
    waiting: deque[tuple[int, int, int]] = deque()
    computing: list[tuple[float, int, int, int]] = []
    ended: deque[int] = deque()
    taken: list[int] = []
    now, version, update_ends = 0.0, 0, float("inf")
    while version < updates:
        while len(computing) < slots:
            if not waiting:
                played.append([next(source) for _ in range(members)])
                result.started.append(length(played[-1]))
                versions.append(version)
                left.append(members)
                waiting.extend((len(played) - 1, member, 0) for member in range(members))
            group, member, turn = waiting.popleft()
            heappush(computing, (now + played[group][member][turn], group, member, turn))
        if update_ends == float("inf"):
            while ended and len(taken) < groups:
                group = ended.popleft()
                if version - versions[group] > ahead:
                    result.discarded.append(length(played[group]))
                else:
                    taken.append(group)
            if len(taken) == groups:
                result.trained += [length(played[group]) for group in taken]
                taken, update_ends = [], now + update
        if update_ends <= computing[0][0]:
            now, update_ends, version = update_ends, float("inf"), version + 1
            continue
        now, group, member, turn = heappop(computing)
        if turn + 1 < len(played[group][member]):
            waiting.append((group, member, turn + 1))
        else:
            left[group] -= 1
            if left[group] == 0:
                ended.append(group)
    result.makespan = now
    return result


def length(group: Sequence[Episode]) -> float:
    """Return the mean length of a group's episodes."""
    return sum(chain.from_iterable(group)) / len(group)


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)
