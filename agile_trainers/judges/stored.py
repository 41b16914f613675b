"""Keeps the answers of judges on disk by what was asked, so that nothing is asked twice."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

_WAIT = 60.0
"""Seconds for which another process may hold the file."""


class StoredAnswers:
    """Answers by the digest of what was asked. A file that fails costs further calls, and never ends a run.

    Args:
        path: File of SQLite, which several processes may use; None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._told = path, False
        self._database: sqlite3.Connection | None = None

    def get(self, key: str) -> str | None:
        """Return the answer that is stored; None if there is none."""
        found = self._run("SELECT answer FROM answers WHERE key = ?", key)
        return json.loads(found[0][0]) if found else None

    def put(self, key: str, answer: str) -> str:
        """Store an answer, unless there is one, and return what is stored."""
        self._run("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, json.dumps(answer))
        stored = self.get(key)
        return answer if stored is None else stored

    def _run(self, statement: str, *values: str) -> list[Any]:
        try:
            if self._database is None:
                if self.path is not None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                self._database = sqlite3.connect(self.path or ":memory:", timeout=_WAIT)
                # Nothing waits for the disk: a killed process loses nothing, a machine without power the latest answers.
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA synchronous = NORMAL")
                self._database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT)")
            with self._database:
                return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            if not self._told:
                logger.warning(f"The answers of judges in {self.path} cannot be used: {error}. Each is asked for anew.")
            self._told = True
            return []

    def close(self) -> None:
        """Close the file, in the thread that used it."""
        if self._database is not None:
            self._database.close()
            self._database = None
