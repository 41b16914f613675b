"""Defines the columns of episode records, their precision and their encoding in Parquet files.

One row is one episode record. ``datasets.load_dataset("parquet", data_files=...)`` and any other reader of Parquet open the
files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from agile_trainers.records.plain import encodable
from agile_trainers.types import path_nodes

FORMAT = 4
"""Version of the rollout log, in ``run.json``."""

TURN = pa.struct({
    "start": pa.int32(),  # first action token, in completion coordinates
    "end": pa.int32(),  # one past the last
    "text": pa.string(),  # the action that the environment received
    "finish_reason": pa.string(),  # "stop" or "length"
    "observation": pa.string(),  # the environment's answer: text, or messages as JSON; null if it failed
    "observation_is_json": pa.bool_(),
    "reward": pa.float64(),  # the environment's
    "return": pa.float64(),  # of what was trained on, from this turn on, discounted
    "advantage": pa.float32(),
    "value": pa.float32(),  # the critic's, before the action
    "info": pa.string(),  # JSON
    # The next five are of an episode of several paths; null in others.
    "path": pa.int32(),  # which holds the action
    "place": pa.int32(),  # of the first action token in it; the tokens before it are the prompt
    "parent": pa.int32(),  # the turn that it goes on from; null without any
    "rewarded": pa.int32(),  # number of turns whose reward was given before it was asked for
    "fork": pa.string(),  # why it begins a new path
    "messages": pa.string(),  # the prompt's as JSON, where it is not an earlier turn's with action and observation
    "question": pa.bool_(),  # true if the environment did not get it, since the history asked for it; else null
})  # fmt: skip
PATH = pa.struct({
    "of": pa.int32(),  # an earlier path, whose first `shared` tokens it begins with; null if it shares none
    "shared": pa.int32(),
    "ids": pa.list_(pa.int32()),  # the tokens after them
})  # fmt: skip

EPISODE = pa.schema({
    "step": pa.int64(),  # optimizer steps before the update on it; of an evaluation's, of its policy
    "generation": pa.int64(),  # index of the generation batch in the run
    "phase": pa.string(),  # "train" or "eval"
    "index": pa.int64(),  # among the episodes of all processes in the batch
    "group": pa.int64(),
    "member": pa.int64(),
    "environment": pa.string(),  # its name in a run of several
    "seed": pa.int64(),
    "row": pa.string(),  # the dataset row as JSON
    "return": pa.float64(),  # sum of the environment's rewards
    "success": pa.bool_(),
    "stop_reason": pa.string(),
    "error": pa.string(),
    "truncated": pa.bool_(),
    "demonstration": pa.bool_(),  # true if an expert gave the answers; else null
    "num_turns": pa.int32(),
    "num_tokens": pa.int32(),  # after the first prompt; what paths share counts once
    "prompt": pa.string(),  # the messages as JSON
    "reset_info": pa.string(),  # JSON
    "turns": pa.list_(TURN),
    "prompt_ids": pa.list_(pa.int32()),
    "completion_ids": pa.list_(pa.int32()),
    "turn_ids": pa.list_(pa.int16()),  # -1 on observation tokens
    # Parallel to completion_ids. Null on observation tokens; all but the first also where nothing was trained.
    "sampling_logprobs": pa.list_(pa.float32()),
    "logprobs": pa.list_(pa.float32()),  # the trainer's, of the policy that the update started from
    "advantages": pa.list_(pa.float32()),
    "ratios": pa.list_(pa.float32()),  # in the last pass over the episode, as are the next two
    "clipped": pa.list_(pa.bool_()),
    "kl": pa.list_(pa.float32()),  # k3 estimate; null without a reference
    "paths": pa.list_(PATH),  # null if the prompt and the completion are the only one
})  # fmt: skip

TRAINED = ("logprobs", "advantages", "ratios", "clipped", "kl")
"""Token columns that only an update fills."""
ADDED = ("path", "place", "parent", "rewarded", "fork", "messages", "question")
"""Fields of a turn that are null in an ordinary one."""
LIGHT = tuple(name for name in EPISODE.names[: EPISODE.names.index("prompt")] if name != "row")
"""Columns of the index of a run: numbers and short texts."""
VOCABULARY = pa.schema({"id": pa.int32(), "piece": pa.binary(), "special": pa.bool_()})

_LOGPROB_STEPS = 2.0**12
"""Log-probabilities are multiples of 1 / 4096: their error is at most 1.3e-4, the trainer's and the mismatch's 2.5e-4."""
_SIGNIFICANT_BITS = {"ratios": 12, "advantages": 11, "kl": 8}
"""The relative error is at most 2.5e-4, 5e-4 and 4e-3: with n bits, 2**-n."""
_SPLIT_BYTES = ("sampling_logprobs", "logprobs")
"""Columns of many different values; the others are encoded with a dictionary."""


def _leaves(name: str, kind: pa.DataType) -> list[str]:
    """Return Parquet's paths of a column."""
    if pa.types.is_list(kind):
        return _leaves(f"{name}.list.element", kind.value_type)
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(f"{name}.{field.name}", field.type)]
    return [name]


PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 9,
    "use_dictionary": [
        leaf for field in EPISODE if field.name not in _SPLIT_BYTES for leaf in _leaves(field.name, field.type)
    ],
    "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _SPLIT_BYTES},
    "write_statistics": False,
    "store_schema": False,  # Parquet's own types say the same
}
"""Options of ``pyarrow.parquet.ParquetWriter``."""


