"""Environments: the protocol, ids, the checker. Libraries behind an id are imported when it is used."""

from .base import Environment, EnvironmentFactory, Observation, ResetResult, StepResult, read_options
from .checker import (
    CheckReport,
    EnvironmentProtocolError,
    Finding,
    check_environment,
    validate_reset,
    validate_step,
)
from .play import Episode, Player, compare, demonstrate, known_players, play
from .reasoning import ReasoningEnvironment
from .registry import list_environments, make_environment_factory, register_environment
from .rows import load_rows

__all__ = [
    "CheckReport",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentProtocolError",
    "Episode",
    "Finding",
    "Observation",
    "Player",
    "ReasoningEnvironment",
    "ResetResult",
    "StepResult",
    "check_environment",
    "compare",
    "demonstrate",
    "known_players",
    "list_environments",
    "load_rows",
    "make_environment_factory",
    "play",
    "read_options",
    "register_environment",
    "validate_reset",
    "validate_step",
]
