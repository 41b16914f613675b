"""Reads the rollout logs of runs: their metrics, an index of their episodes, and single episodes on demand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agile_trainers.records.plain import LARGEST_JSON, from_json
from agile_trainers.records.schema import EPISODE, LIGHT, VOCABULARY, path_lengths
from agile_trainers.records.writer import (
    FINDINGS,
    IMAGES,
    METRICS,
    ROLLOUTS,
    RUN,
    VOCABULARY_FILE,
    digest_problem,
    has_digest,
)
from agile_trainers.types import Image, StopReason

LARGEST_IMAGE = 2**26
"""Bytes of the file of an image that is read."""
_MOST_ROWS = 1_000_000
"""Episodes of a file; a few bytes of Parquet can stand for billions of equal rows."""
_MOST_COLUMNS = 1000
_MOST_VALUES = 100_000_000
"""Values of a column of a file."""
_MOST_BYTES = 2**31
"""Bytes of a file's values in memory: one long text can stand in a million rows of a small file."""
_BATCH_BYTES = 2**28
_LARGEST_STEP = 2**53
_JSON = ("prompt", "reset_info", "row")
"""Columns that :meth:`RunRecords.episode` decodes, besides those of turns."""


class RecordsError(ValueError):
    """There is no rollout log there, or a file of it cannot be read."""


@dataclass
class RunRecords:
    """The rollout log of one run or evaluation, read when asked for."""

    folder: Path
    files: list[Path]
    """Parquet files of episodes, in the order of their names."""
    name: str
    info: dict[str, Any] = field(default_factory=dict)
    """Content of ``run.json``; empty if there is none, or it cannot be read."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each file that could not be read when the run was opened."""
    member: dict[str, Any] | None = None
    """The run's place in a population; set by the viewer."""

    def metrics(self) -> list[dict[str, Any]]:
        """Read the logs of the run: ``step`` and metrics by name, in order. A line of a killed run is left out."""
        return _whole_lines(self.folder / METRICS)[0]

    def findings(self) -> list[dict[str, Any]]:
        """Read what the run's diagnosis reported: ``name``, ``step``, ``evidence`` and ``advice``, in order."""
        return _whole_lines(self.folder / FINDINGS)[0]

    def unread_lines(self) -> list[str]:
        """Say of each log how many of its lines are no JSON object and are left out."""
        logs = [(path, _whole_lines(path)[1]) for path in (self.folder / METRICS, self.folder / FINDINGS)]
        return [f"{path}: {count} of its lines are no JSON objects and are left out." for path, count in logs if count]

    def vocabulary(self) -> dict[int, tuple[bytes, bool]]:
        """Read the bytes of each token id, and whether the token is special; empty for records without a vocabulary."""
        path = self.folder / VOCABULARY_FILE
        if not path.is_file():
            return {}
        columns = _read(path, None, VOCABULARY).to_pydict()
        rows = zip(columns["id"], columns["piece"], columns["special"])
        return {token: (piece, bool(special)) for token, piece, special in rows if None not in (token, piece)}

    def image(self, digest: str) -> bytes | None:
        """Read an image of the records; None if it is not there, or is another file.

        Args:
            digest: 32 hexadecimal digits.
        """
        path = self.folder / IMAGES / digest
        if not re.fullmatch("[0-9a-f]{32}", digest) or not path.is_file() or path.stat().st_size > LARGEST_IMAGE:
            return None
        data = path.read_bytes()
        return data if Image(data).digest == digest else None

    def index(self) -> list[dict[str, Any]]:
        """List every episode without its texts and tokens: ``key`` and the columns of ``records.schema.LIGHT``.

        Raises:
            RecordsError: If a file cannot be read, or its bytes are not those that were written. Of a file without a digest,
                all columns are read.
        """
        return [row for path in self.files for row in _light(path)]

    def episode(self, key: str) -> dict[str, Any]:
        """Read all columns of one episode, with JSON decoded. Only the part of the file that holds it is read.

        Args:
            key: Of :meth:`index`.

        Raises:
            KeyError: If there is no such episode.
            RecordsError: If the file cannot be read.
        """
        name, _, row = key.rpartition("#")
        path = next((path for path in self.files if path.name == name), None)
        if path is None or not row.isdecimal():
            raise KeyError(f"{self.folder} has no episode {key!r}.")
        if (episode := next(_episodes(path, int(row)), None)) is None:
            raise KeyError(f"{path} has no episode {row}.")
        return episode

    def episodes(self) -> Iterator[dict[str, Any]]:
        """Read all columns of every episode, with JSON decoded, one part of a file after another.

        Raises:
            RecordsError: If a file cannot be read.
        """
        for path in self.files:
            yield from _episodes(path)


