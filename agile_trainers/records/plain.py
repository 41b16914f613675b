"""Converts any object of an environment to text or JSON that can be written to disk, and reads such JSON."""

from __future__ import annotations

import functools
import json
import re
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

from agile_trainers.imports import pass_on_interrupt

_DEEPEST = 20
"""Nesting levels of an environment's dicts and lists that are written."""
_NESTED = 100
"""Nesting levels of JSON that is read."""
LARGEST, DEEPEST_MESSAGE = 1_000_000, 120
"""Items, or characters of one that JSON does not know, and nesting levels of data that is copied whole: arguments of a tool
call may have :data:`_NESTED`."""
LARGEST_JSON = 2**30
"""Bytes of a file of JSON that is read; one that is a hole has no size on the disk."""
_LONGEST_TEXT = 10_000
"""Characters that are written of a value that JSON cannot represent."""
_MOST_BITS = 1024
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = json.JSONEncoder(check_circular=False)
"""Encodes what holds nothing but texts and numbers, in less time than with a check of circles, which raise anyway."""
PARTIAL = ".partial"
"""Suffix of a file that is being written."""


class TooLargeError(ValueError):
    """Raised where data would have to be shortened that is needed whole."""


class Plain:
    """Converts any object to JSON-ready data, self-referencing, raising and very large ones included.

    Args:
        items: Number of items that are written; the rest is left out.
        levels: Nesting levels that are written.
        whole: True to raise instead of leaving something out. Values that JSON does not know are texts there too.

    Raises:
        TooLargeError: With ``whole``, naming the limit.
    """

    def __init__(self, items: int = 10_000, levels: int = _DEEPEST, *, whole: bool = False) -> None:
        self._left, self._items, self._levels, self._whole = items, items, levels, whole

    def __call__(self, value: Any, inside: tuple[int, ...] = ()) -> Any:
        self._left -= 1
        try:
            if isinstance(value, (dict, list, tuple)):
                if self._left < 0 or id(value) in inside or len(inside) == self._levels:
                    return self._left_out(value, inside)
                inside = (*inside, id(value))
                if isinstance(value, dict):
                    # What is stored: the methods of a subclass may never end.
                    pairs = dict.items(value)
                    found = {self._text(key): self(item, inside) for key, item in pairs if self._goes_on()}
                    if self._whole and len(found) < dict.__len__(value):
                        raise TooLargeError("have two keys of an object with one text")
                    return found
                stored = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
                return [self(item, inside) for item in stored if self._goes_on()]
            if value is None or isinstance(value, (bool, str)):
                return value
            if isinstance(value, int) and (self._whole or value.bit_length() <= _MOST_BITS):
                return int(value)
            if isinstance(value, float) and isfinite(value):
                return float(value)
        except TooLargeError:
            raise
        except BaseException as error:  # of the environment's own class
            pass_on_interrupt(error)
            return f"<{type(value).__name__}: {type(error).__name__}>"
        return self._text(value)

    def _goes_on(self) -> bool:
        if self._whole and self._left <= 0:
            raise TooLargeError(f"have more than {self._items:,} items")
        return self._left >= 0

    def _left_out(self, value: Any, inside: tuple[int, ...]) -> str:
        if self._whole:
            deep = f"are nested in more than {self._levels} levels"
            raise TooLargeError("hold themselves" if id(value) in inside else deep)
        return f"<{type(value).__name__}: left out>"

    def _text(self, value: Any) -> str:
        if not self._whole:
            return _text(value)
        text = value if isinstance(value, str) else _text(value, LARGEST + 1)
        if text is not value and len(text) > LARGEST:
            raise TooLargeError(f"have a {type(value).__name__} whose text has more than {LARGEST:,} characters")
        return plain_text(text)  # by which keys may become equal


def whole_copy(value: Any) -> Any:
    """Copy data as JSON holds it, with texts as :func:`plain_text`; what JSON does not know (NaN too) becomes its ``str``.

    Raises:
        TooLargeError: If it has more than :data:`LARGEST` items or :data:`DEEPEST_MESSAGE` nesting levels, holds itself, has
            two keys of one text, or a value that JSON does not know with more than :data:`LARGEST` characters.
    """
    try:
        return json.loads(
            plain_text(json.dumps(Plain(LARGEST, DEEPEST_MESSAGE, whole=True)(value), ensure_ascii=False))
        )
    except TooLargeError:
        raise
    except ValueError as error:  # thousands of digits, which Python neither writes nor reads
        raise TooLargeError(f"have a number that cannot be written: {error}") from error


