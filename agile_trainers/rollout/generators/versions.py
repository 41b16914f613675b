"""Samples each episode with the version of the policy that it began with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator


class VersionedGenerator:
    """A generator for each version of a policy, of which one computes at a time.

    Args:
        make: Makes the generator of a version.
        version_of: Maps an episode to its version.
        holding: Lets the model compute with a version in a block.
    """

    def __init__(
        self,
        make: Callable[[], Generator],
        version_of: Callable[[int], int],
        holding: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._make, self._version_of, self._holding = make, version_of, holding
        self._generators: dict[int, Generator] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :class:`Generator`."""
        version = self._version_of(request.episode)
        if version not in self._generators:
            self._generators[version] = self._make()
        self._generators[version].submit(request)

    def step(self) -> list[GenerationOutput]:
        """Make progress with the requests of every version, the oldest first."""
        outputs: list[GenerationOutput] = []
        for version, generator in sorted(self._generators.items()):
            if generator.pending:
                with self._holding(version):
                    outputs += generator.step()
        return outputs

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""
        return sum(generator.pending for generator in self._generators.values())

    def release(self, episode: int) -> None:
        """Forget an episode; see :class:`Generator`."""
        for generator in self._generators.values():
            generator.release(episode)
