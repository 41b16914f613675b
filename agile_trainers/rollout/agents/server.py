"""An HTTP server on loopback for the clients of agents. No other file imports aiohttp."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import web

from agile_trainers.envs.agent import Endpoint
from agile_trainers.rollout.agents.dialects import DIALECTS, Dialect
from agile_trainers.rollout.agents.dialects.base import DEEPEST_BODY, ascii_json, checked, get, parse, required
from agile_trainers.rollout.agents.dialects.chat import CHAT
from agile_trainers.rollout.agents.requests import FROZEN, POLICY, Answer, EpisodeExchange, Marks, Refusal, Ticket
from agile_trainers.rollout.process_environment import until_readable

logger = logging.getLogger(__name__)

_QUEUE = 1024
"""Connections that wait to be accepted; a rollout may begin with hundreds."""
_DO_NOT_RETRY = {"x-should-retry": "false"}
"""The header by which OpenAI's and Anthropic's clients decide, whatever the status."""
_LAST_SECONDS = 0.05
"""Time that open requests get when the server closes, before they are cancelled; 0 means without end to aiohttp."""
_SHARE = 0.75
"""The share of the files that this process may open which connections take at most: it opens checkpoints, logs, programs."""
_PAUSE = 0.05
"""Seconds between two looks for room for a connection that waits."""
_PASSED_BACK = ("Content-Type", "Retry-After", "x-should-retry")
"""Headers of another endpoint's answer that the agent gets."""


