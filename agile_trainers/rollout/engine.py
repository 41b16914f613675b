"""The rollout loop, which plays episodes of environments with a generator, independent of TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import ref

import numpy as np

from agile_trainers.envs.base import Observation, as_messages
from agile_trainers.envs.checker import (
    LARGEST_REWARD,
    EnvironmentProtocolError,
    describe_error,
    validate_context,
    validate_end,
    validate_reset,
    validate_step,
)
from agile_trainers.envs.context import Context, History, Question, full
from agile_trainers.imports import pass_on_interrupt
from agile_trainers.rollout.agents.rollout import AgentRollout
from agile_trainers.rollout.busy import BusyMeter
from agile_trainers.rollout.cutting import cut_observation
from agile_trainers.rollout.environment_pool import EnvironmentPool, EnvironmentTimeoutError, Outcome
from agile_trainers.rollout.forest import Call, Fork, forest
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator
from agile_trainers.rollout.replay import (
    RecordedAnswer,
    RecordedEpisode,
    ReplayingGenerator,
    digest_of,
    noise_state,
    set_noise_state,
)
from agile_trainers.types import Message, StopReason, Trajectory, Turn, common_prefix


class Chat(Protocol):
    """Interface of chat frames that the loop uses; see :class:`agile_trainers.rollout.chat.renderer.ChatRenderer`."""

    eos_token_ids: list[int]
    """Ids that end an answer."""
    chat_template: str | None
    """The template in use; None for plain text."""
    rewrite: Any
    """A turn that the template rewrites later; None if it keeps them."""
    forks: bool
    """True if a conversation is rendered again where the template rewrites earlier turns."""

    @property
    def longest_token(self) -> int: ...

    def first(self, observation: Observation, *, sampled: bool = False) -> list[int]: ...

    def goes_on(
        self, messages: list[Message], prompt: Sequence[str], action_ids: Sequence[int], observation: list[Message]
    ) -> bool: ...

    def frame(self, observation: Observation, last_action_id: int) -> list[int]: ...

    def decode(self, action_ids: list[int]) -> str: ...

    def with_tools(self, tools: list[dict[str, Any]]) -> Chat: ...

    def parsed(self, prompt_ids: list[int], action_ids: Sequence[int]) -> Message | None: ...

    def spliced(self, messages: list[Message], answers: Mapping[int, Sequence[int]]) -> list[int] | None: ...


@dataclass(frozen=True)
class Limits:
    """Limits of an episode, in tokens unless stated otherwise."""

    max_turns: int
    max_new_tokens: int
    """Tokens of one answer."""
    max_model_length: int
    """Tokens of a conversation, prompt included."""
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
    first: list[Message] = field(default_factory=list)
    """Messages that the environment began with."""
    prompt: list[Message] = field(default_factory=list)
    context: list[Message] = field(default_factory=list)
    """Messages that the model saw last, its answer, and the observation since."""
    answered: int = 0
    """Number of these up to the answer."""
    paths: list[list[int]] = field(default_factory=list)
    """Token ids: the conversations begun so far. The last one goes on."""
    begun: list[Message] = field(default_factory=list)
    """The messages that the last one began with."""
    turns: list[Turn] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    asked: Turn | None = None
    """The turn that is asked for or can be asked for, without its action."""
    shared: int = 0
    """Tokens of its prompt that were read for earlier turns."""
    read_again: int | None = 0
    reset_info: dict[str, Any] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    ending: bool = False
    """True once the environment was told that a limit ends the episode."""
    end_reward: float | None = None
    error: str | None = None
    observations_cut: int = 0
    before: Mapping[str, Any] | None = None
    """State of ``noise`` before the answer that is being sampled; None if none is."""

    @property
    def room(self) -> int:
        """Tokens that the conversation has left."""
        return self.limits.max_model_length - len(self.paths[-1])

    def ask(self, messages: list[Message] | None = None, fork: str | None = None, question: bool = False) -> None:
        """Let the last conversation be answered next; the arguments are fields of the turn."""
        self.asked = Turn(0, 0, "", "stop", messages=messages, fork=fork, question=question)

    def answer(self, output: GenerationOutput, text: str) -> None:
        """Add the turn that was asked for."""
        turn, path = self.asked, self.paths[-1]
        assert turn is not None
        if output.read is None or self.read_again is None:
            self.read_again = None
        else:
            self.read_again += max(0, output.read - (len(path) - self.shared))
        turn.path, turn.place, turn.end = len(self.paths) - 1, len(path), len(output.token_ids)
        turn.text, turn.finish_reason = text, output.finish_reason
        path += output.token_ids
        self.shared = len(path) - 1  # the last one is read with what follows it
        self.turns.append(turn)
        self.logprobs.append(output.logprobs)
        self.context = [*self.context, {"role": "assistant", "content": text}]
        self.answered = len(self.context)
        self.asked = None

    def begin(self, messages: list[Message], ids: list[int]) -> None:
        """Begin a new conversation."""
        # The last token of either was not read, or is read once more for what follows it.
        self.shared = max((min(common_prefix(one, ids), len(one) - 1, len(ids) - 1) for one in self.paths), default=0)
        self.begun = messages
        self.paths.append(ids)

    def finished(self) -> Trajectory:
        assert self.stop_reason is not None
        fields: dict[str, Any] = {
            "prompt": self.prompt,
            "reset_info": self.reset_info,
            "seed": self.spec.seed,
            "environment_name": self.spec.environment,
            "error": self.error,
            "end_reward": self.end_reward,
            "observations_cut": self.observations_cut,
            "options": self.spec.options,
            "linear": not any(turn.question for turn in self.turns),
            "read_again": self.read_again,
        }
        if self.turns and self.turns[-1].path > 0:
            last = self.turns[-1]
            after = self.paths[last.path][last.place + last.end :]
            return forest([self.call(k) for k in range(len(self.turns))], self.stop_reason, last=after, **fields)
        path = self.paths[0] if self.paths else []
        prompt = self.turns[0].place if self.turns else len(path)
        logprobs = [0.0] * (len(path) - prompt)
        for turn, sampled in zip(self.turns, self.logprobs, strict=True):
            turn.start, turn.end, turn.place = turn.place - prompt, turn.place - prompt + turn.end, 0
            logprobs[turn.start : turn.end] = sampled
        return Trajectory(path[:prompt], path[prompt:], logprobs, self.turns, self.stop_reason, **fields)

    def call(self, k: int) -> Call:
        """Return a turn with its prompt and its answer."""
        turn = self.turns[k]
        path = self.paths[turn.path]
        return Call(
            path[: turn.place],
            path[turn.place : turn.place + turn.end],
            self.logprobs[k],
            turn.text,
            turn.finish_reason,
            turn.reward,
            turn.observation,
            turn.info,
            messages=turn.messages,
            fork=turn.fork,
            question=turn.question,
        )


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
            fit, so that the value of its final state can be read there. Costs tokens; only a critic needs it.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        chat: Chat,
        limits: Limits,
        *,
        environment_limits: Mapping[str, Limits] | None = None,
        histories: Mapping[str | None, History] | None = None,
        system_prompt: str | None = None,
        append_final_observation: bool = False,
    ):
        self.pool = pool
        self.chat = chat
        self.limits = limits
        self.environment_limits = environment_limits or {}
        self.histories = histories or {}
        self.system_prompt = system_prompt
        self.append_final_observation = append_final_observation
        self.reports_success: set[str | None] = set()
        """Names of the environments of which an episode has reported its success, on any process; others fill it."""
        self.waiting = BusyMeter()
        """Measures when a caller waits for episodes."""
        self._sampling = BusyMeter()
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
            yield Rollout(self, resources, self._played if keep_instances else None)

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
            ``busy/environments``, in which a call of an environment was under way.
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
        if outcome.error is not None:
            _fail(episode, outcome.error, "context()" if outcome.method == "context" else None)
            return
        with _costs(episode):
            match outcome.method:
                case "reset":
                    self._start(outcome, episode)
                case "step":
                    self._observe(outcome, episode)
                case "context" if outcome.value is not NotImplemented:
                    self._show(episode, outcome.value, "context()")
                case "context":
                    self._show(episode, episode.context)
                case "end":
                    episode.end_reward = validate_end(outcome.value)
                    if episode.end_reward is not None:
                        _check_return(episode.end_reward, episode)
                        episode.turns[-1].reward += episode.end_reward

    def _ends(self, index: int, episode: _Episode) -> bool:
        """Tell the environment that a limit of the trainer ends an episode; True if it answers with a reward."""
        assert episode.stop_reason is not None
        if episode.ending or not episode.turns or not episode.stop_reason.limit:
            return False
        episode.ending = True
        return self.pool.end(index, str(episode.stop_reason))

    def _start(self, outcome: Outcome, episode: _Episode) -> None:
        observation, episode.reset_info = validate_reset(outcome.value)
        observation, cut = self.cut(observation, episode.spec.environment)
        episode.observations_cut += cut
        episode.first = episode.context = self.render(observation)
        self._propose(outcome.episode, episode)

    def _observe(self, outcome: Outcome, episode: _Episode) -> None:
        observation, reward, terminated, truncated, info = validate_step(outcome.value)
        _check_return(reward, episode)
        observation, cut = self.cut(observation, episode.spec.environment)
        episode.observations_cut += cut
        frame = [] if terminated else self.chat.frame(observation, episode.paths[-1][-1])
        turn = episode.turns[-1]
        turn.observation, turn.reward, turn.info = observation, reward, info
        episode.context += as_messages(observation)
        if terminated:
            episode.stop_reason = StopReason.TERMINATED
        elif truncated:
            episode.stop_reason = StopReason.TRUNCATED
        elif len(episode.turns) >= episode.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        else:
            self._propose(outcome.episode, episode, frame)
            return
        if not terminated and self.append_final_observation and episode.room >= len(frame):
            episode.paths[-1] += frame

    def _propose(self, index: int, episode: _Episode, frame: Sequence[int] = ()) -> None:
        """Go on with the context, or with what it is rewritten to.

        Args:
            index: The episode's.
            episode: The episode.
            frame: What would be appended to the conversation.
        """
        history = self.histories.get(episode.spec.environment)
        if history is full or (history is None and not self.pool.rewrites(index)):
            self._show(episode, episode.context, frame=frame)
            return
        tokens = len(episode.paths[-1]) + len(frame) if episode.paths else len(self.chat.first(episode.context))
        context = Context(episode.context, episode.first, tokens, episode.limits.max_model_length)
        if history is None:
            self.pool.context(index, context)
            return
        messages, name = None, _name_of(history)
        with _costs(episode, name):
            messages = history(context)
        if episode.stop_reason is None:
            self._show(episode, messages, name)

    def _show(
        self, episode: _Episode, messages: Any, source: str | None = None, frame: Sequence[int] | None = None
    ) -> None:
        """Let the model answer a context: of the conversation, if that only goes on, else of a new one.

        Args:
            episode: The episode.
            messages: The context.
            source: What rewrote it; None if nothing did.
            frame: What the conversation goes on with, if that is known.
        """
        question = issubclass(type(messages), Question)  # whatever it says of its class
        if source is not None:
            messages = validate_context(messages, source)
            # Every message has a token of its own.
            if (
                sum(len(one["content"]) + 1 for one in messages)
                > episode.limits.max_model_length * self.chat.longest_token
            ):
                episode.stop_reason = StopReason.REWRITE_FULL  # whatever its tokens are: megabytes take long to encode
                return
        known = episode.context
        unchanged, episode.context = messages == known, messages
        if not episode.turns:
            episode.prompt = messages
            episode.begin(messages, self.chat.first(messages))
            if not episode.paths[-1]:
                raise EnvironmentProtocolError(
                    f"{source or 'reset()'} returned {messages!r}, which tokenizes to nothing."
                )
            if source is not None and episode.room < 1:
                episode.stop_reason = StopReason.REWRITE_FULL
            episode.ask(question=question)
            return
        end = episode.answered
        said = messages[end:] if messages[:end] == known[:end] else []
        if not unchanged and any(one["role"] == "assistant" for one in said):
            said = []
        last = episode.turns[-1]
        path = episode.paths[-1]
        fork = None if said else Fork.CONTEXT
        if said:
            roles = [message["role"] for message in episode.begun]
            before = messages[: len(messages) - len(said) - 1]
            if not self.chat.goes_on(before, roles, path[last.place :], said):
                fork = Fork.TEMPLATE
        if fork is None:
            frame = self.chat.frame(said, path[-1]) if frame is None or not unchanged else frame
            room = episode.room - len(frame)
            if room < 1:
                episode.stop_reason = StopReason.CONTEXT_FULL
            if room >= 1 or (self.append_final_observation and room == 0):
                path += frame
        else:
            episode.begin(messages, self.chat.first(messages, sampled=True))
            if episode.room < 1:
                episode.stop_reason = StopReason.REWRITE_FULL if fork is Fork.CONTEXT else StopReason.CONTEXT_FULL
        episode.ask(None if unchanged and fork is None else messages, fork, question)

    def _ask(self, index: int, episode: _Episode, generator: Generator) -> None:
        assert episode.asked is not None
        if episode.room < 1:
            episode.stop_reason = StopReason.CONTEXT_FULL
            return
        episode.before = episode.noise.bit_generator.state
        self._submit(index, episode, generator)

    def _submit(self, index: int, episode: _Episode, generator: Generator) -> None:
        assert episode.asked is not None
        generator.submit(
            GenerationRequest(
                episode=index,
                token_ids=list(episode.paths[-1]),
                max_new_tokens=min(episode.limits.max_new_tokens, episode.room),
                uniforms=lambda n: episode.noise.random(n).tolist(),
                extends=episode.asked.fork is None,
            )
        )

    def _on_action(self, output: GenerationOutput, episode: _Episode) -> None:
        text = self.chat.decode(output.token_ids)
        assert episode.asked is not None
        question, episode.before = episode.asked.question, None
        episode.answer(output, text)
        if not question:
            self.pool.step(output.episode, text)
        elif len(episode.turns) >= episode.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        else:
            with _costs(episode):
                self._propose(output.episode, episode)


class Rollout:
    """Episodes under way; see :meth:`RolloutEngine.open`.

    Args:
        engine: The engine that plays them.
        resources: Ended with the rollout.
        kept: Gets the trajectories that have their environment's instance; None: they have none.
    """

    def __init__(self, engine: RolloutEngine, resources: ExitStack, kept: list[ref[Trajectory]] | None) -> None:
        self._engine, self._pool, self._resources, self._kept = engine, engine.pool, resources, kept
        self._stepped: dict[int, _Episode] = {}
        self._agents: AgentRollout | None = None
        self._finished: dict[int, Trajectory] = {}
        self.under_way = 0
        """Number of episodes that have begun and not ended."""
        self._recorded: dict[int, RecordedEpisode] = {}

    def admit(
        self,
        keys: Sequence[int],
        specs: Sequence[EpisodeSpec],
        recorded: Sequence[RecordedEpisode] | None = None,
    ) -> None:
        """Let episodes begin.

        Args:
            keys: Of each, different from those of all earlier ones.
            specs: Their specifications.
            recorded: What :meth:`record` returned of them in an earlier process: these answers are given again.
        """
        if recorded is not None:
            for key, record in zip(keys, recorded, strict=True):
                if record.answers:
                    self._recorded[key] = record
        engine = self._engine
        if self._agents is None and any(self._pool.agent(spec.environment) for spec in specs):
            self._agents = self._resources.enter_context(AgentRollout(self._pool, engine.chat))
        self.under_way += len(specs)
        for key, spec in zip(keys, specs, strict=True):
            limits = engine.limits_of(spec.environment)
            if self._agents is not None and self._pool.agent(spec.environment):
                self._agents.start(key, spec, limits)
                continue
            self._stepped[key] = _Episode(spec, limits, _noise(spec.stream))
            # A copy, since an environment may modify its row.
            self._pool.reset(key, spec.seed, deepcopy(spec.options), spec.environment)

    def play(
        self,
        keys: Sequence[int],
        generator: Generator,
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Play until some episodes have ended; the others go on meanwhile, and wait afterwards.

        Args:
            keys: Of these episodes.
            generator: Samples the actions.
            on_finish: Called with each trajectory when it ends, also with those of other episodes.

        Returns:
            The trajectories, in the order of ``keys``.

        Raises:
            Exception: As :meth:`RolloutEngine.run`.
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
        return [self._finished.pop(key) for key in keys]

    def play_until(
        self,
        done: Callable[[], bool],
        generator: Generator,
        on_finish: Callable[[Trajectory], None] | None = None,
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
        if self._recorded:
            generator = ReplayingGenerator(generator, self._recorded, self._go_on)
        # One that tells when it has an answer need not be asked again and again.
        listen: Callable[[Callable[[], None]], None] | None = getattr(generator, "listen", None)
        if listen is not None:
            listen(self.wake)
        for key, episode in self._stepped.items():
            if episode.before is not None:
                self._engine._submit(key, episode, generator)
        try:
            yield lambda done: self._step_until(done, generator, on_finish, tells=listen is not None)
        finally:
            self._engine._sampling.end(self)
            for key, episode in self._stepped.items():
                if episode.before is not None:
                    generator.release(key)
                    episode.noise.bit_generator.state = episode.before

    def _step_until(
        self,
        done: Callable[[], bool],
        generator: Generator,
        on_finish: Callable[[Trajectory], None] | None,
        *,
        tells: bool,
    ) -> None:
        sampling = self._engine._sampling
        while self.under_way and not done():
            pending = generator.pending > 0
            sampling.set(self, tells and pending)
            outcomes = self._pool.outcomes(block=tells or not pending, posted=tells and pending)
            if not pending and not outcomes:
                raise RuntimeError(
                    f"{type(generator).__name__} lost a request: it was not answered, but none is pending."
                )
            for outcome in outcomes:
                if outcome.method != _WAKE:
                    self._on_outcome(outcome, generator, on_finish)
            if tells or not done():  # a step may last as long as an answer that nobody waits for
                # One that tells samples elsewhere, the others in `step`.
                sampling.set(self, generator.pending > 0)
                outputs = generator.step()
                if not tells:
                    sampling.end(self)
                for output in outputs:
                    self._on_output(output, generator, on_finish)

    def wake(self) -> None:
        """Let a function of :meth:`playing` ask whether it is done, and what its generator has. From any thread."""
        self._pool.post(Outcome(-1, _WAKE))

    def record(self, keys: Sequence[int]) -> list[RecordedEpisode]:
        """Return the answers of some episodes so far, ended or not, from which another process plays them on."""
        return [self._record(key) for key in keys]

    def _record(self, key: int) -> RecordedEpisode:
        episode = self._stepped.get(key)
        if episode is None:
            return self._record_of(self._finished[key])
        calls = [episode.call(k) for k in range(len(episode.turns))]
        answers = [
            RecordedAnswer(digest_of(it.prompt_ids), it.answer_ids, it.logprobs, it.finish_reason) for it in calls
        ]
        if (left := self._recorded.get(key)) is not None:  # it is being played again itself
            return RecordedEpisode([*answers, *left.answers], left.noise)
        return RecordedEpisode(answers, noise_state(episode.noise, episode.before))

    @staticmethod
    def _record_of(ended: Trajectory) -> RecordedEpisode:
        answers = []
        for k, turn in enumerate(ended.turns):
            logprobs = ended.sampling_logprobs[turn.start : turn.end]
            answers.append(
                RecordedAnswer(digest_of(ended.prompt_of(k)), ended.action_of(k), logprobs, turn.finish_reason)
            )
        return RecordedEpisode(answers)

    def _go_on(self, key: int, record: RecordedEpisode) -> None:
        """Let an episode whose recorded answers were given draw the numbers that it would have drawn."""
        if record.noise is not None:
            set_noise_state(self._stepped[key].noise, record.noise)

    def _on_outcome(
        self, outcome: Outcome, generator: Generator, on_finish: Callable[[Trajectory], None] | None
    ) -> None:
        """Process what a call of an environment, or an agent's client, has brought."""
        key = outcome.episode
        if key in self._stepped:
            self._engine._on_outcome(outcome, self._stepped[key])
            self._proceed(key, generator, on_finish)
            return
        assert self._agents is not None
        for request in self._agents.on_outcome(outcome):
            generator.submit(request)
        if outcome.method == "play":
            self._finish(key, self._agents.episodes[key].finished(), generator, on_finish)

    def _on_output(
        self, output: GenerationOutput, generator: Generator, on_finish: Callable[[Trajectory], None] | None
    ) -> None:
        """Process an answer."""
        key = output.episode
        if key in self._stepped:
            self._engine._on_action(output, self._stepped[key])
            self._proceed(key, generator, on_finish)
        elif self._agents is not None:
            self._agents.episodes[key].answered(output)

    def _proceed(self, key: int, generator: Generator, on_finish: Callable[[Trajectory], None] | None) -> None:
        episode = self._stepped[key]
        if episode.asked is not None and episode.stop_reason is None:
            self._engine._ask(key, episode, generator)
        if episode.stop_reason is not None and not self._engine._ends(key, episode):
            del self._stepped[key]
            self._finish(key, episode.finished(), generator, on_finish)

    def _finish(
        self,
        key: int,
        trajectory: Trajectory,
        generator: Generator,
        on_finish: Callable[[Trajectory], None] | None,
    ) -> None:
        generator.release(key)
        self._finished[key] = trajectory
        self.under_way -= 1
        if self._kept is not None and not trajectory.stop_reason.failed:
            trajectory.environment = self._pool.environment(key)
            self._kept.append(ref(trajectory))
        self._pool.release(key, reusable=not trajectory.stop_reason.failed)
        if on_finish is not None:
            on_finish(trajectory)


_WAKE = "wake"
"""Outcome that belongs to no episode."""


@contextmanager
def _costs(episode: _Episode, source: str | None = None) -> Iterator[None]:
    """End the episode at an error, which its environment or history caused."""
    try:
        yield
    except BaseException as error:
        pass_on_interrupt(error)
        _fail(episode, error, source)


def _fail(episode: _Episode, error: BaseException, source: str | None = None) -> None:
    timeout = isinstance(error, EnvironmentTimeoutError)
    episode.stop_reason = StopReason.ENVIRONMENT_TIMEOUT if timeout else StopReason.ENVIRONMENT_ERROR
    episode.error = describe_error(error) if source is None else f"{source} raised {describe_error(error)}"


def _name_of(history: History) -> str:
    return f"history {getattr(history, '__name__', None) or history!r}"


def _check_return(reward: float, episode: _Episode) -> None:
    total = reward + sum(turn.reward for turn in episode.turns)
    if abs(total) > LARGEST_REWARD:
        raise EnvironmentProtocolError(
            f"the rewards of the episode add up to {total:.3g}; expected at most {LARGEST_REWARD:.3g} (float32)."
        )


def _noise(stream: tuple[int, ...]) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(stream)))
