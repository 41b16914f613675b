"""Reads the records of runs: their metrics, an index of their episodes, and single episodes on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agile_trainers.records.schema import EPISODE, LIGHT, TRAINED
from agile_trainers.records.writer import FINDINGS, METRICS, ROLLOUTS, RUN, VOCABULARY_FILE
from agile_trainers.types import NO_TURN, StopReason

_JSON = ("prompt", "reset_info", "row")
"""Columns that :meth:`RunRecords.episode` decodes, besides those of turns."""


class RecordsError(ValueError):
    """There are no episode records there, or a file of them cannot be read."""


@dataclass
class RunRecords:
    """The records of one run or evaluation, read when asked for."""

    folder: Path
    files: list[Path]
    """Files of episodes, Parquet or JSON lines, in the order of their names. Made anew by :meth:`refresh`."""
    name: str
    info: dict[str, Any] = field(default_factory=dict)
    """Content of ``run.json``; empty for JSON lines of earlier releases."""

    def refresh(self) -> None:
        """Look for new files, of a run that is going on. A run of a single file stays as it is."""
        if len(self.files) != 1 or self.files[0].name != self.name:
            self.files = _episode_files(self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        """Read the logs of the run: ``step`` and metrics by name, in order. A line of a killed run is left out."""
        path = self.folder / METRICS
        return [] if not path.is_file() else list(_whole_lines(path))

    def findings(self) -> list[dict[str, Any]]:
        """Read what the run's diagnosis reported: ``name``, ``step``, ``evidence`` and ``advice``, in order."""
        path = self.folder / FINDINGS
        return [] if not path.is_file() else list(_whole_lines(path))

    def vocabulary(self) -> dict[int, tuple[bytes, bool]]:
        """Read the bytes of each token id, and whether the token is special; empty for records without a vocabulary."""
        path = self.folder / VOCABULARY_FILE
        if not path.is_file():
            return {}
        columns = _read(path, None).to_pydict()
        return dict(zip(columns["id"], zip(columns["piece"], columns["special"])))

    def index(self) -> list[dict[str, Any]]:
        """List every episode without its texts and tokens: ``key`` and the columns of ``records.schema.LIGHT``."""
        rows = []
        for path in self.files:
            found = _old_episodes(path) if path.suffix == ".jsonl" else _read(path, list(LIGHT)).to_pylist()
            rows += [{"key": f"{path.name}#{n}", **{name: row[name] for name in LIGHT}} for n, row in enumerate(found)]
        return rows

    def episode(self, key: str) -> dict[str, Any]:
        """Read all columns of one episode, with JSON decoded. Only the part of the file that holds it is read.

        Args:
            key: Of :meth:`index`.

        Raises:
            KeyError: If there is no such episode.
        """
        name, _, row = key.rpartition("#")
        path = next((path for path in self.files if path.name == name), None)
        if path is None or not row.isdecimal():
            raise KeyError(f"{self.folder} has no episode {key!r}.")
        for number, episode in enumerate(_episodes(path, int(row))):
            if number == 0:
                return episode
        raise KeyError(f"{path} has no episode {row}.")

    def episodes(self) -> Iterator[dict[str, Any]]:
        """Read all columns of every episode, with JSON decoded, one part of a file after another."""
        for path in self.files:
            yield from _episodes(path)


def open_records(path: Path | str) -> list[RunRecords]:
    """Find the records of runs.

    Args:
        path: An ``output_dir``, its ``rollouts/`` folder, the folder of a run, or one file of episodes. JSON lines of
            earlier releases are read too. Folders inside (the stages of a chain, the demo's ``rl/``) are searched.

    Returns:
        The runs by folder and name; old JSON lines of a folder are one run.

    Raises:
        RecordsError: If there are no records.
    """
    path = Path(path)
    if path.is_file() and path.suffix in (".parquet", ".jsonl"):
        return [RunRecords(path.parent, [path], path.name, _info(path.parent))]
    folders = {path, *path.glob("*")} if path.name == ROLLOUTS else {path}
    for rollouts in path.rglob(ROLLOUTS):
        folders |= {rollouts, *rollouts.glob("*")}
    runs = []
    for folder in sorted(folders):
        files = _episode_files(folder) if folder.is_dir() else []
        if files or (folder / RUN).is_file():
            named = folder.name if folder.name != ROLLOUTS else folder.parent.name
            runs.append(RunRecords(folder, files, named, _info(folder)))
    if not runs:
        raise RecordsError(
            f"{path} holds no episode records. Expected an output_dir, its {ROLLOUTS}/ folder, the folder of a run in it, "
            "or a file of episodes (.parquet, .jsonl). A run writes them unless log_rollouts=0."
        )
    return runs


