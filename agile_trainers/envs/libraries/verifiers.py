"""Adapts single-answer task sets of verifiers (https://github.com/PrimeIntellect-ai/verifiers) to the protocol.

A verifiers environment (release 0.4) runs the model itself, as a program that calls an endpoint, and cannot be stepped from
outside. This adapter supports tasks that consist of a prompt and rewards for the answer.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import random
from typing import Any

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


def make_factory(taskset: str, **config: Any) -> EnvironmentFactory:
    """Make a factory whose instances share the tasks, which are loaded now.

    Raises:
        Exception: See :class:`VerifiersEnvironment`.
    """
    return functools.partial(copy.copy, VerifiersEnvironment(taskset, **config))


class VerifiersEnvironment:
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
        self.name = f"verifiers:{taskset}"
        check_arguments(self.name, config, vf.taskset_config_type(taskset).model_fields)
        tasks = vf.load_taskset(vf.taskset_config_type(taskset)(id=taskset, **config))
        self.tasks = list(tasks if tasks.bounded else tasks.take(_GENERATED_TASKS))
        if not self.tasks:
            raise ValueError(f"{self.name} has no tasks.")
        if reason := _needs_more(vf, taskset, tasks, self.tasks[0]):
            raise ValueError(f"{self.name} cannot be played with one answer: {reason}. Run it with verifiers itself.")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Return a task's prompt.

        Args:
            seed: Chooses the task, ``seed % number of tasks``. None draws one.
            options: ``{"row": int}`` chooses the task instead; other options are not read.

        Raises:
            ValueError: If there is another option, or no such row.
        """
        drawn = random.SystemRandom().randrange(2**31) if seed is None else seed
        row = read_options(options, ("row",), self.name).get("row", drawn % len(self.tasks))
        if not 0 <= row < len(self.tasks):
            raise ValueError(f"{self.name} has no row {row}: its rows are 0 to {len(self.tasks) - 1}.")
        self.task = self.tasks[row]
        self.prompt = _prompt(self.task.data)
        return self.prompt, {"row": row}

    async def step(self, action: str) -> StepResult:
        """Score the answer with the task's rewards."""
        trace = self._trace(action)
        await self.task.score(trace)
        rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        info = {
            "success": bool(rewards) and all(reward.score >= 1.0 for reward in rewards.values()),
            "rewards": {name: reward.score for name, reward in rewards.items()},
            "metrics": dict(trace.metrics),
        }
        return "", float(trace.reward), True, False, info

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
        return vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)


def _needs_more(vf: Any, taskset: str, tasks: Any, task: Any) -> str | None:
    """Return the reason why a task needs more than a prompt and an answer, or None."""
    scoring = [*task.hooks("reward"), *task.hooks("metric")]
    runtime = [f.__name__ for f in scoring if "runtime" in inspect.signature(f).parameters]
    overridden = [name for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(vf.Task, name)]
    reasons = {
        "it brings an environment of its own": vf.environment_class(taskset) is not vf.SingleAgentEnv,
        "its tasks have tools": bool(task.toolsets(task.config) or tasks.toolsets(tasks.config)),
        "its tasks need a container": task.NEEDS_CONTAINER,
        "its tasks have no prompt": task.data.prompt is None,
        f"its tasks define {' and '.join(overridden)}, which need a runtime": bool(overridden),
        f"{', '.join(runtime)} look into a runtime": bool(runtime),
        "nothing rewards an answer": not task.hooks("reward"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _prompt(data: Any) -> list[Message]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *({"role": message.role, "content": message.content} for message in data.prompt)]
