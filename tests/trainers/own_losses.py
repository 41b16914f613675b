"""TRL's losses written as losses of one's own, for the tests of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from agile_trainers import (
    LossInputs,
    LossOutput,
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    MultiTurnGSPOTrainer,
    MultiTurnREINFORCETrainer,
    option,
)

TRLS = {"tokens": "dapo", "episodes": "grpo", "constant": "dr_grpo"}
"""Denominator to TRL's ``loss_type``."""


class Tokens(MultiTurnGRPOTrainer):
    """GRPO with its clipped ratio, the correction of the mismatch and the KL term."""

    denominator: Any = "tokens"
    bonus = 0.0

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        surrogate = torch.min(ratio * inputs.advantages, clipped * inputs.advantages)
        numerator = -surrogate * inputs.weights - self.bonus * inputs.entropies
        metrics = {"clipped": (((ratio - clipped) * inputs.advantages) > 0).float()}
        if inputs.reference_log_probs is not None:
            apart = inputs.reference_log_probs - inputs.log_probs
            metrics["apart"] = (apart.exp() - apart - 1) * ratio  # TRL's default, `use_bias_correction_kl`
            numerator = numerator + self.args.beta * metrics["apart"]
        # A mean over the tokens of an episode, whose weight is no token's.
        metrics["advantage_of_episodes"] = (inputs.advantages * inputs.mask).sum(1) / inputs.mask.sum(1).clamp(min=1)
        return LossOutput(numerator, self.denominator, metrics)


class Episodes(Tokens):
    denominator = "episodes"


class Constant(Tokens):
    denominator = "constant"


class PerEpisode(Tokens):
    """The same as ``Episodes``, each averaged here."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        values = super().loss(inputs).numerator
        lengths = inputs.mask.sum(1).clamp(min=1)
        return LossOutput((values * inputs.mask).sum(1) / lengths, "episodes", {"tokens_max": lengths.float()})


class Together(Tokens):
    """Compares all episodes of the micro-batch."""

    loss_needs = "micro_batch"

    def loss(self, inputs: LossInputs) -> LossOutput:
        values = (inputs.log_probs * inputs.mask).sum(1)
        return LossOutput((values - values.mean()) ** 2, "episodes")


@dataclass
class OwnEpsilonConfig(MultiTurnGRPOConfig):
    epsilon: float = option(0.3, "Read by the loss.")


class OwnEpsilon(Tokens):
    config_class = OwnEpsilonConfig


class Returns(MultiTurnREINFORCETrainer):
    """REINFORCE without ratios."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(-inputs.log_probs * inputs.advantages, "tokens")


class Sequences(MultiTurnGSPOTrainer):
    """GSPO's credit without its ratios."""

    loss = Returns.loss
