"""Lists the rules of the options in one table: the values of an option, when it acts, and the alternative.

:class:`Rule` is data, which :func:`check_rules` evaluates. The rules of one algorithm are in its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, get_type_hints

from trl import GRPOConfig

from agile_trainers.config.launch_checks import uses_deepspeed
from agile_trainers.config.options import default_of
from agile_trainers.objectives.mismatch import MODES
from agile_trainers.rollout.episode_options import LIMITS, EpisodeOptions

Allows = Callable[[Any, Any], bool]
"""Maps a configuration and the option's value to whether that value is accepted."""
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
                message = rule.message
                raise ValueError(
                    message.format(name=name, value=value, args=args)
                    if isinstance(message, str)
                    else message(args, name, value)
                )


_NUMBERS: dict[Any, type] = {int: Integral, float: Real, int | None: Integral, float | None: Real}
"""Annotation of an option to the kind of its values."""


@cache
def _numeric_options(config: type) -> dict[str, Any]:
    """Return the options that are numbers, with their annotations; those that may also be something else are left out."""
    hints = get_type_hints(config)
    pairs = ("epsilon", "epsilon_high")  # whose rule explains AgileRL's pair of them
    return {
        one.name: hints[one.name] for one in fields(config) if hints[one.name] in _NUMBERS and one.name not in pairs
    }


def check_numbers(args: Any) -> None:
    """Check that every option that is a number got one, since Python compares and computes with it later.

    Args:
        args: A configuration, as the user gave it.

    Raises:
        ValueError: For the first option that got anything else; the message says how to write the number.
    """
    for name, kind in _numeric_options(args.__class__).items():
        value = getattr(args, name)
        default = default_of(args.__dataclass_fields__[name])
        if (
            value is default
            or isinstance(value, _NUMBERS[kind])
            or (value is None and kind in (int | None, float | None))
        ):
            continue
        whole = _NUMBERS[kind] is Integral
        how = ""
        try:
            number = float(value)
            shown = str(int(number)) if whole and number == int(number) else "" if whole else repr(number)
            how = f" Write {name}={shown}." if shown and not isinstance(value, bool) else ""
        except (TypeError, ValueError, OverflowError):
            pass
        raise ValueError(f"{name} must be {'a whole number' if whole else 'a number'}, got {value!r}.{how}")


# ------------------------------------------------------------------------------------------------- kinds of rules


def one_of(option: str, *choices: str | bool, optional: bool = False) -> Rule:
    """Make a rule for an option with a fixed set of values; ``optional`` adds None."""
    shown = ", ".join(map(repr, choices))
    return Rule(
        (option,),
        lambda _, value: value in choices or (optional and value is None),
        f"{{name}} must be one of {shown}, got {{value!r}}.",
    )


def at_least(low: float, *options: str, optional: bool = False) -> Rule:
    """Make a rule for numbers with a lower bound; ``optional`` accepts None."""
    expected = "not be negative" if low == 0 else f"be at least {low}"
    return _number(options, expected, lambda value: value >= low, optional)


def positive(*options: str, optional: bool = False) -> Rule:
    """Make a rule for numbers above 0; ``optional`` accepts None."""
    return _number(options, "be positive", lambda value: value > 0, optional)


def in_unit_interval(*options: str) -> Rule:
    """Make a rule for numbers in [0, 1]."""
    return _number(options, "lie in [0, 1]", lambda value: 0 <= value <= 1, optional=False)


def _number(options: tuple[str, ...], expected: str, holds: Callable[[Any], bool], optional: bool) -> Rule:
    def is_number(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool)

    return Rule(
        options,
        lambda _, value: optional if value is None else is_number(value) and holds(value),
        lambda _, name, value: f"{name} must {expected if is_number(value) else 'be a number'}, got {value!r}.",
    )


def acts_with(needed: str, is_there: Callable[[Any], bool], *options: str) -> Rule:
    """Make a rule for options that act only together with another one.

    Args:
        needed: The other option, as the error names it.
        is_there: Returns True if a configuration has it.
        options: Names.
    """
    return Rule(
        options,
        lambda args, _: is_there(args),
        f"{{name}}={{value!r}} has no effect without {needed}. Set that, or leave {{name}} unset.",
        when_set=True,
    )


