"""The calls of one agent's episode: every sampled answer is trained once, with the ids that were sampled."""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from transformers.utils import logging

from agile_trainers.envs.agent import CONTEXT_FULL, MAX_TURNS, Agent
from agile_trainers.envs.checker import (
    LARGEST_REWARD,
    EnvironmentProtocolError,
    describe_error,
    describe_failure,
    validate_result,
)
from agile_trainers.envs.tools.toolbox import ToolCall, parse_tool_calls
from agile_trainers.imports import pass_on_interrupt
from agile_trainers.records.plain import plain_text
from agile_trainers.rollout.agents.dialects.base import parse as strict_json
from agile_trainers.rollout.agents.requests import (
    POLICY,
    Answer,
    Asked,
    CalledTool,
    ChatRequest,
    Choice,
    Received,
    Refusal,
    SampledToken,
    Ticket,
    as_message,
    check_name_lengths,
    check_request,
    over,
    refuse_request,
    rewarded_too_early,
)
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.environment_pool import EnvironmentTimeoutError
from agile_trainers.rollout.forest import Call, Fork, conversation, forest
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.replay import RecordedAnswer, RecordedEpisode
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import Message, Picture, StopReason, Trajectory, common_prefix, keyed, parts_of, text_of

_HERMES = re.compile(r"\s*<tool_call>.*?</tool_call>\s*", re.DOTALL)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Characters of a tool call's id: the template of Mistral takes no other length."""


