"""What the rollout tests play with: a tokenizer of whole words, and an environment that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agile_trainers.embedded import make_word_tokenizer
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits

TOKENIZER = make_word_tokenizer(["system", "go", "up", "down", "end", "a", "b", "c"])
CHAT = ChatRenderer(TOKENIZER)


def ids(layout: str) -> list[int]:
    """The ids of a drawn layout: tokens between spaces; ↵ for a newline, [ and ] for ``<|im_start|>`` and ``<|im_end|>``."""
    names = {"↵": "\n", "[": "<|im_start|>", "]": "<|im_end|>"}
    vocab = TOKENIZER.get_vocab()
    return [vocab[names.get(token, token)] for token in layout.split()]


def go_on(observation: Any, reward: float = 0.0, **info: Any) -> tuple[Any, ...]:
    """A step after which the episode goes on."""
    return observation, reward, False, False, info


def end(reward: float = 0.0, **info: Any) -> tuple[Any, ...]:
    """A step that ends the episode."""
    return "end", reward, True, False, info


class Scripted:
    """Does what its options say.

    ``start`` is what ``reset`` does, ``answers`` what each ``step`` does (the last one over and over): an exception is
    raised, a function is called with the action, anything else is returned. ``resets`` and ``closed`` count calls.
    """

    def __init__(self) -> None:
        self.resets = self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets += 1
        options = options or {}
        self.answers = list(options.get("answers", [end()]))
        return self._do(options.get("start", ("go", {"seed": seed})), "")

    def step(self, action: str) -> Any:
        return self._do(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0], action)

    def _do(self, what: Any, action: str) -> Any:
        if isinstance(what, BaseException):
            raise what
        return what(action) if callable(what) else what


class Factory:
    """Makes environments and remembers them."""

    def __init__(self, kind: type[Scripted] = Scripted) -> None:
        self.kind = kind
        self.made: list[Scripted] = []

    def __call__(self) -> Scripted:
        self.made.append(self.kind())
        return self.made[-1]


def specs(*episodes: dict[str, Any]) -> list[EpisodeSpec]:
    """One spec per options dict, seeds counting up."""
    return [EpisodeSpec(seed, (seed,), options) for seed, options in enumerate(episodes)]


def make_engine(
    factory: Callable[[], Any] = Scripted,
    *,
    workers: int = 0,
    timeout: float | None = None,
    processes: int = 0,
    max_environments: int | None = None,
    max_turns: int = 4,
    max_new_tokens: int = 3,
    max_model_length: int = 1000,
    **options: Any,
) -> RolloutEngine:
    """An engine on the word tokenizer."""
    limits = Limits(max_turns, max_new_tokens, max_model_length)
    pool = EnvironmentPool(factory, workers, timeout, processes=processes, max_environments=max_environments)
    return RolloutEngine(pool, CHAT, limits, **options)


class ScriptedSampler(ScriptedGenerator):
    """Answers with the given layouts, the same for every episode (the last one over and over); keeps the requests.

    The log-probability of an action's ``i``-th token is ``-(i + 1)``.
    """

    def __init__(
        self, answers: Sequence[str] = ("a ]",), latency: int | Callable[[GenerationRequest], int] = 1
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self._answers = [ids(answer) for answer in answers]
        super().__init__(self._next, latency)

    def of(self, episode: int) -> list[GenerationRequest]:
        """The requests of one episode."""
        return [request for request in self.requests if request.episode == episode]

    def _next(self, request: GenerationRequest) -> GenerationOutput:
        turn = len(self.of(request.episode))
        self.requests.append(request)
        answer = self._answers[min(turn, len(self._answers) - 1)]
        return GenerationOutput(request.episode, answer, [-float(i + 1) for i in range(len(answer))], "stop")
