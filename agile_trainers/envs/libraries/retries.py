"""Trying again, for what fails now and then: a server that starts, restarts or is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")


async def retry(
    attempt: Callable[[], Awaitable[Result]], transient: tuple[type[Exception], ...], retries: int, backoff: float
) -> Result:
    """Await ``attempt()``, again after a pause if it fails in a way that may pass.

    Args:
        attempt: What to try. It must be safe to repeat.
        transient: Errors that are worth another attempt.
        retries: Further attempts after the first.
        backoff: Seconds of the first pause; every further pause is twice as long.

    Raises:
        Exception: What the last attempt raised, or any attempt that is not ``transient``.
    """
    for number in range(retries):
        try:
            return await attempt()
        except transient:
            await asyncio.sleep(backoff * 2**number)
    return await attempt()
