"""A generator that answers from a function, for tests and scripted policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agile_trainers.rollout.generators.base import Conversations, GenerationOutput, GenerationRequest

Script = Callable[[GenerationRequest], "list[int] | GenerationOutput"]


@dataclass
class _Answer:
    request: GenerationRequest
    output: GenerationOutput
    steps_left: int


class ScriptedGenerator:
    """Answers every request with the result of ``script``.

    Args:
        script: Function from a request to its answer: token ids, which then have log-probability 0.0 and finish reason
            ``"stop"``, or a ``GenerationOutput``. Ids beyond ``max_new_tokens`` are cut off, with ``"length"``. Nothing is
            cached: ``read`` is the length of the request, unless the script's output has another.
        latency: Number of ``step`` calls until an answer is returned, or a function from the request to it. Default 1.
            Answers of the same step are in the order of submission.
    """

    def __init__(self, script: Script, latency: int | Callable[[GenerationRequest], int] = 1) -> None:
        self._script = script
        self._latency = latency
        self._conversations = Conversations[_Answer]()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request and call the script immediately.

        Raises:
            ValueError: If the request (see :meth:`.Conversations.check`) or the script's answer is malformed.
        """
        self._conversations.check(request)
        output = _answer(self._script(request), request)
        steps = self._latency(request) if callable(self._latency) else self._latency
        self._conversations.submitted(request, _Answer(request, output, steps))

    def step(self) -> list[GenerationOutput]:
        """Advance one step and return the answers that are due."""
        for answer in self._conversations.pending.values():
            answer.steps_left -= 1
        done = [answer for answer in self._conversations.pending.values() if answer.steps_left == 0]
        for answer in done:
            self._conversations.answered(answer.request, answer.output.token_ids)
        return [answer.output for answer in done]

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet answered."""
        return len(self._conversations.pending)

    def release(self, episode: int) -> None:
        """Forget an episode and its pending requests, if any."""
        self._conversations.release(episode)


def _answer(answer: list[int] | GenerationOutput, request: GenerationRequest) -> GenerationOutput:
    if not isinstance(answer, GenerationOutput):
        answer = GenerationOutput(request.episode, list(answer), [0.0] * len(answer), "stop")
    if answer.episode != request.episode:
        raise ValueError(f"The script answered a request of episode {request.episode} with episode {answer.episode}.")
    if not answer.token_ids or len(answer.token_ids) != len(answer.logprobs):
        raise ValueError(
            f"The script answered episode {request.episode} with {len(answer.token_ids)} ids and "
            f"{len(answer.logprobs)} log-probabilities; expected equally many, at least one."
        )
    read = len(request.token_ids) if answer.read is None else answer.read
    answer = replace(answer, call=request.call, read=read)
    limit = request.max_new_tokens
    if len(answer.token_ids) <= limit:
        return answer
    return replace(answer, token_ids=answer.token_ids[:limit], logprobs=answer.logprobs[:limit], finish_reason="length")
