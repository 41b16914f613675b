"""Adapts the environments of GEM (https://github.com/axon-rl/gem, the package ``gem-llm``) to the protocol."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import os
import pkgutil
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from agile_trainers.envs.base import EnvironmentFactory, ResetResult, StepResult, read_options
from agile_trainers.envs.isolation import levels as isolation
from agile_trainers.envs.isolation.calls import IsolatedDeath, run_isolated
from agile_trainers.envs.libraries import LIBRARIES, check_arguments, gem_grader
from agile_trainers.envs.libraries.global_random import OwnRandomState
from agile_trainers.envs.libraries.reasoning_gym import HASHED, check_scorer, score_answer
from agile_trainers.envs.scripted_policies import ScriptedPolicy

logger = logging.getLogger(__name__)

_MOVES = ("up", "down", "left", "right")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_RANDOM_ACTIONS: dict[str, Callable[[Any, random.Random], str]] = {
    "Crosswords": lambda game, rng: (
        f"{rng.randrange(len(game.board))} {rng.randrange(len(game.board[0]))} {rng.choice(_LETTERS)}"
    ),
    "FifteenPuzzle": lambda game, rng: rng.choice(_MOVES),
    "Game2048": lambda game, rng: rng.choice(_MOVES),
    "GuessTheNumber": lambda game, rng: str(rng.randint(game.min_number, game.max_number)),
    "Mastermind": lambda game, rng: " ".join(
        str(digit) for digit in rng.sample(range(1, game.num_numbers + 1), game.code_length)
    ),
    "Minesweeper": lambda game, rng: (
        f"{rng.choice(('reveal', 'flag'))} {rng.randrange(game.rows)} {rng.randrange(game.cols)}"
    ),
    "Sokoban": lambda game, rng: rng.choice(_MOVES),
    "Sudoku": lambda game, rng: " ".join(str(rng.randint(1, game.scale)) for _ in range(3)),
    "TowerofHanoi": lambda game, rng: " ".join(rng.sample("ABC", 2)),
}


def listed() -> list[str]:
    """List GEM's ids of all its environments (``game:GuessTheNumber-v0-easy``).

    Raises:
        ImportError: If GEM is not installed.
    """
    return list(_registry())


def make_factory(game: str, **kwargs: Any) -> EnvironmentFactory:
    """Make a factory of a game, and reject arguments that the game does not read.

    Raises:
        ValueError: If an argument is unknown, or processes that are launched together would play other questions.
    """
    # GEM itself ignores unknown ones.
    parameters = inspect.signature(pkgutil.resolve_name(_registry()[game].entry_point)).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    check_arguments(f"gem:{game}", kwargs, [*known, "wrappers"])
    random_order = sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED", "random") == "random"
    if random_order and game.removeprefix("rg:") in HASHED:
        told = (
            f"gem:{game} has other questions or answers in each process for the same seed, since it draws from Python's "
            "sets. Start Python with the environment variable PYTHONHASHSEED=0, or play "
            f"{game.replace('rg:', 'reasoning_gym:')}."
        )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # which may play a group together
            raise ValueError(told)
        logger.warning(told)
    return functools.partial(GemEnvironment, game, **kwargs)


class GemEnvironment:
    """One GEM environment.

    Observations are GEM's, followed by its task suffix (the board, for games that have one) until the game is over.
    ``info["success"]`` follows GEM's reward convention: rewards of a solved task sum to 1, given at the end
    (``LanguageGameReward.success_reward``) or in parts, and other outcomes give less. An answer without ``\\boxed{}`` ends
    the game with reward -0.1 as in GEM. A game that reaches its turn limit is both terminated and truncated, as in GEM;
    the limit is part of its announced rules.

    The parts of GEM that evaluate a model's text (its code runner, its mathematical grader, nine data sets of
    reasoning-gym) run in isolated processes; see :mod:`~agile_trainers.envs.libraries.gem`.

    The games draw from Python's and NumPy's global random state. Here each instance has its own state, which replaces the
    global one while GEM runs, so that episodes depend on their seed alone.

    Args:
        game: GEM's id, for example ``game:GuessTheNumber-v0-easy``.
        wrappers: Names of GEM's wrappers, inner first, for example ``("python_tool",)``. Rewards of a tool count as
            reward, not as success.
        kwargs: Further arguments of the GEM environment.

    Raises:
        ImportError: If GEM is not installed.
        ValueError: If a wrapper is unknown, or repeats the conversation in every observation.
        LookupError: Of NLTK, if the game needs its word list, which is missing.
        IsolationError: If the environment evaluates a model's text, but this machine has no isolation and running without
            it is not allowed.
    """

    def __init__(self, game: str, *, wrappers: Sequence[str] = (), **kwargs: Any):
        self.name = game
        self._random = OwnRandomState()
        self._return = 0.0
        make = _gem().make
        with self._random.in_place():
            self.game = isolate(f"gem:{game}", make(game, **kwargs))
        # Only the game itself uses random numbers; a slow tool must not block other instances.
        self._tooled = self.game
        self.game.reset, self.game.step = self._seeded(self.game.reset), self._seeded(self.game.step)
        for wrapper in wrappers:
            if wrapper.startswith("python_tool"):
                isolate_code_runner(f"gem:{game}")
            self._tooled = _wrapper(wrapper)(self._tooled)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start a game.

        Args:
            seed: Seed of all random numbers of the game. None continues the last game's random stream.
            options: ``{"seed": int}`` replaces ``seed``; other options are not read.

        Raises:
            ValueError: If there is another option.
        """
        seed = read_options(options, ("seed",), f"gem:{self.name}").get("seed", seed)
        if seed is not None and hasattr(self.game, "idx"):
            # Data set tasks count episodes and reshuffle after an epoch; here the seed alone must choose the question.
            self.game.idx = 0
        observation, info = self._tooled.reset(seed=None if seed is None else seed % 2**32)  # NumPy's range of seeds
        self._return = 0.0
        return _with_suffix(observation, info), _without_suffix(info)

    def step(self, action: str) -> StepResult:
        """Pass the action to GEM."""
        observation, reward, terminated, truncated, info = self._tooled.step(action)
        if "tool_type" not in info:
            self._return += float(reward)
        if not (terminated or truncated):
            observation = _with_suffix(observation, info)
        success = self._return > 1.0 - 1e-6
        return observation, float(reward), terminated, truncated, {**_without_suffix(info), "success": success}

    def scripted_policies(self) -> dict[str, ScriptedPolicy]:
        """Return the random policy, whose actions have the right format and do not depend on the board, for the games."""
        draw = _RANDOM_ACTIONS.get(self.name.removeprefix("game:").partition("-")[0])
        return {} if draw is None else {"random": lambda messages, rng: f"\\boxed{{{draw(self.game, rng)}}}"}

    def _seeded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            with self._random.in_place():
                return function(*args, **kwargs)

        return seeded

    def close(self) -> None:
        """Close GEM's environment."""
        if hasattr(self.game, "close"):
            self.game.close()


