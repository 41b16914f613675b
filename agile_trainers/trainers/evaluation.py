"""Plays the episodes of an evaluation and scores them."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import SchedulerType
from transformers.utils import logging

from agile_trainers.config.multi_turn import MultiTurnConfig
from agile_trainers.config.options import default_of
from agile_trainers.evaluation.results import evaluation_episodes, gather_evaluation, in_order
from agile_trainers.imports import nearest
from agile_trainers.monitor.reporting import evaluation_summary
from agile_trainers.monitor.rollout_log import Evaluated, completions_table
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.seeds import Mixture, preserved_random_state, with_names
from agile_trainers.sampling.sampler import RolloutSampler
from agile_trainers.step.reward import Rewards, not_scored
from agile_trainers.step.task_sampling import dataset_columns
from agile_trainers.step.token_batches import within_memory

logger = logging.get_logger(__name__)


class EpisodeEvaluator:
    """Plays evaluations with a trainer's policy, without changing the training stream or the random state.

    Args:
        args: A ``MultiTurnConfig`` for episodes.
        accelerator: The trainer's.
        engine: Its rollout engine.
        sampler: Its sampler.
        mixture: The environments of a run of several; None for one.
        rewards: Its reward functions.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        engine: RolloutEngine,
        sampler: RolloutSampler,
        mixture: Mixture | None,
        rewards: Rewards,
    ) -> None:
        self._args, self._accelerator = args, accelerator
        self._sampler, self._mixture, self._rewards = sampler, mixture, rewards
        self._told_of_rows = False
        self.engine = engine
        """Plays them."""

    def play(
        self,
        dataset: Any,
        count: int | None,
        greedy: bool | None,
        prefix: str,
        *,
        tokens_seen: float,
        is_in_train: bool,
    ) -> Evaluated:
        """Play the episodes of an evaluation and score them.

        Args:
            dataset: Rows handed to ``reset``, in order, again and again; None plays seeds.
            count: Episodes over all processes. Default: ``num_eval_episodes``.
            greedy: Take the likeliest token. Default: ``eval_greedy``.
            prefix: Prefix of the metrics.
            tokens_seen: Tokens that the run read so far, for the metric ``num_tokens``.
            is_in_train: True keeps the environments for the next generation batch.

        Raises:
            ValueError: For a data set without rows, or fewer than one episode.
        """
        args = self._args
        if count is None:
            count = args.num_eval_episodes
            self._warn_of_rows_left_out(dataset, count)
        if count < 1:
            raise ValueError(f"num_episodes must be at least 1, got {count}.")
        started = time.time()
        rows = None if dataset is None else list(islice(dataset, count))
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        sample = not (args.eval_greedy if greedy is None else greedy)
        with preserved_random_state():
            episodes = evaluation_episodes(args.seed, count, rows, self._mixture)
            with self._sampler.generators(do_sample=sample) as make:
                # No rank waits for another here: one may play again, or step an engine for those that have more episodes.
                played = within_memory(
                    lambda: self.engine.run(episodes[rank::world_size], make()),
                    lambda: self._sampler.halve(-(-count // world_size)),
                )
            results = gather_evaluation(self.engine, played, episodes)
            results = replace(results, greedy=not sample)
            specs, trajectories = results.specs, results.trajectories
            # TRL gathers the same number of rewards from every process.
            missing = -(-count // world_size) - len(specs)
            options = with_names([spec.options or {} for spec in specs], specs)
            options += [dict(rows[0]) if rows else dict(options[0]) if options else {}] * missing
            rewards = self._rewards.of(options, [*trajectories, *(not_scored() for _ in range(missing))])
        if not is_in_train:
            self.engine.pool.close()
        scores = self._rewards.summary(rewards) | self._rewards.drain_metrics()
        scores["num_tokens"] = float(tokens_seen)
        local = rewards.view(world_size, -1, rewards.size(1))[rank, : len(specs)]
        rewarded = in_order(results.places, self._rewards.totals(local).tolist())
        only_return = len(self._rewards.names) == 1
        metrics = evaluation_summary(results, rewarded, scores, prefix, started, only_return=only_return)
        extra = self._rewards.drain_columns(len(specs))
        return Evaluated(trajectories, results.places, metrics, local.tolist(), extra)

    def _warn_of_rows_left_out(self, dataset: Any, count: int) -> None:
        """Warn once of a data set that is longer than the default number of episodes; TRL evaluates on all rows."""
        default = default_of(self._args.__dataclass_fields__["num_eval_episodes"])
        rows = len(dataset) if hasattr(dataset, "__len__") else 0
        if count == default and rows > count and not self._told_of_rows and self._accelerator.is_main_process:
            self._told_of_rows = True
            logger.warning(
                "The data set to evaluate on has %d rows, and the first %d are played: num_eval_episodes=%d, its default. "
                "Set num_eval_episodes=%d to play all, or pass the rows that are to be played.",
                rows, count, count, rows,
            )  # fmt: skip

    def showing(
        self, played: Evaluated, tables: dict[str, Any], step: int, prefix: str
    ) -> AbstractContextManager[None]:
        """Make TRL's ``log`` show and write the episodes of an evaluation inside a block, with ``log_completions``.

        Args:
            played: The evaluation.
            tables: TRL's ``_logs``.
            step: Optimizer steps so far.
            prefix: Prefix of the metrics.
        """
        if not self._args.log_completions:
            return nullcontext()
        folder, writes = Path(self._args.output_dir), self._accelerator.is_main_process
        return completions_table(tables, played, self._rewards.names, folder, step, prefix, writes=writes)


def conversations(played: Evaluated, count: int) -> np.ndarray:
    """Collect the conversations of all processes, an object array (count,) in the order of the rows."""
    said = np.empty(count, dtype=object)
    for place, messages in gather_object(list(zip(played.places, (t.messages for t in played.trajectories)))):
        said[place] = messages
    return said


_KEPT = ("prompt", "image", "images")
"""Columns that ``remove_unused_columns`` keeps, in TRL too."""
_ALWAYS_EVALUATED = ("return", "reward", "success")
"""Metrics by which a policy is usually chosen, of every evaluation (``success`` if the environment reports it)."""


def kept_columns(args: MultiTurnConfig, dataset: Any, name: str) -> Any:
    """Select the columns that are played: all, or those that TRL keeps with ``remove_unused_columns``.

    Raises:
        ValueError: If no column is left.
    """
    if not args.remove_unused_columns or dataset is None:
        return dataset
    if isinstance(dataset, dict):
        return {key: kept_columns(args, part, f"{name}[{key!r}]") for key, part in dataset.items()}
    columns = dataset_columns(dataset)
    kept = [column for column in columns if column in _KEPT]
    if not kept:
        raise ValueError(
            f"remove_unused_columns=True leaves no column of {name}, whose columns are {', '.join(columns)}; it keeps "
            "'prompt' only. Set remove_unused_columns=False, with which reset gets all columns."
        )
    return dataset.select_columns(kept)


def rows_to_predict(args: MultiTurnConfig, dataset: Any) -> list[dict[str, Any]]:
    """Return the rows of ``predict``.

    Raises:
        TypeError: If there are none.
        ValueError: If no column is left.
    """
    if dataset is None:
        raise TypeError(
            "predict plays the rows of a test_dataset, got None. Without rows, call evaluate() or rollout()."
        )
    return list(kept_columns(args, dataset, "test_dataset"))


def rows_of(eval_rows: Any, eval_dataset: Any) -> Any:
    """Return the rows that ``evaluate(eval_dataset)`` plays: the trainer's for None, one data set for its name.

    Raises:
        ValueError: If there is none of that name.
    """
    if not isinstance(eval_dataset, str):
        return eval_rows if eval_dataset is None else eval_dataset
    names = list(eval_rows) if isinstance(eval_rows, dict) else []
    if eval_dataset not in names:
        there = f"there are {', '.join(map(repr, names))}" if names else "the trainer's eval_dataset is not a dict"
        raise ValueError(f"eval_dataset={eval_dataset!r} must name an evaluation data set: {there}.")
    return eval_rows[eval_dataset]


def played_columns(train_dataset: Any, eval_dataset: Any, *, evaluates: bool) -> dict[str, list[str]]:
    """List the columns of the data sets that a run plays, by name of the data set; none where it plays seeds.

    Args:
        train_dataset: The user's, or None.
        eval_dataset: The user's, one or several by name, or None.
        evaluates: True if the run evaluates while it trains.

    Raises:
        ValueError: If one to evaluate on has no rows.
    """
    played = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        played |= {f"eval_dataset[{name!r}]": part for name, part in eval_dataset.items()}
    elif eval_dataset is not None or evaluates:
        played["eval_dataset"] = eval_dataset
    for name, dataset in played.items():
        if isinstance(dataset, Dataset) and not len(dataset):  # too few to train on are refused before
            raise ValueError(
                f"{name} has no rows to evaluate on. Pass some, or leave eval_dataset unset: it plays seeds."
            )
    return {name: [] if dataset is None else dataset_columns(dataset) for name, dataset in played.items()}


def with_best_metric(
    args: MultiTurnConfig, *, by_reward: bool, eval_dataset: Any, environments: Sequence[str] | None = None
) -> MultiTurnConfig:
    """Fill in ``metric_for_best_model`` where it is needed: the reward with reward functions, else the return.

    Args:
        args: The configuration for episodes.
        by_reward: True if there are reward functions.
        eval_dataset: The user's. Several by name have no common metric, so that there is no default.
        environments: Names of several, None for one.

    Raises:
        ValueError: If it is a loss, which an evaluation of episodes does not have, or if there is no default.
    """
    plateau = args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    if not (args.load_best_model_at_end or args.save_strategy == "best" or plateau):
        return args
    metric = "reward" if by_reward else "return"
    if not args.best_metric_is_unset:
        if str(args.metric_for_best_model).endswith("loss"):
            raise ValueError(
                f"metric_for_best_model={args.metric_for_best_model!r} is not a metric of episodes, whose evaluation has no "
                f"loss. Leave it unset ({metric!r}), or choose 'success' or any other that evaluate() returns."
            )
        _check_spelling(str(args.metric_for_best_model), eval_dataset, environments or ())
        return args
    if isinstance(eval_dataset, dict):
        names = ", ".join(repr(f"{name}_{metric}") for name in eval_dataset)
        raise ValueError(f"metric_for_best_model must say which of the data sets decides. Set it to one of {names}.")
    if args.lower_is_better_was_asked:
        raise ValueError(
            f"greater_is_better=False would choose the checkpoint with the lowest {metric}. Leave it unset, or set "
            "metric_for_best_model to a metric that should be low."
        )
    args = copy.copy(args)
    args.metric_for_best_model, args.greater_is_better = metric, True
    if plateau:
        args.lr_scheduler_kwargs = {"mode": "max", **dict(args.lr_scheduler_kwargs or {})}
    return args


def _check_spelling(metric: str, eval_dataset: Any, environments: Sequence[str]) -> None:
    """Reject a metric whose name is almost that of one that every evaluation has; reward functions may log others.

    Raises:
        ValueError: For such a name.
    """
    sets = [f"{name}_" for name in eval_dataset] if isinstance(eval_dataset, dict) else [""]
    known = [f"{one}{name}" for one in sets for name in _ALWAYS_EVALUATED]
    name = metric.removeprefix("eval_")
    if any(name.startswith(f"{one}{environment}_") for one in sets for environment in environments):
        return
    measured = re.sub(r"(/\w+|_sem|_std)$", "", name)
    near = "" if measured in known else nearest(name, known, count=1, cutoff=0.75)
    if near:
        raise ValueError(
            f"metric_for_best_model={metric!r} is no metric of an evaluation{near} Set it to one of "
            f"{', '.join(map(repr, known))}, or to any other that evaluate() returns, or leave it unset."
        )
