"""A population: members that differ in hyperparameters, trained in turn on one base, selected and copied round by round."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from huggingface_hub import CommitInfo, EvalResult, create_repo, upload_folder
from transformers.utils import logging

from agile_trainers.adapters.folders import (
    RECORD,
    CheckpointError,
    Count,
    Fields,
    form_of,
    read_form,
    read_json,
    write_json,
)
from agile_trainers.adapters.loading import find_adapters
from agile_trainers.adapters.lora_settings import changes_base, check_bias, lora_settings
from agile_trainers.checkpoints import model_card
from agile_trainers.checkpoints.disclosure import (
    CARD,
    check_public,
    copy_policy,
    differences,
    flat_environment,
    masked,
    note_private,
    public_arguments,
    public_options,
    shorten_paths,
    warn_of_unknown,
    withheld_values,
)
from agile_trainers.checkpoints.hub import make_repository, retried
from agile_trainers.checkpoints.integrity import checkpoints, step_of
from agile_trainers.checkpoints.resuming import locked, recorded_options
from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.rules import check_values
from agile_trainers.evaluation.statistics import numbered
from agile_trainers.populations.hyperparameters import (
    HyperparameterConfig,
    SearchSpace,
    Values,
    changes_between,
    search_space,
    with_values,
)
from agile_trainers.populations.lineage import (
    FILE,
    EventKind,
    HeldOut,
    Lineage,
    LineageEvent,
    Round,
    finite,
    with_error,
)
from agile_trainers.populations.members import (
    REWARD,
    Assignment,
    Fitness,
    Processes,
    Result,
    Rounds,
    SharedBase,
    check_alone,
    check_lendable,
    fitness_values,
    forget_checkpoints,
    lowest_fitness,
)
from agile_trainers.populations.selection import (
    Schedule,
    Score,
    Strategy,
    Successor,
    ranked,
    strategy_of,
    with_failures,
)
from agile_trainers.records.plain import stable_text
from agile_trainers.rollout.seeds import Mixture
from agile_trainers.sampling.sampler import shared_engine
from agile_trainers.step.reward import listed_functions
from agile_trainers.trainers.mixture import names_of
from agile_trainers.trainers.registry import find_algorithm
from agile_trainers.trainers.trainer import MultiTurnTrainer

logger = logging.get_logger(__name__)

BEST = "best"
"""Folder of the best policy of all rounds so far, in a population's."""
_SETTINGS, _WINNER = "population.json", "winner.json"
_WINNER_FORM = Fields({"member": Count, "round": Count}, required=("member", "round"))
_ANEW = "Restore it, or choose another output_dir to train the population anew."
_STREAMED = 1000
"""Rows of a streamed data set that tell it from another."""
_BY_VALUE = ("environment_arguments", "options", "data")
"""Settings whose values may be withheld."""
_SETTINGS_FORM = Fields({name: {str: Any} for name in _BY_VALUE})
_APART = (*_BY_VALUE, "max_hours")
"""Settings that are compared on their own, or that may change."""
_MAX_ADAPTERS = 8
"""Most members whose policies a vLLM engine samples in one batch."""
_OWN_LOGS = ("none", "tensorboard")
"""Reporters that log each member into its own folder."""


class PopulationError(RuntimeError):
    """Raised when no member is left, or a folder holds another population."""


@dataclass(frozen=True)
class _Member:
    """A member that trains in the next round."""

    number: int
    hyperparameters: Values
    source: Path | None = None
    """The checkpoint that a copy starts from."""


