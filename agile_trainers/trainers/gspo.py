"""Multi-turn GSPO: GRPO whose importance ratio is one per sequence, or per turn."""

from dataclasses import dataclass, field
from typing import ClassVar

from agile_trainers.trainers.config import _one_of
from agile_trainers.trainers.grpo import MultiTurnGRPOConfig, MultiTurnGRPOTrainer


@dataclass
class MultiTurnGSPOConfig(MultiTurnGRPOConfig):
    """GSPO's settings (Zheng et al., 2025, section 5.1): one length-normalized ratio per sequence, narrow clipping.

    Args:
        loss_type: Always ``"grpo"``.
        importance_sampling_level: ``"sequence"``, or ``"turn"`` to apply the same ratio to each turn.
        epsilon: Lower clipping range, 3e-4.
        epsilon_high: Upper clipping range, 4e-4.
        advantage_granularity: Default ``"trajectory"``, the unit of the paper's ratio.
    """

    loss_type: str = field(default="grpo", metadata={"help": "Always grpo."})
    importance_sampling_level: str = field(
        default="sequence", metadata={"help": "Unit of the ratio: sequence or turn."}
    )
    epsilon: float = field(default=3e-4, metadata={"help": "Lower clipping range."})
    epsilon_high: float | None = field(default=4e-4, metadata={"help": "Upper clipping range."})
    advantage_granularity: str = field(
        default="trajectory", metadata={"help": "Unit of the advantage: turn or trajectory."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "loss_type", ("grpo",))
        _one_of(self, "importance_sampling_level", ("sequence", "turn"))


class MultiTurnGSPOTrainer(MultiTurnGRPOTrainer):
    """Group sequence policy optimization (https://huggingface.co/papers/2507.18071) over multi-turn episodes."""

    _name = "Multi-turn GSPO"
    _tag_names: ClassVar[list[str]] = ["trl", "gspo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {
        "title": "Group Sequence Policy Optimization",
        "id": "2507.18071",
    }
    _config_class = MultiTurnGSPOConfig
