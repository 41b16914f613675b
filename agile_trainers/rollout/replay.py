"""Plays episodes again up to where a checkpoint was saved, from the answers that were sampled before."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from transformers.utils import logging

from agile_trainers.rollout.generators.base import FinishReason, GenerationOutput, GenerationRequest, Generator
from agile_trainers.rollout.spec import GivenAnswer
from agile_trainers.types import keyed

logger = logging.get_logger(__name__)


@dataclass
class RecordedAnswer:
    """An answer, and the prompt that it was sampled after."""

    prompt: str
    """Digest of the prompt's ids, or the request's ``identity``."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    kept: list[bytes] | None = None
    """The set of tokens that was kept for each; see :class:`~agile_trainers.types.Trajectory`."""


@dataclass
class RecordedEpisode:
    """The answers of an episode so far."""

    answers: list[RecordedAnswer] = field(default_factory=list)
    noise: dict[str, Any] | None = None
    """State of its stream of random numbers; None if the episode has ended, or has no such stream."""

    def to_json(self) -> dict[str, Any]:
        """Convert to what JSON can hold."""
        record = asdict(self)
        for answer in record["answers"]:
            if answer["kept"] is None:
                del answer["kept"]
            else:
                answer["kept"] = [b64encode(kept).decode() for kept in answer["kept"]]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RecordedEpisode:
        """Convert from what :meth:`to_json` returned."""
        answers = [RecordedAnswer(**answer) for answer in record["answers"]]
        for answer in answers:
            if answer.kept is not None:
                answer.kept = [b64decode(kept) for kept in answer.kept]
        return cls(answers, record["noise"])


def digest_of_ids(token_ids: Sequence[int]) -> str:
    """Return a digest of some token ids."""
    return blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=16).hexdigest()


def noise_state(noise: np.random.Generator, state: Any = None) -> dict[str, Any]:
    """Return the state of a stream of random numbers as JSON.

    Args:
        noise: The stream.
        state: An earlier state of it. Default: the present one.
    """
    state = state or noise.bit_generator.state
    inner = {name: [int(word) for word in words] for name, words in state["state"].items()}
    return {**state, "state": inner, "buffer": [int(word) for word in state["buffer"]]}


def set_noise_state(noise: np.random.Generator, state: dict[str, Any]) -> None:
    """Set the state of a stream that :func:`noise_state` returned."""
    inner = {name: np.array(words, dtype=np.uint64) for name, words in state["state"].items()}
    noise.bit_generator.state = {**state, "state": inner, "buffer": np.array(state["buffer"], dtype=np.uint64)}


class ReplayingGenerator:
    """Gives the answers that were recorded, and leaves the rest to another generator.

    An environment that does not repeat itself sends another prompt: from there on the episode is sampled. Requests with an
    ``identity`` are answered in any order; those that were not answered before are sampled.

    Args:
        generator: The other generator.
        recorded: Key of an episode to its answers, which are taken from there.
        on_end: Called with the key and the record of an episode whose last answer was given.
    """

    def __init__(
        self, generator: Generator, recorded: dict[int, RecordedEpisode], on_end: Callable[[int, RecordedEpisode], None]
    ) -> None:
        self._generator, self._recorded, self._on_end = generator, recorded, on_end
        self._staged: list[tuple[GenerationRequest, RecordedAnswer]] = []
        self._wake: Callable[[], None] = lambda: None
        tells: Callable[[Callable[[], None]], None] | None = getattr(generator, "listen", None)
        self.listen = None if tells is None else partial(self._listen, tells)
        """Calls a function whenever an answer is there, if the other generator tells that."""

    def _listen(self, tells: Callable[[Callable[[], None]], None], wake: Callable[[], None]) -> None:
        self._wake = wake
        tells(wake)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :class:`Generator`."""
        answer = self._recorded_for(request)
        if answer is None:
            self._generator.submit(request)
        else:
            self._staged.append((request, answer))
            self._wake()

    def _recorded_for(self, request: GenerationRequest) -> RecordedAnswer | None:
        record = self._recorded.get(request.episode)
        if record is None:
            return None
        if request.identity is not None:
            return next((answer for answer in record.answers if answer.prompt == request.identity), None)
        if record.answers[0].prompt == digest_of_ids(keyed(request.token_ids, request.pictures)):
            return record.answers[0]
        del self._recorded[request.episode]
        logger.warning(
            "An environment did not repeat itself after a checkpoint: the same actions led to another observation. Its "
            "episode goes on with new answers."
        )
        return None

    def step(self) -> list[GenerationOutput]:
        """Return the recorded answers that are due; if none is, make progress with the other generator."""
        staged, self._staged = self._staged, []
        if not staged:
            return self._generator.step()
        self._wake()  # it is asked next; an error of it costs no recorded answer
        return [self._answer(request, answer) for request, answer in staged]

    def _answer(self, request: GenerationRequest, answer: RecordedAnswer) -> GenerationOutput:
        key, record = request.episode, self._recorded[request.episode]
        record.answers.remove(answer)
        if not record.answers:
            del self._recorded[key]
            self._on_end(key, record)
        reason = cast(FinishReason, answer.finish_reason)
        return GenerationOutput(
            key, answer.token_ids, answer.logprobs, reason, request.call, read=None, kept=answer.kept
        )

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned."""
        return len(self._staged) + self._generator.pending

    def release(self, episode: int) -> None:
        """Forget an episode; see :class:`Generator`."""
        self._staged = [staged for staged in self._staged if staged[0].episode != episode]
        self._generator.release(episode)


class DemonstratingGenerator(ReplayingGenerator):
    """Gives the answers of experts, and leaves other episodes to another generator.

    Args:
        generator: The other generator.
        given: Key of an episode to the answers that are left of it, which are taken from there.
    """

    def __init__(self, generator: Generator, given: dict[int, list[GivenAnswer]]) -> None:
        super().__init__(generator, {}, lambda key, record: None)
        self._given = given

    def _recorded_for(self, request: GenerationRequest) -> RecordedAnswer | None:
        answers = self._given.get(request.episode)
        if answers is None:
            return None
        if not answers:
            raise ValueError(
                "A demonstration has no answers left, and its environment asks for more. It was recorded to another end: "
                "lower max_turns to its number of turns, or record it again."
            )
        answer = answers[0]
        known = answer.prompt_ids == request.token_ids
        ids, logprobs = answer.token_ids, [0.0] * len(answer.token_ids)
        if known:
            ids, logprobs = answer.sampled_ids, answer.logprobs
        if len(ids) > request.max_new_tokens:
            raise ValueError(
                f"An answer of a demonstration has {len(ids)} tokens, more than the {request.max_new_tokens} that are left. "
                "Raise max_new_tokens, or max_model_length if that is what is left of it."
            )
        return RecordedAnswer("", ids, logprobs, "stop")

    def _answer(self, request: GenerationRequest, answer: RecordedAnswer) -> GenerationOutput:
        self._given[request.episode].pop(0)
        return GenerationOutput(request.episode, answer.token_ids, answer.logprobs, "stop", request.call, read=None)


def warn_of(left: RecordedEpisode) -> None:
    """Say that an episode has ended before all its recorded answers were given."""
    logger.warning(
        "An agent or an environment did not repeat itself after a checkpoint: its episode ended without %d of the answers "
        "that it had been given before.",
        len(left.answers),
    )
