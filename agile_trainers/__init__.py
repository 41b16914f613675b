"""Multi-turn reinforcement learning for language models, on top of TRL.

All that ``agile_trainers.trainers`` exports can be imported from here: the trainers, their configurations, and the parts of
an algorithm of your own. Torch and TRL are loaded with the first trainer or configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agile_trainers import trainers
from agile_trainers.trainers import __all__ as __all__

if TYPE_CHECKING:
    from agile_trainers.trainers import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(trainers, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
