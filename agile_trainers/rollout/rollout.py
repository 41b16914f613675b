"""Episodes under way: takes what happened to each, and brings its requests to a generator and the answers back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import ref

from agile_trainers.rollout.environment_pool import BusyMeter, EnvironmentPool, Outcome
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator
from agile_trainers.rollout.replay import DemonstratingGenerator, RecordedEpisode, ReplayingGenerator, warn_of
from agile_trainers.rollout.spec import Demonstration, EpisodeSpec, GivenAnswer, Limits
from agile_trainers.types import Trajectory

_WAKE = "wake"
"""Outcome that belongs to no episode."""


class PlayedEpisode(Protocol):
    """An episode of a rollout."""

    @property
    def ended(self) -> bool:
        """True once it has ended."""

    def unanswered(self) -> list[GenerationRequest]:
        """Return the requests that wait for their answers, to be sampled again from the same noise."""

    def record(self) -> RecordedEpisode:
        """Return the answers so far."""

    def replayed(self, record: RecordedEpisode) -> None:
        """Note that it was given all answers of its record."""

    def finished(self) -> Trajectory:
        """Return an episode that has ended."""


class Episodes(Protocol):
    """The episodes of a rollout that go on in the same way: stepped environments, or agents."""

    def start(self, key: int, spec: EpisodeSpec, limits: Limits) -> PlayedEpisode:
        """Let an episode begin."""

    def on_outcome(self, outcome: Outcome, episode: Any) -> list[GenerationRequest]:
        """Take what the pool has for an episode; None for one that has ended. Return what is to be sampled."""

    def on_output(self, output: GenerationOutput, episode: Any) -> list[GenerationRequest]:
        """Take an answer. Return what is to be sampled."""


@dataclass(eq=False, repr=False)
class Rollout:
    """Episodes under way; see :meth:`~agile_trainers.rollout.engine.RolloutEngine.open`.

    Args:
        pool: Runs the environments.
        limits_of: Returns the limits of an environment's episodes.
        episodes_of: Returns what an environment's episodes are played by.
        sampling: Measures when a request is being sampled.
        kept: Gets the trajectories that have their environment's instance; None: they have none.
        observers: Called with each trajectory when it ends.
    """

    pool: EnvironmentPool
    limits_of: Callable[[str | None], Limits]
    episodes_of: Callable[[str | None], Episodes]
    sampling: BusyMeter
    kept: list[ref[Trajectory]] | None
    observers: Sequence[Callable[[Trajectory], None]] = ()
    _playing: dict[int, tuple[Episodes, PlayedEpisode]] = field(default_factory=dict, init=False)
    """Key of an episode that has begun and not ended to what plays it, and it."""
    _kinds: list[Episodes] = field(default_factory=list, init=False)
    _finished: dict[int, tuple[Trajectory, PlayedEpisode]] = field(default_factory=dict, init=False)
    _recorded: dict[int, RecordedEpisode] = field(default_factory=dict, init=False)
    _demonstrations: dict[int, Demonstration] = field(default_factory=dict, init=False)
    _given: dict[int, list[GivenAnswer]] = field(default_factory=dict, init=False)
    """Key of an episode of an expert to the answers that are left."""
    _generator: Generator = field(init=False)
    """The generator that plays, inside of :meth:`playing` only, as the next."""
    _on_finish: Callable[[Trajectory], None] | None = field(init=False)

    @property
    def under_way(self) -> int:
        """Number of episodes that have begun and not ended."""
        return len(self._playing)

    def admit(
        self, keys: Sequence[int], specs: Sequence[EpisodeSpec], recorded: Sequence[RecordedEpisode] | None = None
    ) -> None:
        """Let episodes begin.

        Args:
            keys: Of each, different from those of all earlier ones.
            specs: Their specifications.
            recorded: What :meth:`record` returned of them in an earlier process: these answers are given again.
        """
        records = [RecordedEpisode() for _ in keys] if recorded is None else recorded
        for key, spec, record in zip(keys, specs, records, strict=True):
            if record.answers:
                self._recorded[key] = record
            episodes = self.episodes_of(spec.environment)
            if episodes not in self._kinds:
                self._kinds.append(episodes)
            if spec.demonstration is not None:
                self._demonstrations[key] = spec.demonstration
                self._given[key] = spec.demonstration.answers[len(record.answers) :]
            self._playing[key] = episodes, episodes.start(key, spec, self.limits_of(spec.environment))

    def play(
        self, keys: Sequence[int], generator: Generator, on_finish: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Play until some episodes have ended; the others go on meanwhile, and wait afterwards.

        Args:
            keys: Of these episodes.
            generator: Samples the actions.
            on_finish: Called with each trajectory when it ends, also with those of other episodes.

        Returns:
            The trajectories, in the order of ``keys``.

        Raises:
            Exception: As :meth:`~agile_trainers.rollout.engine.RolloutEngine.run`.
        """
        missing = set(keys) - self._finished.keys()

        def ended() -> bool:
            missing.difference_update(self._finished)
            return not missing

        self.play_until(ended, generator, on_finish)
        return self.take(keys)

    def has_ended(self, key: int) -> bool:
        """Return whether an episode has ended. From any thread."""
        return key in self._finished

    def take(self, keys: Sequence[int]) -> list[Trajectory]:
        """Return the trajectories of episodes that have ended, once."""
        return [self._finished.pop(key)[0] for key in keys]

    def play_until(
        self, done: Callable[[], bool], generator: Generator, on_finish: Callable[[Trajectory], None] | None = None
    ) -> None:
        """Play until all episodes that have begun have ended, or ``done()``, which is asked before every step.

        An answer that is being sampled then is sampled again by the next generator, from the same noise. A call of an
        environment goes on.
        """
        with self.playing(generator, on_finish) as go_on_until:
            go_on_until(done)

    @contextmanager
    def playing(
        self, generator: Generator, on_finish: Callable[[Trajectory], None] | None = None
    ) -> Iterator[Callable[[Callable[[], bool]], None]]:
        """Give a function that plays until its argument returns True, as often as one likes, with one generator.

        Between its calls the generator keeps its requests; see :meth:`play_until` for what happens at the end of the block.
        """
        if self._given:
            generator = DemonstratingGenerator(generator, self._given)
        if self._recorded:
            generator = ReplayingGenerator(
                generator, self._recorded, lambda key, record: self._playing[key][1].replayed(record)
            )
        # One that tells when it has an answer need not be asked again and again.
        listen: Callable[[Callable[[], None]], None] | None = getattr(generator, "listen", None)
        if listen is not None:
            listen(self.wake)
        self.pool.go_on()
        for _, episode in self._playing.values():
            for request in episode.unanswered():
                generator.submit(request)
        self._generator, self._on_finish = generator, on_finish
        try:
            yield partial(self._step_until, tells=listen is not None)
        finally:
            del self._generator, self._on_finish  # a cache on a GPU goes with its generator
            self.sampling.end(self)
            self.pool.pause()
            for key, (_, episode) in self._playing.items():
                if episode.unanswered():
                    generator.release(key)

    def _step_until(self, done: Callable[[], bool], *, tells: bool) -> None:
        sampling, generator = self.sampling, self._generator
        while self.under_way and not done():
            pending = generator.pending > 0
            sampling.set(self, tells and pending)
            outcomes = self.pool.outcomes(block=tells or not pending, posted=tells and pending)
            if not pending and not outcomes:
                raise RuntimeError(
                    f"{type(generator).__name__} lost a request: it was not answered, but none is pending."
                )
            for outcome in outcomes:
                if outcome.method != _WAKE:
                    self._on_outcome(outcome)
            if tells or not done():  # a step may last as long as an answer that nobody waits for
                # One that tells samples elsewhere, the others in `step`.
                sampling.set(self, generator.pending > 0)
                outputs = generator.step()
                if not tells:
                    sampling.end(self)
                for output in outputs:
                    episodes, episode = self._playing[output.episode]
                    self._proceed(output.episode, episodes.on_output(output, episode))

    def wake(self) -> None:
        """Let a function of :meth:`playing` ask whether it is done, and what its generator has. From any thread."""
        self.pool.post(Outcome(-1, _WAKE))

    def record(self, keys: Sequence[int]) -> list[RecordedEpisode]:
        """Return the answers of some episodes so far, ended or not, from which another process plays them on."""
        return [self._record(key) for key in keys]

    def _record(self, key: int) -> RecordedEpisode:
        if (ended := self._finished.get(key)) is not None:
            return ended[1].record()
        record = self._playing[key][1].record()
        if (left := self._recorded.get(key)) is not None:  # it is being played again itself
            return RecordedEpisode([*record.answers, *left.answers], left.noise)
        return record

    def _on_outcome(self, outcome: Outcome) -> None:
        """Process what a call of an environment, or an agent's client, has brought."""
        if outcome.episode not in self._playing:  # a client's request that came too late
            for kind in self._kinds:
                kind.on_outcome(outcome, None)
            return
        episodes, episode = self._playing[outcome.episode]
        self._proceed(outcome.episode, episodes.on_outcome(outcome, episode))

    def _proceed(self, key: int, requests: list[GenerationRequest]) -> None:
        """Submit the requests of an episode, and finish it if it has ended."""
        for request in requests:
            self._generator.submit(request)
        _, episode = self._playing[key]
        if not episode.ended:
            return
        del self._playing[key]
        self._generator.release(key)
        if (left := self._recorded.pop(key, None)) is not None:
            warn_of(left)
        trajectory = episode.finished()
        self._finished[key] = trajectory, episode
        if (demonstration := self._demonstrations.pop(key, None)) is not None:
            del self._given[key]
            trajectory.demonstration = True
            demonstration.check(trajectory)
        if self.kept is not None and not trajectory.stop_reason.failed:
            trajectory.environment = self.pool.environment(key)
            self.kept.append(ref(trajectory))
        self.pool.release(key, reusable=not trajectory.stop_reason.failed)
        for observe in (*self.observers, self._on_finish):
            if observe is not None:
                observe(trajectory)