class _WithoutContent(logging.Filter):
    """Leaves out of aiohttp's log the lines of a request that is no HTTP: they may hold the key."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(_WithoutContent())
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentServer:
    """Serves the dialects of chat clients on 127.0.0.1, at a free port, in a thread with an event loop of its own.

    Entering it starts the server, leaving it closes every connection; after that nothing listens and the thread has ended.
    An episode is known by its key, which clients send as their API key.

    Args:
        exchange: Gets the requests, and answers them.
        max_body: Bytes that a request's body may have; a larger one is refused without being kept.
    """

    def __init__(self, exchange: EpisodeExchange[Any], *, max_body: int = 32 * 2**20) -> None:
        self._exchange = exchange
        self._max_body = max_body
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._client: aiohttp.ClientSession | None = None

    @property
    def base_url(self) -> str:
        """The address for OpenAI's clients; it ends with ``/v1``."""
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> AgentServer:
        if "http" in getproxies() and not proxy_bypass("127.0.0.1"):
            logger.warning(
                "A proxy is set for HTTP, to which the clients of agents will send their requests, with their key. Set "
                "NO_PROXY=127.0.0.1,localhost so that they reach the endpoint."
            )
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="agent-server", daemon=True)
        self._thread.start()
        started.result()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._loop is not None and self._thread is not None
        with suppress(RuntimeError):  # the loop is closed: the server has failed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, started: Future[None]) -> None:
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:
            if started.done():
                logger.exception("The endpoint of agents failed. Their requests are not answered any more.")
            else:
                started.set_exception(error)

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=self._max_body)
        app.router.add_route("*", "/{path:.*}", self._answered)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=_http_logger, shutdown_timeout=_LAST_SECONDS
        )
        listening = socket.create_server(("127.0.0.1", 0), backlog=_QUEUE)
        listening.setblocking(False)
        self._port = listening.getsockname()[1]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._client:
            await runner.setup()
            assert runner.server is not None
            accepting = asyncio.create_task(self._accept(listening, runner.server))
            try:
                started.set_result(None)
                await self._stop.wait()
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                listening.close()
                connections = [] if runner.server is None else [one.transport for one in runner.server.connections]
                await runner.cleanup()
                for connection in connections:
                    if connection is not None:
                        connection.abort()  # one whose client does not read would never be closed

    async def _accept(self, listening: socket.socket, server: web.Server) -> None:
        """Begin connections, as long as there are files left for the rest of this process. Further ones wait."""
        limit, loop, warned = resource.getrlimit(resource.RLIMIT_NOFILE)[0], asyncio.get_running_loop(), False
        most = float("inf") if limit == resource.RLIM_INFINITY else int(limit * _SHARE)
        while True:
            await until_readable(listening.fileno())
            try:
                if len(server.connections) < most:
                    # Not by `loop.sock_accept`, which loses a connection that comes as it is cancelled.
                    connection, _ = listening.accept()
                    connection.setblocking(False)
                    await loop.connect_accepted_socket(server, connection)
                    continue
            except (BlockingIOError, ConnectionError):  # the client has hung up
                continue
            except OSError:  # no file is left
                pass
            if not warned:
                logger.warning(
                    "Agents hold %d connections to the endpoint, of %d files that this process may open. Further ones "
                    "wait. Raise the limit (ulimit -n), or let agents close connections.",
                    len(server.connections), limit,
                )  # fmt: skip
            warned = True
            await asyncio.sleep(_PAUSE)

    # ------------------------------------------------------------------------------------------------------- requests

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        """Answer a request; what is refused, and what fails here, is answered in the client's dialect."""
        path = _path(request)
        dialect = next((dialect for dialect in DIALECTS if dialect.path == path), CHAT)
        try:
            return await self._routed(request, path)
        except Refusal as refusal:
            answer = refusal
        except web.HTTPRequestEntityTooLarge:
            answer = self._too_large()
        except web.RequestPayloadError as error:
            answer = Refusal(f"The body cannot be read: {error}. Send what its headers say.")
        except ConnectionResetError:
            raise  # the client hung up
        except Exception as error:
            logger.exception("A request of an agent (%s /v1%s) failed in the endpoint.", request.method, path)
            if request.writer.output_size:
                raise ConnectionResetError("a second answer cannot follow the one that was begun") from error
            answer = Refusal(
                f"The endpoint failed: {type(error).__name__}. Its log has the traceback.", 500, "server_error"
            )
        return _json(dialect.error(answer), answer.status, _DO_NOT_RETRY)

    async def _routed(self, request: web.Request, path: str) -> web.StreamResponse:
        routes: dict[tuple[str, str], _Handler] = {("POST", one.path): partial(self._asked, one) for one in DIALECTS}
        routes["POST", "/reward"] = self._rewarded
        routes["GET", "/models"] = self._models
        handler = routes.get((request.method, path))
        if handler is None:
            known = ", ".join(f"{method} /v1{known}" for method, known in routes)
            raise Refusal(f"There is no {request.method} /v1{path}; expected one of {known}.", 404, "not_found")
        return await handler(request)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        names = [POLICY, FROZEN, *self._exchange.models(_key(request))]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "agile-trainers"} for name in names]
        return _json({"object": "list", "data": models})

    async def _rewarded(self, request: web.Request) -> web.StreamResponse:
        key = _key(request, "reward_key")
        body = checked(parse(await self._body(request), DEEPEST_BODY), dict, "body")
        self._exchange.reward(key, body.get("value"), get(body, "call", str))
        return _json({})

    async def _asked(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        key = _key(request)
        others = self._exchange.models(key)  # also refuses a wrong key, before a body is read
        raw = await self._body(request)
        body = checked(parse(raw, DEEPEST_BODY), dict, "body")
        other = others.get(required(body, "model", str))
        if other is not None:
            return await self._forwarded(request, dialect, body, other)
        # Images are decoded in a thread. A text is asked for at once, also if its client hangs up.
        asked = await asyncio.to_thread(dialect.read, body) if b"image" in raw else dialect.read(body)
        ticket = Ticket(asked, _marks(request))
        ticket.request.body = raw
        async with self._held_open(key, ticket, request) as answer:
            return await _delivered(request, dialect, answer, ticket)

    @asynccontextmanager
    async def _held_open(self, key: str, ticket: Ticket, request: web.Request) -> AsyncIterator[Answer]:
        """Ask, and tell the exchange whether the client got the whole answer.

        The answer's Future is left alone when the client hangs up: the answer is kept for when it asks again.
        """
        loop, answered = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: Any) -> None:
            with suppress(RuntimeError):  # the server is closed
                loop.call_soon_threadsafe(answered.set)

        try:
            self._exchange.ask(key, ticket)
            ticket.answer.add_done_callback(wake)
            await answered.wait()
            yield ticket.answer.result()
            _raise_if_reset(request)
        except Refusal:
            raise
        except BaseException:
            self._exchange.abandoned(key, ticket)
            raise
        self._exchange.delivered(key, ticket)

    async def _body(self, request: web.Request) -> bytes:
        if request.content_length is not None and request.content_length > self._max_body:
            raise self._too_large()
        return await request.read()

    def _too_large(self) -> Refusal:
        return Refusal(f"The body has more than {self._max_body} bytes; send less at once.", 413, "request_too_large")

    async def _forwarded(
        self, request: web.Request, dialect: Dialect, body: dict[str, Any], endpoint: Endpoint
    ) -> web.StreamResponse:
        """Send a request on to another endpoint, with that endpoint's key, and its answer back as it arrives."""
        assert self._client is not None
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {
            name: request.headers[name] for name in ("anthropic-version", "anthropic-beta") if name in request.headers
        }
        if endpoint.api_key:
            headers |= {"Authorization": f"Bearer {endpoint.api_key}", "x-api-key": endpoint.api_key}
        data = ascii_json({**body, "model": endpoint.model or body["model"]}).encode()
        url = endpoint.base_url.rstrip("/") + dialect.path
        shown = re.sub("//[^/]*@", "//", url)  # a user's name and password may be in it
        ours = web.StreamResponse()
        try:
            async with self._client.post(url, data=data, headers=headers) as theirs:
                ours.set_status(theirs.status)
                ours.headers.update({name: theirs.headers[name] for name in _PASSED_BACK if name in theirs.headers})
                await ours.prepare(request)
                async for chunk in theirs.content.iter_any():
                    await ours.write(chunk)
        except aiohttp.ClientError as error:
            if ours.prepared:  # the client has part of the answer: a cut one tells it
                raise ConnectionResetError(f"{shown} broke off") from error
            raise Refusal(
                f"{shown}, the endpoint of model {body['model']!r}, failed: {error}.", 502, "bad_gateway"
            ) from None
        await ours.write_eof()
        return ours


