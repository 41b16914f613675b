"""Exports the trainers, their configurations and the parts of an algorithm of your own, loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agile_trainers.trainers.algorithms import ALGORITHMS, find_algorithm, register_algorithm

if TYPE_CHECKING:
    from agile_trainers.trainers.cispo import MultiTurnCISPOConfig, MultiTurnCISPOTrainer
    from agile_trainers.trainers.config import MultiTurnConfig
    from agile_trainers.trainers.credit import Credit, CreditInputs
    from agile_trainers.trainers.grpo import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
    from agile_trainers.trainers.gspo import MultiTurnGSPOConfig, MultiTurnGSPOTrainer
    from agile_trainers.trainers.options import option
    from agile_trainers.trainers.ppo import MultiTurnPPOConfig, MultiTurnPPOTrainer
    from agile_trainers.trainers.reinforce import MultiTurnREINFORCEConfig, MultiTurnREINFORCETrainer
    from agile_trainers.trainers.trainer import MultiTurnTrainer

__all__ = [
    "Credit",
    "CreditInputs",
    "MultiTurnCISPOConfig",
    "MultiTurnCISPOTrainer",
    "MultiTurnConfig",
    "MultiTurnGRPOConfig",
    "MultiTurnGRPOTrainer",
    "MultiTurnGSPOConfig",
    "MultiTurnGSPOTrainer",
    "MultiTurnPPOConfig",
    "MultiTurnPPOTrainer",
    "MultiTurnREINFORCEConfig",
    "MultiTurnREINFORCETrainer",
    "MultiTurnTrainer",
    "find_algorithm",
    "option",
    "register_algorithm",
]

_LOADED_LATER = {
    "Credit": "credit",
    "CreditInputs": "credit",
    "MultiTurnConfig": "config",
    "MultiTurnTrainer": "trainer",
    "option": "options",
}
"""The module here of each name that is no algorithm's."""
for _trainer in (_algorithm.trainer.rpartition(".")[2] for _algorithm in ALGORITHMS.values()):
    _module, _, _class = _trainer.partition(":")
    _LOADED_LATER |= {_class: _module, _class.replace("Trainer", "Config"): _module}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"agile_trainers.trainers.{_LOADED_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
