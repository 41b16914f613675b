"""Reads the images that environments put into messages, and refuses those that would harm the run."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from agile_trainers.types import Content, Image, Message, images_of

MOST_PIXELS = 2**24
"""Pixels of an image, and a quarter of those of an episode, at most."""
MOST_IMAGES = 256
"""Images of an episode, at most."""
_MOST_BYTES = 2**26
_ORIENTATION = 0x112
"""Tag of EXIF."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
"""Orientation to the name, in Pillow, of what turns the image upright."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
DATA = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
"""Beginning of an address that holds the image itself."""
_SOURCES = ("image", "path", "url", "base64")
_known = WeakValueDictionary[str, Image]()
"""The images in use by their digests: agents send the same ones with every request."""


class ImageError(ValueError):
    """Raised for an image that cannot be read or is too large."""


def read_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message's content in the form that episodes keep.

    Args:
        part: As transformers and TRL write it: ``{"type": "text", "text": ...}``; or ``{"type": "image", ...}`` with an
            ``image`` (a PIL image, a NumPy array, bytes, a path, or :class:`~agile_trainers.types.Image`), a ``path``, a
            ``url`` (of a file, or with the data in it) or ``base64``.

    Raises:
        ImageError: If it is another part, or its image cannot be read or is too large.
    """
    if not isinstance(part, dict):
        raise ImageError(f"A part of a message is a dictionary with a type, not {type(part).__name__}.")
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        part = {"type": "image", "url": part["image_url"].get("url")}
    given = [name for name in _SOURCES if part.get(name) is not None]
    if part.get("type") != "image" or len(given) != 1:
        raise ImageError(
            'A part of a message is {"type": "text", "text": "..."} or {"type": "image", "image": ...}; got '
            f"type={kind!r} with {', '.join(map(repr, part)) or 'nothing'}."
        )
    return {"type": "image", "image": read_image(part[given[0]], given[0])}


def as_content(parts: Iterable[dict[str, Any]]) -> Content:
    """Return parts as content: texts beside each other are one, in which no special token is spelled over two, and a text
    alone is no part.
    """
    found = list[dict[str, Any]]()
    for kind, of_kind in groupby(parts, key=lambda part: part["type"]):
        group = list(of_kind)
        found += group if kind == "image" else [{"type": "text", "text": "".join(part["text"] for part in group)}]
    return found if any(part["type"] == "image" for part in found) else "".join(part["text"] for part in found)


def read_image(value: Any, source: str = "image") -> Image:
    """Read an image, and turn it as its EXIF orientation says.

    Args:
        value: A PIL image, an array (height, width), with 1, 3 or 4 channels last or none, of uint8, the bytes of a file,
            or a path.
        source: ``"image"``, ``"path"``, ``"url"`` or ``"base64"``.

    Returns:
        The image; the same object for the same bytes, as long as it is in use.

    Raises:
        ImageError: If it is none, cannot be decoded, has several frames, no pixels or too many, or more than 8 bits each.
        ImportError: If Pillow is not installed.
    """
    if isinstance(value, Image):
        if _known.get(value.digest) is value:
            return value
        value = value.data  # of an environment's own making
    try:
        import PIL.Image
    except ImportError as error:
        raise ImportError("Images in episodes need Pillow: pip install 'agile-trainers[images]'.") from error
    if isinstance(value, np.ndarray):
        value = _of_array(value)
    if isinstance(value, PIL.Image.Image):
        with _decoding("An open image"):
            _check(value)
            return _shared(_upright(value))
    data = _bytes_of(value, source)
    if len(data) > _MOST_BYTES:
        raise ImageError(f"An image has {len(data):,} bytes; expected at most {_MOST_BYTES:,}.")
    image = Image(data)
    if (known := _known.get(image.digest)) is not None:
        return known
    with (
        _decoding(f"An image of {len(data):,} bytes"),
        PIL.Image.open(BytesIO(data), formats=_FORMATS) as found,
    ):
        _check(found)
        found.load()
        return _known.setdefault(image.digest, _shared(_upright(found) if _turn(found) else image))


@contextmanager
def _decoding(what: str) -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except Exception as error:  # whatever a decoder makes of broken bytes
        raise ImageError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


def is_image(value: Any) -> bool:
    """Return whether an object can only be meant as an image."""
    pillow: Any = sys.modules.get("PIL.Image")  # without which nothing is one of its images
    return isinstance(value, Image) or (pillow is not None and isinstance(value, pillow.Image))


