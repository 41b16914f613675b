"""Samples each episode with the version of the policy that it began with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator


@dataclass(frozen=True)
class Versions:
    """The versions of a policy that play at the same time."""

    of: Callable[[int], int]
    """Maps an episode to its version."""
    wanted: Callable[[], Collection[int]]
    """Returns all of them."""
    holding: Callable[[int], AbstractContextManager[None]]
    """Lets the trainer's model compute with a version in a block."""


class VersionedGenerator:
    """A generator for each version of a policy, of which one computes at a time.

    Args:
        make: Makes the generator of a version.
        versions: The versions, the same ones as long as this generator is used.
        most: Number of versions that have a generator, the oldest ones. Requests of the others are left to the next
            versioned generator. Default: no limit.
    """

    def __init__(self, make: Callable[[], Generator], versions: Versions, most: int | None = None) -> None:
        self._make, self._versions = make, versions
        self._computed = frozenset(sorted(versions.wanted())[:most])
        self._generators: dict[int, Generator] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :class:`Generator`."""
        version = self._versions.of(request.episode)
        if version not in self._computed:
            return
        if version not in self._generators:
            self._generators[version] = self._make()
        self._generators[version].submit(request)

    def step(self) -> list[GenerationOutput]:
        """Make progress with the requests of every version, the oldest first."""
        outputs: list[GenerationOutput] = []
        for version, generator in sorted(self._generators.items()):
            if generator.pending:
                with self._versions.holding(version):
                    outputs += generator.step()
        return outputs

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned, without those that are left to the next generator."""
        return sum(generator.pending for generator in self._generators.values())

    def release(self, episode: int) -> None:
        """Forget an episode; see :class:`Generator`."""
        for generator in self._generators.values():
            generator.release(episode)
