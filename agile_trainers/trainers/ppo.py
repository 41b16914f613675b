"""Multi-turn PPO: a critic tells what a state is worth, and a turn is credited with how much better it went."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel
from transformers.utils import logging
from trl.models.utils import disable_gradient_checkpointing

from agile_trainers.adapters import CRITIC, POLICY, belongs_to, restore_adapter, start_critic, thaw
from agile_trainers.adapters.sharding import is_zero3
from agile_trainers.objectives.advantages import whiten
from agile_trainers.objectives.returns import gae, token_gae
from agile_trainers.objectives.segments import pool_to_turns, spread_to_tokens, turn_lengths
from agile_trainers.objectives.value_loss import explained_variance, value_errors
from agile_trainers.train_batch import Batch, like_length, read_inputs, trim_columns
from agile_trainers.trainers.config import MultiTurnConfig, _one_of
from agile_trainers.trainers.options import option, with_args
from agile_trainers.trainers.trainer import Credit, MultiTurnTrainer, Turns
from agile_trainers.types import TurnBatch

logger = logging.get_logger(__name__)


@with_args
@dataclass
class MultiTurnPPOConfig(MultiTurnConfig):
    """Configuration of :class:`MultiTurnPPOTrainer`: the shared options and these. ``docs/ppo.md`` says where the defaults
    come from."""

    _groupless: ClassVar[bool] = True
    _has_critic: ClassVar[bool] = True

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

    def without_environment(self) -> "MultiTurnConfig":
        raise ValueError("MultiTurnPPOTrainer needs an environment. Pass `environment=...`.")


@dataclass
class Critique:
    """What the critic said about the local episodes of a generation batch. U is K; T where tokens have values."""

    offsets: torch.Tensor
    """(B, U), where the values are read, in completion coordinates; -1 is the last prompt token."""
    values: torch.Tensor
    """(B, U), of the critic as it was then."""
    turn_values: torch.Tensor
    """(B, K), V(s_k)."""
    final_values: torch.Tensor
    """(B,), V of the final state of an episode cut short, 0 of the others."""
    by_token: bool
    """Whether tokens have values and advantages of their own."""


@dataclass
class ValuedTurns(Turns):
    """Turns of all ranks and what the critic said about them."""

    values: torch.Tensor
    """(B, K)."""
    final_values: torch.Tensor
    """(B,)."""


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
    _config_class = MultiTurnPPOConfig
    _needs_final_observation = True
    _critique: Critique
    _values: torch.Tensor | None
    _step_ends = 0
    """The micro-step at which the optimizer step ends that is being accumulated."""
    _targets: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any):
        self._values = None
        super().__init__(*args, **kwargs)
        if not isinstance(self.model, PeftModel):
            raise ValueError(
                "MultiTurnPPOTrainer trains policy and critic as two adapters on one base: pass "
                "`peft_config=LoraConfig(...)`."
            )
        if self.optimizer is not None:
            raise ValueError(
                "MultiTurnPPOTrainer adds the critic's parameters to the model, which an optimizer made before cannot "
                "hold. Leave `optimizers[0]` unset and use optim, learning_rate and critic_learning_rate."
            )
        # As TRL does for the policy: ZeRO-3 gathers parameters of one dtype only.
        zero3 = is_zero3(self.args.deepspeed_plugin)
        self._loss_totals = torch.zeros(4, device=self.accelerator.device)
        start_critic(
            self.model, self._saved, self.args.critic_start, seed=self.args.seed, autocast_adapter_dtype=not zero3
        )
        self._switch_off_noise()
        self._thaw()
        if self.args.turn_value_position != "state":
            logger.warning(
                "turn_value_position=%r reads the value after the action it is to be a baseline for: advantages are biased.",
                self.args.turn_value_position,
            )

    # ------------------------------------------------------------------------------------------------ construction

    def _thaw(self) -> None:
        thaw(self.model, (POLICY, CRITIC))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self._thaw()
        made = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made and self.args.critic_learning_rate is not None:
            critic = {id(p) for name, p in self.model.named_parameters() if belongs_to(name, CRITIC)}
            groups = []
            for group in optimizer.param_groups:
                for of_critic, rate in ((False, group["lr"]), (True, self.args.critic_learning_rate)):
                    chosen = [p for p in group["params"] if (id(p) in critic) == of_critic]
                    groups += [{**group, "params": chosen, "lr": rate}] if chosen else []
            optimizer.param_groups[:] = groups
        return optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._thaw()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        critic = Path(self.state.best_model_checkpoint) / CRITIC
        if critic.is_dir():
            restore_adapter(self.accelerator.unwrap_model(self.model), CRITIC, critic)

    # ------------------------------------------------------------------------------------------------------ credit

    def _by_token(self, batch: TurnBatch) -> bool:
        """Whether this generation batch has advantages per token; the same on all ranks."""
        if self.args.advantage_granularity == "auto":
            turns = (batch.turn_mask & ~batch.failed[:, None]).sum(dim=1).max()
            return int(self.accelerator.gather(turns).max()) <= 1
        return self.args.advantage_granularity == "token"

    def _value_offsets(self, batch: TurnBatch, by_token: bool) -> torch.Tensor:
        """See :class:`Critique`."""
        tokens = torch.arange(batch.turn_ids.size(1), device=batch.turn_ids.device).expand_as(batch.turn_ids)
        if by_token:
            return tokens - 1
        if self.args.turn_value_position == "mean":
            return tokens
        offsets = batch.state_positions[:, :-1] - batch.prompt_ids.size(1)
        if self.args.turn_value_position == "final":
            offsets = offsets + turn_lengths(batch.turn_ids, batch.turn_mask.size(1))
        return offsets

    def _critic_values(self, batch: TurnBatch) -> Critique:
        """Read values in micro-batches of like length, as log-probabilities are scored."""
        by_token = self._by_token(batch)
        final = batch.state_positions[:, -1:] - batch.prompt_ids.size(1)
        offsets = torch.cat([self._value_offsets(batch, by_token), final], dim=1)
        read = torch.zeros(offsets.shape, device=offsets.device)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for rows, part in like_length(batch, self.args.per_device_train_batch_size, self.pad_to_multiple_of):
                # Past the last token of the longest row nothing is read that counts.
                positions = offsets[rows].clamp(max=part["completion_ids"].size(1) - 1) + part["prompt_ids"].size(1)
                with self.accelerator.autocast():
                    outputs = self._with_positions(self.model)(**read_inputs(part), value_positions=positions)
                read[rows] = outputs.state_values
        values = self._pooled(read[:, :-1], batch.turn_ids, batch.turn_mask.size(1))
        turn_values = values
        if by_token:
            starts = (batch.state_positions[:, :-1] - batch.prompt_ids.size(1) + 1).clamp(max=values.size(1) - 1)
            turn_values = values.gather(1, starts)
        final_values = torch.where(batch.truncated, read[:, -1], 0.0)
        return Critique(offsets[:, :-1], values, turn_values, final_values, by_token)

    def _pooled(self, values: torch.Tensor, turn_ids: torch.Tensor, num_turns: int) -> torch.Tensor:
        if self.args.turn_value_position != "mean":
            return values
        return pool_to_turns(values, turn_ids, num_turns, "mean")

    def _gather_turns(self, batch: TurnBatch) -> ValuedTurns:
        self._critique = self._critic_values(batch)
        values = self.accelerator.pad_across_processes(self._critique.turn_values, dim=1)
        return ValuedTurns(
            **vars(super()._gather_turns(batch)),
            values=self.accelerator.gather(values),
            final_values=self.accelerator.gather(self._critique.final_values),
        )

    def _assign_credit(self, turns: Turns) -> Credit:
        assert isinstance(turns, ValuedTurns)
        advantages = gae(
            turns.rewards,
            turns.values,
            turns.final_values,
            turns.mask,
            gamma=self.args.gamma,
            gae_lambda=self.args.gae_lambda,
        )
        self._targets = torch.where(turns.mask, advantages + turns.values, 0.0)
        values, targets = turns.values[turns.mask], self._targets[turns.mask]
        metrics = {"value/explained_variance": explained_variance(values, targets)}
        if values.numel():
            metrics["value/mean"] = values.mean().item()
            metrics["value/error"] = (values - targets).square().mean().sqrt().item()
        return Credit(advantages, metrics)

    def _trl_batch(self, batch: TurnBatch, advantages: torch.Tensor, scores: Batch) -> Batch:
        output = super()._trl_batch(batch, advantages, scores)
        size, num_turns = batch.turn_mask.shape
        targets = self._targets[self._local(size), :num_turns]
        trained = turn_lengths(torch.where(output["tool_mask"] > 0, batch.turn_ids, -1), num_turns)
        weights = (trained > 0).float()
        if self._critique.by_token:
            # A turn counts once, whatever its length.
            lengths = spread_to_tokens(trained, batch.turn_ids).clamp(min=1)
            weights, targets = (spread_to_tokens(x, batch.turn_ids) for x in (weights, targets))
            weights = weights / lengths
        output |= {
            "value_offsets": self._critique.offsets,
            "old_values": self._critique.values,
            "value_targets": targets,
            "value_weights": weights,
        }
        return output

    def _token_advantages(self, advantages: torch.Tensor, batch: TurnBatch) -> torch.Tensor:
        """(B, T); those of single tokens are whitened over the tokens of all ranks and clipped, as asked for."""
        if not self._critique.by_token:
            return super()._token_advantages(advantages, batch)
        targets = self._targets[self._local(batch.turn_mask.size(0)), : batch.turn_mask.size(1)]
        advantages = token_gae(targets, self._critique.values, batch.turn_ids)
        mask = batch.valid_mask
        if self.args.whiten_advantages:
            everyone, everywhere = (
                self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1))
                for x in (advantages, mask.long())
            )
            whitened = whiten(everyone, everywhere.bool())
            advantages = whitened[self._local(mask.size(0)), : mask.size(1)]
        if self.args.advantage_clip_range is not None:
            advantages = advantages.clamp(-self.args.advantage_clip_range, self.args.advantage_clip_range)
        return advantages

    # -------------------------------------------------------------------------------------------------------- loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        drawn = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        step_begins = self._step >= self._step_ends
        if step_begins:
            # At the end of an epoch of a data set a step may be shorter than gradient_accumulation_steps.
            self._step_ends = self._step + self.current_gradient_accumulation_steps
        if step_begins or self._buffered_inputs is not drawn:
            generation_ends = (self._step // self._generate_every + 1) * self._generate_every
            micro_steps = range(self._step, min(self._step_ends, generation_ends))
            micro_batches = [self._buffered_inputs[step % len(self._buffered_inputs)] for step in micro_steps]
            self._count_turns(micro_batches, self.current_gradient_accumulation_steps)
        return inputs

    def _restore_rollout(self, steps: int, buffer: list[Batch] | None) -> None:
        super()._restore_rollout(steps, buffer)
        self._step_ends = 0

    def _count_turns(self, micro_batches: list[Batch], in_step: int | None = None) -> None:
        """Tell micro-batches of one optimizer step how many turns, over all ranks, it trains on.

        Args:
            micro_batches: Those of the step that are drawn already.
            in_step: How many the step has; the others, of generation batches to come, are taken to be like these. Default:
                no others.
        """
        turns = self.accelerator.reduce(sum(batch["value_weights"].sum() for batch in micro_batches), reduction="sum")
        for batch in micro_batches:
            batch["turns_in_step"] = turns * (in_step or len(micro_batches)) / len(micro_batches)

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        # Right before the forward pass: the reference pass has left only the policy trainable.
        self._thaw()
        batch = trim_columns(inputs, self.pad_to_multiple_of)
        policy_loss = super()._compute_loss(model, batch)
        assert self._values is not None
        values, self._values = self._values, None
        targets = batch["value_targets"]
        values = self._pooled(values, batch["turn_ids"], targets.size(1))
        weights = batch["value_weights"]
        errors, clipped = value_errors(values, batch["old_values"], targets, self.args.value_clip_range)
        # A padded entry has weight 0 but may have read anything.
        total = torch.where(weights > 0, errors * weights, 0.0).sum()
        self._log_losses(policy_loss.detach(), total.detach(), (clipped * weights).sum(), weights.sum())
        # DDP averages over ranks; TRL's loss is divided for accumulation already, as this one must be.
        value_loss = total * self.accelerator.num_processes / batch["turns_in_step"].clamp(min=1.0)
        # Multiplied, not frozen: every parameter has a gradient in every step, as ZeRO-3 demands.
        policy_weight = 0.0 if self.state.global_step < self.args.critic_warmup_steps else 1.0
        return policy_weight * policy_loss + self.args.vf_coef * value_loss

    def _log_losses(
        self, policy: torch.Tensor, total: torch.Tensor, clipped: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """Those of the optimizer step, once its last micro-batch is there; the critic's are means over its turns."""
        self._loss_totals = self._loss_totals + torch.stack([policy, total, clipped, weight])
        if self.accelerator.sync_gradients:
            policy, total, clipped, weight = self.accelerator.reduce(self._loss_totals, reduction="sum")
            self._loss_totals = torch.zeros_like(self._loss_totals)
            self._metrics["train"]["policy/loss"].append((policy / self.accelerator.num_processes).item())
            self._metrics["train"]["value/loss"].append((total / weight.clamp(min=1.0)).item())
            if self.args.value_clip_range is not None:
                self._metrics["train"]["value/clip_ratio"].append((clipped / weight.clamp(min=1.0)).item())

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        batch = self._loss_batch
        if batch is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        positions = batch["value_offsets"] + batch["prompt_ids"].size(1)

        def with_values(**inputs: Any) -> Any:
            """Policy and critic in one call: the only form that is right under DDP and DeepSpeed."""
            outputs = model(**inputs, value_positions=positions)
            self._values = outputs.state_values
            return outputs

        return super()._get_per_token_logps_and_entropies(with_values, *args, **kwargs)