class Population:
    """Trains members that differ in hyperparameters, on one frozen base, and selects among them after each round.

    A member is a policy's folder, ``output_dir/member-00`` and so on, with checkpoints. In a round, each member's ordinary
    trainer is made on the shared base, resumes from the member's checkpoint, trains to the round's last step and is
    evaluated; then the base is free for the next. So a device holds the base and one member. All members play the same
    evaluation episodes, with the sampling settings of ``args``. With vLLM they share an engine, and their evaluation is one
    batch after the round's training.

    Args:
        algorithm: Name of an algorithm (``"grpo"``, ``"module.path:Class"``) or a trainer class.
        model: Folder or Hub id of the model, or of a saved adapter that all members start from. It is loaded once.
        args: The configuration that the members share. ``output_dir`` is the population's folder; ``max_steps`` is the
            length of one member's whole run, which schedules refer to; ``num_eval_episodes`` are played after each round.
        environment: As for a trainer.
        hyperparameters: The options in which members differ, and their ranges.
        members: Number of members.
        rounds: Number of rounds of equal length in ``max_steps``, or the steps at which rounds end (of a member with the
            ``num_iterations`` of ``args``).
        strategy: ``"halving"`` (default up to 16 members), ``"tournament"`` (default above), or an object such as
            ``Tournament(size=3)``.
        fitness: ``"return"``, ``"success"``, ``"reward"`` (return and reward functions together, by their weights), or a
            function of an evaluation episode. Default: ``"reward"`` with ``reward_funcs``, else ``"return"``.
        max_episodes: Training episodes of all members together, after which the search ends. Default: no limit.
        max_hours: Hours of training and evaluation, summed over members, after which no round begins. Default: no limit.
        seed: Of the hyperparameters' first values, of selection and of mutation. All members train with ``args.seed``.
        train_dataset: As for a trainer, also the arguments that follow.
        eval_dataset: One data set, or None.
        reward_funcs: Called for all members.
        processing_class: Copied for each member.
        quantization_config: Of the base.
        peft_config: Of each member. Leave it out where ``model`` is an adapter.
        on_trainer: Called with each trainer and its member's number before it trains, for callbacks and progress.
        processes: Of :func:`~agile_trainers.populations.members.split_processes`, with several processes.

    Raises:
        ValueError: For options in which members cannot differ, or that a population cannot use.
        RuntimeError: In a process that trains together with others.
    """

    def __init__(
        self,
        algorithm: str | type[MultiTurnTrainer],
        model: str,
        args: MultiTurnConfig,
        environment: Any,
        hyperparameters: HyperparameterConfig,
        *,
        members: int = 8,
        rounds: int | Sequence[int] = 10,
        strategy: str | Strategy | None = None,
        fitness: Fitness | None = None,
        max_episodes: int | None = None,
        max_hours: float | None = None,
        seed: int = 0,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        reward_funcs: Any = None,
        processing_class: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        on_trainer: Callable[[MultiTurnTrainer, int], None] | None = None,
        processes: Processes | None = None,
    ) -> None:
        check_alone()
        trainer = find_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
        measures = ("return", "success", REWARD) if listed_functions(reward_funcs) else ("return", "success")
        fitness = fitness or (REWARD if REWARD in measures else "return")
        _check_options(args, trainer)
        if members < 2:
            raise ValueError(f"members must be at least 2, got {members}.")
        if not callable(fitness) and fitness not in measures:
            raise ValueError(
                f"fitness must be {', '.join(map(repr, measures))} or a function of an episode, got {fitness!r}."
            )
        for name, budget in (("max_episodes", max_episodes), ("max_hours", max_hours)):
            if budget is not None and not budget > 0:
                raise ValueError(f"{name} must be above 0, got {budget}.")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}.")
        _check_base(model, peft_config)
        if isinstance(eval_dataset, dict):
            raise ValueError("eval_dataset must be one data set, since a member has one fitness.")
        self._space = search_space(type(args), hyperparameters)
        _check_values(args, self._space, names_of(environment))
        if eval_dataset is None and (names := names_of(environment)):
            Mixture(tuple(names), 1).evaluated(args.num_eval_episodes)
        self.output_dir = Path(args.output_dir)
        """The population's folder."""
        self._args, self._members, self._seed = args, members, seed
        self._strategy = strategy_of(strategy, members)
        self._schedule = Schedule.of(args, rounds, iterations_differ="num_iterations" in hyperparameters)
        if self._schedule.end(0, members, max_episodes) is None:
            least = members * self._schedule.episodes(0, self._schedule.quantum)
            raise ValueError(
                f"max_episodes={max_episodes} ends the search before its first round: one step of {members} members plays "
                f"{least} episodes."
            )
        self._max_episodes, self._max_hours = max_episodes, max_hours
        self._fitness, self._processes = fitness, processes or Processes()
        self._model, self._quantization_config, self._on_trainer = model, quantization_config, on_trainer
        self._trainer = trainer
        self._arguments = {
            "environment": environment, "train_dataset": train_dataset, "eval_dataset": eval_dataset,
            "reward_funcs": reward_funcs, "processing_class": processing_class, "peft_config": peft_config,
        }  # fmt: skip
        self._loaded: SharedBase | None = None
        self._reported = False
        check_public(args.public_values, environment, vars(args))
        self._hyperparameters = hyperparameters
        self.lineage = Lineage(self._settings())
        """The events so far; :meth:`run` fills it."""

    # ---------------------------------------------------------------------------------------------------------- run

    def run(self, on_round: Callable[[Round], None] | None = None) -> Lineage:
        """Train and select until one member has trained ``max_steps`` or the budget is spent.

        It goes on where an earlier call with the same settings was left, also one that was killed: finished rounds of
        members are read from disk, and the others are trained, to the same result bit for bit.

        Args:
            on_round: Called after each round, in the main process; for rounds that are read from disk too.

        Returns:
            The lineage, which ``lineage.json`` holds.

        Raises:
            PopulationError: If all members failed in a round, other than by diverging in a later one than the first, or if
                the folder holds another population.
            OSError: If the machine or the environment failed, as do others of its errors; a further call goes on.
        """
        with ExitStack() as stack:
            self._open(stack)
            own = math.ceil(self._members / self._processes.count)
            stack.enter_context(shared_engine(self._args, min(own, _MAX_ADAPTERS)))
            lineage = self.lineage = Lineage(self.lineage.settings)
            drawn = self._space.draw(self._members, np.random.default_rng([self._seed, 0]))
            living = [_Member(number, values) for number, values in enumerate(drawn)]
            lineage.events += [LineageEvent(0, one.number, "born", one.hyperparameters) for one in living]
            self._write()
            start = episodes = number = 0
            seconds = 0.0
            while living:
                end = self._schedule.end(
                    start, len(living), None if self._max_episodes is None else self._max_episodes - episodes
                )
                if end is None or (self._max_hours is not None and seconds >= 3600 * self._max_hours):
                    break
                number += 1
                assignments = [self._assignment(one, number, start, end) for one in living]
                results, replayed = self._play(assignments)
                results = self._with_reports(results)
                episodes += sum(one.episodes for one in results)
                seconds += sum(one.seconds for one in results)
                scores = _scores(living, results)
                trained = self._trained(living, results, scores, end)
                lineage.events += trained
                if scores:
                    lineage.best = ranked(scores)[0].member
                elif number == 1 or not (replayed or all(one.diverged for one in results)):
                    self._write()
                    raise self._without_survivor(results)
                else:
                    logger.warning("All members diverged in round %d. The best is that of the round before.", number)
                decided: list[LineageEvent] = []
                if scores and end in self._schedule.ends[:-1]:
                    living, decided = self._select(number, living, scores, end)
                else:
                    living = []
                lineage.events += decided
                if not replayed:
                    self._forget(assignments)
                self._keep_winner(number)  # other processes wait for it, before they begin the next round
                self._write()
                if on_round is not None and self._processes.is_main:
                    planned = len(self._schedule.ends)
                    on_round(Round(number, trained, decided, episodes, seconds, replayed, planned))
                start = end
            lineage.held_out = self._replay_winner()
            lineage.finished = True
            self._write()
        return lineage

    def _with_reports(self, results: list[Result]) -> list[Result]:
        """Fail all members if the fitness is the success, and no episode of any member has ever reported it."""
        self._reported = self._reported or any(one.reported for one in results if not one.failed)
        if self._reported:
            return results
        reason = (
            f"fitness={self._fitness!r}: the environment reports no success (in the information of the last step). Use "
            "fitness='return', or a function of the episode."
        )
        return [one if one.failed else replace(one, failed=reason) for one in results]

    def _without_survivor(self, results: Sequence[Result]) -> PopulationError:
        """Forget the results of a round in which all members failed, and return the error that says so."""
        number, first, best = results[0].round, results[0], self.output_dir / BEST
        if self._processes.is_main:
            shutil.rmtree(self._round(number))
        so_far = f" The best policy so far is in {best}." if number > 1 else ""
        return PopulationError(
            f"All members failed in round {number}, member {first.member} with: {first.failed}\nNo result of this round was "
            f"kept: run again, once its cause is mended, to train its members again.{so_far}"
        )

    def _replay_winner(self) -> HeldOut | None:
        """Play the winner's policy on episodes by which nobody was chosen; read them if that was done before."""
        winner = self.lineage.winner
        if winner is None:
            return None
        # By its name, since a larger budget may find another winner.
        file = self.output_dir / "rounds" / f"held_out-{winner.round:04d}-{winner.member:02d}.json"
        if self._processes.is_main and not file.is_file():
            rounds = Rounds(self.base, self._trainer, self._arguments, self._fitness)
            args = self._configured(winner.member, winner.hyperparameters)
            results = rounds.replay(self.output_dir / BEST, args, self._args)
            values = fitness_values(results, self._fitness)
            (counted,) = with_failures([values], lowest_fitness(results, self._fitness))
            score = Score(winner.member, counted, tuple(numbered(results.units)), winner.hyperparameters)
            failed, every = values.count(None), len(values)
            mean, error = (None, None) if failed == every else (score.mean, finite(score.standard_error))
            write_json(file, asdict(HeldOut(winner.member, winner.round, mean, error, every, failed)))
        self._processes.wait_for([file])
        return HeldOut(**read_form(file, form_of(HeldOut)))

    @property
    def base(self) -> SharedBase:
        """The base model, loaded when first used."""
        if self._loaded is None:
            self._loaded = SharedBase(self._model, self._args, self._quantization_config)
        return self._loaded

    def _open(self, lock: ExitStack) -> None:
        """Lock the folder, and check that it holds this population or none."""
        file, settings = self.output_dir / _SETTINGS, self.lineage.settings
        if self._processes.is_main:
            lock.enter_context(locked(self.output_dir))
            if not file.is_file():
                if left := [*self.output_dir.glob("rounds"), *self.output_dir.glob("member-*")]:
                    raise PopulationError(
                        f"{file} is gone, which tells the settings of what {left[0].name} holds. Restore it, or choose "
                        "another output_dir."
                    )
                write_json(file, settings)
            note_private(self.output_dir, self._arguments["environment"], recorded_options(self._args))
        self._processes.wait_for([file])
        there, here = read_form(file, _SETTINGS_FORM), self._settings(withheld=False)
        changed, unknown = dict[str, str](), list[str]()
        for name in _BY_VALUE:
            found, unreadable = differences(there.get(name) or {}, here[name], settings[name])
            changed, unknown = changed | found, unknown + unreadable
        others = [_flat({name: one[name] for name in one if name not in _APART}) for one in (there, here)]
        changed |= differences(others[0], others[1], others[1])[0]
        warn_of_unknown(file, unknown)
        if different := list(changed.values()):
            raise PopulationError(
                f"{self.output_dir} holds another population: {'; '.join(different)}. Use its settings to go on with it, or "
                "another output_dir."
            )

    def _write(self) -> None:
        if self._processes.is_main:
            self.lineage.write(self.output_dir)

    def _assignment(self, one: _Member, number: int, start: int, end: int) -> Assignment:
        args = self._configured(one.number, one.hyperparameters)
        last = self._schedule.steps(end, args.num_iterations)
        return Assignment(one.number, number, args, last, self._schedule.episodes(start, end), one.source)

    def _configured(self, member: int, values: Values) -> MultiTurnConfig:
        """Return the configuration of a member."""
        args = with_values(self._args, values)
        args.max_steps = self._schedule.steps(self._args.max_steps, args.num_iterations)
        args.output_dir = str(self.folder(member))
        args.run_name = f"{self._args.run_name or self.output_dir.name}-{self.folder(member).name}"
        return args

    def _round(self, number: int) -> Path:
        return self.output_dir / "rounds" / f"{number:04d}"

    def _play(self, assignments: list[Assignment]) -> tuple[list[Result], bool]:
        """Train this process's members without a result; read the results of all, and whether all were there."""
        number = assignments[0].round
        files = [self._round(number) / f"{self.folder(one.member).name}.json" for one in assignments]
        if self._round(number + 1).is_dir():
            _check_results(files, self._round(number) / _WINNER)
        replayed = all(file.is_file() for file in files)
        rounds = Rounds(self.base, self._trainer, self._arguments, self._fitness, self._on_trainer)
        own = list(zip(assignments, files))[self._processes.rank :: self._processes.count]
        missing = [(one, file) for one, file in own if not file.is_file()]
        if missing and self._args.use_vllm:
            missing = own  # so that the evaluation's one batch is the same after an interruption
        for one, file in missing:
            steps = [step_of(checkpoint) for checkpoint in checkpoints(one.folder)]
            if max(steps, default=0) > one.end:
                raise PopulationError(
                    f"{file} is gone. Round {number} ended at step {one.end}, and {one.folder} holds step {max(steps)}, "
                    f"whose fitness is another. {_ANEW}"
                )
        for (_, file), result in zip(missing, rounds.run([one for one, _ in missing], self._args)):
            write_json(file, asdict(result))
        self._processes.wait_for(files)
        return [Result(**read_form(file, form_of(Result))) for file in files], replayed

    def _keep_winner(self, number: int) -> None:
        """Copy the policy of the best member of a round, if it is the best so far, before the member goes on."""
        file, winner, best = self._round(number) / _WINNER, self.lineage.winner, self.output_dir / BEST
        assert winner is not None
        of_results = {"member": winner.member, "round": winner.round}
        if self._processes.is_main and not file.is_file():
            if winner.round == number:
                source = self.folder(winner.member)
                if (steps := read_json(source / RECORD)["global_step"]) != winner.steps:
                    raise PopulationError(
                        f"{file} is gone. It was about member {winner.member} at step {winner.steps}, and {source} is at "
                        f"step {steps}. {_ANEW}"
                    )
                shutil.rmtree(best, ignore_errors=True)
                copy_policy(source, best)
            write_json(file, of_results)
        self._processes.wait_for([file])
        if (kept := read_form(file, _WINNER_FORM)) != of_results:
            raise PopulationError(
                f"{file} names member {kept['member']} of round {kept['round']} as the best so far, by the results it is "
                f"member {winner.member} of round {winner.round}: one of these files was changed. {_ANEW}"
            )

    def _trained(
        self, living: list[_Member], results: list[Result], scores: list[Score], end: int
    ) -> list[LineageEvent]:
        """Return the events of a round's results, the best first."""
        played = self._schedule.episodes(0, end)
        by_member = {one.number: (one, result) for one, result in zip(living, results)}
        events = []
        for score in ranked(scores):
            one, result = by_member[score.member]
            fitness = {"fitness": score.mean, "standard_error": finite(score.standard_error)}
            counts = {"failed_episodes": result.failed_episodes, "unreported_episodes": result.unreported}
            events.append(_of(result, one, "trained", steps=result.steps, episodes=played, **fitness, **counts))
        failed = [(one, result) for one, result in by_member.values() if result.failed]
        return events + [_of(result, one, "failed", reason=result.failed) for one, result in failed]

    def _select(
        self, number: int, living: list[_Member], scores: list[Score], end: int
    ) -> tuple[list[_Member], list[LineageEvent]]:
        """Return the members of the next round, and the events that led there."""
        rng = np.random.default_rng([self._seed, number])
        selection = self._strategy.select(scores, len(living), self._space, rng)
        before = {one.member: one.hyperparameters for one in scores}
        going_on = _going_on(selection.successors, before)
        following, events, fresh = [], [], 1 + max(self.lineage.members)
        played = self._schedule.episodes(0, end)
        for successor in selection.successors:
            parent, values = successor.parent, successor.hyperparameters
            changes = changes_between(before[parent], values)
            before_steps, steps = (self._steps(end, each) for each in (before[parent], values))
            done: dict[str, Any] = {"episodes": played, "steps": steps, "reason": successor.reason}
            if going_on.get(parent) is successor:
                following.append(_Member(parent, values))
                kind: EventKind = "mutated" if changes else "kept"
                events.append(LineageEvent(number, parent, kind, values, changes=changes, **done))
                continue
            source = self.folder(parent) / f"checkpoint-{before_steps}"
            following.append(_Member(fresh, values, source))
            events.append(LineageEvent(number, fresh, "born", values, parent=parent, changes=changes, **done))
            fresh += 1
        for member, values in before.items():
            if member not in going_on:
                reason = selection.reasons.get(member, "its copies go on")
                events.append(LineageEvent(number, member, "stopped", values, episodes=played, reason=reason))
        return sorted(following, key=lambda one: one.number), sorted(events, key=lambda one: one.member)

    def _steps(self, end: int, values: Values) -> int:
        """Return the steps of a member with these hyperparameters at the end of a round."""
        return self._schedule.steps(end, with_values(self._args, values).num_iterations)

    def _forget(self, assignments: list[Assignment]) -> None:
        """Delete the checkpoints that the round began from; copies were made."""
        if not self._processes.is_main:
            return
        ends = {one.member: one.end for one in assignments}
        for member in self.lineage.members:
            forget_checkpoints(self.folder(member), ends.get(member))

    # ----------------------------------------------------------------------------------------------------- members

    @property
    def best(self) -> int:
        """The number of the best member of the last round.

        Raises:
            PopulationError: Before the first round.
        """
        if self.lineage.best is None:
            raise PopulationError("There is no best member before the first round is over. Call run().")
        return self.lineage.best

    def folder(self, member: int) -> Path:
        """Return the folder of a member, an ordinary policy's after its first round."""
        return self.output_dir / f"member-{member:02d}"

    def arguments(self, member: int) -> MultiTurnConfig:
        """Return the configuration of a member, with which an ordinary trainer goes on from :meth:`checkpoint`.

        Raises:
            ValueError: If there is no such member.
        """
        return self._configured(member, self._last(member).hyperparameters)

    def checkpoint(self, member: int) -> Path:
        """Return the last checkpoint of a member that was in the last round.

        Raises:
            ValueError: If there is no such member, or its checkpoints are deleted.
        """
        folder = self.folder(member) / f"checkpoint-{self._last(member).steps}"
        if not folder.is_dir():
            raise ValueError(f"Member {member} has no checkpoint any more, since it stopped before the last round.")
        return folder

    def export(self, folder: str | Path, member: int | None = None) -> Path:
        """Copy the best policy of all rounds, or a member's last one, to a folder, which any later run takes as ``model``.

        Tokenizer, card, critic and reference adapter are copied too, and ``lineage.json`` is written beside them.

        Args:
            folder: A new or empty folder.
            member: A member's number. Default: the policy with the highest fitness, which ``lineage.winner`` tells of.

        Raises:
            ValueError: If the folder holds something, no such member trained, or its last policy has no fitness.
        """
        folder = Path(folder)
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty. Choose a new folder.")
        return self._copy(member, folder, folder.absolute().name)

    def push_to_hub(
        self,
        repo_id: str,
        member: int | None = None,
        *,
        private: bool | None = None,
        commit_message: str = "Upload a population's member",
        token: str | None = None,
        revision: str | None = None,
    ) -> CommitInfo | None:
        """Push what :meth:`export` writes to a model repository on the Hub, which is made if there is none.

        Args:
            repo_id: Name of the repository, ``user/model`` or ``model``.
            member: As for :meth:`export`.
            private: Make a new repository private. Default: ``args.hub_private_repo``, or as the Hub decides.
            commit_message: Message of the commit.
            token: Hub token; no file contains it. Default: ``args.hub_token``, or the one that ``hf auth login`` stored.
            revision: Branch. Default: ``args.hub_revision``.

        Returns:
            The commit; None on all processes but the main one.

        Raises:
            ValueError: If the Hub refuses the repository's name or the token, or no such member trained.
        """
        if not self._processes.is_main:
            return None
        args, token = self._args, token or self._args.hub_token
        private = args.hub_private_repo if private is None else private
        revision = revision or args.hub_revision
        repository = make_repository(
            "repo_id", repo_id, token,
            lambda: create_repo(repo_id, token=token, private=private, exist_ok=True).repo_id, revision,
        )  # fmt: skip
        with TemporaryDirectory() as folder:
            self._copy(member, Path(folder), repository)
            pushed: CommitInfo = retried(
                f"to {repository} ({commit_message!r})",
                lambda: upload_folder(
                    repo_id=repository, folder_path=folder, commit_message=commit_message, token=token, revision=revision
                ),
            )  # fmt: skip
            return pushed

    def _copy(self, member: int | None, folder: Path, model_id: str) -> Path:
        """Copy a policy to an empty or new folder, which is returned, and write lineage and card beside it.

        Args:
            member: As for :meth:`export`.
            folder: The folder.
            model_id: Hub id or folder name under which the card loads the policy. Its last part is the card's title.
        """
        lineage = self.lineage
        if member is not None:
            trained, source, of = self._last(member), self.folder(member), member
        elif lineage.winner is not None:
            trained, source = lineage.winner, self.output_dir / BEST
            of = read_form(max(self.output_dir.glob(f"rounds/*/{_WINNER}")), _WINNER_FORM)["member"]
        else:
            raise PopulationError("There is no policy before the first round is over. Call run().")
        if not (source / RECORD).is_file():
            raise PopulationError(
                f"{source} holds no policy any more. Restore it: the folders that export() and `agile-trainers evolve` "
                f"wrote ({FILE} is in them) are copies of the best policy."
            )
        steps = read_json(source / RECORD)["global_step"]
        if (of, steps) != (trained.member, trained.steps):
            raise ValueError(
                f"{source} holds a policy of step {steps} of member {of}, and the fitness of member {trained.member} is of "
                f"step {trained.steps}: the member failed later, or rounds of an earlier call are read (Round.replayed). "
                "Export the best policy, without `member`, after run()."
            )
        copy_policy(source, folder)
        shorten_paths(folder)  # people upload what they export
        lineage.public().write(folder)
        card = folder / CARD
        if card.is_file():  # a member's card may be deleted
            name, title = self.folder(trained.member).name, model_id.rpartition("/")[2]
            text = card.read_text(encoding="utf-8").replace(f'"{name}"', f'"{model_id}"')
            text = re.sub(rf"(?m)^(.*name: |# ){re.escape(name)}$", lambda found: found[1] + title, text)
            card.write_text(f"{text}\n{_section(lineage, trained)}", encoding="utf-8")
            if held_out := _held_out_result(lineage, trained):
                model_card.add_results(folder, [held_out])
        return folder

    def _last(self, member: int) -> LineageEvent:
        trained = [one for one in self.lineage.events if one.member == member and one.event == "trained"]
        if not trained:
            raise ValueError(f"There is no member {member} that trained; there are {self.lineage.members}.")
        return trained[-1]

    def _settings(self, withheld: bool = True) -> dict[str, Any]:
        """Return what the result depends on, as JSON types, without values that may not leave the machine.

        Args:
            withheld: False to return these values too.
        """
        environment, options = self._arguments["environment"], recorded_options(self._args)
        public, ranges = self._args.public_values, {name: asdict(one) for name, one in self._hyperparameters.items()}
        described = flat_environment(environment)
        data: dict[str, Any] = {name: _digest_of(self._arguments[name]) for name in ("train_dataset", "eval_dataset")}
        data |= {"environment_files": _files_of(described["environment_arguments"])}
        if withheld:
            data = withheld_values(data)
            described = public_arguments(environment, public)
            options = public_options(options, type(self._args), public)
        peft_config, fitness = self._arguments["peft_config"], self._fitness
        strategy = asdict(self._strategy) if is_dataclass(self._strategy) else {"name": self._strategy.name}
        settings = {
            "algorithm": f"{self._trainer.__module__}:{self._trainer.__qualname__}",
            "model": str(self._model),
            **described,
            "data": data,
            "reward_funcs": [
                one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__)
                for one in listed_functions(self._arguments["reward_funcs"])
            ],
            "members": self._members,
            "rounds": list(self._schedule.ends),
            "strategy": strategy,
            "hyperparameters": ranges,
            "fitness": fitness if isinstance(fitness, str) else getattr(fitness, "__qualname__", stable_text(fitness)),
            "num_eval_episodes": self._args.num_eval_episodes,
            "max_episodes": self._max_episodes,
            "max_hours": self._max_hours,
            "seed": self._seed,
            "lora": None if peft_config is None else lora_settings(peft_config),
            "options": options,
        }
        return masked(settings) if withheld else settings


