"""The table of option rules: what is true of every row."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from errors import naming
from trl import DPOConfig, SFTConfig

from agile_trainers.cli.run_files import make_config
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.rules import (
    EPISODES,
    MACHINE,
    SIZES,
    VALUES,
    Rule,
    acts_with,
    at_least,
    check_kinds,
    check_rules,
    check_values,
    in_unit_interval,
    one_of,
    positive,
)
from agile_trainers.trainers import (
    MultiTurnCISPOConfig,
    MultiTurnDistillationConfig,
    MultiTurnGRPOConfig,
    MultiTurnGSPOConfig,
    MultiTurnPPOConfig,
    MultiTurnREINFORCEConfig,
)

CONFIGS = [
    MultiTurnGRPOConfig, MultiTurnGSPOConfig, MultiTurnCISPOConfig, MultiTurnREINFORCEConfig, MultiTurnPPOConfig,
]  # fmt: skip


def rules_of(config: type[MultiTurnConfig]) -> tuple[Rule, ...]:
    return (*SIZES, *VALUES, *config.value_rules, *config.episode_rules, *EPISODES, *MACHINE)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_row_names_options_that_exist_and_writes_a_whole_message(tmp_path: Path, config: type[MultiTurnConfig]):
    args = config(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    for rule in rules_of(config):
        for name in rule.options:
            assert name in config.__dataclass_fields__
            if isinstance(rule.message, str):
                said = rule.message.format(name=name, value="some value", args=args)
                assert name in said and not re.search(r"[{}]", said)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_defaults_of_every_algorithm_pass(tmp_path: Path, config: type[MultiTurnConfig]):
    check_rules(config(output_dir=str(tmp_path), use_cpu=True, bf16=False).with_environment(), (*EPISODES, *MACHINE))


@pytest.mark.parametrize(
    ("rule", "accepted", "rejected"),
    [
        (at_least(1, "beta"), [1, 1.5, None], [0, 0.99, -1, float("nan")]),
        (at_least(0, "beta"), [0, 0.0, None], [-1e-9]),
        (positive("beta"), [1e-9, 3, None], [0, -1, 0.0]),
        (in_unit_interval("beta"), [0, 1, 0.5, None], [-0.1, 1.1, float("nan")]),
        (one_of("beta", "a", "b"), ["a", "b"], ["c", None, 1]),
        (one_of("beta", "a", optional=True), ["a", None], ["b"]),
    ],
)
def test_ranges(tmp_path: Path, rule: Rule, accepted: list[object], rejected: list[object]):
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    for value in accepted:
        vars(args)["beta"] = value
        check_rules(args, [rule])
    for value in rejected:
        vars(args)["beta"] = value
        with pytest.raises(ValueError, match=naming("beta", value)):
            check_rules(args, [rule])


@pytest.mark.parametrize("value", ["2", True, None, [1]])
def test_what_is_no_number_is_refused_before_its_range_is_looked_at(tmp_path: Path, value: object):
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    for name in ("beta", "max_turns", "epsilon"):
        vars(args)[name] = value
        with pytest.raises(ValueError, match=naming(name, "number", value)):
            check_values(args)
        vars(args)[name] = getattr(MultiTurnGRPOConfig, name)
    for name in ("epsilon_high", "delta", "learning_rate"):
        vars(args)[name] = None
    check_values(args)


def kinds_of(config: type) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(config).items() if name in config.__dataclass_fields__}


@pytest.mark.parametrize("config", [*CONFIGS, MultiTurnDistillationConfig, SFTConfig, DPOConfig])
def test_a_text_or_none_for_a_boolean_is_refused(tmp_path: Path, config: type) -> None:
    args = config(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    booleans = {name: kind for name, kind in kinds_of(config).items() if kind in (bool, bool | None)}
    assert {"bf16", "save_only_model"} <= booleans.keys()
    for name, kind in booleans.items():
        before = getattr(args, name)
        for text, meant in (("False", "False"), ("no", "False"), ("true", "True"), ("1", "True")):
            vars(args)[name] = text
            with pytest.raises(ValueError, match=naming({name: text}, "True or False", f"Write {name}={meant}")):
                check_kinds(args)
        for value in ("maybe", 2, [False], *([None] if kind is bool else [])):
            vars(args)[name] = value
            with pytest.raises(ValueError, match=naming({name: value}, "True or False")):
                check_kinds(args)
        for value in (0, 1, np.False_, np.True_):
            vars(args)[name] = value
            check_kinds(args)
            assert getattr(args, name) is bool(value)
        vars(args)[name] = before
    check_kinds(args)


@pytest.mark.parametrize("config", CONFIGS)
def test_booleans_of_construction_and_of_files(tmp_path: Path, config: type[MultiTurnConfig]) -> None:
    with pytest.raises(ValueError, match=naming({"mask_truncated_completions": "no"}, "False")):
        config(output_dir=str(tmp_path), use_cpu=True, bf16=False, mask_truncated_completions="no")
    written = {"mask_truncated_completions": "no", "use_cpu": "true", "bf16": False, "skip_zero_advantage": "auto"}
    made = make_config(config, written, tmp_path, "file")
    assert (made.mask_truncated_completions, made.use_cpu, made.skip_zero_advantage) == (False, True, "auto")
    with pytest.raises(ValueError, match=r"mask_truncated_completions must be True or False, got None"):
        make_config(config, written | {"mask_truncated_completions": None}, tmp_path, "file")


@pytest.mark.parametrize("config", [*CONFIGS, MultiTurnDistillationConfig, SFTConfig, DPOConfig])
def test_a_number_is_finite_but_for_bounds(tmp_path: Path, config: type) -> None:
    # Without these bounds nothing is cut, or waited for without end; anything else that is infinite ends in NaN.
    bounds = {
        "advantage_clip_range", "delta", "drift_clip_max", "entropy_coef_max", "environment_timeout", "max_grad_norm",
        "max_logprob_gap", "max_wall_seconds", "off_policy_mask_threshold", "value_clip_range",
        "vllm_importance_sampling_clip_max", "vllm_server_timeout",
    }  # fmt: skip
    args = config(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    numbers = [name for name, kind in kinds_of(config).items() if kind in (float, float | None)]
    assert {"learning_rate", "max_grad_norm", "num_train_epochs"} <= set(numbers)
    for name in numbers:
        before = getattr(args, name)
        for value in (math.nan, -math.inf, math.inf, np.float32("nan")):
            vars(args)[name] = value
            if name in ("epsilon", "epsilon_high"):
                continue  # they have rules of their own
            if value == math.inf and name in bounds:
                check_kinds(args)
                continue
            with pytest.raises(ValueError, match=naming(name, "finite")):
                check_kinds(args)
        vars(args)[name] = before
    check_kinds(args)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": math.inf}, {"entropy_coef": math.nan}, {"zero_advantage_eps": math.inf}, {"epsilon": math.nan},
        {"epsilon_high": math.nan}, {"reward_weights": [math.nan]}, {"reward_weights": ["1"]}, {"reward_weights": 1.0},
        {"adam_beta1": 1.5}, {"adam_beta2": 1}, {"adam_epsilon": -1e-8},
    ],
)  # fmt: skip
def test_numbers_that_fail_in_training_alone_are_refused(tmp_path: Path, options) -> None:
    with pytest.raises(ValueError, match=naming(*options)):
        MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_no_bound_at_all_may_be_written_as_infinity(tmp_path: Path) -> None:
    given = dict.fromkeys(("epsilon_high", "delta", "max_grad_norm", "drift_clip_max"), math.inf)
    MultiTurnGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, reward_weights=(1, np.float32(0.5)), **given
    )


def test_an_option_at_its_default_needs_nothing(tmp_path: Path):
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    rule = acts_with("log_completions", (True,), "gamma")
    check_rules(args, [rule])
    args.gamma = 0.5
    with pytest.raises(ValueError, match=naming("gamma=0.5", "log_completions=False", "log_completions=True")):
        check_rules(args, [rule])
    args.log_completions = True
    check_rules(args, [rule])


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (MultiTurnGRPOConfig, {"scale_rewards": "mean_std"}, ["'mean_std'", "'group'"]),
        (MultiTurnGRPOConfig, {"scale_rewards": "mean_only"}, ["'mean_only'", "'none'"]),
        (
            MultiTurnGRPOConfig, {"scale_rewards": "mean", "beta": 0.1, "kl_placement": "reward"},
            ["scale_rewards='mean'", "kl_placement='reward'"],
        ),
        (MultiTurnGRPOConfig, {"entropy_coef_schedule": "cosine"}, ["entropy_coef_schedule", "'linear'", "'cosine'"]),
        (MultiTurnGRPOConfig, {"entropy_coef_schedule": "linear"}, ["entropy_coef_schedule='linear'", "entropy_coef"]),
        (MultiTurnGRPOConfig, {"loss_type": "sapo", "epsilon_high": 0.3}, ["epsilon_high=0.3", "loss_type='sapo'"]),
        (MultiTurnPPOConfig, {"critic_start": "base"}, ["critic_start", "'saved'", "'base'"]),
        (MultiTurnPPOConfig, {"skip_zero_advantage": True}, ["skip_zero_advantage=True"]),
    ],
)  # fmt: skip
def test_rows_that_no_other_test_breaks(tmp_path: Path, config: type[MultiTurnConfig], options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        config(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options).with_environment()


def test_a_saved_average_of_the_policy_is_kept_as_teacher(tmp_path) -> None:
    given = {"reference_adapter": True, "keep_reference": True, "use_cpu": True, "bf16": False}
    MultiTurnGRPOConfig(str(tmp_path), teacher="reference", **given).with_environment()
    with pytest.raises(ValueError, match=r"keep_reference=True.*a reference"):
        MultiTurnGRPOConfig(str(tmp_path), **given | {"reference_adapter": False}).with_environment()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task_sampling": "adaptive"}, "groups of equal rewards have an advantage too"),
        ({"resample_zero_advantage_groups": 2}, "groups of equal rewards have an advantage too"),
        ({"replay_successes": 8}, "groups of equal rewards have an advantage too"),
        ({"batches_ahead": 1, "drift_correction": "decision_truncate"}, "advantage_baseline='shrunk'"),
    ],
)
def test_a_baseline_of_the_batch_excludes_what_needs_groups_without_advantage(tmp_path, changes, said) -> None:
    given = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **changes}
    MultiTurnGRPOConfig(**given).with_environment()
    with pytest.raises(ValueError, match=said):
        MultiTurnGRPOConfig(**given, advantage_baseline="shrunk").with_environment()
