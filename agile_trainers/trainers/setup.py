"""Sets up a run with an environment: its arguments before TRL's constructor, then all its parts, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from peft.utils import TrainableTokensWrapper
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import logging
from trl.import_utils import is_vllm_available
from trl.models import get_act_offloading_ctx_manager

from agile_trainers.adapters.copies import Snapshots
from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.loading import SavedAdapters
from agile_trainers.adapters.lora_settings import check_layers, check_repeatable, check_scales, within_scope
from agile_trainers.adapters.roles import base_model
from agile_trainers.checkpoints.record import RolloutState, RunCheckpoints
from agile_trainers.checkpoints.stopping import GracefulStop
from agile_trainers.config.launch_checks import check_engine
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.rules import (
    MACHINE,
    check_order_of_turns,
    check_rules,
    check_weighs_decisions,
    for_own_loss,
    skips_zero_advantage,
)
from agile_trainers.envs.base import EnvironmentFactory, ResetResult
from agile_trainers.envs.registry import environment_factories
from agile_trainers.monitor.episode_log import EpisodeLog
from agile_trainers.monitor.health_checks import HealthChecks, PolicyMeasurements
from agile_trainers.monitor.nonfinite import StepGuard
from agile_trainers.monitor.rollout_log import RolloutLog
from agile_trainers.packing.kept_head import KeptHead
from agile_trainers.packing.packer import Packer, PackingState
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.environment_probe import check_first_prompt, planned_tokens, probe_environment
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.generators.architecture import check_padding
from agile_trainers.rollout.generators.images import LANGUAGE, SERVED, SUPPORTED, prepare_for_images
from agile_trainers.rollout.seeds import TRAINING, Mixture, environment_seed
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.sampling.delivery import Delivery
from agile_trainers.sampling.mismatch import MismatchMonitor
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.sampling.vllm_checks import compute_dtype
from agile_trainers.step.ahead import BatchesAhead, RowOrder, check_plays_ahead
from agile_trainers.step.batch import BatchMaker
from agile_trainers.step.credit import TARGETS, CreditAssignment, TurnMeans
from agile_trainers.step.critic import Critic, NoCritic, attach_critic
from agile_trainers.step.draws import EpisodeDraws
from agile_trainers.step.dropout import is_noisy, switch_off_noise
from agile_trainers.step.log_probs import LogProbPasses, Models, TokenLogProbs
from agile_trainers.step.loss import DemonstrationLoss
from agile_trainers.step.play import EpisodeRunner, GroupRollouts
from agile_trainers.step.reward import Rewards, add_return_reward
from agile_trainers.step.successes import Successes
from agile_trainers.step.task_sampling import TaskPool, TaskSampling, task_pool
from agile_trainers.step.teacher import LoadedTeacher, Teacher
from agile_trainers.step.token_batches import TokenBatches, remember_attributes
from agile_trainers.train_batch import Batch
from agile_trainers.trainers.arguments import check_trainer_arguments
from agile_trainers.trainers.demonstrations import Demonstrations
from agile_trainers.trainers.evaluation import EpisodeEvaluator, kept_columns, played_columns, with_best_metric
from agile_trainers.trainers.mixture import first_rows, mixture_of, names_of, with_column
from agile_trainers.trainers.reference import ReferencePolicy, ReferenceUpdates
from agile_trainers.trainers.teacher import load_teachers
from agile_trainers.types import Picture, text_of

logger = logging.get_logger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass
class RunSetup:
    """The checked and completed arguments of a run of episodes, and the pool of its environments."""

    arguments: dict[str, Any]
    """The arguments of the trainer that were completed, by name. ``train_dataset`` paces training, and has empty rows where
    the user gave none; ``eval_dataset`` is one that ``Trainer`` requires, and :attr:`eval_rows` are played; the first of
    ``reward_funcs`` is the episode return."""
    rows_are_options: bool
    """True if ``reset`` gets the rows of ``train_dataset``."""
    eval_rows: Any
    mixture: Mixture | None
    """The environments that are drawn; None for a single one."""
    tasks: TaskPool | None
    """The items that groups are drawn from; None if TRL's order of the rows, or a seed for each group, decides."""
    factories: Mapping[str | None, EnvironmentFactory]
    """Environment name to what makes it; None in a run of one."""
    pool: EnvironmentPool
    first_states: dict[str | None, ResetResult | None]
    """The first observation of each environment; None for an agent."""


