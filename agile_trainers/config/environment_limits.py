"""Checks and applies ``environment_limits`` and ``environment_weights``, options by the environment's name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from agile_trainers.config.config import MultiTurnConfig

LIMITS = ("max_turns", "max_new_tokens", "max_model_length", "max_observation_length")
"""Names of the limits that an environment may have of its own."""

Config = TypeVar("Config", bound="MultiTurnConfig")


def check_environments(args: MultiTurnConfig) -> None:
    """Check the values of ``environment_limits`` and ``environment_weights``, before the environments are known.

    Raises:
        ValueError: For an unknown limit or a value that is out of range; the message names the environment.
    """
    limits = _by_name("environment_limits", args.environment_limits, '{"guess": {"max_turns": 4}}')
    for name, given in limits.items():
        own = _by_name(f"environment_limits[{name!r}]", given, '{"max_turns": 4}')
        for limit, value in own.items():
            if limit not in LIMITS:
                raise ValueError(
                    f"environment_limits[{name!r}] has the unknown limit {limit!r}. Use any of {', '.join(LIMITS)}."
                )
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"environment_limits[{name!r}]: {limit} must be a whole number of at least 1, got {value!r}."
                )
        if args.min_new_tokens > own.get("max_new_tokens", args.max_new_tokens):
            raise ValueError(
                f"environment_limits[{name!r}]: max_new_tokens={own['max_new_tokens']} is less than "
                f"min_new_tokens={args.min_new_tokens}, which applies to every answer."
            )
        longest = args.max_model_length
        if longest is not None and own.get("max_model_length", longest) > longest:
            raise ValueError(
                f"environment_limits[{name!r}]: max_model_length={own['max_model_length']} is more than max_model_length="
                f"{longest}, which applies to all. Raise that one."
            )
    weights = _by_name("environment_weights", args.environment_weights, '{"guess": 2.0, "sums": 1.0}')
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not (isfinite(weight) and weight >= 0):
            raise ValueError(f"environment_weights[{name!r}] must be a number of at least 0, got {weight!r}.")
    if weights and not any(weights.values()):
        raise ValueError(f"environment_weights={weights}: all are 0, and no environment would be played. Raise one.")


def _by_name(field: str, value: Any, example: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{field} must be a mapping by name such as '{example}', got {value!r}.")
    return value


def check_names(args: MultiTurnConfig, names: Sequence[str] | None) -> None:
    """Check the names in ``environment_limits`` and ``environment_weights`` against the environments of the run.

    Args:
        args: The configuration.
        names: Names of several environments; None for one.

    Raises:
        ValueError: For an unknown or missing name, and for a limit that would have no effect.
    """
    for field in ("environment_limits", "environment_weights"):
        given = getattr(args, field)
        if given is None:
            continue
        if names is None:
            raise ValueError(
                f"{field}={given} applies to several environments, but the run has one. Pass them by name, "
                'environment={"guess": ..., "sums": ...}, or leave it unset.'
            )
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"{field} names {unknown[0]!r}, expected one of the environments {', '.join(names)}.")
    weights = args.environment_weights
    missing = [name for name in names or () if weights is not None and name not in weights]
    if missing:
        raise ValueError(
            f"environment_weights={weights} leaves out {missing[0]!r}. Give every environment a weight; 0 is for one "
            "that is only evaluated."
        )
    limits = args.environment_limits or {}
    for limit in LIMITS if names else ():
        value, default = getattr(args, limit), args.__dataclass_fields__[limit].default
        idle = all(limit in limits.get(name, {}) for name in names or ())  # type: ignore[union-attr]
        # `max_model_length` also bounds those of the environments, and sizes the engine.
        if idle and value != default and limit != "max_model_length":
            raise ValueError(
                f"{limit}={value} has no effect: environment_limits gives every environment one of its own. Leave {limit} "
                "unset."
            )


def for_environment(args: Config, name: str | None) -> Config:
    """Copy the configuration with the limits of one of several environments in place of the common ones."""
    alone = copy.copy(args)
    if name is None:
        return alone
    limits = args.environment_limits or {}
    assert isinstance(limits, Mapping)
    for field, value in {**limits.get(name, {}), "environment_limits": None, "environment_weights": None}.items():
        setattr(alone, field, value)
    alone.max_completion_length = alone.max_turns * alone.max_new_tokens
    return alone


def longest_completion(args: MultiTurnConfig, names: Sequence[str] | None) -> int:
    """Return the largest ``max_turns * max_new_tokens`` of the environments."""
    each = [for_environment(args, name) for name in names or (None,)]
    return max(one.max_turns * one.max_new_tokens for one in each)
