"""Applies reward functions in TRL's form to episodes, and logs their rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import isnan
from numbers import Real
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers.utils import logging
from trl.trainer.utils import get_callable_name, is_async_callable, nanstd

from agile_trainers.envs.checker import LARGEST_REWARD
from agile_trainers.envs.libraries.trl_tools import UNREWARDED, TRLEnvironment
from agile_trainers.imports import exits_reported
from agile_trainers.judges.judge import Judge
from agile_trainers.judges.questions import GROUP, TURN
from agile_trainers.types import Message, StopReason, Trajectory, Turn

logger = logging.get_logger(__name__)

PATIENCE = 3
"""Batches without a reward of a function, from the first on, after which it is warned of."""
EPISODES, ENVIRONMENTS = "trajectories", "environments"
"""Names of the arguments that a reward function gets in addition to TRL's."""
NOT_A_NUMBER = "rewards/nan"
"""Metric: the share of episodes for which a reward function returned NaN."""
_TRLS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

RewardFunction = Callable[..., Any]


def listed_functions(reward_funcs: Any) -> list[Any]:
    """Return the reward functions of an argument: none, one, or several."""
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]


def add_return_reward(
    args: Any, reward_funcs: Any, classes: Any, columns: Mapping[str, Sequence[str]]
) -> tuple[list[Any], list[Any], list[float] | None]:
    """Put the episode return first among the reward functions; TRL demands at least one and logs each.

    Args:
        args: A ``MultiTurnConfig`` for episodes. Its ``reward_weights`` weigh the other functions.
        reward_funcs: The user's, in TRL's form.
        classes: Their processing classes.
        columns: The columns of each data set whose rows are played, by the data set's name.

    Returns:
        ``reward_funcs``, ``reward_processing_classes`` and ``args.reward_weights`` for TRL's trainer. The return has
        weight 1.

    Raises:
        ValueError: If there is no weight for each function, a function requires an argument that it cannot get, or a
            column has the name of one of TRL's or ours.
    """
    own = listed_functions(reward_funcs)
    classes = classes if isinstance(classes, list) else [classes] * len(own)
    weights = args.reward_weights
    if weights is not None and not isinstance(weights, (list, tuple)):
        raise ValueError(f"reward_weights must be a list with a number for each of reward_funcs, got {weights!r}.")
    if weights is not None and len(weights) != len(own):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for {len(own)} reward_funcs; the environment's own reward needs "
            "none (its weight is 1)."
        )
    judges = [function for function in own if isinstance(function, Judge)]
    if judges:
        _check_judges(judges, own, weights, args)
    apart = args.environment_processes == 0 and args.max_environments is None
    called = [function for function in own if callable(function) and not isinstance(function, nn.Module)]
    for dataset, names in columns.items():
        if taken := {*_TRLS, EPISODES, ENVIRONMENTS} & set(names):
            raise ValueError(
                f"The column {min(taken)!r} of {dataset} has the name of an argument that reward functions get. Rename the "
                "column."
            )
    for function in called:
        _check_arguments(function, columns, apart)

    def environment(trajectories: list[Trajectory], **_: Any) -> list[float | None]:
        return [None if it.turns and UNREWARDED in it.turns[-1].info else it.episode_return for it in trajectories]

    functions = [environment, *(over_sound_episodes(f, apart) if f in called else f for f in own)]
    _name_apart([function for function in functions if isinstance(function, FunctionType)])
    return functions, [None, *classes], None if weights is None else [1.0, *weights]


def _name_apart(functions: Sequence[Any]) -> None:
    """Number wrapped functions of equal names, by which TRL logs them; the first is the environment's."""
    for place, function in enumerate(functions):
        name, before = function.__name__, {one.__name__ for one in functions[:place]}
        if name in before:
            function.__name__ = next(other for n in count(2) if (other := f"{name}_{n}") not in before)
            logger.warning(
                "Two reward functions are called %r. The later one is logged as %r; give it a name of its own.",
                name, function.__name__,
            )  # fmt: skip


