"""Finds the trainer of an algorithm by name: ours, those given to :func:`register_algorithm`, and ``module.path:Class``.

Imports no trainer until it is asked for one, so that ``agile-trainers --help`` stays quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agile_trainers.imports import NotThereError, load_named, nearest

if TYPE_CHECKING:
    from agile_trainers.trainers.trainer import MultiTurnTrainer


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of this package."""

    trainer: str
    """Its trainer, as ``module.path:Class``. The configuration is the class's ``config_class``."""
    summary: str
    """One line of ``agile-trainers --help``."""


_HERE = "agile_trainers.trainers.algorithms"
ALGORITHMS = {
    "grpo": Algorithm(f"{_HERE}:MultiTurnGRPOTrainer", "trains any model on any environment by multi-turn GRPO"),
    "gspo": Algorithm(f"{_HERE}:MultiTurnGSPOTrainer", "the same with one importance ratio per episode, or per turn"),
    "cispo": Algorithm(f"{_HERE}:MultiTurnCISPOTrainer", "the same with clipped importance weights"),
    "reinforce": Algorithm(
        f"{_HERE}:MultiTurnREINFORCETrainer",
        "the same without groups, returns normalized over the batch (ReBN)",
    ),
    "distillation": Algorithm(
        f"{_HERE}:MultiTurnDistillationTrainer",
        "trains on a teacher's log-probs alone, on the policy's own episodes",
    ),
    "ppo": Algorithm(f"{_HERE}:MultiTurnPPOTrainer", "the same without groups, with a critic"),
}
"""The algorithms of this package by name."""
_registered: dict[str, type[MultiTurnTrainer]] = {}


def register_algorithm(name: str, trainer: type[MultiTurnTrainer]) -> None:
    """Register an algorithm under a name, for :func:`find_algorithm`, the command line and chains.

    The name is known to this process only. A process that ``accelerate launch`` starts finds the class as
    ``module.path:Class``.

    Args:
        name: A name without a colon, which marks ``module.path:Class``.
        trainer: A subclass of :class:`~agile_trainers.trainers.trainer.MultiTurnTrainer` with a credit rule,
            ``assign_credit``. Its ``config_class`` is its configuration.

    Raises:
        ValueError: If the name is empty, holds a colon, or is taken by another class, or the class has no credit rule.
        TypeError: If it is no trainer class.
    """
    if not name or ":" in name:
        raise ValueError(f"An algorithm's name must be non-empty and hold no colon, got {name!r}.")
    if name in ALGORITHMS or _registered.get(name, trainer) is not trainer:
        taken = _registered.get(name) or ALGORITHMS[name].trainer
        raise ValueError(f"An algorithm named {name!r} is there already: {taken!r}. Choose another name.")
    _registered[name] = _checked(trainer, repr(name))


def algorithm_names() -> list[str]:
    """List the names of all algorithms: those of this package, then those registered."""
    return [*ALGORITHMS, *_registered]


def find_algorithm(name: str) -> type[MultiTurnTrainer]:
    """Find the trainer class of an algorithm; its ``config_class`` is the configuration.

    Args:
        name: One of ``algorithm_names()``, or ``module.path:Class`` of a trainer class anywhere.

    Raises:
        ValueError: If there is none (the message names the nearest), its module cannot be imported, or the class has no
            credit rule.
        TypeError: If what the name leads to is no trainer class.
    """
    if name in _registered:
        return _registered[name]
    path = ALGORITHMS[name].trainer if name in ALGORITHMS else name
    if not isinstance(path, str) or not all(path.partition(":")):
        raise ValueError(
            f"Unknown algorithm {name!r}{nearest(name, algorithm_names()) or '.'} Expected one of "
            f"{', '.join(algorithm_names())}, or 'module.path:Class' of a trainer class of your own."
        )
    try:
        return _checked(load_named(path), repr(name))
    except NotThereError as error:
        raise ValueError(
            f"Unknown algorithm {name!r}: {error}. Expected one of {', '.join(algorithm_names())}, or 'module.path:Class' "
            "of a trainer class of your own."
        ) from error


def _checked(trainer: type[Any], name: str) -> type[MultiTurnTrainer]:
    from agile_trainers.trainers.trainer import MultiTurnTrainer

    if not isinstance(trainer, type) or not issubclass(trainer, MultiTurnTrainer):
        raise TypeError(f"The algorithm {name} must be a subclass of MultiTurnTrainer, got {trainer!r}.")
    if trainer.assign_credit is MultiTurnTrainer.assign_credit:
        raise ValueError(
            f"The algorithm {name}, {trainer.__name__}, has no credit rule: define "
            "`assign_credit(self, turns: CreditInputs) -> Credit`."
        )
    return trainer
