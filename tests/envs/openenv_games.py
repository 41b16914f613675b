"""Two environments of OpenEnv, and applications that serve them.

Only a test that serves one imports this: it takes seconds, which every worker would need to collect tests.
"""

from __future__ import annotations

import threading
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str
    success: bool = False


TOGETHER = threading.Barrier(8)
"""Opens when eight sessions step at once."""


class GuessServer(Environment[Guess, Hint, State]):
    """Guess a number of 1..9; the seed is the secret."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, low: int = 1, **kwargs: Any) -> Hint:
        self.secret, self.steps = (seed or 0) % 9 + 1, 0
        return Hint(hint=f"Guess a number from {low} to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.steps += 1
        if action.text == "crash":
            raise RuntimeError("the server's own bug")
        if action.text == "together":
            TOGETHER.wait(timeout=20)
        right = action.text.strip() == str(self.secret)
        return Hint(hint="right" if right else "wrong", success=right, reward=1.0 if right else None, done=right)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Move(Action):
    row: int
    column: int


class Board(Observation):
    board: str


class BoardServer(Environment[Move, Board, State]):
    """Hit the one ship at (1, 2). One environment, whoever asks."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        return Board(board="...\n...")

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Board:
        hit = (action.row, action.column) == (1, 2)
        return Board(board="hit" if hit else "miss", reward=float(hit), done=hit)

    @property
    def state(self) -> State:
        return State()


def guess_app(sessions: int) -> Any:
    """The application of a server that holds so many sessions of :class:`GuessServer` at once."""
    return create_fastapi_app(GuessServer, Guess, Hint, max_concurrent_envs=sessions)


def board_app() -> Any:
    """The application of a server of :class:`BoardServer`."""
    return create_fastapi_app(BoardServer, Move, Board)