def _check_judges(
    judges: Sequence[Judge], functions: Sequence[Any], weights: Sequence[float] | None, args: Any
) -> None:
    """Check that judges have names of their own, and fit the weights and the groups.

    Raises:
        ValueError: If they do not.
    """
    names = [get_callable_name(one) for one in functions if callable(one) and not isinstance(one, nn.Module)]
    for judge in judges:
        if names.count(judge.__name__) > 1:
            raise ValueError(
                f"Two reward functions are called {judge.__name__!r}. Give the judge another name: name='...'."
            )
        if judge.held_out and weights is not None and weights[list(functions).index(judge)] != 0:
            raise ValueError(f"reward_weights must be 0 for the judge {judge.__name__!r}, which is held out.")
        # A question about a group needs all of its members in one process.
        own = args.per_device_train_batch_size * args.steps_per_generation
        if judge.per == GROUP and (args.num_generations < 2 or own % args.num_generations):
            raise ValueError(
                f"The judge {judge.__name__!r} compares the members of a group, but a process plays {own} episodes of a "
                f"generation batch, in groups of num_generations={args.num_generations}. Let each process play whole groups "
                "of at least 2, or set per='episode'."
            )


def over_sound_episodes(function: RewardFunction, environments: bool) -> RewardFunction:
    """Wrap a reward function so that it is called with the episodes that did not fail; others get no reward.

    Args:
        function: The user's.
        environments: True if every episode had an instance of its own, which ``function`` may then read.
    """
    takes, called = _parameters(function), f"The reward function {get_callable_name(function)!r}"

    def select(given: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        episodes = given[EPISODES]
        sound = [place for place, episode in enumerate(episodes) if not episode.stop_reason.failed]
        log = given["log_extra"]
        if environments:
            given[ENVIRONMENTS] = [_unwrapped(episode.environment) for episode in episodes]
            if ENVIRONMENTS in takes and any(given[ENVIRONMENTS][place] is None for place in sound):
                raise ValueError(
                    f"{called} takes environments, but those of an episode have "
                    "been played again since, or are not known. Call update() with what the last rollout() returned, whole."
                )
        given = {
            name: [value[place] for place in sound] if isinstance(value, list) else value
            for name, value in given.items()
            if name not in (EPISODES, ENVIRONMENTS) or name in takes or _takes_any(takes)
        }
        given["log_extra"] = lambda column, values: log(column, spread(values, sound, len(episodes), column))
        return sound, given

    def spread(values: Any, sound: list[int], rows: int, column: str | None = None) -> list[Any]:
        values = _numbers(values, called) if column is None else list(values)
        if len(values) != len(sound):
            told = "returned" if column is None else f"logged as {column!r}"
            raise ValueError(
                f"{called} {told} {len(values)} values for {len(sound)} completions. Give one value for each."
            )
        by_place = dict(zip(sound, values))
        return [by_place.get(place) for place in range(rows)]

    def counted(rewards: list[Any], log_metric: Callable[[str, float], None]) -> list[Any]:
        """Log the share of NaN. TRL reads it as None, by which a function says that it does not score an episode."""
        log_metric(NOT_A_NUMBER, sum(isinstance(one, Real) and isnan(one) for one in rewards) / len(rewards))
        return rewards

    async def score_async(**given: Any) -> list[Any]:
        rows, log_metric = len(given[EPISODES]), given["log_metric"]
        sound, given = select(given)
        with exits_reported(called):
            return counted(spread(await function(**given) if sound else [], sound, rows), log_metric)

    def score(**given: Any) -> list[Any]:
        rows, log_metric = len(given[EPISODES]), given["log_metric"]
        sound, given = select(given)
        with exits_reported(called):
            return counted(spread(function(**given) if sound else [], sound, rows), log_metric)

    chosen: Any = score_async if is_async_callable(function) else score
    chosen.__name__ = get_callable_name(function)
    chosen.__wrapped__ = function
    return chosen


def _numbers(values: Any, called: str) -> list[Any]:
    """Return the rewards that a function gave as numbers, or None for an episode without one.

    Raises:
        ValueError: If they are no list of numbers; the message says how to make one of them.
    """
    if isinstance(values, (torch.Tensor, np.ndarray)):
        if values.ndim != 1:
            many = " Return scores.squeeze(-1)." if values.ndim == 2 and values.shape[1] == 1 else ""
            raise ValueError(
                f"{called} returned an array of shape {tuple(values.shape)}. Expected one number for each completion, a "
                f"list or an array of shape (completions,).{many}"
            )
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        none = " Does it lack a return?" if values is None else ""
        raise ValueError(
            f"{called} returned a {type(values).__name__}, {values!r:.100}. Expected a list with one number for each "
            f"completion: [score(completion) for completion in completions].{none}"
        )
    given = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    for value in given:
        if value is None or (
            isinstance(value, Real) and (value != value or -LARGEST_REWARD <= cast(Any, value) <= LARGEST_REWARD)
        ):
            continue
        infinite = isinstance(value, Real)
        raise ValueError(
            f"{called} returned a {type(value).__name__}, {value!r:.100}, for a completion. Expected a "
            + ("finite number in float32: one infinity makes a whole group worthless. Check divisions and logarithms, or "
               "return None for a completion without a reward." if infinite
               else "number, or None for a completion without a reward. Convert it, with float(...) for example.")
        )  # fmt: skip
    return given


def _unwrapped(environment: Any) -> Any:
    """Return the instance that the user's factory made."""
    return environment.object if isinstance(environment, TRLEnvironment) else environment


def _parameters(function: RewardFunction) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a callable without a signature gets every argument
        return {"anything": inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)}


