"""Asks judges: an endpoint that speaks the protocol of OpenAI, or a function; repeats, limits, and keeps answers on disk."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential
from transformers.utils import logging
from trl.trainer.utils import get_callable_name, is_async_callable

from agile_trainers.checkpoints.disclosure import MASK, mask
from agile_trainers.judges.questions import JudgeQuestion, canonical, read_judgement
from agile_trainers.records.plain import content_digest
from agile_trainers.types import Message

logger = logging.get_logger(__name__)

_WAIT = 60.0
"""Seconds for which another process may hold the file."""


class StoredAnswers:
    """Answers by the digest of what was asked. A file that fails costs further calls, and never ends a run.

    Args:
        path: File of SQLite, which several processes may use; None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._told = path, False
        self._database: sqlite3.Connection | None = None

    def get(self, key: str) -> str | None:
        """Return the answer that is stored; None if there is none."""
        found = self._run("SELECT answer FROM answers WHERE key = ?", key)
        return json.loads(found[0][0]) if found else None

    def put(self, key: str, answer: str) -> str:
        """Store an answer, unless there is one, and return what is stored."""
        self._run("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, json.dumps(answer))
        stored = self.get(key)
        return answer if stored is None else stored

    def drop(self, key: str, answer: str) -> None:
        """Remove an answer, if it is what is stored."""
        self._run("DELETE FROM answers WHERE key = ? AND answer = ?", key, json.dumps(answer))

    def _run(self, statement: str, *values: str) -> list[Any]:
        try:
            if self._database is None:
                if self.path is not None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                self._database = sqlite3.connect(self.path or ":memory:", timeout=_WAIT)
                # Nothing waits for the disk: a killed process loses nothing, a machine without power the latest answers.
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA synchronous = NORMAL")
                self._database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT)")
            with self._database:
                return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            if not self._told:
                logger.warning(f"The answers of judges in {self.path} cannot be used: {error}. Each is asked for anew.")
            self._told = True
            return []

    def close(self) -> None:
        """Close the file, in the thread that used it."""
        if self._database is not None:
            self._database.close()
            self._database = None


WAITS = wait_random_exponential(multiplier=0.5, max=30)
"""Seconds before a repetition."""
PATIENCE = 600.0
"""Seconds for which a judge that is asked too often (status 429) is asked again, whatever the number of tries."""
_LONGEST_WAIT = 60.0
"""Seconds that a server may have a repetition wait, with ``Retry-After``."""
_TOO_OFTEN = 429
_AGAIN = (408, 409, 425, _TOO_OFTEN)
"""Statuses of requests that may succeed later, beside those of the server's own errors."""
_MOST_TOKENS = 10**9
"""Tokens of a question or an answer; a server that counts more counts wrong."""
_LONGEST_ERROR = 300
UNFIT = "The answer does not fit its schema: "
"""Beginning of the reason of an answer that cannot be read."""


class Unanswered(Exception):
    """A judge did not answer. The message says why.

    Args:
        reason: Why.
        tokens: What was paid for nevertheless, of the question and of the answer.
    """

    def __init__(self, reason: str, tokens: tuple[int, int] = (0, 0)) -> None:
        super().__init__(reason)
        self.tokens = tokens


class UnansweredForNow(Unanswered):
    """A judge did not answer, and may if it is asked again.

    Args:
        reason: Why.
        after: Seconds before the next try, at least.
        too_often: Whether it would have answered fewer questions.
    """

    def __init__(self, reason: str, after: float = 0.0, too_often: bool = False) -> None:
        super().__init__(reason)
        self.after, self.too_often = after, too_often


@dataclass(frozen=True)
class Reply:
    """The answer of a judge, which fits its question, or the reason why there is none."""

    answer: str | None = None
    failed: str | None = None
    tokens: tuple[int, int] = (0, 0)
    """Tokens that were paid for: of the question and of the answer."""
    seconds: float = 0.0
    """From the first try to the end of the last. 0 of a stored answer."""
    stored: bool = False


class Source(Protocol):
    """Something that can be asked."""

    def content(self, question: JudgeQuestion) -> Any:
        """Return all that the answer depends on, as JSON."""

    async def ask(self, question: JudgeQuestion) -> tuple[str, tuple[int, int]]:
        """Return the answer as text, and its tokens.

        Raises:
            Unanswered: Without an answer.
        """

    async def close(self) -> None:
        """Close connections."""


