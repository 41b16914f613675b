"""Rejects values of TRL's own options that would fail after the first rollout only, or be ignored without a word."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from agile_trainers.trainers.launch import uses_deepspeed

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that clip the importance ratio from both sides."""
LOSS_TYPES = (*_CLIPPED, "cispo", "sapo", "vespo")
CISPO_BOUND = 5.0
"""CISPO's default bound of the importance weight (ScaleRL, https://huggingface.co/papers/2510.13786)."""
_OF_LOSS = {
    "epsilon": _CLIPPED,
    "epsilon_high": (*_CLIPPED, "cispo"),
    "delta": _CLIPPED,
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
}
"""Options that one loss or another does not read."""
_NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        ("sync_ref_model=True", lambda args: bool(args.sync_ref_model)),
    ),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        ("use_adaptive_entropy=True", lambda args: bool(args.use_adaptive_entropy)),
    ),
    **dict.fromkeys(
        ("num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo"),
        ("log_completions=True", lambda args: bool(args.log_completions)),
    ),
    "use_bias_correction_kl": (
        "beta and kl_placement='loss'",
        lambda args: args.beta != 0.0 and args.kl_placement == "loss",
    ),
    "ds3_gather_for_generation": ("DeepSpeed", lambda args: uses_deepspeed(args)),
}
"""Options that another one switches on: what they need, and whether it is there."""
_SCALES = ("group", "batch", "none")
_SCALES_OF_AGILERL = {"mean_std": "group", "mean_only": "none"}
_COUNTS = (
    "num_iterations", "steps_per_generation", "generation_batch_size", "gradient_accumulation_steps",
    "per_device_train_batch_size",
)  # fmt: skip
_POSITIVE = ("delta", "sapo_temperature_pos", "sapo_temperature_neg")
_NOT_NEGATIVE = ("epsilon", "epsilon_high", "beta", "off_policy_mask_threshold")


def check_counts(args: Any) -> None:
    """Refuse sizes of a batch below 1, by which TRL's configuration divides.

    Args:
        args: A ``MultiTurnConfig`` before its ``__post_init__``.

    Raises:
        ValueError: For the first of them.
    """
    for name in _COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def check_objective(args: Any) -> None:
    """Refuse values of TRL's loss options that no loss can be computed with.

    Args:
        args: A ``MultiTurnConfig``.

    Raises:
        ValueError: For the first of them.
    """
    if args.loss_type == "gspo":
        raise ValueError(
            "loss_type='gspo' is no loss of TRL's: GSPO is loss_type='grpo' with importance_sampling_level='sequence'. Use "
            "MultiTurnGSPOConfig, which also sets its narrow epsilon and epsilon_high, or set the two here."
        )
    if args.loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {', '.join(map(repr, LOSS_TYPES))}, got {args.loss_type!r}.")
    if args.scale_rewards not in _SCALES:
        meant = _SCALES_OF_AGILERL.get(args.scale_rewards)
        raise ValueError(
            f"scale_rewards must be one of {', '.join(map(repr, _SCALES))}, got {args.scale_rewards!r}."
            + (f" What AgileRL calls {args.scale_rewards!r} is {meant!r}." if meant else "")
        )
    for name in ("epsilon", "epsilon_high"):
        if isinstance(getattr(args, name), (tuple, list)):
            raise ValueError(_for_pair(name, getattr(args, name), args.loss_type))
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        value = getattr(args, name)
        if value is None and name not in ("epsilon", "beta", "sapo_temperature_pos", "sapo_temperature_neg"):
            continue
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"{name} must be a number, got {value!r}.")
        if (name in _POSITIVE and value <= 0) or value < 0:
            raise ValueError(f"{name} must {'be positive' if name in _POSITIVE else 'not be negative'}, got {value}.")
    if not 0.0 <= args.top_entropy_quantile <= 1.0:
        raise ValueError(f"top_entropy_quantile must lie in [0, 1], got {args.top_entropy_quantile}.")
    if args.pad_to_multiple_of is not None and args.pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of must be at least 1, got {args.pad_to_multiple_of}.")


def check_read(args: Any, defaults: dict[str, Any]) -> None:
    """Refuse loss options that the chosen loss does not read.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        defaults: The default of each of its fields.

    Raises:
        ValueError: For the first of them.
    """
    for name, losses in _OF_LOSS.items():
        if args.loss_type not in losses and getattr(args, name) != defaults[name]:
            instead = "set epsilon_high, the only bound of CISPO's weight" if args.loss_type == "cispo" else ""
            raise ValueError(
                f"{name}={getattr(args, name)!r} has no effect with loss_type={args.loss_type!r}; it acts with "
                f"{', '.join(map(repr, losses))}. Leave {name} unset{', and ' if instead else ''}{instead}."
            )


def check_needed(args: Any, defaults: dict[str, Any]) -> None:
    """Refuse options that act only together with another one, which is not set.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        defaults: The default of each of its fields.

    Raises:
        ValueError: For the first of them.
    """
    for name, (needed, is_there) in _NEEDS.items():
        if getattr(args, name) != defaults[name] and not is_there(args):
            raise ValueError(
                f"{name}={getattr(args, name)!r} has no effect without {needed}. Set that, or leave {name} unset."
            )


def _for_pair(name: str, pair: Any, loss_type: str) -> str:
    """The error for AgileRL's ``clip_coef`` where a distance from 1 is expected."""
    told = f"{name} must be a number, got {pair!r}."
    if len(pair) != 2 or not all(isinstance(bound, Real) for bound in pair):
        return told
    low, high = pair
    if low >= 1 or high <= 1:  # a pair of distances
        return f"{told} Set epsilon={low} and epsilon_high={high}."
    if loss_type == "cispo":
        return f"{told} Of AgileRL's clip_coef, bounds of the ratio, CISPO has the upper: set epsilon_high={high}."
    distances = f"epsilon={round(1 - low, 9)} and epsilon_high={round(high - 1, 9)}"
    return f"{told} AgileRL's clip_coef holds bounds of the ratio; here are their distances from 1: set {distances}."
