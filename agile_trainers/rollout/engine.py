"""The engine that a run's episodes are played by: limits, opening of rollouts, and who was busy. Independent of trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from weakref import ref

from agile_trainers.envs.base import Observation
from agile_trainers.envs.context import History
from agile_trainers.rollout.agents.rollout import AgentRollout
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.environment_pool import BusyMeter, EnvironmentPool
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.rollout import Episodes, Rollout
from agile_trainers.rollout.spec import EpisodeSpec, Limits, cut_observation
from agile_trainers.rollout.stepped import SteppedRollout, first_messages
from agile_trainers.types import Trajectory


@dataclass(eq=False, repr=False)
class RolloutEngine:
    """Plays episodes asynchronously: each requests its next turn as soon as its environment has answered.

    Args:
        pool: Runs the environments.
        chat: Converts messages to token ids.
        limits: Limits of an episode.
        environment_limits: Environment name to limits, if ``pool`` has several.
        histories: Environment name to the function that rewrites the context before each answer, None in a run of one.
            Default: the environment's own ``context``, if it defines that.
        system_prompt: System message for first observations that have none.
        append_final_observation: Append the last observation and generation prompt of a *truncated* episode, if they
            fit, so that the value of its final state can be read there. Costs tokens; ``bootstrap_at_limits`` needs it.
    """

    pool: EnvironmentPool
    chat: ChatRenderer
    limits: Limits
    _: KW_ONLY
    environment_limits: Mapping[str, Limits] = field(default_factory=dict)
    histories: Mapping[str | None, History] = field(default_factory=dict)
    system_prompt: str | None = None
    append_final_observation: bool = False
    reports_success: set[str | None] = field(default_factory=set, init=False)
    """Names of the environments of which an episode has reported its success, on any process; others fill it."""
    waiting: BusyMeter = field(default_factory=BusyMeter, init=False)
    """Measures when a caller waits for episodes."""
    observers: list[Callable[[Trajectory], None]] = field(default_factory=list, init=False)
    """Called with each trajectory of any rollout when it ends."""
    _sampling: BusyMeter = field(default_factory=BusyMeter, init=False)
    _played: list[ref[Trajectory]] = field(default_factory=list, init=False)
    """Trajectories of the last rollout."""

    def run(
        self, specs: Sequence[EpisodeSpec], generator: Generator, on_finish: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Play one episode per spec.

        Args:
            specs: The episodes.
            generator: Samples the actions.
            on_finish: Called with each trajectory when it ends (for a progress bar, for example).

        Returns:
            The trajectories, in the order of ``specs``. An environment's exception ends its own episode and is stored
            there.

        Raises:
            Exception: Any exception of the generator or ``on_finish``.
            KeyboardInterrupt: The user's Ctrl-C, or one that an environment raises inline.
            ValueError: If ``environment_timeout`` is set for an environment that is stepped inline.
            RuntimeError: If the generator never answers a request.
        """
        with self.waiting.active(), self.open() as rollout:
            rollout.admit(range(len(specs)), specs)
            return rollout.play(range(len(specs)), generator, on_finish)

    @contextmanager
    def open(self, *, keep_instances: bool = True) -> Iterator[Rollout]:
        """Open a rollout, whose episodes can be played with one generator after the other.

        There is one at a time. Episodes that have not ended when it is closed are given up.

        Args:
            keep_instances: Let each trajectory have its environment's instance, until the next rollout. False: an instance
                plays another episode as soon as one ends.
        """
        for trajectory in (played() for played in self._played):
            if trajectory is not None:
                trajectory.environment = None  # it is played again
        self._played.clear()
        with ExitStack() as resources:
            # Nothing of an interrupted rollout may reach the next one.
            resources.callback(self.pool.abandon)
            stepped = SteppedRollout(
                self.pool, self.chat, self.histories, self.system_prompt, self.append_final_observation
            )

            @cache
            def agents() -> AgentRollout:  # with a server, which only agents need
                return resources.enter_context(AgentRollout(self.pool, self.chat))

            def episodes_of(environment: str | None) -> Episodes:
                return stepped if self.pool.agent(environment) is None else agents()

            kept = self._played if keep_instances else None
            yield Rollout(self.pool, self.limits_of, episodes_of, self._sampling, kept, self.observers)

    def beside(self) -> RolloutEngine:
        """Return an engine that can play while a rollout of this one is open."""
        other = copy(self)
        other.pool, other._played = self.pool.another(), []
        return other

    def busy(self) -> dict[str, float]:
        """Return who was busy since the last call, as shares of the time.

        Episodes of engines that :meth:`beside` made count too.

        Returns:
            ``busy/trainer``, in which no caller waited for episodes; ``busy/sampler``, in which a request was being sampled;
            ``busy/environments``, in which a call of an environment was under way, or an agent waited for no answer.
        """
        return {
            "busy/trainer": 1.0 - self.waiting.take(),
            "busy/sampler": self._sampling.take(),
            "busy/environments": self.pool.busy.take(),
        }

    def limits_of(self, environment: str | None) -> Limits:
        """Return the limits of an environment's episodes."""
        return self.limits if environment is None else self.environment_limits[environment]

    def shorten(self, tokens: int) -> None:
        """Let all conversations end at this many tokens, if they do not end earlier."""

        def shorter(limits: Limits) -> Limits:
            return replace(limits, max_model_length=min(limits.max_model_length, tokens))

        self.limits = shorter(self.limits)
        self.environment_limits = {name: shorter(limits) for name, limits in self.environment_limits.items()}

    def first_prompt(self, observation: Observation, environment: str | None = None) -> list[int]:
        """Return the ids of a first prompt: a first observation, cut to its environment's limit, with the system prompt."""
        cut, _ = cut_observation(observation, self.limits_of(environment).max_observation_length)
        return self.chat.first(first_messages(cut, self.system_prompt))
