"""A generator that answers from a function, for tests and scripted players."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.checks import check_request

Script = Callable[[GenerationRequest], "list[int] | GenerationOutput"]


@dataclass
class _Answer:
    output: GenerationOutput
    steps_left: int


class ScriptedGenerator:
    """Answers every request with the result of ``script``.

    Args:
        script: Function from a request to its answer: token ids, which then have log-probability 0.0 and finish reason
            ``"stop"``, or a ``GenerationOutput``. Ids beyond ``max_new_tokens`` are cut off, with ``"length"``.
        latency: Number of ``step`` calls until an answer is returned, or a function from the request to it. Default 1.
            Answers of the same step are in the order of submission.
    """

    def __init__(self, script: Script, latency: int | Callable[[GenerationRequest], int] = 1) -> None:
        self._script = script
        self._latency = latency
        self._known: dict[int, list[int]] = {}
        self._under_way: dict[int, _Answer] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request and call the script immediately.

        Raises:
            ValueError: If the request (see ``check_request``) or the script's answer is malformed.
        """
        check_request(request, self._known.get(request.episode, []), request.episode in self._under_way)
        output = _answer(self._script(request), request)
        steps = self._latency(request) if callable(self._latency) else self._latency
        if steps < 1:
            raise ValueError(f"`latency` is {steps} for episode {request.episode}, expected at least 1 step.")
        self._known[request.episode] = [*request.token_ids, *output.token_ids]
        self._under_way[request.episode] = _Answer(output, steps)

    def step(self) -> list[GenerationOutput]:
        """Advance one step and return the answers that are due."""
        for answer in self._under_way.values():
            answer.steps_left -= 1
        done = [episode for episode, answer in self._under_way.items() if answer.steps_left == 0]
        return [self._under_way.pop(episode).output for episode in done]

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet answered."""
        return len(self._under_way)

    def release(self, episode: int) -> None:
        """Forget an episode and its pending request, if any."""
        self._known.pop(episode, None)
        self._under_way.pop(episode, None)


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
    limit = request.max_new_tokens
    if len(answer.token_ids) <= limit:
        return answer
    return GenerationOutput(answer.episode, answer.token_ids[:limit], answer.logprobs[:limit], "length")