def _check_results(files: Sequence[Path], winner: Path) -> None:
    """Reject a round whose results are not whole although the next one was decided by them.

    Raises:
        PopulationError: If a file is gone or damaged.
    """
    for file, form in [(winner, _WINNER_FORM), *((file, form_of(Result)) for file in files)]:
        try:
            read_form(file, form)
        except CheckpointError as error:
            raise PopulationError(f"{file} is gone or damaged, and later rounds were decided by it. {_ANEW}") from error


def _scores(living: Sequence[_Member], results: Sequence[Result]) -> list[Score]:
    """Make the scores of the members that did not fail; failed episodes count against them."""
    sound = [(one, result) for one, result in zip(living, results) if not result.failed]
    lowest = next((result.lowest for _, result in sound if result.lowest is not None), None)
    values = with_failures([result.values for _, result in sound], lowest)
    return [
        Score(one.number, counted, tuple(result.units), one.hyperparameters)
        for (one, result), counted in zip(sound, values)
    ]


def _digest_of(dataset: Any) -> str | None:
    """Return a digest of a data set's rows; of a stream, of its first thousand. None without a data set."""
    if dataset is None:
        return None
    digest = hashlib.sha256()
    rows = dataset if hasattr(dataset, "__len__") else islice(dataset, _STREAMED)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=stable_text).encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def _files_of(arguments: Any) -> dict[str, str]:
    """Return a digest of each file that an environment's arguments name."""
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    if isinstance(arguments, list):
        return {name: digest for one in arguments for name, digest in _files_of(one).items()}
    path = Path(arguments).expanduser() if isinstance(arguments, str) and 0 < len(arguments) < 1000 else None
    with suppress(OSError, ValueError):
        if path is not None and path.is_file():
            return {str(arguments): hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
    return {}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _of(result: Result, one: _Member, kind: EventKind, **entries: Any) -> LineageEvent:
    return LineageEvent(result.round, result.member, kind, one.hyperparameters, seconds=result.seconds, **entries)


def _going_on(successors: Sequence[Successor], before: Mapping[int, Values]) -> dict[int, Successor]:
    """Choose, for each parent, the successor that goes on in its folder: an unchanged one if there is one.

    With another ``num_iterations`` the steps of a checkpoint are others, so that such a successor is always a copy.
    """
    chosen: dict[int, Successor] = {}
    for successor in sorted(successors, key=lambda one: one.hyperparameters != before[one.parent]):
        ours, theirs = (
            values.get("num_iterations") for values in (successor.hyperparameters, before[successor.parent])
        )
        if ours == theirs:
            chosen.setdefault(successor.parent, successor)
    return chosen


def _check_base(model: Any, peft_config: Any) -> None:
    """Reject a base that members cannot share."""
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"model must be a folder or Hub id, from which the base is loaded once, got {type(model).__name__}."
        )
    if peft_config is None:
        saved = find_adapters(str(model))
        if saved is None:
            raise ValueError(
                "Members share one frozen base and differ in their adapters: pass `peft_config=LoraConfig(...)`, or a saved "
                "adapter as `model`."
            )
        check_lendable(saved)
    check_bias(peft_config, "members")
    if peft_config is not None and changes_base(peft_config):
        raise ValueError(
            f"init_lora_weights={peft_config.init_lora_weights!r} changes the base, which members share. Use the default."
        )


