"""Trains and evaluates members for a round, over the processes of a launcher: ordinary trainers on the shared base."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import logging
from trl.trainer.utils import create_model_from_path

from agile_trainers.adapters.folders import RECORD, read_json, write_json
from agile_trainers.adapters.loading import OnBase, SavedAdapters, find_adapters, load_base, read_weights
from agile_trainers.adapters.roles import POLICY
from agile_trainers.adapters.untrusted import naming_folder
from agile_trainers.checkpoints.integrity import check_complete, checkpoints, mark_complete, step_of
from agile_trainers.checkpoints.stopping import RUN_AGAIN
from agile_trainers.envs.checker import EnvironmentProtocolError
from agile_trainers.evaluation.results import EpisodeResults, evaluation_episodes, play_evaluation
from agile_trainers.evaluation.statistics import numbered
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.seeds import HELD_OUT, SELECTION, preserved_random_state, with_names
from agile_trainers.rollout.spec import EpisodeSpec
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.sampling.served_policy import SavedAdapter
from agile_trainers.trainers.evaluation import rows_of
from agile_trainers.trainers.setup import RunSetup
from agile_trainers.trainers.trainer import MultiTurnTrainer
from agile_trainers.types import StopReason, Trajectory


class SharedBase:
    """The frozen base of all members, and the adapter that they start from, if any.

    A trainer changes its model's modules: it adds adapters, a value head, hooks and methods. So each trainer gets modules of
    its own, whose parameters share the memory of the base (:meth:`lend`), and nothing has to be undone.

    Args:
        model: Folder or Hub id of a model or of a saved adapter.
        args: The configuration of the members; its ``model_init_kwargs`` say how to load.
        quantization_config: As for a trainer.
    """

    def __init__(self, model: str, args: Any, quantization_config: Any = None) -> None:
        init = {"trust_remote_code": args.trust_remote_code, "device_map": None, **(args.model_init_kwargs or {})}
        if quantization_config is not None:
            init["quantization_config"] = quantization_config
        self.adapters: SavedAdapters | None = find_adapters(model, init.get("revision"))
        check_lendable(self.adapters)
        if self.adapters is None:
            with naming_folder(model):
                base = create_model_from_path(model, **init)
        else:
            base = load_base(self.adapters, **init)
        if getattr(base.config, "quantization_config", None) is None:
            base = base.to(args.device)
        self._base: PreTrainedModel = base

    def lend(self, adapters: SavedAdapters | None = None) -> PreTrainedModel | OnBase:
        """Return what a trainer takes as ``model``: new modules on the memory of the base.

        Args:
            adapters: A saved policy to put on it. Default: the adapter that all members start from, if any.
        """
        memo: dict[int, Any] = {id(one): _sharing(one) for one in self._base.parameters()}
        base = copy.deepcopy(self._base, memo)
        adapters = adapters or self.adapters
        return base if adapters is None else OnBase(adapters, base)

    def digest(self) -> str:
        """Return a hash (SHA-256) of all parameters and buffers, names included."""
        digest = hashlib.sha256()
        for name, tensor in self._base.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                digest.update(name.encode())
                digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def check_lendable(saved: SavedAdapters | None) -> None:
    """Reject a saved adapter that changes the base's own memory when it is loaded. PiSSA's gets weights of its own.

    Raises:
        ValueError: If it does.
    """
    if saved is not None and saved.config.init_lora_weights == "olora":
        raise ValueError(
            f"{saved.source} was made with init_lora_weights='olora': each time it is loaded it changes the base, which "
            "members share. Merge it into the base, save that, and pass it as `model` with a `peft_config`."
        )


def _sharing(parameter: nn.Parameter) -> nn.Parameter:
    """Make another parameter on the same memory. One of a quantization library's own class is shared itself."""
    if type(parameter) is not nn.Parameter:
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


logger = logging.get_logger(__name__)

Fitness = str | Callable[[Trajectory], float]
"""``return``, ``success``, ``reward`` (the return and the reward functions, weighted), or a function of an episode."""
REWARD = "reward"
_PASSING = (OSError, MemoryError, torch.AcceleratorError, EnvironmentProtocolError)
"""Errors of the machine or the environment, which are no member's own. A full GPU is not among them: a policy that writes at
such length would fill it again."""


