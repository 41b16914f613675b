"""Multi-turn REINFORCE with return batch normalization (ReBN)."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.options import changed_default, option, with_args
from agile_trainers.config.rules import Rule, one_of
from agile_trainers.objectives.advantages import whiten_each
from agile_trainers.objectives.returns import discounted_returns, gae
from agile_trainers.step.credit import Credit, CreditInputs


@with_args
@dataclass
class MultiTurnREINFORCEConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnREINFORCETrainer`: the shared options and these."""

    groupless: ClassVar[bool] = True

    num_generations: int = option(1, "Always 1; there are no groups.")
    importance_sampling_level: str = changed_default(
        MultiTurnConfig, "importance_sampling_level", "turn", "The unit that is rewarded is the unit that is clipped."
    )
    turn_ratio_pooling: str = changed_default(
        MultiTurnConfig,
        "turn_ratio_pooling",
        "sum",
        "The ratio of a turn is the product of its tokens' ratios; advantages are divided by the turn's length, so that "
        "at ratio 1 the gradient is the token level's.",
    )
    advantage_granularity: str = option(
        "auto",
        "Unit of the statistics: every `turn` counts once, every `token` counts once, or `auto`: "
        "tokens if every episode of the batch has a single turn, else turns.",
    )

    value_rules: ClassVar[tuple[Rule, ...]] = (one_of("advantage_granularity", "turn", "token", "auto"),)
    episode_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("scale_rewards", "whiten_advantages"),
            lambda args, value: False,
            "{name}={value!r} has no effect: REINFORCE normalizes returns over the whole batch. Leave {name} unset.",
            when_set=True,
        ),
    )


class REINFORCE:
    """The credit rule of :class:`MultiTurnREINFORCETrainer`: returns, normalized over the whole batch."""

    args: Any
    _name = "Multi-turn REINFORCE"
    _tag_names: ClassVar[list[str]] = ["trl", "reinforce", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {"title": "GEM: A Gym for Agentic LLMs", "id": "2510.01051"}
    config_class = MultiTurnREINFORCEConfig
    weighs_decisions = True

    def assign_credit(self, turns: CreditInputs) -> Credit:
        returns = discounted_returns(turns.rewards.double(), turns.mask, self.args.gamma, turns.rewarded)
        granularity = self.args.advantage_granularity
        by_token = granularity == "token" or (granularity == "auto" and turns.mask.sum(dim=1).max() <= 1)
        counts = turns.lengths if by_token else None
        centre = None if turns.weights is None else functools.partial(self._weighted, turns)
        return Credit(whiten_each(returns, turns.mask, counts, turns.environments, centre), {})

    def _weighted(self, turns: CreditInputs, mean: torch.Tensor) -> torch.Tensor:
        """Weigh the returns (B, K) of episodes of another policy, and the mean return, which is the value of each turn."""
        rewards = turns.rewards.double()
        return gae(
            rewards,
            mean.expand_as(rewards),
            rewards.new_zeros(len(rewards)),
            turns.mask,
            gamma=self.args.gamma,
            gae_lambda=1.0,
            weights=turns.weights,
        )
