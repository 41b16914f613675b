"""Environments: protocol, ids, checker, and adapters to libraries, which are imported when an id names them."""

from agile_trainers.envs.agent import Agent, Endpoint
from agile_trainers.envs.base import Environment, EnvironmentFactory, Observation, ResetResult, StepResult, read_options
from agile_trainers.envs.checker import (
    CheckFinding,
    CheckReport,
    EnvironmentProtocolError,
    check_environment,
    validate_reset,
    validate_step,
)
from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import load_rows
from agile_trainers.envs.registry import list_environments, make_environment_factory, register_environment
from agile_trainers.envs.scripted_policies import Episode, ScriptedPolicy, compare, demonstrate, known_policies, play

__all__ = [
    "Agent", "CheckFinding", "CheckReport", "Endpoint", "Environment", "EnvironmentFactory", "EnvironmentProtocolError",
    "Episode", "Observation", "ReasoningEnvironment", "ResetResult", "ScriptedPolicy", "StepResult", "check_environment",
    "compare", "demonstrate", "known_policies", "list_environments", "load_rows", "make_environment_factory", "play",
    "read_options", "register_environment", "validate_reset", "validate_step",
]  # fmt: skip