def idle(reason: str, *options: str, allows: Allows = lambda args, value: False) -> Rule:
    """Make a rule for options without effect in a run with an environment, except where ``allows`` returns True."""
    return Rule(options, allows, f"{{name}}={{value!r}} has no effect with an environment: {reason}.", when_set=True)


# ------------------------------------------------------------------------------------------------------ the table

CISPO_BOUND = 5.0
"""CISPO's default bound of the importance weight (ScaleRL, https://huggingface.co/papers/2510.13786)."""
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that clip the importance ratio from both sides."""
LOSS_TYPES = (*_CLIPPED, "cispo", "sapo", "vespo")


def _explain_pair(args: Any, name: str, pair: Any) -> str:
    """Write the error for AgileRL's ``clip_coef`` where a distance from 1 is expected."""
    told = f"{name} must be a number, got {pair!r}."
    if len(pair) != 2 or not all(isinstance(bound, Real) for bound in pair):
        return told
    low, high = pair
    if low >= 1 or high <= 1:  # a pair of distances
        return f"{told} Set epsilon={low} and epsilon_high={high}."
    if args.loss_type == "cispo":
        return (
            f"{told} AgileRL's clip_coef holds bounds of the ratio, and CISPO uses the upper: set epsilon_high={high}."
        )
    distances = f"epsilon={round(1 - low, 9)} and epsilon_high={round(high - 1, 9)}"
    return f"{told} AgileRL's clip_coef holds bounds of the ratio; here are their distances from 1: set {distances}."


def _agilerl_scale(theirs: str, here: str) -> Rule:
    return Rule(
        ("scale_rewards",),
        lambda _, value: value != theirs,
        f"scale_rewards must be one of 'group', 'batch', 'mean', 'none', got {{value!r}}. AgileRL's {theirs!r} is {here!r} "
        "here.",
    )


SIZES: tuple[Rule, ...] = (
    at_least(1, "num_iterations", "per_device_train_batch_size"),
    at_least(1, "steps_per_generation", "generation_batch_size", "gradient_accumulation_steps", optional=True),
    Rule(
        ("num_generations",),
        lambda args, value: not args.groupless or value == 1,
        "num_generations={value} has no effect: {args.__class__.__name__} compares no group, and every episode starts from "
        "a state of its own. Leave num_generations unset (1).",
    ),
)
"""Rules for sizes, checked first at construction, since TRL's configuration divides by them."""

VALUES: tuple[Rule, ...] = (
    Rule(
        ("loss_type",),
        lambda _, value: value != "gspo",
        "loss_type='gspo' is not a loss of TRL's: GSPO is loss_type='grpo' with importance_sampling_level='sequence'. Use "
        "MultiTurnGSPOConfig, which also sets its narrow epsilon and epsilon_high, or set the two here.",
    ),
    one_of("loss_type", *LOSS_TYPES),
    _agilerl_scale("mean_std", "group"),
    _agilerl_scale("mean_only", "none"),
    one_of("scale_rewards", "group", "batch", "mean", "none"),
    Rule(("epsilon", "epsilon_high"), lambda _, value: not isinstance(value, (tuple, list)), _explain_pair),
    positive("sapo_temperature_pos", "sapo_temperature_neg"),
    positive("delta", "advantage_clip_range", "max_logprob_gap", "max_wall_seconds", optional=True),
    at_least(0, "epsilon", "beta", "zero_advantage_eps", "diagnosis_interval", "weight_decay"),
    at_least(0, "learning_rate", optional=True),
    Rule(
        ("stop_strings",),
        lambda _, value: (
            value is None or (isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value))
        ),
        "stop_strings must be a list of texts such as ['</answer>'], got {value!r}.",
    ),
    at_least(0, "epsilon_high", "off_policy_mask_threshold", optional=True),
    in_unit_interval("top_entropy_quantile", "gamma"),
    one_of("importance_sampling_level", "token", "turn", "sequence"),
    one_of("turn_ratio_pooling", "mean", "sum"),
    one_of("skip_zero_advantage", "auto", True, False),
    one_of("kl_placement", "loss", "reward", "advantage"),
    one_of("sequence_packing", "auto", "prefix", "none"),
    one_of("entropy_coef_schedule", "constant", "linear"),
    one_of("vllm_importance_sampling_mode", *MODES, optional=True),
    one_of("task_sampling", "uniform", "adaptive"),
    one_of("group_filter", "none", "variance"),
    at_least(0, "resample_zero_advantage_groups"),
    positive("group_filter_share"),
    in_unit_interval("group_filter_share"),
    at_least(2, "task_seeds", optional=True),
    at_least(0, "min_new_tokens"),
    at_least(1, "num_eval_episodes"),
    at_least(
        1,
        "generation_chunk_size",
        "reference_update_steps",
        "pad_to_multiple_of",
        "max_tokens_per_micro_batch",
        optional=True,
    ),
)
"""Rules for values, checked at construction."""

