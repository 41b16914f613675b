"""Scripts for AgileRL and their conversions: two environments, each with three algorithms.

docs/agilerl_scripts.md shows two of the six pairs. The others have the environment of one of these and an algorithm of
``ALGORITHMS``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "agilerl_scripts.md").read_text(encoding="utf-8")
THEIRS, OURS = (re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S) for language in ("py", "python"))
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""The page's."""
COMMON = {"max_output_tokens": 64, "max_model_len": 1024}
STEPS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": 64,
    "loss_type": "bnpo",
    "learning_rate": 5e-6,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "beta": 0.01,
    "reference_adapter": True,
    "top_k": 50,
    "max_new_tokens": 64,
    "max_model_length": 1024,
    "eval_strategy": "steps",
    "load_best_model_at_end": True,
}


@dataclass(frozen=True)
class Algorithm:
    """Arguments of both sides, besides those of the environment."""

    agent: str
    theirs: dict[str, Any]
    ours: dict[str, Any]
    passes: int = 1
    """Updates on each rollout."""


ALGORITHMS = {
    "GRPO": Algorithm(
        "GRPO",
        {"batch_size": 8, "group_size": 8, "micro_batch_size_per_gpu": 8, "lr": 5e-6, "beta": 0.01,
         "max_grad_norm": 0.1, "temperature": 0.9, **COMMON},
        {"num_generations": 8, "max_grad_norm": 0.1, "temperature": 0.9, "scale_rewards": "none",
         "num_iterations": 1, "off_policy_mask_threshold": 0.03, "delta": 5.0, **STEPS},
    ),
    "REINFORCE": Algorithm(
        "LLMREINFORCE",
        {"batch_size": 64, "micro_batch_size_per_gpu": 8, "lr": 5e-6, "beta": 0.01, "gamma": 0.9, **COMMON},
        {"kl_placement": "reward", "gamma": 0.9, "importance_sampling_level": "token", **STEPS},
    ),
    "PPO": Algorithm(
        "LLMPPO",
        {"batch_size": 64, "micro_batch_size_per_gpu": 8, "lr_actor": 5e-6, "lr_critic": 5e-5, "beta": 0.01,
         "gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 0.5, "update_epochs": 2, **COMMON},
        {"num_iterations": 2, "critic_learning_rate": 5e-5, "gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 0.5,
         "value_clip_range": 0.2, "whiten_advantages": True, "use_bias_correction_kl": False, **STEPS},
        passes=2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """An environment of the page, and what a conversion has because of it."""

    place: int
    """Index of its pair on the page."""
    turns: int
    """Number of turns of an episode."""
    max_turns: int
    ours: dict[str, dict[str, Any]]
    """Options by algorithm."""


COPIES = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0}
"""The policy becomes the reference."""
ENVIRONMENTS = {
    "reasoning": Environment(
        0, 1, 1,
        {
            # A rollout passes the two rows of the data set, after which AgileRL moves the reference.
            "GRPO": {**COPIES, "ref_model_sync_steps": 8},
            "REINFORCE": {**COPIES, "ref_model_sync_steps": 8},
            "PPO": {**COPIES, "ref_model_sync_steps": 16, "advantage_granularity": "auto"},
        },
    ),
    "toy": Environment(
        1, 2, 4,
        {"GRPO": {}, "REINFORCE": {}, "PPO": {"importance_sampling_level": "turn", "turn_ratio_pooling": "sum"}},
    ),
}  # fmt: skip
NAMES = [(environment, algorithm) for environment in ENVIRONMENTS for algorithm in ALGORITHMS]
EPISODES, MICRO_BATCH = 64, 8


@dataclass(frozen=True)
class Pair:
    """A script for AgileRL and its conversion."""

    theirs: str
    ours: str
    rollouts: int
    steps_per_rollout: int


def pair(environment: str, algorithm: str, *, turns: int = 2048, evaluations: int = 8, **fewer: Any) -> Pair:
    """Make a pair of scripts.

    Args:
        environment: Of ``ENVIRONMENTS``.
        algorithm: Of ``ALGORITHMS``.
        turns: ``max_steps`` of AgileRL.
        evaluations: Rollouts from one evaluation to the next.
        **fewer: Options of ours that take the place of the converted ones.
    """
    of, by = ENVIRONMENTS[environment], ALGORITHMS[algorithm]
    rollouts, steps = turns // (EPISODES * of.turns), EPISODES // MICRO_BATCH * by.passes
    theirs = ast.parse(THEIRS[of.place])
    for node in ast.walk(theirs):
        if isinstance(node, ast.ImportFrom) and node.module == "agilerl.algorithms":
            node.names = [ast.alias(by.agent)]
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "agent"
            and isinstance(node.value, ast.Call)
        ):
            node.value.func = ast.Name(by.agent)
            kept = [
                k for k in node.value.keywords if k.arg in ("model_name", "pad_token_id", "pad_token", "lora_config")
            ]
            node.value.keywords = kept + _keywords(by.theirs)
    set_keywords(theirs, "train_llm_rollout", max_steps=turns, evaluation_interval=evaluations)
    ours = ast.parse(OURS[of.place])
    for node in ast.walk(ours):
        if isinstance(node, ast.alias | ast.Name):
            field = "name" if isinstance(node, ast.alias) else "id"
            for kind in ("Config", "Trainer"):
                if getattr(node, field).startswith("MultiTurn") and getattr(node, field).endswith(kind):
                    setattr(node, field, f"MultiTurn{algorithm}{kind}")
    made = {
        "output_dir": f"runs/{environment}-{algorithm.lower()}",
        **by.ours,
        **of.ours[algorithm],
        "max_turns": of.max_turns,
        "max_steps": rollouts * steps,
        "eval_steps": evaluations * steps,
        "save_steps": evaluations * steps,
    }
    config = next(call for call in _calls(ours) if ast.unparse(call.func).endswith("Config"))
    config.keywords = _keywords({**made, **fewer})
    return Pair(ast.unparse(theirs), ast.unparse(ours), rollouts, steps)


def set_keywords(tree: ast.AST, name: str, **values: Any) -> None:
    """Set keyword arguments of every call of ``name``; a value that is an expression of ``ast`` is inserted as it is."""
    for call in _calls(tree):
        if ast.unparse(call.func).split(".")[-1] == name:
            call.keywords = [k for k in call.keywords if k.arg not in values] + _keywords(values)


def called(text: str, name: str) -> dict[str, Any]:
    """Return the keyword arguments of the first call whose name ends with ``name``; source where they are no literals."""
    call = next(call for call in _calls(ast.parse(text)) if ast.unparse(call.func).endswith(name))
    found = {}
    for keyword in call.keywords:
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            found[keyword.arg] = ast.unparse(keyword.value)
    return {str(name): value for name, value in found.items()}


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _keywords(values: dict[str, Any]) -> list[ast.keyword]:
    return [
        ast.keyword(name, value if isinstance(value, ast.expr) else ast.Constant(value))
        for name, value in values.items()
    ]
