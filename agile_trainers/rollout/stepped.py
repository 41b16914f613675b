"""Episodes of environments with ``reset`` and ``step``: how each goes on from what its environment and the model say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agile_trainers.envs.base import Observation, as_messages
from agile_trainers.envs.checker import (
    LARGEST_REWARD,
    EnvironmentProtocolError,
    describe_failure,
    validate_context,
    validate_end,
    validate_reset,
    validate_step,
)
from agile_trainers.envs.context import Context, History, Question, full
from agile_trainers.envs.images import check_images
from agile_trainers.imports import pass_on_interrupt
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.environment_pool import EnvironmentPool, EnvironmentTimeoutError, Outcome
from agile_trainers.rollout.forest import OF_TURNS, Call, Fork, forest, on_one_path
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.replay import (
    RecordedAnswer,
    RecordedEpisode,
    digest_of_ids,
    noise_state,
    set_noise_state,
)
from agile_trainers.rollout.spec import EpisodeSpec, Limits, cut_observation
from agile_trainers.types import Message, Picture, StopReason, Trajectory, Turn, common_prefix, keyed, text_of


@dataclass
class _Episode:
    key: int
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
    pictures: list[list[Picture]] = field(default_factory=list)
    """The images of each."""
    begun: list[Message] = field(default_factory=list)
    """The messages that the last one began with."""
    turns: list[Turn] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    kept: list[list[bytes] | None] = field(default_factory=list)
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
    ended: bool = False

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
        self.kept.append(output.kept)
        self.context = [*self.context, {"role": "assistant", "content": text}]
        self.answered = len(self.context)
        self.asked = None

    def begin(self, messages: list[Message], ids: list[int], pictures: list[Picture]) -> None:
        """Begin a new conversation."""
        own = keyed(ids, pictures)
        before = [keyed(*both) for both in zip(self.paths, self.pictures, strict=True)]
        # The last token of either was not read, or is read once more for what follows it.
        self.shared = max((min(common_prefix(one, own), len(one) - 1, len(own) - 1) for one in before), default=0)
        self.begun = messages
        self.paths.append(ids)
        self.pictures.append(pictures)

    def extend(self, ids: Sequence[int], pictures: list[Picture]) -> None:
        """Append an observation to the last conversation."""
        self.paths[-1] += ids
        self.pictures[-1] += pictures

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
        fields["pictures"] = self.pictures if any(self.pictures) else None
        fields |= on_one_path(self.paths[0] if self.paths else [], self.turns, self.logprobs, self.kept)
        return Trajectory(stop_reason=self.stop_reason, **fields)

    def record(self) -> RecordedEpisode:
        """Return the answers so far."""
        calls = [self.call(k) for k in range(len(self.turns))]
        answers = [
            RecordedAnswer(
                digest_of_ids(keyed(it.prompt_ids, it.pictures)), it.answer_ids, it.logprobs, it.finish_reason, it.kept
            )
            for it in calls
        ]
        return RecordedEpisode(answers, None if self.ended else noise_state(self.noise, self.before))

    def unanswered(self) -> list[GenerationRequest]:
        """Return the request that waits for its answer, which draws the same numbers again."""
        if self.before is None:
            return []
        self.noise.bit_generator.state = self.before
        return [_request(self)]

    def replayed(self, record: RecordedEpisode) -> None:
        """Let an episode whose recorded answers were given draw the numbers that it would have drawn."""
        if record.noise is not None:
            set_noise_state(self.noise, record.noise)

    def call(self, k: int) -> Call:
        """Return a turn with its prompt and its answer."""
        turn = self.turns[k]
        path = self.paths[turn.path]
        return Call(
            path[: turn.place],
            path[turn.place : turn.place + turn.end],
            self.logprobs[k],
            kept=self.kept[k],
            pictures=self.pictures[turn.path],
            **{name: getattr(turn, name) for name in OF_TURNS},
        )


@dataclass(eq=False, repr=False)
class SteppedRollout:
    """Plays the episodes of a rollout whose environments are stepped (:class:`~agile_trainers.rollout.rollout.Episodes`).

    Args:
        pool: Runs the environments.
        chat: Converts messages to token ids.
        histories: See :class:`~agile_trainers.rollout.engine.RolloutEngine`, as the next two.
        system_prompt: System message for first observations that have none.
        append_final_observation: Append the last observation of a truncated episode.
    """

    pool: EnvironmentPool
    chat: ChatRenderer
    histories: Mapping[str | None, History]
    system_prompt: str | None
    append_final_observation: bool

    def start(self, key: int, spec: EpisodeSpec, limits: Limits) -> _Episode:
        """Let the environment of an episode begin."""
        # A copy, since an environment may modify its row.
        self.pool.reset(key, spec.seed, deepcopy(spec.options), spec.environment)
        return _Episode(key, spec, limits, _noise(spec.stream))

    def on_outcome(self, outcome: Outcome, episode: _Episode | None) -> list[GenerationRequest]:
        """Take what an environment's call has brought. Return what is to be sampled."""
        if episode is None:
            return []
        self._heard(outcome, episode)
        return self._go_on(episode)

    def on_output(self, output: GenerationOutput, episode: _Episode) -> list[GenerationRequest]:
        """Take an answer. Return what is to be sampled."""
        self._answered(output, episode)
        return self._go_on(episode)

    def _go_on(self, episode: _Episode) -> list[GenerationRequest]:
        """Return the next request of an episode, if there is one. Otherwise end the episode if it is over."""
        requests = []
        if episode.asked is not None and episode.stop_reason is None:
            if episode.room < 1:
                episode.stop_reason = StopReason.CONTEXT_FULL
            else:
                episode.before = episode.noise.bit_generator.state
                requests.append(_request(episode))
        if episode.stop_reason is not None:
            episode.ended = not self._ends(episode)
        return requests

    def _heard(self, outcome: Outcome, episode: _Episode) -> None:
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

    def _ends(self, episode: _Episode) -> bool:
        """Tell the environment that a limit of the trainer ends an episode; True if it answers with a reward."""
        assert episode.stop_reason is not None
        if episode.ending or not episode.turns or not episode.stop_reason.limit:
            return False
        episode.ending = True
        return self.pool.end(episode.key, str(episode.stop_reason))

    def _start(self, outcome: Outcome, episode: _Episode) -> None:
        observation, episode.reset_info = validate_reset(outcome.value)
        observation = _cut(observation, episode)
        episode.first = episode.context = first_messages(observation, self.system_prompt)
        self._propose(episode)

    def _observe(self, outcome: Outcome, episode: _Episode) -> None:
        observation, reward, terminated, truncated, info = validate_step(outcome.value)
        _check_return(reward, episode)
        observation = _cut(observation, episode)
        delimited = [] if terminated else self.chat.delimited(observation, episode.paths[-1][-1])
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
            self._propose(episode, delimited)
            return
        if not terminated and self.append_final_observation and episode.room >= len(delimited):
            episode.extend(delimited, self.chat.pictures(as_messages(observation)))

    def _propose(self, episode: _Episode, delimited: Sequence[int] = ()) -> None:
        """Go on with the context, or with what it is rewritten to.

        Args:
            episode: The episode.
            delimited: What would be appended to the conversation.
        """
        history = self.histories.get(episode.spec.environment)
        if history is full or (history is None and not self.pool.rewrites(episode.key)):
            self._show(episode, episode.context, delimited=delimited)
            return
        tokens = len(episode.paths[-1]) + len(delimited) if episode.paths else len(self.chat.first(episode.context))
        context = Context(episode.context, episode.first, tokens, episode.limits.max_model_length)
        if history is None:
            self.pool.context(episode.key, context)
            return
        messages, name = None, _name_of(history)
        with _costs(episode, name):
            messages = history(context)
        if episode.stop_reason is None:
            self._show(episode, messages, name)

    def _show(
        self, episode: _Episode, messages: Any, source: str | None = None, delimited: Sequence[int] | None = None
    ) -> None:
        """Let the model answer a context: of the conversation, if that only goes on, else of a new one.

        Args:
            episode: The episode.
            messages: The context.
            source: What rewrote it; None if nothing did.
            delimited: What the conversation goes on with, if that is known.
        """
        question = issubclass(type(messages), Question)  # whatever it says of its class
        if source is not None:
            messages = validate_context(messages, source)
            # Every message has a token of its own.
            least = sum(len(text_of(one)) + 1 for one in messages)
            if least > episode.limits.max_model_length * self.chat.longest_token:
                episode.stop_reason = StopReason.REWRITE_FULL  # whatever its tokens are: megabytes take long to encode
                return
        known = episode.context
        unchanged, episode.context = messages == known, messages
        if not episode.turns:
            episode.prompt = messages
            episode.begin(messages, self.chat.first(messages), self.chat.pictures(messages))
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
        if any(one["role"] == "assistant" for one in said):
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
            delimited = self.chat.delimited(said, path[-1]) if delimited is None or not unchanged else delimited
            room = episode.room - len(delimited)
            if room < 1:
                episode.stop_reason = StopReason.CONTEXT_FULL
            if room >= 1 or (self.append_final_observation and room == 0):
                check_images(messages)
                episode.extend(delimited, self.chat.pictures(said))
        else:
            episode.begin(messages, self.chat.first(messages, sampled=True), self.chat.pictures(messages))
            if episode.room < 1:
                episode.stop_reason = StopReason.REWRITE_FULL if fork is Fork.CONTEXT else StopReason.CONTEXT_FULL
        episode.ask(None if unchanged and fork is None else messages, fork, question)

    def _answered(self, output: GenerationOutput, episode: _Episode) -> None:
        text = self.chat.decode(output.token_ids)
        assert episode.asked is not None
        question, episode.before = episode.asked.question, None
        episode.answer(output, text)
        if not question:
            self.pool.step(episode.key, text)
        elif len(episode.turns) >= episode.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        else:
            with _costs(episode):
                self._propose(episode)


def first_messages(observation: Observation, system_prompt: str | None) -> list[Message]:
    """Return the messages of a first observation, with the system prompt if it has none."""
    messages = as_messages(observation)
    if system_prompt is not None and (not messages or messages[0]["role"] != "system"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _cut(observation: Observation, episode: _Episode) -> Observation:
    observation, cut = cut_observation(observation, episode.limits.max_observation_length)
    episode.observations_cut += cut
    return observation


def _request(episode: _Episode) -> GenerationRequest:
    assert episode.asked is not None
    return GenerationRequest(
        episode=episode.key,
        token_ids=list(episode.paths[-1]),
        max_new_tokens=min(episode.limits.max_new_tokens, episode.room),
        uniforms=lambda n: episode.noise.random(n).tolist(),
        extends=episode.asked.fork is None,
        pictures=list(episode.pictures[-1]),
    )


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
    episode.error = describe_failure(error) if source is None else f"{source} raised {describe_failure(error)}"


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