_PLAYED = "evaluate() plays num_eval_episodes episodes, generation_chunk_size at once, as training plays them"
UNUSED = (
    idle(
        "the rollout generator admits and retires episodes at every token already",
        "use_transformers_continuous_batching", "use_transformers_paged",
    ),
    idle("the rollout generator does its own batching", "transformers_continuous_batching_config"),
    idle("the rollout generator keeps its own KV cache between turns", "cache_implementation"),
    idle(
        "set temperature, top_p, top_k, min_p, repetition_penalty, min_new_tokens or stop_strings", "generation_kwargs"
    ),
    idle("an environment's turns are limited by max_turns", "max_tool_calling_iterations"),
    idle("evaluate() plays num_eval_episodes episodes of their own", "num_generations_eval"),
    idle(
        "it saves in the middle of a step; send SIGINT (Ctrl-C), which saves at its end and stops", "enable_jit_checkpoint"
    ),
    idle("rewards are added to the turns before anything is normalized", "multi_objective_aggregation"),
    idle("episodes are text", "log_multimodal"),
    idle(
        "rows come in TRL's order, and micro-batches hold episodes of similar length",
        "train_sampling_strategy", "length_column_name",
    ),
    idle("seed orders the rows", "data_seed"),
    idle("episodes have no labels", "label_names", "label_smoothing_factor"),
    idle(
        _PLAYED,
        "per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
        "batch_eval_metrics", "include_for_metrics", "prediction_loss_only", "bf16_full_eval", "fp16_full_eval",
    ),
)  # fmt: skip
"""Rules for options of TRL and transformers that act on parts that an environment replaces."""

