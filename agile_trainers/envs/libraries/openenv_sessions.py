"""Adapts OpenEnv's sessions (``openenv.core.harness``): a harness of OpenEnv drives a session, as an agent of its own."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from agile_trainers.envs.agent import Model, Task, refused_by_limit
from agile_trainers.envs.libraries import LIBRARIES
from agile_trainers.imports import load_named


class OpenEnvSessions:
    """Plays sessions as an agent's episodes: a harness asks the model and calls the session's tools, ``verify`` rewards.

    The reward is OpenEnv's own: that of the last tool call, or of ``verify`` where no call gave one; 0 if no tool was called
    and ``verify`` gives none. An error of a tool that the model can cause (``KeyError``, ``ValueError``) is its result.
    ``info`` holds the metrics of ``verify``; ``success`` among them is the episode's.

    Args:
        path: ``module:Name`` of a ``ResourceSessionFactory``, or of a class or function that makes one. ``create`` gets the
            dataset row (None without rows) and the seed.
        harness: An adapter whose ``run_white_box`` plays. Default: ``MCPHarnessAdapter``.
        limits: Fields of ``HarnessRunLimits``, such as ``max_turns`` (10).
        kwargs: Arguments of the class or function.

    Raises:
        ImportError: If OpenEnv is not installed, or a version without sessions.
        ValueError: If there is no such name, or it makes no factory of sessions.
    """

    def __init__(
        self, path: str, /, *, harness: Any = None, limits: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        LIBRARIES["openenv"].load()
        if importlib.util.find_spec("openenv") is None or importlib.util.find_spec("openenv.core.harness") is None:
            raise ImportError("openenv.core.harness cannot be imported. Run: pip install 'agile-trainers[openenv]'")
        openenv = importlib.import_module("openenv.core.harness")
        named = load_named(path)
        self.factory = named if not callable(named) else named(**kwargs)
        if not hasattr(self.factory, "create"):
            raise ValueError(
                f"openenv:{path} makes a {type(self.factory).__name__}; expected a ResourceSessionFactory, whose create() "
                "makes a session. A server is named by its address: openenv:http://localhost:8000."
            )
        self.harness = openenv.MCPHarnessAdapter() if harness is None else harness
        self.limits = openenv.HarnessRunLimits(**(limits or {}))
        self.__name__ = f"openenv:{path}"

    def __call__(self, model: Model, task: Task) -> dict[str, Any]:
        """Play an episode."""
        play = importlib.import_module("openenv.core.harness").build_harness_rollout_func(
            session_factory=_Seeded(self.factory, task.seed),
            harness_adapter=self.harness,
            model_step_builder=lambda trainer, session: partial(_ask, model),
            limits=self.limits,
        )
        played = play([task.row], None)
        (reward,), (metrics,) = played["env_reward"], played["verify_metrics"]
        success = {"success": metrics["success"]} if isinstance(metrics.get("success"), bool) else {}
        return {"reward": reward, "info": metrics, **success}


@dataclasses.dataclass
class _Seeded:
    factory: Any
    seed: int

    def create(self, task: Any) -> Any:
        return _Session(self.factory.create(task=task, seed=self.seed))


class _Session:
    """A session in which nothing that a policy causes ends the run."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return self._session.call_tool(name, arguments)
        except (KeyError, ValueError) as error:
            text = f"Error: {error.args[0] if error.args else name}"
            return importlib.import_module("openenv.core.harness").ToolResult(data=text, error=text)

    def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> Any:
        verified = self._session.verify(transcript=transcript, final_state=final_state)
        if verified.env_reward is None and all(one["result"]["error"] for one in final_state["tool_trace"]):
            return dataclasses.replace(verified, env_reward=0.0)
        return verified


def _ask(model: Model, messages: list[dict[str, Any]], tools: list[Any], sampling: dict[str, Any]) -> Any:
    """Ask for an answer; one that a limit of the run refuses is empty, which ends the harness.

    Raises:
        RuntimeError: If the endpoint refuses the request.
    """
    openenv = importlib.import_module("openenv.core.harness")
    client = importlib.import_module("openenv.core.llm_client")
    schemas = [{"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in tools]
    body = {"model": model.name, "messages": messages, **sampling}
    if schemas:
        body["tools"] = [{"type": "function", "function": schema} for schema in schemas]
    answer = importlib.import_module("httpx").post(
        f"{model.base_url}/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {model.api_key}"},
        timeout=None,
        trust_env=False,
    )
    if answer.is_error:
        if not refused_by_limit(answer.text):
            raise RuntimeError(f"The endpoint refused a request: {answer.text}")
        return openenv.ModelStepResult(response=client.LLMResponse(""))
    said = answer.json()["choices"][0]["message"]
    calls = [
        client.ToolCall(
            id=call["id"], name=call["function"]["name"], args=json.loads(call["function"]["arguments"] or "{}")
        )
        for call in said.get("tool_calls") or ()
    ]
    return openenv.ModelStepResult(response=client.LLMResponse(said["content"] or "", calls))