def closed_on_error(init: _Method) -> _Method:
    """Let a constructor that fails close the trainer, so that what it has begun ends at once."""

    @wraps(init)
    def closing(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except BaseException:
            if hasattr(self, "_resources"):  # an argument may be missing
                self.close()
            raise

    return cast(_Method, closing)


def without_environment(kind: type[Any], args: Any, environment_factory: Any) -> Any:
    """Return the configuration of a trainer without an environment, which is TRL's.

    Args:
        kind: The class of the trainer.
        args: Its configuration.
        environment_factory: TRL's argument.

    Raises:
        ValueError: If the algorithm trains on episodes only, or brings a loss of its own.
    """
    if kind.needs_environment:
        raise ValueError(f"{kind.__name__} needs an environment: `environment=...`, --environment on the command line.")
    if kind.loss is not None:
        raise ValueError(
            f"{kind.__name__} brings a loss of its own, which has no effect without an environment: the trainer is TRL's "
            "there. Name one: `environment=...`, --environment on the command line."
        )
    if environment_factory is not None:
        logger.warning(
            "environment_factory with TRL's own configuration makes this TRL's own trainer: no credit per turn, no records "
            f"of episodes. args={kind.config_class.__name__}(...) plays the same factory with both."
        )
    # TRL's own configuration will do for TRL's own trainer.
    return args.without_environment() if isinstance(args, MultiTurnConfig) else args


def prepare_run(kind: type[Any], environment: Any, given: Mapping[str, Any]) -> RunSetup:
    """Check the arguments of a trainer for episodes, complete them, read the data and reset the environments once.

    The caller's objects are not changed.

    Args:
        kind: The class of the trainer.
        environment: An id, a factory, or several of them by name.
        given: The other arguments of its constructor, by name.

    Raises:
        TypeError: For an argument of the wrong kind.
        ValueError: For arguments that contradict each other or would have no effect.
        EnvironmentProtocolError: If an environment fails or breaks the protocol.
    """
    model, peft_config = given["model"], given["peft_config"]
    train_dataset, eval_dataset, reward_funcs = given["train_dataset"], given["eval_dataset"], given["reward_funcs"]
    check_trainer_arguments(kind, model, given["args"], given)
    check_weighs_decisions(given["args"], kind)
    args: MultiTurnConfig = given["args"]
    if kind.loss is not None:
        args = for_own_loss(args, kind.loss_needs)
    environments = names_of(environment)
    args = args.with_environment(environments)
    check_machine(args)
    check_repeatable(model, peft_config)
    check_scales(peft_config)
    factories = environment_factories(environment)

    rewarded = reward_funcs is not None and reward_funcs != []
    args = with_best_metric(args, by_reward=rewarded, eval_dataset=eval_dataset, environments=environments)
    if args.lora_target_scope is not None:
        peft_config = within_scope(peft_config, args.lora_target_scope)
    elif isinstance(peft_config, LoraConfig) and not peft_config.exclude_modules and shows_images(given):
        peft_config = within_scope(peft_config, *LANGUAGE)

    train_dataset = kept_columns(args, train_dataset, "train_dataset")
    eval_rows = kept_columns(args, eval_dataset, "eval_dataset")
    rows = training_rows(args, train_dataset)
    mixture = mixture_of(args, environment)
    probed = first_rows(mixture, args, train_dataset, eval_rows)
    tasks = task_pool(args, train_dataset, mixture)
    columns = with_column(mixture, played_columns(train_dataset, eval_rows, evaluates=args.eval_strategy != "no"))
    functions, classes, args.reward_weights = add_return_reward(
        args, reward_funcs, given["reward_processing_classes"], columns
    )

    options = EpisodeOptions.of_args(args)
    pool = options.make_pool(factories)
    check_order_of_turns(args, [pool.titles[name] for name in pool.factories if pool.agent(name) is not None])
    histories = options.histories(pool.factories)
    start = environment_seed(args.seed, TRAINING, 0, 0)
    first_states = {
        name: probe_environment(
            pool, start, row, name, with_rows=eval_rows is not None, with_context=name not in histories
        )
        for name, row in probed.items()
    }
    for name in pool.factories:
        pool.return_range(name)  # evaluations read it
    warn_of_unseen_prompts(probed, first_states)
    if args.vllm_server_start:  # the GPUs that this process leaves are the server's
        args._n_gpu = min(args.n_gpu, 1)
    return RunSetup(
        arguments={
            "args": args,
            "peft_config": peft_config,
            "train_dataset": rows,
            # `Trainer` wants a data set to evaluate on; `evaluate` plays seeds.
            "eval_dataset": rows if eval_rows is None and args.eval_strategy != "no" else eval_rows,
            "reward_funcs": functions,
            "reward_processing_classes": classes,
        },
        rows_are_options=train_dataset is not None,
        eval_rows=eval_rows,
        mixture=mixture,
        tasks=tasks,
        factories=dict(factories.items()) if isinstance(factories, dict) else {None: factories},
        pool=pool,
        first_states=first_states,
    )


@dataclass(frozen=True)
class Seam:
    """Attributes of TRL's trainer, private ones too, that the parts of a run read."""

    algorithm: str
    """Its name in records."""
    tokenizer: Any
    topology: Any
    """Processes of the launch."""
    metrics: dict[str, list[float]]
    """Metrics of training that the next log shows."""
    add_metrics: Callable[[Mapping[str, float]], None]
    token_log_probs: TokenLogProbs
    calculate_rewards: Callable[..., torch.Tensor]
    pending_metrics: dict[str, list[float]]
    pending_columns: dict[str, list[Any]]
    train_sampler: Callable[[], Any]


@dataclass
class StepParts:
    """The parts of a training step."""

    sampler: RolloutSampler
    packer: Packer
    token_batches: TokenBatches
    runner: EpisodeRunner
    rewards: Rewards
    rollouts: GroupRollouts
    log_prob_passes: LogProbPasses
    critic: Critic | NoCritic
    batches: BatchMaker
    mismatch: MismatchMonitor
    teacher: Teacher | None
    added: list[DemonstrationLoss | Teacher]
    """Parts of the loss beside the algorithm's."""
    turn_means: list[TurnMeans]
    """Values by turn index that a step logs: entropies, the divergence from a teacher, log-probs of demonstrations."""
    offloading: AbstractContextManager[Any]
    """Context of a step, which may keep activations in the CPU's memory."""


@dataclass
class RunParts(StepParts):
    """The parts of a run of episodes."""

    engine: RolloutEngine
    reference: ReferencePolicy
    checkpoints: RunCheckpoints
    stop: GracefulStop
    guard: StepGuard
    health: HealthChecks
    rollout_log: RolloutLog
    episode_log: EpisodeLog
    evaluator: EpisodeEvaluator


def make_parts(trainer: Any, seam: Seam, setup: RunSetup, saved: SavedAdapters | None, closing: ExitStack) -> RunParts:
    """Make the parts of a run of episodes, after TRL's own constructor: the policy's, a step's, the log's.

    Args:
        trainer: A ``MultiTurnTrainer``.
        seam: What TRL's trainer keeps to itself.
        setup: Of :func:`prepare_run`.
        saved: The adapters that the policy was loaded from, if any.
        closing: Gets what frees the parts again.

    Raises:
        ValueError: For a model or options that do not fit.
    """
    args, accelerator, policy = trainer.args, trainer.accelerator, trainer.model
    check_engine(accelerator, args)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ValueError(
            "No parameter of the model is trainable, so nothing would be learned. Pass peft_config=LoraConfig(...) without "
            "inference_mode=True, a saved adapter by its folder (model='...') or loaded with is_trainable=True, or a model "
            "whose parameters have requires_grad=True."
        )
    if setup.arguments["peft_config"] is not None:
        check_layers(policy)
    prepare_policy(policy, seam.tokenizer, auxiliary_loss=trainer.aux_loss_enabled)
    if trainer.aux_loss_enabled:
        own_loss = None if trainer.loss is None else type(trainer).__name__
        check_auxiliary_loss(args, own_loss, trainer.router_aux_loss_coef)
    engine = make_rollout_engine(
        args, setup, trainer.processing_class, trainer.eos_token_ids, policy.config, needs_anchors=trainer.needs_anchors
    )
    encode = None
    if isinstance(trainer.processing_class, ProcessorMixin):
        encode = prepare_images(args, accelerator, policy, trainer.ref_model)
    check_optimizer(trainer.optimizer, policy, critic_of=type(trainer).__name__ if args.has_critic else None)
    if trainer.optimizer is None and accelerator.distributed_type not in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
    ):
        warn_of_rounding(policy, args.learning_rate)  # those two keep a copy in float32
    reference = ReferencePolicy(args, accelerator, lambda: Models(trainer.model, trainer.ref_model), saved)
    if args.sync_ref_model:
        trainer.add_callback(ReferenceUpdates(reference))
    taught = load_teachers(args, accelerator, policy, seam.tokenizer)
    _switch_off_noise(args, accelerator, policy, trainer.ref_model)
    if args.device.type == "cpu":
        # With several processes accelerate says "cpu:0", which `Trainer` hands to `torch.load`, which knows none.
        vars(args)["_setup_devices"] = torch.device("cpu")
    checkpoints = RunCheckpoints(trainer, seam.algorithm, trainer.environment, saved)
    stop = GracefulStop(accelerator)
    trainer.add_callback(stop)
    step = _make_step(trainer, seam, setup, engine, saved, taught, closing, encode)
    for judge in step.rewards.judges.values():
        judge.begin_run(
            args.num_generations, Path(args.output_dir), lambda: checkpoints.run_id,
            accelerator.process_index, accelerator.num_processes,
        )  # fmt: skip
        engine.observers.append(judge.begin)
        closing.callback(judge.close)
    token_ids = (seam.tokenizer.pad_token_id, trainer.eos_token_ids[0])
    measurements = PolicyMeasurements(step.log_prob_passes, accelerator, args.diagnosis_interval, token_ids)
    health = HealthChecks(args, measurements, speaks=accelerator.is_main_process)
    rollout_log = RolloutLog(args, accelerator, trainer.processing_class, checkpoints, health)
    trainer.add_callback(rollout_log)
    playing = engine.beside() if args.batches_ahead else engine
    closing.callback(playing.pool.close)
    closing.callback(playing.pool.abandon)
    return RunParts(
        **vars(step),
        engine=engine,
        reference=reference,
        checkpoints=checkpoints,
        stop=stop,
        guard=StepGuard(),
        health=health,
        rollout_log=rollout_log,
        episode_log=EpisodeLog(args, step.rewards, engine.reports_success, trainer.environment, health.diagnosis.note),
        evaluator=EpisodeEvaluator(args, accelerator, playing, step.sampler, setup.mixture, step.rewards),
    )