def open_records(path: Path | str) -> list[RunRecords]:
    """Find the rollout logs of runs.

    Args:
        path: An ``output_dir``, its ``rollouts/`` folder, the folder of a run, or one file of episodes.
            Folders inside (the stages of a chain, the demo's ``rl/``) are searched.

    Returns:
        The runs by folder and name.

    Raises:
        RecordsError: If there are no records.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".parquet":
        return [RunRecords(path.parent, [path], path.name, *_info(path.parent))]
    folders = {path, *path.glob("*")} if path.name == ROLLOUTS else {path}
    for rollouts in path.rglob(ROLLOUTS):
        folders |= {rollouts, *rollouts.glob("*")}
    runs = []
    for folder in sorted(folders):
        files = _episode_files(folder) if folder.is_dir() else []
        if files or (folder / RUN).is_file():
            named = folder.name if folder.name != ROLLOUTS else folder.parent.name
            runs.append(RunRecords(folder, files, named, *_info(folder)))
    if not runs:
        raise RecordsError(
            f"{path} holds no rollout log. Expected an output_dir, its {ROLLOUTS}/ folder, the folder of a run in it, "
            "or a file of episodes (.parquet). A run writes one unless log_rollouts=0."
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
    return sorted(path for kind in ("train", "eval") for path in folder.glob(f"{kind}-*-rank*.parquet"))


def _info(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Read ``run.json``; return its content, and what is wrong with it."""
    path = folder / RUN
    if not path.is_file():
        return {}, []
    try:
        info = from_json(_content(path))
    except (ValueError, OSError) as error:
        return {}, [f"{path} cannot be read: {str(error)[:200]}."]
    if not isinstance(info, dict):
        return {}, [f"{path} holds a {type(info).__name__}, expected an object."]
    return info, []


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file of an error."""
    try:
        yield
    except RecordsError:
        raise
    except (pa.ArrowException, OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise RecordsError(
            f"{path} cannot be read: {type(error).__name__}: {str(error)[:500]}. `agile-trainers view` leaves it out; "
            "delete it to read the others."
        ) from error


@contextmanager
def _opened(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file that is whole and has the columns of a schema."""
    with _naming(path):
        if not path.is_file():
            raise ValueError("it is no regular file")
        if (problem := digest_problem(path)) is not None:
            raise ValueError(problem)
        with pq.ParquetFile(path) as file:
            if file.metadata.num_columns > _MOST_COLUMNS:
                raise ValueError(f"it has {file.metadata.num_columns:,} columns, expected at most {_MOST_COLUMNS:,}")
            found = file.schema_arrow
            for column in schema:
                place = found.get_field_index(column.name)
                if place < 0:
                    raise ValueError(f"it has no column {column.name!r}")
                if found.field(place).type != column.type:
                    raise ValueError(f"its column {column.name!r} is {found.field(place).type}, expected {column.type}")
            if file.metadata.num_rows > _MOST_ROWS:
                raise ValueError(
                    f"it says that it has {file.metadata.num_rows:,} rows, expected at most {_MOST_ROWS:,}"
                )
            yield file


def _read(path: Path, columns: list[str] | None, schema: pa.Schema = EPISODE) -> pa.Table:
    with _opened(path, schema) as file:
        return _table(file, columns, range(file.num_row_groups))


