"""Multi-turn GRPO: group-relative advantages, per turn or per trajectory."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from trl import GRPOTrainer

from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.options import option, with_args
from agile_trainers.config.rules import Rule, acts_with, excludes, one_of, weighs_decisions_with
from agile_trainers.objectives.advantages import group_advantages
from agile_trainers.step.credit import Credit, CreditInputs


@with_args
@dataclass
class MultiTurnGRPOConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnGRPOTrainer`: the shared options and these."""

    iterations: ClassVar[int] = 4

    advantage_granularity: str = option(
        "turn",
        "Unit of the advantage: `turn`, `trajectory` or `anchor`. `turn`: each turn is compared with the same turn of the "
        "other members of its group; by trajectory in groups whose turns do not correspond, because some were on the side "
        "or at once. `trajectory`: one advantage for the whole episode, as in TRL. `anchor`: that, plus "
        "each turn's beside the turns of other members that started from the same state (GiGPO, "
        'https://huggingface.co/papers/2505.10978), which the environment names by `info["anchor"]`.',
    )
    turn_credit: str = option(
        "return",
        "Quantity that is compared at turn and anchor granularity: the discounted `return` from that turn on, or the turn's "
        "own `reward`. `reward` is for turns that do not affect each other. It ignores the consequences of an action: a "
        "reward at the end does not credit earlier turns, and an action that ends the episode may be credited with the "
        "wrong sign.",
    )
    advantage_baseline: str = option(
        "mean",
        "Baseline that is subtracted: the `mean` of the group, or of the other members (`leave_one_out`, as in RLOO), or of "
        "the group with the batch's mean as one member more (`shrunk`).",
    )
    turn_advantage_trajectory_fallback: bool | None = option(
        None,
        "Compare a turn that no other member reached with the others' discounted returns of whole episodes. False gives it "
        "0, so that turns that few episodes reach learn little. Acts at turn granularity with `turn_credit=return`. "
        "Default: True where it applies.",
    )

    value_rules: ClassVar[tuple[Rule, ...]] = (
        one_of("advantage_granularity", "turn", "trajectory", "anchor"),
        one_of("turn_credit", "return", "reward"),
        one_of("advantage_baseline", "mean", "leave_one_out", "shrunk"),
    )
    episode_rules: ClassVar[tuple[Rule, ...]] = (
        acts_with("advantage_granularity", ("turn", "anchor"), "turn_credit", "gamma"),
        acts_with("advantage_granularity", ("turn",), "turn_advantage_trajectory_fallback"),
        acts_with("turn_credit", ("return",), "turn_advantage_trajectory_fallback", "gamma"),
        Rule(
            ("scale_rewards",),
            lambda args, value: not (value == "mean" and args.beta != 0.0 and args.kl_placement == "reward"),
            "scale_rewards={value!r} takes rewards of at least 0, and kl_placement='reward' subtracts from them. Set "
            "kl_placement='advantage' or 'loss', or scale_rewards='group'.",
        ),
        weighs_decisions_with("advantage_granularity", "turn"),
        weighs_decisions_with("turn_credit", "return"),
        weighs_decisions_with("advantage_baseline", "mean", "leave_one_out"),
        excludes(
            "advantage_baseline",
            ("shrunk",),
            "task_sampling",
            "resample_zero_advantage_groups",
            "replay_successes",
            why="with which groups of equal rewards have an advantage too",
        ),
    )


class GRPO:
    """The credit rule of :class:`MultiTurnGRPOTrainer`: advantages relative to the group."""

    args: Any
    num_generations: int
    scale_rewards: Any

    _name = "Multi-turn GRPO"
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = GRPOTrainer._paper
    config_class = MultiTurnGRPOConfig
    needs_environment = False
    weighs_decisions = True

    @property
    def needs_anchors(self) -> bool:
        return self.args.advantage_granularity == "anchor"

    def assign_credit(self, turns: CreditInputs) -> Credit:
        args = self.args
        advantages_at = functools.partial(
            group_advantages,
            turns.rewards,
            turns.mask,
            turns.failed,
            group_size=self.num_generations,
            turn_credit=args.turn_credit,
            gamma=args.gamma,
            scale=self.scale_rewards,
            baseline=args.advantage_baseline,
            trajectory_fallback=args.turn_advantage_trajectory_fallback is not False and args.turn_credit == "return",
            anchors=turns.anchors,
            rewarded=turns.rewarded,
            weights=turns.weights,
            environments=turns.environments,
        )
        result = advantages_at(granularity=args.advantage_granularity)
        if args.advantage_granularity == "trajectory":
            return Credit(result.advantages)
        metrics, advantages = {"turns_without_comparison": result.uncompared_turns}, result.advantages
        several = args.advantage_granularity == "turn" and turns.linear is not None and not turns.linear.all()
        if several and turns.weights is None:  # with weights a baseline is exact, however little it says
            # The k-th turns of such episodes have nothing to do with each other.
            assert turns.linear is not None
            linear = turns.linear.view(-1, self.num_generations).all(dim=1)
            metrics["groups_by_trajectory"] = 1.0 - linear.double().mean().item()
            by_turn = linear.repeat_interleave(self.num_generations)[:, None]
            advantages = torch.where(by_turn, advantages, advantages_at(granularity="trajectory").advantages)
        return Credit(advantages, metrics)
