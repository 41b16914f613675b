"""Multi-turn CISPO: GRPO that clips the importance weight and keeps every token's gradient."""

from dataclasses import dataclass
from typing import ClassVar

from agile_trainers.algorithms.grpo import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.config.options import option, with_args
from agile_trainers.config.rules import CISPO_BOUND, Rule, one_of


@with_args
@dataclass
class MultiTurnCISPOConfig(MultiTurnGRPOConfig):
    """CISPO's settings."""

    loss_type: str = option("cispo", "Always `cispo`.")
    epsilon_high: float | None = option(
        CISPO_BOUND,
        "Upper bound of the importance weight (ScaleRL, https://huggingface.co/papers/2510.13786). GRPO's 0.2 would cut "
        "every weight to a fifth.",
    )

    value_rules: ClassVar[tuple[Rule, ...]] = (*MultiTurnGRPOConfig.value_rules, one_of("loss_type", "cispo"))


class MultiTurnCISPOTrainer(MultiTurnGRPOTrainer):
    """CISPO (MiniMax-M1, https://huggingface.co/papers/2506.13585) over multi-turn episodes."""

    _name = "Multi-turn CISPO"
    _tag_names: ClassVar[list[str]] = ["trl", "cispo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {
        "title": "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
        "id": "2506.13585",
    }
    config_class = MultiTurnCISPOConfig
