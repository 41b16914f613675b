"""Multi-turn PPO: a critic tells what a state is worth, and a turn is credited with how much better it went."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from agile_trainers.objectives.returns import gae
from agile_trainers.objectives.value_loss import explained_variance
from agile_trainers.trainers.config import MultiTurnConfig, _one_of
from agile_trainers.trainers.credit import Credit, CreditInputs
from agile_trainers.trainers.critic import TARGETS
from agile_trainers.trainers.options import option, with_args
from agile_trainers.trainers.trainer import MultiTurnTrainer


@with_args
@dataclass
class MultiTurnPPOConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnPPOTrainer`: the shared options and these. ``docs/ppo.md`` says where the defaults
    come from."""

    groupless: ClassVar[bool] = True
    has_critic: ClassVar[bool] = True

    num_generations: int = option(1, "Always 1; there are no groups.")
    gae_lambda: float = option(
        0.95, "Lambda per turn of the advantage estimate, in [0, 1]: 1 trusts the sampled return, 0 the critic."
    )
    vf_coef: float = option(
        0.5,
        "Weight of the value loss. Policy and critic share no trainable weight, so it acts only where their gradients "
        "meet: in `max_grad_norm`, and in optimizers that do not rescale gradients.",
    )
    value_clip_range: float | None = option(
        None,
        "Hold a value within this of the one the batch was drawn with, as the ratio is held. Default: no clipping.",
    )
    critic_learning_rate: float | None = option(
        None,
        "Learning rate of the critic's adapter and value head, a parameter group of their own under the same schedule. A "
        "critic that starts from zero often wants more than the policy. Default: `learning_rate`.",
    )
    critic_warmup_steps: int = option(
        0,
        "Optimizer steps at the start that train the critic alone; refused together with `weight_decay`, which would move "
        "the policy.",
    )
    critic_start: str = option(
        "auto",
        "What the critic's adapter starts as: `new`, `policy` (a copy of the policy's; the value head is new), `saved` "
        "(the one in the folder that `model` is), or `auto`: saved if there is one, else new, or a copy of a policy whose "
        "start changed the base (PiSSA, OLoRA).",
    )
    turn_value_position: str = option(
        "state",
        "Where the value of a turn is read: `state`, `final` or `mean`. `state` is the token before its first action "
        "token. `final` (its last token) and `mean` (over its tokens) know the action already, which biases the gradient; "
        "a warning says so.",
    )
    advantage_granularity: str = option(
        "turn",
        "Unit of the advantage: `turn`, `token` or `auto`. `token`: every token of a turn has a value and an advantage of "
        "its own. `auto`: tokens if every episode of the generation batch has a single turn, else turns. These two need "
        "`importance_sampling_level=token` and `turn_value_position=state`.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "critic_start", ("auto", "new", "policy", "saved"))
        _one_of(self, "turn_value_position", ("state", "final", "mean"))
        _one_of(self, "advantage_granularity", ("turn", "token", "auto"))
        if not 0.0 <= self.gae_lambda <= 1.0:
            raise ValueError(f"gae_lambda must lie in [0, 1], got {self.gae_lambda}.")
        for name in ("vf_coef", "value_clip_range", "critic_learning_rate"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if self.critic_warmup_steps < 0:
            raise ValueError(f"critic_warmup_steps must not be negative, got {self.critic_warmup_steps}.")
        if self.critic_warmup_steps and self.weight_decay:
            raise ValueError(
                f"weight_decay={self.weight_decay} would shrink the policy during critic_warmup_steps="
                f"{self.critic_warmup_steps}, in which it is not to change. Set one of them to 0."
            )

    def with_environment(self, names: Sequence[str] | None = None) -> "MultiTurnConfig":
        if self.scale_rewards != "group":
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} has no effect: PPO has no groups. Use whiten_advantages=True to "
                "scale advantages over the batch."
            )
        if self.skip_zero_advantage:
            raise ValueError(
                "skip_zero_advantage has no effect: every episode trains the critic. Leave skip_zero_advantage unset."
            )
        if self.advantage_granularity != "turn":
            for name, needed in (("importance_sampling_level", "token"), ("turn_value_position", "state")):
                if getattr(self, name) != needed:
                    chosen = ", which may choose 'token'," if self.advantage_granularity == "auto" else ""
                    raise ValueError(
                        f"advantage_granularity={self.advantage_granularity!r}{chosen} needs {name}={needed!r}, got "
                        f"{getattr(self, name)!r}. Set {name}={needed!r} or advantage_granularity='turn'."
                    )
        return super().with_environment(names)


class MultiTurnPPOTrainer(MultiTurnTrainer):
    """PPO over multi-turn episodes (https://huggingface.co/papers/1707.06347) with generalized advantage estimates over
    turns (https://huggingface.co/papers/1506.02438).

    Policy and critic are two LoRA adapters on one frozen base, ``default`` and ``critic``; the critic has a value head.
    Both are saved in PEFT's format, the critic under ``critic/``. See :class:`MultiTurnTrainer` for the arguments; an
    environment and a ``peft_config`` are required.

    Raises:
        ValueError: Without ``peft_config``, or with an optimizer made before the critic was.
    """

    _name = "Multi-turn PPO"
    _tag_names: ClassVar[list[str]] = ["trl", "ppo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}
    config_class = MultiTurnPPOConfig

    def assign_credit(self, turns: CreditInputs) -> Credit:
        """Generalized advantage estimates over turns, and what the critic should have said."""
        assert turns.values is not None and turns.final_values is not None
        advantages = gae(
            turns.rewards,
            turns.values,
            turns.final_values,
            turns.mask,
            gamma=self.args.gamma,
            gae_lambda=self.args.gae_lambda,
        )
        targets = torch.where(turns.mask, advantages + turns.values, 0.0)
        said, right = turns.values[turns.mask], targets[turns.mask]
        metrics = {"value/explained_variance": explained_variance(said, right)}
        if said.numel():
            metrics["value/mean"] = said.mean().item()
            metrics["value/error"] = (said - right).square().mean().sqrt().item()
        return Credit(advantages, metrics, {TARGETS: targets})
