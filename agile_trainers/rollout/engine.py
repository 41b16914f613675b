"""The rollout loop, which plays episodes of environments with a generator, independent of TRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import numpy as np

from agile_trainers.envs.base import Observation, as_messages
from agile_trainers.envs.checker import (
    LARGEST_REWARD,
    EnvironmentProtocolError,
    describe_error,
    validate_end,
    validate_reset,
    validate_step,
)
from agile_trainers.imports import pass_on_interrupt
from agile_trainers.rollout.cutting import cut_observation
from agile_trainers.rollout.environment_pool import EnvironmentPool, EnvironmentTimeoutError, Outcome
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator
from agile_trainers.types import Message, StopReason, Trajectory, Turn


class Chat(Protocol):
    """Interface of chat frames that the loop uses; see :class:`agile_trainers.rollout.chat.renderer.ChatRenderer`."""

    eos_token_ids: list[int]
    """Ids that end an answer."""
    chat_template: str | None
    """The template in use; None for plain text."""

    def first(self, observation: Observation) -> list[int]: ...

    def frame(self, observation: Observation, last_action_id: int) -> list[int]: ...

    def decode(self, action_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Limits:
    """Limits of an episode, in tokens unless stated otherwise."""

    max_turns: int
    max_new_tokens: int
    """Tokens of one answer."""
    max_model_length: int
    """Tokens of prompt and completion together."""
    max_observation_length: int | None = None
    """Characters of one observation; longer ones are cut, with a note. None: no limit."""


@dataclass(frozen=True)
class EpisodeSpec:
    """Specification from which an episode is reproducible, independent of process and batch."""

    seed: int
    """The environment's seed."""
    stream: tuple[int, ...]
    """Entropy of the sampling noise; it differs between the members of a group, unlike the seed."""
    options: dict[str, Any] | None = None
    """The dataset row, passed to ``reset``."""
    environment: str | None = None
    """Name of the environment in a run of several."""


@dataclass
class _Episode:
    spec: EpisodeSpec
    limits: Limits
    noise: np.random.Generator
    prompt: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reset_info: dict[str, Any] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    ending: bool = False
    """True once the environment was told that a limit ends the episode."""
    end_reward: float | None = None
    error: str | None = None
    observations_cut: int = 0

    def append(self, token_ids: list[int], logprobs: list[float] | None = None) -> None:
        self.completion_ids += token_ids
        self.logprobs += [0.0] * len(token_ids) if logprobs is None else logprobs

    def finished(self) -> Trajectory:
        assert self.stop_reason is not None
        return Trajectory(
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            sampling_logprobs=self.logprobs,
            turns=self.turns,
            stop_reason=self.stop_reason,
            prompt=self.prompt,
            reset_info=self.reset_info,
            seed=self.spec.seed,
            environment_name=self.spec.environment,
            error=self.error,
            end_reward=self.end_reward,
            observations_cut=self.observations_cut,
            options=self.spec.options,
        )