def _check_options(args: Any, trainer: type[MultiTurnTrainer]) -> None:
    """Reject a configuration of another algorithm, and options that a population cannot use."""
    if not isinstance(args, trainer.config_class):
        raise TypeError(
            f"{trainer.__name__} takes a {trainer.config_class.__name__} as `args`, got {type(args).__name__}."
        )
    refused = {
        "max_steps": (args.max_steps <= 0, "must be the length of one member's run"),
        "save_total_limit": (args.save_total_limit is not None, "would delete checkpoints that copies start from"),
        "save_only_model": (args.save_only_model, "would save no optimizer state, with which members go on"),
        "push_to_hub": (args.push_to_hub, "would push every member; call population.push_to_hub() after run()"),
        "max_wall_seconds": (
            args.max_wall_seconds, "would end a member inside its round; limit the population by max_hours"
        ),
        "load_best_model_at_end": (args.load_best_model_at_end, "would replace the weights between rounds"),
        "offload_policy_during_rollout": (
            args.offload_policy_during_rollout,
            "would bring back a copy of the base that all members share",
        ),
        "vllm_server_start": (args.vllm_server_start, "would start a server for each member"),
        "vllm_tensor_parallel_size": (args.vllm_tensor_parallel_size > 1, "would need several processes for a member"),
        "report_to": (
            any(one not in _OWN_LOGS for one in args.report_to), f"can log members apart with {' or '.join(_OWN_LOGS)} only"
        ),
    }  # fmt: skip
    for name, (is_refused, reason) in refused.items():
        if is_refused:
            raise ValueError(f"{name}={getattr(args, name)!r}: in a population it {reason}.")