def _with_suffix(observation: str, info: dict[str, Any]) -> str:
    suffix = info.get("suffix", "")
    return f"{observation.rstrip()}\n{suffix}" if suffix else observation


def _without_suffix(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name != "suffix"}


def _wrapper(name: str) -> Callable[[Any], Any]:
    known = importlib.import_module("gem.wrappers.wrapper_factory").WRAPPER_FACTORY
    usable = [wrapper for wrapper in known if not wrapper.startswith("concat")]
    if name not in usable:
        repeats = ": it repeats the conversation, which the model sees anyway" if name in known else ""
        raise ValueError(
            f"wrappers cannot hold {name!r}{repeats}. GEM's wrappers that can be used: {', '.join(usable)}."
        )
    return known[name]


def _registry() -> dict[str, Any]:
    _gem()
    return importlib.import_module("gem.envs.registration").ENV_REGISTRY


def _gem() -> Any:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    gem = LIBRARIES["gem"].load()
    # Importing GEM configures the logging of the whole process, which is left to the application.
    root.setLevel(level)
    root.handlers[:] = handlers
    return gem


_CODE_MEMORY, _CODE_OUTPUT = 1024, 100_000
_GRADER_MEMORY = 4096
"""Megabytes; GEM's grader imports large packages."""


def isolate(name: str, game: Any) -> Any:
    """Replace the evaluators of a game by isolated ones, and return the game.

    Args:
        name: The environment's id, for errors.
        game: GEM's environment.

    Raises:
        IsolationError: If it has evaluators, but this machine has no isolation and running without it is not allowed.
    """
    if hasattr(game, "sandbox_type"):
        isolate_code_runner(name)
    if hasattr(game, "check_correct"):
        isolation.require(name)
        if game.use_mp:
            game.mp_pool.terminate()
        game.use_mp, game.close = False, lambda: None
        game._local_step = functools.partial(_step, name, game)
    if hasattr(game, "ds") and hasattr(game, "reward_fn"):
        check_scorer(game.name, game.ds, name)
        settings = json.dumps({"size": game.size, "seed": game.seed})
        game.reward_fn = lambda answer, entry: score_answer(game.name, game.ds, settings, answer, entry, name)
    return game


def _step(name: str, game: Any, action: str) -> Any:
    try:
        correct = run_isolated(gem_grader.is_correct, action, game.answer, memory=_GRADER_MEMORY, required_by=name)
    except (TimeoutError, IsolatedDeath):
        correct = False
    terminal = importlib.import_module("gem.utils.constants").TERMINAL_STATE
    return terminal, float(correct), True, True, {"correct": correct}


def isolate_code_runner(name: str) -> None:
    """Make GEM run every program in an isolated interpreter, for every ``sandbox_type``.

    Raises:
        IsolationError: If this machine has no isolation and running without it is not allowed.
    """
    isolation.require(name)
    sandbox: Any = importlib.import_module("gem.utils.sandbox")
    sandbox.subprocess_run = functools.partial(_run, name)


def _run(
    name: str, code: str, cmd_list: Any, sandbox_type: str, stdin: str | None = None, timeout: float = 10
) -> tuple[bool, str, str]:
    """Run a program isolated; replaces ``gem.utils.sandbox.subprocess_run``. Installed packages can be imported."""
    isolation.require(name)
    ran = isolation.run_program(
        code, stdin=stdin or "", timeout=timeout, memory=_CODE_MEMORY, max_output=_CODE_OUTPUT, sites=True
    )
    if ran.timed_out:
        return False, ran.printed, f"Execution timed out after {timeout} seconds."
    return ran.status == 0, ran.printed, ran.errors.strip() or ran.death