async def _delivered(request: web.Request, dialect: Dialect, answer: Answer, ticket: Ticket) -> web.StreamResponse:
    """Send an answer whole, or as all events of its stream at once, until the last byte has left this process."""
    if ticket.request.stream:
        body = b"".join(event.encoded() for event in dialect.events(answer, ticket.request))
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.Response(body=body, headers=headers)
    else:
        response = _json(dialect.write(answer, ticket.request))
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)  # else up to 64 KiB wait here when the answer counts as sent
    await response.prepare(request)
    await response.write_eof()
    return response


def _raise_if_reset(request: web.Request) -> None:
    """Raise if the client hung up before it had read everything: its system then reset the connection."""
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is None or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise ConnectionResetError("the client hung up")


def _path(request: web.Request) -> str:
    """The path after ``/v1``, which a base URL and a client may both add."""
    path = request.path.rstrip("/")
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return path


def _key(request: web.Request, kind: str = "api_key") -> str:
    """The key of an episode: Anthropic's header, then OpenAI's, which a token in a user's environment may also fill."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
    if not key:
        raise Refusal(f"The request has no key; pass `model.{kind}` as the client's `api_key`.", 401, "invalid_api_key")
    return key


def _marks(request: web.Request) -> Marks:
    def header(name: str) -> str:  # bytes that are not UTF-8 are half surrogate pairs here, which no text may hold
        return request.headers.get(name, "").encode(errors="backslashreplace").decode()

    retries = header("x-stainless-retry-count")
    return Marks(
        key=header("Idempotency-Key") or None,
        retries=int(retries) if retries.isdecimal() and len(retries) < 10 else 0,
        occurrence=header("x-occurrence") or None,
        client=header("User-Agent"),
    )


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=ascii_json(value).encode(), status=status, headers=headers, content_type="application/json"
    )
