"""Adapts task sets and environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers, v1).

An environment of verifiers runs the model itself: its harness, a program, calls an endpoint. It is played unmodified, as an
agent, through the endpoint of its episode. A task set of one answer is stepped without a harness.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agile_trainers.envs.agent import Agent, Model, refused_by_limit
from agile_trainers.envs.agent import Task as AgentTask
from agile_trainers.envs.base import EnvironmentFactory, ResetResult, StepResult, read_options
from agile_trainers.envs.libraries import LIBRARIES, check_arguments
from agile_trainers.types import Message

_GENERATED_TASKS = 1000
"""Number of tasks taken from an infinite task set."""


def knows(taskset: str) -> bool:
    """Return whether a package of that name, or one of verifiers' own task sets, is installed."""
    LIBRARIES["verifiers"].load()
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        loaders.import_taskset(taskset)
    except ModuleNotFoundError:
        return False
    return True


def make_factory(taskset: str, env: Mapping[str, Any] | None = None, **config: Any) -> EnvironmentFactory | Agent:
    """Make a factory whose instances share the tasks, which are loaded now.

    Args:
        taskset: Id of an installed task set.
        env: verifiers' block ``env``, with which its environment and harnesses play (:class:`VerifiersAgent`). None: each
            task is one answer (:class:`VerifiersEnvironment`).
        config: Fields of the task set's configuration.

    Raises:
        Exception: See these classes.
    """
    if env is not None:
        return Agent(VerifiersAgent(taskset, env, **config))
    return functools.partial(copy.copy, VerifiersEnvironment(taskset, **config))


class _Tasks:
    """The tasks of a task set, which seeds and rows choose from."""

    def __init__(self, taskset: str, loaded: Any) -> None:
        self.name = f"verifiers:{taskset}"
        self.tasks = list(loaded if loaded.bounded else loaded.take(_GENERATED_TASKS))
        if not self.tasks:
            raise ValueError(f"{self.name} has no tasks.")

    def _row(self, seed: int | None, options: dict[str, Any] | None) -> int:
        drawn = random.SystemRandom().randrange(2**31) if seed is None else seed
        row = read_options(options, ("row",), self.name).get("row", drawn % len(self.tasks))
        if not 0 <= row < len(self.tasks):
            raise ValueError(f"{self.name} has no row {row}: its rows are 0 to {len(self.tasks) - 1}.")
        return row


class VerifiersAgent(_Tasks):
    """Plays an environment of verifiers as an agent's episode: its own loop, harnesses, tools, rewards and judges.

    The model of its seats is ``policy``. The reward is the mean of those of the traces that train the policy.
    ``info["rewards"]`` and ``info["metrics"]`` hold means by name. An episode is a success if every reward is 1 or more.

    Args:
        taskset: Id of an installed task set, as ``vf.load_taskset`` takes it.
        env: Fields of the environment's configuration, as in verifiers' block ``env``: each seat by its name, with its
            ``harness``, ``runtime`` and limits, and ``id`` to pair the task set with another environment.
        config: Fields of the task set's configuration.

    Raises:
        ImportError: If verifiers is not installed.
        ValueError: If a field is wrong, the task set is empty, or a seat names no runtime: verifiers' own default rents a
            sandbox.
    """

    def __init__(self, taskset: str, env: Mapping[str, Any], **config: Any) -> None:
        vf = LIBRARIES["verifiers"].load()
        self.name = self.__name__ = f"verifiers:{taskset}"
        check_arguments(self.name, config, vf.taskset_config_type(taskset).model_fields)
        fields = vf.env_config_type(taskset, env.get("id", "")).model_fields
        check_arguments(f"env of {self.name}", env, fields)
        self.env = vf.load_environment(vf.resolve_env_config({**env, "taskset": {"id": taskset, **config}}))
        for seat, given in self.env.config:
            if isinstance(given, vf.AgentConfig) and "runtime" not in given.model_fields_set:
                raise ValueError(
                    f"The seat {seat!r} of {self.name} names no runtime, for which verifiers rents a sandbox. Name one: "
                    f"env={{{seat!r}: {{'runtime': {{'type': 'subprocess'}}}}}} (this machine), 'docker' or 'prime'."
                )
        super().__init__(taskset, self.env.taskset)

    def check_row(self, row: dict[str, Any] | None) -> None:
        """Check that a dataset row chooses a task.

        Raises:
            ValueError: If it has another column than ``row``, or there is no such task.
        """
        self._row(0, row)

    async def __call__(self, model: Model, task: AgentTask) -> dict[str, Any]:
        """Play the episode of a task, which ``seed % number of tasks`` or the column ``row`` chooses.

        Raises:
            RuntimeError: If the environment failed, but for a limit of the run, or a seat that it does not train has the
                trained model.
        """
        vf = LIBRARIES["verifiers"].load()

        def seated(trace: Any) -> None:
            if not trace.agent.trainable and trace.agent.config.model == model.name:
                raise ValueError(
                    f"the seat {trace.agent.name!r} is not trained. Let the same weights play it untrained: "
                    f"env={{{trace.agent.name!r}: {{'model': 'policy-frozen'}}}}."
                )

        # The endpoint takes this header's key; verifiers reads its own key from a variable of the process.
        client = vf.EvalClientConfig(
            base_url=model.base_url, api_key_var="NO_KEY", headers={"x-api-key": model.api_key}
        )
        env = copy.copy(self.env)  # which holds what serves one episode
        async with env.serving():
            (slot,) = env.slots(self.tasks[self._row(task.seed, task.row)])
            episode = await env.run_slot(slot, vf.ModelContext(model=model.name, client=client), on_trace=seated)
        failed = (
            [] if episode.ok else [*episode.errors, *(trace.last_error for trace in episode.traces if not trace.ok)]
        )
        for error in failed:
            if not refused_by_limit(error.message):  # what the environment gives for such an episode is its reward
                raise RuntimeError(f"{self.name}: {error.type}: {error.message}")
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if not trained:
            raise RuntimeError(f"{self.name} trains none of its seats.")
        return _result(trained)


