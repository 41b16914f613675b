"""Serves a page on this machine that follows runs while they go on.

Only what is made from the rollout log is served: no request names a file. A request must come with the secret part of the
address, and must ask for this server by its own name: a foreign page cannot reach it by a DNS name that it controls.
"""

from __future__ import annotations

import gzip
import secrets
import sys
from collections.abc import Callable
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agile_trainers.records.reader import RecordsError, RunRecords
from agile_trainers.viewer.html import page_around, script_tag
from agile_trainers.viewer.parts import (
    SECTION_PARTS,
    Section,
    detail,
    detail_part,
    index_of,
    read_section,
    readable_rows,
    readable_vocabulary,
    run_index,
    section_parts,
    sections,
    unreadable,
)

SECONDS = 3
"""Seconds between two questions of the page for new episodes."""


class LiveRuns:
    """The data of runs that go on, as the page asks for it.

    Args:
        find: Finds the runs; called again for each look at the disk.
        compared: Number of the last runs that the others are compared with.
    """

    def __init__(self, find: Callable[[], list[RunRecords]], compared: int = 0) -> None:
        self._find, self._compared = find, compared
        self._lock = Lock()
        self._version = ""
        self._index = b""
        self._runs: list[RunRecords] = []
        self._numbers: dict[tuple[str, str, int], int] = {}
        """Run, key and time of an episode to its number, which it keeps when others are added."""
        self._rows: dict[tuple[Path, int], list[dict[str, Any]]] = {}
        self._keys: list[dict[int, str]] = []
        self._sections: dict[str, tuple[RunRecords, Section]] = {}
        self._section_parts = lru_cache(16)(self._read_section_parts)
        self.vocabulary = lru_cache(8)(lambda folder: readable_vocabulary(RunRecords(folder, [], "")))

    def index(self, after: str = "") -> bytes | None:
        """Return the index as JSON; None if it is still that of the version ``after``."""
        with self._lock:
            runs = self._find()
            stamp = [(str(path), *_state(path)) for run in runs for path in _files(run)]
            version = f"{hash(tuple(stamp)):x}"
            if version != self._version:
                self._take(runs, version)
            return None if after == version else self._index

    def part(self, name: str) -> bytes | None:
        """Return a section's part or an episode as JSON by the name that the index gives it; None if there is none."""
        kind, _, rest = name.partition("/")
        if kind in SECTION_PARTS:
            with self._lock:
                known, version = rest in self._sections, self._version
            return self._section_parts(rest, version)[kind] if known else None
        number, _, episode = rest.partition("/")
        with self._lock:
            keys = self._keys[int(number)] if number.isdecimal() and int(number) < len(self._keys) else {}
            key = keys.get(int(episode)) if episode.isdecimal() else None
            if kind != "episodes" or key is None:
                return None
            run = self._runs[int(number)]
        try:
            record = run.episode(key)
        except (RecordsError, KeyError) as error:
            record = unreadable(str(error))
        return detail_part(self.vocabulary(run.folder), [detail(record, run.image)])

    def _read_section_parts(self, name: str, version: str) -> dict[str, bytes]:
        """Return the parts of a section, which are read together. Another version may have another run by this name."""
        with self._lock:
            found = self._sections[name]
        return section_parts(read_section(*found))

    def _index_of(self, path: Path) -> list[dict[str, Any]]:
        """Return the index of a file, which is read again only when it is another."""
        known = (path, _state(path)[0])
        if known not in self._rows:
            self._rows[known] = RunRecords(path.parent, [path], path.name).index()
        return self._rows[known]

    def _take(self, runs: list[RunRecords], version: str) -> None:
        entries, keys = [], []
        named: dict[str, tuple[RunRecords, Section]] = {}
        for number, run in enumerate(runs):
            rows, problems = readable_rows(run, self._index_of)
            found = sections(rows)
            times = {path.name: _state(path)[0] for path in run.files}
            part_of = {}
            for row in (row for section in found for row in section.rows):
                known = (str(run.folder), row["key"], times[row["key"].rpartition("#")[0]])
                part_of[row["key"]] = self._numbers.setdefault(known, len(self._numbers))
            entries.append(run_index(run, found, part_of, problems))
            keys.append({part: key for key, part in part_of.items()})
            named |= {f"{number}/{section.name}": (run, section) for section in found}
        facts = {"live": True, "seconds": SECONDS, "version": version, "compared": self._compared}
        self._index = index_of(entries, runs, **facts)
        self._runs, self._keys, self._sections, self._version = runs, keys, named, version


class Server(ThreadingHTTPServer):
    """A server of :class:`LiveRuns` on the loopback interface.

    Args:
        runs: The runs.
        port: Port; 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, runs: LiveRuns, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs = runs
        self.secret = secrets.token_urlsafe(16)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, unless the browser left before it had the answer."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.server_port}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "agile-trainers", ""

    timeout = 30.0
    """Seconds that a request may take to arrive, or an answer to leave."""

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
        except ValueError:  # http://[
            return self._answer(404, b"There is nothing here.\n", "text/plain")
        names = {f"{host}:{self.server.server_port}" for host in ("127.0.0.1", "localhost")}
        if self.headers.get("Host", "").lower() not in names:
            return self._answer(421, b"This server answers to 127.0.0.1 and localhost alone.\n", "text/plain")
        secret, _, name = asked.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(secret.encode(), self.server.secret.encode()):
            return self._answer(404, b"There is nothing here. Use the whole address that was printed.\n", "text/plain")
        if name == "":
            before, after = page_around(live=True)
            page = before + script_tag("index", b'{"live":true}') + after + b"</body></html>\n"
            return self._answer(200, page, "text/html; charset=utf-8")
        if not name.startswith("data/"):
            return self._answer(404, b"There is nothing here.\n", "text/plain")
        runs, seen = self.server.runs, parse_qs(asked.query).get("after", [""])[0]
        try:
            part = runs.index(seen) or b"" if name == "data/index" else runs.part(name.removeprefix("data/"))
        except (ValueError, OSError, KeyError) as error:  # a file that the run has just replaced or deleted
            return self._answer(503, f"{error}\n".encode("utf-8", "replace"), "text/plain; charset=utf-8")
        if part is None:
            return self._answer(404, b"There is no such part.\n", "text/plain")
        self._answer(200 if part else 204, part, "application/json")  # 204: the index has not changed

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        packed = "gzip" in self.headers.get("Accept-Encoding", "") and len(content) > 1000
        content = gzip.compress(content, 1, mtime=0) if packed else content
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **({"Content-Encoding": "gzip"} if packed else {}),
        }
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _state(path: Path) -> tuple[int, int]:
    """Return a file's time and size; zeros for one that was deleted meanwhile, or a link to nothing."""
    try:
        state = path.stat()
    except OSError:
        return 0, 0
    return state.st_mtime_ns, state.st_size


def _files(run: RunRecords) -> list[Any]:
    others = [run.folder / name for name in ("metrics.jsonl", "findings.jsonl", "run.json")]
    return [*run.files, *(path for path in others if path.is_file())]
