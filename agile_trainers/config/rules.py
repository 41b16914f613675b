"""Lists the rules of the options in one table: the values of an option, when it acts, and the alternative.

:class:`Rule` is data, which :func:`check_rules` evaluates. The rules of one algorithm are in its configuration.
"""

from __future__ import annotations

import copy
import inspect
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, get_type_hints

import numpy as np
from transformers.hf_argparser import string_to_bool
from trl import GRPOConfig

from agile_trainers.config.launch_checks import episode_split, uses_deepspeed
from agile_trainers.config.options import default_of
from agile_trainers.objectives import drift
from agile_trainers.objectives.demonstrations import TREATMENTS
from agile_trainers.objectives.distillation import GRADIENTS, RETURN_TO_GO, SAMPLED
from agile_trainers.objectives.mismatch import MODES
from agile_trainers.rollout.episode_options import LIMITS, EpisodeOptions, check_names
from agile_trainers.sampling.vllm_checks import addresses

Allows = Callable[[Any, Any], bool]
"""Maps a configuration and the option's value to whether that value is accepted."""
Condition = tuple[Any, ...] | Callable[[Any], Any]
"""Values of an option, or a function of the configuration that returns True."""
Message = str | Callable[[Any, str, Any], str]
"""A text with the places ``{name}``, ``{value}`` and ``{args}``, or a function of the configuration, name and value."""


@dataclass(frozen=True)
class Rule:
    """Rejects a value of an option that is out of range, contradicts another option or would have no effect."""

    options: tuple[str, ...]
    """Names of the options that the rule is about."""
    allows: Allows
    message: Message
    """The error text: option, value, expectation and solution."""
    when_set: bool = False
    """True accepts the option's default always."""


def check_rules(args: Any, rules: Iterable[Rule]) -> None:
    """Evaluate rules on a configuration.

    Args:
        args: A ``MultiTurnConfig``.
        rules: Rules, in the order in which they are evaluated.

    Raises:
        ValueError: For the first option that breaks a rule.
    """
    for rule in rules:
        for name in rule.options:
            value = getattr(args, name)
            if rule.when_set and value == default_of(args.__dataclass_fields__[name]):
                continue
            if not rule.allows(args, value):
                tell = rule.message
                told = tell(args, name, value) if callable(tell) else tell.format(name=name, value=value, args=args)
                raise ValueError(told)


_KINDS: dict[Any, type] = {
    **dict.fromkeys((int, int | None), Integral),
    **dict.fromkeys((float, float | None), Real),
    **dict.fromkeys((bool, bool | None), bool),
}
"""Annotation of an option to the kind of its values."""
_EXPECTED = {Integral: "a whole number", Real: "a number", bool: "True or False"}
_EXPLAINED = ("epsilon", "epsilon_high", "log_rollouts")
"""Numbers with a rule of their own for other values."""
_MAY_BE_INFINITE = (
    "advantage_clip_range", "delta", "drift_clip_max", "entropy_coef_max", "environment_timeout", "max_grad_norm",
    "max_hours", "max_logprob_gap", "max_wall_seconds", "off_policy_mask_threshold", "value_clip_range",
    "vllm_importance_sampling_clip_max", "vllm_server_timeout",
)  # fmt: skip
"""Upper bounds, of which infinity is none. Any other infinite number, and NaN, ends in NaN or in an error of its own."""


@cache
def _checked_options(config: type) -> dict[str, Any]:
    """Return the options that are numbers or booleans, with their annotations; not those that may be something else too."""
    hints = get_type_hints(config)
    return {
        one.name: hints[one.name] for one in fields(config) if hints[one.name] in _KINDS and one.name not in _EXPLAINED
    }


def check_kinds(args: Any) -> None:
    """Check that every option that is a number or a boolean got one, since Python computes with it or tests it later.

    A text is True, and so would be ``"False"``. 0, 1 and NumPy's booleans become Python's, which code compares with ``is``.

    Args:
        args: A configuration, as the user gave it.

    Raises:
        ValueError: For the first option that got anything else, or NaN, or infinity where it is no bound; the message says
            how to write the value.
    """
    for name, annotation in _checked_options(args.__class__).items():
        value, kind = getattr(args, name), _KINDS[annotation]
        given = value is not default_of(args.__dataclass_fields__[name])
        if not given or (value is None and annotation not in (int, float, bool)):
            continue
        if kind is bool and isinstance(value, (Integral, np.bool_)) and value in (0, 1):
            if not isinstance(value, bool):
                setattr(args, name, bool(value))
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} must be {_EXPECTED[kind]}, got {value!r}.{_written(name, value, kind)}")
        if kind is Real and not _is_finite(value) and not (value == inf and name in _MAY_BE_INFINITE):
            bound = " or inf" if name in _MAY_BE_INFINITE else ""
            raise ValueError(f"{name} must be a finite number{bound}, got {value!r}.")


def _is_finite(value: Any) -> bool:
    return bool(-inf < value < inf)  # also of whole numbers that no float holds


def check_nulls(config: type, options: Mapping[str, Any]) -> None:
    """Check that no option that is a number or a boolean is None, before a configuration's construction computes with it.

    Args:
        config: Its class.
        options: Field name to value, of some fields.

    Raises:
        ValueError: For the first option that is.
    """
    for name, annotation in _checked_options(config).items():
        if annotation in (int, float, bool) and name in options and options[name] is None:
            raise ValueError(f"{name} must be {_EXPECTED[_KINDS[annotation]]}, got None.")


