"""Multi-turn CISPO: GRPO that clips the importance weight and keeps every token's gradient."""

from dataclasses import dataclass, field
from typing import ClassVar

from agile_trainers.trainers.config import _one_of
from agile_trainers.trainers.config_rules import CISPO_BOUND
from agile_trainers.trainers.grpo import MultiTurnGRPOConfig, MultiTurnGRPOTrainer


@dataclass
class MultiTurnCISPOConfig(MultiTurnGRPOConfig):
    """CISPO's settings.

    Args:
        loss_type: Always ``"cispo"``.
        epsilon_high: The weight's upper bound, 5.0 (ScaleRL, https://huggingface.co/papers/2510.13786). GRPO's 0.2 would
            cut every weight to a fifth.
    """

    loss_type: str = field(default="cispo", metadata={"help": "Always cispo."})
    epsilon_high: float | None = field(default=CISPO_BOUND, metadata={"help": "Upper bound of the importance weight."})

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "loss_type", ("cispo",))


class MultiTurnCISPOTrainer(MultiTurnGRPOTrainer):
    """CISPO (MiniMax-M1, https://huggingface.co/papers/2506.13585) over multi-turn episodes."""

    _name = "Multi-turn CISPO"
    _tag_names: ClassVar[list[str]] = ["trl", "cispo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {
        "title": "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
        "id": "2506.13585",
    }
    _config_class = MultiTurnCISPOConfig