class VerifiersEnvironment(_Tasks):
    """One task set of verifiers: a task's prompt, one answer, the sum of the task's weighted rewards.

    ``info["rewards"]`` and ``info["metrics"]`` hold them by name. An answer is a success if every reward is 1 or more.

    Args:
        taskset: Id of an installed task set, as ``vf.load_taskset`` takes it.
        config: Fields of the task set's configuration.

    Raises:
        ImportError: If verifiers is not installed.
        ValueError: If the configuration is wrong, the task set is empty, or its tasks need more than one answer: their own
            environment, tools, a container, a setup, or rewards that use a runtime.
    """

    def __init__(self, taskset: str, **config: Any):
        vf = LIBRARIES["verifiers"].load()
        check_arguments(f"verifiers:{taskset}", config, vf.taskset_config_type(taskset).model_fields)
        loaded = vf.load_taskset(vf.taskset_config_type(taskset)(id=taskset, **config))
        super().__init__(taskset, loaded)
        if reason := _needs_more(vf, taskset, loaded, self.tasks):
            raise ValueError(
                f"{self.name} cannot be played with one answer: {reason}. Name the seats of its environment as env={{...}} "
                "(docs/verifiers.md)."
            )

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Return a task's prompt.

        Args:
            seed: Chooses the task, ``seed % number of tasks``. None draws one.
            options: ``{"row": int}`` chooses the task instead; other options are not read.

        Raises:
            ValueError: If there is another option, or no such row.
        """
        row = self._row(seed, options)
        self.task = self.tasks[row]
        self.prompt = _prompt(self.task.data)
        return self.prompt, {"row": row}

    async def step(self, action: str) -> StepResult:
        """Score the answer with the task's rewards."""
        trace = self._trace(action)
        await self.task.score(trace)
        result = _result([trace])
        return "", result.pop("reward"), True, False, {"success": result["success"], **result["info"]}

    def _trace(self, answer: str) -> Any:
        vf = LIBRARIES["verifiers"].load()
        kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
        messages = [kinds[message["role"]](content=message["content"]) for message in self.prompt]
        nodes = [
            vf.MessageNode(parent=index - 1 if index else None, message=message)
            for index, message in enumerate(messages)
        ]
        said = vf.AssistantMessage(content=answer)
        nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=said, sampled=True))
        task = vf.TraceTask(type=type(self.task).__name__, data=self.task.data)
        state = importlib.import_module("verifiers.v1.state").state_cls(type(self.task))()
        return vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, state=state)


def _result(traces: Sequence[Any]) -> dict[str, Any]:
    """Return what an agent returns: means over the traces."""
    rewards = _means([{name: one and one.score for name, one in trace.rewards.items()} for trace in traces])
    return {
        "reward": fmean(trace.reward for trace in traces),
        "success": bool(rewards) and all(score >= 1.0 for score in rewards.values()),
        "info": {"rewards": rewards, "metrics": _means([trace.metrics for trace in traces])},
    }


def _means(each: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean of each name over the mappings that have a value of it."""
    values = {name: [value for one in each if (value := one.get(name)) is not None] for named in each for name in named}
    return {name: fmean(some) for name, some in values.items() if some}


def _needs_more(vf: Any, taskset: str, loaded: Any, tasks: Sequence[Any]) -> str | None:
    """Return the reason why tasks need more than a prompt and an answer, or None."""
    task = tasks[0]
    scoring = [*task.hooks("reward"), *task.hooks("metric")]
    runtime = [f.__name__ for f in scoring if "runtime" in inspect.signature(f).parameters]
    overridden = [name for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(vf.Task, name)]
    reasons = {
        "it brings an environment of its own": vf.environment_class(taskset) is not vf.SingleAgentEnv,
        "its tasks have tools": bool(task.toolsets(task.config) or loaded.toolsets(loaded.config)),
        "its tasks need a container": task.NEEDS_CONTAINER,
        "its tasks have no prompt": task.data.prompt is None,
        "a prompt has parts, images or calls of tools": not all(_is_text(one.data.prompt) for one in tasks),
        f"its tasks define {' and '.join(overridden)}, which need a runtime": bool(overridden),
        f"{', '.join(runtime)} look into a runtime": bool(runtime),
        "nothing rewards an answer": not task.hooks("reward"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str | None) or all(
        message.role in ("system", "user", "assistant") and isinstance(message.content, str) for message in prompt
    )


def _prompt(data: Any) -> list[Message]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *({"role": message.role, "content": message.content} for message in data.prompt)]
