"""Multi-turn PPO: advantages are generalized advantage estimates over turns, from the values of a critic."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.options import option, with_args
from agile_trainers.config.rules import (
    Rule,
    acts_with,
    at_least,
    in_unit_interval,
    one_of,
    positive,
    weighs_decisions_with,
)
from agile_trainers.objectives.returns import explained_variance, gae, vtrace_targets
from agile_trainers.step.credit import TARGETS, Credit, CreditInputs


@with_args
@dataclass
class MultiTurnPPOConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnPPOTrainer`: the shared options and these. ``docs/ppo.md`` says where the defaults
    come from."""

    groupless: ClassVar[bool] = True
    iterations: ClassVar[int] = 4
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
        None, "Clipping range of a value around the one before the update, as for the ratio. Default: no clipping."
    )
    bootstrap_at_limits: bool = option(
        False,
        "Add what the critic expects of the final state where a limit ends an episode, as if it went on. Otherwise it is "
        "over, and worth what it got, as in all other algorithms and metrics.",
    )
    critic_learning_rate: float | None = option(
        None,
        "Learning rate of the critic's adapter and value head, a parameter group of their own under the same schedule. A "
        "critic that starts from zero often wants more than the policy. Default: `learning_rate`.",
    )
    critic_warmup_steps: int = option(
        0,
        "Number of optimizer steps at the start that train the critic alone. Rejected with `weight_decay`, which would "
        "change the policy.",
    )
    critic_start: str = option(
        "auto",
        "Start of the critic's adapter: `new`, `policy` (a copy of the policy's; the value head is new), `saved` (the one "
        "of `model`, a folder or a loaded model), or `auto`: saved if there is one, else new, or a copy of a policy whose "
        "initialization changed the base (PiSSA, OLoRA).",
    )
    critic_layers: int | None = option(
        None,
        "Number of decoder layers, counted from the last, that the critic adapts. It reads the hidden states that enter the "
        "policy's, the policy's adapter below included, in the policy's own forward pass; the policy's gradient stays the "
        "same. This saves most of the critic's cost, and the critic moves with the policy. Default: an adapter on all "
        "layers, with a pass of its own.",
    )
    turn_value_position: str = option(
        "state",
        "Token that gives the value of a turn: `state`, `final` or `mean`. `state` is the token before its first action "
        "token. `final` (its last token) and `mean` (over its tokens) know the action already, which biases the gradient; "
        "a warning says so.",
    )
    advantage_granularity: str = option(
        "turn",
        "Unit of the advantage: `turn`, `token` or `auto`. `token`: every token of a turn has a value and an advantage of "
        "its own. `auto`: tokens if every episode of the generation batch has a single turn, else turns. These two need "
        "`importance_sampling_level=token` and `turn_value_position=state`.",
    )

    value_rules: ClassVar[tuple[Rule, ...]] = (
        one_of("critic_start", "auto", "new", "policy", "saved"),
        one_of("turn_value_position", "state", "final", "mean"),
        one_of("advantage_granularity", "turn", "token", "auto"),
        in_unit_interval("gae_lambda"),
        positive("vf_coef", "value_clip_range", "critic_learning_rate"),
        at_least(0, "critic_warmup_steps"),
        at_least(1, "critic_layers"),
        Rule(
            ("weight_decay",),
            lambda args, value: not (value and args.critic_warmup_steps),
            "weight_decay={value} would shrink the policy during critic_warmup_steps={args.critic_warmup_steps}, in which "
            "only the critic is trained. Set one of them to 0.",
        ),
    )
    episode_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("scale_rewards",),
            lambda args, value: value == "group",
            "scale_rewards={value!r} has no effect: PPO has no groups. Use whiten_advantages=True to scale advantages over "
            "the batch.",
        ),
        Rule(
            ("skip_zero_advantage",),
            lambda args, value: value is not True,
            "skip_zero_advantage={value} has no effect: every episode trains the critic. Leave skip_zero_advantage unset.",
        ),
        acts_with("importance_sampling_level", ("token",), "advantage_granularity"),
        acts_with("turn_value_position", ("state",), "advantage_granularity"),
        weighs_decisions_with("advantage_granularity", "turn"),
    )


class PPO:
    """The credit rule of :class:`MultiTurnPPOTrainer`: generalized advantage estimates over turns."""

    args: Any
    _name = "Multi-turn PPO"
    _tag_names: ClassVar[list[str]] = ["trl", "ppo", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {"title": "Proximal Policy Optimization Algorithms", "id": "1707.06347"}
    config_class = MultiTurnPPOConfig
    targets_by_row = True
    weighs_decisions = True

    def assign_credit(self, turns: CreditInputs) -> Credit:
        """Compute generalized advantage estimates over turns, and the targets of the critic."""
        assert turns.values is not None and turns.final_values is not None
        options = {
            "gamma": self.args.gamma, "gae_lambda": self.args.gae_lambda, "following": turns.following,
            "rewarded": turns.rewarded,
        }  # fmt: skip
        episodes = (turns.rewards, turns.values, turns.final_values, turns.mask)
        advantages = gae(*episodes, **options, weights=turns.weights)
        targets = torch.where(turns.mask, advantages + turns.values, 0.0)
        if turns.ratios is not None:
            targets = vtrace_targets(*episodes, turns.ratios, **options)
        predicted, target = turns.values[turns.mask], targets[turns.mask]
        metrics = {"value/explained_variance": explained_variance(predicted, target)}
        if predicted.numel():
            metrics["value/mean"] = predicted.mean().item()
            metrics["value/error"] = (predicted - target).square().mean().sqrt().item()
            metrics["value/spread"] = target.std(correction=0).item()
        return Credit(advantages, metrics, {TARGETS: targets})