def _make_step(
    trainer: Any,
    seam: Seam,
    setup: RunSetup,
    engine: RolloutEngine,
    saved: SavedAdapters | None,
    taught: list[LoadedTeacher],
    closing: ExitStack,
    encode: Callable[[Picture], None] | None,
) -> StepParts:
    """Make what samples and what all forward passes share, then what uses them."""
    args, accelerator, policy = trainer.args, trainer.accelerator, trainer.model
    offloading = activation_offloading(args, policy)
    sampler = RolloutSampler(
        args, accelerator, accelerator.unwrap_model(policy), lambda: trainer.model_wrapped, engine, seam.tokenizer,
        seam.topology,
    )  # fmt: skip
    # The last is closed first: environments end before what answers them.
    for close in (sampler.close, engine.pool.close, engine.pool.abandon):
        closing.callback(close)
    frozen = [model for model in (trainer.ref_model, *(one.model for one in taught)) if model is not None]
    packer = make_packer(args, accelerator, policy, frozen, auxiliary_loss=trainer.aux_loss_enabled)
    token_batches = TokenBatches(
        args, accelerator, packer, policy, auxiliary_loss=trainer.aux_loss_enabled, metrics=seam.metrics,
        loss_needs=None if trainer.loss is None else trainer.loss_needs,
    )  # fmt: skip
    sampler.bound_by(token_batches.room, planned_tokens(engine, setup.first_states))
    runner = EpisodeRunner(engine, sampler)
    rewards = Rewards(
        seam.calculate_rewards, trainer.reward_func_names, trainer.reward_weights, accelerator, seam.pending_metrics,
        seam.pending_columns, setup.arguments["reward_funcs"],
    )  # fmt: skip
    credit = CreditAssignment(trainer.assign_credit, args, accelerator)
    snapshots = Snapshots(lambda: accelerator.unwrap_model(trainer.model)) if args.batches_ahead else None
    tasks = TaskSampling(args, setup.tasks, args.generation_batch_size // args.num_generations)
    draws = EpisodeDraws(
        args, accelerator, tasks, dataset=trainer.train_dataset, rows_are_options=setup.rows_are_options,
        mixture=setup.mixture, placed=_experts(args, setup, engine, seam.tokenizer, closing),
    )  # fmt: skip
    ahead = None
    if snapshots is not None:
        check_plays_ahead(accelerator.unwrap_model(policy), trainer.train_dataset)
        order = RowOrder(seam.train_sampler, args.generation_batch_size, trainer.micro_steps_per_generation)
        ahead = BatchesAhead(
            args.batches_ahead, engine, sampler, snapshots, lambda index: draws.batch_of(order.of(index), index)
        )
        closing.callback(ahead.close)
    collated = partial(
        collate, pad_token_id=seam.tokenizer.pad_token_id, end_token_id=trainer.eos_token_ids[0],
        pad_to_multiple_of=trainer.pad_to_multiple_of, device=accelerator.device, encode=encode,
    )  # fmt: skip
    successes = _kept_successes(args, setup, accelerator, shows_images=encode is not None)
    rollouts = GroupRollouts(args, accelerator, draws, runner, rewards, collated, credit, ahead, successes)
    passes = LogProbPasses(seam.token_log_probs, packer, token_batches, args, accelerator)
    critic: Critic | NoCritic = NoCritic()
    if args.has_critic:
        attach_critic(policy, args, saved, name=type(trainer).__name__)
        targets_of = (lambda turns: trainer.assign_credit(turns).columns[TARGETS]) if trainer.targets_by_row else None
        critic = Critic(args, accelerator, packer, token_batches, targets_of)
        _switch_off_noise(args, accelerator, policy, trainer.ref_model)
        critic.unfreeze(policy)
    # Of a loss of one's own the other terms are not known.
    skips = args.skip_zero_advantage is True if trainer.loss is not None else skips_zero_advantage(args)
    has_own, shown = trainer.loss is not None, args.demonstrations is not None or args.replay_successes
    demonstrated = DemonstrationLoss(args, accelerator, own_loss=has_own) if shown else None
    teacher = None if not taught else Teacher(
        args, accelerator, seam.token_log_probs, packer, taught,
        state=lambda: trainer.state, render=engine.chat.before, own_loss=has_own,
    )  # fmt: skip
    batches = BatchMaker(
        args, accelerator, passes, credit, critic, snapshots, teacher, demonstrated, seam.add_metrics,
        skips_zero_advantage=skips and not (trainer.loss is None and trainer.aux_loss_enabled),
    )  # fmt: skip
    delivery = Delivery(accelerator, lambda: accelerator.unwrap_model(trainer.model))
    mismatch = MismatchMonitor(accelerator, args.max_logprob_gap, sampler.conditions, delivery)
    added = [part for part in (demonstrated, teacher) if part is not None]
    turn_means = [TurnMeans("entropy"), *(part.means for part in added)]
    token_batches.observers = [
        *(means.remember for means in turn_means),
        mismatch.remember,
        critic.remember,
        partial(remember_attributes, offloading),
    ]
    return StepParts(
        sampler=sampler,
        packer=packer,
        token_batches=token_batches,
        runner=runner,
        rewards=rewards,
        rollouts=rollouts,
        log_prob_passes=passes,
        critic=critic,
        batches=batches,
        mismatch=mismatch,
        teacher=teacher,
        added=added,
        turn_means=turn_means,
        offloading=offloading,
    )


def _experts(
    args: MultiTurnConfig, setup: RunSetup, engine: RolloutEngine, tokenizer: Any, closing: ExitStack
) -> Callable[[list[EpisodeSpec], list[int]], list[EpisodeSpec]] | None:
    """Return what lets demonstrations take their places; None without any."""
    if args.demonstrations is None:
        return None
    experts = Demonstrations(args, engine, setup.factories, tokenizer, rows_are_options=setup.rows_are_options)
    closing.callback(experts.close)
    return experts.placed


def _kept_successes(
    args: MultiTurnConfig, setup: RunSetup, accelerator: Accelerator, *, shows_images: bool
) -> Successes | None:
    """Return what keeps the successes of a run; None without ``replay_successes``.

    Raises:
        ValueError: If no row says that a start comes again, or episodes hold images.
    """
    if not args.replay_successes:
        return None
    if not setup.rows_are_options:
        raise ValueError(
            "replay_successes keeps successes by the row of train_dataset that they started from, and this run has none: no "
            "start comes a second time. Pass train_dataset, or leave replay_successes unset."
        )
    if shows_images:
        raise ValueError("replay_successes keeps episodes as text, and these hold images. Leave it unset.")
    return Successes(args.replay_successes, args.num_generations, accelerator)


def state_of(parts: RunParts, steps: int, micro_batches: list[Batch] | None) -> RolloutState:
    """Collect what a checkpoint holds of a run beside its weights.

    Args:
        parts: The parts of the run.
        steps: Micro-steps that were trained.
        micro_batches: The rest of the generation batch.
    """
    states = {
        "watch": parts.health.state(), "skipped_steps": dict(vars(parts.guard)), "pass_tokens": parts.token_batches.budget,
        "rows": parts.sampler.rows, "packing": dict(vars(parts.packer.state)), "tasks": parts.rollouts.state(),
    }  # fmt: skip
    ahead = None if parts.rollouts.ahead is None else parts.rollouts.ahead.state()
    successes = {} if parts.rollouts.successes is None else parts.rollouts.successes.state()
    return RolloutState(steps, micro_batches, states, parts.rollout_log.unfinished, ahead, successes)


def restore_state(parts: RunParts, rollout: RolloutState) -> None:
    """Give the parts of a run their state of a checkpoint.

    Args:
        parts: The parts, changed in place.
        rollout: Their state.
    """
    states = rollout.parts
    parts.health.restore(states.get("watch", {}))
    parts.guard = StepGuard(**states.get("skipped_steps", {}))
    parts.token_batches.restore(states.get("pass_tokens"))
    parts.sampler.restore(states.get("rows"))
    parts.packer.state = PackingState(**states.get("packing", {}))
    parts.rollouts.restore(states.get("tasks", {}))
    if parts.rollouts.ahead is not None and rollout.ahead is not None:
        parts.rollouts.ahead.restore(rollout.ahead)
    if parts.rollouts.successes is not None:
        parts.rollouts.successes.restore(rollout.successes)


def _switch_off_noise(args: MultiTurnConfig, accelerator: Accelerator, *models: Any) -> None:
    """Switch off dropout and other noise; called again after an adapter is added."""
    for model in models if args.disable_dropout else ():
        if model is not None:
            # DeepSpeed has wrapped the reference by now.
            switch_off_noise(accelerator.unwrap_model(model))


def warn_of_unseen_prompts(
    rows: Mapping[str | None, dict[str, Any] | None], first_states: Mapping[str | None, ResetResult | None]
) -> None:
    """Warn of a column ``prompt`` whose text is not in the first observation.

    TRL shows this column to the model. Here a row goes to ``reset``, which decides what the model sees, and may use the
    column otherwise, so this is no error.

    Args:
        rows: The row with which each environment was reset, by its name; None without rows.
        first_states: What ``reset`` returned; None for an agent, which gets the row itself.
    """
    for name, (observation, _) in ((name, start) for name, start in first_states.items() if start is not None):
        prompt = (rows.get(name) or {}).get("prompt")
        said = prompt if isinstance(prompt, str) else _last_content(prompt)
        seen = observation if isinstance(observation, str) else "\n".join(map(text_of, observation))
        if said and said.strip() not in seen:
            logger.warning(
                "train_dataset has a column 'prompt', but the first observation%s does not contain its text: reset() gets "
                "the row as options, and what it returns is all that the model sees. Return options['prompt'] from reset, "
                "pass environment=trl_environment(tools=[...]) for a script with TRL's tools, or rename the column.",
                "" if name is None else f" of {name!r}",
            )


def _last_content(messages: Any) -> str:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return str(last.get("content") or "") if isinstance(last, dict) else ""


def prepare_policy(model: Any, tokenizer: Any, *, auxiliary_loss: bool) -> None:
    """Check the policy that TRL has loaded, and make it ready for training.

    Args:
        model: The policy, adapters included.
        tokenizer: Its tokenizer.
        auxiliary_loss: True if TRL adds the router's auxiliary loss.

    Raises:
        ValueError: For a model or adapter that does not fit TRL's loss, or a tokenizer of another model.
    """
    check_architecture(model, auxiliary_loss)
    check_vocabulary(model, tokenizer)
    disable_bnb_cpu_packing(model)
    fuse(model)


def shows_images(given: Mapping[str, Any]) -> bool:
    """Return whether a run's model reads images, as its arguments say before it is loaded.

    Args:
        given: The arguments of the trainer's constructor, by name.
    """
    model, args = given["model"], given["args"]
    if isinstance(given["processing_class"], PreTrainedTokenizerBase):
        return False
    if not isinstance(model, str):
        return getattr(getattr(model, "config", None), "model_type", None) in SUPPORTED
    init = {name: value for name, value in (args.model_init_kwargs or {}).items() if name in ("revision", "subfolder")}
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code, **init)
    except Exception:  # loading the model says what is wrong
        return False
    return config.model_type in SUPPORTED


