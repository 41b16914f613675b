"""The options and the metrics of a healthy run, for the tests of the diagnosis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options that conditions look at."""

    has_critic: bool = False
    rewarded: bool = True
    max_new_tokens: int = 64
    max_turns: int = 4
    max_model_length: int | None = 512
    mask_truncated_completions: bool = False
    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    beta: float = 0.0
    num_generations: int = 8
    generation_batch_size: int = 96
    task_sampling: str = "uniform"
    shuffle_dataset: bool = True
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    temperature: float = 1.0
    gamma: float = 1.0
    turn_credit: str = "return"


HEALTHY: dict[str, float] = {
    "success": 0.4, "groups_without_success": 0.05,
    "advantage/zero": 0.2, "return/mean": 0.4, "return/std": 0.5, "return/min": 0.0, "return/max": 1.0,
    "entropy": 1.0, "answers_cut": 0.05, "return/answers_cut": 0.0, "stop/truncated": 0.0, "stop/max_turns": 0.1,
    "stop/context_full": 0.0, "stop/environment_error": 0.0, "stop/environment_timeout": 0.0,
    "groups_with_different_starts": 0.0, "clip_ratio/region_mean": 0.02,
    "sampling/sampling_logp_difference/mean": 1e-6, "kl": 0.05, "prompt_information": 0.9, "policy_change": 0.05,
    "value/error": 0.4, "value/spread": 0.5, "reward": 0.4, "reward_std": 0.5, "reward_success_correlation": 0.9,
    "distinct_tasks": 12.0, "success/unreported": 0.0, "rewards/nan": 0.0,
    "stop/rewrite_full": 0.0, "turns/mean": 11.0, "rewrites/context": 0.1, "rewrites/questions": 0.1, "drift/kl": 0.01,
    "teacher/kl": 0.1,
    "drift/effective_sample_size": 0.9, "success_sem": 0.05,
    "observations_empty": 0.0, "return/early_std": 0.4, "seeds_alike": 0.0,
}  # fmt: skip
"""The metrics of a step of a healthy run."""
