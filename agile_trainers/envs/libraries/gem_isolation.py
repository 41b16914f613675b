"""Isolates the parts of GEM that evaluate a model's text: code runner, mathematical grader, reasoning-gym's scorers."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any

from agile_trainers.envs.isolation import levels as isolation
from agile_trainers.envs.isolation.calls import IsolatedDeath, run_isolated
from agile_trainers.envs.libraries import gem_grader
from agile_trainers.envs.libraries.reasoning_gym import check_scorer, score_answer

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