def read_records(path: Path | str) -> list[dict[str, Any]]:
    """Read all columns of every episode of a file, a run or all runs in a folder, with JSON decoded.

    Args:
        path: See :func:`open_records`.

    Raises:
        RecordsError: If there are no records.
    """
    return [episode for run in open_records(path) for episode in run.episodes()]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a Parquet file as the rows that :func:`agile_trainers.records.writer.write_episodes` takes.

    Raises:
        RecordsError: If the file cannot be read.
    """
    return _read(path, None).to_pylist()


def _episode_files(folder: Path) -> list[Path]:
    new = [path for kind in ("train", "eval") for path in folder.glob(f"{kind}-*-rank*.parquet")]
    return sorted([*new, *(path for path in folder.glob("*rank*.jsonl"))])


def _info(folder: Path) -> dict[str, Any]:
    path = folder / RUN
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _read(path: Path, columns: list[str] | None) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise RecordsError(f"{path} cannot be read: {error}. Delete the file to open the others.") from error


def _episodes(path: Path, row: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a file, or that of one row."""
    if path.suffix == ".jsonl":
        yield from _old_episodes(path)[slice(None) if row is None else slice(row, row + 1)]
        return
    try:
        with pq.ParquetFile(path) as file:
            first = 0
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row is None or first <= row < first + size:
                    table = file.read_row_group(group)
                    chosen = table if row is None else table.slice(row - first, 1)
                    yield from map(_decoded, chosen.to_pylist())
                first += size
    except (pa.ArrowException, OSError) as error:
        raise RecordsError(f"{path} cannot be read: {error}. Delete the file to open the others.") from error


def _decoded(episode: dict[str, Any]) -> dict[str, Any]:
    for name in _JSON:
        episode[name] = None if episode[name] is None else json.loads(episode[name])
    for turn in episode["turns"]:
        turn["info"] = json.loads(turn["info"])
        if turn.pop("observation_is_json"):
            turn["observation"] = json.loads(turn["observation"])
    return episode


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n"):
        try:
            yield json.loads(line)
        except ValueError:
            continue


# --------------------------------------------------------------------------------------------- JSON lines, format 1


def _old_episodes(path: Path) -> list[dict[str, Any]]:
    stamp = path.stat()
    return _old_file(path, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=8)
def _old_file(path: Path, _modified: int, _size: int) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [_converted(json.loads(line), index) for index, line in enumerate(file)]


def _converted(old: dict[str, Any], index: int) -> dict[str, Any]:
    """Convert an episode of JSON lines to the columns of today; what it does not say is None."""
    turn_ids, to_go = old["turn_ids"], 0.0
    turns = [dict.fromkeys(("value", "advantage")) | turn for turn in old["turns"]]
    for k, turn in reversed(list(enumerate(turns))):
        places = [place for place, turn_id in enumerate(turn_ids) if turn_id == k]
        to_go += turn["reward"]
        turn |= {"start": min(places, default=0), "end": max(places, default=-1) + 1, "return": to_go}
    sampled = [None if turn_ids[n] == NO_TURN else value for n, value in enumerate(old["sampling_logprobs"])]
    trained = bool(turns) and "advantage" in old["turns"][0]
    return dict.fromkeys(EPISODE.names) | {
        **{name: old[name] for name in old if name in EPISODE.names},
        "step": old.get("step", 0),
        "phase": "train" if trained or old.get("group") is not None else "eval",
        "index": index,
        "truncated": StopReason(old["stop_reason"]).truncated,
        "num_turns": len(turns),
        "num_tokens": len(turn_ids),
        "turns": turns,
        "sampling_logprobs": sampled,
        **dict.fromkeys(TRAINED),
    }