def length_to_stop(ids: Sequence[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """Return the number of tokens up to the one that completes a stop string; None if there is none.

    Args:
        ids: The sampled tokens.
        stop: The stop strings.
        decode: Decodes tokens.
    """

    def stops(length: int) -> bool:
        text = decode(list(ids[:length]))
        return any(one in text for one in stop)

    if not stop or not stops(len(ids)):
        return None
    return 1 + bisect_left(range(1, len(ids)), True, key=stops)


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string in it, and that."""
    places = {one: text.find(one) for one in stop if one in text}
    first = min(places, key=places.__getitem__) if places else None
    return (text, None) if first is None else (text[: places[first]], first)


def tool_calls(
    text: str, identity: bytes, parse: Callable[[], Message | None] = lambda: None
) -> tuple[str, tuple[CalledTool, ...]]:
    """Part the tool calls of an answer from its other text.

    An answer with a call that broke off or is malformed is text as a whole: its author sees what the model wrote.

    Args:
        text: The answer.
        identity: The source of the calls' ids, so that they repeat with the tokens.
        parse: Parses an answer that has no call in the form of Hermes or Llama 3, into a message; None if nothing can.

    Returns:
        The other text and the calls.
    """
    found = parse_tool_calls(text)
    calls = [call for call in found if isinstance(call, ToolCall)]
    if calls and len(calls) == len(found):
        rest = _HERMES.sub("", text) if "<tool_call>" in text else ""
    elif calls or (message := parse()) is None or not message.get("tool_calls"):
        return text, ()
    else:
        functions = [one["function"] for one in message["tool_calls"]]
        if not all(isinstance(one["name"], str) and isinstance(one["arguments"], dict) for one in functions):
            return text, ()
        rest, calls = message["content"], [ToolCall(one["name"], one["arguments"]) for one in functions]
    try:
        for call in calls:
            strict_json(json.dumps(call.arguments))
    except Refusal:  # NaN, half a surrogate pair: no client could send it back
        return text, ()
    return rest, tuple(
        CalledTool(_call_id(identity, place), call.name, call.arguments) for place, call in enumerate(calls)
    )


def _call_id(identity: bytes, place: int) -> str:
    number, letters = int.from_bytes(sha256(identity + bytes([place % 256, place // 256])).digest()), ""
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        letters += _DIGITS[digit]
    return letters


logger = logging.get_logger(__name__)

_LIMITS = {MAX_TURNS: StopReason.MAX_TURNS, CONTEXT_FULL: StopReason.CONTEXT_FULL}
_SHOWN = 40
"""Characters around a difference that a record shows."""


@dataclass(eq=False)
class _Sample:
    """One sampled answer."""

    asked: _Asked
    prompt_ids: list[int]
    occurrence: tuple[int, ...]
    """Tells it from the other answers to the same prompt."""
    shown: list[Message]
    """The messages that the prompt was rendered from."""
    begun: list[str]
    """Roles of the first messages of its conversation."""
    after: _Sample | None = None
    """The one that it goes on from."""
    fork: Fork | None = None
    pictures: Sequence[Picture] = ()
    """The images of the prompt, in order."""
    info: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[bytes] | None = None
    text: str = ""
    """The sampled text."""
    choice: Choice | None = None
    """The answer as the client gets it; None until it is sampled."""
    finish_reason: str = "stop"
    reward: float = 0.0
    read: int | None = None
    begins: bool = False
    """True if it was asked for before there was any answer."""

    @cached_property
    def key(self) -> list[int]:
        """The prompt's ids, with the keys of images."""
        return keyed(self.prompt_ids, self.pictures) if self.pictures else self.prompt_ids

    @cached_property
    def prompt(self) -> bytes:
        """Digest of the prompt."""
        return _digest_of(self.key)

    @property
    def identity(self) -> str:
        """Digest of what the answer's noise depends on within its episode."""
        return sha256(_text([self.prompt.hex(), self.asked.trained, self.occurrence]).encode()).hexdigest()

    @property
    def order(self) -> tuple[list[int], tuple[int, ...]]:
        """Orders answers by what was sampled, whenever that was; an answer comes after those that its prompt contains."""
        return self.key, self.occurrence


@dataclass(eq=False, kw_only=True)
class _Asked(Asked):
    """A request, and what is sampled for it."""

    number: int
    """Requests before it."""
    context: tuple[str, ...]
    """A key of each message as sent."""
    tools: str
    samples: list[_Sample] = field(default_factory=list)
    answered: float = math.inf
    """Samples that were asked for before its answer was there."""


class AgentEpisode:
    """The calls of one episode.

    Requests come in any order and several at once. What is sampled depends on (the episode's stream, the prompt's ids, how
    often it was asked for) alone.

    Args:
        index: The episode's key among the generator's requests.
        spec: The episode.
        limits: Its limits.
        chat: Renders prompts.
        agent: The agent, for what it declares.
    """

    def __init__(self, index: int, spec: EpisodeSpec, limits: Limits, chat: ChatRenderer, agent: Agent) -> None:
        self.index, self.spec, self.limits, self.chat, self.agent = index, spec, limits, chat, agent
        self.stop_reason: StopReason | None = None
        self.posted: deque[tuple[float, _Sample]] = deque()
        """Rewards that the endpoint has taken and :meth:`reward` has not."""
        self._received: Received[_Asked] = Received()
        self._by_answer: defaultdict[str, list[_Sample]] = defaultdict(list)
        self._samples: list[_Sample] = []
        """The samples that were asked for, in order; the index is the generator's ``call``."""
        self._pending: set[int] = set()
        self._occurrences: Counter[tuple[bytes, bool, tuple[int, ...]]] = Counter()
        self._rewards: list[tuple[_Sample, int]] = []
        """Answers that were rewarded, and the number of answers asked for before that."""
        self._refused: Counter[str] = Counter()
        self._limited: dict[str, int] = {}
        """Limits that refused a request, and the number of answers asked for before the last time."""
        self._error: str | None = None
        self._end_reward: float | None = None
        self._result_info: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------- what comes in

    def ask(self, ticket: Ticket) -> list[GenerationRequest]:
        """Take a request. Return what is to be sampled for it: nothing if it repeats one, or is refused."""
        try:
            return self._ask(ticket)
        except Refusal as refusal:
            if ticket.request.model == POLICY:
                self._refused[refusal.code] += 1
                self._limited[refusal.code] = len(self._samples)
            refuse_request(ticket, refusal)
        except Exception as error:  # one of ours: it costs this episode, not the others
            logger.exception("A request of an agent failed in its episode.")
            refuse_request(ticket, Refusal(f"The endpoint failed: {describe_error(error)}", 500, "server_error"))
        return []

    def answered(self, output: GenerationOutput) -> None:
        """Take a sampled answer, and send it when its request has all of them."""
        if output.call not in self._pending:
            return
        self._pending.remove(output.call)
        sample = self._samples[output.call]
        self._keep(sample, output)
        asked = sample.asked
        if all(one.choice is not None for one in asked.samples):
            request = asked.request
            choices = tuple(one.choice for one in asked.samples if one.choice is not None)
            answer = Answer(
                id=self._id(asked),
                model=request.model,
                created=int(time.time()),
                choices=choices,
                prompt_tokens=len(sample.prompt_ids),
                completion_tokens=sum(len(one.ids) for one in asked.samples),
            )
            asked.answered = len(self._samples)
            asked.send(answer)

    def delivered(self, ticket: Ticket) -> None:
        """Note that a client got its answer."""
        self._received.delivered(ticket)

    def abandoned(self, ticket: Ticket) -> None:
        """Note that a client hung up: its answer waits for the next equal request."""
        for asked in self._received.abandoned(ticket):
            for sample in asked.samples:
                sample.info["hung_up"] = True

    def reward(self, value: float, sample: _Sample) -> None:
        """Reward an answer that :meth:`sample_of` has found."""
        sample.reward += value
        self._rewards.append((sample, len(self._samples)))

    def sample_of(self, call: str | None) -> _Sample:
        """Return the answer that an id names.

        Args:
            call: The id with its dialect's prefix, of several choices with ``:index`` after it; None for the last one.

        Raises:
            Refusal: If there is none, or there are several.
        """
        if call is None:
            answered = [one for one in list(self._samples) if one.choice is not None and one.asked.trained]
            if not answered:
                raise rewarded_too_early()
            return answered[-1]
        asked, place = self._received.rewarded(call)
        return asked.samples[place]

    def end(self, value: Any, error: BaseException | None) -> None:
        """Take what the agent returned, or its exception, and refuse the requests that are still open."""
        try:
            if error is not None:
                raise error
            reward, self._result_info = validate_result(value)
            samples = self._trained()
            last = max((one.info["number"] for one in samples), default=-1)
            # An agent whose policy answered after that has found a way around it.
            limit = next((reason for code, reason in _LIMITS.items() if self._limited.get(code, -1) > last), None)
            if not samples:
                raise EnvironmentProtocolError(
                    "the agent asked for no answer of the policy. Let its client use model.base_url, model.api_key and "
                    "model.name."
                )
            if abs(reward + sum(one.reward for one in samples)) > LARGEST_REWARD:
                raise EnvironmentProtocolError(f"the rewards of the episode exceed {LARGEST_REWARD:.3g} (float32).")
            samples[-1].reward += reward
            self._end_reward = None if limit is None else reward
            self.stop_reason = limit or StopReason.TERMINATED
        except EnvironmentTimeoutError as late:
            self.stop_reason, self._error = StopReason.ENVIRONMENT_TIMEOUT, describe_error(late)
        except BaseException as raised:
            if raised is not error:  # the pool has passed on an interrupt of the user during the agent's calls
                pass_on_interrupt(raised)
            self.stop_reason, self._error = StopReason.ENVIRONMENT_ERROR, describe_failure(raised)
        if self._error is not None and self._refused:
            counts = ", ".join(f"{code}: {count}" for code, count in self._refused.items())
            self._error += f" (requests that were refused: {counts})"
        self.close()

    def close(self) -> None:
        """Refuse the requests that are still open."""
        for asked in self._received.by_id.values():
            for ticket in asked.waiting:
                refuse_request(ticket, over())

    # ------------------------------------------------------------------------------------------------- what comes out

    @property
    def waits(self) -> bool:
        """True if an answer is being sampled."""
        return bool(self._pending)

    def unanswered(self) -> list[GenerationRequest]:
        """Return the requests that wait for their answers, each with its noise from the beginning."""
        return [self._requested(number) for number in sorted(self._pending)]

    @property
    def ended(self) -> bool:
        """True once the agent has returned."""
        return self.stop_reason is not None

    def replayed(self, record: RecordedEpisode) -> None:
        """Leave the episode as it is: its answers draw no numbers of a common stream."""

    def record(self) -> RecordedEpisode:
        """Return the answers so far, those too that are not trained."""
        answered = [one for one in self._samples if one.choice is not None]
        return RecordedEpisode(
            [RecordedAnswer(one.identity, one.ids, one.logprobs, one.finish_reason, one.kept) for one in answered]
        )

    def finished(self) -> Trajectory:
        """Return the episode."""
        assert self.stop_reason is not None
        samples = self._trained()
        # Calls are ordered by their prompts, but an episode starts from what was asked first.
        first = min([one for one in samples if one.begins] or samples, key=lambda one: one.order, default=None)
        fields: dict[str, Any] = {
            "prompt": first.shown if first else [],
            "seed": self.spec.seed,
            "environment_name": self.spec.environment,
            "error": self._error,
            "end_reward": self._end_reward,
            "options": self.spec.options,
            "read_again": self._read_again(),
        }
        if not samples:
            return Trajectory([], [], [], [], self.stop_reason, **fields)
        calls = [
            Call(
                sample.prompt_ids,
                sample.ids,
                sample.logprobs,
                sample.text,
                sample.finish_reason,
                sample.reward,
                info={"call": sample.info},
                messages=sample.shown,
                fork=None if sample.fork is None else str(sample.fork),
                kept=sample.kept,
                pictures=sample.pictures,
            )
            for sample in samples
        ]
        if "call" in self._result_info:
            logger.warning_once(
                "An agent's info has 'call', which is the record of its last call. Give it another name."
            )
        calls[-1].info = {**self._result_info, **calls[-1].info}
        for place, (before, sample) in enumerate(pairwise(samples)):
            if sample.after is before:
                calls[place].observation = sample.shown[len(before.shown) + 1 :]
                calls[place + 1].messages = None
        if samples[0] is first:
            calls[0].messages = None
        if all(sample.after is before for before, sample in pairwise(samples)):
            self._leave_rewards_out(samples, calls)
            return conversation(calls, self.stop_reason, **fields)
        for call in calls:
            call.rewarded = 0  # which reward came before which of several calls at once may depend on their answers
        last = samples.index(self._asked_last(samples))
        return forest(calls, self.stop_reason, linear=False, asked_last=last, **fields)

    def _asked_last(self, samples: list[_Sample]) -> _Sample:
        """Return the answer that was asked for last; of those in flight together the last in the order of turns."""
        heard = [one for one in samples if one.asked.delivered or not one.asked.abandoned] or samples
        last = max(one.info["number"] for one in heard)
        return max((one for one in heard if one.asked.answered > last), key=lambda one: one.order)

    def _leave_rewards_out(self, samples: list[_Sample], calls: list[Call]) -> None:
        """Let an answer's return begin with the first reward that was given after it was asked for."""
        numbers = {id(sample): place for place, sample in enumerate(samples)}
        late = [(numbers[id(sample)], before) for sample, before in self._rewards if id(sample) in numbers]
        for place, (sample, call) in enumerate(zip(samples, calls, strict=True)):
            asked = sample.info["number"]
            first = min([place, *(one for one, before in late if before > asked)])
            call.rewarded = None if first == place else first

    def _trained(self) -> list[_Sample]:
        """Return the trained answers in an order that does not depend on time."""
        return sorted((one for one in self._samples if one.choice and one.asked.trained), key=lambda one: one.order)

    def _read_again(self) -> int | None:
        again, before = 0, list[list[int]]()
        for sample in self._samples:
            if sample.choice is None:
                continue
            if sample.read is None:
                return None
            ids = sample.key
            # The last token of either was not read, or is read once more for what follows it.
            shared = max((min(common_prefix(one, ids), len(one) - 1, len(ids) - 1) for one in before), default=0)
            again += max(0, sample.read - (len(ids) - shared))
            before.append([*ids, *sample.ids])
        return again

    # ------------------------------------------------------------------------------------------------------ requests

    def _ask(self, ticket: Ticket) -> list[GenerationRequest]:
        request = ticket.request
        if (earlier := self._received.repeated(ticket)) is not None:
            for sample in earlier.samples:
                sample.info["repeated"] = sample.info.get("repeated", 0) + 1
            return []
        self._check(request)
        if len(request.messages) > self.limits.max_model_length:  # each has a token of its own
            raise self._too_long(len(request.messages))
        self._check_size(request)
        messages = self._received.conversation(request)
        if request.previous is not None:  # with the conversation before
            self._check_size(request)
        asked = _Asked(
            request=request,
            waiting=[ticket],
            number=len(self._received.by_id),
            context=tuple(map(_key, messages)),
            tools=_text(request.tools),
        )
        try:
            pictures = self.chat.pictures(messages)
            first = self._rendered(asked, messages)
        except Refusal:
            raise
        except ValueError as error:
            raise Refusal(f"The messages cannot be written as a prompt: {plain_text(str(error))}") from error
        room = self.limits.max_model_length - len(first.prompt_ids)
        if room < 1:
            raise self._too_long(len(first.prompt_ids))
        prompt = _digest_of(keyed(first.prompt_ids, pictures))
        label = () if ticket.marks.occurrence is None else tuple(_words(ticket.marks.occurrence.encode()))
        requests = []
        for _ in range(request.n):
            count = self._occurrences[prompt, asked.trained, label]
            self._occurrences[prompt, asked.trained, label] += 1
            sample = replace(first, occurrence=(*label, count), pictures=pictures, info={})
            sample.fork = self._fork(sample)
            asked.samples.append(sample)
            requests.append(self._submitted(sample))
        self._received.add(self._id(asked), asked, ticket.marks)
        return requests

    def _too_long(self, tokens: int) -> Refusal:
        return Refusal(
            # The first words are OpenAI's, by which clients know this error.
            f"This model's maximum context length is {self.limits.max_model_length} tokens (max_model_length), which leaves "
            f"no room for an answer to a prompt of {tokens} or more. Shorten the conversation, or raise max_model_length.",
            code=CONTEXT_FULL,
        )

    def _check(self, request: ChatRequest) -> None:
        """Refuse a request that this run does not answer."""
        check_request(request, self.agent)
        used = sum(one.asked.trained for one in self._samples)
        if request.model == POLICY and used + request.n > self.limits.max_turns:
            raise Refusal(
                f"The episode has used {used} of its max_turns={self.limits.max_turns} calls, and {request.n} more are "
                "asked for. Let the agent end here, or raise max_turns.",
                code=MAX_TURNS,
            )

    def _check_size(self, request: ChatRequest) -> None:
        """Refuse a request that is too long whatever its tokens are: megabytes take minutes, and all episodes would wait."""
        messages = [one for one in request.messages if isinstance(one, dict) and "content" in one]  # others are refused
        check_name_lengths(messages)
        longest = self.chat.longest_token
        for characters in accumulate(_least_characters(messages, request.tools, longest)):
            if characters > self.limits.max_model_length * longest:
                raise self._too_long(-(-characters // longest))

    def _rendered(self, asked: _Asked, messages: list[Message]) -> _Sample:
        """Return a sample of a request with its prompt: an echo of an earlier answer keeps the ids that were sampled."""
        chat = self.chat.with_tools(asked.request.tools)
        shown, answers, exact = list(messages), dict[int, list[int]](), None
        for place, key in enumerate(asked.context):
            if messages[place]["role"] != "assistant" or not (found := self._by_answer.get(key)):
                continue
            same = [
                one for one in found if one.asked.context == asked.context[:place] and one.asked.tools == asked.tools
            ]
            # Elsewhere a stop string, which was sampled and is not sent, would be in the prompt.
            whole = [one for one in found if one.choice is not None and one.choice.stop is None]
            if not (same or whole):
                continue
            chosen = min(same or whole, key=lambda one: (one.order, one.ids))
            shown[place], answers[place] = {"role": "assistant", "content": chosen.text}, chosen.ids
            exact = (place, chosen) if same else None
        said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        fork = Fork.CONTEXT if said else Fork.NEW
        if exact is not None and exact[0] == said[-1]:
            place, before = exact
            delimited = self._delimited(chat, shown[:place], before, messages[place + 1 :])
            if delimited is not None:
                return _Sample(asked, [*before.prompt_ids, *before.ids, *delimited], (), shown, before.begun, before)
            fork = Fork.TEMPLATE
        ids = chat.spliced(shown, answers)
        if ids is None:  # as it was sent: tool calls as such, not as the text that they were sampled as
            ids, shown = chat.first(messages, sampled=True), messages
        return _Sample(asked, ids, (), shown, [message["role"] for message in messages], None, fork)

    def _delimited(self, chat: ChatRenderer, context: list[Message], before: _Sample, after: Any) -> list[int] | None:
        """Return the ids between an answer and the next one, None if the template does not write the messages there."""
        try:
            if not chat.goes_on(context, before.begun, before.ids, after):
                return None
            if len(after) == 1 and after[0] == {"role": "user", "content": text_of(after[0])}:
                after = after[0]["content"]  # texts are cached
            return chat.delimited(after, before.ids[-1])
        except ValueError:  # Gemma 4's writes a tool's result only after a call that is a field of the message
            if not chat.forks:
                raise
            return None

    def _fork(self, sample: _Sample) -> Fork | None:
        """Return why a path begins with an answer, and note where its prompt parts from the earlier ones."""
        earlier = self._samples
        if not earlier:
            return None
        if any(one.key == sample.key for one in earlier):
            return Fork.AGAIN
        if sample.after is not None:
            return Fork.BRANCH if any(one.after is sample.after for one in earlier) else None

        def shared(one: _Sample) -> int:
            length = common_prefix(one.key, sample.key)
            return length + common_prefix(one.ids, sample.key[length:]) * (length == len(one.key))

        nearest = max(earlier, key=shared)
        place = shared(nearest)
        whole = [*nearest.prompt_ids, *nearest.ids]
        was, now = (self.chat.decode(ids[place : place + _SHOWN]) for ids in (whole, sample.prompt_ids))
        sample.info["parts"] = {"token": place, "was": was[:_SHOWN], "now": now[:_SHOWN]}
        return sample.fork

    def _submitted(self, sample: _Sample) -> GenerationRequest:
        asked, number = sample.asked, len(self._samples)
        sample.begins = all(one.choice is None for one in self._samples)
        self._samples.append(sample)
        self._pending.add(number)
        ticket = asked.waiting[0]
        sample.info |= {"number": number, "request": asked.number}
        if asked.request.tools:
            sample.info["tools"] = [tool["function"]["name"] for tool in asked.request.tools]
        if ticket.marks.client:
            sample.info["client"] = ticket.marks.client[:200]
        if asked.request.sampling:
            sample.info["asked"] = asked.request.sampling
            _warn_of(asked.request.sampling)
        return self._requested(number)

    def _requested(self, number: int) -> GenerationRequest:
        """Return the request of a sample, whose noise begins anew."""
        sample = self._samples[number]
        asked = sample.asked
        limit = min(self.limits.max_new_tokens, self.limits.max_model_length - len(sample.prompt_ids))
        own = asked.request.max_tokens or limit
        if own < limit:
            sample.info["max_tokens"] = own  # an answer that it cuts is as long as the agent wants it
        noise = cache(partial(noise_of, self.spec.stream, sample.prompt, sample.occurrence, trained=asked.trained))
        return GenerationRequest(
            episode=self.index,
            token_ids=list(sample.prompt_ids),
            max_new_tokens=min(limit, own),
            uniforms=lambda n: noise().random(n).tolist(),
            call=number,
            extends=False,
            pictures=sample.pictures,
            identity=sample.identity,
        )

    def _keep(self, sample: _Sample, output: GenerationOutput) -> None:
        """Keep what was sampled, up to a stop string, and make of it what the client gets."""
        request = sample.asked.request
        length = length_to_stop(output.token_ids, request.stop, self.chat.decode)
        sample.ids, sample.logprobs = output.token_ids[:length], output.logprobs[:length]
        sample.kept = None if output.kept is None else output.kept[:length]
        sample.finish_reason = output.finish_reason if length is None else "stop"
        sample.read, sample.text = output.read, self.chat.decode(sample.ids)
        text, stop = cut_at_stop(sample.text, request.stop)
        calls: tuple[CalledTool, ...] = ()
        if request.tools and request.calls_tools:
            identity = sample.prompt + _text(sample.occurrence).encode()
            chat = self.chat.with_tools(request.tools)
            whole = sample.finish_reason == "stop" and stop is None  # else a call that broke off might be completed
            parse = partial(chat.parsed, sample.prompt_ids, sample.ids) if whole else lambda: None
            text, calls = tool_calls(text, identity, parse)
        tokens = zip(sample.ids, sample.logprobs, strict=True) if request.logprobs else ()
        sample.choice = Choice(
            text,
            calls,
            "length" if sample.finish_reason == "length" else "tool_calls" if calls else "stop",
            tuple(self._token(token, logprob) for token, logprob in tokens),
            stop,
        )
        self._by_answer[_key(as_message(sample.choice))].append(sample)

    def _token(self, token: int, logprob: float) -> SampledToken:
        text = self.chat.decode([token])
        return SampledToken(text, logprob, self.chat.pieces.get(token) if "\N{REPLACEMENT CHARACTER}" in text else None)

    def _id(self, asked: _Asked) -> str:
        """Make an answer's id, which repeats with the run."""
        return sha256(_text([*map(int, self.spec.stream), asked.number]).encode()).hexdigest()[:24]


def noise_of(
    stream: tuple[int, ...], prompt: bytes, occurrence: Sequence[int], *, trained: bool = True
) -> np.random.Generator:
    """Return the sampling noise of one answer. It does not depend on what else is sampled at the time.

    Args:
        stream: The episode's.
        prompt: Digest of the prompt's ids.
        occurrence: Which of the answers to this prompt.
        trained: Whether the answer is trained.
    """
    entropy = [*stream, *_words(prompt), int(trained), *occurrence]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def _key(message: Message) -> str:
    """Return what is compared of a message: of a tool call its function, since clients give it ids of their own."""
    if message["role"] != "assistant":
        return _text(message)
    calls = [_whole(one.get("function")) for one in message.get("tool_calls") or ()]
    return _text([message["role"], message["content"], calls])


def _whole(value: Any) -> Any:
    """Return JSON data with 1.0 as 1: clients in JavaScript know no other form of it."""
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _least_characters(messages: list[Message], tools: Any, longest: int) -> Iterator[int]:
    """Yield the least that each text of a request takes in its prompt, in characters; ``longest`` are those of a token."""
    for message in messages:
        for part in parts_of(message):  # each has a token of its own
            yield (len(part.get("text", "")) // longest + 1) * longest
        for call in message.get("tool_calls") or ():
            yield from _json_characters(call.get("function"))
    yield from _json_characters(tools)


def _json_characters(value: Any) -> Iterator[int]:
    """Yield the characters of each text and whole number in JSON data, and one for what parts it from the next one."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left.extend(chain.from_iterable(item.items()))
        elif isinstance(item, list):
            left.extend(item)
        digits = item.bit_length() * 3 // 10 if isinstance(item, int) else 0  # at least; JSON has no largest number
        yield 1 + (len(item) if isinstance(item, str) else digits)


def _digest_of(ids: Sequence[int]) -> bytes:
    return sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()


def _words(digest: bytes) -> list[int]:
    return [int(word) for word in np.frombuffer(digest.ljust(-(-len(digest) // 4) * 4, b"\0"), dtype=np.uint32)]


_warned: set[str] = set()


def _warn_of(sampling: dict[str, Any]) -> None:
    """Say once for each setting that the run decides it."""
    if new := sorted(set(sampling) - _warned):
        _warned.update(new)
        logger.warning(
            "The agent asks for %s, but the run decides the distribution, so that what is trained is what was sampled. The "
            "request's values are recorded. Set them in the trainer's configuration.",
            ", ".join(f"{name}={sampling[name]!r:.50}" for name in new),
        )
