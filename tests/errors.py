"""Patterns for error messages that ask for what a message must name, not for its words."""

from __future__ import annotations

import re
from collections.abc import Mapping


def naming(*words: object) -> str:
    """A pattern for ``pytest.raises(match=...)``: each of these stands in the message by itself, in any order.

    Args:
        words: Texts, other values (as ``repr`` writes them), or options by name: both name and value must be there.
    """
    texts: list[str] = []
    for word in words:
        if isinstance(word, Mapping):
            texts += [text for name, value in word.items() for text in (name, repr(value))]
        else:
            texts.append(word if isinstance(word, str) else repr(word))
    return "(?s)" + "".join(rf"(?=.*(?<![\w.]){re.escape(text)}(?!\w))" for text in texts)
