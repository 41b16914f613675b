"""Multi-turn GRPO: group-relative advantages, per turn or per trajectory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trl import GRPOTrainer

from agile_trainers.objectives.advantages import group_advantages
from agile_trainers.trainers.config import MultiTurnConfig, _one_of
from agile_trainers.trainers.credit import Credit, CreditInputs
from agile_trainers.trainers.options import default_of, option, with_args
from agile_trainers.trainers.trainer import MultiTurnTrainer


@with_args
@dataclass
class MultiTurnGRPOConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnGRPOTrainer`: the shared options and these."""

    advantage_granularity: str = option(
        "turn",
        "Unit of the advantage: `turn`, `trajectory` or `anchor`. `turn`: each turn is compared with the same turn of the "
        "other members of its group. `trajectory`: one advantage for the whole episode, as in TRL. `anchor`: that, plus "
        "`anchor_weight` times each turn's among the turns of its group that started from the same state (GiGPO, "
        'https://huggingface.co/papers/2505.10978), which the environment names by `info["anchor"]`.',
    )
    turn_credit: str = option(
        "return",
        "What is compared at turn and anchor granularity: the discounted `return` from that turn on, or the turn's own "
        "`reward`. `reward` is for turns that do not affect each other: it does not see what an action leads to, so a "
        "reward at the end teaches the earlier turns nothing, and an action that ends the episode may be credited with "
        "the wrong sign.",
    )
    advantage_baseline: str = option(
        "mean",
        "What is subtracted: the `mean` of the group, or that of the other members (`leave_one_out`, as in RLOO).",
    )
    turn_advantage_trajectory_fallback: bool | None = option(
        None,
        "At turn granularity with `turn_credit=return`, compare a turn that no other member of the group reached with the "
        "discounted returns of the others' whole episodes. False gives it 0, which starves turns that few episodes reach. "
        "Default: True where it applies.",
    )
    anchor_weight: float = option(1.0, "Weight of the turn's part at anchor granularity.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "advantage_granularity", ("turn", "trajectory", "anchor"))
        _one_of(self, "turn_credit", ("return", "reward"))
        _one_of(self, "advantage_baseline", ("mean", "leave_one_out"))

    def with_environment(self, names: Sequence[str] | None = None) -> "MultiTurnConfig":
        granularity = self.advantage_granularity
        for name, acts_on in (
            ("turn_credit", ("turn", "anchor")),
            ("turn_advantage_trajectory_fallback", ("turn",)),
            ("anchor_weight", ("anchor",)),
        ):
            if granularity not in acts_on and getattr(self, name) != default_of(self.__dataclass_fields__[name]):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} acts on advantage_granularity={' or '.join(map(repr, acts_on))} only, "
                    f"which is {granularity!r}."
                )
        if self.turn_advantage_trajectory_fallback is not None and self.turn_credit == "reward":
            raise ValueError(
                f"turn_advantage_trajectory_fallback={self.turn_advantage_trajectory_fallback!r} acts on "
                "turn_credit='return' only: it compares a turn's return with those of whole episodes. Leave it unset, or "
                "set turn_credit='return'."
            )
        uses_gamma = granularity != "trajectory" and self.turn_credit == "return"
        if self.gamma != 1.0 and not uses_gamma:
            raise ValueError(
                f"gamma={self.gamma} discounts the return of a turn, which advantage_granularity="
                f"{self.advantage_granularity!r} with turn_credit={self.turn_credit!r} does not use. Set "
                "advantage_granularity='turn' and turn_credit='return', or gamma=1.0."
            )
        return super().with_environment(names)


class MultiTurnGRPOTrainer(MultiTurnTrainer):
    """GRPO over multi-turn episodes (DeepSeekMath, https://huggingface.co/papers/2402.03300).

    Without an environment this is TRL's ``GRPOTrainer``. See :class:`MultiTurnTrainer` for the arguments.
    """

    _name = "Multi-turn GRPO"
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = GRPOTrainer._paper
    config_class = MultiTurnGRPOConfig
    needs_environment = False

    @property
    def needs_anchors(self) -> bool:
        return self.args.advantage_granularity == "anchor"

    def assign_credit(self, turns: CreditInputs) -> Credit:
        args = self.args
        result = group_advantages(
            turns.rewards,
            turns.mask,
            turns.failed,
            group_size=self.num_generations,
            granularity=args.advantage_granularity,
            turn_credit=args.turn_credit,
            gamma=args.gamma,
            scale=self.scale_rewards,
            baseline=args.advantage_baseline,
            trajectory_fallback=args.turn_advantage_trajectory_fallback is not False and args.turn_credit == "return",
            anchors=turns.anchors,
            anchor_weight=args.anchor_weight,
        )
        metrics = {"groups_without_signal": result.groups_without_signal}
        if args.advantage_granularity != "trajectory":
            metrics["turns_without_comparison"] = result.uncompared_turns
        return Credit(result.advantages, metrics)