def prepare_images(args: Any, accelerator: Accelerator, policy: Any, reference: Any) -> Callable[[Picture], None]:
    """Prepare a policy and its reference for episodes with images, and freeze what encodes these.

    Args:
        args: The trainer's, for episodes.
        accelerator: The trainer's.
        policy: The policy, adapters included.
        reference: A frozen model, or None.

    Returns:
        What gives an image its features.

    Raises:
        ValueError: For an adapter with layers in the image encoder, or options that images do not fit.
    """
    text_only = "For episodes of text, pass the processor's tokenizer as `processing_class`."
    if args.use_vllm:
        _check_images_on_vllm(args, base_model(policy).config.model_type, text_only)
    if args.teacher is not None:
        raise ValueError(
            f"teacher={args.teacher!r} reads text, and processing_class is a processor of images. {text_only}"
        )
    if args.n_gpu > 1 or accelerator.distributed_type not in (DistributedType.NO, *_WHOLE_COPIES):
        raise ValueError(
            "Images are encoded by each process with a whole copy of the model; sharded models and several GPUs in one "
            f"process have none. Launch with DDP. {text_only}"
        )
    if reference is not None:
        prepare_for_images(base_model(accelerator.unwrap_model(reference)))
    reader = prepare_for_images(base_model(policy))
    adapted = [name for name in reader.freeze() if "lora_" in name]
    if adapted:
        raise ValueError(
            f"The adapter has layers in the image encoder, such as {adapted[0]!r}, which is frozen: each image is encoded "
            f"once. Set lora_target_scope='language_model' ('text_model' of Idefics 3 and SmolVLM). {text_only}"
        )
    return reader.encode


