"""Multi-turn distillation: a teacher on the policy's own episodes, and no reward."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.options import option, with_args
from agile_trainers.config.rules import Rule
from agile_trainers.objectives.distillation import SAMPLED
from agile_trainers.step.credit import Credit, CreditInputs


@with_args
@dataclass
class MultiTurnDistillationConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnDistillationTrainer`: the shared options, of which `teacher` is required."""

    groupless: ClassVar[bool] = True
    rewarded: ClassVar[bool] = False

    num_generations: int = option(1, "Always 1; there are no groups.")

    episode_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("teacher",),
            lambda args, value: value is not None,
            "Distillation needs a teacher: set teacher to the folder or Hub id of an adapter or a model, or to 'policy' "
            "with teacher_hint.",
        ),
        Rule(
            (
                "gamma",
                "whiten_advantages",
                "advantage_clip_range",
                "scale_rewards",
                "importance_sampling_level",
                "turn_ratio_pooling",
                "delta",
                "off_policy_mask_threshold",
                "top_entropy_quantile",
            ),
            lambda args, value: False,
            "{name}={value!r} has no effect: distillation trains on no advantage. Leave {name} unset, or pass teacher to "
            "another algorithm.",
            when_set=True,
        ),
        Rule(
            ("epsilon", "epsilon_high"),
            lambda args, _: args.teacher_gradient in SAMPLED and args.loss_type != "cispo",
            "{name}={value!r} has no effect: it bounds the ratios by which teacher_gradient='immediate' and 'return_to_go' "
            "credit tokens, with a loss_type that has such ratios. Leave it unset.",
            when_set=True,
        ),
    )


class Distillation:
    """The credit rule of :class:`MultiTurnDistillationTrainer`: none, the teacher's part of the loss is all."""

    args: Any
    _name = "Multi-turn distillation"
    _tag_names: ClassVar[list[str]] = ["trl", "distillation", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {
        "title": "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "id": "2306.13649",
    }
    config_class = MultiTurnDistillationConfig

    def assign_credit(self, turns: CreditInputs) -> Credit:
        return Credit(torch.zeros_like(turns.rewards), {})
