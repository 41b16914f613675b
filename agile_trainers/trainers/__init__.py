"""The trainers: a credit rule and a configuration each, on one shared seam to TRL."""

from .cispo import MultiTurnCISPOConfig, MultiTurnCISPOTrainer
from .grpo import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from .gspo import MultiTurnGSPOConfig, MultiTurnGSPOTrainer
from .ppo import MultiTurnPPOConfig, MultiTurnPPOTrainer
from .reinforce import MultiTurnREINFORCEConfig, MultiTurnREINFORCETrainer

__all__ = [
    "MultiTurnCISPOConfig",
    "MultiTurnCISPOTrainer",
    "MultiTurnGRPOConfig",
    "MultiTurnGRPOTrainer",
    "MultiTurnGSPOConfig",
    "MultiTurnGSPOTrainer",
    "MultiTurnPPOConfig",
    "MultiTurnPPOTrainer",
    "MultiTurnREINFORCEConfig",
    "MultiTurnREINFORCETrainer",
]
