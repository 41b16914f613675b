"""Files that are not what was written: every changed bit is noticed, and one unreadable file does not hide the others."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agile_trainers.records.plain import from_json
from agile_trainers.records.reader import RecordsError, RunRecords, open_records, read_records
from agile_trainers.records.schema import EPISODE, PARQUET
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.types import StopReason, Trajectory, Turn


def game(seed: int = 0) -> dict[str, Any]:
    turns = [
        Turn(0, 2, "left", "stop", 0.5, "wall", {"x": 1}),
        Turn(3, 4, "right", "stop", 1.0, "won", {"success": True}),
    ]
    trajectory = Trajectory(
        [11, 12], [21, 22, 31, 23], [-0.1, -1.0, 0.0, -2.5], turns, StopReason.TERMINATED,
        [{"role": "user", "content": "go"}], seed=seed, options={"secret": seed},
    )  # fmt: skip
    return episode_row(trajectory, phase="train", generation=0)


@pytest.fixture
def run(tmp_path: Path) -> RunRecords:
    """Two files of three episodes."""
    writer = RecordWriter(tmp_path, {"run": "a"})
    for generation in range(2):
        writer.write_train(generation, [game(seed) for seed in range(3)])
    return open_records(tmp_path)[0]


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_flipped_bit_is_served(run: RunRecords) -> None:
    """1,000 bits anywhere in a file of episodes, then each line of the digests: never other episodes, always the name."""
    path, noise = run.files[0], random.Random(0)
    content = path.read_bytes()
    for bit in noise.sample(range(8 * len(content)), 1000):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(RecordsError, match=r"train-000000-rank0\.parquet"):
            run.index()
    with pytest.raises(RecordsError, match=r"train-000000-rank0\.parquet"):
        list(run.episodes())
    with pytest.raises(RecordsError, match=r"train-000000-rank0\.parquet"):
        run.episode(f"{path.name}#0")
    path.write_bytes(content)
    expected = list(run.episodes())
    (digests,) = run.folder.glob("digests-*.jsonl")
    lines = digests.read_bytes()
    for bit in noise.sample(range(8 * len(lines)), 200):
        digests.write_bytes(flipped(lines, bit))
        try:
            served = list(run.episodes())
        except RecordsError as error:
            assert "parquet" in str(error)
        else:
            assert served == expected  # the bit changed nothing that is read, such as a letter's case
    digests.write_bytes(lines)
    assert list(run.episodes()) == expected


def test_a_file_that_is_written_again_has_a_digest_before_and_after(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {"run": "a"})
    writer.write_train(0, [game(1)])
    old = (path := tmp_path / "rollouts" / "a" / "train-000000-rank0.parquet").read_bytes()
    writer.write_train(0, [game(2)])
    assert [one["seed"] for one in read_records(path)] == [2]
    path.write_bytes(old)  # killed after the digest, before the file
    assert [one["seed"] for one in read_records(path)] == [1]


def table(**columns: Any) -> pa.Table:
    """A file of one episode by somebody else, with some columns replaced."""
    made = pa.Table.from_pylist(
        [{**pa.table([[None]] * len(EPISODE), schema=EPISODE).to_pylist()[0], **SOUND}], schema=EPISODE
    )
    for name, value in columns.items():
        made = made.set_column(
            made.column_names.index(name), name, pa.array([value]) if not isinstance(value, pa.Array) else value
        )
    return made


SOUND = {
    "step": 0,
    "phase": "train",
    "index": 0,
    "stop_reason": "terminated",
    "return": 1.0,
    "turns": [],
    "completion_ids": [],
}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"step": '0"><meta http-equiv="refresh">'}, "column 'step' is string, expected int64"),
        ({"step": -1}, "has the step -1"),
        ({"step": 2**60}, "has the step"),
        ({"step": pa.array([None], pa.int64())}, "TypeError"),
        ({"step": 0.5}, "column 'step' is double"),
        ({"phase": "<b>"}, "has the phase '<b>'"),
        ({"stop_reason": "<b>"}, "<b>"),
        ({"return": "1"}, "column 'return' is"),
        ({"num_turns": [1]}, "column 'num_turns' is"),
        ({"turns": "x"}, "column 'turns' is"),
        ({"completion_ids": ["x"]}, "column 'completion_ids' is"),
        (
            {"prompt": pa.array([b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)},
            "UnicodeDecodeError|Invalid|cannot be read",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_column_of_another_type_or_range_is_named(columns: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "train-000000-rank0.parquet"
    pq.write_table(table(**columns), path)
    with pytest.raises(RecordsError, match=said) as raised:
        open_records(path)[0].index()
    assert str(path) in str(raised.value) and len(str(raised.value)) < 900


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train-000000-rank0.parquet"
    pq.write_table(table().drop_columns(["turns"]), path)
    with pytest.raises(RecordsError, match="has no column 'turns'"):
        open_records(path)[0].index()


def test_billions_of_rows_in_a_few_bytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "train-000000-rank0.parquet"
    schema = EPISODE
    empty = pa.Table.from_pylist([dict.fromkeys(schema.names) | SOUND] * 1000, schema=schema)
    many = pa.concat_tables([empty] * 143).combine_chunks()
    with pq.ParquetWriter(path, schema, **PARQUET) as writer:
        for _ in range(7):
            writer.write_table(many)
    with pytest.raises(RecordsError, match="1,001,000 rows, expected at most 1,000,000"):
        open_records(path)[0].index()


def test_a_long_text_in_every_row_of_a_small_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Parquet's dictionary, two gigabytes stand in a few thousand bytes; here, fewer."""
    monkeypatch.setattr("agile_trainers.records.reader._MOST_BYTES", 10_000_000)
    path, rows = tmp_path / "train-000000-rank0.parquet", pa.concat_tables([table()] * 40)
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int32()), pa.array(["x" * 500_000]))
    rows = rows.set_column(rows.column_names.index("error"), "error", text)
    pq.write_table(rows, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000
    with pytest.raises(RecordsError, match="take more than 10,000,000 bytes"):
        open_records(path)[0].index()
    with pytest.raises(RecordsError, match="take more than 10,000,000 bytes"):
        open_records(path)[0].episode(f"{path.name}#0")


def test_holes_on_the_disk_are_not_read(run: RunRecords) -> None:
    """Files that take no place and have more bytes than fit in memory."""
    for name in ("metrics.jsonl", "findings.jsonl", "run.json"):
        with (run.folder / name).open("wb") as file:
            file.truncate(2**40)
    (again,) = open_records(run.folder)
    assert again.metrics() == [] and len(again.unread_lines()) == 2 and len(again.problems) == 1


def test_cells_that_are_no_json_stay_text(tmp_path: Path) -> None:
    deep = "[" * 3000
    turn = {"start": -5, "end": 10**6, "text": None, "observation": deep, "observation_is_json": True, "info": "{"}
    made = dict.fromkeys(EPISODE.names) | SOUND | {
        "prompt": deep + "]" * 3000, "reset_info": "nonsense", "row": None, "turns": [turn, None], "turn_ids": [None, 7],
        "completion_ids": [None, -3],
    }  # fmt: skip
    path = tmp_path / "train-000000-rank0.parquet"
    pq.write_table(pa.Table.from_pylist([made], schema=EPISODE), path)
    (episode,) = read_records(path)
    assert (episode["prompt"], episode["reset_info"]) == (deep + "]" * 3000, "nonsense")
    assert [turn["info"] for turn in episode["turns"]] == ["{"] and episode["turns"][0]["observation"] == deep
    assert episode["completion_ids"] == [-1, -3]


def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    os.mkfifo(folder / "train-000000-rank0.parquet")
    (folder / "train-000001-rank0.parquet").mkdir()
    (folder / "train-000002-rank0.parquet").symlink_to("nowhere")
    (folder / "train-000003-rank0.parquet").symlink_to("/dev/zero")
    for name in ("metrics.jsonl", "findings.jsonl", "vocabulary.parquet"):
        os.mkfifo(folder / name)
    (run,) = open_records(tmp_path)
    assert len(run.files) == 4 and (run.metrics(), run.findings(), run.vocabulary()) == ([], [], {})
    for path in run.files:
        with pytest.raises(RecordsError, match="it is no regular file"):
            RunRecords(folder, [path], path.name).index()


def test_logs_leave_out_what_is_no_object_and_say_so(run: RunRecords) -> None:
    lines = [
        '{"step": 1, "x": 2}',
        "",
        "   ",
        "[1]",
        "3",
        "null",
        "[" * 5000,
        '{"step"',
        '{"a": ' + "1" * 5000 + "}",
        "\udc80",
    ]
    (run.folder / "metrics.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    assert run.metrics() == [{"step": 1, "x": 2}]
    assert run.unread_lines() == [
        f"{run.folder / 'metrics.jsonl'}: 7 of its lines are no JSON objects and are left out."
    ]


@pytest.mark.parametrize("content", ["[]", "{", "[" * 5000, "3", "\x00", '{"a": ' + "[" * 200 + "]" * 200 + "}"])
def test_a_run_whose_description_is_damaged_opens_without_it(content: str, run: RunRecords) -> None:
    (run.folder / "run.json").write_text(content)
    (again,) = open_records(run.folder)
    assert again.info == {} and len(again.index()) == 6
    assert len(again.problems) == 1 and "run.json" in again.problems[0] and len(again.problems[0]) < 400


def test_json_is_read_to_a_hundred_levels() -> None:
    assert from_json("[" * 100 + "]" * 100) == json.loads("[" * 100 + "]" * 100)
    with pytest.raises(ValueError, match="more than 100 levels"):
        from_json('{"a":' * 101 + "1" + "}" * 101)
    with pytest.raises(ValueError, match="too deep"):
        from_json("[" * 100_000)
