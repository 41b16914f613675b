"""Writes runs to one HTML file that opens offline: style, script and compressed data are in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from agile_trainers.records.plain import replacing
from agile_trainers.records.reader import RunRecords
from agile_trainers.viewer.parts import (
    SECTION_PARTS,
    Section,
    detail,
    detail_part,
    index_of,
    most_telling_first,
    read_section,
    readable_rows,
    readable_vocabulary,
    run_index,
    section_parts,
    sections,
)

SCRIPTS = (
    "text.js", "data.js", "marks.js", "charts.js", "timeline.js", "paths.js", "episode.js", "pages.js", "episodes.js",
    "main.js",
)  # fmt: skip
"""The script, in the order in which its files are joined."""
PART_BYTES = 300_000
"""JSON bytes after which a part is closed; one that holds a single long episode is larger."""


@dataclass(frozen=True)
class Written:
    """The result of :func:`write_page`."""

    path: Path
    episodes: int
    """Episodes in the file."""
    left_out: int
    """Episodes whose texts and tokens did not fit; the timeline and the tables count them too."""
    size: int
    """Bytes of the file."""
    problems: tuple[str, ...] = ()
    """A sentence for each file that could not be read; the page has them too."""


def write_page(runs: Sequence[RunRecords], path: Path, *, megabytes: float = 100, compared: int = 0) -> Written:
    """Write the rollout logs of runs to one HTML file.

    Args:
        runs: The runs.
        path: The file, which is replaced when the new one is complete.
        megabytes: Size from which no further episodes are added. Of longer runs, the first, the last and evenly spaced steps
            have their episodes in the file.
        compared: Number of the last runs that the others are compared with.

    Raises:
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as parts:
        entries, episodes, left_out, problems = list[dict[str, Any]](), 0, 0, list[str]()
        for number, run in enumerate(runs):
            budget = megabytes * 1e6 * (number + 1) / len(runs)
            rows, unread = readable_rows(run)
            found = sections(rows)
            part_of = _write_parts(parts, number, run, found, budget)
            entries.append(run_index(run, found, part_of, unread))
            problems += unread
            episodes += len(part_of)
            left_out += sum(len(section.rows) for section in found) - len(part_of)
        parts.seek(0)
        index = index_of(entries, runs, live=False, compared=compared)
        with replacing(path) as partial, partial.open("wb") as file:
            before, after = page_around(live=False)
            file.write(before + script_tag("index", index) + after)
            shutil.copyfileobj(parts, file)
            file.write(b"</body></html>\n")
    return Written(path, episodes, left_out, path.stat().st_size, tuple(problems))


def page_around(*, live: bool) -> tuple[bytes, bytes]:
    """Return the page before and after its index. Its policy allows its own style and script and, live, its own server."""
    folder = files("agile_trainers.viewer") / "page"
    style = (folder / "style.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_digest(style)}",
            f"script-src {_digest(script)}",
            f"connect-src {'self'!r}" if live else "connect-src 'none'",
            "img-src data:",  # of episodes that have images
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",  # the browser refuses to read any text as HTML
        ]
    )
    page = (folder / "page.html").read_text(encoding="utf-8").replace("{{policy}}", policy)
    before, after = page.replace("{{style}}", style).split("{{index}}")
    return before.encode(), after.replace("{{script}}", script).encode()


def script_tag(name: str, content: bytes) -> bytes:
    """Return an element with compressed data, which the browser does not read until the script asks for it.

    Args:
        name: The part's name, any text. This is the only place where text becomes markup.
        content: Any bytes; as Base64 they cannot end the element.
    """
    packed = base64.b64encode(gzip.compress(content, 6, mtime=0))
    escaped = escape(name, quote=True).encode("ascii", "xmlcharrefreplace")
    return b'<script type="application/octet-stream" id="%s">%s</script>\n' % (escaped, packed)


def _write_parts(
    file: IO[bytes], number: int, run: RunRecords, found: Sequence[Section], budget: float
) -> dict[str, int]:
    """Write sections and episodes until the file has the given size; return the part of each episode by its key."""
    vocabulary = readable_vocabulary(run)
    part_of: dict[str, int] = {}
    parts = 0
    for place in most_telling_first(len(found)):
        if file.tell() > budget and part_of:
            break
        section = found[place]
        made: dict[str, list[bytes]] = {kind: [] for kind in SECTION_PARTS}
        for batch in _batches(run, section):
            file.write(
                script_tag(f"episodes/{number}/{parts}", detail_part(vocabulary, [shown for _, _, shown in batch]))
            )
            part_of |= dict.fromkeys((key for key, _, _ in batch), parts)
            for kind, content in section_parts(record for _, record, _ in batch).items():
                made[kind].append(content[1:-1])
            parts += 1
        for kind, contents in made.items():
            file.write(script_tag(f"{kind}/{number}/{section.name}", b"[" + b",".join(contents) + b"]"))
    return part_of


def _batches(run: RunRecords, section: Section) -> Iterator[list[tuple[str, dict[str, Any], dict[str, Any]]]]:
    """Yield a section's episodes in batches of about ``PART_BYTES``: key, record, and what the page shows of it."""
    batch: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    size = 0
    for row, record in zip(section.rows, read_section(run, section), strict=True):
        shown = detail(record, run.image)
        # Tokens dominate, at about 30 characters of JSON; an exact count would encode everything twice.
        grown = (
            30 * len(shown["ids"])
            + 8 * sum(len(path["ids"]) for path in shown.get("paths") or ())
            + sum(len(str(turn["observation"])) for turn in shown["turns"])
            + len(str(shown["prompt"]))
            + sum(map(len, shown.get("images", {}).values()))
        )
        if batch and size + grown > PART_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((row["key"], record, shown))
        size += grown
    if batch:
        yield batch


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
