"""Multi-turn reinforcement learning for language models, on top of TRL.

The trainers and their configurations can be imported from here. Torch and TRL are loaded with the first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agile_trainers.trainers import (
        MultiTurnCISPOConfig,
        MultiTurnCISPOTrainer,
        MultiTurnGRPOConfig,
        MultiTurnGRPOTrainer,
        MultiTurnGSPOConfig,
        MultiTurnGSPOTrainer,
        MultiTurnPPOConfig,
        MultiTurnPPOTrainer,
        MultiTurnREINFORCEConfig,
        MultiTurnREINFORCETrainer,
    )

__version__ = "0.1.0"
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agile_trainers import trainers

    return getattr(trainers, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
