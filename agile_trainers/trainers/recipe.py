"""Decides the learning rate and the size of an update where the user does not, and warns of a recipe that learns nothing."""

from __future__ import annotations

import math
import os
from typing import Any

from transformers.utils import logging

from agile_trainers.trainers.launch import fill_deepspeed

logger = logging.get_logger(__name__)

TRL_LEARNING_RATE = 1e-6
"""TRL's default for ``learning_rate``, a rate for whole models."""
LORA_LEARNING_RATE = 1e-5
"""TRL's recommendation for GRPO with LoRA, ten times that (https://huggingface.co/docs/trl/peft_integration, section
"Learning Rate Considerations")."""
GROUPS = 8
"""Groups of one update."""
EPISODES = 64
"""Episodes of one update of an algorithm without groups."""


def micro_batch(args: Any) -> int:
    """Episodes that all processes train on at once."""
    return args.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))


def accumulation(args: Any) -> int:
    """The smallest ``gradient_accumulation_steps`` with which an update sees ``GROUPS`` groups, none of them split.

    Args:
        args: Its ``num_generations`` and ``per_device_train_batch_size``; without groups ``EPISODES`` counts.
    """
    unit, units = (1, EPISODES) if args.groupless else (max(1, args.num_generations), GROUPS)
    together = max(1, micro_batch(args))
    whole = unit // math.gcd(unit, together)
    return whole * math.ceil(units * unit / (whole * together))


def take_trl_batch(args: Any) -> None:
    """Make TRL's default batch of ours: no accumulation.

    Raises:
        ValueError: If it splits a group.
    """
    args.gradient_accumulation_steps = args.steps_per_generation = 1
    args.generation_batch_size = micro_batch(args)
    if args.generation_batch_size % args.num_generations:
        raise ValueError(
            f"generation_batch_size ({args.generation_batch_size}) must be divisible by num_generations "
            f"({args.num_generations}). Change per_device_train_batch_size or gradient_accumulation_steps."
        )


def decide_learning_rate(args: Any, *, adapter: bool) -> None:
    """Make ``args.learning_rate`` a number.

    Args:
        args: The trainer's own copy of its configuration.
        adapter: Whether an adapter is trained, rather than the whole model.
    """
    if args.learning_rate is None:
        args.learning_rate = LORA_LEARNING_RATE if adapter else TRL_LEARNING_RATE
        fill_deepspeed(args)


def idle_recipe(args: Any, *, adapter: bool) -> list[str]:
    """Say which options make learning unlikely, whatever the environment. Nothing at our own defaults.

    Args:
        args: Its learning rate, and what an update's size follows from.
        adapter: Whether an adapter is trained, rather than the whole model.
    """
    found = []
    if adapter and args.learning_rate is not None and args.learning_rate <= TRL_LEARNING_RATE:
        found.append(
            f"learning_rate={args.learning_rate} hardly moves an adapter: {TRL_LEARNING_RATE} is a rate for whole models. "
            f"Leave learning_rate unset ({LORA_LEARNING_RATE}), or set a larger one."
        )
    episodes = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if not args.groupless and episodes < 2 * args.num_generations:
        found.append(
            f"An update sees {episodes} episodes, one group of num_generations={args.num_generations}: where they score "
            "alike, it learns nothing. Leave gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} unset, or raise it."
        )
    return found


def warn_of_idle_recipe(args: Any, *, adapter: bool) -> None:
    """Log the findings of :func:`idle_recipe`."""
    for finding in idle_recipe(args, adapter=adapter):
        logger.warning(finding)