@dataclass(frozen=True)
class Result:
    """The outcome of a member's round, a JSON file of its own."""

    member: int
    round: int
    steps: int
    """Optimizer steps of its weights."""
    episodes: int
    """Training episodes that the round played."""
    values: list[float | None]
    """Fitness of each evaluation episode; None where the environment failed."""
    units: list[int]
    """The unit of each evaluation episode."""
    seconds: float
    failed: str = ""
    """The error that ended the round."""
    diverged: bool = False
    """True if the error is of numbers that are not finite, as it would be again."""
    reported: bool = True
    """False if the fitness is the success and no episode reported it."""
    unreported: int = 0
    """Number of evaluation episodes that report no success although others do."""
    lowest: float | None = None
    """The lowest possible fitness of an episode, if it is known."""

    @property
    def failed_episodes(self) -> int:
        """Number of evaluation episodes whose environment failed."""
        return self.values.count(None)


@dataclass(frozen=True)
class Assignment:
    """The round of a member."""

    member: int
    round: int
    args: Any
    """Its configuration, with a folder of its own."""
    end: int
    """The optimizer step that ends the round."""
    episodes: int
    """Training episodes of the round."""
    source: Path | None = None
    """The checkpoint that a copy starts from; None for a member that goes on or starts anew."""

    @property
    def folder(self) -> Path:
        """The member's folder, an ordinary policy's."""
        return Path(self.args.output_dir)


