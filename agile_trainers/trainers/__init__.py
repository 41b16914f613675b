"""The trainers: a credit rule and a configuration each, on one shared seam to TRL."""

from .grpo import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

__all__ = ["MultiTurnGRPOConfig", "MultiTurnGRPOTrainer"]
