"""Removes secrets from output: entries whose name says token, key or password, and strings that look like one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|passphrase|credentials?|authorization|(api|access|private)[_\-]?key)$",
    re.IGNORECASE,
)
_TOKENIZER = re.compile(r"^(bos|eos|unk|sep|pad|cls|mask|image|video|audio|boi|eoi)_token$")
"""Names of a tokenizer's special tokens, which are not secrets."""
_LOOKS = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_\-]{16,}|(?<=://)[^/@\s]+(?=@)")
"""Patterns of Hub tokens, API keys, and the user part of an address."""


def blanked(value: Any, name: str = "", instead: str | None = "***") -> Any:
    """Copy a value without secrets; a value without any is returned unchanged.

    Args:
        value: Any value; dictionaries, lists and tuples are searched.
        name: The value's name.
        instead: Replacement of a secret. None for output that is read again, where None means that there is none.
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
