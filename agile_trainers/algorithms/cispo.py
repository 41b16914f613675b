"""Multi-turn CISPO: GRPO that clips the importance weight and keeps every token's gradient."""

from dataclasses import dataclass
from typing import ClassVar

from agile_trainers.algorithms.grpo import GRPO, MultiTurnGRPOConfig
from agile_trainers.config.options import option, with_args
from agile_trainers.config.rules import CISPO_BOUND, Rule, one_of


@with_args
@dataclass
class MultiTurnCISPOConfig(MultiTurnGRPOConfig):
    """CISPO's settings."""

    iterations: ClassVar[int] = 1

    loss_type: str = option("cispo", "Always `cispo`.")
    epsilon_high: float | None = option(
        CISPO_BOUND,
        "Upper bound of the importance weight (ScaleRL, https://huggingface.co/papers/2510.13786). GRPO's 0.2 would cut "
        "every weight to a fifth.",
    )

    value_rules: ClassVar[tuple[Rule, ...]] = (*MultiTurnGRPOConfig.value_rules, one_of("loss_type", "cispo"))


class CISPO(GRPO):
    """The credit rule of :class:`MultiTurnCISPOTrainer`: GRPO's."""

    _name = "Multi-turn CISPO"
    _tag_names: ClassVar[list[str]] = ["trl", "cispo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {
        "title": "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
        "id": "2506.13585",
    }
    config_class = MultiTurnCISPOConfig
