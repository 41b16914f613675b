"""Images that would harm a run if they were taken, as the bytes of files, and what is said of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from image_models import noise

from agile_trainers.envs.images import MOST_PIXELS


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG of ten gigapixels in its header."""
    data = bytearray(file_of(noise(0)))
    data[16:24] = (100_000).to_bytes(4, "big") * 2
    return bytes(data)


def flat() -> bytes:
    """A PNG without height in its header."""
    data = bytearray(file_of(noise(0)))
    data[20:24] = bytes(4)
    return bytes(data)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "huge": (
        lambda: file_of(PIL.Image.new("1", (5000, 5000))),
        f"5000 x 5000 pixels; expected 1 to {MOST_PIXELS:,}",
    ),
    "broken": (lambda: file_of(noise(0))[:60], "cannot be read"),
    "no image": (lambda: b"hello", "cannot be read"),
    "zero-sized": (flat, "cannot be read|16 x 0 pixels"),
    "animated": (lambda: file_of(noise(0), "GIF", save_all=True, append_images=[noise(1), noise(2)]), "several frames"),
    "bomb": (bomb, "cannot be read|100000 x 100000 pixels"),
}
