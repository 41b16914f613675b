"""Defines the trainer: the overrides of TRL and ``Trainer``, in the order in which a run and a step call them.

``MultiTurnTrainer`` replaces the part between a dataset row and TRL's loss; the loss itself and the optimizer loop stay
TRL's. Everything with state of its own is an object. Without an environment playing and training are TRL's; saving, cards
and the Hub are ours there too. No other file overrides a private method of TRL's ``GRPOTrainer`` or of ``Trainer``.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast

import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PredictionOutput
from trl import GRPOTrainer

from agile_trainers.adapters.folders import naming_full_disk
from agile_trainers.adapters.loading import restore_left_out
from agile_trainers.adapters.roles import POLICY, check_adapter, running, without_teachers
from agile_trainers.adapters.sharding import gathering_adapters
from agile_trainers.adapters.untrusted import reading_checkpoint
from agile_trainers.checkpoints.disclosure import check_special_tokens, clean_tokenizer
from agile_trainers.checkpoints.hub import HubPushes
from agile_trainers.checkpoints.model_card import RunCards
from agile_trainers.checkpoints.resuming import apply_options, optimizer_options
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.libraries.trl_tools import from_environment_factory
from agile_trainers.monitor.nonfinite import StepGuard, check_finite
from agile_trainers.monitor.progress import close_tables, use_table
from agile_trainers.step.batch import MadeBatch, updates_again
from agile_trainers.step.credit import Credit, CreditInputs
from agile_trainers.step.critic import NoCritic
from agile_trainers.step.log_probs import BatchLogProbs, Models
from agile_trainers.step.loss import FirstPass, LossInputs, LossOutput, LossPass, own_loss
from agile_trainers.step.play import PlayedGroups
from agile_trainers.step.teacher import KEPT, Teacher
from agile_trainers.step.token_batches import TokenBatch, gathering_ragged
from agile_trainers.train_batch import Batch, TrainBatch, exchange_rows, read_inputs
from agile_trainers.trainers import setup as construction
from agile_trainers.trainers.arguments import (
    check_argument_names,
    check_reward_functions,
    load_adapter,
    loading_policy,
    named_model,
)
from agile_trainers.trainers.evaluation import Evaluated, conversations, rows_of, rows_to_predict
from agile_trainers.trainers.manual_loop import Updates
from agile_trainers.types import Trajectory, TurnBatch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def with_episodes(method: _Method) -> _Method:
    """Make an override act with an environment only; without one the method is TRL's."""

    @functools.wraps(method)
    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            return getattr(super(MultiTurnTrainer, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(_Method, chosen)


if TYPE_CHECKING:

    class _Trainer(GRPOTrainer, construction.RunParts):
        """TRL's trainer with the parts of a run as its attributes."""

        def __init__(self, **given: Any) -> None: ...

else:
    _Trainer = GRPOTrainer


class MultiTurnTrainer(_Trainer):
    """GRPO's machinery over multi-turn episodes; a subclass adds the credit rule, :meth:`assign_credit`.

    A trainer is a context manager: :meth:`close` frees what it holds beside its model.

    Takes every argument of TRL's ``GRPOTrainer``, in TRL's order, and:

    Args:
        model: Also a folder or Hub id of a LoRA adapter, which is then continued; see ``docs/chaining.md``.
        environment: An environment id (``"gem:game:GuessTheNumber-v0-easy"``, ``"agile:guess_number"``, ...) or any
            zero-argument factory of environments; or several of these by name, chosen by the column ``environment`` of the
            rows, or equally often. None: this is TRL's ``GRPOTrainer``.
        environment_factory: TRL's name of the same argument, with objects whose methods are tools; needs ``args`` of ours.
        reward_funcs: With an environment optional, in TRL's form; their (weighted) values are added to the reward of an
            episode's last turn. ``reward_weights`` weighs these only; the environment's own reward has weight 1. Beside
            TRL's arguments they get ``trajectories`` and, where every episode has an instance of its own in this process,
            ``environments``. Episodes that failed are not scored.
        train_dataset: With an environment optional: each row is handed to ``reset`` as ``options``. Without rows, set
            ``max_steps``; the environment's seed is then all that distinguishes one episode from another.
    """

    control: Any
    beta: float
    vllm_importance_sampling_correction: Any
    _buffered_inputs: Any
    _last_world_entropy: float

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
    # With an environment the constructor makes these, and the rest of `RunParts`.
    setup: construction.RunSetup
    engine: Any = None
    critic = NoCritic()
    teacher: Teacher | None = None

    _loss_pass: LossPass | None = None
    _adapter: str | None = POLICY
    """The adapter that runs, see :meth:`use_adapter`."""
    _closed = False
    _update_seconds = 0.0  # of the optimizer step that is under way
    _before = 0  # micro-steps of earlier calls of `train`

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

    @construction.closed_on_error
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
        self._resources = ExitStack()
        self.updates, self.hub = Updates(self), HubPushes(self)
        self._resources.callback(self.hub.close)
        check_reward_functions(reward_funcs)
        if args is None:
            args = self.config_class(output_dir=self._name.replace(" ", "-"))
        model = named_model(model)
        if environment is None and environment_factory is not None and isinstance(args, MultiTurnConfig):
            environment, environment_factory, tools = from_environment_factory(environment_factory, tools), None, None
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", "environment")}
        self.environment = environment
        setup: construction.RunSetup | None = None
        if environment is None:
            given["args"] = construction.without_environment(type(self), args, environment_factory)
        else:
            self.setup = setup = construction.prepare_run(type(self), environment, given)
            for close in (setup.pool.close, setup.pool.abandon):
                self._resources.callback(close)
            given |= setup.arguments
        inputs, saved = load_adapter(given)
        with loading_policy(inputs, episodes=setup is not None):
            super().__init__(**inputs)
        check_special_tokens(self.processing_class)
        if setup is not None:
            self.use_vllm = self.args.use_vllm
            for name, part in vars(construction.make_parts(self, self._seam(), setup, saved, self._resources)).items():
                setattr(self, name, part)
            self._turn_ratios = self.args.importance_sampling_level == "turn" and self.loss is None
            if self._turn_ratios:
                # TRL's loss sees log-probabilities whose token ratios already are the turn's.
                self.importance_sampling_level = "token"
            use_table(self.callback_handler, disable_tqdm=self.args.disable_tqdm)
        self.cards = RunCards(self, self._name, self._tag_names, self._paper, saved)
        self.hub.check()

    def _seam(self) -> construction.Seam:
        return construction.Seam(
            algorithm=self._name,
            tokenizer=self._tokenizer,
            topology=self._dist,
            metrics=self._metrics["train"],
            add_metrics=self._add_metrics,
            token_log_probs=self._get_per_token_logps_and_entropies,
            calculate_rewards=self._calculate_rewards,
            pending_metrics=self._pending_metrics,
            pending_columns=self._pending_extra_logs,
            train_sampler=super()._get_train_sampler,
        )

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
        return -(-(self._before + micro_steps) // self.micro_steps_per_generation) - 1

    @property
    def _models(self) -> Models:
        """The policy and its reference, as distributed training has them now."""
        return Models(self.model, self.ref_model)

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # `Trainer` keeps every log until the end, and with it one string for each name that was made anew.
            self._metrics["train"][sys.intern(name)].append(value)

    def assign_credit(self, turns: CreditInputs) -> Credit:
        """Compute the advantages of all turns, before whitening and clipping: the credit rule of an algorithm.

        Args:
            turns: The turns of all processes.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the trainer holds beside its model: the engine or server that it started, its adapters on others and
        on disk, environments with their processes and threads.

        A run that is under way is given up. The model stays, to be saved, pushed or used; training and playing raise an
        error. No process waits for another. A trainer that is deleted frees the same.
        """
        if self._closed:
            return
        self._closed = True
        with self._resources:
            if self.updates.is_open:
                self.updates.close()

    def check_open(self) -> None:
        """Raise an error if the trainer is closed."""
        if self._closed:
            raise RuntimeError(
                "This trainer is closed: close() or the end of its `with` block has freed its engine and environments. Its "
                "model can still be saved. To train or play on, make a trainer from the saved model."
            )

    # ---------------------------------------------------------------------------------------------------------- run

    @with_episodes
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``Trainer.train`` does.

        Interrupted by Ctrl-C (SIGINT), SIGTERM or SIGHUP, it finishes the optimizer step, saves a checkpoint and stops its
        caller; a second signal, more than two seconds later, stops at once. After ``max_wall_seconds`` its caller goes on.

        Args:
            resume_from_checkpoint: True takes the newest complete checkpoint in ``output_dir``; ``"auto"`` does so if there
                is one, and starts a new run otherwise; a path takes that checkpoint.
            *args: See ``Trainer.train``.
            **kwargs: See ``Trainer.train``.

        Raises:
            CheckpointError: If there is no complete checkpoint, or it belongs to another run.
            OutputDirInUseError: If another process of this host trains into ``output_dir``.
            NonFiniteError: If too many optimizer steps in a row have a gradient that is not finite.
            KeyboardInterrupt: After the checkpoint of an interrupted run was saved; SystemExit after SIGTERM or SIGHUP,
                or if nothing reads the output any more.
        """
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
                with self.stop.heard(), naming_full_disk(self.args.output_dir), reading_checkpoint(folder):
                    output = super().train(folder, *args, **kwargs)
            finally:
                if not self.updates.is_open:
                    self.rollout_log.finish()
                    close_tables(self.callback_handler)
                if self.rollouts.ahead is not None:
                    self.rollouts.ahead.close()
                self.setup.pool.close()
                self.evaluator.engine.pool.close()
        self.stop.pass_on()
        return output

    def start(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Begin a run of :meth:`rollout` and :meth:`update`; see :meth:`Updates.start`."""
        self.updates.start(resume_from_checkpoint)

    def rollout(
        self, rows: Sequence[dict[str, Any]] | None = None, *, generation: int | None = None
    ) -> list[Trajectory]:
        """Play episodes with the current policy, without training; see :meth:`Updates.rollout`."""
        return self.updates.rollout(rows, generation)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train on episodes as ``train()`` does on a generation batch; see :meth:`Updates.update`."""
        self._check_policy_runs()
        return self.updates.update(trajectories)

    def finish(self) -> None:
        """End a run of :meth:`update` before ``max_steps``; see :meth:`Updates.finish`."""
        self.updates.finish()

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error that names what searches hyperparameters here."""
        raise NotImplementedError(
            "Hyperparameters are searched by a population of runs, `agile-trainers evolve population.yaml` "
            "(docs/populations.md). To try single values, make a trainer for each."
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        restore_left_out(self.model, folder, fsdp=self.is_fsdp_enabled)
        for name, parameter in self.model.named_parameters():
            # PEFT loads adapters in fp32; TRL trains those of a quantized base in bf16.
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
        if self.engine is not None:
            self.reference.restore(folder)
        self.critic.unfreeze(self.model)

    @with_episodes
    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.args.dataloader_persistent_workers:
            # It draws a seed of its workers from the generator with which TRL shuffles, once in a run: that is in another
            # epoch after a resume.
            loader.base_dataloader.generator = torch.Generator().manual_seed(self.args.seed)
        return loader

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
        construction.restore_state(self, rollout)
        self._restore_rollout(rollout.steps, rollout.micro_batches)
        self.checkpoints.find_best(Path(checkpoint))
        generation = rollout.steps // self.micro_steps_per_generation
        self.rollout_log.resume(rollout.episodes, generation, self.state.global_step)

    def _restore_rollout(self, steps: int, micro_batches: list[Batch] | None) -> None:
        self._step, self._buffered_inputs = steps, micro_batches
        self.critic.forget_step()

    @with_episodes
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if not self.stop.before_epoch(self.state, self.control):
            self.updates.intercept(kwargs)
            # A further call of train() goes on counting, and num_iterations may have changed since the checkpoint.
            self._before = self._step - self.state.global_step * self.args.gradient_accumulation_steps
            super()._run_epoch(*args, **kwargs)

    # --------------------------------------------------------------------------------------------------------- step

    @with_episodes
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.runner.seconds, started = 0.0, time.perf_counter()
        if self.args.entropy_coef_schedule == "linear":
            self.entropy_coef = self.args.entropy_coef * (1 - self.state.global_step / self.state.max_steps)
        with self.offloading:
            loss = super().training_step(*args, **kwargs)
        self._update_seconds += time.perf_counter() - started - self.runner.seconds
        if self.accelerator.sync_gradients:
            self._add_metrics({"time/update": self._update_seconds})
            self._update_seconds = 0.0
        if self._step % self.micro_steps_per_generation == 0:
            self.rollout_log.finish()
        return loss

    @with_episodes
    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        drawn = self._buffered_inputs is not before
        if drawn:
            self._buffered_inputs = exchange_rows(self._buffered_inputs, self.args, self.packer.arranged)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
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
        models, generation = self._models, self._step // self.micro_steps_per_generation
        given = isinstance(inputs[0], Trajectory)  # to `update`
        if given:
            played = self.rollouts.given(cast("list[Trajectory]", inputs))
        else:
            played = self.rollouts.play(inputs, generation, self._last_generation)
        made = self.batches.make(models, played, self._step, first_is_one=self._first_pass_is_one_update)
        trained = made.output.tool_mask > 0
        if not given:  # those may be of an earlier policy
            self.mismatch.delivery.open(*self.batches.delivered(models, played.batch, made.log_probs, trained))
        self._open_mismatch(played.batch, made.log_probs, trained)
        self._log_batch(generation, played, made)
        self.rollout_log.begin(generation, self.state.global_step, played, made.advantages, made.values)
        return made.output.to_trl()

    @property
    def _first_pass_is_one_update(self) -> bool:
        """True if the first pass over the generation batch is one optimizer step of training."""
        return self.is_in_train and self.current_gradient_accumulation_steps == self.args.steps_per_generation

    def _log_batch(self, generation: int, played: PlayedGroups, made: MadeBatch) -> None:
        """Log a generation batch: metrics, and TRL's tables."""
        trajectories, rewards = played.own or (played.trajectories, played.rewards)
        own = [trajectory for trajectory in trajectories if not trajectory.demonstration]
        self._add_metrics(self.health.measurements.take(generation, own, self._models))
        seconds = self.runner.seconds
        metrics, tokens = self.episode_log.summarize(trajectories, rewards, seconds, played.discarded)
        self.state.num_input_tokens_seen += tokens
        self._add_metrics(metrics | played.metrics | self.sampler.sync_metrics() | self.rewards.drain_metrics())
        # As TRL does: a count of the whole run, of which a log shows the last and not the mean.
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        advantages, mask = made.credit.advantages, made.judged.turns.mask
        self.episode_log.fill_tables(self._logs, played.trajectories, played.rewards, advantages, mask)

    def _open_mismatch(self, batch: TurnBatch, log_probs: BatchLogProbs, trained: torch.Tensor) -> None:
        """Compare sampler and trainer if the old policy was scored; otherwise the first forward pass of the loss does."""
        self.mismatch.open()
        if log_probs.old is not None:
            counted = log_probs.metric_mask(trained)
            played_by = log_probs.old if log_probs.snapshot is None else log_probs.snapshot
            self.mismatch.add(played_by, batch.sampling_logprobs, counted, batch.turn_ids, batch.left_padded)
            self._close_mismatch()

    def _close_mismatch(self) -> None:
        metrics, warning = self.mismatch.close(is_first_step=self.state.global_step == 0)
        self._add_metrics(metrics)
        self.health.diagnosis.note("sampler_mismatch", warning)

    @with_episodes
    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        self.critic.unfreeze(self.model)  # the reference's forward pass left only the policy trainable
        whole = TrainBatch.from_trl(inputs)
        read = whole.with_advantage() if self.batches.skips_zero_advantage else whole
        again = updates_again(self.args)
        first = FirstPass(whole) if whole.old_per_token_logps is None and again else None
        taught = self.teacher.first_pass(whole) if self.teacher is not None and again else None
        loss = self.token_batches.loss(
            model, read, whole, lambda part: self._loss_of(model, part, whole, first, taught),
            complete=self.is_in_train, together=self._changes_loss,
        )  # fmt: skip
        if taught is not None:  # further updates compare with a teacher that stays as it is
            whole.token_columns[KEPT] = taught.log_probs
            inputs.update(whole.to_trl())
        if first is not None:  # and with the policy of this one
            inputs["old_per_token_logps"] = first.log_probs
        first_epoch_ends = self._step % self.micro_steps_per_generation == self.args.steps_per_generation - 1
        if self.is_in_train and self.mismatch.is_open and (first_epoch_ends or self.accelerator.sync_gradients):
            # Before the backward pass, in which DeepSpeed takes its optimizer step.
            self._close_mismatch()
        return loss

    @property
    def _changes_loss(self) -> bool:
        """True if a subclass, or code that replaced a method of this object, may change the loss that is returned."""
        return any(
            getattr(getattr(self, name), "__func__", None) is not getattr(MultiTurnTrainer, name)
            for name in ("compute_loss", "_compute_loss")
        )

    def _loss_of(
        self, model: Any, part: TokenBatch, whole: TrainBatch, first: FirstPass | None, taught: FirstPass | None
    ) -> torch.Tensor:
        """Compute the part of the micro-batch's loss that is due to the rows of one pass."""
        told = None if self.teacher is None else self.teacher.read(model, part.batch)
        with self._handing_over(part) as handed:
            handed.teacher = told
            if self.loss is None:
                loss = part.share * super()._compute_loss(model=model, inputs=handed.inputs)
            else:
                read, length = read_inputs(part.batch.to_trl()), part.batch.completion_ids.size(1)
                log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
                    model, *read.values(), length, compute_entropy=True
                )
                assert entropies is not None
                loss, metrics = own_loss(
                    self.loss, type(self).__name__, part, whole, log_probs, entropies, self.args, self.accelerator,
                    self.current_gradient_accumulation_steps,
                )  # fmt: skip
                self._add_metrics(metrics)
        assert handed.log_probs is not None and handed.log_ratio is not None
        self.rollout_log.observe(handed.batch, handed.log_probs, handed.log_ratio)
        if first is not None:
            first.add(handed.batch, handed.log_probs)
        if taught is not None and isinstance(told, torch.Tensor):
            taught.add(handed.batch, told)
        for added in self.added:
            loss, metrics = added.add(loss, handed, whole, self.current_gradient_accumulation_steps)
            self._add_metrics(metrics)
        loss, metrics = self.critic.add_loss(loss, handed.values, handed.batch, self.state.global_step)
        self._add_metrics(metrics)
        return loss

    @contextmanager
    def _handing_over(self, part: TokenBatch) -> Iterator[LossPass]:
        """Pass the batch to the methods that TRL's loss calls, and set the attributes that weigh its terms."""
        beta, use_vllm, entropy_coef, entropy = self.beta, self.use_vllm, self.entropy_coef, self._last_world_entropy
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
            adapted = self.use_adaptive_entropy
            if adapted and not part.tokens and self._last_world_entropy == 0.0:
                # TRL's controller took the mean over no token for an entropy below every target.
                adapted, self._last_world_entropy = False, entropy
            if self.entropy_coef != entropy_coef and not adapted:
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
        part: Batch | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute as TRL does, of the tokens ``scored`` (B, T) of a micro-batch ``part`` in TRL's form."""
        handed, values, taught = self._loss_pass, None, None
        if handed is not None:
            scored, part = handed.batch.scored, handed.inputs
            values = self.critic.reading(handed.batch, lambda values: setattr(handed, "values", values))
            taught = handed.taught
        model = self.packer.reading(model, scored, part, values, taught)
        log_probs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if handed is None:
            return log_probs, entropies, aux_loss
        batch = handed.batch
        if entropies is not None:
            self.turn_means[0].add(entropies, batch.turn_ids, batch.counted)
        log_probs = handed.take(log_probs, self.args.turn_ratio_pooling if self._turn_ratios else None)
        if self.mismatch.is_open:
            assert handed.log_probs is not None
            sampled = batch.sampling_per_token_logps
            self.mismatch.add(handed.log_probs, sampled, batch.counted, batch.turn_ids, batch.left_padded)
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
        for means in self.turn_means:
            self._add_metrics(means.close(self.accelerator))
        with (
            self.updates.watched(tr_loss, grad_norm, kwargs.get("learning_rate")),
            self.health.looking(self.state.global_step, self._metrics["train"]),
        ):
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
            The metrics of :func:`agile_trainers.rollout.metrics.summarize` and TRL's under ``eval_``, such as
            ``eval_return``, its standard error ``eval_return_sem`` and ``eval_reward``; those of one of several environments
            under ``eval_<name>_``. Seeds are the same in every evaluation.
        """
        eval_dataset = rows_of(self.setup.eval_rows, eval_dataset)
        if isinstance(eval_dataset, dict):
            results: dict[str, float] = {}
            for name, part in eval_dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                results |= self.evaluate(part, ignore_keys, prefix, num_episodes=num_episodes, greedy=greedy)
            return results
        training = self.model.training
        played = self._play_evaluation(eval_dataset, num_episodes, greedy, metric_key_prefix)
        # TRL's `log` files metrics under the mode of the model.
        self.model.eval()
        with self.evaluator.showing(played, self._logs, self.state.global_step, metric_key_prefix):
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

        Returns:
            ``predictions``: an object array (rows,) of conversations, each the messages after the prompt, of all processes
            (in an episode of several paths, ``Trajectory.messages``: those of the last turn's conversation);
            ``metrics``: those of :meth:`evaluate`. There are no ``label_ids``.
        """
        rows = rows_to_predict(self.args, test_dataset)
        played = self._play_evaluation(rows, len(rows), None, metric_key_prefix)
        said = conversations(played, len(rows))
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, played.metrics)
        return PredictionOutput(predictions=said, label_ids=None, metrics=played.metrics)

    def _play_evaluation(self, dataset: Any, count: int | None, greedy: bool | None, prefix: str) -> Evaluated:
        self.check_open()
        tokens, in_train = self.state.num_input_tokens_seen, self.is_in_train
        return self.evaluator.play(dataset, count, greedy, prefix, tokens_seen=tokens, is_in_train=in_train)

    @contextmanager
    def use_adapter(self, name: str | None) -> Iterator[None]:
        """Play and compute with another adapter of the model inside a ``with`` block.

        ``evaluate``, ``predict``, ``rollout`` and the model's own ``forward`` use it there; what is trainable does not
        change.

        Args:
            name: ``"default"`` (the policy), ``"ref"``, ``"critic"``, ...; None for the base model alone.
        """
        model = self.accelerator.unwrap_model(self.model)
        check_adapter(model, name, use_vllm=self.use_vllm)
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

    def update_reference(self, weight: float = 1.0) -> None:
        """Make the reference ``weight`` of the policy and the rest of itself. Batches scored before keep the earlier one."""
        if self.engine is None:
            raise ValueError("update_reference() moves the reference of a run with an environment; pass `environment`.")
        self.reference.update(weight)

    # ------------------------------------------------------------------------------------------------- checkpoints

    @with_episodes
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        check_finite(self.model, self.accelerator, self.state.global_step)
        run = Path(self._get_output_dir(trial))
        with self.checkpoints.saving(run, construction.state_of(self, self._step, self._buffered_inputs)) as building:
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
        """Save the model as ``Trainer`` does, a record of its origin (``agile_trainers.json``) and a card; maybe push it."""
        folder = Path(output_dir or self.args.output_dir)
        if self.engine is not None and self.args.should_save:
            self.checkpoints.describe(folder)
        gathering = gathering_adapters(self.model, self.accelerator.state.deepspeed_plugin)
        with naming_full_disk(folder), without_teachers(self.accelerator.unwrap_model(self.model)), gathering:
            # So that `Trainer` does not push: below we do, with the card, and bear a Hub that cannot be reached.
            super().save_model(output_dir, _internal_call=True)
            if self.args.should_save:
                clean_tokenizer(folder, self.processing_class)
                self.cards.write(folder)
        if self.args.push_to_hub and not _internal_call:
            self.hub.push_saved()

    @with_episodes
    def _load_best_model(self) -> None:
        # Its path comes from a checkpoint's state, and engines read it as they read one to resume from.
        best = Path(self.state.best_model_checkpoint)
        if self.checkpoints.can_load(best):
            super()._load_best_model()
            self.critic.restore(self.model, best)
        else:
            self.state.best_model_checkpoint = None  # with `save_total_limit=1`, `Trainer` would delete all others

    # ---------------------------------------------------------------------------------------------------------- Hub

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository and check write access to it, at construction; see :meth:`HubPushes.begin`."""
        self.hub.begin(token, super().init_hf_repo)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push nothing where `Trainer` calls it with episodes: the folder is incomplete. See :meth:`_save_checkpoint`."""
        if self.engine is None:
            self.hub.push_checkpoint(Path(checkpoint_folder))

    def push_to_hub(
        self, commit_message: str | None = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Save the model to ``output_dir`` and push it: policy, tokenizer, record, model card and learning curve.

        See :meth:`HubPushes.save_and_push`; ``kwargs`` are ``dataset_name`` and ``tags`` of the model card.
        """
        return self.hub.save_and_push(commit_message, blocking, token, revision, **kwargs)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write ``README.md`` and the learning curve to ``output_dir``; see :meth:`RunCards.write`."""
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            self.cards.write(Path(self.args.output_dir), model_name=model_name, dataset_name=dataset_name, tags=tags)

    def _finish_current_push(self) -> None:
        self.hub.wait()
