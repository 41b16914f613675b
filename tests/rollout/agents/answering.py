"""An exchange that really answers, from a function, in a thread of its own. The tests of clients use it, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agile_trainers.envs.agent import Endpoint
from agile_trainers.rollout.agents.requests import (
    Answer,
    CalledTool,
    ChatRequest,
    Choice,
    Refusal,
    SampledToken,
    Ticket,
    wrong_key,
)

KEY, REWARD_KEY = "the-episodes-key", "the-key-of-its-rewards"
CREATED = 1_790_000_000


def said(text: str = "", *calls: tuple[str, dict[str, Any]], finish: Any = None, n: int = 1, number: int = 0) -> Answer:
    """An answer of a text and tool calls, ``n`` times; the first call has the id of ``number``."""
    called = tuple(CalledTool(f"call{number + place}", name, given) for place, (name, given) in enumerate(calls))
    tokens = tuple(SampledToken(word, -0.5 * place) for place, word in enumerate(text.split(" ")))
    choice = Choice(text, called, finish or ("tool_calls" if called else "stop"), tokens)
    return Answer("a1", "policy", CREATED, (choice,) * n, prompt_tokens=7, completion_tokens=3 * n)


class Answering:
    """Answers what a function returns; a refusal that it raises is the answer, and None leaves the request open."""

    def __init__(
        self, reply: Callable[[ChatRequest], Answer | None], models: Mapping[str, Endpoint] | None = None
    ) -> None:
        self._reply, self._models = reply, models or {}
        self._pool = ThreadPoolExecutor(1)
        self._news = threading.Condition()
        self.asked: list[Ticket] = []
        self.ends: list[tuple[str, Ticket]] = []
        """``delivered`` and ``abandoned``, in order."""
        self.rewards: list[tuple[Any, str | None]] = []

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def models(self, key: str) -> Mapping[str, Endpoint]:
        if key != KEY:
            raise Refusal("There is no episode with this key.", 401, "invalid_api_key")
        return self._models

    def ask(self, key: str, ticket: Ticket) -> None:
        assert key == KEY
        self._note(self.asked, ticket)
        self._pool.submit(self._answer, ticket)

    def _answer(self, ticket: Ticket) -> None:
        try:
            answer = self._reply(ticket.request)
        except BaseException as error:
            ticket.answer.set_exception(error)
        else:
            if answer is not None:
                ticket.answer.set_result(answer)

    def delivered(self, key: str, ticket: Ticket) -> None:
        self._note(self.ends, ("delivered", ticket))

    def abandoned(self, key: str, ticket: Ticket) -> None:
        self._note(self.ends, ("abandoned", ticket))

    def reward(self, key: str, value: Any, call: str | None) -> None:
        if key != REWARD_KEY:
            raise wrong_key("reward_key")
        if not isinstance(value, (int, float)):
            raise Refusal(f"the reward is {value!r}; expected a finite number.")
        self._note(self.rewards, (value, call))

    def _note(self, where: list[Any], what: Any) -> None:
        with self._news:
            where.append(what)
            self._news.notify_all()

    def wait_for(self, asked: int = 0, ends: int = 0, seconds: float = 60.0) -> None:
        """Wait until so many requests have been asked, and so many have ended."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.asked) >= asked and len(self.ends) >= ends, seconds)