def _check_images_on_vllm(args: Any, model_type: str, text_only: str) -> None:
    if model_type not in SERVED:
        raise ValueError(
            f"use_vllm=True shows images to {', '.join(SERVED)}, not to {model_type!r}, whose image tokens see each other. "
            f"Set use_vllm=False. {text_only}"
        )
    alone = {"offload_policy_during_rollout": False, "vllm_tensor_parallel_size": 1, "vllm_model_impl": "vllm"}
    for name, value in alone.items():
        if getattr(args, name) != value:
            raise ValueError(
                f"{name}={getattr(args, name)!r} is not known to work with images, which the trainer's model encodes during "
                f"a rollout. Set {name}={value!r}. {text_only}"
            )


_WHOLE_COPIES = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def check_auxiliary_loss(args: Any, own_loss: str | None, coefficient: float) -> None:
    """Reject options that do not fit a router's auxiliary loss. Only the loaded model says that there is one.

    Args:
        args: The trainer's, for episodes.
        own_loss: Name of the trainer, if it brings a loss of its own.
        coefficient: Weight of the auxiliary loss.

    Raises:
        ValueError: For such an option.
    """
    if args.skip_zero_advantage is True:
        raise ValueError(
            "skip_zero_advantage cannot be combined with the router's auxiliary loss, which every episode trains. Set "
            "router_aux_loss_coef=0.0 in model_init_kwargs, or skip_zero_advantage=False."
        )
    if args.max_tokens_per_micro_batch is not None:
        raise ValueError(
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} cannot be combined with the router's auxiliary "
            "loss, an average over the micro-batch. Set router_aux_loss_coef=0.0 in model_init_kwargs, or leave it unset."
        )
    if own_loss is not None:
        raise ValueError(
            f"{own_loss} brings a loss of its own, which leaves out the router's auxiliary loss: set "
            f"router_aux_loss_coef=0.0, got {coefficient}."
        )


