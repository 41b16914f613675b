"""Adapts TextArena's single-player games (https://github.com/LeonGuertler/TextArena) to the protocol."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import random
from typing import Any

from agile_trainers.envs.base import EnvironmentFactory, ResetResult, StepResult, read_options
from agile_trainers.envs.libraries import LIBRARIES, check_arguments
from agile_trainers.envs.libraries.global_random import OwnRandomState

OFFLINE_GAMES = (
    "2048-v0", "2048-v0-3x3", "2048-v0-easy", "2048-v0-ultra-easy", "Bandit-v0", "Bandit-v0-hard", "Blackjack-v0",
    "Blackjack-v0-long", "FifteenPuzzle-v0", "FrozenLake-v0", "FrozenLake-v0-hardcore", "FrozenLake-v0-random",
    "GuessTheNumber-v0", "GuessTheNumber-v0-hardcore", "LightsOut-v0", "LogicPuzzle-v0", "LogicPuzzle-v0-hard",
    "Mastermind-v0", "Mastermind-v0-extreme", "Mastermind-v0-hard", "Minesweeper-v0", "Minesweeper-v0-hard",
    "Minesweeper-v0-medium", "Minesweeper-v0-small", "PegJump-v0", "RushHour-v0", "Secretary-v0", "Secretary-v0-long",
    "Set-v0", "Sokoban-v0", "Sudoku-v0", "Sudoku-v0-easy", "Sudoku-v0-hard", "Sudoku-v0-medium", "Sudoku-v0-very-easy",
    "TowerOfHanoi-v0", "TowerOfHanoi-v0-hard", "TowerOfHanoi-v0-medium",
)  # fmt: skip
"""Single-player games without downloads (TextArena 0.7.4). Wordle, Hangman, WordLadder and WordSearch need NLTK's word
list, Crosswords its tagger, TwentyQuestions and GuessWho a key for OpenRouter; Countdown, Cryptarithm, Klondike,
Slitherlink and ThreeCardMonte are broken in that release."""


def listed() -> list[str]:
    """List the ids of games for one player without further requirements."""
    return [game for game in OFFLINE_GAMES if game in _registry()]


def knows(game: str) -> bool:
    """Return whether TextArena has this id."""
    return game in _registry()


def make_factory(game: str, **kwargs: Any) -> EnvironmentFactory:
    """Make a factory and one environment, so that invalid games are rejected at once.

    Raises:
        Exception: See :class:`TextArenaEnvironment`.
    """
    TextArenaEnvironment(game, **kwargs)
    return functools.partial(TextArenaEnvironment, game, **kwargs)


class TextArenaEnvironment:
    """One single-player game of TextArena.

    An observation is the game's output since the last one. TextArena's observation wrappers, which repeat the
    conversation, are removed, so ids with and without ``-train`` play alike. Its action wrappers stay: most ids add
    brackets to an answer without them, those ending in ``-raw`` do not. The reward comes with the last step. An answer
    that breaks the rules may be repeated as often as the game allows, usually once. ``info["success"]`` is True for a
    reward of 1 or more, TextArena's reward of a solved game. ``info["reason"]`` on the last step is the game's verdict.

    Args:
        game: TextArena's id, for example ``GuessTheNumber-v0``.
        kwargs: Arguments of the game, for example ``max_number=50``.

    Raises:
        ImportError: If TextArena is not installed.
        ValueError: If the game does not read one of ``kwargs``, or is for several players.
        LookupError: Of NLTK, if the game needs a missing download.
        RuntimeError: If the game needs a key or a newer Python.
    """

    def __init__(self, game: str, **kwargs: Any):
        self.name = f"textarena:{game}"
        self._random = OwnRandomState()
        textarena = LIBRARIES["textarena"].load()
        with self._random.in_place():
            try:
                check_arguments(self.name, kwargs, inspect.signature(_entry_point(game)).parameters)
                self._wrapped = textarena.make(game, **kwargs)
                self.game = self._wrapped
                while isinstance(self.game, textarena.Wrapper):
                    self.game = self.game.env
                self._check_players(textarena)
            except (SyntaxError, ImportError, AttributeError, OSError) as error:
                raise RuntimeError(f"{self.name} does not load: {type(error).__name__}: {error}") from error

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start a game.

        Args:
            seed: Seed of all random numbers of the game. None continues the last game's random stream.
            options: ``{"seed": int}`` replaces ``seed``; other options are not read.

        Raises:
            ValueError: If there is another option.
        """
        seed = read_options(options, ("seed",), self.name).get("seed", seed)
        if seed is not None:
            self._random.seed(seed)
        with self._random.in_place():
            # Some games use the global random state before they read the seed, others only the seed.
            self._wrapped.reset(num_players=1, seed=random.getrandbits(32))
        return self._said(), {}

    def step(self, action: str) -> StepResult:
        """Pass the answer to the game."""
        with self._random.in_place():
            terminated, info = self._wrapped.step(action=action)
        if not terminated:
            return self._said(), 0.0, False, False, {**info, "success": False}
        reward, reason = float(self.game.state.rewards[0]), self.game.state.game_info[0].get("reason")
        observation = "\n\n".join(filter(None, [self._said(), reason]))
        return observation, reward, True, False, {**info, "reason": reason, "success": reward > 1.0 - 1e-6}

    def _said(self) -> str:
        """Return the game's output since the last call, without the player's answers."""
        _, messages = self.game.get_observation()
        return "\n\n".join(text.strip() for sender, text, _ in messages if sender < 0)

    def _check_players(self, textarena: Any) -> None:
        reason = ""
        try:
            self._wrapped.reset(num_players=1, seed=0)
        except (AssertionError, ValueError) as error:
            reason = f" ({error})"
        if reason or not isinstance(self.game.state, textarena.SinglePlayerState):
            raise ValueError(
                f"{self.name} is not a game for one player{reason}. Games for one player: {', '.join(OFFLINE_GAMES)}."
            )


def _entry_point(game: str) -> Any:
    entry_point = _registry()[game].entry_point
    return pkgutil.resolve_name(entry_point) if isinstance(entry_point, str) else entry_point


def _registry() -> dict[str, Any]:
    LIBRARIES["textarena"].load()
    return importlib.import_module("textarena.envs.registration").ENV_REGISTRY