_VLLM = (
    Rule(
        tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")),
        lambda args, _: bool(args.vllm_importance_sampling_correction),
        "{name}={value!r} has no effect with vllm_importance_sampling_correction=False. Set that to True, or leave {name} "
        "unset.",
        when_set=True,
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
    Rule(
        (
            *(
                field.name
                for field in fields(GRPOConfig)
                if field.name.startswith("vllm_") and not field.name.startswith("vllm_importance_sampling_")
            ),
            "offload_policy_during_rollout",
        ),
        lambda args, _: bool(args.use_vllm),
        "{name}={value!r} has no effect without vLLM. Set use_vllm=True, or leave {name} unset.",
        when_set=True,
    ),
    one_of("vllm_mode", "colocate", "server"),
    idle("max_model_length limits the conversation, and the engine's too", "vllm_max_model_length"),
    idle("the environment judges the form of an answer", "vllm_structured_outputs_regex"),
    idle(
        "it acts on vLLM's server, and the engine runs in this process (vllm_mode='colocate')",
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        allows=lambda args, _: args.vllm_mode == "server",
    ),
    idle(
        "it acts on an engine in this process, and vLLM's server (vllm_mode='server') has options of its own",
        "vllm_gpu_memory_utilization", "vllm_model_impl", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode",
        "offload_policy_during_rollout",
        allows=lambda args, _: args.vllm_mode == "colocate",
    ),
)  # fmt: skip


def _read_by(losses: tuple[str, ...], *options: str) -> Rule:
    return Rule(
        options,
        lambda args, _: args.loss_type in losses,
        "{name}={value!r} has no effect with loss_type={args.loss_type!r}; it acts with "
        f"{', '.join(map(repr, losses))}. Leave {{name}} unset.",
        when_set=True,
    )


LOSS = (
    Rule(
        ("epsilon", "delta"),
        lambda args, _: args.loss_type != "cispo",
        "{name}={value!r} has no effect with loss_type='cispo'. Leave {name} unset, and set epsilon_high, the only bound of "
        "CISPO's weight.",
        when_set=True,
    ),
    _read_by(_CLIPPED, "epsilon", "delta"),
    _read_by((*_CLIPPED, "cispo"), "epsilon_high"),
    _read_by(("sapo",), "sapo_temperature_pos", "sapo_temperature_neg"),
    _read_by(("vespo",), "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
"""Rules for options that only some losses read."""

SWITCHED_ON = (
    acts_with(
        "sync_ref_model=True", lambda args: bool(args.sync_ref_model), "ref_model_mixup_alpha", "ref_model_sync_steps"
    ),
    acts_with(
        "use_adaptive_entropy=True", lambda args: bool(args.use_adaptive_entropy),
        "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
    ),
    acts_with(
        "log_completions=True", lambda args: bool(args.log_completions),
        "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo",
    ),
    acts_with(
        "beta and kl_placement='loss'", lambda args: args.beta != 0.0 and args.kl_placement == "loss",
        "use_bias_correction_kl",
    ),
    acts_with("DeepSpeed", uses_deepspeed, "ds3_gather_for_generation"),
)  # fmt: skip

_REFERENCE = (
    Rule(
        ("kl_placement", "reference_adapter", "reference_update_steps", "keep_reference"),
        lambda args, _: args.beta != 0.0,
        "{name}={value!r} has no effect with beta=0.0, which uses no reference. Set beta, or leave {name} unset.",
        when_set=True,
    ),
    Rule(
        ("reference_update_steps",),
        lambda args, value: not (value and args.sync_ref_model),
        "reference_update_steps={value} and sync_ref_model=True both move the reference. Leave one of them unset.",
    ),
)


def _pushed(extra: str, is_there: Callable[[Any], bool], why: str) -> Rule:
    return Rule(
        ("hub_extras",),
        lambda args, value: extra not in value or is_there(args),
        f"hub_extras={{value!r}}: {why}. Leave {extra!r} out.",
    )


_HUB = (
    Rule(
        ("hub_extras",),
        lambda _, value: set(value) <= {"reference", "critic", "rollouts"},
        lambda _, name, value: (
            "hub_extras must be among 'reference', 'critic', 'rollouts', got "
            f"{next(extra for extra in value if extra not in ('reference', 'critic', 'rollouts'))!r}."
        ),
    ),
    _pushed("reference", lambda args: args.beta != 0.0, "there is no reference to push, beta=0.0 uses none"),
    _pushed("critic", lambda args: args.has_critic, "there is no critic to push, the algorithm has none"),
    _pushed("rollouts", lambda args: args.log_rollouts, "there are no rollouts to push, log_rollouts=False"),
)


def skips_zero_advantage(args: Any) -> bool:
    """Return whether episodes without advantage are left out: as asked for, or where nothing trains them."""
    if args.skip_zero_advantage != "auto":
        return bool(args.skip_zero_advantage)
    in_loss = args.beta != 0.0 and args.kl_placement == "loss"
    entropy = args.entropy_coef != 0.0 or args.use_adaptive_entropy or args.top_entropy_quantile < 1.0
    return not (in_loss or entropy or args.has_critic)


_RECORDS = (
    Rule(
        ("log_rollouts",),
        lambda _, value: isinstance(value, int) and value >= 0,
        "log_rollouts must be an integer of at least 0 (every N-th generation batch; 0 writes none), True or False, "
        "got {value!r}.",
    ),
    positive("log_rollouts_max_gb", optional=True),
    acts_with("log_rollouts of at least 1", lambda args: args.log_rollouts, "log_rollouts_max_gb"),
)

_SKIPPING = (
    Rule(
        ("skip_zero_advantage",),
        lambda args, value: value is not True or args.beta == 0.0 or args.kl_placement != "loss",
        "skip_zero_advantage=True cannot be combined with beta={args.beta} and kl_placement='loss', which trains episodes "
        "without advantage too. Set kl_placement='reward' or 'advantage', beta=0.0, or skip_zero_advantage=False.",
    ),
    Rule(
        ("entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"),
        lambda args, _: args.skip_zero_advantage is not True,
        "skip_zero_advantage=True cannot be combined with {name}={value!r}, which trains episodes without advantage too. "
        "Leave {name} unset, or set skip_zero_advantage=False.",
        when_set=True,
    ),
    Rule(
        ("entropy_coef_schedule",),
        lambda args, _: args.entropy_coef != 0.0 and not args.use_adaptive_entropy,
        "entropy_coef_schedule={value!r} moves entropy_coef, which is {args.entropy_coef} with use_adaptive_entropy="
        "{args.use_adaptive_entropy}. Set entropy_coef, and leave use_adaptive_entropy unset.",
        when_set=True,
    ),
)

_GROUPS = (
    Rule(
        (
            "task_sampling", "task_column", "task_seeds", "resample_zero_advantage_groups", "group_filter",
            "group_filter_share",
        ),
        lambda args, _: not args.groupless,
        "{name}={value!r} acts on groups of episodes from the same start, and {args.__class__.__name__} has none. Leave "
        "{name} unset, or train with GRPO, GSPO or CISPO.",
        when_set=True,
    ),
    acts_with("group_filter='variance'", lambda args: args.group_filter == "variance", "group_filter_share"),
)  # fmt: skip

_PASSES = (
    Rule(
        ("use_adaptive_entropy", "top_entropy_quantile"),
        lambda args, _: args.max_tokens_per_micro_batch is None,
        "max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} cannot be combined with {name}={value!r}, which "
        "compares all tokens of a micro-batch. Leave one of them unset, or lower per_device_train_batch_size.",
        when_set=True,
    ),
)

_TURN_RATIOS = (
    Rule(
        ("turn_ratio_pooling",),
        lambda args, _: args.importance_sampling_level == "turn",
        "turn_ratio_pooling={value!r} acts on importance_sampling_level='turn' only, which is "
        "{args.importance_sampling_level!r}. Leave turn_ratio_pooling unset.",
        when_set=True,
    ),
    Rule(
        ("loss_type",),
        lambda args, value: value != "vespo" or args.importance_sampling_level != "turn",
        "loss_type='vespo' pools the ratio over the sequence by itself and cannot be combined with "
        "importance_sampling_level='turn'. Use importance_sampling_level='token'.",
    ),
    Rule(
        ("top_entropy_quantile",),
        lambda args, value: value == 1.0 or args.importance_sampling_level != "turn",
        "top_entropy_quantile={value} drops tokens out of a turn whose ratio is pooled over all of them. Use "
        "top_entropy_quantile=1.0 or importance_sampling_level='token'.",
    ),
    Rule(
        ("off_policy_mask_threshold",),
        lambda args, value: (
            value is None or args.importance_sampling_level != "turn" or args.turn_ratio_pooling != "sum"
        ),
        "off_policy_mask_threshold={value} compares mean log-probabilities, which turn_ratio_pooling='sum' changes. Use "
        "turn_ratio_pooling='mean' or leave off_policy_mask_threshold unset.",
    ),
)

EPISODES: tuple[Rule, ...] = (
    *UNUSED, *_VLLM, *LOSS, *SWITCHED_ON, *_REFERENCE, *_HUB, *_RECORDS, *_GROUPS, *_SKIPPING, *_PASSES, *_TURN_RATIOS,
)  # fmt: skip
"""Rules for a run with an environment."""

MACHINE: tuple[Rule, ...] = (
    Rule(
        ("vllm_enable_sleep_mode", "offload_policy_during_rollout"),
        lambda args, value: not value or args.device.type != "cpu",
        "{name}=True frees a GPU's memory and has no effect on CPU. Leave it unset.",
    ),
    Rule(
        ("offload_policy_during_rollout",),
        lambda args, value: not (value and (args.deepspeed or args.fsdp)),
        "offload_policy_during_rollout=True cannot move weights that DeepSpeed or FSDP keeps in buffers of its own. Leave "
        "it unset; ZeRO-3 and FSDP have options to offload.",
    ),
    Rule(
        ("use_liger_kernel",),
        lambda args, value: not value or args.device.type != "cpu",
        "use_liger_kernel=True needs a GPU: Liger's layers are Triton programs, which do not run on CPU. Leave it unset.",
    ),
    Rule(
        ("activation_offload",),
        lambda args, value: not value or args.device.type != "cpu",
        "activation_offload=True has no effect on CPU, whose memory it would move activations to. Leave it unset.",
    ),
)
"""Rules for options that need a GPU, checked before the model is loaded; ``args.device`` starts accelerate."""

BY_HAND: tuple[Rule, ...] = (
    Rule(
        ("task_sampling", "task_column", "task_seeds", "resample_zero_advantage_groups"),
        lambda args, _: False,
        "{name}={value!r} chooses the groups that train() plays; with rollout() and update() the caller chooses them. Leave "
        "{name} unset, or call train().",
        when_set=True,
    ),
)
"""Rules for a run of ``rollout()`` and ``update()``."""


# ------------------------------------------------------------------------------------- limits, several environments


def check_limits(args: Any) -> None:
    """Check the limits of episodes and the weights of environments, before the environments are known.

    Args:
        args: A ``MultiTurnConfig``.

    Raises:
        ValueError: For a value out of range, or limits that contradict each other; the message names the environment.
    """
    options = EpisodeOptions.of_args(args)
    for name in (None, *(args.environment_limits or {})):
        own, where = options.of(name), "" if name is None else f"environment_limits[{name!r}]: "
        if args.min_new_tokens > own.max_new_tokens:
            raise ValueError(
                f"{where}max_new_tokens={own.max_new_tokens} is less than min_new_tokens={args.min_new_tokens}, which "
                "applies to every answer. Raise the first or lower the second."
            )
        if (own.max_model_length or 0) > (args.max_model_length or inf):
            raise ValueError(
                f"{where}max_model_length={own.max_model_length} is more than max_model_length={args.max_model_length}, "
                "which applies to all. Raise that one."
            )
    weights = args.environment_weights
    if weights is None:
        return
    if not isinstance(weights, dict) or not weights:
        raise ValueError(f'environment_weights must be a mapping by name such as {{"guess": 2.0}}, got {weights!r}.')
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < inf:
            raise ValueError(f"environment_weights[{name!r}] must be a number of at least 0, got {weight!r}.")
    if not any(weights.values()):
        raise ValueError(f"environment_weights={weights}: all are 0, and no environment would be played. Raise one.")


def check_environment_names(args: Any, names: Sequence[str] | None) -> None:
    """Check the names in ``environment_limits`` and ``environment_weights`` against the environments of the run.

    Args:
        args: A ``MultiTurnConfig``.
        names: Names of several environments; None for one.

    Raises:
        ValueError: For an unknown or missing name, and for a limit that would have no effect.
    """
    limits, weights = args.environment_limits, args.environment_weights
    for option, given in {"environment_limits": limits, "environment_weights": weights}.items():
        if given is None:
            continue
        if names is None:
            raise ValueError(
                f"{option}={given} applies to several environments, but the run has one. Pass them by name, "
                'environment={"guess": ..., "sums": ...}, or leave it unset.'
            )
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"{option} names {unknown[0]!r}, expected one of the environments {', '.join(names)}.")
    if weights and (missing := [name for name in names or () if name not in weights]):
        raise ValueError(
            f"environment_weights={weights} leaves out {missing[0]!r}. Give every environment a weight; 0 is for one "
            "that is only evaluated."
        )
    # `max_model_length` also bounds those of the environments, and sizes the engine.
    for limit in set(LIMITS) - {"max_model_length"} if limits else ():
        value = getattr(args, limit)
        if value != getattr(EpisodeOptions, limit) and all(limit in limits.get(name, {}) for name in names or ()):
            raise ValueError(
                f"{limit}={value} has no effect: environment_limits gives every environment one of its own. Leave {limit} "
                "unset."
            )
