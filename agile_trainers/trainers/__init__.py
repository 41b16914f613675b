"""The trainers: a credit rule and a configuration each, on one shared seam to TRL."""

from agile_trainers.trainers.cispo import MultiTurnCISPOConfig, MultiTurnCISPOTrainer
from agile_trainers.trainers.grpo import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.trainers.gspo import MultiTurnGSPOConfig, MultiTurnGSPOTrainer
from agile_trainers.trainers.ppo import MultiTurnPPOConfig, MultiTurnPPOTrainer
from agile_trainers.trainers.reinforce import MultiTurnREINFORCEConfig, MultiTurnREINFORCETrainer

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
