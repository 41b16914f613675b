"""Retries calls that may fail temporarily, of a server that starts, restarts or is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


async def retry(
    attempt: Callable[[], Awaitable[Result]], transient: tuple[type[Exception], ...], retries: int, backoff: float
) -> Result:
    """Await ``attempt()``, and repeat it after a pause on transient errors.

    Args:
        attempt: The call. It must be safe to repeat.
        transient: Errors that are retried.
        retries: Further attempts after the first.
        backoff: Seconds of the first pause; every further pause is twice as long.

    Raises:
        Exception: The error of the last attempt, or any error that is not ``transient``.
    """
    for number in range(retries):
        try:
            return await attempt()
        except transient:
            await asyncio.sleep(backoff * 2**number)
    return await attempt()