def check_best(args: Any) -> None:
    """Reject a choice of the best checkpoint without evaluations.

    Raises:
        ValueError: If ``load_best_model_at_end`` or ``save_strategy="best"`` is set, and nothing is evaluated.
    """
    named = "load_best_model_at_end=True" if args.load_best_model_at_end else "save_strategy='best'"
    if (args.load_best_model_at_end or args.save_strategy == "best") and args.eval_strategy == "no":
        raise ValueError(
            f"{named} chooses the checkpoint by an evaluation, and eval_strategy='no' makes none. Set eval_strategy='steps' "
            f"with eval_steps, and save_steps to a multiple of it, or leave {named.partition('=')[0]} unset."
        )


def _written(name: str, value: Any, kind: type) -> str:
    """Return how the value is written that a text or a fraction stands for."""
    try:
        if kind is bool:
            return f" Write {name}={string_to_bool(value)}."
        number = float(value)
        exact = number == int(number)
    except (ArgumentTypeError, AttributeError, TypeError, ValueError, OverflowError):
        return ""
    whole = kind is Integral
    if isinstance(value, bool) or (whole and not exact):
        return ""
    return f" Write {name}={int(number) if whole else number}."


def check_values(args: Any) -> None:
    """Check the options that were changed in a finished configuration, as its construction does.

    Args:
        args: A ``MultiTurnConfig``.

    Raises:
        ValueError: For the first value that is no number or boolean where one is expected, or breaks a rule.
    """
    check_kinds(args)
    check_rules(args, (*SIZES, *VALUES, *args.value_rules))


# ------------------------------------------------------------------------------------------------- kinds of rules


def one_of(option: str, *choices: str | bool, optional: bool = False, hints: Mapping[str, str] | None = None) -> Rule:
    """Make a rule for an option with a fixed set of values.

    Args:
        option: Its name.
        *choices: Its values.
        optional: True adds None.
        hints: What to set in place of a value that means something elsewhere, such as in AgileRL.
    """
    shown, hints = ", ".join(map(repr, choices)), hints or {}
    return Rule(
        (option,),
        lambda _, value: value in choices or (optional and value is None),
        lambda _, name, value: f"{name} must be one of {shown}, got {value!r}.{hints.get(str(value), '')}",
    )


def at_least(low: float, *options: str) -> Rule:
    """Make a rule for numbers with a lower bound; None passes where the option may be None."""
    return _number(options, "not be negative" if low == 0 else f"be at least {low}", lambda value: value >= low)


def positive(*options: str) -> Rule:
    """Make a rule for numbers above 0; None passes where the option may be None."""
    return _number(options, "be positive", lambda value: value > 0)


def in_unit_interval(*options: str) -> Rule:
    """Make a rule for numbers in [0, 1]."""
    return _number(options, "lie in [0, 1]", lambda value: 0 <= value <= 1)


def _number(options: tuple[str, ...], expected: str, holds: Callable[[Any], bool]) -> Rule:
    # `check_kinds` comes first: there are numbers only, and None where it is allowed.
    return Rule(options, lambda _, value: value is None or holds(value), f"{{name}} must {expected}, got {{value!r}}.")


def acts_with(other: str, accepted: Condition, *options: str, needed: str = "") -> Rule:
    """Make a rule for options that act only with some values of another one.

    Args:
        other: Name of the other option.
        accepted: These values, or a function of the configuration that returns True for them.
        *options: Names of the options that it switches on.
        needed: The values in words. Default: ``accepted``.
    """
    if not needed and not callable(accepted):
        needed = " or ".join(f"{other}={value!r}" for value in accepted)
    return Rule(
        options,
        lambda args, _: _holds(args, other, accepted),
        f"{{name}}={{value!r}} has no effect with {other}={{args.{other}!r}}; it acts with {needed} only. Leave {{name}} "
        f"unset, or change {other}.",
        when_set=True,
    )


def excludes(other: str, clashing: Condition, *options: str, why: str) -> Rule:
    """Make a rule for options that cannot be combined with some values of another one.

    Args:
        other: Name of the other option.
        clashing: These values, or a function of the configuration that returns True for them.
        *options: Names of the options.
        why: A clause about the other option.
    """
    return Rule(
        options,
        lambda args, _: not _holds(args, other, clashing),
        f"{{name}}={{value!r}} cannot be combined with {other}={{args.{other}!r}}, {why}. Leave one of them unset.",
        when_set=True,
    )


def weighs_decisions_with(other: str, *accepted: Any) -> Rule:
    """Make a rule for an option that per-decision weights of drift need a value of.

    Args:
        other: Its name.
        *accepted: These values.
    """
    return Rule(
        ("drift_correction",),
        lambda args, value: value != drift.DECISION or getattr(args, other) in accepted,
        f"{{name}}={{value!r}} weighs each reward of a return from the turn on, and cannot be combined with "
        f"{other}={{args.{other}!r}}. Set {other}={' or '.join(map(repr, accepted))}, or "
        "drift_correction='sequence_truncate', which acts on any advantage.",
    )


def _holds(args: Any, other: str, values: Condition) -> bool:
    return bool(values(args)) if callable(values) else getattr(args, other) in values