def content_digest(value: Any, seed: int) -> str:
    """Hash a value of the user's or the environment's; one that cannot be written as text is told by its seed."""
    try:
        text = json.dumps(value, sort_keys=True, default=_content)
    except Exception:  # it refers to itself, mixes types of keys, or its repr raises
        text = f"seed {seed}"
    return blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def _content(value: Any) -> str:
    """Return a text that differs where values do, and is equal in each process where they are not."""
    if isinstance(value, (set, frozenset)):
        value = sorted(map(_content, value))
    elif getattr(getattr(value, "dtype", None), "hasobject", False):  # an array of addresses
        value = value.tolist()
    # The text of an array is shortened, and an image's is an address.
    if isinstance(value, bytes) or callable(getattr(value, "tobytes", None)):
        return _of_bytes(value)
    return stable_text(value)


def _of_bytes(value: Any) -> str:
    data = value if isinstance(value, bytes) else value.tobytes()
    form = [getattr(value, name, "") for name in ("dtype", "shape", "mode", "size")]
    return f"{type(value).__name__} {form} {blake2b(data, digest_size=16).hexdigest()}"


def stable_json(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Convert any object to JSON values, equal in each process where the object is; see :func:`stable_text`.

    One whose ``repr`` raises is told by its type.
    """
    if type(value) in (str, float) or (type(value) is int and value.bit_length() <= _MOST_BITS):
        return value
    if isinstance(value, (dict, list, tuple)) and (id(value) in inside or len(inside) == _DEEPEST):
        return f"<{type(value).__name__}: left out>"
    try:  # all at once: several times as fast as one by one
        return json.loads(json.dumps(value, default=stable_text))
    except BaseException as error:
        pass_on_interrupt(error)
        if isinstance(value, int):  # of thousands of digits
            return hex(value)
        if not isinstance(value, (dict, list, tuple)):
            return f"<{type(value).__name__}: its repr raises {type(error).__name__}>"
    inside = (*inside, id(value))
    if isinstance(value, dict):
        keys = [stable_json(key, inside) for key in dict.keys(value)]
        items = [stable_json(item, inside) for item in dict.values(value)]
        return {key if isinstance(key, str) else json.dumps(key): item for key, item in zip(keys, items)}
    stored = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
    return [stable_json(item, inside) for item in stored]


def stable_text(value: Any, inside: tuple[int, ...] = ()) -> str:
    """Return the ``repr`` of an object, equal in each process where the object is.

    Sets are sorted, also inside of whatever shows them, such as lists, data classes and partial functions. Code is told
    without file and line, an object without its address, and an image by a hash.
    """
    if _is_plain(value):
        return _ADDRESS.sub("", repr(value))
    if id(value) in inside or len(inside) == _DEEPEST:
        return f"<{type(value).__name__}: left out>"
    inside = (*inside, id(value))
    if isinstance(value, CodeType):
        return f"code {stable_text([value.co_code, value.co_names, value.co_consts], inside)}"
    shows: Any = type(value).__repr__
    if shows is dict.__repr__:
        pairs = [f"{stable_text(key, inside)}: {stable_text(item, inside)}" for key, item in dict.items(value)]
        return f"{{{', '.join(pairs)}}}"
    if shows is list.__repr__ or shows is tuple.__repr__:
        items = [stable_text(item, inside) for item in value]
        return f"[{', '.join(items)}]" if shows is list.__repr__ else f"({', '.join(items)}{',' * (len(items) == 1)})"
    text = repr(value)
    if isinstance(value, (set, frozenset)) and "{" in text:
        if all(isinstance(item, (int, float)) for item in value):  # the order that Python gives them in each process
            items = [stable_text(item, inside) for item in set().union(sorted(value))]
        else:
            items = sorted(stable_text(item, inside) for item in value)
        return f"{text[: text.index('{')]}{{{', '.join(items)}{text[text.rindex('}') :]}"
    if "{" in text or _ADDRESS.search(text):
        shown: dict[str, Any] = {}
        for part in _parts(value, text):
            with suppress(Exception):  # of a part that is not shown
                shown |= {} if _is_plain(part) else {repr(part): part}
        for before in sorted(shown, key=len, reverse=True):  # the longest first, which may show another
            if before in text:
                text = text.replace(before, stable_text(shown[before], inside))
    if callable(getattr(value, "tobytes", None)) and not hasattr(value, "dtype") and _ADDRESS.search(text):
        return _of_bytes(value)
    return _ADDRESS.sub("", text)


def _is_plain(value: Any) -> bool:
    """Return whether a value holds nothing but texts and numbers, so that its ``repr`` is the same in each process."""
    if not isinstance(value, (dict, list, tuple)):
        return value is None or isinstance(value, (str, int, float))
    try:
        _PLAIN.encode(value)
    except BaseException as error:
        pass_on_interrupt(error)
        return False
    return True


def _parts(value: Any, text: str) -> list[Any]:
    """Return the objects that the ``repr`` of another may show; of a collection its content as a whole, if it shows that."""
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        return list(getattr(value, "flat", ()))  # which data frames lack
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (dict, MappingProxyType)):
        whole, parts = [dict(value), list(value.items())], [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, deque)):
        whole, parts = [list(value)], list(value)
    elif is_dataclass(value):
        return [getattr(value, one.name, None) for one in fields(value)]
    else:
        shows: Any = type(value).__repr__
        if shows is object.__repr__:
            return []
        slots = (kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__)
        names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
        held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
        return [*held, *value.args] if isinstance(value, BaseException) else held
    return [one for one in whole if repr(one) in text] or parts


def to_json(value: Any, *, shown: bool = True) -> str:
    """Convert any object to JSON in UTF-8. Values that JSON cannot represent (NaN too) become their ``str``.

    Args:
        value: The object.
        shown: True to shorten what is large, for readers; False for what is read in order to play it again.
    """
    plain = Plain() if shown else Plain(LARGEST, _NESTED - 1)  # with what the last one holds
    return encodable(json.dumps(plain(value), ensure_ascii=False))


def from_json(text: str | bytes, *, written: bool = False) -> Any:
    """Decode JSON of at most :data:`_NESTED` levels, so that whatever reads it may call itself for each.

    Args:
        text: The JSON.
        written: True for text that a person wrote, in which a name may not occur twice in an object.

    Raises:
        ValueError: If it is no JSON, nested deeper, or has a name twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles if written else None)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
    layer, levels = [value], 0
    while layer:
        if (levels := levels + 1) > _NESTED:
            raise ValueError(f"the JSON is nested in more than {_NESTED} levels")
        layer = [
            item
            for one in layer
            if isinstance(one, (dict, list))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    return value


def json_bytes(path: Path) -> bytes:
    """Read a file of JSON.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no regular file, such as a pipe, or has more than :data:`LARGEST_JSON` bytes.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if found.st_size > LARGEST_JSON:
        raise ValueError(f"it has {found.st_size:,} bytes, expected at most {LARGEST_JSON:,}")
    return path.read_bytes()


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {double[:80]!a} occurs twice")
    return found


def plain_text(text: str) -> str:
    """Convert a text so that every encoding can represent it: surrogate pairs are joined, lone ones become U+FFFD."""
    text = str.__str__(text)  # for subclasses of str too
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def encodable(text: str) -> str:
    r"""Replace lone surrogates, which UTF-8 cannot encode, by their escape (``\ud800``)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text(value: Any, longest: int = _LONGEST_TEXT) -> str:
    try:
        return str(value)[:longest]
    except BaseException as error:
        pass_on_interrupt(error)
        return f"<{type(value).__name__}: its str raises {type(error).__name__}>"


@contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield a file to write, which takes the place of ``path`` if no error is raised.

    Args:
        path: The file.
        writer: Part of the name of the file that is written, where several processes write the same one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + writer + PARTIAL)
    partial.unlink(missing_ok=True)  # which may be a link to another file
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
