"""Defines the trainer: every override of TRL and ``Trainer``, in the order in which a run and a step call them.

``MultiTurnTrainer`` replaces the part between a dataset row and TRL's loss: rollout, rewards, credit. The loss itself and
the optimizer loop stay TRL's. Everything with state of its own is an object: the sampler, the checkpoints, the Hub's
repository, the reference, the log of episodes. Without an environment every method is plain ``super()``. No other file
overrides a method of TRL's ``GRPOTrainer`` or of ``Trainer``.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import OfflineModeIsEnabled
from peft import PeftModel
from transformers.trainer_utils import PredictionOutput
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.adapters import (
    POLICY,
    every_adapter_trainable,
    explaining_scope,
    parent_of,
    plain_copies,
    restore_adapter,
    running,
)
from agile_trainers.adapters.folders import RECORD, CheckpointError, naming_full_disk, write_json
from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.model_folders import LOADERS, RESUMING, naming_folder
from agile_trainers.adapters.sharding import is_zero3
from agile_trainers.checkpoints.disclosure import check_special_tokens, clean_tokenizer, note_private
from agile_trainers.checkpoints.hub import HubPushes, HubUnreachableError, make_repository, reporting_unreachable
from agile_trainers.checkpoints.integrity import check_complete, step_of
from agile_trainers.checkpoints.machines import on_each_disk
from agile_trainers.checkpoints.record import RolloutState, RunCheckpoints, record_without_environment
from agile_trainers.checkpoints.resumed_options import apply_options, optimizer_options, recorded_options
from agile_trainers.checkpoints.run_cards import RunCards
from agile_trainers.checkpoints.stopping import GracefulStop
from agile_trainers.config.batch_defaults import decide_learning_rate, warn_of_idle_recipe
from agile_trainers.config.launch_checks import check_engine
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.rules import skips_zero_advantage
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.monitor.episode_log import EpisodeLog
from agile_trainers.monitor.episode_records import EpisodeRecords
from agile_trainers.monitor.evaluation_table import Evaluated, completions_table
from agile_trainers.monitor.health_checks import PolicyMeasurements, RunWatch
from agile_trainers.monitor.nonfinite import StepGuard, check_finite
from agile_trainers.monitor.turn_metrics import TurnEntropies, credit_by_turn
from agile_trainers.objectives.advantages import with_advantage, zero_advantage_groups
from agile_trainers.objectives.kl import token_kl_penalty, turn_log_ratio
from agile_trainers.objectives.ratios import pool_log_probs
from agile_trainers.objectives.segments import spread_to_tokens, turn_lengths
from agile_trainers.packing.packer import Packer, PackingState
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import EpisodeSpec, RolloutEngine
from agile_trainers.rollout.environment_probe import check_first_prompt
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.sampling.correction import mismatch_weights
from agile_trainers.sampling.gap import GapMonitor
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.step.credit import Credit, CreditInputs, filter_groups, gather_turns, normalize
from agile_trainers.step.critic import TARGETS, Critic, CriticValues
from agile_trainers.step.dropout import switch_off_noise
from agile_trainers.step.log_probs import Scorer, Scores
from agile_trainers.step.play import GroupRollouts, PlayedGroups
from agile_trainers.step.reward import RewardColumns, drained_metrics, reward_inputs, totals
from agile_trainers.step.token_batches import Pass, Passes, gathering_ragged
from agile_trainers.train_batch import Batch, TrainBatch, exchange_rows
from agile_trainers.trainers.arguments import check_arguments, check_order, named_model
from agile_trainers.trainers.evaluation import EpisodeEvaluator
from agile_trainers.trainers.evaluation_data import kept_columns, rows_of
from agile_trainers.trainers.hyperparameter_search import TrainerRecipe, initial_model, search
from agile_trainers.trainers.load_adapter import TrainerInputs, resolve_inputs
from agile_trainers.trainers.manual_loop import Updates, rows_of_episodes
from agile_trainers.trainers.reference import ReferencePolicy
from agile_trainers.trainers.setup import (
    RunSetup,
    activation_offloading,
    check_architecture,
    check_vocabulary,
    disable_bnb_cpu_packing,
    make_packer,
    prepare_run,
    reject_argument,
)
from agile_trainers.types import Trajectory, TurnBatch

logger = logging.get_logger(__name__)


@dataclass
class _LossPass:
    """Carries a micro-batch from `_compute_loss` to `_get_per_token_logps_and_entropies`, past TRL's signatures."""

    batch: TrainBatch
    inputs: Batch
    """The same batch in TRL's form."""
    values: torch.Tensor | None = None
    """Values of the critic, from the forward pass of the loss."""
    log_probs: torch.Tensor | None = None
    """(B, T), from the forward pass of the loss."""
    log_ratio: torch.Tensor | None = None
    """(B, T), of the policy over the one that the update started from, pooled over turns where the loss's is."""


