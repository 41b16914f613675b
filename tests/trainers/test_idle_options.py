"""Every option of TRL's acts with an environment, or is refused; a new one of TRL's must be sorted here."""

from __future__ import annotations

from dataclasses import fields

import pytest
from games import Chatter, make_trainer, settings
from transformers import TrainingArguments
from trl import GRPOConfig

from agile_trainers.config.rules import LOSS, SWITCHED_ON, UNUSED, Rule
from agile_trainers.trainers import MultiTurnGRPOConfig

REFUSED = {
    "log_multimodal": False, "num_generations_eval": 2, "generation_kwargs": {"num_beams": 2},
    "cache_implementation": "static",
    "max_tool_calling_iterations": 3, "multi_objective_aggregation": "normalize_then_sum",
    "use_transformers_continuous_batching": True, "use_transformers_paged": True,
    "transformers_continuous_batching_config": {}, "enable_jit_checkpoint": True, "per_device_eval_batch_size": 2,
    "eval_accumulation_steps": 2, "eval_do_concat_batches": False, "eval_use_gather_object": True,
    "batch_eval_metrics": True, "include_for_metrics": ["loss"], "prediction_loss_only": True,
    "bf16_full_eval": True, "fp16_full_eval": True,
    "label_names": ["labels"], "label_smoothing_factor": 0.1, "length_column_name": "size",
    "train_sampling_strategy": "group_by_length", "data_seed": 1,
}  # fmt: skip
NEEDING = {
    "ref_model_sync_steps": (8, {"sync_ref_model": True, "beta": 0.1}),
    "ref_model_mixup_alpha": (0.5, {"sync_ref_model": True, "beta": 0.1}),
    "entropy_coef_min": (0.1, {"use_adaptive_entropy": True}),
    "entropy_coef_max": (0.9, {"use_adaptive_entropy": True}),
    "entropy_coef_delta": (0.1, {"use_adaptive_entropy": True}),
    "entropy_target": (0.3, {"use_adaptive_entropy": True}),
    "num_completions_to_print": (1, {"log_completions": True}),
    "log_unique_prompts": (True, {"log_completions": True}),
    "log_completions_hub_repo": ("a/b", {"log_completions": True}),
    "use_bias_correction_kl": (False, {"beta": 0.1}),
    "ds3_gather_for_generation": (False, None),
}
ACTING = {
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout", "cast_lm_head_to_fp32",
    "num_generations", "shuffle_dataset", "pad_to_multiple_of", "generation_batch_size", "steps_per_generation",
    "temperature", "top_p", "top_k", "min_p", "chat_template_kwargs", "repetition_penalty", "use_vllm", "beta",
    "num_iterations", "importance_sampling_level", "reward_weights", "scale_rewards", "loss_type",
    "mask_truncated_completions", "sync_ref_model", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
    "off_policy_mask_threshold", "log_completions", "max_completion_length",
}  # fmt: skip


def named(rules: tuple[Rule, ...]) -> set[str]:
    return {name for rule in rules for name in rule.options}


def test_every_option_of_trls_is_sorted():
    own = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(TrainingArguments)}
    sorted_ = {*named(UNUSED), *named(SWITCHED_ON), *named(LOSS), *ACTING}
    assert own - sorted_ == {name for name in own if name.startswith("vllm_")}, "vLLM's have tests of their own"
    assert set(REFUSED) == named(UNUSED) and set(NEEDING) == named(SWITCHED_ON)


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_effect_is_refused(tmp_path, name):
    args = MultiTurnGRPOConfig(**settings(tmp_path))
    setattr(args, name, REFUSED[name])
    with pytest.raises(ValueError, match=rf"{name}=.* has no effect"):
        args.with_environment()


@pytest.mark.parametrize("name", NEEDING)
def test_an_option_that_another_one_switches_on(tmp_path, name):
    value, needed = NEEDING[name]
    args = MultiTurnGRPOConfig(**settings(tmp_path))
    setattr(args, name, value)
    with pytest.raises(ValueError, match=rf"{name}=.* has no effect with"):
        args.with_environment()
    if needed is not None:
        MultiTurnGRPOConfig(**settings(tmp_path, **{name: value, **needed})).with_environment()


def test_the_order_of_rows_needs_rows(embedded_model, tmp_path):
    with pytest.raises(ValueError, match="shuffle_dataset=False has no effect"):
        make_trainer(embedded_model, tmp_path, environment=Chatter, shuffle_dataset=False)