def _check_values(args: MultiTurnConfig, space: SearchSpace, environments: list[str] | None) -> None:
    """Check both ends of all ranges by the rules of the options.

    Raises:
        ValueError: For the first option that breaks a rule, or whose change ends a member's batches ahead.
    """
    if args.batches_ahead and "num_iterations" in space.ranges:
        raise ValueError(
            "num_iterations is among the hyperparameters, and a copy that gets another number cannot go on with the batches "
            f"that are under way: leave it out, or batches_ahead={args.batches_ahead}."
        )
    for end in ("low", "high"):
        ends = {name: getattr(one, end) for name, one in space.ranges.items()}
        made = with_values(args, {name: int(value) if name in space.whole else value for name, value in ends.items()})
        check_values(made)
        made.with_environment(environments)


def _held_out_result(lineage: Lineage, trained: LineageEvent) -> EvalResult | None:
    """Return the winner's result on held-out episodes for the card's metadata; None for others, or without one."""
    found, settings = lineage.held_out, lineage.settings
    if found is None or found.fitness is None or (found.member, found.round) != (trained.member, trained.round):
        return None
    error = {} if found.standard_error is None else {"standard_error": round(found.standard_error, 4)}
    played = {"episodes_of": "held-out episodes", "episodes": found.episodes, **error}
    name = f"{settings['fitness']} on held-out episodes"
    return model_card.result(str(settings["environment"]), str(settings["fitness"]), name, found.fitness, played)


def _section(lineage: Lineage, trained: LineageEvent) -> str:
    """Return the part of the card about the population."""
    settings = lineage.settings
    place = f"member {trained.member}"
    if trained == lineage.winner:
        place = f"the best policy (of member {trained.member})"
    held_out = lineage.held_out
    chosen = f" over {settings['num_eval_episodes']} evaluation episodes"
    replayed = ""
    if held_out is not None and _held_out_result(lineage, trained) is not None:
        chosen += ", by which it was chosen,"
        shown = with_error(held_out.fitness, held_out.standard_error)
        replayed = f" On {held_out.episodes} held-out episodes, by which nothing was chosen, it is {shown}."
    return (
        f"## Population\n\nThis is {place} of a population of {settings['members']} (strategy "
        f"`{settings['strategy']['name']}`). Its fitness, `{settings['fitness']}`{chosen} is "
        f"{with_error(trained.fitness, trained.standard_error)} after {trained.steps} updates.{replayed} [{FILE}]({FILE}) "
        "lists what happened to each member.\n"
    )