class MultiTurnTrainer(GRPOTrainer):
    """GRPO's machinery over multi-turn episodes; a subclass adds the credit rule, :meth:`assign_credit`.

    Takes every argument of TRL's ``GRPOTrainer``, in TRL's order, and:

    Args:
        model: Also a folder or Hub id of a LoRA adapter, which is then continued; see ``docs/chaining.md``.
        model_init: Instead of ``model``: a function that makes it, of nothing or of the trial, for
            :meth:`hyperparameter_search`.
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
    ref_model: Any
    control: Any
    num_generations: int
    beta: float
    pad_to_multiple_of: int | None
    scale_rewards: Any
    hub_model_id: str | None
    push_in_progress: Any
    _logs: dict[str, Any]
    _buffered_inputs: Any

    # What a subclass says of its algorithm.
    config_class: ClassVar[type[MultiTurnConfig]] = MultiTurnConfig
    """The class of ``args``: the options on the command line. It says whether there are groups and a critic."""
    needs_environment: ClassVar[bool] = True
    """True for an algorithm that trains on episodes only; others are TRL's GRPO without an environment."""
    targets_by_row: ClassVar[bool] = False
    """True if the critic's targets of a row depend on that row alone; declared beside ``assign_credit``."""
    _tag_names: ClassVar[list[str]] = ["trl", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {}

    cards: RunCards
    # Made by the constructor, with an environment only.
    engine: RolloutEngine | None = None
    setup: RunSetup
    sampler: RolloutSampler
    packer: Packer
    scorer: Scorer
    gap: GapMonitor
    reference: ReferencePolicy
    critic: Critic | None = None
    evaluator: EpisodeEvaluator
    rollouts: GroupRollouts
    watch: RunWatch
    """Says why the run does not learn."""
    episode_log: EpisodeLog
    records: EpisodeRecords
    checkpoints: RunCheckpoints
    hub: HubPushes
    stop: GracefulStop
    guard: StepGuard
    passes: Passes
    turn_entropies: TurnEntropies
    updates: Updates

    _loss_pass: _LossPass | None = None
    _rollout_seconds = 0.0
    _adapter: str | None = POLICY
    """The adapter that runs, see :meth:`use_adapter`."""
    _told_unreachable = False
    """True once a warning said that the Hub cannot be reached."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "assign_credit" in vars(cls) and "targets_by_row" not in vars(cls):
            cls.targets_by_row = False
        if cls._name == GRPOTrainer._name:  # TRL's own; records and model cards name the algorithm by it
            cls._name = cls.__name__

    # ------------------------------------------------------------------------------------------------ construction

    def __init__(
        self,
        model: Any = None,
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
        model_init: Callable[..., Any] | None = None,
    ):
        check_order(reward_funcs)
        if args is None:
            args = self.config_class(output_dir=self._name.replace(" ", "-"))
        model = named_model(model)
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._recipe = TrainerRecipe(self, {**given, "args": copy.copy(args)})
        model = initial_model(model, model_init, args)
        self.environment = environment
        self.updates = Updates(self)
        setup: RunSetup | None = None
        if environment is None:
            if self.needs_environment:
                raise ValueError(f"{type(self).__name__} needs an environment. Pass `environment=...`.")
            # TRL's own configuration will do for TRL's own trainer.
            args = args.without_environment() if isinstance(args, MultiTurnConfig) else args
        else:
            if not isinstance(args, self.config_class):
                raise TypeError(
                    f"{type(self).__name__} takes a {self.config_class.__name__} as `args`, got {type(args).__name__}. Pass "
                    f"args={self.config_class.__name__}(...) with the same options."
                )
            check_arguments(model, args, given)
            reject_argument(
                "tools",
                tools,
                "the environment answers the model; environment=trl_environment(tools=[...]) plays tools",
            )
            reject_argument("rollout_func", rollout_func, "the environment makes the rollout")
            reject_argument(
                "environment_factory", environment_factory, "pass environments of TRL's kind, or of ours, not both"
            )
            self.setup = setup = prepare_run(
                args,
                environment,
                model=model,
                peft_config=peft_config,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                reward_funcs=reward_funcs,
                reward_processing_classes=reward_processing_classes,
            )
            args, peft_config = setup.args, setup.peft_config
            train_dataset, eval_dataset = setup.train_dataset, setup.eval_dataset
            reward_funcs, reward_processing_classes = setup.reward_funcs, setup.reward_processing_classes
        # With use_vllm TRL would make an engine of its own.
        use_vllm, args.use_vllm = args.use_vllm, args.use_vllm and setup is None
        inputs = resolve_inputs(TrainerInputs(model, args, processing_class, quantization_config, peft_config))
        if setup is not None:
            adapter = inputs.peft_config is not None or isinstance(inputs.model, PeftModel)
            decide_learning_rate(inputs.args, adapter=adapter)
            warn_of_idle_recipe(inputs.args, adapter=adapter and optimizers[0] is None)
        named = naming_folder(inputs.model if isinstance(inputs.model, str) else None, within=LOADERS)
        with explaining_scope(getattr(args, "lora_target_scope", None)), plain_copies(inputs.model), named:
            super().__init__(
                model=inputs.model,
                reward_funcs=reward_funcs,
                args=inputs.args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=inputs.processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=inputs.quantization_config,
                peft_config=inputs.peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        check_special_tokens(self.processing_class)
        parent = parent_of(inputs.saved, self.model.config._name_or_path)
        self.cards = RunCards(self, self._tag_names, self._paper, lambda: self._record(parent))
        if setup is not None:
            self.use_vllm = self.args.use_vllm = use_vllm
            self._set_up(setup, inputs)
        self.hub = HubPushes(self)

    def _set_up(self, setup: RunSetup, inputs: TrainerInputs) -> None:
        """Make the parts of a run of episodes, after TRL's own constructor."""
        args = self.args
        check_engine(self.accelerator, args)
        check_architecture(self.model, self.aux_loss_enabled)
        check_vocabulary(self.model, self._tokenizer)
        disable_bnb_cpu_packing(self.model)
        fuse(self.model)
        self._turn_ratios = args.importance_sampling_level == "turn"
        if self._turn_ratios:
            # TRL's loss sees log-probabilities whose token ratios already are the turn's.
            self.importance_sampling_level = "token"
        self.engine = build_engine(
            EpisodeOptions.of_args(args),
            setup.pool,
            self.processing_class,
            eos_token_ids=self.eos_token_ids,
            model_config=self.model.config,
            append_final_observation=args.has_critic,
        )
        if args.training_chat_template:
            # The saved tokenizer must render the text that the policy was trained on.
            self.processing_class.chat_template = self.engine.chat.chat_template
        for name, state in setup.first_states.items():
            check_first_prompt(self.engine, state, name, needs_anchor=self.needs_anchors)
        self.reference = ReferencePolicy(self, inputs.saved)
        self._switch_off_noise()
        if args.device.type == "cpu":
            # With several processes accelerate says "cpu:0", which `Trainer` hands to `torch.load`, which knows none.
            vars(args)["_setup_devices"] = torch.device("cpu")
        self.checkpoints = RunCheckpoints(self, self._name, self.environment, inputs.saved)
        self.stop = GracefulStop(self.accelerator)
        self.add_callback(self.stop)
        self.guard = StepGuard()
        self.passes = Passes(self)
        self.turn_entropies = TurnEntropies()
        self._offloading = activation_offloading(args, self.model)
        if args.skip_zero_advantage is True and self.aux_loss_enabled:
            raise ValueError(
                "skip_zero_advantage cannot be combined with the router's auxiliary loss, which every episode trains. Set "
                "router_aux_loss_coef=0.0 in model_init_kwargs, or skip_zero_advantage=False."
            )
        self.sampler = RolloutSampler(self, self.engine, self._tokenizer, self._dist)
        self.packer = make_packer(self)
        self.scorer = Scorer(self, self.packer, self._get_per_token_logps_and_entropies)
        token_ids = (self._tokenizer.pad_token_id, self.eos_token_ids[0])
        measurements = PolicyMeasurements(self.scorer, self.accelerator, args.diagnosis_interval, token_ids)
        self.watch = RunWatch(args, measurements, speaks=self.accelerator.is_main_process)
        self.records = EpisodeRecords(self, self.checkpoints, self.watch)
        self.add_callback(self.records)
        self.gap = GapMonitor(self.accelerator, args.max_logprob_gap, self.sampler.conditions)
        self.episode_log = EpisodeLog(self, self.environment, self.watch.note)
        self.reward_columns = RewardColumns(self.reward_func_names, self.accelerator)
        self.rollouts = GroupRollouts(self, setup, self._play, self._reward, self._collate, self._zero_advantage_groups)
        self.evaluator = EpisodeEvaluator(self, self.engine, self.sampler, setup.mixture, self._reward)
        if args.has_critic:
            self.critic = Critic(self, self.packer, inputs.saved)
            self._switch_off_noise()
            self.critic.thaw()

    def _switch_off_noise(self) -> None:
        """Switch off dropout and other noise; called at construction and after an adapter is added."""
        if self.args.disable_dropout:
            for model in (self.model, self.ref_model):
                if model is not None:
                    # DeepSpeed has wrapped the reference by now.
                    switch_off_noise(self.accelerator.unwrap_model(model))

    @property
    def needs_anchors(self) -> bool:
        """True if the credit rule compares turns by the state that they started from."""
        return False

    @property
    def micro_steps_per_generation(self) -> int:
        """Number of micro-steps on one generation batch, over all passes."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def _corrects_mismatch(self) -> bool:
        """True if tokens are weighed by the trainer's probability over the sampler's."""
        return bool(self.vllm_importance_sampling_correction)

    @property
    def _scores_old_policy(self) -> bool:
        """True if an older policy or another engine sampled the batch of an update; TRL's own condition."""
        return self._corrects_mismatch or self.args.gradient_accumulation_steps % self.micro_steps_per_generation != 0

    @property
    def _skips_zero_advantage(self) -> bool:
        """True if episodes without advantage are left out of the forward passes."""
        return skips_zero_advantage(self.args) and not self.aux_loss_enabled

    def _local(self, size: int) -> slice:
        """Return the rows of this process among those of all."""
        return slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # `Trainer` keeps every log until the end, and with it one string for each name that was made anew.
            self._metrics["train"][sys.intern(name)].append(value)

    # --------------------------------------------------------------------------------------------------- credit rule

    def assign_credit(self, turns: CreditInputs) -> Credit:
        """Compute the advantages of all turns, before whitening and clipping: the credit rule of an algorithm.

        Args:
            turns: The turns of all processes.
        """
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------------- run

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``Trainer.train`` does.

        Interrupted by Ctrl-C (SIGINT) or SIGTERM, it finishes the optimizer step, saves a checkpoint and stops its caller. A
        second signal stops at once. After ``max_wall_seconds`` it does the same, and its caller goes on.

        Args:
            resume_from_checkpoint: True takes the newest complete checkpoint in ``output_dir``; ``"auto"`` does so if there
                is one, and starts a new run otherwise; a path takes that checkpoint.
            *args: See ``Trainer.train``.
            **kwargs: See ``Trainer.train``.

        Raises:
            CheckpointError: If there is no complete checkpoint, or it belongs to another run.
            OutputDirInUseError: If another process of this host trains into ``output_dir``.
            NonFiniteError: If too many optimizer steps in a row have a gradient that is not finite.
            KeyboardInterrupt: After the checkpoint of an interrupted run was saved.
            SystemExit: With code 143, after the checkpoint of a run that got SIGTERM was saved.
        """
        if self.engine is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self._check_policy_runs()
        if self.updates.is_open:
            raise RuntimeError(
                "train() was called in the middle of a run of rollout() and update(). Call finish() first."
            )
        with ExitStack() as lock:
            folder = self.checkpoints.choose(resume_from_checkpoint, lock)
            self.records.begin_run()
            if self.updates.is_beginning:
                self.updates.keep(lock)
            # A second call of train(), maybe after an interruption inside a step, begins with a new generation batch.
            every = self.micro_steps_per_generation
            self._restore_rollout(-(-self._step // every) * every, None)
            self.guard = StepGuard()
            try:
                read = naming_folder(folder, within=RESUMING, kind=CheckpointError)
                with self.stop.heard(), naming_full_disk(self.args.output_dir), read:
                    output = super().train(folder, *args, **kwargs)
            finally:
                if not self.updates.is_open:
                    self.records.finish()
                self.engine.pool.close()
        self.stop.pass_on()
        return output

    def start(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Begin a run of :meth:`rollout` and :meth:`update`, as ``train()`` does before its first step.

        The first ``rollout()`` or ``update()`` of a trainer that has not trained yet calls it.

        Args:
            resume_from_checkpoint: As for :meth:`train`.

        Raises:
            RuntimeError: In the middle of a run.
            ValueError: Without an environment, or where updates and generation batches do not end together.
        """
        self.updates.start(resume_from_checkpoint)

    def rollout(
        self, rows: Sequence[dict[str, Any]] | None = None, *, generation: int | None = None
    ) -> list[Trajectory]:
        """Play episodes with the current policy, without training. The same call gives the same episodes.

        Args:
            rows: Dataset rows, passed to ``reset`` as options: one for each group of this process (equally many on each).
                Default: the next rows of ``train()``; without a ``train_dataset`` the same number of episodes.
            generation: Index of the generation batch, which seeds environments and sampling. Default: the one that
                ``train()`` would play next, until an update is made.

        Returns:
            The episodes of this process, the ``num_generations`` members of a group side by side.

        Raises:
            ValueError: Without an environment, or for empty rows or a negative index.
            RunOverError: If the next rows are needed and the run is over.
        """
        return self.updates.rollout(rows, generation)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train on episodes as ``train()`` does on a generation batch: credit, loss, ``num_iterations`` passes.

        Schedule, callbacks, logs, evaluations and checkpoints are those of ``train()``; the run ends at ``max_steps``. Where
        ``gradient_accumulation_steps`` spans several generation batches, an update takes them all.

        Args:
            trajectories: This process's episodes, whole groups side by side, as :meth:`rollout` returns them. Their rewards
                may have been changed, and groups taken from several rollouts. They count as sampled by the current policy.

        Returns:
            The metrics of these optimizer steps (means), ``loss``, ``grad_norm``, ``learning_rate``, and the ``step``.

        Raises:
            ValueError: For more or fewer episodes than an update takes, or torn groups.
            TypeError: For anything but trajectories.
            RunOverError: If the run is over; see :meth:`start`.
        """
        self._check_policy_runs()
        return self.updates.update(trajectories)

    def finish(self) -> None:
        """End a run of :meth:`update` before ``max_steps``, as ``train()`` ends: best model, callbacks, pushes.

        Raises:
            RunOverError: If the run is over.
        """
        self.updates.finish()

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] | None = None,
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train a trainer per trial, each from the same start, and return the best; this trainer is not trained.

        A trial's checkpoints and its final policy are in ``output_dir/run-<number>`` (no policy with
        ``save_strategy="no"``). A trial whose training becomes NaN fails, and the search goes on. ``model`` must be a name
        or folder, or ``model_init`` given. Several processes run a trial together.

        Args:
            hp_space: Function of optuna's trial that returns values of options, but for those of the batch's size.
                Default: a ``learning_rate`` from a tenth to ten times the trainer's own, log-uniform.
            compute_objective: Function of the evaluation's metrics. Default: ``metric_for_best_model``; if that is unset,
                the reward with reward functions, else the return.
            n_trials: Number of trials.
            direction: ``"maximize"`` or ``"minimize"``, required with a ``compute_objective``; a list for several
                objectives. Default: that of the default objective.
            backend: ``"optuna"``, which is also the default.
            hp_name: Function of the trial that names its folder. Default: ``run-<number>``.
            **kwargs: Arguments of ``optuna.create_study`` (``sampler``, ``pruner``, ``storage``, ...), and ``timeout``,
                ``catch``, ``callbacks`` and ``gc_after_trial`` of ``Study.optimize``. The pruner sees each evaluation.

        Returns:
            ``transformers.trainer_utils.BestRun`` with the study as ``run_summary``, a list of these for several
            objectives; None on all processes but the main one.

        Raises:
            ImportError: If optuna is not installed.
            ValueError: For another backend, a space that names an unknown option, or a trainer that cannot be made again.
            RuntimeError: If no trial was completed.
        """
        self._recipe.check(MultiTurnTrainer)
        return search(
            self,
            self._recipe,
            hp_space=hp_space,
            compute_objective=compute_objective,
            n_trials=n_trials,
            direction=direction,
            backend=backend,
            hp_name=hp_name,
            options=kwargs,
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.critic is None:
            return super().create_optimizer(model)
        self.critic.thaw()
        made = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made:
            self.critic.split_groups(optimizer)
        return optimizer

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        return sampler if self.engine is None else self.checkpoints.at_epoch(sampler)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.engine is not None and self.control.should_training_stop:
            return  # a callback stopped the run before its first step, and `Trainer` would take it
        if self.engine is not None and self.state.global_step >= self.state.max_steps:
            # `Trainer` checks this only after a step, and would train one too many.
            logger.warning(
                "Nothing is left to train: the checkpoint is at step %d of %d. Raise max_steps or num_train_epochs.",
                self.state.global_step, self.state.max_steps,
            )  # fmt: skip
            self.control.should_training_stop = True
            return
        self.updates.intercept(kwargs)
        super()._run_epoch(*args, **kwargs)

    # --------------------------------------------------------------------------------------------------------- step

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.engine is None:
            return super().training_step(*args, **kwargs)
        self._rollout_seconds, started = 0.0, time.perf_counter()
        if self.args.entropy_coef_schedule == "linear":
            self.entropy_coef = self.args.entropy_coef * (1 - self.state.global_step / self.state.max_steps)
        with self._offloading:
            loss = super().training_step(*args, **kwargs)
        self._add_metrics({"time/update": time.perf_counter() - started - self._rollout_seconds})
        if self._step % self.micro_steps_per_generation == 0:
            self.records.finish()
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.engine is None:
            return inputs
        steps, accumulation = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        drawn = self._buffered_inputs is not before
        if drawn:
            if steps % accumulation == 0 or accumulation % steps == 0:
                window = min(steps, accumulation)
                self._buffered_inputs = exchange_rows(self._buffered_inputs, window, self.packer.arranged)
            inputs = self._buffered_inputs[self._step % steps]
        if self.critic is not None:
            self.critic.count_turns_of_step(
                self._step,
                self._buffered_inputs,
                drawn=drawn,
                every=self.micro_steps_per_generation,
                # At the end of an epoch of a data set a step may be shorter than gradient_accumulation_steps.
                length=self.current_gradient_accumulation_steps,
            )
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if self.engine is None:
            return super()._generate_and_score_completions(inputs)
        generation, first = self._step // self.micro_steps_per_generation, self._local(len(inputs)).start
        if isinstance(inputs[0], Trajectory):  # of `update`
            trajectories: list[Trajectory] = inputs  # type: ignore[assignment]
            rows, indices = rows_of_episodes(trajectories), list(range(first, first + len(inputs)))
            given = self._reward(rows, trajectories)
            played = PlayedGroups(trajectories, rows, indices, given, self._collate(trajectories, given))
        else:
            played = self.rollouts.play(inputs, generation, self._pending_extra_logs)
        trajectories, rewards, batch = played.trajectories, played.rewards, played.batch
        self.scorer.prepare_packing(batch)
        # With a reference every row is scored, and before credit, since the penalty may enter it.
        scores = self._score(batch) if self.beta != 0.0 else None
        if scores is not None and self.args.kl_placement != "loss":
            self._penalize(batch, scores)
        read = None
        if self.critic is not None:
            targets_of = (lambda turns: self.assign_credit(turns).columns[TARGETS]) if self.targets_by_row else None
            read = self.critic.read(batch, self._trained(batch), self._step, targets_of)
        credit = self._credit(batch, read, rewards)
        scores = scores or self._score(batch, credit.advantages)
        output = self._train_batch(batch, credit, scores, read)
        self._open_gap(batch, scores, output.tool_mask > 0)
        self._add_metrics(self.watch.measure(generation, trajectories))
        metrics = self.episode_log.summarize(trajectories, rewards, self._rollout_seconds, played.discarded)
        metrics |= (
            played.metrics | self.sampler.sync_metrics() | drained_metrics(self._pending_metrics, self.accelerator)
        )
        self._add_metrics(metrics)
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        self.episode_log.fill_tables(
            self._logs, self._pending_extra_logs, trajectories, rewards, credit.advantages, batch.turn_mask
        )
        values = None if read is None else read.turn_values
        self.records.begin(generation, played, batch, credit.advantages, values)
        return output.to_trl()

    def _play(self, specs: list[EpisodeSpec]) -> list[Trajectory]:
        """Play episodes with the current policy."""
        assert self.engine is not None
        started = time.perf_counter()
        with self.sampler.generator() as generator:
            trajectories = self.engine.run(specs, generator)
        self._rollout_seconds += time.perf_counter() - started
        return trajectories

    def _collate(self, trajectories: list[Trajectory], per_function: torch.Tensor) -> TurnBatch:
        """Make the batch. All rewards (B, functions) of all ranks but the first function's, the return, are added to each
        episode's last turn."""
        batch = collate(
            trajectories,
            pad_token_id=self._tokenizer.pad_token_id,
            end_token_id=self.eos_token_ids[0],
            pad_to_multiple_of=self.pad_to_multiple_of,
            device=self.accelerator.device,
        )
        weighted = per_function * self.reward_weights.to(per_function.device)
        extra = weighted[self._local(len(batch.turn_rewards)), 1:].nansum(dim=1)
        rows = torch.arange(len(extra), device=extra.device)
        last = (batch.turn_mask.sum(dim=1) - 1).clamp(min=0)
        batch.turn_rewards[rows, last] += extra * batch.turn_mask.any(dim=1)
        return batch

    def _zero_advantage_groups(self, batch: TurnBatch) -> list[bool]:
        """Return for each group of all ranks whether the credit rule gives none of its turns an advantage.

        A penalty for leaving the reference is not part of it.
        """
        turns = gather_turns(batch, self.accelerator)
        advantages, eps = self.assign_credit(turns).advantages, self.args.zero_advantage_eps
        return zero_advantage_groups(advantages, turns.mask, eps, self.num_generations).tolist()

    def _reward(self, rows: list[dict[str, Any]], trajectories: list[Trajectory]) -> torch.Tensor:
        """Compute rewards (B, functions) of all ranks, NaN for failed episodes. Every rank must pass equally many rows."""
        rewards = self._calculate_rewards(**reward_inputs(rows, trajectories))
        return self.reward_columns.without_failed(rewards, trajectories)

    def _score(self, batch: TurnBatch, advantages: torch.Tensor | None = None) -> Scores:
        """Score policy and reference where the step needs them; with ``advantages`` (B, K), maybe only rows with one."""
        rows = None
        if advantages is not None and self._skips_zero_advantage:
            rows = self.scorer.even_rows(with_advantage(advantages, batch.turn_mask, self.args.zero_advantage_eps))
        old = self._scores_old_policy or self.args.kl_placement != "loss"
        return self.scorer.score(batch, old=old, reference=self.beta != 0.0, rows=rows)

    def _penalize(self, batch: TurnBatch, scores: Scores) -> None:
        """Log the divergence from the reference, and subtract it from the rewards with ``kl_placement="reward"``."""
        assert scores.old is not None and scores.reference is not None
        trained = batch.valid_mask
        totals = torch.stack([((scores.old - scores.reference) * trained).sum(), trained.sum().float()])
        total, tokens = self.accelerator.reduce(totals, reduction="sum")
        self._add_metrics({"kl": (total / tokens.clamp(min=1.0)).item()})
        if self.args.kl_placement == "reward":
            turns = turn_log_ratio(scores.old, scores.reference, batch.turn_ids, batch.turn_mask.size(1))
            batch.turn_rewards -= self.beta * turns * batch.turn_mask

    def _credit(self, batch: TurnBatch, read: CriticValues | None, rewards: torch.Tensor) -> Credit:
        """Compute the credit of the local rows, with statistics over all ranks, before TRL shuffles rows."""
        values = (None, None) if read is None else (read.turn_values, read.final_values)
        turns = gather_turns(batch, self.accelerator, *values)
        credit, mask = self.assign_credit(turns), turns.mask
        if not self.args.groupless:
            eps, size = self.args.zero_advantage_eps, self.num_generations
            none = zero_advantage_groups(credit.advantages, mask, eps, size)
            self._add_metrics({"zero_advantage_groups": none.double().mean().item()})
        if self.args.group_filter == "variance":
            returns = totals(rewards, self.reward_weights)
            credit, mask = filter_groups(credit, mask, returns, self.num_generations, self.args.group_filter_share)
        credit = normalize(credit, mask, self.args, per_sequence=self.importance_sampling_level == "sequence")
        self._add_metrics(credit.metrics | credit_by_turn(turns.rewards, credit.advantages, turns.mask))
        size, num_turns = batch.turn_mask.shape
        return credit.local(self._local(size), num_turns)

    def _trained(self, batch: TurnBatch) -> torch.Tensor:
        """Return (B, T) bool, True on the tokens that enter the loss."""
        return batch.valid_mask & ~batch.truncated[:, None] if self.mask_truncated_completions else batch.valid_mask

    def _train_batch(self, batch: TurnBatch, credit: Credit, scores: Scores, read: CriticValues | None) -> TrainBatch:
        """Make the generation batch of the loss, with TRL's columns and those of the credit rule."""
        num_turns = batch.turn_mask.size(1)
        live = with_advantage(credit.advantages, batch.turn_mask, self.args.zero_advantage_eps)
        if self.critic is not None and read is not None and read.by_token:
            spread = self.critic.token_advantages(read, credit.columns[TARGETS], batch)
        else:
            spread = spread_to_tokens(credit.advantages, batch.turn_ids)
        if self.args.kl_placement == "advantage":
            assert scores.old is not None and scores.reference is not None
            unit = "turn" if self._turn_ratios else self.importance_sampling_level
            penalty = self.beta * token_kl_penalty(scores.old, scores.reference, batch.turn_ids, unit)
            spread, live = spread - penalty, live | penalty.any(dim=1)
        if self._turn_ratios and self.args.turn_ratio_pooling == "sum":
            lengths = turn_lengths(batch.turn_ids, num_turns).clamp(min=1)
            spread = spread / spread_to_tokens(lengths, batch.turn_ids).clamp(min=1)
        trained = self._trained(batch)
        if credit.kept is not None:
            trained &= credit.kept[:, None]
        output = TrainBatch(
            prompt_ids=batch.prompt_ids,
            prompt_mask=batch.prompt_mask,
            completion_ids=batch.completion_ids,
            completion_mask=batch.completion_mask,
            tool_mask=trained.long(),
            turn_ids=batch.turn_ids,
            sampling_per_token_logps=batch.sampling_logprobs,
            advantages=spread,
            num_items_in_batch=self.accelerator.gather(trained.sum()).sum(),
            old_per_token_logps=scores.old if self._scores_old_policy else None,
            ref_per_token_logps=scores.reference if self.args.kl_placement == "loss" else None,
            episodes=torch.arange(len(batch.turn_ids), device=trained.device),
            has_advantage=live,
            recorded_reference=scores.reference,
            turn_columns={name: column for name, column in credit.columns.items() if name != TARGETS},
        )
        if self._corrects_mismatch:
            assert scores.old is not None
            scored = trained & scores.scored[:, None]
            output.importance_sampling_ratio, metrics = mismatch_weights(
                self.args, batch, scores.old, scored, self.accelerator
            )
            self._add_metrics(metrics)
        if self.critic is not None and read is not None:
            self.critic.add_columns(output, read, credit.columns[TARGETS], batch)
        return output

    def _open_gap(self, batch: TurnBatch, scores: Scores, trained: torch.Tensor) -> None:
        """Compare sampler and trainer if the old policy was scored; otherwise the first forward pass of the loss does."""
        self.gap.open()
        if scores.old is not None:
            counted = trained & scores.scored[:, None]
            self.gap.add(scores.old, batch.sampling_logprobs, counted, batch.turn_ids, batch.prompt_mask)
            self._close_gap()

    def _close_gap(self) -> None:
        closed = self.gap.close(is_first_step=self.state.global_step == 0)
        self._add_metrics(closed.metrics)
        self.watch.note("sampler_gap", closed.warning)

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        if self.engine is None:
            return super()._compute_loss(model=model, inputs=inputs)
        if self.critic is not None:
            # The reference's forward pass left only the policy trainable.
            self.critic.thaw()
        whole = TrainBatch.from_trl(inputs)
        read = whole.with_advantage() if self._skips_zero_advantage else whole
        loss = self.passes.loss(model, read, whole, lambda part: self._loss_of(model, part))
        first_epoch_ends = self._step % self.micro_steps_per_generation == self.args.steps_per_generation - 1
        if self.is_in_train and self.gap.is_open and (first_epoch_ends or self.accelerator.sync_gradients):
            # Before the backward pass, in which DeepSpeed takes its optimizer step.
            self._close_gap()
        return loss

    def _loss_of(self, model: Any, part: Pass) -> torch.Tensor:
        """Compute the part of the micro-batch's loss that is due to the rows of one pass."""
        with self._handing_over(part) as handed:
            loss = part.share * super()._compute_loss(model=model, inputs=handed.inputs)
        assert handed.log_probs is not None and handed.log_ratio is not None
        self.records.observe(handed.batch, handed.log_probs, handed.log_ratio)
        if self.critic is not None:
            loss, metrics = self.critic.add_loss(loss, handed.values, handed.batch)
            self._add_metrics(metrics)
        return loss

    @contextmanager
    def _handing_over(self, part: Pass) -> Iterator[_LossPass]:
        """Pass the batch to the methods that TRL's loss calls, and set the attributes that weigh its terms."""
        beta, use_vllm, entropy_coef = self.beta, self.use_vllm, self.entropy_coef
        if part.share and part.entropy_share != part.share:
            self.entropy_coef = entropy_coef * part.entropy_share / part.share
        if self.args.kl_placement != "loss":
            self.beta = 0.0  # the penalty is in the advantages already
        self.use_vllm = self._corrects_mismatch  # TRL's loss weighs tokens on this condition
        self._loss_pass = _LossPass(part.batch, part.batch.to_trl())
        try:
            with gathering_ragged(self.accelerator):
                yield self._loss_pass
        finally:
            self._loss_pass, self.beta, self.use_vllm = None, beta, use_vllm
            if self.entropy_coef != entropy_coef and not self.use_adaptive_entropy:
                self.entropy_coef = entropy_coef
                self._metrics["train"]["entropy_coef"] = [entropy_coef] * len(self._metrics["train"]["entropy_coef"])

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, scored: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute as TRL does, but of the tokens ``scored`` (B, T) alone; in the loss, of those that enter it."""
        if self.engine is None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        handed, values = self._loss_pass, None
        if handed is not None:
            scored = handed.batch.counted
            if self.critic is not None:
                values = self.critic.reading(handed.batch, lambda values: setattr(handed, "values", values))
        model = self.packer.reading(model, scored, values)
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if handed is None:
            return log_probs, entropies, aux_loss
        batch = handed.batch
        if entropies is not None:
            self.turn_entropies.add(entropies, batch.turn_ids, batch.counted)
        if batch.old_per_token_logps is not None:
            # The ratio of a token that is not scored is 1.
            log_probs = torch.where(batch.counted, log_probs, batch.old_per_token_logps)
        if self.gap.is_open:
            sampled = batch.sampling_per_token_logps
            self.gap.add(log_probs, sampled, batch.counted, batch.turn_ids, batch.prompt_mask)
        old = log_probs.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
        handed.log_probs, handed.log_ratio = log_probs.detach(), log_probs.detach() - old
        if not self._turn_ratios:
            return log_probs, entropies, aux_loss
        num_turns = int(batch.turn_ids.max()) + 1
        pooled = pool_log_probs(log_probs, old, batch.turn_ids, max(num_turns, 1), self.args.turn_ratio_pooling)
        handed.log_ratio = pooled.detach() - old
        if batch.ref_per_token_logps is not None:
            # The KL term must still see the policy's own distance to the reference.
            handed.inputs["ref_per_token_logps"] = batch.ref_per_token_logps + (pooled - log_probs)
        return pooled, entropies, aux_loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.engine is not None:
            self.guard.inspect(norm, self.model, self.optimizer, self.accelerator, self.state.global_step)
            self._metrics["train"]["skipped_steps"] = [float(self.guard.skipped)]
        return norm

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        with self.updates.watched(tr_loss, grad_norm, kwargs.get("learning_rate")):
            if self.engine is None:
                return super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
            self._add_metrics(self.turn_entropies.close(self.accelerator))
            with self.watch.looking(self.state.global_step, self._metrics["train"]):
                super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # --------------------------------------------------------------------------------------------------- evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        num_episodes: int | None = None,
        greedy: bool | None = None,
    ) -> dict[str, float]:
        """Play many episodes and report their return, without training or changing the training stream.

        Args:
            eval_dataset: Rows passed to ``reset``, repeated in order up to ``num_episodes``; several data sets by name; or
                the name of one of the trainer's. Default: the trainer's ``eval_dataset``; without any, the environment
                gets seeds only.
            ignore_keys: Accepted for ``Trainer``'s sake; there are no model outputs to ignore.
            metric_key_prefix: Prefix of the metrics.
            num_episodes: Over all processes. Default: ``args.num_eval_episodes``.
            greedy: Take the likeliest token instead of sampling. Default: ``args.eval_greedy``.

        Returns:
            The metrics of :func:`agile_trainers.rollout.metrics.summarize` under ``eval_``, with ``eval_return`` (the mean
            episode return, for ``metric_for_best_model="return"``), its standard error ``eval_return_sem``, and
            ``eval_episodes``; under TRL's names ``eval_reward`` (the return and the weighted reward functions), its
            ``eval_reward_std``, ``eval_rewards/<name>/mean`` and ``.../std``, ``eval_completions/...``, and what reward
            functions log. Seeds are the same in every evaluation. Of several environments, these are over all of them, and
            ``eval_<name>_return`` and so on are over one; without rows each plays equally many episodes.
        """
        if self.engine is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        eval_dataset = rows_of(self.setup.eval_rows, eval_dataset)
        if isinstance(eval_dataset, dict):
            results: dict[str, float] = {}
            for name, part in eval_dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                results |= self.evaluate(part, ignore_keys, prefix, num_episodes=num_episodes, greedy=greedy)
            return results
        count = self.args.num_eval_episodes if num_episodes is None else num_episodes
        if count < 1:
            raise ValueError(f"num_episodes must be at least 1, got {count}.")
        training = self.model.training
        played = self._play_evaluation(eval_dataset, count, greedy, metric_key_prefix)
        # TRL's `log` files metrics under the mode of the model.
        self.model.eval()
        with completions_table(self, played, metric_key_prefix):
            self.log(played.metrics)
        self.model.train(training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, played.metrics)
        self.records.write_evaluation(metric_key_prefix, played)
        self.cards.note_evaluation(metric_key_prefix, played.metrics)
        return played.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Play one episode for every row and return the conversations, without training, logging or writing files.

        Args:
            test_dataset: Rows handed to ``reset``.
            ignore_keys: Accepted for ``Trainer``'s sake; there are no model outputs to ignore.
            metric_key_prefix: Prefix of the metrics.

        Returns:
            ``predictions``: an object array (rows,) of conversations, each the messages after the prompt, of all processes;
            ``metrics``: those of :meth:`evaluate`. There are no ``label_ids``.
        """
        if self.engine is None:
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)
        rows = list(kept_columns(self.args, test_dataset, "test_dataset"))
        played = self._play_evaluation(rows, len(rows), None, metric_key_prefix)
        said = np.empty(len(rows), dtype=object)
        for place, messages in gather_object(list(zip(played.places, (t.messages for t in played.trajectories)))):
            said[place] = messages
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, played.metrics)
        return PredictionOutput(predictions=said, label_ids=None, metrics=played.metrics)

    def _play_evaluation(self, dataset: Any, count: int, greedy: bool | None, prefix: str) -> Evaluated:
        return self.evaluator.play(
            dataset,
            count,
            greedy,
            prefix,
            pending_metrics=self._pending_metrics,
            pending_columns=self._pending_extra_logs,
        )

    # --------------------------------------------------------------------------------------------------- reference

    @contextmanager
    def use_adapter(self, name: str | None) -> Iterator[None]:
        """Play and compute with another adapter of the model inside a ``with`` block.

        ``evaluate``, ``predict``, ``rollout`` and the model's own ``forward`` use it there; what is trainable does not
        change. ``with trainer.use_adapter("ref"): trainer.evaluate(metric_key_prefix="reference")`` plays the reference.

        Args:
            name: ``"default"`` (the policy), ``"ref"``, ``"critic"`` or another adapter of the model; None for the base
                model alone.

        Raises:
            ValueError: If there is no adapter of that name, or vLLM samples, which has the policy only.
        """
        model = self.accelerator.unwrap_model(self.model)
        adapters = list(model.peft_config) if isinstance(model, PeftModel) else []
        if not adapters or (name is not None and name not in adapters):
            raise ValueError(
                f"There is no adapter {name!r}: the model has {', '.join(map(repr, adapters)) or 'none'}. The reference is "
                "an adapter with reference_adapter=True, and use_adapter(None) plays the base model of an adapter."
            )
        if self.use_vllm:
            raise ValueError(
                "use_adapter() switches the trainer's own model, and vLLM samples with the policy. Save the model and play "
                "its folders with evaluate_policy(), or leave use_vllm unset."
            )
        before, self._adapter = self._adapter, name
        try:
            with running(model, name):
                yield
        finally:
            self._adapter = before

    def _check_policy_runs(self) -> None:
        if self._adapter != POLICY:
            raise RuntimeError(
                f"Training inside use_adapter({self._adapter!r}) would not train the policy. Leave the block."
            )

    def update_reference(self) -> None:
        """Make the current policy the reference. Batches that were scored before keep the earlier reference.

        Raises:
            ValueError: If there is no reference (``beta=0``), or it is the frozen base model (LoRA without
                ``reference_adapter``), or there is no environment.
        """
        if self.engine is None:
            raise ValueError("update_reference() moves the reference of a run with an environment; pass `environment`.")
        self.reference.update()

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as ``Trainer.save_model`` does, a record of its origin (``agile_trainers.json``) and a card.

        With ``push_to_hub=True`` it is pushed too; where the Hub cannot be reached, one warning says how to do so later.
        """
        folder = Path(output_dir or self.args.output_dir)
        if self.engine is not None and self.args.should_save:
            write_json(folder / RECORD, self.checkpoints.record())
            if self.checkpoints.building is None:
                note_private(folder, self.environment, recorded_options(self.args))
        sharded = is_zero3(self.accelerator.state.deepspeed_plugin) and isinstance(self.model, PeftModel)
        with naming_full_disk(folder), every_adapter_trainable(self.model) if sharded else nullcontext():
            super().save_model(output_dir, _internal_call=True)
            if self.args.should_save:
                clean_tokenizer(folder, self.processing_class)
                self.cards.write(folder)
        if self.args.push_to_hub and not _internal_call:
            try:
                self.push_to_hub(commit_message="Model save")
            except HubUnreachableError as error:
                if not self._told_unreachable:
                    logger.warning("%s", error)
                self._told_unreachable = True

    def _record(self, parent: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the model card says of the run's origin."""
        if self.engine is not None:
            return self.checkpoints.record()
        model, algorithm = self.accelerator.unwrap_model(self.model), self._name.removeprefix("Multi-turn ")
        return record_without_environment(algorithm, model, self.state.global_step, parent)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.engine is None:
            return super()._save_checkpoint(model, trial)
        check_finite(self.model, self.accelerator, self.state.global_step)
        run = Path(self._get_output_dir(trial))
        rollout = RolloutState(self._step, self._buffered_inputs, self.watch.state(), dict(vars(self.guard)))
        rollout.pass_tokens, rollout.episodes = self.passes.budget, self.records.unfinished
        rollout.packing, rollout.tasks = dict(vars(self.packer.state)), self.rollouts.state()
        with self.checkpoints.saving(run, rollout) as building:
            super()._save_checkpoint(model, trial)
            self.reference.save(building)
        if self.args.push_to_hub:
            self.hub.push_checkpoint(run / building.name)
        self.checkpoints.rotate(run)

    def _get_output_dir(self, trial: Any) -> str:
        building = None if self.engine is None else self.checkpoints.building
        return super()._get_output_dir(trial) if building is None else str(building)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        if isinstance(self.model, PeftModel) and any(
            file.parent != folder for file in folder.glob("*/adapter_config.json")
        ):
            if self.is_fsdp_enabled:  # `Trainer` restores the active one alone
                for adapter in self.model.peft_config:
                    restore_adapter(self.model, adapter, folder if adapter == POLICY else folder / adapter)
            else:
                # Finding adapters in subfolders, `Trainer` leaves out the one beside them.
                self.model.load_adapter(str(folder), POLICY, is_trainable=True)
        for name, parameter in self.model.named_parameters():
            # PEFT loads adapters in fp32; TRL trains those of a quantized base in bf16.
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
        if self.engine is not None:
            self.reference.restore(folder)
        if self.critic is not None:
            self.critic.thaw()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.engine is None or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        options = [] if self.is_deepspeed_enabled else optimizer_options(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_deepspeed_enabled:
            self.reference.restore_after_deepspeed(Path(checkpoint))
        else:
            apply_options(self.optimizer, self.lr_scheduler, options)
        rollout = self.checkpoints.load_rollout(checkpoint)
        self.watch.restore(rollout.watch)
        self.guard = StepGuard(**rollout.skipped_steps)
        self.passes.restore(rollout.pass_tokens)
        self.packer.state = PackingState(**rollout.packing)
        self.rollouts.restore(rollout.tasks)
        self._restore_rollout(rollout.steps, rollout.micro_batches)
        self.records.resume(
            rollout.episodes, rollout.steps // self.micro_steps_per_generation, step_of(Path(checkpoint))
        )

    def _restore_rollout(self, steps: int, micro_batches: list[Batch] | None) -> None:
        self._step, self._buffered_inputs = steps, micro_batches
        if self.critic is not None:
            self.critic.forget_step()

    def _load_best_model(self) -> None:
        if self.engine is not None:
            # Its path comes from a checkpoint's state, and engines read it as they read one to resume from.
            best = Path(self.state.best_model_checkpoint)
            try:
                on_each_disk(self.args.should_save, lambda: check_complete(best, resumes=False))
            except CheckpointError as error:
                logger.warning("The best checkpoint is not loaded, and the last weights are kept: %s", error)
                self.state.best_model_checkpoint = None  # with `save_total_limit=1`, `Trainer` would delete all others
                return
        super()._load_best_model()
        if self.critic is not None:
            self.critic.restore(Path(self.state.best_model_checkpoint))

    # ---------------------------------------------------------------------------------------------------------- Hub

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository and check write access to it; ``Trainer`` calls this at construction.

        Offline (``HF_HUB_OFFLINE=1``), there is no check and no push while training, and a warning says so.

        Raises:
            ValueError: If the Hub refuses the repository's name or the token.
            HubUnreachableError: If it cannot be reached.
        """
        if not self.is_world_process_zero():
            return
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        if is_offline_mode():
            logger.warning(
                "HF_HUB_OFFLINE=1: nothing is pushed to %s. Push the run later with trainer.push_to_hub().", name
            )
            self.hub_model_id, self.push_in_progress = None, None
            return
        token = token or self.args.hub_token

        def make() -> str:
            super(MultiTurnTrainer, self).init_hf_repo(token=token)
            return str(self.hub_model_id)

        with reporting_unreachable(name):
            make_repository("hub_model_id", name, token, make)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model to ``output_dir`` and push it: policy, tokenizer, record, model card and learning curve.

        Reference, critic and episodes only if ``args.hub_extras`` asks for them; the optimizer never (but see
        ``hub_strategy``).

        Args:
            commit_message: Message of the commit.
            blocking: Wait for the upload.
            token: Hub token; no file contains it. Default: ``args.hub_token``, or the one that ``hf auth login`` stored.
            revision: Branch. Default: ``args.hub_revision``.
            **kwargs: ``dataset_name`` and ``tags`` of the model card.

        Returns:
            ``huggingface_hub.CommitInfo``, a future of it if not ``blocking``; None on all processes but the main one.

        Raises:
            HubUnreachableError: If the Hub cannot be reached. The model is saved, and the message says how to push it later.
        """
        token = token or self.args.hub_token
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        if self.hub_model_id is None:
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            with reporting_unreachable(name, self.args.output_dir):
                if is_offline_mode():
                    raise OfflineModeIsEnabled
                self.init_hf_repo(token=token)
        self.create_model_card(**kwargs)
        self._finish_current_push()
        return self.hub.push(commit_message, blocking, token, revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push nothing where `Trainer` calls it with episodes: the folder is incomplete. See :meth:`_save_checkpoint`."""
        if self.engine is None:
            self.hub.push_checkpoint(Path(checkpoint_folder))

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self.hub.summarize()

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write ``README.md`` and the learning curve to ``output_dir``.

        Args:
            model_name: Title. Default: the last part of ``hub_model_id``, or of ``output_dir``.
            dataset_name: Hub id of the rows, if there were any.
            tags: More tags.
        """
        if not self.is_world_process_zero():
            return
        self.cards.write(
            Path(self.args.output_dir),
            model_name=model_name,
            dataset_name=dataset_name,
            tags=[tags] if isinstance(tags, str) else tags or (),
        )