def _table(file: pq.ParquetFile, columns: list[str] | None, groups: Sequence[int]) -> pa.Table:
    """Read row groups, a few rows at a time, and stop where their values take more memory than a file of episodes does."""
    chunks = [file.metadata.row_group(group).column(n) for group in groups for n in range(file.metadata.num_columns)]
    if (values := max((chunk.num_values for chunk in chunks), default=0)) > _MOST_VALUES:
        raise ValueError(f"a column of it has {values:,} values, expected at most {_MOST_VALUES:,}")
    # Every row may repeat the longest text.
    longest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
    rows = min(1024, max(1, _BATCH_BYTES // max(1, longest)))
    found, size = list[pa.RecordBatch](), 0
    for batch in file.iter_batches(rows, row_groups=list(groups), columns=columns):
        if (size := size + batch.nbytes) > _MOST_BYTES:
            raise ValueError(f"its values take more than {_MOST_BYTES:,} bytes of memory")
        found.append(batch)
    schema = file.schema_arrow if columns is None else pa.schema([file.schema_arrow.field(name) for name in columns])
    return pa.Table.from_batches(found, schema=None if found else schema)


def _light(path: Path) -> list[dict[str, Any]]:
    """Return the index of a file."""
    with _naming(path):
        found = _read(path, list(LIGHT) if has_digest(path) else None).to_pylist()
        return [{"key": f"{path.name}#{n}", **_checked(row, n)} for n, row in enumerate(found)]


def _checked(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the columns of the index, in which everything that leads to an episode has its type and range."""
    if not 0 <= row["step"] < _LARGEST_STEP:
        raise ValueError(f"episode {number} has the step {row['step']}, expected 0 or more")
    if row["phase"] not in ("train", "eval"):
        raise ValueError(f"episode {number} has the phase {row['phase']!r:.100}, expected 'train' or 'eval'")
    StopReason(row["stop_reason"])
    return {name: row[name] for name in LIGHT}


def _episodes(path: Path, row: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a file, or that of one row."""
    with _opened(path, EPISODE) as file:
        first = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if row is None or first <= row < first + size:
                table = _table(file, None, [group])
                chosen = table if row is None else table.slice(row - first, 1)
                yield from map(_decoded, chosen.to_pylist())
            first += size


def _decoded(episode: dict[str, Any]) -> dict[str, Any]:
    for name in _JSON:
        episode[name] = _cell(episode[name])
    for name in ("prompt_ids", "completion_ids", "turn_ids"):
        episode[name] = [-1 if token is None else token for token in episode[name] or ()]
    episode["turns"] = [turn for turn in episode["turns"] or () if turn is not None]
    _check_paths(episode)
    for turn in episode["turns"]:
        turn["info"], turn["messages"] = _cell(turn["info"]), _cell(turn["messages"])
        if turn.pop("observation_is_json"):
            turn["observation"] = _cell(turn["observation"])
    return episode


def _check_paths(episode: dict[str, Any]) -> None:
    """Check what leads from a turn to its parent, and to its prompt in the paths of the episode, if it has any."""
    lengths = None if episode["paths"] is None else path_lengths(episode["paths"])
    for k, turn in enumerate(episode["turns"]):
        parent, path, place = turn["parent"], turn["path"], turn["place"]
        if parent is not None and not 0 <= parent < k:
            raise ValueError(f"turn {k} of an episode goes on from turn {parent}, expected an earlier one")
        if lengths is not None:
            span = turn["end"] - turn["start"]
            if not 0 <= path < len(lengths) or span < 1 or not 0 <= place <= lengths[path] - span:
                raise ValueError(f"turn {k} of an episode is at token {place} of path {path}, where it cannot be")


def _cell(text: str | None) -> Any:
    """Decode JSON; what is none stays the text that it is."""
    try:
        return None if text is None else from_json(text)
    except ValueError:
        return text


def _content(path: Path) -> bytes:
    """Read a file of JSON. Of one larger than any that a run writes, return ``b"?"`` instead, which is no JSON."""
    return path.read_bytes() if path.stat().st_size <= LARGEST_JSON else b"?"


def _whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of a file of lines, and the number of other lines, such as half a line of a killed run."""
    found, others = [], 0
    for line in _content(path).split(b"\n") if path.is_file() else ():
        try:
            entry = from_json(line) if line.strip() else None
        except ValueError:
            entry = False
        if isinstance(entry, dict):
            found.append(entry)
        elif line.strip():
            others += 1
    return found, others