def idle(reason: str, *options: str) -> Rule:
    """Make a rule for options without effect in a run with an environment."""
    message = f"{{name}}={{value!r}} has no effect with an environment: {reason}."
    return Rule(options, lambda args, value: False, message, when_set=True)


# ------------------------------------------------------------------------------------------------------ the table

CISPO_BOUND = 5.0
"""CISPO's default bound of the importance weight (ScaleRL, https://huggingface.co/papers/2510.13786)."""
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that clip the importance ratio from both sides."""


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _explain_bound(args: Any, name: str, value: Any) -> str:
    """Write the error for a clipping range that is no number, such as AgileRL's ``clip_coef``, a pair."""
    told = f"{name} must be a number, got {value!r}."
    if not isinstance(value, (tuple, list)) or [isinstance(bound, Real) for bound in value] != [True, True]:
        return told
    low, high = value
    if low >= 1 or high <= 1:  # a pair of distances
        return f"{told} Set epsilon={low} and epsilon_high={high}."
    distances = f"epsilon={round(1 - low, 9)} and epsilon_high={round(high - 1, 9)}, their distances from 1"
    if args.loss_type == "cispo":
        distances = f"epsilon_high={high}, since CISPO uses the upper"
    return f"{told} AgileRL's clip_coef holds bounds of the ratio: set {distances}."


SIZES: tuple[Rule, ...] = (
    at_least(1, "num_iterations", "per_device_train_batch_size"),
    at_least(1, "steps_per_generation", "generation_batch_size", "gradient_accumulation_steps"),
    Rule(
        ("num_generations",),
        lambda args, value: not args.groupless or value == 1,
        "num_generations={value} has no effect: {args.__class__.__name__} compares no group, and every episode starts from "
        "a state of its own. Leave num_generations unset (1).",
    ),
    Rule(
        ("num_generations",),
        lambda args, value: args.groupless or (value is not None and value >= 2),
        "num_generations must be at least 2, got {value}: the episodes of a group are compared.",
    ),
)
"""Rules for sizes, checked first at construction, since TRL's configuration divides by them."""

VALUES: tuple[Rule, ...] = (
    one_of(
        "loss_type", *_CLIPPED, "cispo", "sapo", "vespo",
        hints={"gspo": " GSPO is loss_type='grpo' with importance_sampling_level='sequence': use MultiTurnGSPOConfig, which "
                       "also sets its narrow epsilon and epsilon_high."},
    ),
    one_of(
        "scale_rewards", "group", "batch", "mean", "none",
        hints={"mean_std": " AgileRL's 'mean_std' is 'group' here.", "mean_only": " AgileRL's 'mean_only' is 'none' here."},
    ),
    Rule(("epsilon",), lambda _, value: _is_real(value), _explain_bound),
    Rule(("epsilon_high",), lambda _, value: value is None or _is_real(value), _explain_bound),
    positive("sapo_temperature_pos", "sapo_temperature_neg"),
    Rule(
        ("reward_weights",),
        lambda _, value: (
            value is None or (isinstance(value, Iterable) and all(_is_real(one) and _is_finite(one) for one in value))
        ),
        "{name} must be a list of finite numbers, one for each reward function, got {value!r}.",
    ),
    Rule(
        ("adam_beta1", "adam_beta2"),
        lambda _, value: 0 <= value < 1,
        "{name} must be at least 0 and less than 1, got {value!r}.",
    ),
    positive("drift_clip_max"),
    positive("delta", "advantage_clip_range", "max_logprob_gap", "max_wall_seconds"),
    at_least(0, "epsilon", "epsilon_high", "beta", "zero_advantage_eps", "diagnosis_interval", "weight_decay"),
    at_least(0, "adam_epsilon"),
    at_least(0, "learning_rate", "off_policy_mask_threshold", "resample_zero_advantage_groups", "min_new_tokens"),
    at_least(1, "num_eval_episodes", "generation_chunk_size", "ref_model_sync_steps", "pad_to_multiple_of"),
    at_least(1, "max_tokens_per_micro_batch"),
    at_least(0, "batches_ahead", "replay_successes", "seed"),
    positive("teacher_coef", "teacher_steps", "demonstration_coef"),
    one_of("teacher_gradient", *GRADIENTS),
    one_of("demonstration_loss", *TREATMENTS),
    at_least(1, "demonstrations_per_group"),
    positive("ref_model_mixup_alpha"),
    in_unit_interval("top_entropy_quantile", "gamma", "teacher_turn_decay", "ref_model_mixup_alpha"),
    Rule(
        ("stop_strings", "public_values"),
        lambda _, value: (
            value is None or (isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value))
        ),
        "{name} must be a list of texts, got {value!r}. Write it in brackets, such as ['</answer>'] or ['level'].",
    ),
    Rule(
        ("log_rollouts",),
        lambda _, value: isinstance(value, int) and value >= 0,
        "log_rollouts must be an integer of at least 0 (every N-th generation batch; 0 writes none), True or False, "
        "got {value!r}.",
    ),
    one_of("importance_sampling_level", "token", "turn", "sequence"),
    one_of("turn_ratio_pooling", "mean", "sum"),
    one_of("skip_zero_advantage", "auto", True, False),
    one_of("kl_placement", "loss", "reward", "advantage"),
    one_of("sequence_packing", "auto", "prefix", "none"),
    one_of("entropy_coef_schedule", "constant", "linear"),
    one_of("vllm_importance_sampling_mode", *MODES, optional=True),
    one_of("task_sampling", "uniform", "adaptive"),
    one_of("drift_correction", *drift.CORRECTIONS, optional=True),
)  # fmt: skip
"""Rules for values, checked at construction."""

