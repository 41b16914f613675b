"""Multi-turn GSPO: GRPO whose importance ratio is one per sequence, or per turn."""

from dataclasses import dataclass
from typing import ClassVar

from agile_trainers.algorithms.grpo import GRPO, MultiTurnGRPOConfig
from agile_trainers.config.options import changed_default, option, with_args
from agile_trainers.config.rules import Rule, one_of


@with_args
@dataclass
class MultiTurnGSPOConfig(MultiTurnGRPOConfig):
    """GSPO's settings (Zheng et al., 2025, section 5.1): one length-normalized ratio per sequence, narrow clipping."""

    iterations: ClassVar[int] = 1

    loss_type: str = option("grpo", "Always `grpo`.")
    importance_sampling_level: str = option(
        "sequence", "Unit of the importance ratio: `sequence`, or `turn` to give each turn a ratio of its own."
    )
    epsilon: float = option(3e-4, "Lower clipping range (section 5.1).")
    epsilon_high: float | None = option(4e-4, "Upper clipping range (section 5.1).")
    advantage_granularity: str = changed_default(
        MultiTurnGRPOConfig, "advantage_granularity", "trajectory", "The default is the unit of the paper's ratio."
    )

    value_rules: ClassVar[tuple[Rule, ...]] = (
        *MultiTurnGRPOConfig.value_rules,
        one_of("loss_type", "grpo"),
        one_of("importance_sampling_level", "sequence", "turn"),
    )


class GSPO(GRPO):
    """The credit rule of :class:`MultiTurnGSPOTrainer`: GRPO's."""

    _name = "Multi-turn GSPO"
    _tag_names: ClassVar[list[str]] = ["trl", "gspo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {"title": "Group Sequence Policy Optimization", "id": "2507.18071"}
    config_class = MultiTurnGSPOConfig