class JudgeEndpoint:
    """A model behind ``POST <url>/chat/completions``.

    The key is read from the environment variable at each request. It is kept nowhere, and masked in what comes back.

    Args:
        url: Base address, as ``https://api.openai.com/v1``.
        model: Name of the model there.
        key_env: Name of the environment variable with the key; None sends none.
        options: Further fields of a request; None as a value leaves a field out.

    Raises:
        ValueError: For an address that is none or holds a secret, or a variable that is not set.
    """

    def __init__(self, url: str, model: str | None, key_env: str | None, options: Mapping[str, Any]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(
                "judge must be a function, or the base address of an endpoint such as 'https://api.openai.com/v1', got "
                f"{mask(url)[0]!r}."
            )
        if parts.username or parts.password:
            raise ValueError(
                "The address of a judge holds a user or a password. Set key_env, and leave them out of it."
            )
        if not model:
            raise ValueError(f"A judge behind an endpoint needs the name of its model: model='...', got {model!r}.")
        if key_env is not None and not os.environ.get(key_env):
            raise ValueError(
                f"key_env={key_env!r:.40} names an environment variable that is not set. Set it to the judge's key, or "
                "leave key_env unset."
            )
        self.url, self._model, self._key_env, self._options = url.rstrip("/"), model, key_env, dict(options)
        self._client: httpx.AsyncClient | None = None

    def content(self, question: JudgeQuestion) -> dict[str, Any]:
        """Return the body of the request. The address is not part of it: the same model may move."""
        form = {"name": "judgement", "strict": True, "schema": question.schema}
        body = {
            "model": self._model, "messages": question.messages, "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": form}, **self._options,
        }  # fmt: skip
        return {name: value for name, value in body.items() if value is not None}

    async def ask(self, question: JudgeQuestion) -> tuple[str, tuple[int, int]]:
        """Send the request once; see :class:`Source`."""
        key = os.environ.get(self._key_env, "") if self._key_env else ""
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        try:
            response = await self._client.post(
                f"{self.url}/chat/completions",
                json=self.content(question),
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
            text = response.text.replace(key, MASK) if key else response.text
        except httpx.HTTPError as error:
            raise UnansweredForNow(f"{type(error).__name__}: {error}") from None
        if response.is_error or response.is_redirect:
            reason = f"HTTP {response.status_code}: {mask(text)[0][:_LONGEST_ERROR]}"
            too_often = response.status_code == _TOO_OFTEN
            again = response.status_code in _AGAIN or response.is_server_error
            if not again or (too_often and "insufficient_quota" in text):  # OpenAI's: the money has run out
                raise Unanswered(reason)
            raise UnansweredForNow(reason, _seconds(response.headers.get("Retry-After", "")), too_often)
        try:
            answered = json.loads(text)
            usage = answered.get("usage") or {}
            tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
            if not 0 <= min(tokens) <= max(tokens) <= _MOST_TOKENS:  # no float holds an integer of 400 digits
                raise ValueError(tokens)
            choice = answered["choices"][0]
            content, ended = choice["message"]["content"], choice.get("finish_reason")
        # RecursionError: of brackets without end. OverflowError: of a count of 1e999.
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
            raise UnansweredForNow(f"The response is no chat completion: {mask(text)[0][:_LONGEST_ERROR]}") from None
        if not isinstance(content, str):  # thoughts alone, or a refusal
            raise Unanswered(f"The answer has no text (finish_reason: {ended!r:.40}).", tokens)
        return content, tokens

    async def close(self) -> None:
        """Close connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _seconds(after: str) -> float:
    """Read ``Retry-After``: seconds, or a date; 0 for anything else."""
    with suppress(ValueError):
        return min(max(0.0, float(after)), _LONGEST_WAIT)  # in this order NaN is 0
    try:
        left = (parsedate_to_datetime(after) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # TypeError: of a date without a time zone
        return 0.0
    return min(max(0.0, left), _LONGEST_WAIT)


class JudgeFunction:
    """A function from the messages of a question to the answer, JSON text or a dictionary; it may be asynchronous."""

    def __init__(self, function: Callable[[list[Message]], Any]) -> None:
        self._function, self._name = function, get_callable_name(function)
        self._source = _digest_of(function)

    def content(self, question: JudgeQuestion) -> dict[str, Any]:
        """Return the question with the name and the digest of the function's source and state."""
        return {"function": [self._name, self._source], "messages": question.messages, "schema": question.schema}

    async def ask(self, question: JudgeQuestion) -> tuple[str, tuple[int, int]]:
        """Call the function once; see :class:`Source`. Its exceptions count as faults that may pass."""
        messages = [dict(message) for message in question.messages]
        try:
            if is_async_callable(self._function):
                answer = await self._function(messages)
            else:
                answer = await asyncio.wrap_future(_in_thread(lambda: self._function(messages)))
            return answer if isinstance(answer, str) else json.dumps(answer), (0, 0)
        except (Exception, SystemExit) as error:
            raise UnansweredForNow(f"{type(error).__name__}: {mask(str(error))[0][:_LONGEST_ERROR]}") from error

    async def close(self) -> None:
        """There is nothing to close."""


def _digest_of(function: Any) -> str:
    """Return a digest of a function's source, and of what it was given, closes over or is bound to."""
    state: list[Any] = []
    while isinstance(function, partial):
        state += [function.args, function.keywords]
        function = function.func
    code = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None if inspect.isroutine(function) else function)
    for cell in getattr(code, "__closure__", None) or ():
        with suppress(ValueError):  # it is filled later
            state.append(cell.cell_contents)
    state.append(getattr(code, "__defaults__", None))
    state.append({} if inspect.ismodule(owner) else getattr(owner, "__dict__", {}))
    try:
        source = inspect.getsource(code if inspect.isroutine(code) else type(code))
    except (OSError, TypeError):  # of a C function or a console
        source = ""
    return sha256(f"{source} {content_digest(state, 0)}".encode()).hexdigest()


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread of its own, which does not keep the process alive if it hangs."""
    future: Future[Any] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except BaseException as error:  # one that ends a thread would end the loop
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))

    threading.Thread(target=run, name="judge", daemon=True).start()
    return future


class Asker:
    """Asks a source in a thread with an event loop, several questions at once, and stores its answers.

    Equal questions are asked once, whoever asks. A question that failed is asked again, but not for the same episode in the
    same run: a run that is resumed finds what failed in it as it was.

    Args:
        source: What is asked.
        concurrency: Questions at once.
        timeout: Seconds of a try.
        attempts: Tries of a question.
    """

    def __init__(self, source: Source, concurrency: int, timeout: float, attempts: int) -> None:
        self._source, self._concurrency, self._timeout, self._attempts = source, concurrency, timeout, attempts
        self.stored = StoredAnswers(None)
        self.run_id: Callable[[], str] = str
        """Id of the run; empty outside of one."""
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[Reply]] = {}
        self._under_way: dict[str, asyncio.Task[Reply]] = {}
        """Questions under way by their digest; only the loop's thread uses it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._free: asyncio.Semaphore

    def ask(self, question: JudgeQuestion, seed: int) -> tuple[str, int]:
        """Ask, unless it is being asked, and return the key of the reply. From any thread.

        Args:
            question: The question.
            seed: That of the episode or the group.
        """
        key = sha256(canonical(self._source.content(question)).encode()).hexdigest(), seed
        with self._lock:
            if key not in self._asked:
                self._asked[key] = asyncio.run_coroutine_threadsafe(self._reply(*key, question), self._started())
        return key

    def replies(self, keys: list[tuple[str, int]]) -> list[Reply]:
        """Wait for the replies to what was asked, and forget them."""
        with self._lock:
            futures = [self._asked[key] for key in keys]
        found = [future.result() for future in futures]
        with self._lock:
            for key in keys:
                self._asked.pop(key, None)
        return found

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, self._free = asyncio.new_event_loop(), asyncio.Semaphore(self._concurrency)
            self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
            self._thread.start()
        return self._loop

    async def _reply(self, key: str, seed: int, question: JudgeQuestion) -> Reply:
        run = self.run_id()
        failure = f"{run} {seed} {key}" if run else None
        if failure is not None and (noted := self.stored.get(failure)) is not None:
            return Reply(failed=noted, stored=True)
        if (answer := self.stored.get(key)) is not None:
            if read_judgement(answer, question) is not None:
                return Reply(answer, stored=True)
            self.stored.drop(key, answer)  # earlier versions kept those too
        if (shared := self._under_way.get(key)) is not None:
            reply = replace(await shared, tokens=(0, 0), stored=True)
        else:
            self._under_way[key] = asyncio.create_task(self._fresh(key, question))
            reply = await self._under_way[key]
        if failure is not None and reply.failed is not None:
            self.stored.put(failure, reply.failed)
        return reply

    async def _fresh(self, key: str, question: JudgeQuestion) -> Reply:
        try:
            async with self._free:
                started = time.perf_counter()
                try:
                    answer, tokens = await self._repeatedly(question)
                except Unanswered as error:
                    return Reply(None, str(error), error.tokens, time.perf_counter() - started)
                if read_judgement(answer, question) is None:  # of a server that may be mended before another run asks
                    return Reply(None, f"{UNFIT}{answer!r:.300}", tokens, time.perf_counter() - started)
                # Another process may have been first: what counts is what a resumed run finds.
                return Reply(self.stored.put(key, answer), None, tokens, time.perf_counter() - started)
        finally:
            del self._under_way[key]

    async def _repeatedly(self, question: JudgeQuestion) -> tuple[str, tuple[int, int]]:
        async def once() -> tuple[str, tuple[int, int]]:
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._source.ask(question)
            except TimeoutError:
                raise UnansweredForNow(f"No answer within {self._timeout:g} s.") from None

        spent = 0

        def ends(state: RetryCallState) -> bool:
            nonlocal spent
            if _failure(state).too_often:  # no try of a question that it would have answered
                logger.warning_once("A judge is asked too often and says so (429): its rate limit is waited for.")
                return state.attempt_number >= self._attempts and (state.seconds_since_start or 0.0) >= PATIENCE
            spent += 1
            return spent >= self._attempts

        def wait(state: RetryCallState) -> float:
            return _failure(state).after + WAITS(state)  # what is told to many at once is not obeyed at once by all

        again = retry_if_exception_type(UnansweredForNow)
        return await AsyncRetrying(stop=ends, wait=wait, retry=again, reraise=True)(once)

    def close(self) -> None:
        """End the thread, and what is being asked."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            self._asked.clear()
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    async def _end(self) -> None:
        others: list[asyncio.Task[Any]] = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._source.close()
        self.stored.close()


def _failure(state: RetryCallState) -> UnansweredForNow:
    assert state.outcome is not None
    failure = state.outcome.exception()
    assert isinstance(failure, UnansweredForNow)
    return failure
