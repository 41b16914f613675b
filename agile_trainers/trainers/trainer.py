"""The seam: the only file that touches TRL's private methods.

``MultiTurnTrainer`` replaces what lies between a dataset row and TRL's loss: rollout, rewards, credit. The loss itself,
the optimizer loop, checkpoints, logging and the Hub stay TRL's. Without an environment every method is plain ``super()``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from peft import PeftModel
from transformers.utils import logging

from agile_trainers.adapters import check_repeatable, explaining_scope, plain_copies, within_scope
from agile_trainers.adapters.fused import fuse
from agile_trainers.checkpoints.hub import HubModels
from agile_trainers.checkpoints.record import Checkpoints
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.objectives.advantages import pool_over_turns, whiten
from agile_trainers.objectives.kl import shaping
from agile_trainers.objectives.ratios import pool_log_probs
from agile_trainers.objectives.segments import spread_to_tokens, turn_lengths
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.mixture import Mixture
from agile_trainers.rollout.seeds import training_specs
from agile_trainers.train_batch import Batch, drop_silent_rows, sort_by_length, trim_columns
from agile_trainers.trainers.config import MultiTurnConfig
from agile_trainers.trainers.construction import (
    activation_offloading,
    build_engine,
    check_architecture,
    check_first_prompt,
    check_kernels,
    check_vllm,
    environment_pool,
    keep_differentiable,
    probe_environment,
    refuse,
    training_rows,
)
from agile_trainers.trainers.evaluation import EpisodeEvaluation
from agile_trainers.trainers.evaluation_data import kept_columns, played_columns, with_best_metric
from agile_trainers.trainers.inputs import Start, start_from
from agile_trainers.trainers.launch import check_engine, check_parallelism
from agile_trainers.trainers.mixture import first_rows, made_of, mixture_of, names_of, with_column, with_names
from agile_trainers.trainers.noise import switch_off_noise
from agile_trainers.trainers.recipe import decide_learning_rate, idle_recipe
from agile_trainers.trainers.reference import ReferencePolicy
from agile_trainers.trainers.reward_functions import reward_inputs, with_return, without_failed
from agile_trainers.trainers.rollout_log import RolloutLog
from agile_trainers.trainers.scoring import Scoring
from agile_trainers.trainers.updates import Updates, rows_of_episodes
from agile_trainers.types import Trajectory, TurnBatch

logger = logging.get_logger(__name__)


@dataclass
class Turns:
    """What a credit rule gets: the turns of *all* ranks, rows of a group side by side."""

    rewards: torch.Tensor
    """(B, K) float32."""
    mask: torch.Tensor
    """(B, K) bool, which turns happened in episodes that did not fail: what every statistic is over."""
    failed: torch.Tensor
    """(B,) bool."""
    lengths: torch.Tensor
    """(B, K) int64, action tokens."""
    anchors: torch.Tensor
    """(B, K) int64, the state each turn started from, as the environment names it; 0 where it names none."""
    environments: torch.Tensor
    """(B,) int64, which environment each row played; 0 in a run of one."""


@dataclass
class Credit:
    """What a credit rule returns."""

    advantages: torch.Tensor
    """(B, K), of all ranks."""
    metrics: dict[str, float] = field(default_factory=dict)


class MultiTurnTrainer(Checkpoints, HubModels, EpisodeEvaluation, Scoring, RolloutLog, ReferencePolicy):
    """GRPO's machinery over multi-turn episodes; a subclass adds the credit rule, :meth:`_assign_credit`.

    Takes every argument of TRL's ``GRPOTrainer``, in TRL's order, and:

    Args:
        model: Also a folder or Hub id of a LoRA adapter, which is then continued; see ``docs/chaining.md``.
        environment: An environment id (``"gem:game:GuessTheNumber-v0-easy"``, ``"agile:guess_number"``, ...) or any
            zero-argument factory of environments; or several of these by name, chosen by the column ``environment`` of the
            rows, or by ``environment_weights`` without rows. None: this is TRL's ``GRPOTrainer``.
        reward_funcs: With an environment optional, in TRL's form; their (weighted) values are added to the reward of an
            episode's last turn. ``reward_weights`` weighs these only; the environment's own reward has weight 1. Beside
            TRL's arguments they get ``trajectories`` and, where every episode has an instance of its own in this process,
            ``environments``. Episodes that failed are not scored.
        train_dataset: With an environment optional: each row is handed to ``reset`` as ``options``. Without rows, set
            ``max_steps``; the environment's seed is then all that distinguishes one episode from another.

    Raises:
        ValueError: For arguments that contradict each other or would have no effect, a template that rewrites earlier
            turns, an environment that breaks the protocol, a prompt that leaves no room to answer.
    """

    args: Any  # the trainer's own configuration class, which `Trainer` does not know
    model: Any
    num_generations: int
    beta: float
    pad_to_multiple_of: int | None
    scale_rewards: Any
    _logs: dict[str, Any]
    _mixture: Mixture | None
    _buffered_inputs: Any
    _config_class: type[MultiTurnConfig]
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "agile-trainers"]
    _needs_final_observation = False

    @property
    def _needs_anchors(self) -> bool:
        return False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: MultiTurnConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        environment: str | EnvironmentFactory | Mapping[str, str | EnvironmentFactory] | None = None,
    ):
        if args is None:
            args = self._config_class(output_dir=self._name.replace(" ", "-"))
        self.engine: RolloutEngine | None = None
        self._updates = Updates(self)
        self.environment = environment
        # What `_compute_loss` shows `_get_per_token_logps_and_entropies` while it runs.
        self._loss_batch: Batch | None = None
        if environment is None:
            # TRL's own configuration will do for TRL's own trainer.
            args = args.without_environment() if isinstance(args, MultiTurnConfig) else args
        else:
            if not isinstance(args, self._config_class):
                raise TypeError(
                    f"{type(self).__name__} takes a {self._config_class.__name__} as `args`, got {type(args).__name__}."
                )
            refuse("tools", tools, "the environment answers the model")
            refuse("rollout_func", rollout_func, "the environment makes the rollout")
            refuse("environment_factory", environment_factory, "pass environments of TRL's kind, or of ours, not both")
            args = args.with_environment(names_of(environment))
            check_vllm(args)
            check_parallelism(args)
            check_kernels(args)
            check_repeatable(model, peft_config)
            if args.lora_target_scope is not None:
                peft_config = within_scope(peft_config, args.lora_target_scope)
            made = made_of(environment)
            train_dataset = kept_columns(args, train_dataset, "train_dataset")
            eval_dataset = kept_columns(args, eval_dataset, "eval_dataset")
            self._rows_are_options, self._eval_rows = train_dataset is not None, eval_dataset
            self._mixture = mixture_of(args, environment)
            probed = first_rows(self._mixture, args, train_dataset, eval_dataset)
            columns = with_column(self._mixture, played_columns(args, train_dataset, eval_dataset))
            train_dataset = training_rows(args, train_dataset)
            pool = environment_pool(args, made)
            first_states = {
                name: probe_environment(pool, args.seed, row, name, with_rows=eval_dataset is not None)
                for name, row in probed.items()
            }
            reward_funcs, reward_processing_classes = with_return(
                args, reward_funcs, reward_processing_classes, columns
            )
            args = with_best_metric(args, by_reward=len(reward_funcs) > 1, eval_dataset=eval_dataset)
            if eval_dataset is None and args.eval_strategy != "no":
                # `Trainer` wants a data set to evaluate on; `evaluate` plays seeds.
                eval_dataset = train_dataset
        # With it TRL would make an engine of its own.
        use_vllm, args.use_vllm = args.use_vllm, args.use_vllm and environment is None
        start = start_from(Start(model, args, processing_class, quantization_config, peft_config))
        self._saved, args = start.saved, start.args
        if environment is not None:
            adapter = start.peft_config is not None or isinstance(start.model, PeftModel)
            decide_learning_rate(args, adapter=adapter)
            for finding in idle_recipe(args, adapter=adapter and optimizers[0] is None):
                logger.warning(finding)
        with explaining_scope(getattr(args, "lora_target_scope", None)), plain_copies(start.model):
            super().__init__(
                model=start.model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=start.processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=start.quantization_config,
                peft_config=start.peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        if environment is not None:
            self.use_vllm = self.args.use_vllm = use_vllm
            check_engine(self.accelerator, self.args)
            check_architecture(self.model, self.aux_loss_enabled)
            keep_differentiable(self.model)
            fuse(self.model)
            self._turn_ratios = args.importance_sampling_level == "turn"
            if self._turn_ratios:
                # TRL's loss sees log-probabilities whose token ratios already are the turn's.
                self.importance_sampling_level = "token"
            self._rollout_seconds = 0.0
            self._idle_batches = 0
            self.engine = build_engine(
                args,
                pool,
                self.processing_class,
                eos_token_ids=self.eos_token_ids,
                model_config=self.model.config,
                append_final_observation=self._needs_final_observation,
            )
            if args.training_chat_template:
                # Whoever loads the saved tokenizer must render what the policy was trained on.
                self.processing_class.chat_template = self.engine.chat.chat_template
            for name, state in first_states.items():
                check_first_prompt(self.engine, state, name, needs_anchor=self._needs_anchors)
            self._set_up_reference()
            self._switch_off_noise()
            self._set_up_checkpoints()
            self._set_up_hub()
            self._offloading = activation_offloading(args, self.model)
            if args.skip_zero_advantage and self.aux_loss_enabled:
                raise ValueError(
                    "skip_zero_advantage cannot be combined with the router's auxiliary loss, which every episode trains. "
                    "Set router_aux_loss_coef=0.0 in model_init_kwargs, or skip_zero_advantage=False."
                )
            self._set_up_generation()

    def _switch_off_noise(self) -> None:
        """After construction, and after every adapter that is added later."""
        if self.args.disable_dropout:
            for model in (self.model, self.ref_model):
                if model is not None:
                    # DeepSpeed has wrapped the reference by now.
                    switch_off_noise(self.accelerator.unwrap_model(model))

    # ---------------------------------------------------------------------------------------------------- rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if self.engine is None:
            return super()._generate_and_score_completions(inputs)
        generation, first = self._step // self._generate_every, self._local(len(inputs)).start
        if isinstance(inputs[0], Trajectory):  # of `update`
            trajectories: list[Trajectory] = inputs  # type: ignore[assignment]
            inputs = rows_of_episodes(trajectories)
        else:
            trajectories, inputs = self._play(inputs, generation, first)
        batch = collate(
            trajectories,
            pad_token_id=self._tokenizer.pad_token_id,
            end_token_id=self.eos_token_ids[0],
            pad_to_multiple_of=self.pad_to_multiple_of,
            device=self.accelerator.device,
        )
        rewards = self._add_reward_functions(inputs, trajectories, batch)
        # With a reference every row is scored, and before credit, which the penalty may be part of.
        scores = self._policy_scores(batch) if self.beta != 0.0 else None
        if scores is not None and self.args.kl_placement != "loss":
            self._penalize(batch, scores)
        advantages = self._credit(batch)
        scores = scores or self._policy_scores(batch, advantages)
        output = self._trl_batch(batch, advantages, scores)
        self._measure_gap(batch, scores, output["tool_mask"] > 0)
        self._log_rollout(trajectories, rewards, advantages, batch.turn_mask)
        self._record(f"generation-{generation:06d}", self._training_records(trajectories, advantages, first))
        return output

    def _play(
        self, inputs: list[dict[str, Any]], generation: int, first: int
    ) -> tuple[list[Trajectory], list[dict[str, Any]]]:
        """The episodes of some rows, and the rows as reward functions get them."""
        assert self.engine is not None
        started = time.perf_counter()
        rows = [dict(row) if self._rows_are_options else None for row in inputs]
        specs = training_specs(self.args.seed, generation, rows, first, self.num_generations, self._mixture)
        with self._generator() as generator:
            trajectories = self.engine.run(specs, generator)
        self._rollout_seconds = time.perf_counter() - started
        return trajectories, with_names(inputs, specs)

    def start(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Begin a run that :meth:`rollout` and :meth:`update` drive, with all that ``train()`` does before its first step.

        A trainer that has not trained yet need not call it: the first ``rollout()`` or ``update()`` does.

        Args:
            resume_from_checkpoint: As for :meth:`train`.

        Raises:
            RuntimeError: In the middle of a run.
            ValueError: Without an environment, or where updates and generation batches do not end together.
        """
        self._updates.start(resume_from_checkpoint)

    def rollout(
        self, rows: Sequence[dict[str, Any]] | None = None, *, generation: int | None = None
    ) -> list[Trajectory]:
        """Play episodes with the policy as it is; nothing is trained. The same call gives the same episodes.

        Args:
            rows: Dataset rows, handed to ``reset`` as options: one for each group of this process (as many on each).
                Default: those that ``train()`` would take next; without a ``train_dataset`` its number of episodes.
            generation: Index of the generation batch, which seeds environments and sampling. Default: the one that
                ``train()`` would play next, until an update is made.

        Returns:
            The episodes of this process, the ``num_generations`` members of a group side by side.

        Raises:
            ValueError: Without an environment, or for empty rows or a negative index.
            RunOverError: If the next rows are those of a run that is over.
        """
        return self._updates.rollout(rows, generation)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train on episodes what ``train()`` trains on a generation batch: credit, loss, ``num_iterations`` passes over it.

        Schedule, callbacks, logs, evaluations and checkpoints are ``train()``'s; the run ends by itself at ``max_steps``.
        Where ``gradient_accumulation_steps`` spans several generation batches, an update takes them all.

        Args:
            trajectories: This process's episodes, whole groups side by side, as :meth:`rollout` returns them. Their rewards
                may have been changed, and groups taken from several rollouts. They count as sampled by the policy as it is.

        Returns:
            The metrics of these optimizer steps (means), ``loss``, ``grad_norm``, ``learning_rate``, and the ``step``.

        Raises:
            ValueError: For more or fewer episodes than an update takes, or torn groups.
            TypeError: For anything but trajectories.
            RunOverError: If the run is over; see :meth:`start`.
        """
        return self._updates.update(trajectories)

    def finish(self) -> None:
        """End a run of :meth:`update` before ``max_steps``, as ``train()`` ends: best model, callbacks, pushes.

        Raises:
            RunOverError: If the run is over.
        """
        self._updates.finish()

    def _add_reward_functions(
        self, inputs: list[dict[str, Any]], trajectories: list[Trajectory], batch: TurnBatch
    ) -> torch.Tensor:
        """Score with TRL's reward functions, add them to each episode's last turn; return (B, functions) of all ranks."""
        per_function = self._reward(inputs, trajectories)
        weighted = per_function * self.reward_weights.to(per_function.device)
        extra = weighted[self._local(len(inputs)), 1:].nansum(dim=1)
        rows = torch.arange(len(inputs), device=extra.device)
        last = (batch.turn_mask.sum(dim=1) - 1).clamp(min=0)
        batch.turn_rewards[rows, last] += extra * batch.turn_mask.any(dim=1)
        return per_function

    def _reward(self, rows: list[dict[str, Any]], trajectories: list[Trajectory]) -> torch.Tensor:
        """(B, functions) of all ranks, NaN for episodes that failed. Every rank must bring as many rows."""
        return without_failed(
            self._calculate_rewards(**reward_inputs(rows, trajectories)), trajectories, self.accelerator
        )

    def _local(self, size: int) -> slice:
        return slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)

    # ----------------------------------------------------------------------------------------------------- credit

    def _assign_credit(self, turns: Turns) -> Credit:
        """The credit rule: advantages of all turns, before whitening and clipping."""
        raise NotImplementedError

    def _credit(self, batch: TurnBatch) -> torch.Tensor:
        """Advantages (B, K) of the local rows; every statistic is over all ranks, before TRL shuffles rows."""
        turns = self._gather_turns(batch)
        credit, valid = self._assign_credit(turns), turns.mask
        advantages = credit.advantages
        if self.args.whiten_advantages:
            advantages = whiten(advantages, valid)
        if self.args.advantage_clip_range is not None:
            bound = self.args.advantage_clip_range
            credit.metrics["advantage/clipped"] = (advantages[valid].abs() > bound).float().mean().item()
            advantages = advantages.clamp(-bound, bound)
        if self.importance_sampling_level == "sequence":
            advantages = pool_over_turns(advantages, valid)
        kept = advantages[valid]
        credit.metrics["advantage/mean"] = kept.mean().item() if kept.numel() else 0.0
        credit.metrics["advantage/std"] = kept.std().item() if kept.numel() > 1 else 0.0
        for name, value in credit.metrics.items():
            self._metrics["train"][name].append(value)
        return advantages[self._local(batch.turn_mask.size(0)), : batch.turn_mask.size(1)]

    def _gather_turns(self, batch: TurnBatch) -> Turns:
        lengths = turn_lengths(batch.turn_ids, batch.turn_mask.size(1))
        rewards, mask, lengths, anchors = (
            self.accelerator.gather(self.accelerator.pad_across_processes(value, dim=1))
            for value in (batch.turn_rewards, batch.turn_mask.long(), lengths, batch.anchors)
        )
        failed, environments = self.accelerator.gather((batch.failed, batch.environments))
        return Turns(rewards, mask.bool() & ~failed[:, None], failed, lengths, anchors, environments)

    def _token_advantages(self, advantages: torch.Tensor, batch: TurnBatch) -> torch.Tensor:
        """(B, T) from (B, K)."""
        return spread_to_tokens(advantages, batch.turn_ids)

    def _trl_batch(self, batch: TurnBatch, advantages: torch.Tensor, scores: Batch) -> Batch:
        """The batch dict that TRL's loss reads, and our own columns."""
        spread = self._token_advantages(advantages, batch)
        if self.args.kl_placement == "advantage":
            log_probs, reference = scores["old_per_token_logps"], scores["ref_per_token_logps"]
            unit = "turn" if self._turn_ratios else self.importance_sampling_level
            spread = spread - self.beta * shaping(log_probs, reference, batch.turn_ids, unit)
        if self._turn_ratios and self.args.turn_ratio_pooling == "sum":
            lengths = turn_lengths(batch.turn_ids, advantages.size(1)).clamp(min=1)
            spread = spread / spread_to_tokens(lengths, batch.turn_ids).clamp(min=1)
        trained = batch.valid_mask
        if self.mask_truncated_completions:
            trained &= ~batch.truncated[:, None]
        output = {
            "prompt_ids": batch.prompt_ids,
            "prompt_mask": batch.prompt_mask,
            "completion_ids": batch.completion_ids,
            "completion_mask": batch.completion_mask,
            "tool_mask": trained.long(),
            "turn_ids": batch.turn_ids,
            "sampling_per_token_logps": batch.sampling_logprobs,
            "advantages": spread,
            "num_items_in_batch": self.accelerator.gather(trained.sum()).sum(),
        }
        if self._scores_old_policy:
            output["old_per_token_logps"] = scores["old_per_token_logps"]
        if self.beta != 0.0 and self.args.kl_placement == "loss":
            output["ref_per_token_logps"] = scores["ref_per_token_logps"]
        if self._corrects_mismatch:
            scored = trained & scores["scored"][:, None]
            output["importance_sampling_ratio"] = self._correction(batch, scores["old_per_token_logps"], scored)
        return output

    # ------------------------------------------------------------------------------------------------------- loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        drawn = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.engine is None or self._buffered_inputs is drawn:
            return inputs
        steps, accumulation = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        if steps % accumulation == 0 or accumulation % steps == 0:
            self._buffered_inputs = sort_by_length(self._buffered_inputs, min(steps, accumulation))
        return self._buffered_inputs[self._step % steps]

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        if self.engine is None:
            return super()._compute_loss(model=model, inputs=inputs)
        share, beta, use_vllm = 1.0, self.beta, self.use_vllm
        if self.args.skip_zero_advantage:
            inputs, share = drop_silent_rows(inputs, self.args.zero_advantage_eps, self.loss_type)
        if self.args.kl_placement != "loss":
            self.beta = 0.0  # the penalty is in the advantages already
        self.use_vllm = self._corrects_mismatch  # on which condition TRL's loss weighs tokens
        self._loss_batch = trim_columns(inputs, self.pad_to_multiple_of)
        try:
            loss = share * super()._compute_loss(model=model, inputs=self._loss_batch)
        finally:
            self._loss_batch, self.beta, self.use_vllm = None, beta, use_vllm
        first_pass_ends = self._step % self._generate_every == self.args.steps_per_generation - 1
        if self.is_in_train and self._gap_meter.is_open and (first_pass_ends or self.accelerator.sync_gradients):
            # Before the backward pass, in which DeepSpeed takes its optimizer step.
            self._check_gap()
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if self.engine is not None:
            model = self._with_positions(model)
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        batch = self._loss_batch
        if batch is not None and self._gap_meter.is_open:
            counted = batch["tool_mask"] * batch["completion_mask"] > 0
            padded = batch["prompt_mask"][:, 0] == 0
            self._gap_meter.add(log_probs, batch["sampling_per_token_logps"], counted, batch["turn_ids"], padded)
        if batch is None or not self._turn_ratios:
            return log_probs, entropies, aux_loss
        turn_ids = batch["turn_ids"]
        old = batch.get("old_per_token_logps", log_probs.detach())
        num_turns = int(turn_ids.max()) + 1
        pooled = pool_log_probs(log_probs, old, turn_ids, max(num_turns, 1), self.args.turn_ratio_pooling)
        if "ref_per_token_logps" in batch:
            # The KL term must still see the policy's own distance to the reference.
            batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + (pooled - log_probs)
        return pooled, entropies, aux_loss

    def _rollout_state(self) -> tuple[int, list[Batch]]:
        return self._step, self._buffered_inputs

    def _restore_rollout(self, steps: int, buffer: list[Batch] | None) -> None:
        self._step, self._buffered_inputs = steps, buffer

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        return sampler if self.engine is None else self._at_epoch(sampler)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.engine is None:
            return super().training_step(*args, **kwargs)
        self._rollout_seconds, started = 0.0, time.perf_counter()
        if self.args.entropy_coef_schedule == "linear":
            self.entropy_coef = self.args.entropy_coef * (1 - self.state.global_step / self.state.max_steps)
        with self._offloading:
            loss = super().training_step(*args, **kwargs)
        self._metrics["train"]["time/update"].append(time.perf_counter() - started - self._rollout_seconds)
        return loss
