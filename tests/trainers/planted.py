"""Secrets of 60 kinds, an environment that is given them, and a search for them in the bytes of files.

The search looks for each secret as it is, as JSON, in UTF-16, in base64 at any offset, in hexadecimal, and quoted for an
address; inside Parquet, gzip, zlib and ZIP too, and spelled by token ids.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load

_HEX, _ALNUM = "0123456789abcdef" * 4, "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
_BY_FORM = {
    "hugging_face": f"hf_{_ALNUM}", "openai": f"sk-proj-{_ALNUM}", "anthropic": f"sk-ant-api03-{_ALNUM}",
    "github": f"ghp_{_ALNUM}", "github_oauth": f"gho_{_ALNUM}", "github_app": f"ghs_{_ALNUM}",
    "github_fine": f"github_pat_11ABC_{_ALNUM}", "gitlab": f"glpat-{_ALNUM[:20]}", "slack_bot": f"xoxb-1234567890-{_ALNUM}",
    "slack_user": f"xoxp-1234567890-{_ALNUM}", "slack_app": f"xapp-1-{_ALNUM}", "aws_id": "AKIAIOSFODNN7EXAMPLE",
    "aws_session": "ASIAIOSFODNN7EXAMPLE", "google": f"AIzaSy{_ALNUM[:33]}", "google_oauth": f"ya29.{_ALNUM}",
    "google_client": f"GOCSPX-{_ALNUM[:28]}", "npm": f"npm_{_ALNUM}", "pypi": f"pypi-AgEIcHlwaS5vcmc{_ALNUM}",
    "stripe": f"sk_live_{_ALNUM[:24]}", "stripe_hook": f"whsec_{_ALNUM[:32]}", "sendgrid": f"SG.{_ALNUM[:22]}.{_ALNUM}",
    "databricks": f"dapi{_HEX[:32]}", "digitalocean": f"dop_v1_{_HEX}", "shopify": f"shpat_{_HEX[:32]}",
    "twilio": f"SK{_HEX[:32]}", "groq": f"gsk_{_ALNUM}", "replicate": f"r8_{_ALNUM}", "vault": f"hvs.{_ALNUM}",
    "telegram": f"1234567890:{_ALNUM}", "age": f"AGE-SECRET-KEY-1{_ALNUM.upper()}",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ0ZXN0ZXIifQ.c2lnbmF0dXJlLW9mLWl0",
    "pem": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----",
    "basic": "Basic dGVzdGVyOnBhc3N3b3JkMTIz", "webhook": "https://hooks.slack.com/services/T0AB/B0CD/e5F6g7H8i9J0",
    "user_part": "https://tester:pa55w0rd-in-url@example.org/path", "query": "https://example.org/v1?api_key=9f8e7d6c5b4a&page=2",
}  # fmt: skip
_BY_NAME = {
    name: f"{name}-holds-x7Q{number}" for number, name in enumerate((
        "auth", "pwd", "key", "bearer", "cookie", "accessToken", "keys", "passwords", "tokens", "secrets", "cookies",
        "credentials", "passphrase", "authorization", "client_secret", "private_key", "session", "pin_code", "seed_phrase",
        "otp", "license", "dsn",
    ))
}  # fmt: skip
_PLAIN = {"words": "correct horse battery staple", "unicode": 'pässwörd "mit" Zeichen €'}
SECRETS: dict[str, str] = {**_BY_FORM, **_BY_NAME, **_PLAIN}
"""Name to value. No part of the library knows the last 24 by their form."""
assert len(SECRETS) == 60


class Keeper:
    """Is given secrets, and says what its row and its process hold."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.left, self.row = 1 + (seed or 0) % 2, options or {}
        return f"start {self.row.get('spoken', '')}", {"row": self.row}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return (
            f"again {self.row.get('spoken', '')}",
            sum(map(ord, action)) % 5 / 4,
            self.left == 0,
            False,
            {"held": self.row},
        )


def arguments() -> dict[str, Any]:
    """Every secret as an argument of its name, some inside lists and dictionaries."""
    kinds = (lambda it: it, lambda it: [it], lambda it: {"header": it}, lambda it: [{"deep": ["x", it]}])
    return {name: kinds[number % 4](value) for number, (name, value) in enumerate(SECRETS.items())}


def rows(number: int) -> list[dict[str, Any]]:
    """Rows with every secret in a column, of which two are spoken in the episode."""
    spoken = list(SECRETS.values())
    return [{**SECRETS, "spoken": f"{spoken[2 * n % 60]} and {spoken[(2 * n + 1) % 60]}"} for n in range(number)]


def _forms(secret: str) -> set[bytes]:
    raw = secret.encode()
    found = {raw, secret.encode("utf-16-le"), raw.hex().encode(), quote(secret, safe="").encode()}
    found |= {json.dumps(secret, ensure_ascii=ascii)[1:-1].encode() for ascii in (True, False)}
    found |= {json.dumps(json.dumps(secret))[3:-3].encode()}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for pad in range(3):  # wherever it begins in what was encoded
            found.add(encode(b"\0" * pad + raw)[(8 * pad + 5) // 6 : -4])
    return found


_FORMS = {name: _forms(value) for name, value in SECRETS.items()}


def _unpacked(name: str, content: bytes, tokenizer: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the content of a file, and what is packed in it, each with the name of its place."""
    yield "", content
    if content[:4] == b"PAR1":
        table = pq.read_table(io.BytesIO(content))
        for column in table.column_names:
            kind = table.schema.field(column).type
            values = table.column(column).to_pylist()
            if column in ("prompt_ids", "completion_ids") and pa.types.is_list(kind) and tokenizer is not None:
                yield column, "\n".join(tokenizer.decode(ids) for ids in values if ids).encode()
            yield column, json.dumps(values, ensure_ascii=False, default=repr).encode()
    elif content[:2] == b"\x1f\x8b":
        yield "gzip", gzip.decompress(content)
    elif content[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.namelist():
                yield member, archive.read(member)
    elif content[:8] == b"\x89PNG\r\n\x1a\n":
        at = content.find(b"IDAT")
        yield "pixels", zlib.decompressobj().decompress(content[at + 4 :])
    elif name.endswith(".safetensors") and tokenizer is not None:
        for key, tensor in load(content).items():
            if tensor.dtype.kind == "i" and tensor.ndim == 2 and tensor.min(initial=0) >= 0:
                yield key, "\n".join(tokenizer.decode(ids) for ids in tensor).encode()


def found_in(files: Iterable[tuple[str, bytes]], tokenizer: Any = None) -> set[tuple[str, str, str]]:
    """Search files for the secrets.

    Args:
        files: Pairs of name and content.
        tokenizer: Decodes token ids.

    Returns:
        Triples of file, place in it (a column, a member of an archive, or nothing) and name of a secret.
    """
    return {
        (name, place, secret)
        for name, content in files
        for place, part in _unpacked(name, content, tokenizer)
        for secret, forms in _FORMS.items()
        if any(form in part for form in forms)
    }


def files_of(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(path.relative_to(folder)), path.read_bytes()) for path in folder.rglob("*") if path.is_file()]
