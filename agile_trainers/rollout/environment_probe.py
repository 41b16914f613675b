"""Tries an environment before a run: it is reset and stepped once, and its first prompt must leave room for an answer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers.utils import logging

from agile_trainers.envs.agent import Agent
from agile_trainers.envs.base import ResetResult, as_messages
from agile_trainers.envs.checker import (
    EnvironmentProtocolError,
    check_methods,
    describe_error,
    validate_context,
    validate_end,
    validate_reset,
    validate_step,
)
from agile_trainers.envs.context import Context
from agile_trainers.imports import pass_on_interrupt
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool, InlineTimeoutError
from agile_trainers.rollout.episode_options import UNLIMITED
from agile_trainers.rollout.process_environment import ProcessEnvironment
from agile_trainers.types import StopReason

logger = logging.get_logger(__name__)

LONGEST = 1 << 20
"""``max_tokens`` of the context that an environment is tried with."""


def probe_environment(
    pool: EnvironmentPool,
    seed: int,
    row: dict[str, Any] | None,
    environment: str | None = None,
    *,
    with_rows: bool = False,
    with_context: bool = True,
) -> ResetResult | None:
    """Reset, step and end once, in the pool and from the state of the first episode; the instance is kept for it.

    An agent has no state to try. What it says of its first row is checked.

    Args:
        pool: Where the run's environments will run.
        seed: Of the environment.
        row: The first dataset row, or None without rows.
        environment: Which of several; None where there is one.
        with_rows: Whether there are rows to evaluate on, if there are none to train on.
        with_context: Whether its own ``context`` is asked, as no history replaces it.

    Returns:
        The first observation and its info; None for an agent, whose prompts are known when it asks.

    Raises:
        EnvironmentProtocolError: If the environment fails or breaks the protocol.
        ValueError: If an agent cannot play the row.
    """
    agent = pool.agent(environment)
    if agent is not None:
        agent.check_row(row)
        return None
    method, name, reusable = "the factory", pool.titles[environment], False
    try:
        instance = pool.environment(0, environment)
        if not isinstance(instance, ProcessEnvironment):
            name = type(instance).__name__
        if environment is not None:
            name = f"{environment} ({name})"
        if isinstance(instance, Agent):
            raise EnvironmentProtocolError(
                "calling it makes an agent, not the environment of an episode. Pass the agent itself, or the id "
                "agent:module.path:function of what makes it"
            )
        check_methods(instance, with_rows=with_rows or row is not None, with_context=with_context)
        pool.release(0, reusable=True)
        method = f"reset(options={row!r})"
        pool.reset(0, seed, deepcopy(row), environment)
        start = validate_reset(_outcome(pool))
        if with_context and pool.rewrites(0):
            method, messages = "context()", as_messages(start[0])
            pool.context(0, Context(messages, messages, tokens=1, max_tokens=LONGEST))
            if (shown := _outcome(pool)) is not NotImplemented:
                validate_context(shown, method)
        method = "step()"
        pool.step(0, "0")
        _, _, terminated, truncated, _ = validate_step(_outcome(pool))
        method = "end()"
        if not (terminated or truncated) and pool.end(0, StopReason.MAX_TURNS):
            validate_end(_outcome(pool))
        reusable = True
    except InlineTimeoutError:
        raise
    except BaseException as error:
        pass_on_interrupt(error)
        broken = isinstance(error, EnvironmentProtocolError)
        why = error if broken else f"{method} raised {describe_error(error)}"
        raise EnvironmentProtocolError(f"{name} cannot be played:\n- {why}") from error
    finally:
        pool.release(0, reusable=reusable)
    if start[0] == "":
        logger.warning(f"{name}: the first observation is empty: the model sees nothing")
    return start


def _outcome(pool: EnvironmentPool) -> Any:
    (outcome,) = pool.outcomes(block=True)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def check_first_prompt(
    engine: RolloutEngine, start: ResetResult | None, environment: str | None = None, *, needs_anchor: bool = False
) -> None:
    """Check that a first observation can be written as a prompt of some tokens and leaves room for an answer.

    Args:
        engine: The trainer's engine.
        start: What :func:`probe_environment` returned.
        environment: Which of several; None where there is one.
        needs_anchor: Whether the algorithm compares turns by the state they started from.

    Raises:
        ValueError: If it does not, or names no anchor where one is needed.
    """
    if start is None:
        if needs_anchor:
            raise ValueError(
                "advantage_granularity='anchor' compares turns that start from the same state, which an agent does not "
                "name. Choose advantage_granularity='turn' or 'trajectory'."
            )
        return
    observation, info = start
    if needs_anchor and info.get("anchor") is None:
        raise ValueError(
            "advantage_granularity='anchor' compares turns that start from the same state, but the environment does not "
            f"name it: the info of reset() is {info!r}. Put a string under info['anchor'] in reset() and step(), or "
            "choose advantage_granularity='turn'."
        )
    length = len(engine.first_prompt(observation, environment))
    if not length:
        raise ValueError(  # transformers makes an empty tokenizer where a folder has none
            f"The tokenizer of {engine.chat.tokenizer_name} makes no tokens of the first prompt, {observation!r:.200}. If "
            "files of the tokenizer are missing (tokenizer.json, tokenizer_config.json), copy them from the base model."
        )
    if length >= (room := engine.limits_of(environment).max_model_length):
        of = "" if environment is None else f" of the environment {environment!r}"
        raise ValueError(
            f"The first prompt{of} has {length} tokens and leaves no room to answer within max_model_length={room}. Raise "
            "max_model_length, or shorten the environment's first observation."
        )


def planned_tokens(engine: RolloutEngine, starts: Mapping[str | None, ResetResult | None]) -> int:
    """Estimate the tokens of the longest conversation, if no observation is longer than the first.

    What an agent will ask is not known: its conversations are planned as long as ``max_model_length`` allows, by default as
    long as the model can read.

    Args:
        engine: The trainer's engine, whose limits bound it.
        starts: What :func:`probe_environment` returned for each environment, by its name.

    Raises:
        ValueError: If an agent's conversations are not limited.
    """

    def of(name: str | None, start: ResetResult | None) -> int:
        limits = engine.limits_of(name)
        if start is None and limits.max_model_length >= UNLIMITED:
            raise ValueError(
                "max_model_length is not set, the model names no limit, and what an agent asks is not known: memory cannot "
                "be planned. Set max_model_length to the tokens of the longest conversation."
            )
        if start is None:
            return limits.max_model_length
        turn = len(engine.first_prompt(start[0], name)) + limits.max_new_tokens
        return min(limits.max_turns * turn, limits.max_model_length)

    return max(of(name, start) for name, start in starts.items())
