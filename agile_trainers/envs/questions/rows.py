"""Loads or generates rows of question and answer, and splits them so that no question is in two splits."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from agile_trainers.imports import nearest

Row = dict[str, Any]
Generate = Callable[[random.Random], Row]
"""Function that makes one row from random numbers alone."""

TRAIN, TEST = "train", "test"
FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
"""File extension to the ``datasets`` builder that reads it."""
_ATTEMPTS = 1000


class Rows(Protocol):
    """Source of a reasoning environment's rows, shared by all its instances and read-only."""

    splits: tuple[str, ...]
    columns: tuple[str, ...]

    def count(self, split: str) -> int | None:
        """Return the number of rows of a split, None if it is infinite."""

    def row(self, split: str, index: int) -> Row:
        """Return one row, always the same for the same split and index."""


def split_of(question: str, test_fraction: float) -> str:
    """Return the split of a question. It depends on the text alone, so a repeated question is never in both splits."""
    digest = hashlib.blake2b(_words(question).encode(errors="replace"), digest_size=8).digest()
    return TEST if int.from_bytes(digest, "big") < test_fraction * 2**64 else TRAIN


class TableRows:
    """Rows of one or more tables.

    One table is split into ``train`` and ``test`` by :func:`split_of`. Several tables are splits with their names;
    questions of ``train`` that also occur in another split are removed from ``train``.

    Args:
        tables: Tables by name. An item of a table is a row.
        question: Name of the question column.
        test_fraction: Share of the questions of a single table in ``test``, in (0, 1).

    Raises:
        ValueError: If there is no row or no such column.
    """

    def __init__(self, tables: Mapping[str, Sequence[Row]], question: str = "question", test_fraction: float = 0.1):
        first = next((table[0] for table in tables.values() if len(table)), None)
        if first is None:
            raise ValueError(
                f"The data set is empty: {', '.join(tables) or 'it has no split at all, which'} holds no row."
            )
        self.columns = tuple(first)
        check_column(question, self.columns, "question")
        questions = {name: [_words(str(text)) for text in _column(table, question)] for name, table in tables.items()}
        if len(tables) == 1:
            ((only, table),) = tables.items()
            self._tables: dict[str, Sequence[Row]] = {TRAIN: table, TEST: table}
            self._indices: dict[str, Sequence[int]] = {TRAIN: [], TEST: []}
            for index, text in enumerate(questions[only]):
                self._indices[split_of(text, test_fraction)].append(index)  # type: ignore[attr-defined]
        else:
            self._tables = dict(tables)
            self._indices = {name: range(len(table)) for name, table in tables.items()}
            if TRAIN in tables:
                elsewhere = {text for name, texts in questions.items() if name != TRAIN for text in texts}
                self._indices[TRAIN] = [i for i, text in enumerate(questions[TRAIN]) if text not in elsewhere]
        self.splits = tuple(self._tables)

    def count(self, split: str) -> int:
        """Number of rows of a split."""
        return len(self._indices[split])

    def row(self, split: str, index: int) -> Row:
        """One row of a split."""
        return dict(self._tables[split][self._indices[split][index]])


class GeneratedRows:
    """Any number of rows, generated on demand and assigned to splits by :func:`split_of`.

    Args:
        generate: Makes a row.
        question: Name of the question column.
        test_fraction: Share of the questions in ``test``, in (0, 1).

    Raises:
        ValueError: If no such column is generated.
    """

    splits: tuple[str, ...] = (TRAIN, TEST)

    def __init__(self, generate: Generate, question: str = "question", test_fraction: float = 0.1):
        self._generate, self._question, self._test_fraction = generate, question, test_fraction
        self.columns = tuple(generate(random.Random(0)))
        check_column(question, self.columns, "question")

    def count(self, split: str) -> None:
        """Return None, since the rows are infinite."""

    def row(self, split: str, index: int) -> Row:
        """One row of a split.

        Raises:
            ValueError: If the generator hardly ever makes a question of the split.
        """
        for attempt in range(_ATTEMPTS):
            row = self._generate(random.Random(f"row {index} attempt {attempt}"))
            if split_of(str(row[self._question]), self._test_fraction) == split:
                return row
        raise ValueError(
            f"None of {_ATTEMPTS} generated questions belongs to the split {split!r} (test_fraction={self._test_fraction}): "
            "too few different questions are generated. Change test_fraction or widen the generator."
        )


