"""Adapts OpenEnv servers (https://github.com/meta-pytorch/OpenEnv) to the protocol, over a websocket.

The wire format is implemented here, so neither OpenEnv nor a server's own package needs to be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import importlib.util
import json
from typing import Any, Literal
from urllib.parse import urlsplit

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from agile_trainers.envs.base import EnvironmentFactory, ResetResult, StepResult
from agile_trainers.envs.checker import read_success
from agile_trainers.envs.libraries import LIBRARIES

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_MAX_MESSAGE = 2**26
"""Bytes of one answer."""
_COMMON = ("metadata", "done", "reward")
"""Fields of every OpenEnv action and observation."""


class OpenEnvError(RuntimeError):
    """Raised when the server answers a call with an error."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class OpenEnvUnavailableError(ConnectionError):
    """Raised when the server cannot be reached or has no free session."""


def make_factory(url: str, /, **kwargs: Any) -> EnvironmentFactory:
    """Make a factory and read the server's schema, so that a wrong address or argument is rejected at once.

    Args:
        url: Address of a server.
        kwargs: Arguments of the class below.

    Raises:
        Exception: See :class:`OpenEnvEnvironment`.
    """
    return functools.partial(copy.copy, OpenEnvEnvironment(url, **kwargs))


class OpenEnvEnvironment:
    """One session on an OpenEnv server.

    The answer fills the action's only required text field, or its only text field. Otherwise the answer must contain the
    action as a JSON object; for an invalid one, the observation describes the expected fields, with reward 0. The
    observation is its text field, or the whole observation as JSON. ``info["observation"]`` is always the whole one.

    Every instance holds a session, and a server limits their number (``max_concurrent_envs``, by default 1): limit the
    instances with ``max_environments``.

    ``reset`` connects if necessary and is retried while the server cannot be reached or is full. A connection lost later
    ends the episode, since the server's state is lost too.

    Args:
        url: Address of the server, for example ``http://localhost:8000``.
        action_field: Field of the action that the answer fills. Default: see above.
        observation_field: Field of the observation that the model sees. Default: see above.
        timeout: Seconds to wait for the server's answer.
        retries: Further attempts of ``reset``.
        backoff: Seconds before the first further attempt; every later pause is twice as long.

    Raises:
        ImportError: If ``websockets`` or ``httpx`` is not installed.
        ValueError: If the address is invalid or the server has no such field.
        OpenEnvUnavailableError: If the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = None,
        observation_field: str | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 0.5,
    ):
        LIBRARIES["openenv"].load()
        address = urlsplit(url)
        if address.scheme not in _SCHEMES or not address.netloc:
            raise ValueError(f"An OpenEnv server's address looks like http://localhost:8000, got {url!r}.")
        rest = f"://{address.netloc}{address.path.rstrip('/')}"
        self.name = f"openenv:{url}"
        self.http_url = ("https" if address.scheme in ("https", "wss") else "http") + rest
        self.websocket_url = f"{_SCHEMES[address.scheme]}{rest}/ws"
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self._local = address.hostname in ("localhost", "127.0.0.1", "::1")  # without a proxy in between
        schema = self._schema()
        self.action_schema = schema["action"]
        self.action_field = self._field(action_field, "action", schema["action"]) or _text_field(schema["action"])
        self.observation_field = self._field(observation_field, "observation", schema["observation"])
        self._socket: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode.

        Args:
            seed: Seed that is sent to the server, which may ignore it.
            options: The dataset row; its columns are sent to the server's ``reset``.
        """
        data = {name: value for name, value in (options or {}).items() if value is not None}
        if seed is not None:
            data.setdefault("seed", seed % 2**32)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(OpenEnvUnavailableError), stop=stop_after_attempt(1 + self.retries),
            wait=wait_exponential(self.backoff), reraise=True,
        )  # fmt: skip
        answer: dict[str, Any] = await retrying(self._call, "reset", data)
        return self._text(answer["observation"]), {"observation": answer["observation"]}

    async def step(self, action: str) -> StepResult:
        """Send the answer."""
        data, error = self._action(action)
        if error is None:
            try:
                answer = await self._call("step", data)
            except OpenEnvError as refused:
                if self.action_field is not None or refused.code != "VALIDATION_ERROR":
                    raise
                error = str(refused)
        if error is not None:
            expected = json.dumps(_fields(self.action_schema))
            told = f"That is no action: {error}. Expected a JSON object with the fields {expected}"
            return told, 0.0, False, False, {}
        observation = answer["observation"]
        info = {"observation": observation}
        if (success := read_success(observation.get("success"))) is not None:
            info["success"] = success
        return self._text(observation), float(answer.get("reward") or 0.0), bool(answer.get("done")), False, info

    async def close(self) -> None:
        """End the session; the next ``reset`` starts a new one."""
        socket, self._socket = self._socket, None
        if socket is not None and self._loop is asyncio.get_running_loop():
            await socket.close()

    def _action(self, answer: str) -> tuple[dict[str, Any], str | None]:
        """Parse the action in an answer; return it and None, or an empty action and the error."""
        if self.action_field is not None:
            return {self.action_field: answer}, None
        start, end = answer.find("{"), answer.rfind("}")
        try:
            action = json.loads(answer[start : end + 1])
        except ValueError:
            return {}, "it holds no JSON object"
        return action, None

    def _text(self, observation: dict[str, Any]) -> str:
        if self.observation_field is not None:
            value = observation.get(self.observation_field, "")
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = {name: value for name, value in observation.items() if name not in _COMMON}
        if len(shown) == 1 and isinstance(value := next(iter(shown.values())), str):
            return value
        return json.dumps(shown, ensure_ascii=False)

    async def _call(self, kind: Literal["reset", "step"], data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            await self._connect()
        websockets = importlib.import_module("websockets")
        try:
            with contextlib.suppress(websockets.exceptions.ConnectionClosed):
                # A full server sends an error and disconnects at once: its message may be waiting already.
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await asyncio.wait_for(self._socket.recv(), self.timeout))
        except (TimeoutError, OSError, websockets.exceptions.ConnectionClosed) as error:
            await self.close()
            raise OpenEnvUnavailableError(f"{self.name} did not answer: {error!r}") from error
        if answer.get("type") == "error":
            problem = answer.get("data", {})
            code, message = problem.get("code", ""), f"{self.name}: {problem.get('message')}"
            if code == "CAPACITY_REACHED":
                await self.close()
                raise OpenEnvUnavailableError(
                    f"{message}. Raise the server's max_concurrent_envs, or set max_environments to its value."
                )
            details = "; ".join(f"{error.get('loc')}: {error.get('msg')}" for error in problem.get("errors", []))
            raise OpenEnvError(f"{message}{f' ({details})' if details else ''}", code)
        return answer["data"]

    async def _connect(self) -> None:
        if self._socket is not None and self._loop is asyncio.get_running_loop():
            return
        client = importlib.import_module("websockets.asyncio.client")
        self._loop = asyncio.get_running_loop()
        try:
            self._socket = await client.connect(
                self.websocket_url,
                open_timeout=self.timeout,
                max_size=_MAX_MESSAGE,
                proxy=None if self._local else True,
            )
        except (TimeoutError, OSError, importlib.import_module("websockets").exceptions.InvalidHandshake) as error:
            raise OpenEnvUnavailableError(f"{self.name} cannot be reached: {error}") from error

    def _schema(self) -> dict[str, Any]:
        httpx = importlib.import_module("httpx")
        try:
            response = httpx.get(f"{self.http_url}/schema", timeout=self.timeout, trust_env=not self._local)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise OpenEnvUnavailableError(
                f"{self.http_url}/schema cannot be read: {error}. Check that an OpenEnv server runs at this address."
            ) from error
        return response.json()

    def _field(self, name: str | None, kind: str, schema: dict[str, Any]) -> str | None:
        if name is not None and name not in _fields(schema):
            raise ValueError(
                f"{self.name} has no {kind} field {name!r}; it has: {', '.join(_fields(schema)) or 'none'}. "
                f"Set {kind}_field to one of them."
            )
        return name


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Return names and types of the environment's own fields."""
    return {
        name: field.get("type", "any") for name, field in schema.get("properties", {}).items() if name not in _COMMON
    }


def _text_field(schema: dict[str, Any]) -> str | None:
    """Return the field that an answer can fill, if there is exactly one."""
    fields = _fields(schema)
    required = [name for name in schema.get("required", []) if name in fields]
    if required:
        return required[0] if len(required) == 1 and fields[required[0]] == "string" else None
    texts = [name for name, kind in fields.items() if kind == "string"]
    return texts[0] if len(texts) == 1 else None
