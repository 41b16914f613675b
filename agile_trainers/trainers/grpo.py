"""Multi-turn GRPO: group-relative advantages, per turn or per trajectory."""

from dataclasses import dataclass, field

from agile_trainers.objectives.advantages import group_advantages

from .config import MultiTurnConfig, _one_of
from .multi_turn import Credit, MultiTurnTrainer, Turns


@dataclass
class MultiTurnGRPOConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnGRPOTrainer`: the shared options and these.

    Args:
        advantage_granularity: ``"turn"``: each turn is compared with the same turn of the other members of its group;
            ``"trajectory"``: one advantage for the whole episode, as TRL.
        turn_credit: At turn granularity, what is compared: the discounted ``"return"`` from that turn on, or the turn's
            own ``"reward"``. With ``"reward"``, a reward at the end teaches the earlier turns nothing.
        advantage_baseline: What is subtracted: the ``"mean"`` of the group, or the mean of the other members
            (``"leave_one_out"``, as RLOO).
    """

    advantage_granularity: str = field(default="turn", metadata={"help": "Unit of the advantage: turn or trajectory."})
    turn_credit: str = field(default="return", metadata={"help": "What a turn is compared by: return or reward."})
    advantage_baseline: str = field(default="mean", metadata={"help": "What is subtracted: mean or leave_one_out."})

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "advantage_granularity", ("turn", "trajectory"))
        _one_of(self, "turn_credit", ("return", "reward"))
        _one_of(self, "advantage_baseline", ("mean", "leave_one_out"))

    def with_environment(self) -> "MultiTurnConfig":
        if self.advantage_granularity == "trajectory" and self.turn_credit != "return":
            raise ValueError(
                f"turn_credit={self.turn_credit!r} acts on advantage_granularity='turn' only, which is 'trajectory'."
            )
        uses_gamma = self.advantage_granularity == "turn" and self.turn_credit == "return"
        if self.gamma != 1.0 and not uses_gamma:
            raise ValueError(
                f"gamma={self.gamma} discounts the return of a turn, which advantage_granularity="
                f"{self.advantage_granularity!r} with turn_credit={self.turn_credit!r} does not use. Set "
                "advantage_granularity='turn' and turn_credit='return', or gamma=1.0."
            )
        return super().with_environment()


class MultiTurnGRPOTrainer(MultiTurnTrainer):
    """GRPO over multi-turn episodes (DeepSeekMath, https://huggingface.co/papers/2402.03300).

    Without an environment this is TRL's ``GRPOTrainer``. See :class:`MultiTurnTrainer` for the arguments.
    """

    _name = "Multi-turn GRPO"
    _config_class = MultiTurnGRPOConfig

    def _assign_credit(self, turns: Turns) -> Credit:
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
        )
        metrics = {"groups_without_signal": result.groups_without_signal}
        if args.advantage_granularity == "turn":
            metrics["turns_without_comparison"] = result.lonely_turns
        return Credit(result.advantages, metrics)