def _takes_any(parameters: dict[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_arguments(function: RewardFunction, columns: Mapping[str, Sequence[str]], environments: bool) -> None:
    """Reject a reward function whose arguments cannot be given.

    Raises:
        ValueError: If it takes ``environments`` and episodes share instances or have them in other processes, if it
            lacks an argument of TRL's or a column, or if it requires one that is neither of these nor ours.
    """
    name, parameters = get_callable_name(function), _parameters(function)
    if ENVIRONMENTS in parameters and not environments:
        raise ValueError(
            f"The reward function {name!r} takes {ENVIRONMENTS}, but an episode has no instance of its own in this process "
            "with environment_processes or max_environments. Leave both unset, or let the environment put what the function "
            "needs into info, which the function finds in trajectories."
        )
    required = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    for dataset, names in columns.items():
        unasked = [key for key in (*_TRLS, *names) if key not in parameters and key != "prompt"]
        if unasked and not _takes_any(parameters):
            raise ValueError(
                f"The reward function {name!r} does not take the argument {unasked[0]!r}, which each is given. End its "
                "arguments with **kwargs."
            )
        given = {*_TRLS, EPISODES, ENVIRONMENTS, *names} - {"prompt"}
        if missing := [key for key in required if key not in given]:
            raise ValueError(
                f"The reward function {name!r} requires the argument {missing[0]!r}, which is not a column of {dataset}. "
                f"Its columns are: {', '.join(names) or 'none'}. Add the column, or give the argument a default. Rows "
                "that an environment holds itself are no columns: pass them as train_dataset."
            )


def not_scored() -> Trajectory:
    """Make an empty episode, for processes that play fewer episodes than the others."""
    return Trajectory([], [], [], [], StopReason.ENVIRONMENT_ERROR)


def reward_inputs(rows: Sequence[dict[str, Any]], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Make the arguments of TRL's ``_calculate_rewards``.

    Prompt and completion together are the conversation of the turn that was asked for last up to its answer, as reward
    models read it. What the environment says to the last answer is left out: it may judge the answer, and no model reads it.
    """
    prompts = [it.prompt if it.rewritten is None else it.rewritten for it in trajectories]
    return {
        "inputs": [{**row, EPISODES: trajectory} for row, trajectory in zip(rows, trajectories, strict=True)],
        "prompts": [prompt or [{"role": "user", "content": ""}] for prompt in prompts],
        "completions": [
            _answered(it.messages if it.rewritten is None else it.messages[len(it.rewritten) :]) for it in trajectories
        ],
        "completion_ids_list": [trajectory.completion_ids for trajectory in trajectories],
    }


def _answered(messages: list[Message]) -> list[Message]:
    """Return messages up to the last answer."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1] + 1] if answers else messages


class Rewards:
    """Calls the reward functions of a run, and says which of them never gives a reward.

    Args:
        calculate: TRL's ``_calculate_rewards``.
        names: Names of the F functions; the first is the episode return.
        weights: (F,).
        accelerator: The trainer's.
        pending_metrics: TRL's store for ``log_metric``.
        pending_columns: TRL's store for ``log_extra``.
        functions: The F functions.
    """

    def __init__(
        self,
        calculate: Callable[..., torch.Tensor],
        names: Sequence[str],
        weights: torch.Tensor,
        accelerator: Accelerator,
        pending_metrics: dict[str, list[float]],
        pending_columns: dict[str, list[Any]],
        functions: Sequence[Any],
    ) -> None:
        self._calculate, self._accelerator = calculate, accelerator
        self.names = names
        self.pending_metrics, self.pending_columns = pending_metrics, pending_columns
        asked = {place: getattr(function, "__wrapped__", None) for place, function in enumerate(functions)}
        self.judges = {place: judge for place, judge in asked.items() if isinstance(judge, Judge)}
        """The judges among the functions."""
        held_out = [place in self.judges and self.judges[place].held_out for place in range(len(names))]
        # A score that is held out does not make an episode one that something rewards.
        self.weights = weights.masked_fill(torch.tensor(held_out, device=weights.device), torch.nan)
        of_turns = [place in self.judges and self.judges[place].per == TURN for place in range(len(names))]
        self._of_turns = torch.tensor(of_turns, device=weights.device)
        self._silent = [0] * len(names)
        """Batches in which a function gave no reward, since the first; -1 once it gave one."""

    def of(self, rows: Sequence[dict[str, Any]], trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """Compute the rewards (B, F) of all processes, NaN for failed episodes, also of reward models, which score them.

        An episode without the answer of a judge that it is trained on counts as failed: any other number in its place would
        be a reward that nobody gave.

        Args:
            rows: The row of each episode of this process.
            trajectories: This process's episodes, equally many on each.

        Raises:
            ValueError: On every process, if the weighted sum of an episode's rewards is no finite number in float32.
        """
        rewards = self._calculate(**reward_inputs(rows, trajectories))
        failed = [trajectory.stop_reason.failed or trajectory.unjudged for trajectory in trajectories]
        everywhere: torch.Tensor = self._accelerator.gather(torch.tensor(failed, device=rewards.device))
        if not everywhere.all():  # a batch that failed whole says nothing of the functions
            self._look((~rewards[~everywhere].isnan()).any(dim=0).tolist())
        rewards = rewards.masked_fill(everywhere[:, None], torch.nan)
        weighted = rewards * self.weights.to(rewards.device)
        if (row := (weighted.isinf().any(dim=1) | weighted.nansum(dim=1).isinf()).nonzero()).numel():
            given = (f"{name} {value:.3g}" for name, value in zip(self.names, rewards[row[0, 0]].tolist(), strict=True))
            raise ValueError(
                f"The weighted sum of an episode's rewards exceeds {LARGEST_REWARD:.3g} (float32): {', '.join(given)}. One "
                "infinity makes a whole group worthless. Lower reward_weights, or let the functions return less."
            )
        return rewards

    def totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """Compute the weighted sums (B,) of rewards (B, F), ignoring NaN; NaN where all rewards, or their weights, are."""
        weighted = rewards * self.weights.to(rewards.device)
        return weighted.nansum(dim=1).masked_fill(weighted.isnan().all(dim=1), torch.nan)

    def added(self, rewards: torch.Tensor) -> torch.Tensor:
        """Compute what is added to the last turn (B,): the weighted sum of all functions but the first, without NaN.

        Those that reward each turn are left out; see :meth:`by_turn`.
        """
        weights = self.weights.masked_fill(self._of_turns, 0.0).to(rewards.device)
        return (rewards * weights)[:, 1:].nansum(dim=1)

    def by_turn(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Compute the weighted sum of what judges gave each turn of some episodes; an empty list without such judges."""
        judges = ((i, judge) for i, judge in self.judges.items() if judge.per == TURN and not judge.held_out)
        weights = {judge.__name__: float(self.weights[i]) for i, judge in judges}
        if not weights:
            return []

        def given(turn: Turn) -> float:
            return sum(w * turn.judgements.get(name, {}).get("score", 0.0) for name, w in weights.items())

        return [[given(turn) for turn in trajectory.turns] for trajectory in trajectories]

    def summary(self, rewards: torch.Tensor) -> dict[str, float]:
        """Compute the metrics of rewards, under TRL's names.

        Args:
            rewards: (B, F), of all processes, NaN where a function gave none.

        Returns:
            ``reward``, ``reward_std`` and ``reward_sem`` (its standard error) of the weighted sum, ``rewards/<name>/mean``
            and ``rewards/<name>/std`` of each function, over the episodes that have one. NaN without any.
        """
        columns = {"reward": self.totals(rewards)}
        columns |= {f"rewards/{name}": rewards[:, place] for place, name in enumerate(self.names)}
        summary = {}
        for name, column in columns.items():
            count = int((~column.isnan()).sum())
            mean_name, std_name = (name, f"{name}_std") if name == "reward" else (f"{name}/mean", f"{name}/std")
            summary[mean_name] = torch.nanmean(column).item()
            summary[std_name] = 0.0 if count == 1 else nanstd(column).item()
            if name == "reward":
                summary["reward_sem"] = summary[std_name] / count**0.5 if count else torch.nan
        return summary

    def drain_metrics(self) -> dict[str, float]:
        """Average the metrics that functions logged with ``log_metric`` over all processes, and forget them."""
        means = {}
        for name in sorted(set(gather_object(list(self.pending_metrics)))):
            values = self.pending_metrics.get(name, [])
            local = torch.tensor([float(sum(values)), float(len(values))], device=self._accelerator.device)
            total, count = self._accelerator.reduce(local, reduction="sum").tolist()
            means[name] = total / count
        self.pending_metrics.clear()
        return means

    def drain_columns(self, count: int) -> dict[str, list[Any]]:
        """Gather the columns that functions logged with ``log_extra`` from all processes, and forget them.

        Args:
            count: Episodes of this process.
        """
        columns = {}
        for name in sorted(set(gather_object(list(self.pending_columns)))):
            columns[name] = gather_object(self.pending_columns.get(name, [None] * count)[:count])
        self.pending_columns.clear()
        return columns

    def _look(self, rewarded: Sequence[bool]) -> None:
        for place, gave in enumerate(rewarded):
            if gave or (place == 0 and len(rewarded) > 1):  # an environment may leave all rewards to functions
                self._silent[place] = -1
            elif self._silent[place] >= 0:
                self._silent[place] += 1
                if self._silent[place] == PATIENCE and self._accelerator.is_main_process:
                    logger.warning(
                        f"The reward function {self.names[place]!r} gave no reward (None or NaN) to any episode of the "
                        f"{PATIENCE} batches so far, so that it has no effect. Check its conditions and divisions. One that "
                        "is there for its metrics gets the weight 0 in reward_weights."
                    )


def share_without_spread(rewards: torch.Tensor, group_size: int) -> float:
    """Compute TRL's ``frac_reward_zero_std``, the share of episodes in groups whose rewards are all equal.

    Args:
        rewards: (B,), of all processes, members of a group side by side; NaN without a reward.
        group_size: Members of a group.
    """
    groups = rewards.view(-1, group_size)
    missing = groups.isnan()
    highest = groups.masked_fill(missing, -torch.inf).amax(dim=1)
    lowest = groups.masked_fill(missing, torch.inf).amin(dim=1)
    return ((highest - lowest <= 1e-8) & ~missing.all(dim=1)).float().mean().item()