class RolloutEngine:
    """Plays episodes asynchronously: each requests its next turn as soon as its environment has answered.

    Args:
        pool: Runs the environments.
        chat: Converts messages to token ids.
        limits: Limits of an episode.
        environment_limits: Environment name to limits, if ``pool`` has several.
        system_prompt: System message for first observations that have none.
        append_final_observation: Append the last observation and generation prompt of a *truncated* episode, if they
            fit, so that the value of its final state can be read there. Costs tokens; only a critic needs it.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        chat: Chat,
        limits: Limits,
        *,
        environment_limits: Mapping[str, Limits] | None = None,
        system_prompt: str | None = None,
        append_final_observation: bool = False,
    ):
        self.pool = pool
        self.chat = chat
        self.limits = limits
        self.environment_limits = environment_limits or {}
        self.system_prompt = system_prompt
        self.append_final_observation = append_final_observation
        self.reports_success: set[str | None] = set()
        """Names of the environments of which an episode has reported its success, on any process; others fill it."""
        self._played: list[ref[Trajectory]] = []
        """Trajectories of the last rollout."""

    def run(
        self,
        specs: Sequence[EpisodeSpec],
        generator: Generator,
        on_finish: Callable[[Trajectory], None] | None = None,
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
        episodes = [_Episode(spec, self.limits_of(spec.environment), _noise(spec.stream)) for spec in specs]
        try:
            return self._play(episodes, generator, on_finish)
        except BaseException:
            # Nothing of an interrupted rollout may reach the next one.
            self.pool.abandon()
            raise

    def _play(
        self, episodes: list[_Episode], generator: Generator, on_finish: Callable[[Trajectory], None] | None
    ) -> list[Trajectory]:
        for trajectory in (played() for played in self._played):
            if trajectory is not None:
                trajectory.environment = None  # it is played again
        for index, episode in enumerate(episodes):
            # A copy, since an environment may modify its row.
            self.pool.reset(index, episode.spec.seed, deepcopy(episode.spec.options), episode.spec.environment)
        finished: dict[int, Trajectory] = {}
        while len(finished) < len(episodes):
            idle = generator.pending == 0
            outcomes = self.pool.outcomes(block=idle)
            if idle and not outcomes:
                raise RuntimeError(
                    f"{type(generator).__name__} lost a request: it was not answered, but none is pending."
                )
            for outcome in outcomes:
                index, episode = outcome.episode, episodes[outcome.episode]
                self._on_outcome(outcome, episode)
                if episode.stop_reason is None:
                    self._ask(index, episode, generator)
                if episode.stop_reason is not None and not self._ends(index, episode):
                    generator.release(index)
                    finished[index] = episode.finished()
                    if not episode.stop_reason.failed:
                        finished[index].environment = self.pool.environment(index)
                    self.pool.release(index, reusable=not episode.stop_reason.failed)
                    if on_finish is not None:
                        on_finish(finished[index])
            for output in generator.step():
                self._on_action(output, episodes[output.episode])
        self._played = [ref(trajectory) for trajectory in finished.values()]
        return [finished[index] for index in range(len(episodes))]

    def limits_of(self, environment: str | None) -> Limits:
        """Return the limits of an environment's episodes."""
        return self.limits if environment is None else self.environment_limits[environment]

    def cut(self, observation: Observation, environment: str | None = None) -> tuple[Observation, bool]:
        """Cut an observation to its environment's limit; see :func:`cut_observation`."""
        limit = self.limits_of(environment).max_observation_length
        return (observation, False) if limit is None else cut_observation(observation, limit)

    def render(self, observation: Observation) -> list[Message]:
        """Convert a first observation to messages, with the system prompt."""
        messages = as_messages(observation)
        if self.system_prompt is not None and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def _on_outcome(self, outcome: Outcome, episode: _Episode) -> None:
        """Process the outcome of an environment's call."""
        error = outcome.error
        if error is None:
            try:
                self._take(outcome.value, episode)
            except BaseException as unusable:  # any error here is caused by this environment's answer
                pass_on_interrupt(unusable)
                error = unusable
        if error is not None:
            timeout = isinstance(error, EnvironmentTimeoutError)
            episode.stop_reason = StopReason.ENVIRONMENT_TIMEOUT if timeout else StopReason.ENVIRONMENT_ERROR
            episode.error = describe_error(error)

    def _ends(self, index: int, episode: _Episode) -> bool:
        """Tell the environment that a limit of the trainer ends an episode; True if it answers with a reward."""
        limits = (StopReason.MAX_TURNS, StopReason.CONTEXT_FULL)
        if episode.ending or not episode.turns or episode.stop_reason not in limits:
            return False
        episode.ending = True
        return self.pool.end(index, str(episode.stop_reason))

    def _take(self, answer: Any, episode: _Episode) -> None:
        if episode.ending:
            episode.end_reward = validate_end(answer)
            if episode.end_reward is not None:
                _check_return(episode.end_reward, episode)
                episode.turns[-1].reward += episode.end_reward
            return
        if not episode.turns:
            observation, episode.reset_info = validate_reset(answer)
            observation, cut = self.cut(observation, episode.spec.environment)
            episode.observations_cut += cut
            episode.prompt = self.render(observation)
            episode.prompt_ids = self.chat.first(episode.prompt)
            if not episode.prompt_ids:
                raise EnvironmentProtocolError(f"reset() returned {observation!r}, which tokenizes to nothing.")
            return
        observation, reward, terminated, truncated, info = validate_step(answer)
        _check_return(reward, episode)
        observation, cut = self.cut(observation, episode.spec.environment)
        episode.observations_cut += cut
        frame = [] if terminated else self.chat.frame(observation, episode.completion_ids[-1])
        turn = episode.turns[-1]
        turn.observation, turn.reward, turn.info = observation, reward, info
        room = self._room(episode) - len(frame)
        if terminated:
            episode.stop_reason = StopReason.TERMINATED
            return
        if truncated:
            episode.stop_reason = StopReason.TRUNCATED
        elif len(episode.turns) >= episode.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        elif room < 1:
            episode.stop_reason = StopReason.CONTEXT_FULL
        if episode.stop_reason is None or (self.append_final_observation and room >= 0):
            episode.append(frame)

    def _room(self, episode: _Episode) -> int:
        return episode.limits.max_model_length - len(episode.prompt_ids) - len(episode.completion_ids)

    def _ask(self, index: int, episode: _Episode, generator: Generator) -> None:
        room = self._room(episode)
        if room < 1:
            episode.stop_reason = StopReason.CONTEXT_FULL
            return
        generator.submit(
            GenerationRequest(
                episode=index,
                token_ids=episode.prompt_ids + episode.completion_ids,
                max_new_tokens=min(episode.limits.max_new_tokens, room),
                uniforms=lambda n: episode.noise.random(n).tolist(),
            )
        )

    def _on_action(self, output: GenerationOutput, episode: _Episode) -> None:
        start = len(episode.completion_ids)
        episode.append(output.token_ids, output.logprobs)
        text = self.chat.decode(output.token_ids)
        episode.turns.append(Turn(start, len(episode.completion_ids), text, output.finish_reason))
        self.pool.step(output.episode, text)


def _check_return(reward: float, episode: _Episode) -> None:
    total = reward + sum(turn.reward for turn in episode.turns)
    if abs(total) > LARGEST_REWARD:
        raise EnvironmentProtocolError(
            f"the rewards of the episode add up to {total:.3g}; expected at most {LARGEST_REWARD:.3g} (float32)."
        )


def _noise(stream: tuple[int, ...]) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(stream)))
