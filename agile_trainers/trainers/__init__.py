"""Exports the trainers, their configurations and the parts of an algorithm of your own, loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm, register_algorithm

if TYPE_CHECKING:
    from agile_trainers.algorithms.cispo import MultiTurnCISPOConfig
    from agile_trainers.algorithms.distillation import MultiTurnDistillationConfig
    from agile_trainers.algorithms.grpo import MultiTurnGRPOConfig
    from agile_trainers.algorithms.gspo import MultiTurnGSPOConfig
    from agile_trainers.algorithms.ppo import MultiTurnPPOConfig
    from agile_trainers.algorithms.reinforce import MultiTurnREINFORCEConfig
    from agile_trainers.config.multi_turn import MultiTurnConfig
    from agile_trainers.config.options import option
    from agile_trainers.judges.judge import Judge
    from agile_trainers.monitor.progress import ProgressTable
    from agile_trainers.step.credit import Credit, CreditInputs
    from agile_trainers.step.loss import LossInputs, LossOutput
    from agile_trainers.trainers.algorithms import (
        MultiTurnCISPOTrainer,
        MultiTurnDistillationTrainer,
        MultiTurnGRPOTrainer,
        MultiTurnGSPOTrainer,
        MultiTurnPPOTrainer,
        MultiTurnREINFORCETrainer,
    )
    from agile_trainers.trainers.trainer import MultiTurnTrainer

__all__ = [
    "Credit", "CreditInputs", "Judge", "LossInputs", "LossOutput", "MultiTurnCISPOConfig", "MultiTurnCISPOTrainer",
    "MultiTurnConfig", "MultiTurnDistillationConfig", "MultiTurnDistillationTrainer", "MultiTurnGRPOConfig",
    "MultiTurnGRPOTrainer", "MultiTurnGSPOConfig", "MultiTurnGSPOTrainer", "MultiTurnPPOConfig", "MultiTurnPPOTrainer",
    "MultiTurnREINFORCEConfig", "MultiTurnREINFORCETrainer", "MultiTurnTrainer", "ProgressTable", "find_algorithm", "option",
    "register_algorithm",
]  # fmt: skip

_LOADED_LATER = {
    "Credit": "step.credit",
    "CreditInputs": "step.credit",
    "Judge": "judges.judge",
    "LossInputs": "step.loss",
    "LossOutput": "step.loss",
    "MultiTurnConfig": "config.multi_turn",
    "MultiTurnTrainer": "trainers.trainer",
    "ProgressTable": "monitor.progress",
    "option": "config.options",
}
"""The module of each name that is no algorithm's."""
for _name, _algorithm in ALGORITHMS.items():
    _trainer = _algorithm.trainer.rpartition(":")[2]
    _LOADED_LATER |= {
        f"{_trainer.removesuffix('Trainer')}Config": f"algorithms.{_name}",
        _trainer: "trainers.algorithms",
    }


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"agile_trainers.{_LOADED_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
