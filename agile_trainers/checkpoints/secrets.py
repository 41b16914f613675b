"""Masks what looks like a secret in text: keys and tokens of known forms, private keys, and values named as a password."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

MASK = "***"
_SHORTEST = 8
"""Characters of the shortest value that its name makes a secret: shorter ones are mostly numbers and words of games."""
_SHORT = 200
"""Characters of the longest text whose masked form is remembered."""
_NAMES = (
    r"(?:api|access|private|account)[_\-]?key|token|secret|passw(?:or)?d|passphrase|pwd|auth|authorization|bearer|cookie"
    r"|credential"
)
_FORMS = (
    # Each is tried at every place of a text: none may read far ahead from many places, or long texts take hours.
    # Keys with the prefixes that services give them.
    r"\bhf_[A-Za-z0-9]{16,}", r"\b[srp]k[-_][\w\-]{16,}", r"\bgh[pousr]_[A-Za-z0-9]{16,}", r"\bgithub_pat_\w{16,}",
    r"\bgl[a-z]{2,4}-[\w\-]{16,}", r"\bxox[a-z]-[\w\-]{8,}", r"\bxapp-[\w\-]{8,}", r"\bA(?:KI|SI|BI|CC)A[A-Z0-9]{12,}",
    r"\bAIza[\w\-]{20,}", r"\bya29\.[\w\-.]{16,}", r"\bGOCSPX-[\w\-]{16,}", r"\bnpm_[A-Za-z0-9]{16,}", r"\bpypi-[\w\-]{16,}",
    r"\bdo[opr]_v1_[a-f0-9]{16,}", r"\bSG\.[\w\-]{8,}\.[\w\-]{8,}", r"\bwhsec_[\w+/=]{16,}", r"\bdapi[a-f0-9]{16,}",
    r"\b(?:gsk|r8|shp[a-z]{2}|lin_api|secret|fig[dm]|ntn|sq0[a-z]{3}|nvapi|pcsk|tgp_v1|key)[-_][\w\-]{16,}",
    r"\bSK[a-f0-9]{32}\b", r"\bAGE-SECRET-KEY-1[A-Z0-9]{16,}", r"\bhvs\.[\w\-]{16,}", r"\b\d{8,10}:[\w\-]{30,}",
    r"(?<=hooks\.slack\.com/services/)[\w/]{8,}", r"(?<=/api/webhooks/)[\w/\-]{8,}",
    # JSON Web Tokens, private keys, the user part of an address, headers.
    r"(?<![\w\-])eyJ[\w\-]{6,}\.[\w\-]{6,}(?:\.[\w\-]*)?", r"(?<=://)[^/@\s\"']+(?=@)",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"(?P<header>\b(?i:bearer|basic)\s+)[\w+/=.~\-]{12,}",
    # Parameters of an address, and values of at least eight characters as JSON, YAML and shells write them, by their name.
    r"(?P<parameter>[?&;][\w\-]*(?i:key|token|secret|passw(?:or)?d|pwd|auth|sig|signature|credential)s?=)[^\s&\"'<>]+",
    r"(?P<name>(?i:" + _NAMES + r")s?\\?[\"']?\s{0,99}[:=]\s{0,99})"
    r"(?:(?P<quote>\\?[\"'])[^\s\"'\\]{8,}|(?=[^\s,;&]{0,99}\d)(?=[^\s,;&]{0,99}[A-Za-z])[^\s\"'\\,;&{}\[\]()<>]{8,})",
)  # fmt: skip
_SECRET = re.compile("|".join(_FORMS), re.DOTALL)
_NAMED = re.compile(rf"(?![a-z]{{3,5}}_token$)[\w\-.]*(?:{_NAMES})s?", re.IGNORECASE)
"""Names of secrets; those of a tokenizer's special tokens (``eos_token``) are none."""


def mask(text: str) -> tuple[str, int]:
    """Replace what looks like a secret in a text by ``***``. Names of values stay.

    Args:
        text: Any text, also JSON or an address.

    Returns:
        The text, and the number of secrets that were replaced.
    """
    # Episodes repeat short texts: a game's words, the names of `info`.
    return _mask_again(text) if len(text) <= _SHORT else _mask(text)


def _mask(text: str) -> tuple[str, int]:
    def replaced(found: re.Match[str]) -> str:
        return "".join(found[group] or "" for group in ("header", "parameter", "name", "quote")) + MASK

    return _SECRET.subn(replaced, text)


_mask_again = lru_cache(maxsize=4096)(_mask)


class Masker:
    """Copies values with what looks like a secret masked, and counts what it masked."""

    def __init__(self) -> None:
        self.count = 0
        """Secrets so far."""

    def __call__(self, value: Any, name: str = "") -> Any:
        """Copy a value with every text in it masked, also in dictionaries (their names too), lists and tuples.

        Args:
            value: Any value.
            name: Its name; a text without spaces under the name of a secret is masked whatever it looks like.
        """
        if isinstance(value, str):
            if _NAMED.fullmatch(name) and len(value) >= _SHORTEST and not re.search(r"\s", value):
                self.count += 1
                return MASK
            text, count = mask(value)
            self.count += count
            return text
        if isinstance(value, dict):
            return {self(key): self(one, str(key)) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self(one, name) for one in value)
        return value


def masked(value: Any) -> Any:
    """Copy a value with what looks like a secret masked, see :class:`Masker`."""
    return Masker()(value)