def to_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Convert rows of :func:`agile_trainers.records.writer.episode_row` to a table, rounded as this file states."""
    columns = []
    for field in EPISODE:
        values = [row[field.name] for row in rows]
        if field.name == "turns":
            columns.append(pa.array([[_turn(turn) for turn in turns] for turns in values], type=field.type))
        elif field.name == "paths":
            columns.append(pa.array(values, type=field.type))
        elif pa.types.is_list(field.type):
            columns.append(_token_column(field.name, field.type.value_type, rows))
        elif pa.types.is_string(field.type):
            columns.append(pa.array([None if text is None else encodable(text) for text in values], type=field.type))
        else:
            columns.append(pa.array(values, type=field.type))
    return pa.Table.from_arrays(columns, schema=EPISODE)


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    return {name: encodable(value) if isinstance(value, str) else value for name, value in turn.items()}


def _token_column(name: str, kind: pa.DataType, rows: Sequence[dict[str, Any]]) -> pa.ListArray:
    """Make a list column of the rows' sequences of numbers, masked arrays or None."""
    there = [row for row in rows if row[name] is not None]
    lengths = [0 if row[name] is None else len(row[name]) for row in rows]
    numpy_type = np.dtype(kind.to_pandas_dtype())
    if name == "logprobs":
        numbers, hidden = _near(there)
        numbers = numbers.astype(numpy_type)
    else:
        numbers, hidden = _joined([row[name] for row in there], numpy_type)
    if kind == pa.float32():
        rounded = _on_grid(numbers) if name in _SPLIT_BYTES else significant(numbers, _SIGNIFICANT_BITS[name])
        numbers = np.where(hidden, 0, rounded).astype(np.float32)
    missing = np.array([*(row[name] is None for row in rows), False])
    offsets = pa.array(np.cumsum([0, *lengths]), mask=missing, type=pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(numbers, mask=hidden, type=kind))


def _near(rows: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Round the trainer's log-probabilities so that they differ from the sampler's rounded ones by the rounded mismatch."""
    sampled, unsampled = _joined([row["sampling_logprobs"] for row in rows], np.float64)
    trained, untrained = _joined([row["logprobs"] for row in rows], np.float64)
    hidden = unsampled | untrained
    mismatch = np.where(hidden, 0.0, trained) - np.where(hidden, 0.0, sampled)
    return _on_grid(sampled) + _on_grid(mismatch), hidden


def _joined(values: Sequence[Any], kind: Any) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate sequences of numbers and masked arrays; None stands for a missing one.

    Rows are joined before anything is computed: NumPy's masked arrays cost 20 microseconds an operation.

    Returns:
        The numbers, and True where there is none.
    """
    numbers, hidden = [np.zeros(0, dtype=kind)], [np.zeros(0, dtype=bool)]
    for value in values:
        if isinstance(value, np.ndarray):
            numbers.append(np.ma.getdata(value).astype(kind))
            hidden.append(np.ma.getmaskarray(value))
        else:
            without = [number is None for number in value] if None in value else np.zeros(len(value), dtype=bool)
            numbers.append(np.array([0 if number is None else number for number in value], dtype=kind))
            hidden.append(np.asarray(without, dtype=bool))
    return np.concatenate(numbers), np.concatenate(hidden)


def _on_grid(values: Any) -> Any:
    return np.round(values * _LOGPROB_STEPS) / _LOGPROB_STEPS


def significant(values: np.ndarray, bits: int) -> np.ndarray:
    """Round numbers to some significant bits; infinite ones and NaN stay."""
    mantissas, exponents = np.frexp(values)
    return np.ldexp(np.round(mantissas * 2.0**bits) / 2.0**bits, exponents)


def packed_paths(paths: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Store each path as the length of the prefix that it shares with an earlier one, and its other tokens.

    Args:
        paths: Token ids of each, at least one.

    Returns:
        A dictionary for each path. ``of`` is the first of the earlier paths that share the longest beginning with it, None
        if none shares a token; ``shared`` is the number of tokens of that beginning, and ``ids`` are the tokens after it.
    """
    nodes = path_nodes(paths)
    owners = [-1] * (1 + max((numbers[-1] for numbers in nodes if numbers), default=-1))
    found = []
    for k, (path, numbers) in enumerate(zip(paths, nodes, strict=True)):
        # The nodes that an earlier path has come first.
        shared = bisect_left(numbers, True, key=lambda number: owners[number] < 0)
        for number in numbers[shared:]:
            owners[number] = k
        of = owners[numbers[shared - 1]] if shared else None
        found.append({"of": of, "shared": shared, "ids": list(path[shared:])})
    return found


def path_ids(paths: Sequence[dict[str, Any]], k: int) -> list[int]:
    """Return the tokens of path ``k`` of :func:`packed_paths`.

    Args:
        paths: All of them.
        k: Index of one.
    """
    parts, length = list[list[int]](), None
    place: int | None = k
    while place is not None:
        one = paths[place]
        own = one["ids"] if length is None else one["ids"][: max(0, length - one["shared"])]
        parts.append(own)
        length = one["shared"] if length is None else min(length, one["shared"])
        place = one["of"]
    return [token for part in reversed(parts) for token in part]


def path_lengths(paths: Sequence[Any]) -> list[int]:
    """Return the number of tokens of each path of :func:`packed_paths`, whoever wrote them.

    Raises:
        ValueError: If a path does not begin with tokens of an earlier one, as it says.
    """
    lengths = list[int]()
    for k, one in enumerate(paths):
        of, shared, ids = (None if one is None else one[name] for name in ("of", "shared", "ids"))
        longest = 0 if of is None else lengths[of] if 0 <= of < k else -1
        if ids is None or None in ids or shared is None or not 0 <= shared <= longest:
            raise ValueError(f"path {k} of an episode shares {shared} tokens with path {of}, which it cannot")
        lengths.append(shared + len(ids))
    return lengths