UNUSED = (
    idle(
        "the rollout generator batches and keeps its cache between turns by itself",
        "use_transformers_continuous_batching", "use_transformers_paged", "transformers_continuous_batching_config",
        "cache_implementation",
    ),
    idle(
        "set temperature, top_p, top_k, min_p, repetition_penalty, min_new_tokens or stop_strings", "generation_kwargs"
    ),
    idle("an environment's turns are limited by max_turns", "max_tool_calling_iterations"),
    idle(
        "it saves in the middle of a step; send SIGINT (Ctrl-C), which saves at its end and stops", "enable_jit_checkpoint"
    ),
    idle("rewards are added to the turns before anything is normalized", "multi_objective_aggregation"),
    idle("episodes are text without labels", "log_multimodal", "label_names", "label_smoothing_factor"),
    idle(
        "rows come in TRL's order by seed, and micro-batches hold episodes of similar length",
        "train_sampling_strategy", "length_column_name", "data_seed",
    ),
    idle(
        "evaluate() plays num_eval_episodes episodes, generation_chunk_size at once, as training plays them",
        "num_generations_eval", "per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches",
        "eval_use_gather_object", "batch_eval_metrics", "include_for_metrics", "prediction_loss_only", "bf16_full_eval",
        "fp16_full_eval",
    ),
)  # fmt: skip
"""Rules for options of TRL and transformers that act on parts that an environment replaces."""

