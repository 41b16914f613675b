"""Defines the trainer: the overrides of TRL and ``Trainer``, in the order in which a run and a step call them.

``MultiTurnTrainer`` replaces the part between a dataset row and TRL's loss: rollout, rewards, credit. The loss itself and
the optimizer loop stay TRL's. Everything with state of its own is an object: the sampler, the checkpoints, the Hub's
repository, the reference, the log of episodes. Without an environment playing and training are TRL's; saving, cards and
the Hub are ours there too. The overrides of the Hub are last. No other file overrides a private method of TRL's
``GRPOTrainer`` or of ``Trainer``.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast

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
    SavedAdapters,
    every_adapter_trainable,
    explaining_scope,
    parent_of,
    plain_copies,
    restore_adapter,
    running,
)
from agile_trainers.adapters.copies import Snapshots
from agile_trainers.adapters.folders import RECORD, CheckpointError, naming_full_disk, write_json
from agile_trainers.adapters.sharding import is_zero3
from agile_trainers.adapters.untrusted import LOADERS, RESUMING, naming_folder
from agile_trainers.checkpoints.disclosure import check_special_tokens, clean_tokenizer, note_private
from agile_trainers.checkpoints.hub import HubPushes, HubUnreachableError, make_repository, reporting_unreachable
from agile_trainers.checkpoints.integrity import check_complete, step_of
from agile_trainers.checkpoints.machines import on_each_disk
from agile_trainers.checkpoints.model_card import RunCards
from agile_trainers.checkpoints.record import RolloutState, RunCheckpoints, record_without_environment
from agile_trainers.checkpoints.resumed_options import apply_options, optimizer_options, recorded_options
from agile_trainers.checkpoints.stopping import GracefulStop
from agile_trainers.config.batch_defaults import decide_learning_rate
from agile_trainers.config.launch_checks import check_engine
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.rules import check_own_loss, check_weighs_decisions, skips_zero_advantage
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.monitor.episode_log import EpisodeLog
from agile_trainers.monitor.evaluation_table import Evaluated, completions_table
from agile_trainers.monitor.health_checks import HealthChecks, PolicyMeasurements
from agile_trainers.monitor.nonfinite import StepGuard, check_finite
from agile_trainers.monitor.progress import close_tables, use_table
from agile_trainers.monitor.rollout_log import RolloutLog
from agile_trainers.objectives.advantages import with_advantage
from agile_trainers.objectives.drift import DECISION
from agile_trainers.objectives.kept_sets import KeptSets
from agile_trainers.packing.packer import Packer, PackingState, kept_of
from agile_trainers.paths import Paths
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_probe import planned_tokens
from agile_trainers.sampling.delivery import Delivery
from agile_trainers.sampling.mismatch import MismatchMonitor
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.step.ahead import BatchesAhead, RowOrder, check_plays_ahead
from agile_trainers.step.batch import penalize, scores_old_policy, train_batch, trained_tokens
from agile_trainers.step.credit import Credit, CreditAssignment, CreditInputs, Judged, TurnEntropies
from agile_trainers.step.critic import TARGETS, Critic, CriticValues, NoCritic, attach_critic
from agile_trainers.step.draws import Drawn, EpisodeDraws
from agile_trainers.step.drift import weights_of_turns
from agile_trainers.step.dropout import switch_off_noise
from agile_trainers.step.log_probs import BatchLogProbs, LogProbPasses, Models
from agile_trainers.step.loss import LossInputs, LossOutput, LossPass, averages, checked_output, divisor
from agile_trainers.step.play import Collator, EpisodeRunner, GroupRollouts, PlayedGroups
from agile_trainers.step.reward import Rewards
from agile_trainers.step.task_sampling import TaskSampling
from agile_trainers.step.token_batches import TokenBatch, TokenBatches, gathering_ragged, remember_attributes
from agile_trainers.train_batch import Batch, TrainBatch, exchange_rows, own_rows, read_inputs
from agile_trainers.trainers.arguments import check_argument_names, check_order, check_trainer_arguments, named_model
from agile_trainers.trainers.evaluation import EpisodeEvaluator, kept_columns, rows_of
from agile_trainers.trainers.load_adapter import TrainerInputs, load_adapter
from agile_trainers.trainers.manual_loop import Updates
from agile_trainers.trainers.reference import ReferencePolicy
from agile_trainers.trainers.setup import (
    RunSetup,
    activation_offloading,
    check_auxiliary_loss,
    make_packer,
    make_rollout_engine,
    prepare_policy,
    prepare_run,
)
from agile_trainers.types import Trajectory, TurnBatch

logger = logging.get_logger(__name__)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def with_episodes(method: _Method) -> _Method:
    """Make an override act with an environment only; without one the method is TRL's.

    An override without this decorator acts in both cases.
    """

    @functools.wraps(method)
    def chosen(trainer: MultiTurnTrainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.engine is None:
            return getattr(super(MultiTurnTrainer, trainer), method.__name__)(*args, **kwargs)
        return method(trainer, *args, **kwargs)

    return cast(_Method, chosen)


def closed_on_error(init: _Method) -> _Method:
    """Let a constructor that fails close the trainer, so that what it has begun ends at once."""

    @functools.wraps(init)
    def closing(trainer: MultiTurnTrainer, *args: Any, **kwargs: Any) -> None:
        try:
            init(trainer, *args, **kwargs)
        except BaseException:
            trainer.close()
            raise

    return cast(_Method, closing)


class MultiTurnTrainer(GRPOTrainer):
    """GRPO's machinery over multi-turn episodes; a subclass adds the credit rule, :meth:`assign_credit`.

    A trainer is a context manager: :meth:`close` frees what it holds beside its model.

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
    ref_model: Any
    control: Any
    vllm_importance_sampling_correction: Any
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
    weighs_decisions: ClassVar[bool] = False
    """True if the credit rule multiplies rewards by ``CreditInputs.weights``; declared beside ``assign_credit``."""
    loss: Callable[[LossInputs], LossOutput] | None = None
    """The loss of one forward pass: a method ``loss(self, inputs: LossInputs) -> LossOutput``. None: TRL's."""
    loss_needs: ClassVar[Literal["episodes", "micro_batch"]] = "episodes"
    """Unit that :attr:`loss` gets at once: whole episodes, or all of a micro-batch, which is then never split."""
    _tag_names: ClassVar[list[str]] = ["trl", "agile-trainers"]
    _paper: ClassVar[dict[str, str]] = {}

    cards: RunCards
    # Made by the constructor, with an environment only.
    engine: RolloutEngine | None = None
    setup: RunSetup
    sampler: RolloutSampler
    packer: Packer
    log_prob_passes: LogProbPasses
    mismatch: MismatchMonitor
    reference: ReferencePolicy
    critic: Critic | NoCritic = NoCritic()
    evaluator: EpisodeEvaluator
    runner: EpisodeRunner
    rewards: Rewards
    credit: CreditAssignment
    rollouts: GroupRollouts
    snapshots: Snapshots
    """The adapters of earlier policies, with ``batches_ahead``."""
    health: HealthChecks
    """Says why the run does not learn."""
    episode_log: EpisodeLog
    rollout_log: RolloutLog
    checkpoints: RunCheckpoints
    hub: HubPushes
    stop: GracefulStop
    guard: StepGuard
    token_batches: TokenBatches
    turn_entropies: TurnEntropies
    updates: Updates

    _loss_pass: LossPass | None = None
    _adapter: str | None = POLICY
    """The adapter that runs, see :meth:`use_adapter`."""
    _closed = False
    _told_unreachable = False
    """True once a warning said that the Hub cannot be reached."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "assign_credit" in vars(cls):
            # What a parent declares of its own credit rule does not hold for another one.
            for declared in {"targets_by_row", "weighs_decisions"} - vars(cls).keys():
                setattr(cls, declared, False)
        if cls._name == GRPOTrainer._name:  # TRL's own; records and model cards name the algorithm by it
            cls._name = cls.__name__

    # ------------------------------------------------------------------------------------------------ construction

    def __new__(cls, *_: Any, **given: Any) -> MultiTurnTrainer:
        check_argument_names(cls, given)
        return super().__new__(cls)

    @closed_on_error
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
        check_order(reward_funcs)
        if args is None:
            args = self.config_class(output_dir=self._name.replace(" ", "-"))
        model = named_model(model)
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.environment = environment
        self.updates = Updates(self)
        setup: RunSetup | None = None
        if environment is None:
            if self.needs_environment:
                theirs = "trl_environment(...) with the same factory" if environment_factory is not None else "..."
                raise ValueError(
                    f"{type(self).__name__} needs an environment: `environment={theirs}`, --environment on the command line."
                )
            if self.loss is not None:
                raise ValueError(
                    f"{type(self).__name__} brings a loss of its own, which has no effect without an environment: the "
                    "trainer is TRL's there. Name one: `environment=...`, --environment on the command line."
                )
            if environment_factory is not None:
                logger.warning(
                    "environment_factory makes this TRL's own trainer: no credit per turn, no records of episodes. "
                    "environment=trl_environment(...) plays the same factory with both."
                )
            # TRL's own configuration will do for TRL's own trainer.
            args = args.without_environment() if isinstance(args, MultiTurnConfig) else args
        else:
            check_trainer_arguments(type(self), model, args, given)
            check_weighs_decisions(args, type(self))
            if self.loss is not None:
                check_own_loss(args, self.loss_needs)
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
            if args.vllm_server_start:  # the GPUs that this process leaves are the server's
                args._n_gpu = min(args.n_gpu, 1)
        # With use_vllm TRL would make an engine of its own.
        use_vllm, args.use_vllm = args.use_vllm, args.use_vllm and setup is None
        inputs = load_adapter(TrainerInputs(model, args, processing_class, quantization_config, peft_config))
        if setup is not None:
            adapter = inputs.peft_config is not None or isinstance(inputs.model, PeftModel)
            decide_learning_rate(inputs.args, adapter=adapter, own_optimizer=optimizers[0] is not None)
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
            use_table(self)
        self.hub = HubPushes(self)

    def _set_up(self, setup: RunSetup, inputs: TrainerInputs) -> None:
        """Make the parts of a run of episodes, after TRL's own constructor: the policy's, a step's, the log's."""
        args, accelerator = self.args, self.accelerator
        check_engine(accelerator, args)
        prepare_policy(self.model, self._tokenizer, auxiliary_loss=self.aux_loss_enabled)
        if self.aux_loss_enabled:
            own_loss = None if self.loss is None else type(self).__name__
            check_auxiliary_loss(args, own_loss, self.router_aux_loss_coef)
        self._turn_ratios = args.importance_sampling_level == "turn" and self.loss is None
        if self._turn_ratios:
            # TRL's loss sees log-probabilities whose token ratios already are the turn's.
            self.importance_sampling_level = "token"
        self.engine = make_rollout_engine(
            args, setup, self.processing_class, self.eos_token_ids, self.model.config, needs_anchors=self.needs_anchors
        )
        self.reference = ReferencePolicy(self, inputs.saved)
        self._switch_off_noise()
        if args.device.type == "cpu":
            # With several processes accelerate says "cpu:0", which `Trainer` hands to `torch.load`, which knows none.
            vars(args)["_setup_devices"] = torch.device("cpu")
        self.checkpoints = RunCheckpoints(self, self._name, self.environment, inputs.saved)
        self.stop = GracefulStop(accelerator)
        self.add_callback(self.stop)
        self.guard = StepGuard()
        self._make_step(setup, self.engine, inputs.saved)
        token_ids = (self._tokenizer.pad_token_id, self.eos_token_ids[0])
        measurements = PolicyMeasurements(self.log_prob_passes, accelerator, args.diagnosis_interval, token_ids)
        self.health = HealthChecks(args, measurements, speaks=accelerator.is_main_process)
        self.rollout_log = RolloutLog(args, accelerator, self.processing_class, self.checkpoints, self.health)
        self.add_callback(self.rollout_log)
        known = self.engine.reports_success
        self.episode_log = EpisodeLog(args, self.rewards, known, self.environment, self.health.note)
        playing = self.engine.beside() if args.batches_ahead else self.engine
        self.evaluator = EpisodeEvaluator(args, accelerator, playing, self.sampler, setup.mixture, self.rewards)

    def _make_step(self, setup: RunSetup, engine: RolloutEngine, saved: SavedAdapters | None) -> None:
        """Make the parts of a step: what samples and what all forward passes share, then those that use it."""
        args, accelerator, tokenizer = self.args, self.accelerator, self._tokenizer
        self._offloading = activation_offloading(args, self.model)
        policy = accelerator.unwrap_model(self.model)
        self.sampler = RolloutSampler(
            args, accelerator, policy, lambda: self.model_wrapped, engine, tokenizer, self._dist
        )
        self.packer = make_packer(args, accelerator, self.model, self.ref_model, auxiliary_loss=self.aux_loss_enabled)
        self.token_batches = TokenBatches(
            args, accelerator, self.packer, self.model,
            auxiliary_loss=self.aux_loss_enabled, metrics=self._metrics["train"],
            loss_needs=None if self.loss is None else self.loss_needs,
        )  # fmt: skip
        self.sampler.bound_by(self.token_batches.room, planned_tokens(engine, setup.first_states))
        self.runner = EpisodeRunner(engine, self.sampler)
        self.rewards = Rewards(
            self._calculate_rewards, self.reward_func_names, self.reward_weights, accelerator,
            self._pending_metrics, self._pending_extra_logs,
        )  # fmt: skip
        per_sequence = args.importance_sampling_level == "sequence"
        self.credit = CreditAssignment(self.assign_credit, args, accelerator, per_sequence=per_sequence)
        self.rollouts = self._make_rollouts(setup, engine)
        self.log_prob_passes = LogProbPasses(
            self._get_per_token_logps_and_entropies, self.packer, self.token_batches, args, accelerator
        )
        if args.has_critic:
            attach_critic(self.model, args, saved, self.optimizer, name=type(self).__name__)
            targets_of = (lambda turns: self.assign_credit(turns).columns[TARGETS]) if self.targets_by_row else None
            self.critic = Critic(args, accelerator, self.packer, self.token_batches, targets_of)
            self._switch_off_noise()
            self.critic.unfreeze(self.model)
        delivery = Delivery(accelerator, lambda: accelerator.unwrap_model(self.model))
        self.mismatch = MismatchMonitor(accelerator, args.max_logprob_gap, self.sampler.conditions, delivery)
        self.turn_entropies = TurnEntropies()
        self.token_batches.observers = [
            self.turn_entropies.remember,
            self.mismatch.meter.remember,
            self.critic.remember,
            functools.partial(remember_attributes, self._offloading),
        ]

    def _make_rollouts(self, setup: RunSetup, engine: RolloutEngine) -> GroupRollouts:
        """Make what draws and plays generation batches; with ``batches_ahead``, before their update."""
        args, accelerator = self.args, self.accelerator
        tasks = TaskSampling(args, setup.tasks, args.generation_batch_size // args.num_generations)
        draws = EpisodeDraws(
            args, accelerator, tasks,
            dataset=self.train_dataset, rows_are_options=setup.rows_are_options, mixture=setup.mixture,
        )  # fmt: skip
        ahead = None
        if args.batches_ahead:
            check_plays_ahead(accelerator.unwrap_model(self.model), self.train_dataset)
            self.snapshots = Snapshots(lambda: accelerator.unwrap_model(self.model))
            order = RowOrder(super()._get_train_sampler, args.generation_batch_size, self.micro_steps_per_generation)

            def draw(generation: int) -> Drawn:
                return draws.batch_of(order.of(generation), generation)

            ahead = BatchesAhead(args.batches_ahead, engine, self.sampler, self.snapshots, draw)
        end_token = self.eos_token_ids[0]
        collator = Collator(self._tokenizer.pad_token_id, end_token, args.pad_to_multiple_of, accelerator.device)
        return GroupRollouts(args, accelerator, draws, self.runner, self.rewards, collator, self.credit, ahead)

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
    def _last_generation(self) -> int:
        """Index of the last generation batch of the run that is under way."""
        micro_steps = self.state.max_steps * self.args.gradient_accumulation_steps
        return -(-micro_steps // self.micro_steps_per_generation) - 1

    @property
    def _models(self) -> Models:
        """The policy and its reference, as distributed training has them now."""
        return Models(self.model, self.ref_model)

    @property
    def _skips_zero_advantage(self) -> bool:
        """True if episodes without advantage are left out of the forward passes."""
        if self.loss is not None:  # whose other terms are not known
            return self.args.skip_zero_advantage is True
        return skips_zero_advantage(self.args) and not self.aux_loss_enabled

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

    # --------------------------------------------------------------------------------------------------------- close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the trainer holds beside its model: the engine or server that it started, its adapters on others and
        on disk, environments with their processes and threads.

        A run that is under way is given up. The model stays, to be saved, pushed or used; training and playing raise an
        error. No process waits for another. Called again, it does nothing. A trainer that is deleted frees the same, at
        Python's next garbage collections.
        """
        if self._closed:
            return
        self._closed = True
        made = vars(self)  # the constructor may have failed before any of them
        with ExitStack() as closing:
            for name in ("hub", "sampler"):
                if name in made:
                    closing.callback(made[name].close)
            pools = [made["setup"].pool] if "setup" in made else []
            pools += [made["evaluator"].engine.pool] if "evaluator" in made else []
            for pool in pools:
                closing.callback(pool.close)
                closing.callback(pool.abandon)
            if "rollouts" in made and self.rollouts.ahead is not None:
                closing.callback(self.rollouts.ahead.close)
            if "updates" in made and self.updates.is_open:
                closing.callback(self.updates.close)

    def check_open(self) -> None:
        """Raise an error if the trainer is closed.

        Raises:
            RuntimeError: In that case.
        """
        if self._closed:
            raise RuntimeError(
                "This trainer is closed: close() or the end of its `with` block has freed its engine and environments. Its "
                "model can still be saved. To train or play on, make a trainer from the saved model."
            )

    # ---------------------------------------------------------------------------------------------------------- run

    @with_episodes
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
        assert self.engine is not None
        self.check_open()
        self._check_policy_runs()
        if self.updates.is_open:
            raise RuntimeError(
                "train() was called in the middle of a run of rollout() and update(). Call finish() first."
            )
        with ExitStack() as lock:
            folder = self.checkpoints.choose(resume_from_checkpoint, lock)
            self.rollout_log.begin_run()
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
                    self.rollout_log.finish()
                    close_tables(self)
                if self.rollouts.ahead is not None:
                    self.rollouts.ahead.close()
                self.engine.pool.close()
                self.evaluator.engine.pool.close()
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

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error that names what searches hyperparameters here.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "Hyperparameters are searched by a population of runs, `agile-trainers evolve population.yaml` "
            "(docs/populations.md). To try single values, make a trainer for each."
        )

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
        self.critic.unfreeze(self.model)

    @with_episodes
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return self.checkpoints.at_epoch(super()._get_train_sampler(dataset))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.critic.unfreeze(self.model)
        made = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made:
            self.critic.split_groups(self.model, optimizer)
        return optimizer

    @with_episodes
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        options = [] if self.is_deepspeed_enabled else optimizer_options(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_deepspeed_enabled:
            self.reference.restore_after_deepspeed(Path(checkpoint))
        else:
            apply_options(self.optimizer, self.lr_scheduler, options)
        rollout = self.checkpoints.load_rollout(checkpoint)
        self.health.restore(rollout.health)
        self.guard = StepGuard(**rollout.skipped_steps)
        self.token_batches.restore(rollout.token_budget)
        self.sampler.restore(rollout.rows)
        self.packer.state = PackingState(**rollout.packing)
        self.rollouts.restore(rollout.tasks)
        if self.rollouts.ahead is not None and rollout.ahead is not None:
            self.rollouts.ahead.restore(rollout.ahead)
        self._restore_rollout(rollout.steps, rollout.micro_batches)
        self.rollout_log.resume(
            rollout.episodes, rollout.steps // self.micro_steps_per_generation, step_of(Path(checkpoint))
        )

    def _restore_rollout(self, steps: int, micro_batches: list[Batch] | None) -> None:
        self._step, self._buffered_inputs = steps, micro_batches
        self.critic.forget_step()

    @with_episodes
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop:
            return  # a callback stopped the run before its first step, and `Trainer` would take it
        if self.state.global_step >= self.state.max_steps:
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

    @with_episodes
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.runner.seconds, started = 0.0, time.perf_counter()
        if self.args.entropy_coef_schedule == "linear":
            self.entropy_coef = self.args.entropy_coef * (1 - self.state.global_step / self.state.max_steps)
        with self._offloading:
            loss = super().training_step(*args, **kwargs)
        self._add_metrics({"time/update": time.perf_counter() - started - self.runner.seconds})
        if self._step % self.micro_steps_per_generation == 0:
            self.rollout_log.finish()
        return loss

    @with_episodes
    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        steps, accumulation = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        drawn = self._buffered_inputs is not before
        if drawn:
            if steps % accumulation == 0 or accumulation % steps == 0:
                window = min(steps, accumulation)
                self._buffered_inputs = exchange_rows(self._buffered_inputs, window, self.packer.arranged)
            inputs = self._buffered_inputs[self._step % steps]
        self.critic.count_turns_of_step(
            self._step,
            self._buffered_inputs,
            drawn=drawn,
            every=self.micro_steps_per_generation,
            # At the end of an epoch of a data set a step may be shorter than gradient_accumulation_steps.
            length=self.current_gradient_accumulation_steps,
        )
        return inputs

    @with_episodes
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        args, models, generation = self.args, self._models, self._step // self.micro_steps_per_generation
        given = isinstance(inputs[0], Trajectory)  # to `update`
        if given:
            played = self.rollouts.given(cast("list[Trajectory]", inputs))
        else:
            played = self.rollouts.play(inputs, generation, self._last_generation)
        batch = played.batch
        self.log_prob_passes.prepare_packing(models, batch)
        # Every row is scored before credit where it may depend on log-probs: by a penalty, or by weights of drift.
        weighs = args.drift_correction == DECISION and played.version is not None
        log_probs = self._log_probs(batch, played.version) if self.beta != 0.0 or weighs else None
        if log_probs is not None and args.kl_placement != "loss":
            self._add_metrics(penalize(batch, log_probs, args, self.accelerator))
        trained = trained_tokens(batch, args)
        read = self.critic.read(models.policy, batch, trained, self._step, one_update=self._batch_is_one_update)
        judged, credit = self._credit(played, read, weights_of_turns(args, batch, log_probs))
        own = credit.local(own_rows(self.accelerator, len(batch.turn_mask)), batch.turn_mask.size(1))
        log_probs = log_probs or self._log_probs(batch, played.version, own.advantages)
        output = self._train_batch(batch, own, log_probs, read)
        entering = output.tool_mask > 0
        if not given:  # those may be of an earlier policy
            self._open_delivery(batch, log_probs, entering)
        self._open_mismatch(batch, log_probs, entering)
        self._log_batch(generation, played, judged, credit)
        values = None if read is None else read.turn_values
        self.rollout_log.begin(generation, self.state.global_step, played, own.advantages, values)
        return output.to_trl()

    @property
    def _batch_is_one_update(self) -> bool:
        """True if the generation batch is one optimizer step of training."""
        steps = self.args.steps_per_generation
        return self.is_in_train and self.num_iterations == 1 and self.current_gradient_accumulation_steps == steps

    def _log_probs(
        self, batch: TurnBatch, version: int | None, advantages: torch.Tensor | None = None
    ) -> BatchLogProbs:
        """Score policy, reference and the version that played, where the step needs them.

        With ``advantages`` (B, K), maybe only rows with one.
        """
        rows = None
        if advantages is not None and self._skips_zero_advantage:
            rows = self.log_prob_passes.even_rows(
                with_advantage(advantages, batch.turn_mask, self.args.zero_advantage_eps)
            )
        old = scores_old_policy(self.args) or self.args.kl_placement != "loss"
        log_probs = self.log_prob_passes.compute(self._models, batch, old=old, reference=self.beta != 0.0, rows=rows)
        if version is not None:
            self._log_probs_of_snapshot(batch, log_probs, version)
        return log_probs

    def _log_probs_of_snapshot(self, batch: TurnBatch, log_probs: BatchLogProbs, version: int) -> None:
        """Score the rows that were scored under the version of the policy that played them."""
        rows = log_probs.scored.nonzero()[:, 0]
        log_probs.version = version
        with self.snapshots.holding(version):
            log_probs.snapshot = self.log_prob_passes.compute(
                self._models, batch, old=True, reference=False, rows=rows
            ).old

    def _credit(
        self, played: PlayedGroups, read: CriticValues | None, weights: torch.Tensor | None = None
    ) -> tuple[Judged, Credit]:
        """Assign the credit of all processes, before TRL shuffles rows."""
        judged = played.judged  # unless values, a penalty or weights changed what it was computed from
        if judged is None or read is not None or weights is not None or self.args.kl_placement == "reward":
            values, final_values = (None, None) if read is None else (read.turn_values, read.final_values)
            judged = self.credit.judge(played.batch, values, final_values, weights)
        credit = self.credit.finish(judged)
        self._add_metrics(credit.metrics)
        return judged, credit

    def _train_batch(
        self, batch: TurnBatch, credit: Credit, log_probs: BatchLogProbs, read: CriticValues | None
    ) -> TrainBatch:
        """Make the generation batch of the loss, from the credit of this process."""
        spread = self.critic.spread(credit, read, batch)
        output, metrics = train_batch(batch, credit, spread, log_probs, self.args, self.accelerator)
        self._add_metrics(metrics)
        self.critic.add_columns(output, read, credit, batch)
        return output

    def _log_batch(self, generation: int, played: PlayedGroups, judged: Judged, credit: Credit) -> None:
        """Log a generation batch: metrics, and TRL's tables."""
        trajectories, rewards = played.trajectories, played.rewards
        self._add_metrics(self.health.measure(generation, trajectories, self._models))
        seconds = self.runner.seconds
        metrics, tokens = self.episode_log.summarize(trajectories, rewards, seconds, played.discarded)
        self.state.num_input_tokens_seen += tokens
        self._add_metrics(metrics | played.metrics | self.sampler.sync_metrics() | self.rewards.drain_metrics())
        # As TRL does: a count of the whole run, of which a log shows the last and not the mean.
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        self.episode_log.fill_tables(self._logs, trajectories, rewards, credit.advantages, judged.turns.mask)

    def _open_mismatch(self, batch: TurnBatch, log_probs: BatchLogProbs, trained: torch.Tensor) -> None:
        """Compare sampler and trainer if the old policy was scored; otherwise the first forward pass of the loss does."""
        self.mismatch.open()
        if log_probs.old is not None:
            counted = trained & log_probs.scored[:, None]
            played_by = log_probs.old if log_probs.snapshot is None else log_probs.snapshot
            self.mismatch.meter.add(played_by, batch.sampling_logprobs, counted, batch.turn_ids, batch.left_padded)
            self._close_mismatch()

    def _open_delivery(self, batch: TurnBatch, log_probs: BatchLogProbs, trained: torch.Tensor) -> None:
        """Let the policy that the sampler plays be looked for, should it not be the one that was moved there."""
        counted, version = trained & log_probs.scored[:, None], log_probs.version
        self.mismatch.delivery.open(
            lambda: self.log_prob_passes.of_some(self._models, batch, counted),
            nullcontext if version is None else lambda: self.snapshots.holding(version),
        )

    def _close_mismatch(self) -> None:
        closed = self.mismatch.close(is_first_step=self.state.global_step == 0)
        self._add_metrics(closed.metrics)
        self.health.note("sampler_mismatch", closed.warning)

    @with_episodes
    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        self.critic.unfreeze(self.model)  # the reference's forward pass left only the policy trainable
        whole = TrainBatch.from_trl(inputs)
        read = whole.with_advantage() if self._skips_zero_advantage else whole
        loss = self.token_batches.loss(
            model, read, whole, lambda part: self._loss_of(model, part, whole), complete=self.is_in_train
        )
        first_epoch_ends = self._step % self.micro_steps_per_generation == self.args.steps_per_generation - 1
        if self.is_in_train and self.mismatch.is_open and (first_epoch_ends or self.accelerator.sync_gradients):
            # Before the backward pass, in which DeepSpeed takes its optimizer step.
            self._close_mismatch()
        return loss

    def _loss_of(self, model: Any, part: TokenBatch, whole: TrainBatch) -> torch.Tensor:
        """Compute the part of the micro-batch's loss that is due to the rows of one pass."""
        with self._handing_over(part) as handed:
            if self.loss is None:
                loss = part.share * super()._compute_loss(model=model, inputs=handed.inputs)
            else:
                loss = self._own_loss(self.loss, model, part, whole)
        assert handed.log_probs is not None and handed.log_ratio is not None
        self.rollout_log.observe(handed.batch, handed.log_probs, handed.log_ratio)
        loss, metrics = self.critic.add_loss(loss, handed.values, handed.batch, self.state.global_step)
        self._add_metrics(metrics)
        return loss

    def _own_loss(
        self, loss: Callable[[LossInputs], LossOutput], model: Any, part: TokenBatch, whole: TrainBatch
    ) -> torch.Tensor:
        """Compute the part of the micro-batch's loss that is due to one pass, by the algorithm's own loss."""
        read, length = read_inputs(part.batch.to_trl()), part.batch.completion_ids.size(1)
        log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            model, *read.values(), length, compute_entropy=True
        )
        assert entropies is not None
        inputs = LossInputs.of(part.batch, log_probs, entropies)
        output = checked_output(loss(inputs), inputs, type(self).__name__)
        for name, (mean, weight) in averages(
            {"entropy": entropies} | output.metrics, inputs.mask, self.accelerator
        ).items():
            part.weights[name] = weight
            self._add_metrics({name: mean})
        accumulation, processes = self.current_gradient_accumulation_steps, self.accelerator.num_processes
        return output.total(inputs.mask) / divisor(
            output.denominator, whole, self.args, accumulation=accumulation, processes=processes
        )

    @contextmanager
    def _handing_over(self, part: TokenBatch) -> Iterator[LossPass]:
        """Pass the batch to the methods that TRL's loss calls, and set the attributes that weigh its terms."""
        beta, use_vllm, entropy_coef = self.beta, self.use_vllm, self.entropy_coef
        corrects = self.vllm_importance_sampling_correction
        logged = len(self._metrics["train"].get("entropy_coef", ()))
        if part.share and part.entropy_share != part.share:
            self.entropy_coef = entropy_coef * part.entropy_share / part.share
        if self.args.kl_placement != "loss":
            self.beta = 0.0  # the penalty is in the advantages already
        # TRL's loss weighs tokens on these conditions.
        weighed = part.batch.importance_sampling_ratio is not None
        self.use_vllm = self.vllm_importance_sampling_correction = weighed
        self._loss_pass = LossPass(part.batch, part.batch.to_trl())
        try:
            with gathering_ragged(self.accelerator):
                yield self._loss_pass
        finally:
            self._loss_pass, self.beta, self.use_vllm = None, beta, use_vllm
            self.vllm_importance_sampling_correction = corrects
            if self.entropy_coef != entropy_coef and not self.use_adaptive_entropy:
                self.entropy_coef = entropy_coef
                # TRL's loss has logged the coefficient as it was scaled for this pass.
                coefficients = self._metrics["train"].get("entropy_coef", [])
                coefficients[logged:] = [entropy_coef] * (len(coefficients) - logged)

    @with_episodes
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        *args: Any,
        scored: torch.Tensor | None = None,
        paths: Paths | None = None,
        kept: KeptSets | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute as TRL does, but of the tokens ``scored`` (B, T) alone; in the loss, of those that enter it.

        The rows that the model reads are ``paths``; those that TRL passes if it is None. The policy is renormalised over
        the sets ``kept`` of the tokens, if there are any.
        """
        handed, values = self._loss_pass, None
        if handed is not None:
            scored, paths, kept = handed.batch.counted, handed.batch.paths, kept_of(handed.inputs)
            values = self.critic.reading(handed.batch, lambda values: setattr(handed, "values", values))
        model = self.packer.reading(model, scored, values, paths, kept)
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if handed is None:
            return log_probs, entropies, aux_loss
        batch = handed.batch
        if entropies is not None:
            self.turn_entropies.add(entropies, batch.turn_ids, batch.counted)
        log_probs = handed.take(log_probs, self.args.turn_ratio_pooling if self._turn_ratios else None)
        if self.mismatch.is_open:
            assert handed.log_probs is not None
            sampled = batch.sampling_per_token_logps
            self.mismatch.meter.add(handed.log_probs, sampled, batch.counted, batch.turn_ids, batch.left_padded)
        return log_probs, entropies, aux_loss

    @with_episodes
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.guard.inspect(norm, self.model, self.optimizer, self.accelerator, self.state.global_step)
        # The number so far, of which a log shows the last and not the mean.
        self._metrics["train"]["skipped_steps"] = [float(self.guard.skipped)]
        return norm

    @with_episodes
    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        with self.updates.watched(tr_loss, grad_norm, kwargs.get("learning_rate")):
            self._add_metrics(self.turn_entropies.close(self.accelerator))
            with self.health.looking(self.state.global_step, self._metrics["train"]):
                super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # --------------------------------------------------------------------------------------------------- evaluation

    @with_episodes
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
        self.rollout_log.write_evaluation(self.state.global_step, metric_key_prefix, played)
        self.cards.note_evaluation(metric_key_prefix, played.metrics)
        return played.metrics

    @with_episodes
    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Play one episode for every row and return the conversations, without training, logging or writing files.

        Args:
            test_dataset: Rows handed to ``reset``.
            ignore_keys: Accepted for ``Trainer``'s sake; there are no model outputs to ignore.
            metric_key_prefix: Prefix of the metrics.

        Returns:
            ``predictions``: an object array (rows,) of conversations, each the messages after the prompt, of all processes
            (in an episode of several paths, ``Trajectory.messages``: those of the last turn's conversation);
            ``metrics``: those of :meth:`evaluate`. There are no ``label_ids``.
        """
        rows = list(kept_columns(self.args, test_dataset, "test_dataset"))
        played = self._play_evaluation(rows, len(rows), None, metric_key_prefix)
        said = np.empty(len(rows), dtype=object)
        for place, messages in gather_object(list(zip(played.places, (t.messages for t in played.trajectories)))):
            said[place] = messages
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, played.metrics)
        return PredictionOutput(predictions=said, label_ids=None, metrics=played.metrics)

    def _play_evaluation(self, dataset: Any, count: int, greedy: bool | None, prefix: str) -> Evaluated:
        self.check_open()
        tokens, in_train = self.state.num_input_tokens_seen, self.is_in_train
        return self.evaluator.play(dataset, count, greedy, prefix, tokens_seen=tokens, is_in_train=in_train)

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

    @with_episodes
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        check_finite(self.model, self.accelerator, self.state.global_step)
        run = Path(self._get_output_dir(trial))
        rollout = RolloutState(self._step, self._buffered_inputs, self.health.state(), dict(vars(self.guard)))
        rollout.token_budget, rollout.episodes = self.token_batches.budget, self.rollout_log.unfinished
        rollout.rows = self.sampler.rows
        rollout.packing, rollout.tasks = dict(vars(self.packer.state)), self.rollouts.state()
        rollout.ahead = None if self.rollouts.ahead is None else self.rollouts.ahead.state()
        with self.checkpoints.saving(run, rollout) as building:
            super()._save_checkpoint(model, trial)
            self.reference.save(building)
        if self.args.push_to_hub:
            self.hub.push_checkpoint(run / building.name)
        self.checkpoints.rotate(run)

    @with_episodes
    def _get_output_dir(self, trial: Any) -> str:
        building = self.checkpoints.building
        return super()._get_output_dir(trial) if building is None else str(building)

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
            # So that `Trainer` does not push: below we do, with the card, and bear a Hub that cannot be reached.
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

    @with_episodes
    def _load_best_model(self) -> None:
        # Its path comes from a checkpoint's state, and engines read it as they read one to resume from.
        best = Path(self.state.best_model_checkpoint)
        try:
            on_each_disk(self.args.should_save, lambda: check_complete(best, resumes=False))
        except CheckpointError as error:
            logger.warning("The best checkpoint is not loaded, and the last weights are kept: %s", error)
            self.state.best_model_checkpoint = None  # with `save_total_limit=1`, `Trainer` would delete all others
            return
        super()._load_best_model()
        self.critic.restore(self.model, best)

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

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push nothing where `Trainer` calls it with episodes: the folder is incomplete. See :meth:`_save_checkpoint`."""
        if self.engine is None:
            self.hub.push_checkpoint(Path(checkpoint_folder))

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

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self.hub.summarize()