class Rounds:
    """Trains members by assignments, one after another, with what all of them share.

    Args:
        base: The shared base.
        trainer: The algorithm.
        arguments: Further arguments of each trainer: environment, data sets, adapter, reward functions.
        fitness: See :data:`Fitness`.
        on_trainer: Called with each trainer and its member's number before it trains.
    """

    def __init__(
        self,
        base: SharedBase,
        trainer: type[MultiTurnTrainer],
        arguments: dict[str, Any],
        fitness: Fitness,
        on_trainer: Callable[[MultiTurnTrainer, int], None] | None = None,
    ) -> None:
        self._base, self._trainer, self._arguments = base, trainer, arguments
        self._fitness, self._on_trainer = fitness, on_trainer

    def make_trainer(self, args: Any, saved: SavedAdapters | None = None) -> MultiTurnTrainer:
        """Make the ordinary trainer of a member on the shared base, or that of a saved policy."""
        args, arguments = copy.copy(args), dict(self._arguments)
        args.model_init_kwargs = None  # the base is loaded
        if saved is not None:
            args.merge_lora_configs, arguments["peft_config"] = False, None
        for name in ("processing_class", "peft_config"):
            arguments[name] = copy.deepcopy(arguments.get(name))  # a trainer changes them
        return self._trainer(model=self._base.lend(saved), args=args, **arguments)

    def replay(self, folder: Path, args: Any, evaluation: Any) -> EpisodeResults:
        """Play held-out episodes, by which nobody was chosen, with a saved policy.

        Args:
            folder: The policy's.
            args: Configuration of the member that it is of.
            evaluation: Configuration of the evaluation.
        """
        saved = find_adapters(str(folder))
        assert saved is not None
        trainer = self.make_trainer(args, saved)
        try:
            if trainer.sampler.vllm is None:
                return self._evaluate(trainer, evaluation, HELD_OUT)
            return self._evaluate_adapters(trainer, [saved_adapter(folder)], evaluation, HELD_OUT)[0]
        finally:
            del trainer
            _let_go()

    def run(self, assignments: Sequence[Assignment], evaluation: Any) -> Iterator[Result]:
        """Train and evaluate members. An error of its own ends a member's round; one of the machine ends the run.

        With vLLM the members are evaluated when all are trained, in one batch; otherwise each after its training.

        Args:
            assignments: The members' rounds.
            evaluation: Configuration of the evaluation, the same for all members.

        Yields:
            The result of each, in their order.
        """
        rounds = [_Round(one) for one in assignments]
        for one in rounds:
            with one.own_part():
                self._train(one, evaluation)
            if not evaluation.use_vllm:
                yield one.result(self._fitness)
        if evaluation.use_vllm:
            self._evaluate_together([one for one in rounds if not one.failed], evaluation)
            yield from (one.result(self._fitness) for one in rounds)

    def _train(self, one: _Round, evaluation: Any) -> None:
        assignment = one.assignment
        if assignment.source is not None and not checkpoints(assignment.folder):
            continue_checkpoint(assignment.source, assignment.folder, assignment.args.num_iterations)
        there = checkpoints(assignment.folder)
        if assignment.round > 1 and not there:
            raise FileNotFoundError(
                f"{assignment.folder} has no checkpoint any more, from which its member begins round {assignment.round}."
            )
        trainer = self.make_trainer(assignment.args)
        trainer.add_callback(_EndOfRound(assignment.end))
        trainer.stop.way_on = RUN_AGAIN
        if self._on_trainer is not None:
            self._on_trainer(trainer, assignment.member)
        trainer.train(resume_from_checkpoint=True if there else None)
        trainer.save_model()
        one.steps = trainer.state.global_step
        if trainer.sampler.vllm is None:
            one.results = self._evaluate(trainer, evaluation)
        else:
            trainer.sampler.vllm.release()

    def _evaluate_together(self, rounds: Sequence[_Round], evaluation: Any) -> None:
        adapters: dict[int, SavedAdapter] = {}
        for one in rounds:
            with one.own_part():
                adapters[one.assignment.member] = saved_adapter(one.assignment.folder)
        rounds = [one for one in rounds if not one.failed]
        if not rounds:
            return
        trainer = self.make_trainer(rounds[0].assignment.args)
        assert trainer.sampler.vllm is not None
        limit = trainer.sampler.vllm.max_adapters or len(rounds)
        for several in (rounds[start : start + limit] for start in range(0, len(rounds), limit)):
            started = time.perf_counter()
            policies = [adapters[one.assignment.member] for one in several]
            played = self._evaluate_adapters(trainer, policies, evaluation)
            for one, one.results in zip(several, played, strict=True):
                one.seconds += (time.perf_counter() - started) / len(several)

    def _evaluate(self, trainer: MultiTurnTrainer, evaluation: Any, domain: int = SELECTION) -> EpisodeResults:
        """Play the evaluation episodes with the policy of a trainer, through its own sampler."""
        generator = trainer.sampler.generator(settings=sampling_settings(evaluation, not evaluation.eval_greedy))
        return self._play(trainer, _episodes(trainer.setup, evaluation, domain), generator)

    def _evaluate_adapters(
        self, trainer: MultiTurnTrainer, adapters: Sequence[SavedAdapter], evaluation: Any, domain: int = SELECTION
    ) -> list[EpisodeResults]:
        """Play the evaluation episodes with each of several policies, in one batch on vLLM.

        Args:
            trainer: One with ``use_vllm``; its own policy does not matter.
            adapters: The policies, at most as many as its engine serves at the same time.
            evaluation: Configuration of the evaluation.
            domain: What the episodes are for: ``SELECTION`` or ``HELD_OUT``.
        """
        specs = _episodes(trainer.setup, evaluation, domain)
        number, settings = len(specs), sampling_settings(evaluation, not evaluation.eval_greedy)
        generator = trainer.sampler.generator_of_several(adapters, lambda episode: episode // number, settings)
        played = self._play(trainer, specs * len(adapters), generator)
        parts = (slice(start, start + number) for start in range(0, len(played.rows), number))
        return [
            replace(
                played,
                specs=specs,
                trajectories=played.trajectories[part],
                places=list(range(number)),
                rows=played.rows[part],
                starts=played.starts[part],
            )
            for part in parts
        ]

    def _play(
        self, trainer: MultiTurnTrainer, specs: list[EpisodeSpec], generator: AbstractContextManager[Generator]
    ) -> EpisodeResults:
        engine, greedy = trainer.engine, bool(trainer.args.eval_greedy)
        assert engine is not None
        try:
            with preserved_random_state():
                played = replace(play_evaluation(engine, generator, specs), greedy=greedy)
                if self._fitness != REWARD:
                    return played
                options = with_names([spec.options or {} for spec in specs], specs)
                totals = trainer.rewards.totals(trainer.rewards.of(options, played.trajectories)).tolist()
                rewards = (None if math.isnan(total) else total for total in totals)
                rows = [{**row, REWARD: reward} for row, reward in zip(played.rows, rewards, strict=True)]
                return replace(played, rows=rows)
        finally:
            engine.pool.close()


def _episodes(setup: RunSetup, evaluation: Any, domain: int) -> list[EpisodeSpec]:
    rows, number = rows_of(setup.eval_rows, None), evaluation.num_eval_episodes
    return evaluation_episodes(evaluation.seed, number, rows, setup.mixture, domain=domain)


@dataclass
class _Round:
    """The round of a member under way."""

    assignment: Assignment
    steps: int = 0
    seconds: float = 0.0
    results: EpisodeResults | None = None
    failed: str = ""
    diverged: bool = False

    @contextmanager
    def own_part(self) -> Iterator[None]:
        """Count the time of a part of the round; an error in it is the member's own, unless it passes."""
        started = time.perf_counter()
        try:
            yield
        except _PASSING:
            raise
        except Exception as error:
            logger.warning("Member %d failed: %s", self.assignment.member, error, exc_info=True)
            self.failed, self.diverged = f"{type(error).__name__}: {error}", isinstance(error, FloatingPointError)
        finally:
            _let_go()
            self.seconds += time.perf_counter() - started

    def result(self, fitness: Fitness) -> Result:
        """Return the outcome, after the evaluation."""
        values: list[float | None] = []
        if self.results is not None:
            with self.own_part():
                values = fitness_values(self.results, fitness)
        sound = [value for value in values if value is not None]
        if not self.failed and values and not sound:
            error = next((one.error for one in self.results.trajectories if one.error), "") if self.results else ""
            self.failed = f"All {len(values)} evaluation episodes failed in the environment: {error}"
        if not self.failed and not (sound and all(map(math.isfinite, sound))):
            self.failed, self.diverged = "The fitness is not a finite number.", bool(sound) or self.diverged
        of, steps = self.assignment, 0 if self.failed else self.steps
        outcome = Result(of.member, of.round, steps, of.episodes, values, [], self.seconds, self.failed, self.diverged)
        if self.results is None:
            return outcome
        rows = self.results.rows
        return replace(
            outcome,
            units=numbered(self.results.units),
            reported=fitness != "success" or any(row["success"] is not None for row in rows),
            unreported=sum(not row.get("success_reported", True) for row in rows),
            lowest=lowest_fitness(self.results, fitness),
        )


def lowest_fitness(results: EpisodeResults, fitness: Fitness) -> float | None:
    """Return the lowest possible fitness of an episode, if it is known."""
    limits = results.limits(fitness) if isinstance(fitness, str) and fitness != REWARD else None
    return None if limits is None else limits[0]


class _EndOfRound(TrainerCallback):
    """Saves a checkpoint and stops at the last step of a round."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Killed between the round's last checkpoint and its result.
        control.should_training_stop = state.global_step >= self._step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self._step:
            control.should_save = control.should_training_stop = True


def saved_adapter(folder: Path) -> SavedAdapter:
    """Read a member's policy from its folder.

    Raises:
        FloatingPointError: If a weight is not a finite number.
    """
    saved = find_adapters(str(folder))
    assert saved is not None
    weights = read_weights(saved.folders[POLICY])
    broken = [name for name, weight in weights.items() if not weight.isfinite().all()]
    if broken:
        raise FloatingPointError(
            f"{len(broken)} of the policy's {len(weights)} weights are not finite: {broken[0]}, ..."
        )
    return weights, saved.config


def fitness_values(results: EpisodeResults, fitness: Fitness) -> list[float | None]:
    """Return the fitness of each episode; None where the environment failed, or nothing gave a reward that was asked for.

    Success that is not reported is 0.

    Args:
        results: Of an evaluation in one process.
        fitness: See :data:`Fitness`.
    """
    values: list[float | None] = []
    for row, trajectory in zip(results.rows, results.trajectories, strict=True):
        if StopReason(row["stop_reason"]).failed or (fitness == REWARD and row[REWARD] is None):
            values.append(None)
            continue
        value = row[fitness] if isinstance(fitness, str) else fitness(trajectory)
        values.append(float(value or 0.0))
    return values


def forget_checkpoints(folder: Path, before: int | None) -> None:
    """Delete a member's checkpoints of steps before this one, or all, from which nobody goes on any more."""
    for checkpoint in checkpoints(folder):
        if before is None or step_of(checkpoint) < before:
            shutil.rmtree(checkpoint)


def _let_go() -> None:
    """Free a trainer, which is part of cycles, and its memory on a GPU; on CPU the next one's start does so."""
    clear_device_cache(garbage_collection=torch.cuda.is_available())


_STATE, _SCHEDULER = "trainer_state.json", "scheduler.pt"


def continue_checkpoint(checkpoint: Path, output_dir: Path, num_iterations: int) -> Path:
    """Copy a checkpoint, its optimizer and random states included, into the folder of another run.

    With another ``num_iterations`` a generation batch takes another number of optimizer steps. The step of the copy, and of
    its learning rate schedule, is then the one at which a run with that number has played as many generation batches.

    Args:
        checkpoint: A complete checkpoint, saved at the end of a generation batch if ``num_iterations`` differs.
        output_dir: Folder of the other run.
        num_iterations: Of the other run.

    Returns:
        The copy, a complete checkpoint in ``output_dir``.

    Raises:
        CheckpointError: If the checkpoint is incomplete.
        ValueError: If the other run has no such step.
    """
    check_complete(checkpoint)
    record = read_json(checkpoint / RECORD)
    ratio = Fraction(num_iterations, int(record["options"]["num_iterations"]))
    step = ratio * int(record["global_step"])
    if step.denominator != 1:
        raise ValueError(
            f"{checkpoint} cannot be continued with num_iterations={num_iterations}: step {record['global_step']} is inside "
            "a generation batch of that run."
        )
    building, folder = output_dir / f"continued-{step}", output_dir / f"checkpoint-{step}"
    shutil.rmtree(building, ignore_errors=True)  # left by a killed process
    shutil.copytree(checkpoint, building)
    # Without an id, the run that resumes here begins a branch.
    write_json(building / RECORD, {**record, "global_step": int(step), "run_id": ""})
    if ratio != 1:
        state = read_json(building / _STATE)
        write_json(building / _STATE, {**state, "global_step": int(step), "max_steps": int(ratio * state["max_steps"])})
        schedule = torch.load(building / _SCHEDULER, weights_only=True)
        schedule["last_epoch"] = int(step)
        schedule["_step_count"] = int(step) + 1
        torch.save(schedule, building / _SCHEDULER)
    mark_complete(building)
    building.rename(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------ processes


_OF_A_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "GROUP_WORLD_SIZE", "ROLE_NAME",
)  # fmt: skip
_SHARDED = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
_SECONDS = 0.5
"""Time between two looks for the results of other processes."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train members of one population."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """True for the process that writes the lineage."""
        return self.rank == 0

    def wait_for(self, files: list[Path]) -> None:
        """Wait until files exist that other processes write; a launcher stops all processes when one of them fails."""
        while self.count > 1 and not all(file.is_file() for file in files):
            time.sleep(_SECONDS)


def split_processes() -> Processes:
    """Make each process of ``accelerate launch`` or ``torchrun`` a run of its own, for :class:`Population`.

    Call it before anything else, in particular before a trainer's configuration is made: it removes the launcher's variables
    from the environment, and leaves one GPU visible. The processes share ``output_dir``, by which they meet.

    Returns:
        The ``processes`` of a population; a single one without a launcher.

    Raises:
        RuntimeError: If this process joined the others already.
        ValueError: If the launch configuration shards one model over the processes, or there are more of them than GPUs.
    """
    count, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if count == 1:
        return Processes()
    for name in _SHARDED:
        if os.environ.get(name, "false").lower() == "true":
            raise ValueError(
                f"{name}=true shards one model over the processes, but each member is trained by one process. "
                "Launch with a configuration without DeepSpeed and FSDP, such as accelerate_configs/ddp.yaml."
            )
    if PartialState._shared_state or torch.distributed.is_initialized() or torch.cuda.is_initialized():
        raise RuntimeError(
            "split_processes() comes too late: this process has joined the others or taken a GPU. Call it before a "
            "configuration, a model or an Accelerator is made."
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    for name in _OF_A_LAUNCHER:
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "":  # empty: there is no GPU to divide
        devices = visible.split(",") if visible else [str(number) for number in range(local + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local % len(devices)]
        if not visible and torch.cuda.device_count() == 0:  # of that number, or none at all
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
            if torch.cuda.device_count():
                raise ValueError(
                    f"This machine has no GPU for process {local} of {count}. Launch at most as many processes as it has "
                    "GPUs, or name those to share in CUDA_VISIBLE_DEVICES."
                )
    return Processes(rank, count)


def check_alone() -> None:
    """Raise if this process is one of several that train together.

    Raises:
        RuntimeError: If it is, since a member of a population is trained by one process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "A population in several processes needs `processes = split_processes()` at the very beginning of the script, "
            "and Population(..., processes=processes)."
        )