def opened(image: Image) -> Any:
    """Return an image as a PIL image in RGB."""
    import PIL.Image

    with PIL.Image.open(BytesIO(image.data), formats=_FORMATS) as found:
        return found.convert("RGB")


def check_images(messages: Sequence[Message]) -> None:
    """Check that the different images of a conversation are few enough.

    Raises:
        ImageError: If they, or their pixels, are too many.
    """
    images = set(images_of(messages))
    pixels = sum(width * height for width, height in map(size_of, images))
    if len(images) > MOST_IMAGES or pixels > 4 * MOST_PIXELS:
        raise ImageError(
            f"The conversation has {len(images)} different images of {pixels:,} pixels in all; expected at most "
            f"{MOST_IMAGES} of {4 * MOST_PIXELS:,}. Show fewer, scale them down, or keep the last ones with "
            "history='images:N'."
        )


def size_of(image: Image) -> tuple[int, int]:
    """Return the width and height of an image in pixels."""
    import PIL.Image

    with PIL.Image.open(BytesIO(image.data), formats=_FORMATS) as found:
        return found.size


def _upright(image: Any) -> Image:
    """Return a PIL image as a file that no metadata turn: viewers differ in those that they obey."""
    import PIL.Image

    file, turn = BytesIO(), _turn(image)
    turned = image.transpose(PIL.Image.Transpose[turn]) if turn else image
    turned.convert("RGB").save(file, "PNG", compress_level=1)
    return Image(file.getvalue())


def _turn(image: Any) -> str | None:
    """Return what turns a PIL image upright; None if it is. Metadata that cannot be read turn nothing."""
    with suppress(Exception):
        return _TURNS.get(image.getexif().get(_ORIENTATION))
    return None


def _shared(image: Image) -> Image:
    return _known.setdefault(image.digest, image)


def is_pixels(value: np.ndarray[Any, Any]) -> bool:
    """Return whether an array has the form of an image: bytes, (height, width) or with 1, 3 or 4 channels last."""
    return value.dtype == np.uint8 and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4)))


def _of_array(value: np.ndarray[Any, Any]) -> Any:
    """Return the image of an array (height, width) or (height, width, channels)."""
    import PIL.Image

    if not is_pixels(value):
        raise ImageError(
            f"An array of shape {value.shape} and type {value.dtype} is no image; expected (height, width), or that with "
            "1, 3 or 4 channels last, of uint8."
        )
    if not value.size:
        raise ImageError(f"An array of shape {value.shape} has no pixels.")
    return PIL.Image.fromarray(value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value)


def _bytes_of(value: Any, source: str) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, (str, Path)):
        text = str(value)
        encoded = text if source == "base64" else DATA.sub("", text, count=1) if DATA.match(text) else None
        if encoded is not None:
            try:
                return base64.b64decode(encoded, validate=True)
            except ValueError as error:
                raise ImageError(f"The base64 data of an image cannot be read: {error}") from error
        path = Path(text.removeprefix("file://"))
        with suppress(OSError):  # too long for a name, or not ours to read
            if "://" not in text.removeprefix("file://") and path.is_file() and path.stat().st_size <= _MOST_BYTES:
                return path.read_bytes()
        raise ImageError(
            f"The image {text[:80]!r} is no file of at most {_MOST_BYTES:,} bytes; addresses are not fetched."
        )
    raise ImageError(f"An image is a PIL image, an array, bytes or a path, not {type(value).__name__}.")


def _check(image: Any) -> None:
    width, height = image.size
    if width * height < 1 or width * height > MOST_PIXELS:
        raise ImageError(
            f"An image has {width} x {height} pixels; expected 1 to {MOST_PIXELS:,}. Scale it down: a model reads far fewer."
        )
    # A phone's photo has a preview or a depth map behind it (MPO), and the first picture is the photo.
    if getattr(image, "is_animated", False) and image.format != "MPO":  # the number of frames would take long to count
        raise ImageError("An image has several frames; expected one. Choose a frame.")
    if image.mode[0] in "IF":  # Pillow would cut their values at 255
        raise ImageError(
            f"An image of mode {image.mode} has values of more than 8 bits; expected 0 to 255. Scale them to that range, "
            "and pass them as an array of uint8."
        )
