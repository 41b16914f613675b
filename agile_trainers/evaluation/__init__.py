"""Evaluation of a policy in an environment, without a trainer."""

from agile_trainers.evaluation.comparison import Comparison, compare_policies
from agile_trainers.evaluation.policy import VllmSampler, evaluate_policy
from agile_trainers.evaluation.results import EpisodeResults, Estimate, PolicySummary, summarize_policy
from agile_trainers.rollout.episode_options import EpisodeOptions
from agile_trainers.rollout.generators.base import SamplingSettings

__all__ = [
    "Comparison", "EpisodeOptions", "EpisodeResults", "Estimate", "PolicySummary", "SamplingSettings", "VllmSampler",
    "compare_policies", "evaluate_policy", "summarize_policy",
]  # fmt: skip
