"""Episode records of episodes of several paths."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agile_trainers.records.reader import RecordsError, open_records, read_records
from agile_trainers.records.schema import ADDED, EPISODE, TURN, packed_paths, path_ids, path_lengths
from agile_trainers.records.writer import episode_row, write_episodes
from agile_trainers.rollout.forest import Call, forest
from agile_trainers.types import StopReason, Trajectory, Turn


def asked_again() -> Trajectory:
    """A bad answer that is thrown away, a good one, a helper beside it, and a summary that replaces everything."""
    start: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    calls = [
        Call([1, 2], [10, 11], [-0.5, -0.25], "bad"),
        Call([1, 2], [10, 12, 13], [-0.5] * 3, "good", fork="asked again", observation="on", reward=0.5),
        Call([7], [20], [-1.0], "help", fork="helper", rewarded=1, messages=[{"role": "user", "content": "aid"}]),
        Call([1, 2, 10, 12, 13, 30], [14], [-1.0], "sum", reward=0.25),
        Call([5, 14], [15, 16], [-1.0] * 2, "end", "stop", 1.0, "won", {"success": True}, None, start, "summary"),
    ]
    return forest(calls, StopReason.TERMINATED, prompt=start)


def written(path: Path, *trajectories: Trajectory) -> Path:
    write_episodes(path, map(episode_row, trajectories))
    return path


def test_an_episode_of_several_paths_comes_back(tmp_path: Path) -> None:
    """Five calls: 10 11 | 10 12 13 | 20 | 14 | 15 16."""
    (found,) = read_records(written(tmp_path / "train-000000-rank0.parquet", asked_again()))
    assert found["paths"] == [
        {"of": None, "shared": 0, "ids": [1, 2, 10, 11]}, {"of": 0, "shared": 3, "ids": [12, 13, 30, 14]},
        {"of": None, "shared": 0, "ids": [7, 20]}, {"of": None, "shared": 0, "ids": [5, 14, 15, 16]},
    ]  # fmt: skip
    assert [[turn[name] for name in ADDED] for turn in found["turns"]] == [
        [0, 2, None, 0, None, None, None], [1, 2, None, 1, "asked again", None, None],
        [2, 1, None, 1, "helper", [{"role": "user", "content": "aid"}], None], [1, 6, 1, 3, None, None, None],
        [3, 2, None, 4, "summary", [{"role": "user", "content": "go"}], None],
    ]  # fmt: skip
    assert found["completion_ids"] == [10, 11, 10, 12, 13, 20, 14, 15, 16] and found["prompt_ids"] == [1, 2]
    assert found["turn_ids"] == [0, 0, 1, 1, 1, 2, 3, 4, 4] and len(found["sampling_logprobs"]) == 9
    assert (found["num_tokens"], found["num_turns"], found["return"]) == (
        12,
        5,
        1.75,
    )  # 14 tokens, 2 of the first prompt
    assert [path_ids(found["paths"], k) for k in range(4)] == asked_again().paths
    assert [turn["return"] for turn in found["turns"]] == [1.75, 1.75, 1.75, 1.25, 1.0]


def test_an_ordinary_episode_has_none_of_it(tmp_path: Path) -> None:
    plain = Trajectory([1], [2, 3], [-1.0, 0.0], [Turn(0, 1, "a", "stop")], StopReason.TERMINATED)
    (found,) = read_records(written(tmp_path / "train-000000-rank0.parquet", plain))
    assert found["paths"] is None and found["num_tokens"] == 2
    assert [found["turns"][0][name] for name in ADDED] == [None] * 7


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_packed_into_their_distinct_tokens(seed: int) -> None:
    noise = random.Random(seed)
    paths = [noise.choices(range(2), k=noise.randint(1, 9)) for _ in range(noise.randint(1, 8))]
    packed = packed_paths(paths)
    assert [path_ids(packed, k) for k in range(len(paths))] == paths
    assert path_lengths(packed) == [len(path) for path in paths]
    distinct = {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
    assert sum(len(one["ids"]) for one in packed) == len(distinct)
    for k, one in enumerate(packed):
        alike = [j for j in range(k) if one["shared"] and paths[j][: one["shared"]] == paths[k][: one["shared"]]]
        assert one["of"] == (alike[0] if alike else None)


def test_many_helpers_beside_a_long_path_take_no_more_than_their_tokens(tmp_path: Path) -> None:
    """200 helpers that begin as one path of 32,768 tokens, where 6.6 million would be repeated, and 200 of their own."""
    noise = random.Random(0)
    long = noise.choices(range(50_000), k=2**15)
    calls = [Call(long[:-8], long[-8:], [-1.0] * 8)]
    calls += [Call([*long[:-100], k], [k], [-1.0]) for k in range(200)]
    calls += [Call([k], [k], [-1.0]) for k in range(200)]
    trajectory = forest(calls, StopReason.TERMINATED)
    path = written(tmp_path / "train-000000-rank0.parquet", trajectory)
    (found,) = read_records(path)
    assert sum(len(one["ids"]) for one in found["paths"]) == 2**15 + 800 == trajectory.num_tokens
    assert [path_ids(found["paths"], k) for k in (0, 1, 200, 400)] == [trajectory.paths[k] for k in (0, 1, 200, 400)]  # type: ignore[index]
    # The first prompt is also there by itself, as in every episode.
    plain = Trajectory(long[:-8], long[-8:], [-1.0] * 8, [Turn(0, 8, "", "stop")], StopReason.TERMINATED)
    assert path.stat().st_size < 2.2 * written(tmp_path / "plain.parquet", plain).stat().st_size


# ---------------------------------------------------------------------------------------------- files of strangers


def changed(row: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    kind, _, name = place.partition(".")
    row[kind][1] = None if name == "" else row[kind][1] | {name: value}
    return row


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("paths.of", 1, "path 1 of an episode shares 3 tokens with path 1"),
        ("paths.of", -1, "path 1 of an episode shares 3 tokens with path -1"),
        ("paths.of", None, "path 1 of an episode shares 3 tokens with path None"),
        ("paths.shared", 5, "path 1 of an episode shares 5 tokens with path 0"),
        ("paths.shared", -1, "shares -1 tokens"),
        ("paths.shared", None, "shares None tokens"),
        ("paths.ids", None, "path 1 of an episode"),
        ("paths.ids", [None, 3, 4], "path 1 of an episode"),
        ("paths", None, "path 1 of an episode"),
        ("turns.path", 4, "turn 1 of an episode is at token 2 of path 4"),
        ("turns.path", -1, "of path -1"),
        ("turns.path", None, "TypeError"),
        ("turns.place", 5, "turn 1 of an episode is at token 5 of path 1"),
        ("turns.place", -1, "token -1 of path 1"),
        ("turns.end", 2**31 - 1, "where it cannot be"),
        ("turns.end", 0, "where it cannot be"),
        ("turns.parent", 1, "turn 1 of an episode goes on from turn 1"),
        ("turns.parent", -1, "goes on from turn -1"),
    ],
)
def test_paths_that_lead_nowhere_are_named(place: str, value: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train-000000-rank0.parquet"
    row = pq.read_table(written(path, asked_again())).to_pylist()[0]
    pq.write_table(pa.Table.from_pylist([changed(row, place, value)], schema=EPISODE), path, store_schema=False)
    (run,) = open_records(path)
    for read in (lambda: run.episode(run.index()[0]["key"]), lambda: list(run.episodes())):
        with pytest.raises(RecordsError, match=said) as raised:
            read()
        assert str(path) in str(raised.value) and len(str(raised.value)) < 900


def test_paths_of_another_type_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "train-000000-rank0.parquet", asked_again())
    table = pq.read_table(path)
    texts = table.set_column(table.column_names.index("paths"), "paths", pa.array([["x"]]))
    pq.write_table(texts, path)
    with pytest.raises(RecordsError, match="column 'paths' is list<"):
        open_records(path)[0].index()
    fewer = pa.list_(pa.struct([field for field in TURN if field.name != "path"]))
    turns = [{k: v for k, v in turn.items() if k != "path"} for turn in table.column("turns").to_pylist()[0]]
    other = table.set_column(table.column_names.index("turns"), "turns", pa.array([turns], type=fewer))
    pq.write_table(other, path)
    with pytest.raises(RecordsError, match="column 'turns' is list<"):
        open_records(path)[0].index()
