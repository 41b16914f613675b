"""What a process is asked to do that forges replies in test_grading.py; it starts at once, since it imports little."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

_PROCESS = os.urandom(8).hex()


def echo(value: float) -> float:
    return value


def process() -> str:
    return _PROCESS


def forge(text: str, seconds: float) -> float:
    """Write text where replies are written, then wait; ``NUMBER`` stands for the number of the request."""
    frame = sys._getframe()
    while "request" not in frame.f_locals and frame.f_back is not None:
        frame = frame.f_back
    text = text.replace("NUMBER", frame.f_locals["request"]["number"])
    for descriptor in range(3, 10):
        with suppress(OSError):
            os.write(descriptor, text.encode("utf-8", "surrogateescape"))
    time.sleep(seconds)
    return 0.0