_VLLM = (
    acts_with(
        "vllm_importance_sampling_correction", (True,),
        *(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")),
    ),
    Rule(
        ("loss_type",),
        lambda args, value: (
            value != "vespo"
            or not args.vllm_importance_sampling_correction
            or (args.vllm_importance_sampling_mode or "").startswith("token")
        ),
        "loss_type='vespo' pools weights over the sequence by itself. Use vllm_importance_sampling_mode='token_truncate' or "
        "'token_mask'.",
    ),
    acts_with(
        "use_vllm", (True,),
        *(one.name for one in fields(GRPOConfig) if re.match(r"vllm_(?!importance_sampling_)", one.name)),
        "offload_policy_during_rollout", "vllm_server_start",
    ),
    Rule(
        ("top_k", "top_p", "min_p"),
        lambda args, value: not args.use_vllm or not value or (args.vllm_mode == "colocate" and args.top_k),
        "{name}={value!r} removes tokens, and vLLM does not return which, so that the gradient would be biased. Bound them "
        "by top_k with vllm_mode='colocate' (top_k=1000 beside {name}), sample with transformers (use_vllm=False), or leave "
        "{name} unset. See docs/rollouts.md.",
        when_set=True,
    ),
    one_of("vllm_mode", "colocate", "server"),
    idle("max_model_length limits the conversation, and the engine's too", "vllm_max_model_length"),
    idle("the environment judges the form of an answer", "vllm_structured_outputs_regex"),
    acts_with(
        "vllm_mode", ("server",),
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "vllm_server_start",
    ),
    acts_with(
        "vllm_mode", ("colocate",), "vllm_enable_sleep_mode", "offload_policy_during_rollout",
        needed="an engine in this process (vllm_mode='colocate')",
    ),
    acts_with(
        "vllm_mode", lambda args: args.vllm_mode == "colocate" or args.vllm_server_start,
        "vllm_gpu_memory_utilization", "vllm_model_impl", "vllm_tensor_parallel_size",
        needed="an engine in this process (vllm_mode='colocate') or a server that it starts (vllm_server_start=True)",
    ),
    Rule(
        ("vllm_model_impl",),
        lambda args, value: value == "vllm" or args.vllm_mode != "colocate",
        "{name}={value!r} lets vLLM change the classes of transformers in its process, and the trainer's model, which is of "
        "the same class, computes no longer. Leave it unset, or use a server (vllm_mode='server', vllm_server_start=True).",
    ),
    Rule(
        ("vllm_server_base_url",),
        lambda args, value: value is None or _are_addresses(value),
        "{name} must be an address, or different ones with commas between, such as 'http://one:8000,http://two:8000', got "
        "{value!r}.",
    ),
    excludes(
        "vllm_server_start", (True,), "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port",
        why="which starts a server at an address of its own",
    ),
)  # fmt: skip

LOSS = (
    acts_with(
        "loss_type", _CLIPPED, "epsilon", "delta",
        needed=f"{', '.join(map(repr, _CLIPPED))} (CISPO's only bound is epsilon_high)",
    ),
    acts_with("loss_type", (*_CLIPPED, "cispo"), "epsilon_high"),
    acts_with("loss_type", ("sapo",), "sapo_temperature_pos", "sapo_temperature_neg"),
    acts_with("loss_type", ("vespo",), "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)  # fmt: skip
"""Rules for options that only some losses read."""

OWN_LOSS = (
    Rule(
        (
            "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "turn_ratio_pooling",
            "off_policy_mask_threshold", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg",
            "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "entropy_coef", "entropy_coef_schedule",
            "use_adaptive_entropy", "top_entropy_quantile",
        ),
        lambda args, _: False,
        "{name}={value!r} is an option of TRL's loss and has no effect: the algorithm brings its own. Leave {name} unset; "
        "if the loss reads it, declare it in the algorithm's configuration.",
        when_set=True,
    ),
)  # fmt: skip
"""Rules for a run with an algorithm's own loss, for options that the algorithm's configuration does not declare."""
_WHOLE_MICRO_BATCH = (
    Rule(
        ("max_tokens_per_micro_batch", "skip_zero_advantage"),
        lambda args, value: value in (None, "auto", False),
        "{name}={value!r} cannot be combined with loss_needs='micro_batch': the loss gets all episodes of a micro-batch at "
        "once. Leave {name} unset, or lower per_device_train_batch_size.",
    ),
)


def for_own_loss(args: Any, needs: str) -> Any:
    """Check the options of a run whose algorithm brings its loss.

    Args:
        args: A ``MultiTurnConfig``, as the user gave it.
        needs: The algorithm's ``loss_needs``.

    Returns:
        A copy, in which the unit of a ratio that nobody computes changes no advantage.

    Raises:
        ValueError: For an option of TRL's loss, one that does not fit, or an unknown ``needs``.
    """
    if needs not in ("episodes", "micro_batch"):
        raise ValueError(f"loss_needs must be 'episodes' or 'micro_batch', got {needs!r}.")
    ours = [cls for cls in type(args).__mro__ if cls.__module__.split(".")[0] not in ("agile_trainers", "trl")]
    declared = {name for cls in ours if not issubclass(GRPOConfig, cls) for name in inspect.get_annotations(cls)}
    unread = [replace(rule, options=tuple(name for name in rule.options if name not in declared)) for rule in OWN_LOSS]
    check_rules(args, unread + list(_WHOLE_MICRO_BATCH if needs == "micro_batch" else ()))
    if not {"importance_sampling_level", "turn_ratio_pooling"} & declared:
        args = copy.copy(args)
        args.importance_sampling_level = "token"
    return args


def check_weighs_decisions(args: Any, trainer: type[Any]) -> None:
    """Check that the credit rule of a run applies the weights per decision, if the run has them.

    Args:
        args: A ``MultiTurnConfig``.
        trainer: The class of the trainer.

    Raises:
        ValueError: If it does not.
    """
    if args.drift_correction == drift.DECISION and not trainer.weighs_decisions:
        raise ValueError(
            f"drift_correction={drift.DECISION!r} weighs rewards in the credit rule, and {trainer.__name__} has one of its "
            "own. Multiply returns by CreditInputs.weights and declare weighs_decisions = True beside assign_credit, or set "
            "drift_correction='sequence_truncate', which acts on any advantage."
        )


def check_order_of_turns(args: Any, agents: Sequence[str]) -> None:
    """Reject options that go by the order of turns for agents, whose calls may come at once.

    Args:
        args: A ``MultiTurnConfig``.
        agents: Names of the agents among the environments, for the error.

    Raises:
        ValueError: If there is an agent, and ``gamma`` is not 1, drift is corrected per decision, or a teacher credits what
            comes after a token.
    """
    if agents and args.drift_correction == drift.DECISION:
        raise ValueError(
            f"drift_correction={drift.DECISION!r} weighs a reward by the turns up to it, but the agent {agents[0]} may ask "
            "for several answers at once. Set drift_correction='sequence_truncate', or leave it unset."
        )
    if agents and args.gamma != 1:
        raise ValueError(
            f"gamma={args.gamma} discounts by the order of turns, but the agent {agents[0]} may ask for several answers at "
            "once. Leave gamma at 1, or let the agent discount the rewards that it gives."
        )
    if agents and args.teacher is not None and args.teacher_gradient == RETURN_TO_GO:
        raise ValueError(
            f"teacher_gradient={RETURN_TO_GO!r} credits a token with what comes after it, but the agent {agents[0]} may ask "
            "for several answers at once. Set teacher_gradient='immediate' or 'distribution_reverse'."
        )


def _demonstrates(args: Any) -> bool:
    return args.demonstrations is not None


def _learns_from_others(args: Any) -> bool:
    return args.demonstrations is not None or args.replay_successes > 0


def _uses_reference(args: Any) -> bool:
    return bool(args.beta != 0.0)


def _has_reference(args: Any) -> bool:
    return _uses_reference(args) or THE_REFERENCE in teachers_of(args)


SWITCHED_ON = (
    acts_with("sync_ref_model", (True,), "ref_model_mixup_alpha", "ref_model_sync_steps"),
    acts_with(
        "use_adaptive_entropy", (True,), "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"
    ),
    acts_with("log_completions", (True,), "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo"),
    acts_with("beta", _uses_reference, "use_bias_correction_kl", needed="a reference"),
    acts_with("kl_placement", ("loss",), "use_bias_correction_kl"),
    acts_with("deepspeed", uses_deepspeed, "ds3_gather_for_generation", needed="DeepSpeed"),
)
"""Rules for options of TRL that another one switches on."""

_REFERENCE = (
    acts_with("beta", _uses_reference, "kl_placement", needed="a reference"),
    acts_with("beta", _has_reference, "keep_reference", "reference_adapter", "sync_ref_model", needed="a reference"),
)

ITSELF = "policy"
"""Value of ``teacher`` that stands for the policy itself."""
THE_REFERENCE = "reference"
"""Value of ``teacher`` that stands for the reference adapter."""


def teachers_of(args: Any) -> tuple[str, ...]:
    """Return the teachers that ``args.teacher`` names, each once."""
    given = args.teacher.values() if isinstance(args.teacher, dict) else [args.teacher]
    return tuple(dict.fromkeys(one for one in given if one is not None))


def _samples_by_default(args: Any) -> bool:
    names = ("temperature", "top_k", "top_p", "min_p", "min_new_tokens")
    return all(getattr(args, one.name) == default_of(one) for one in fields(args) if one.name in names)


def is_address(teacher: Any) -> bool:
    """Return whether a teacher is the address of a server."""
    return isinstance(teacher, str) and teacher.startswith(("http://", "https://"))


_TEACHER = (
    acts_with(
        "teacher", lambda args: args.teacher is not None, "teacher_gradient", "teacher_coef", "teacher_steps",
        "teacher_turn_decay", "teacher_hint", needed="a teacher",
    ),
    Rule(
        ("teacher",),
        lambda args, value: not isinstance(value, dict) or {type(one) for one in value.values()} == {str},
        "teacher={value!r} must have a folder, a Hub id or an address for each environment that it names.",
    ),
    Rule(
        ("teacher_gradient",),
        lambda args, value: value in SAMPLED or not isinstance(args.teacher, dict),
        "teacher_gradient={value!r} compares whole distributions with those of one teacher, and teacher has one for each "
        "environment. Set teacher_gradient='immediate' or 'return_to_go'.",
    ),
    Rule(
        ("teacher_gradient",),
        lambda args, value: value in SAMPLED or not any(map(is_address, teachers_of(args))),
        "teacher_gradient={value!r} compares whole distributions, and a server tells the log-probabilities of sampled "
        "tokens alone. Set teacher_gradient='immediate' or 'return_to_go'.",
    ),
    Rule(
        ("teacher",),
        lambda args, value: not any(map(is_address, teachers_of(args))) or _samples_by_default(args),
        "teacher={value!r}: a server tells log-probabilities over the whole vocabulary at temperature 1. Set temperature=1 "
        "and leave top_k, top_p, min_p and min_new_tokens unset, or load the teacher as an adapter.",
    ),
    Rule(
        ("teacher",),
        lambda args, value: THE_REFERENCE not in teachers_of(args) or args.reference_adapter,
        "teacher='reference' is the reference adapter, which this run does not have. Set reference_adapter=True.",
    ),
    Rule(
        ("teacher",),
        lambda args, value: ITSELF not in teachers_of(args) or args.teacher_hint is not None,
        "teacher='policy' is the policy itself, from which it does not diverge. Set teacher_hint to the entry of the "
        "environment's info that the teacher reads beside the episode.",
    ),
    excludes("skip_zero_advantage", (True,), "teacher", why="and a teacher trains episodes without advantage too"),
    excludes("disable_dropout", (False,), "teacher", why="whose noise would be read as a divergence"),
    excludes("drift_correction", (drift.DECISION,), "teacher", why="which weighs rewards and no token"),
)  # fmt: skip

_DEMONSTRATIONS = (
    acts_with("demonstrations", _demonstrates, "demonstrations_per_group", needed="demonstrations"),
    acts_with(
        "demonstrations", _learns_from_others, "demonstration_loss", "demonstration_coef",
        needed="demonstrations or replay_successes",
    ),
    Rule(
        ("demonstrations_per_group",),
        lambda args, value: (
            args.demonstrations is None
            or value <= (args.generation_batch_size if args.groupless else args.num_generations) - 2
        ),
        "demonstrations_per_group={value} leaves fewer than two own episodes, which are compared with each other. Lower it, "
        "or raise num_generations (the generation batch, without groups).",
    ),
    Rule(
        ("demonstrations",),
        lambda args, value: value is None or args.rewarded,
        "demonstrations={value!r} have no effect: {args.__class__.__name__} does not train on rewards, which say what a "
        "demonstration is worth. Leave demonstrations unset, or pass teacher to another algorithm.",
    ),
    Rule(
        ("replay_successes",),
        lambda args, value: not value or (args.rewarded and not args.groupless and args.num_generations > 2),
        "replay_successes={value} acts in groups of at least three, whose own episodes are compared with each other, and "
        "{args.__class__.__name__} with num_generations={args.num_generations} has none. Leave it unset.",
    ),
    excludes("demonstrations", _demonstrates, "replay_successes", why="which take the same places"),
    excludes(
        "whiten_advantages", (True,), "demonstrations", "replay_successes", why="which would be over own episodes alone"
    ),
    excludes(
        "kl_placement", ("reward", "advantage"), "demonstrations", "replay_successes",
        why="whose tokens have no reference there",
    ),
    excludes(
        "drift_correction", (drift.DECISION,), "demonstrations", "replay_successes", why="which no earlier policy has played"
    ),
    excludes("task_sampling", ("adaptive",), "demonstrations", why="which make every group informative"),
)  # fmt: skip


def skips_zero_advantage(args: Any) -> bool:
    """Return whether episodes without advantage are left out: as asked for, or where nothing trains them."""
    if args.skip_zero_advantage != "auto":
        return bool(args.skip_zero_advantage)
    in_loss = args.beta != 0.0 and args.kl_placement == "loss"
    entropy = args.entropy_coef != 0.0 or args.use_adaptive_entropy or args.top_entropy_quantile < 1.0
    return not (in_loss or entropy or args.has_critic or args.teacher is not None)


_BATCH = (
    Rule(
        ("skip_zero_advantage",),
        lambda args, value: value is not True or args.beta == 0.0 or args.kl_placement != "loss",
        "skip_zero_advantage=True cannot be combined with beta={args.beta} and kl_placement='loss', which trains episodes "
        "without advantage too. Set kl_placement='reward' or 'advantage', beta=0.0, or skip_zero_advantage=False.",
    ),
    excludes(
        "skip_zero_advantage", (True,), "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile",
        why="and it trains episodes without advantage too",
    ),
    acts_with("entropy_coef", lambda args: args.entropy_coef != 0.0, "entropy_coef_schedule", needed="another value"),
    acts_with("use_adaptive_entropy", (False,), "entropy_coef_schedule"),
    Rule(
        ("task_sampling", "task_column", "resample_zero_advantage_groups"),
        lambda args, _: not args.groupless,
        "{name}={value!r} acts on groups of episodes from the same start, and {args.__class__.__name__} has none. Leave "
        "{name} unset, or train with GRPO, GSPO or CISPO.",
        when_set=True,
    ),
    excludes(
        "max_tokens_per_micro_batch", lambda args: args.max_tokens_per_micro_batch is not None,
        "use_adaptive_entropy", "top_entropy_quantile", why="and it compares all tokens of a micro-batch",
    ),
)  # fmt: skip

_TURN_RATIOS = (
    acts_with("importance_sampling_level", ("turn",), "turn_ratio_pooling"),
    Rule(
        ("loss_type",),
        lambda args, value: value != "vespo" or args.importance_sampling_level != "turn",
        "loss_type='vespo' pools the ratio over the sequence by itself and cannot be combined with "
        "importance_sampling_level='turn'. Use importance_sampling_level='token'.",
    ),
    excludes(
        "importance_sampling_level", ("turn",), "top_entropy_quantile",
        why="since it drops tokens out of a turn whose ratio is pooled over all of them",
    ),
    excludes(
        "turn_ratio_pooling",
        lambda args: args.importance_sampling_level == "turn" and args.turn_ratio_pooling == "sum",
        "off_policy_mask_threshold",
        why="which changes the mean log-probabilities that it compares",
    ),
)  # fmt: skip


def _are_addresses(value: Any) -> bool:
    urls = addresses(value)
    return bool(urls) and all(urls) and len(set(urls)) == len(urls)


def _plays_ahead(args: Any) -> bool:
    return bool(args.batches_ahead > 0)


_AHEAD = (
    acts_with(
        "batches_ahead", _plays_ahead, "drift_correction", "drift_clip_max", needed="1 or more batches ahead",
    ),
    acts_with("drift_correction", drift.CORRECTIONS, "drift_clip_max", needed="a weight that it bounds"),
    weighs_decisions_with("importance_sampling_level", "token", "turn"),
    weighs_decisions_with("whiten_advantages", False),
    weighs_decisions_with("kl_placement", "loss", "reward"),
    excludes(
        "batches_ahead", _plays_ahead, "task_sampling", "resample_zero_advantage_groups",
        why="since what an update finds would act on batches that are under way already",
    ),
    excludes(
        "batches_ahead", lambda args: _plays_ahead(args) and args.vllm_importance_sampling_correction is True,
        "vllm_importance_sampling_correction", why="which drift_correction takes the place of",
    ),
    excludes(
        "batches_ahead", _plays_ahead, "repetition_penalty", why="whose episodes are played by adapters as they are",
    ),
    excludes(
        "batches_ahead", lambda args: _plays_ahead(args) and args.vllm_mode == "colocate", "vllm_enable_sleep_mode",
        "offload_policy_during_rollout", "vllm_tensor_parallel_size",
        why="whose episodes wait in the engine through an update",
    ),
    Rule(
        ("loss_type",),
        lambda args, value: (
            value != "vespo" or not args.batches_ahead or (args.drift_correction or "token").startswith("token")
        ),
        "loss_type='vespo' pools weights over the sequence by itself. Use drift_correction='token_truncate' or "
        "'token_mask'.",
    ),
)  # fmt: skip

_NOT_OF_ROWS = {
    "dispatch_batches": "sends tensors of the main process to the others, and rows for an environment are none. Leave it "
    "unset: each process reads its own rows",
    "split_batches": "divides a batch of rows among processes, so that some rows are played twice and others never. Leave "
    "it unset, and set per_device_train_batch_size",
    "gradient_accumulation_kwargs": "changes gradient_accumulation_steps when the run is planned already, and a resumed run "
    "would be another one. Leave it unset, and set gradient_accumulation_steps",
}
"""Settings of accelerate's that cannot be combined with an environment, and what each does."""

EPISODES: tuple[Rule, ...] = (
    *UNUSED, *_VLLM, *LOSS, *SWITCHED_ON, *_REFERENCE, *_TEACHER, *_DEMONSTRATIONS, *_BATCH, *_TURN_RATIOS,
    *_AHEAD,
    Rule(
        ("neftune_noise_alpha",),
        lambda _, value: not value,
        "neftune_noise_alpha={value!r} adds noise to the embeddings in training alone, so that another policy would be "
        "trained than the one that plays. Leave it unset.",
    ),
    Rule(
        ("accelerator_config",),
        lambda _, value: not any(getattr(value, key, None) for key in _NOT_OF_ROWS),
        lambda _, name, value: " ".join(
            f"{name}: {key}={getattr(value, key)!r} {why}."
            for key, why in _NOT_OF_ROWS.items() if getattr(value, key, None)
        ),
    ),
    Rule(
        ("dataloader_in_order",),
        lambda args, value: value or args.dataloader_num_workers < 2,
        "{name}=False takes rows as workers happen to deliver them, but the batch of a step, and what a resumed run plays, "
        "follow from their order. Leave it unset.",
    ),
)  # fmt: skip
"""Rules for a run with an environment."""

MACHINE: tuple[Rule, ...] = (
    Rule(
        ("fp16",),
        lambda args, _: args.mixed_precision != "fp16" or args.device.type != "cpu",
        "{name} (fp16=True, or mixed_precision of the launch configuration) needs a GPU: accelerate casts nothing to it "
        "on CPU. Use bf16=True, or set neither.",
    ),
    Rule(
        ("parallelism_config",),
        lambda _, value: not episode_split(value),
        lambda _, name, value: (
            f"{episode_split(value)} divides an episode among processes, but its turns must be scored together. Leave "
            f"{name} unset; for long episodes use gradient_checkpointing=True, and shard the model with "
            "accelerate_configs/zero3.yaml or fsdp2.yaml."
        ),
    ),
    Rule(
        ("vllm_enable_sleep_mode", "offload_policy_during_rollout", "use_liger_kernel", "activation_offload"),
        lambda args, value: not value or args.device.type != "cpu",
        "{name}=True needs a GPU and has no effect on CPU. Leave it unset.",
    ),
    Rule(
        ("offload_policy_during_rollout",),
        lambda args, value: not (value and (args.deepspeed or args.fsdp)),
        "offload_policy_during_rollout=True cannot move weights that DeepSpeed or FSDP keeps in buffers of its own. Leave "
        "it unset; ZeRO-3 and FSDP have options to offload.",
    ),
    Rule(
        ("batches_ahead",),
        lambda args, value: not (value and (args.deepspeed or args.fsdp)),
        "batches_ahead={value} plays with copies of the adapter, and DeepSpeed and FSDP keep weights in buffers of their "
        "own. Leave it unset, or use several processes without them.",
    ),
)
"""Rules for what this machine or launch cannot do, checked before the model is loaded; ``args.device`` starts accelerate."""


def _only_in_train(what: str, does: str, *options: str) -> Rule:
    """Make a rule for options that act in ``train()`` alone."""
    where = f"with rollout() and update() the caller {does} them. Leave {{name}} unset, or call train()."
    return Rule(options, lambda args, _: False, f"{{name}}={{value!r}} {what}; {where}", when_set=True)


BY_HAND: tuple[Rule, ...] = (
    _only_in_train(
        "chooses the groups that train() plays", "chooses",
        "task_sampling", "task_column", "resample_zero_advantage_groups",
    ),
    _only_in_train("take places in the groups that train() plays", "plays", "demonstrations", "replay_successes"),
    _only_in_train("lets train() play batches before their update", "plays", "batches_ahead"),
)  # fmt: skip
"""Rules for a run of ``rollout()`` and ``update()``."""

# ------------------------------------------------------------------------------------- limits, several environments


def check_limits(args: Any) -> None:
    """Check the limits of episodes, before the environments are known.

    Args:
        args: A ``MultiTurnConfig``.

    Raises:
        ValueError: For a value out of range, or limits that contradict each other; the message names the environment.
    """
    # This checks each limit, also where episodes are played without a configuration; below is what needs other options.
    options = EpisodeOptions.of_args(args)
    options.check_answers(args.min_new_tokens)
    for name in (None, *(args.environment_limits or {})):
        own, where = options.of(name), "" if name is None else f"environment_limits[{name!r}]: "
        if (own.max_model_length or 0) > (args.max_model_length or inf):
            raise ValueError(
                f"{where}max_model_length={own.max_model_length} is more than max_model_length={args.max_model_length}, "
                "which applies to all. Raise that one."
            )


def check_environment_names(args: Any, names: Sequence[str] | None) -> None:
    """Check the names in options that have a value for each environment against the environments of the run.

    Args:
        args: A ``MultiTurnConfig``.
        names: Names of several environments; None for one.

    Raises:
        ValueError: For an unknown name, and for a limit that would have no effect.
    """
    EpisodeOptions.of_args(args).histories(names or (None,))
    check_names("teacher", args.teacher if isinstance(args.teacher, dict) else None, names or (None,))
    limits = args.environment_limits
    check_names("environment_limits", limits, names or (None,))
    # `max_model_length` also bounds those of the environments, and sizes the engine.
    for limit in set(LIMITS) - {"max_model_length"} if limits else ():
        value = getattr(args, limit)
        if value != getattr(EpisodeOptions, limit) and all(limit in limits.get(name, {}) for name in names or ()):
            raise ValueError(
                f"{limit}={value} has no effect: environment_limits gives every environment one of its own. Leave {limit} "
                "unset."
            )
