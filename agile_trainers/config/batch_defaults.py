"""Chooses the learning rate and the size of an update where they are unset, and warns of unsuitable ones."""

from __future__ import annotations

import math
import os
from typing import Any

from transformers.utils import logging

from agile_trainers.config.launch_checks import fill_deepspeed

logger = logging.get_logger(__name__)

TRL_LEARNING_RATE = 1e-6
"""TRL's default for ``learning_rate``, a rate for whole models."""
LORA_LEARNING_RATE = 1e-5
"""TRL's recommendation for GRPO with LoRA, ten times ``TRL_LEARNING_RATE``
(https://huggingface.co/docs/trl/peft_integration, section "Learning Rate Considerations")."""
GROUPS = 8
"""Number of groups of one update by default."""
EPISODES = 64
"""Number of episodes of one update by default, for an algorithm without groups."""
FEWEST = 8
"""Number of episodes of one update, and twice that of a group, below which learning is unlikely."""


def micro_batch(args: Any) -> int:
    """Return the number of episodes in a micro-batch over all processes."""
    return args.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))


def accumulation(args: Any) -> int:
    """Compute the smallest ``gradient_accumulation_steps`` with which an update sees ``GROUPS`` whole groups.

    Args:
        args: A configuration; without groups an update sees ``EPISODES`` episodes.
    """
    unit, units = (1, EPISODES) if args.groupless else (max(1, args.num_generations), GROUPS)
    together = max(1, micro_batch(args))
    whole = unit // math.gcd(unit, together)
    return whole * math.ceil(units * unit / (whole * together))


def take_trl_batch(args: Any) -> None:
    """Replace our default batch by TRL's, without accumulation.

    Raises:
        ValueError: If the batch splits a group.
    """
    args.gradient_accumulation_steps = args.steps_per_generation = 1
    args.generation_batch_size = micro_batch(args)
    if args.generation_batch_size % args.num_generations:
        raise ValueError(
            f"generation_batch_size ({args.generation_batch_size}) must be divisible by num_generations "
            f"({args.num_generations}). Change per_device_train_batch_size or gradient_accumulation_steps."
        )


def decide_learning_rate(args: Any, *, adapter: bool, own_optimizer: bool = False) -> None:
    """Set ``args.learning_rate`` where it is None, and log the findings of :func:`unlikely_to_learn`.

    Args:
        args: The trainer's own copy of its configuration.
        adapter: True if an adapter is trained, rather than the whole model.
        own_optimizer: True if the user made the optimizer, whose rate is not ``args.learning_rate``.
    """
    if args.learning_rate is None:
        args.learning_rate = LORA_LEARNING_RATE if adapter else TRL_LEARNING_RATE
        fill_deepspeed(args)
    for finding in unlikely_to_learn(args, adapter=adapter and not own_optimizer):
        logger.warning(finding)


def unlikely_to_learn(args: Any, *, adapter: bool) -> list[str]:
    """List options with which learning is unlikely in any environment; none at the defaults.

    Args:
        args: A configuration; reads the learning rate and the options of an update's size.
        adapter: True if an adapter is trained, rather than the whole model.
    """
    found = []
    if adapter and args.learning_rate is not None and args.learning_rate <= TRL_LEARNING_RATE:
        found.append(
            f"learning_rate={args.learning_rate} hardly moves an adapter: {TRL_LEARNING_RATE} is a rate for whole models. "
            f"Leave learning_rate unset ({LORA_LEARNING_RATE}), or set a larger one."
        )
    parts = args.gradient_accumulation_steps
    different = min(parts, max(args.steps_per_generation, parts // args.num_iterations))
    episodes = args.per_device_train_batch_size * different * args.world_size
    if different < parts:
        found.append(
            f"An update reads its {episodes} episodes {parts / different:g} times at the same weights: it has "
            f"gradient_accumulation_steps={parts} micro-batches, and a generation batch steps_per_generation="
            f"{args.steps_per_generation}. Set num_iterations={args.num_iterations} to 1, or raise steps_per_generation."
        )
    if episodes < max(2 * args.num_generations, FEWEST):
        group = "" if args.groupless else f" in groups of {args.num_generations}"
        found.append(
            f"An update sees {episodes} episodes{group}: their noise outweighs what they teach, and equal rewards give no "
            f"gradient. Leave gradient_accumulation_steps={args.gradient_accumulation_steps} unset, or raise it."
        )
    return found
