"""Evaluation of a policy in an environment, without a trainer."""

from agile_trainers.evaluation.policy import evaluate_policy
from agile_trainers.evaluation.results import EpisodeResults
from agile_trainers.rollout.episode_options import EpisodeOptions
from agile_trainers.rollout.generators.base import SamplingSettings

__all__ = ["EpisodeOptions", "EpisodeResults", "SamplingSettings", "evaluate_policy"]
