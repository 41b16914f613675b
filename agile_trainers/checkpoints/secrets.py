"""Takes secrets out of what is written: entries whose name says token, key or password, and what looks like one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|passphrase|credentials?|authorization|(api|access|private)[_\-]?key)$",
    re.IGNORECASE,
)
_TOKENIZER = re.compile(r"^(bos|eos|unk|sep|pad|cls|mask|image|video|audio|boi|eoi)_token$")
"""Special tokens of a tokenizer, which are no secrets."""
_LOOKS = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_\-]{16,}|(?<=://)[^/@\s]+(?=@)")
"""Tokens of the Hub, keys of APIs, and the user's part of an address."""


def blanked(value: Any, name: str = "", instead: str | None = "***") -> Any:
    """A copy of a value without secrets; what holds none is returned as it is.

    Args:
        value: Anything; dictionaries, lists and tuples are looked into.
        name: What the value is called.
        instead: What stands in a secret's place. None for what may be read again, where it means that there is none.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if _NAME.search(name) and not _TOKENIZER.match(name):
        return instead
    if isinstance(value, str):
        return _LOOKS.sub("***", value)
    if type(value) in (dict, list, tuple):
        entries = value.items() if isinstance(value, Mapping) else ((name, entry) for entry in value)
        found = [(key, blanked(entry, str(key), instead)) for key, entry in entries]
        return dict(found) if isinstance(value, Mapping) else type(value)(entry for _, entry in found)
    return value
