"""The lineage of a population: what happened to which member, as ``lineage.json`` keeps it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agile_trainers.adapters.folders import form_of, read_form, write_json
from agile_trainers.checkpoints.disclosure import public_path
from agile_trainers.populations.hyperparameters import Changes, Values

FILE = "lineage.json"
EventKind = Literal["born", "trained", "failed", "kept", "mutated", "stopped"]


@dataclass(frozen=True)
class LineageEvent:
    """One event in the life of a member."""

    round: int
    """The round that it ended; 0 before the first."""
    member: int
    """Its number, which no other member ever gets. A copy is a member of its own."""
    event: EventKind
    hyperparameters: Values
    """The values it trains under from now on; with ``trained``, ``failed`` and ``stopped``, until now."""
    parent: int | None = None
    """The member whose weights and optimizer it copied, with ``born``; None for one that starts anew."""
    changes: Changes = field(default_factory=dict)
    """Option name to the values before and after, with ``born`` and ``mutated``."""
    steps: int = 0
    """Optimizer steps of its weights, its parent's included."""
    episodes: int = 0
    """Training episodes of its weights, its parent's included."""
    fitness: float | None = None
    """The mean over the evaluation episodes, which are the same for all members, with ``trained``."""
    standard_error: float | None = None
    """The standard error of the fitness; None with fewer than two independent episodes."""
    failed_episodes: int = 0
    """Evaluation episodes whose environment failed; they count in the fitness, with ``trained``."""
    unreported_episodes: int = 0
    """Evaluation episodes that report no success although others do; they count as unsuccessful, with ``trained``."""
    seconds: float = 0.0
    """Seconds of training and evaluation, with ``trained`` and ``failed``."""
    reason: str = ""
    """The error of a failure, or the paired difference that selection went by."""


@dataclass(frozen=True)
class Round:
    """A round: all members were trained and evaluated, and selection followed."""

    number: int
    """1 for the first."""
    trained: list[LineageEvent]
    """``trained`` and ``failed`` of its members, the best first, failed ones last."""
    decided: list[LineageEvent]
    """``kept``, ``mutated``, ``stopped`` and ``born``, by selection; empty after the last round."""
    episodes: int
    """Training episodes of all members, all rounds until now."""
    seconds: float
    """Seconds of all members, all rounds until now."""
    replayed: bool
    """True if its results were read from disk, not trained in this call."""
    rounds: int
    """Planned number of rounds."""


@dataclass(frozen=True)
class HeldOut:
    """The best policy of all rounds, on episodes that no member was evaluated on."""

    member: int
    """Its member."""
    round: int
    """The round that it is of."""
    fitness: float | None
    """The mean over the episodes; None if all failed."""
    standard_error: float | None
    """The standard error of the fitness; None with fewer than two independent episodes."""
    episodes: int
    """Number of episodes."""
    failed_episodes: int
    """Number of those whose environment failed."""


@dataclass
class Lineage:
    """The events of a population, in order, and its settings."""

    settings: dict[str, Any]
    """Algorithm, environment, strategy, ranges, rounds and others."""
    events: list[LineageEvent] = field(default_factory=list)
    finished: bool = False
    """True if the search is over."""
    best: int | None = None
    """The best member of the last round."""
    held_out: HeldOut | None = None
    """The winner on episodes by which nobody was chosen; None before the end."""

    @property
    def winner(self) -> LineageEvent | None:
        """The ``trained`` event of the best policy of all rounds, the later one of equals; None before the first."""
        trained = (event for event in self.events if event.event == "trained" and event.fitness is not None)
        return max(trained, key=lambda event: (event.fitness, event.round), default=None)

    @property
    def members(self) -> list[int]:
        """The numbers of all members, stopped and failed ones included."""
        return sorted({event.member for event in self.events})

    def public(self) -> Lineage:
        """Return what may leave the machine: of a failed member's error its type, of a folder its last part."""
        events = [replace(event, reason=event.reason.partition(":")[0]) if event.event == "failed" else event
                  for event in self.events]  # fmt: skip
        model = self.settings.get("model")
        settings = {**self.settings, **({"model": public_path(model)} if isinstance(model, str) else {})}
        return replace(self, settings=settings, events=events)

    def write(self, folder: Path) -> None:
        """Write ``lineage.json`` atomically."""
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, folder: str | Path) -> Lineage:
        """Read ``lineage.json`` of a population's folder.

        Raises:
            CheckpointError: If it cannot be read, or a value has another form.
        """
        form = form_of(cls)
        content = read_form(Path(folder) / FILE, replace(form, required=tuple(form.of)))
        events = [
            LineageEvent(
                **{
                    **one,
                    "changes": {name: (pair[0], pair[-1]) for name, pair in one.get("changes", {}).items() if pair},
                }
            )
            for one in content.pop("events")
        ]
        held_out = content.pop("held_out")
        return cls(events=events, held_out=None if held_out is None else HeldOut(**held_out), **content)


def finite(value: float) -> float | None:
    """Return the number, or None for NaN, which JSON has not."""
    return None if math.isnan(value) else value


def with_error(fitness: float | None, standard_error: float | None) -> str:
    """Format a fitness with its standard error, as far as they are known."""
    if fitness is None:
        return "failed"
    return f"{fitness:.3f}" if standard_error is None else f"{fitness:.3f} ± {standard_error:.3f}"