def load_rows(
    source: Any,
    config: str | None = None,
    *,
    question: str = "question",
    test_fraction: float = 0.1,
    streaming: bool = False,
    max_rows: int | None = None,
) -> Rows:
    """Load rows from a data set, file, folder, Hub id, list or function.

    Args:
        source: A ``datasets.Dataset`` or ``IterableDataset``, a dict of them by split, a list of rows, a Hub id, a file
            (json, jsonl, csv, tsv, parquet), a folder (of such files, or of ``save_to_disk``), or a function
            ``generate(rng)`` that makes a row.
        config: Name of the configuration, for a Hub id or folder that has several.
        question: Name of the question column.
        test_fraction: Share of the questions in ``test``, if the data has only one split. Default .1.
        streaming: Read a Hub id or files as a stream, without a full download; needs ``max_rows``.
        max_rows: Number of rows taken from the beginning of each split. Default: all.

    Returns:
        The rows. Those of a Hub id, file or folder are cached and shared.

    Raises:
        ValueError: If there are no rows, no such column, or a stream without ``max_rows``.
        FileNotFoundError: If a file does not exist.
        TypeError: If ``source`` is none of the above.
    """
    if callable(source):
        return GeneratedRows(source, question, test_fraction)
    if isinstance(source, (str, Path)):
        return _load(str(source), config, question, test_fraction, streaming, max_rows)
    return TableRows(_tables(source, max_rows), question, test_fraction)


def read_dataset(path: str, config: str | None = None, **options: Any) -> Any:
    """Load the data set of a path or Hub id.

    Args:
        path: A file (json, jsonl, csv, tsv, parquet, txt), a folder (of such files, or of ``save_to_disk``) or a Hub id.
        config: Name of the configuration, for a Hub id or folder that has several.
        options: Options of ``datasets.load_dataset``, such as ``split`` and ``streaming``. Without ``split``, the result
            is a dict of all splits.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file has no rows, or a folder of ``save_to_disk`` no such split.
    """
    import datasets

    suffix = Path(path).suffix.lower()
    if suffix in FILES:
        extra = {"sep": "\t"} if suffix == ".tsv" else {}
        try:
            return datasets.load_dataset(FILES[suffix], data_files=path, **{**extra, **options})
        except StopIteration:
            raise ValueError(f"{path} has no rows.") from None
    if (Path(path) / "dataset_info.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(path)
        splits = saved if isinstance(saved, Mapping) else {TRAIN: saved}
        split = options.get("split")
        if split is not None and split not in splits:
            raise ValueError(f"There is no split {split!r} in {path!r}; it has {', '.join(map(repr, splits))}.")
        return splits if split is None else splits[split]
    return datasets.load_dataset(path, config, **options)


def check_column(name: str, columns: Iterable[str], what: str, empty: Collection[str] = ()) -> None:
    """Check that a column exists, and is not among the empty ones; the ``ValueError`` names the nearest one."""
    columns = list(columns)
    if name in empty:
        raise ValueError(f"The column {name!r} for the {what} is empty in this row. Leave the row out or mend it.")
    if name not in columns:
        near = nearest(name, columns, count=1, cutoff=0.3) or "."
        raise ValueError(f"There is no column {name!r} for the {what}{near} The columns are: {', '.join(columns)}.")


@functools.lru_cache(maxsize=32)
def _load(
    path: str, config: str | None, question: str, test_fraction: float, streaming: bool, max_rows: int | None
) -> Rows:
    return TableRows(_tables(read_dataset(path, config, streaming=streaming), max_rows), question, test_fraction)


def _tables(source: Any, max_rows: int | None) -> dict[str, Sequence[Row]]:
    import datasets

    if isinstance(source, Mapping):
        return {str(name): _table(table, max_rows) for name, table in source.items()}
    if isinstance(source, (datasets.Dataset, datasets.IterableDataset, list, tuple)):
        return {TRAIN: _table(source, max_rows)}
    raise TypeError(
        f"Rows cannot be taken from {type(source).__name__}: expected a datasets.Dataset, a dict of them by split, a list "
        "of rows, a Hub id, a path, or a function that generates a row."
    )


def _table(table: Any, max_rows: int | None) -> Sequence[Row]:
    if max_rows is not None:
        return list(islice(table, max_rows))
    if not hasattr(table, "__len__"):
        raise ValueError(
            "A streamed data set has no known length: set max_rows to the number of rows to take from its beginning."
        )
    return table


def _column(table: Any, name: str) -> Iterable[Any]:
    return (row[name] for row in table) if isinstance(table, (list, tuple)) else table[name]


def _words(text: str) -> str:
    return " ".join(text.split())