def make_rollout_engine(
    args: MultiTurnConfig,
    setup: RunSetup,
    tokenizer: Any,
    eos_token_ids: list[int],
    model_config: Any,
    *,
    needs_anchors: bool,
) -> RolloutEngine:
    """Make the rollout engine of a run, and check the first prompt of each environment.

    Args:
        args: The trainer's, for episodes.
        setup: The environments, and what they showed first.
        tokenizer: The policy's. It gets the chat template of training, since it is saved with the policy.
        eos_token_ids: Tokens that end an answer.
        model_config: The model's.
        needs_anchors: True if the credit rule compares turns by the state that they started from.

    Raises:
        ValueError: For a template, limits or an environment that do not fit, or a prompt that leaves no room to answer.
    """
    engine = build_engine(
        EpisodeOptions.of_args(args),
        setup.pool,
        tokenizer,
        eos_token_ids=eos_token_ids,
        model_config=model_config,
        append_final_observation=args.bootstrap_at_limits,
    )
    if args.training_chat_template:
        tokenizer.chat_template = engine.chat.chat_template
    for name, state in setup.first_states.items():
        check_first_prompt(engine, state, name, needs_anchor=needs_anchors)
    return engine


def check_optimizer(optimizer: Any, policy: Any, *, critic_of: str | None) -> None:
    """Check that an optimizer that the user has made holds the parameters that are trained.

    Args:
        optimizer: It; None if the trainer makes one.
        policy: The policy, adapters included.
        critic_of: The trainer's name, for errors, if it adds a critic; else None.

    Raises:
        ValueError: If it holds none of them, or there will be a critic, whose parameters no optimizer made before holds.
    """
    if optimizer is None:
        return
    if critic_of is not None:
        raise ValueError(
            f"{critic_of} adds the critic's parameters to the model, which an optimizer made before cannot hold. Leave "
            "`optimizers[0]` unset and use optim, learning_rate and critic_learning_rate."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    missing = [name for name, parameter in trained.items() if id(parameter) not in held]
    if len(missing) == len(trained):
        raise ValueError(
            f"`optimizers[0]` holds none of the {len(trained)} parameters that are trained, such as {missing[0]}, so that "
            "nothing would be learned: peft_config and a model's name make parameters that an optimizer made before cannot "
            "hold. Leave it unset and use optim and learning_rate, or make the adapter first: "
            "model=get_peft_model(model, LoraConfig(...)), the optimizer of its parameters, and peft_config unset."
        )
    if missing:
        logger.warning(
            "`optimizers[0]` leaves out %d of the %d parameters that are trainable, such as %s: they are not trained.",
            len(missing), len(trained), missing[0],
        )  # fmt: skip


def warn_of_rounding(policy: torch.nn.Module, learning_rate: float) -> None:
    """Warn if most of what is trained are 16-bit numbers to which an update of the learning rate's size is rounded away.

    Adam's step of a weight is about the learning rate; a number stays itself if less than half of the distance to the next
    one is added. Up to 4,096 numbers of each parameter are looked at.

    Args:
        policy: The policy, adapters included.
        learning_rate: Of the policy, at its largest.
    """
    lost = total = 0.0
    for parameter in policy.parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        total += parameter.numel()
        if parameter.dtype in (torch.bfloat16, torch.float16):
            seen = parameter.detach().flatten()[:: max(1, parameter.numel() // 4096)].float()
            half = torch.finfo(parameter.dtype).eps / 4 * torch.exp2(torch.frexp(seen).exponent)
            lost += parameter.numel() * float(((half > learning_rate) & (seen != 0)).float().mean())
    if lost > total / 2:
        logger.warning(
            "%.0f%% of what is trained are weights in 16 bits that an update with learning_rate=%s is too small to change: "
            "it is rounded away. Load the model in float32 (model_init_kwargs={'dtype': 'float32'}; bf16=True computes in "
            "bfloat16 all the same), train an adapter, or raise learning_rate.",
            100 * lost / total, learning_rate,
        )  # fmt: skip


def activation_offloading(args: MultiTurnConfig, model: Any) -> AbstractContextManager[Any]:
    """Make the context of a training step: TRL's offloading of activations with ``activation_offload``."""
    return get_act_offloading_ctx_manager(model=model) if args.activation_offload else nullcontext()


def disable_bnb_cpu_packing(model: Any) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference, which it does at the first rollout on some CPUs (AVX512).

    Packed weights stay packed, and no gradient flows back through them. The layers below would train on a wrong gradient,
    with a warning only.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_architecture(model: Any, aux_loss_enabled: bool) -> None:
    """Reject models and adapters that do not fit TRL's loss, and models whose rows depend on each other.

    Args:
        model: The policy, adapters included.
        aux_loss_enabled: True if TRL adds the router's auxiliary loss.

    Raises:
        ValueError: For such a model.
    """
    base = base_model(model)
    name, config = type(base).__name__, base.config.get_text_config()
    check_padding(base)
    if base.base_model is base:
        # TRL's fused head runs the decoder, which Llama 4's text model does not name.
        if not isinstance(getattr(base, "model", None), PreTrainedModel):
            raise ValueError(
                f"{name} does not say which of its modules is the decoder (base_model_prefix): choose another."
            )
        base.base_model_prefix = "model"
    if isinstance(base.get_output_embeddings(), TrainableTokensWrapper):
        raise ValueError(
            f"trainable_token_indices reach the output head of {name}, which is tied to its embeddings, and TRL's loss "
            "cannot be computed through them. Leave trainable_token_indices unset, or choose a model with "
            "tie_word_embeddings=False."
        )
    if aux_loss_enabled and not hasattr(config, "num_experts"):
        raise ValueError(
            f"The router's auxiliary loss of {name} cannot be computed: its configuration has no num_experts, which TRL "
            "reads. Set router_aux_loss_coef=0.0."
        )


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Reject a tokenizer with tokens that the model has no embedding for.

    Args:
        model: The policy, adapters included.
        tokenizer: Its tokenizer.

    Raises:
        ValueError: For such a tokenizer.
    """
    rows, highest = base_model(model).config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise ValueError(
            f"The tokenizer has token {highest}, but the model has embeddings for {rows} tokens only: they belong to "
            "different models, or tokens were added after training. Pass the model's own tokenizer as processing_class."
        )


def make_packer(
    args: MultiTurnConfig, accelerator: Accelerator, policy: Any, frozen: Sequence[Any], *, auxiliary_loss: bool
) -> Packer:
    """Make the packer of a policy, its reference and its teacher, before the policy is wrapped and gets a critic.

    Args:
        args: The trainer's, for episodes.
        accelerator: The trainer's.
        policy: The policy.
        frozen: The frozen models beside it.
        auxiliary_loss: True if TRL adds the router's auxiliary loss.

    Raises:
        ValueError: With ``sequence_packing="prefix"``, if the rows of the run cannot be packed.
    """
    # Accelerate has wrapped them by now.
    models = [policy, *map(accelerator.unwrap_model, frozen)]
    reasons = {
        "the router's auxiliary loss averages over all tokens, shared ones too": auxiliary_loss,
        "rows that share tokens would share their dropout": any(is_noisy(model) for model in models),
        "several GPUs in one process split its rows": args.n_gpu > 1,
    }
    return Packer(
        args.sequence_packing,
        models,
        accelerator,
        forbidden=next((reason for reason, holds in reasons.items() if holds), None),
        dtype=compute_dtype(args, policy),
        compiled=args.torch_compile,
        kept_head=KeptHead(args.temperature, in_fp32=args.cast_lm_head_to_fp32),
    )


def check_machine(args: MultiTurnConfig) -> None:
    """Reject options that this machine does not support.

    Raises:
        ImportError: If vLLM is asked for and not installed.
        ValueError: For options that need a GPU, on CPU.
    """
    if args.use_vllm and not is_vllm_available():
        raise ImportError("use_vllm=True needs vLLM, which is not installed: pip install 'agile-trainers[vllm]'.")
    check_rules(args, MACHINE)


def training_rows(args: MultiTurnConfig, dataset: Any) -> Any:
    """Make the data set that paces training: the user's, or empty rows.

    ``Trainer`` ends an optimizer step early where an epoch ends. So there are as many empty rows as it takes until a
    generation batch and an optimizer step end together, and the rows that a stream has left over after the last of these
    are not read (``Trainer`` would add their gradient to the next step). Other data sets end their epochs as in ``Trainer``.

    Args:
        args: The trainer's, for episodes.
        dataset: The user's, or None.

    Raises:
        ValueError: If nothing says how long to train, or the rows do not suffice for a single step.
    """
    groups = args.generation_batch_size // args.num_generations
    micro_steps, accumulation = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps or 1
    whole = groups * (accumulation // gcd(accumulation, micro_steps))
    if dataset is None:
        if not args.shuffle_dataset:
            raise ValueError(
                "shuffle_dataset=False has no effect without a train_dataset, whose rows it keeps in order. Leave it unset."
            )
        if args.max_steps <= 0:
            raise ValueError(
                f"Without a train_dataset, max_steps must say how long to train; it is {args.max_steps}. Set max_steps "
                "to a positive number of updates, or pass a train_dataset."
            )
        return copy(_empty_rows(whole))
    if isinstance(dataset, IterableDataset):
        return _whole_steps(args, dataset, whole)
    if isinstance(dataset, Dataset) and len(dataset) < groups:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but a generation batch takes {groups} (generation_batch_size="
            f"{args.generation_batch_size} / num_generations={args.num_generations}): not a single step would be "
            f"trained. Pass more rows, or lower gradient_accumulation_steps={args.gradient_accumulation_steps}, "
            "steps_per_generation or per_device_train_batch_size."
        )
    if isinstance(dataset, Dataset) and (there := len(dataset) // groups * micro_steps) < accumulation:
        logger.warning(
            "An epoch of train_dataset (%d rows) has %d micro-batches, and gradient_accumulation_steps=%d: an update ends "
            "with the epoch, so each is made on %d micro-batches only. Pass more rows, or lower "
            "gradient_accumulation_steps.",
            len(dataset), there, accumulation, there,
        )  # fmt: skip
    return dataset


@lru_cache(maxsize=16)
def _empty_rows(count: int) -> Dataset:
    """Make rows for all runs of a process: to hash them anew takes as long as a forward pass of a small model."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * count})


def _whole_steps(args: MultiTurnConfig, dataset: IterableDataset, rows: int) -> IterableDataset:
    """Cut a stream after its last full batch of ``rows`` rows.

    Raises:
        ValueError: If there are fewer rows, or ``max_steps``, the only length of a run on a stream, is not set.
    """
    if args.max_steps <= 0:
        raise ValueError(
            f"A stream does not say how long it is, so max_steps must say how long to train; it is {args.max_steps}. Set "
            "max_steps to a positive number of updates."
        )
    there = sum(1 for _ in islice(dataset, rows))
    if there < rows:
        raise ValueError(
            f"train_dataset is a stream of {there} rows, but whole updates on whole generation batches take {rows} "
            f"(generation_batch_size={args.generation_batch_size}, num_generations={args.num_generations}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}): not a single step would be trained. Pass "
            "more rows, raise num_generations, or lower per_device_train_batch_size, steps_per_generation or "
            "gradient_accumulation_steps."
        )

    def unless_cut_off(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return columns if all(len(values) == rows for values in columns.values()) else {name: [] for name in columns}

    return dataset.map(unless_cut_off, batched=True, batch_size=rows)
