"""Rollout log: what is written comes back, whole or not at all, in the folder of its run."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from agile_trainers.records import writer as writing
from agile_trainers.records.reader import RecordsError, open_records, read_records
from agile_trainers.records.schema import ADDED, EPISODE, LIGHT, TRAINED, significant
from agile_trainers.records.writer import RecordWriter, episode_row, new_run_id, pieces, thinned, write_episodes
from agile_trainers.types import StopReason, Trajectory, Turn


def small(**changes: Any) -> Trajectory:
    """prompt 11 12 | 21 22 (turn 0) | 31 (observation) | 23 (turn 1)"""
    entries: dict[str, Any] = {
        "prompt_ids": [11, 12],
        "completion_ids": [21, 22, 31, 23],
        "sampling_logprobs": [-0.123456789, -1.0, 0.0, -2.5],
        "turns": [
            Turn(0, 2, "left", "stop", 0.5, "[1]", {"x": 1}),
            Turn(3, 4, "räts", "length", 1.0, [{"role": "user", "content": "won"}], {"success": True}),
        ],
        "stop_reason": StopReason.TERMINATED,
        "prompt": [{"role": "user", "content": "go"}],
        "reset_info": {"goal": "right"},
        "seed": 7,
        "options": {"secret": 3},
    }
    return Trajectory(**entries | changes)


def trained_row() -> dict[str, Any]:
    row = episode_row(
        small(), step=3, phase="train", index=5, generation=2, group=1, member=1,
        advantages=[-0.25, 0.75], returns=[1.4, 1.0], values=[0.1, 0.2],
    )  # fmt: skip
    seen = np.array([False, False, True, False])
    row["logprobs"] = np.ma.masked_array([-0.125, -1.001, 9.0, -2.5], seen)
    row["ratios"] = [1.25, 0.5, None, 1.0]
    row["advantages"] = [-0.25, -0.25, None, 0.75]
    row["clipped"] = [True, False, None, False]
    return row


EXPECTED: dict[str, Any] = {
    "step": 3, "generation": 2, "phase": "train", "index": 5, "group": 1, "member": 1, "environment": None, "seed": 7,
    "row": {"secret": 3}, "return": 1.5, "success": True, "stop_reason": "terminated", "error": None, "truncated": False,
    "demonstration": None,
    "num_turns": 2, "num_tokens": 4, "prompt": [{"role": "user", "content": "go"}], "reset_info": {"goal": "right"},
    "turns": [
        {"start": 0, "end": 2, "text": "left", "finish_reason": "stop", "observation": "[1]", "reward": 0.5, "return": 1.4,
         "advantage": -0.25, "value": pytest.approx(0.1), "info": {"x": 1}} | dict.fromkeys(ADDED),
        {"start": 3, "end": 4, "text": "räts", "finish_reason": "length",
         "observation": [{"role": "user", "content": "won"}], "reward": 1.0, "return": 1.0, "advantage": 0.75,
         "value": pytest.approx(0.2), "info": {"success": True}} | dict.fromkeys(ADDED),
    ],
    "prompt_ids": [11, 12], "completion_ids": [21, 22, 31, 23], "turn_ids": [0, 0, -1, 1],
    "sampling_logprobs": [-506 / 4096, -1.0, None, -2.5],  # 0.123456789 * 4096 = 505.7
    "logprobs": [-512 / 4096, -1.0 - 4 / 4096, None, -2.5],
    "advantages": [-0.25, -0.25, None, 0.75], "ratios": [1.25, 0.5, None, 1.0], "clipped": [True, False, None, False],
    "kl": None, "paths": None,
}  # fmt: skip


def test_a_row_of_any_depth_can_be_read_again(tmp_path: Path) -> None:
    """What is written has no more levels than what is read."""
    nested: Any = [1]
    for _ in range(150):
        nested = {"in": nested}
    write_episodes(tmp_path / "eval-000000-eval-rank0.parquet", [episode_row(small(options={"maze": nested}))])
    (found,) = read_records(tmp_path / "eval-000000-eval-rank0.parquet")
    levels, inside = 0, found["row"]["maze"]
    while isinstance(inside, dict):
        levels, inside = levels + 1, inside["in"]
    assert levels == 98 and inside == "<dict: left out>"


def test_an_episode_comes_back_with_every_column(tmp_path: Path) -> None:
    path = tmp_path / "train-000002-rank0.parquet"
    write_episodes(path, [trained_row(), episode_row(small(options=None))])
    trained, evaluated = read_records(path)
    assert trained == EXPECTED and list(trained) == EPISODE.names
    assert evaluated["row"] is evaluated["generation"] is evaluated["group"] is None
    assert [turn["return"] for turn in evaluated["turns"]] == [1.5, 1.0]
    assert all(evaluated[name] is None for name in TRAINED)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_datasets_opens_a_file(tmp_path: Path) -> None:
    write_episodes(tmp_path / "train-000002-rank0.parquet", [trained_row()])
    data = load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert data[0]["completion_ids"] == [21, 22, 31, 23] and data[0]["clipped"] == [True, False, None, False]
    assert data[0]["turns"][1]["text"] == "räts" and data.column_names == EPISODE.names


def test_the_files_are_as_small_as_the_encoding_says(tmp_path: Path) -> None:
    """The log-probabilities have their bytes split, everything else a dictionary; there is no second schema."""
    path = tmp_path / "train-000002-rank0.parquet"
    write_episodes(path, [trained_row()])
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(n) for n in range(group.num_columns)]
    split = {column.path_in_schema.split(".")[0] for column in columns if "BYTE_STREAM_SPLIT" in column.encodings}
    assert split == {"sampling_logprobs", "logprobs"}
    packed = {column.path_in_schema for column in columns if "RLE_DICTIONARY" in column.encodings}
    assert {"turns.list.element.text", "completion_ids.list.element", "prompt"} <= packed
    assert all(column.compression == "ZSTD" for column in columns)
    assert not pq.read_schema(path).metadata


# -------------------------------------------------------------------------------------------------------- precision


def test_numbers_keep_their_stated_precision(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    count = 2000
    sampled, mismatch = -random.exponential(2.0, count), random.normal(0, 0.05, count)
    ratio = np.exp(random.normal(0, 3, count))
    row = episode_row(small(
        completion_ids=list(range(count)), sampling_logprobs=sampled.tolist(), turns=[Turn(0, count, "", "stop")],
    ))  # fmt: skip
    row |= {"logprobs": sampled + mismatch, "ratios": ratio, "kl": ratio / 1e6, "advantages": -ratio * 1e3}
    write_episodes(tmp_path / "train-000000-rank0.parquet", [row])
    (found,) = read_records(tmp_path / "train-000000-rank0.parquet")
    there, trained = np.array(found["sampling_logprobs"]), np.array(found["logprobs"])
    half_a_step = 0.5 / 4096 * (1 + 1e-6)
    assert 1e-4 < abs(there - sampled).max() <= half_a_step
    assert abs((trained - there) - mismatch).max() <= half_a_step
    for name, exact, bits in (("ratios", ratio, 12), ("advantages", -ratio * 1e3, 11), ("kl", ratio / 1e6, 8)):
        errors = abs(np.array(found[name]) / exact - 1)
        assert 0.9 < errors.max() * 2**bits <= 1 + 1e-3


def test_numbers_that_are_not_finite_stay(tmp_path: Path) -> None:
    rounded = significant(np.array([np.inf, -np.inf, np.nan, 0.0, 1.0, -3.0], dtype=np.float32), 12)
    assert rounded[0] == np.inf and rounded[1] == -np.inf and np.isnan(rounded[2])
    assert rounded[3:].tolist() == [0.0, 1.0, -3.0]
    row = episode_row(small(sampling_logprobs=[-math.inf, math.nan, 0.0, -1.0]))
    write_episodes(tmp_path / "eval-000000-eval-rank0.parquet", [row])
    (found,) = read_records(tmp_path / "eval-000000-eval-rank0.parquet")
    lowest, unknown, observed, last = found["sampling_logprobs"]
    assert lowest == -math.inf and math.isnan(unknown) and observed is None and last == -1.0


# ---------------------------------------------------------------------------------------------------- hostile values


class Raises:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_what_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    info: dict[Any, Any] = {
        "path": Path("a/b"), "set": {1}, (2, 3): "tuple key", 4: (5, Path("c")), "nan": math.nan, "infinity": [-math.inf],
        "surrogate": "\ud800!", "flag": False, "loop": loop, "raises": Raises(), "nul": "a\0b", "large": 10**400,
    }  # fmt: skip
    turns = [Turn(0, 2, "\ud800 <script>", "stop", 0.0, "\udfff", info), Turn(3, 4, "b", "stop", 0.0, None, {})]
    write_episodes(tmp_path / "eval-000000-eval-rank0.parquet", [episode_row(small(turns=turns, error="\ud800"))])
    (found,) = read_records(tmp_path / "eval-000000-eval-rank0.parquet")
    assert found["turns"][0]["text"] == "\\ud800 <script>" and found["turns"][0]["observation"] == "\\udfff"
    assert found["turns"][1]["observation"] is None and found["error"] == "\\ud800"
    assert found["turns"][0]["info"] == {
        "path": "a/b", "set": "{1}", "(2, 3)": "tuple key", "4": [5, "c"], "nan": "nan", "infinity": ["-inf"],
        "surrogate": "\ud800!", "flag": False, "loop": {"self": "<dict: left out>"},
        "raises": "<Raises: its str raises RuntimeError>", "nul": "a\0b", "large": "1" + "0" * 400,
    }  # fmt: skip


def test_long_observations_are_read_one_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_ROW_GROUP_BYTES", 2500)
    path = tmp_path / "eval-000000-eval-rank0.parquet"
    rows = [episode_row(small(turns=[Turn(0, 4, str(n), "stop", 0.0, "x" * 1000)], seed=n)) for n in range(5)]
    write_episodes(path, rows)
    assert [pq.ParquetFile(path).metadata.row_group(n).num_rows for n in range(2)] == [3, 2]
    (run,) = open_records(path)
    assert [run.episode(f"{path.name}#{n}")["seed"] for n in range(5)] == [0, 1, 2, 3, 4]
    assert [episode["turns"][0]["text"] for episode in run.episodes()] == ["0", "1", "2", "3", "4"]
    for key in (f"{path.name}#5", "other#0", path.name, f"{path.name}#-1"):
        with pytest.raises(KeyError):
            run.episode(key)


# ------------------------------------------------------------------------------------------------------------- kills


def test_a_run_killed_in_mid_write_leaves_readable_records(tmp_path: Path) -> None:
    """The process kills itself after the first part of the second file is on disk, and in mid-line of the metrics."""
    script = """
import os, signal, sys
from pathlib import Path
from agile_trainers.records import writer as writing
from agile_trainers.types import StopReason, Trajectory, Turn

writing._ROW_GROUP_BYTES = 1
def rows(count, kill):
    for n in range(count):
        if kill and n == 2:
            (partial,) = writer.folder.glob("*.partial")
            assert partial.stat().st_size > 100
            with (writer.folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 2, "rew')
            os.kill(os.getpid(), signal.SIGKILL)
        turns = [Turn(0, 2, "x" * 50, "stop", 1.0)]
        yield writing.episode_row(Trajectory([1], [2, 3], [-1.0, -1.0], turns, StopReason.TERMINATED), generation=int(kill))

writer = writing.RecordWriter(Path(sys.argv[1]), {"run": "a"})
writer.write_metrics(1, {"reward": 0.5})
writer.write_train(0, rows(4, False))
writer.write_train(1, rows(4, True))
"""
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (run,) = open_records(tmp_path)
    assert [path.name for path in run.files] == ["train-000000-rank0.parquet"] and len(run.index()) == 4
    assert run.metrics() == [{"step": 1, "reward": 0.5}]
    assert len(list(run.folder.glob("*.partial"))) == 1
    resumed = RecordWriter(tmp_path, {"run": "a"})
    assert resumed.rewind(1, 1, 1) == 0 and not list(run.folder.glob("*.partial"))
    resumed.write_metrics(2, {"reward": 1.0})
    assert run.metrics() == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1.0}]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    def ending() -> Any:
        yield episode_row(small(seed=2))
        raise RuntimeError("half way")

    writer = RecordWriter(tmp_path, {})
    path = writer.write_train(0, [episode_row(small(seed=1))])
    with pytest.raises(RuntimeError, match="half way"):
        writer.write_train(0, ending())
    assert [episode["seed"] for episode in read_records(tmp_path)] == [1]
    assert {file.name for file in path.parent.iterdir()} == {path.name, "run.json", "digests-0.jsonl"}


def test_half_a_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, {})
    (writer.folder / "metrics.jsonl").write_text('{"step": 1, "re')
    writer.write_metrics(2, {"reward": 1, "kl": math.nan, "flag": True, "text": "x"})
    assert open_records(tmp_path)[0].metrics() == [{"step": 2, "reward": 1, "kl": None}]


# -------------------------------------------------------------------------------------------------------------- runs


def test_runs_and_evaluations_of_one_folder_stay_apart(tmp_path: Path) -> None:
    writers = [RecordWriter(tmp_path, {"kind": kind}) for kind in ("training", "training", "evaluation", "evaluation")]
    assert len({writer.run for writer in writers}) == 4
    for number, writer in enumerate(writers):
        writer.write_eval(3, "eval", [episode_row(small(seed=number))])
    # And two evaluations of one run at the same step.
    writers[0].write_eval(3, "eval", [episode_row(small(seed=4))])
    runs = {run.name: run for run in open_records(tmp_path)}
    seeds = [[row["seed"] for row in runs[writer.run].index()] for writer in writers]
    assert seeds == [[0, 4], [1], [2], [3]]
    kinds = [run.info["kind"] for run in (runs[writer.run] for writer in writers)]
    assert kinds == ["training", "training", "evaluation", "evaluation"]
    assert [name.startswith("eval-") for name in sorted(runs)] == [False, False, True, True]


def test_a_folder_is_found_from_wherever_it_is_named(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "demo" / "rl", {"algorithm": "A", "format": 2}, rank=0)
    path = writer.write_train(0, [trained_row(), trained_row()])
    for place in (tmp_path, tmp_path / "demo" / "rl", path.parent.parent, path.parent, path):
        (run,) = open_records(place)
        assert run.info["algorithm"] == "A" and [row["key"] for row in run.index()] == [
            f"{path.name}#0",
            f"{path.name}#1",
        ]
    assert list(run.index()[0]) == ["key", *LIGHT] and run.index()[0]["return"] == 1.5
    (run,) = open_records(tmp_path)
    writer.write_train(1, [trained_row()])
    assert len(run.index()) == 2
    assert len(open_records(tmp_path)[0].index()) == 3


def test_what_holds_no_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train-000000-rank0.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(RecordsError, match=r"train-000000-rank0\.parquet"):
        open_records(tmp_path)[0].index()
    with pytest.raises(RecordsError, match=r"train-000000-rank0\.parquet"):
        read_records(tmp_path)
    for place in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(RecordsError, match="log_rollouts"):
            open_records(place)


def test_a_resumed_run_writes_again_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = RecordWriter(tmp_path, {"run": "a", "seed": 1})
    other = RecordWriter(tmp_path, {"run": "a"}, rank=1)
    for generation in range(4):
        first.write_train(generation, [trained_row()])
        other.write_train(generation, [trained_row()])
        first.write_eval(2 * generation, "eval", [trained_row()])
        first.write_metrics(2 * generation, {"reward": generation})
        first.write_findings([{"name": "solved", "step": 2 * generation}])
    started = "2026-01-01T00:00:00+00:00"
    (first.folder / "run.json").write_text(json.dumps({"run": "a", "seed": 1, "started": started}))
    resumed = RecordWriter(tmp_path, {"run": "a", "seed": 2})
    assert resumed.rewind(2, 4, 2) == 3  # training 2 and 3, evaluation at step 6
    (run,) = open_records(tmp_path)
    assert [path.name for path in run.files] == [
        "eval-000000-eval-rank0.parquet", "eval-000002-eval-rank0.parquet", "eval-000004-eval-rank0.parquet",
        "train-000000-rank0.parquet", "train-000000-rank1.parquet", "train-000001-rank0.parquet",
        "train-000001-rank1.parquet", "train-000002-rank1.parquet", "train-000003-rank1.parquet",
    ]  # fmt: skip
    assert [line["step"] for line in run.metrics()] == [0, 2, 4]
    assert run.info["seed"] == 2 and run.info["started"] == started, "the options that it goes on with"
    assert run.findings() == [{"name": "solved", "step": step} for step in (0, 2, 4)]
    # With one process, of whose episodes those of the other are part.
    assert other.rewind(2, 4, 1) == 2 and other.write_train(2, [trained_row()])
    assert resumed.rewind(2, 4, 1) == 1 and not list(run.folder.glob("train-000002-*"))
    assert len(list(run.folder.glob("train-*-rank1.parquet"))) == 2, "those of before the checkpoint"


def test_an_id_says_when_and_what() -> None:
    ids = [new_run_id() for _ in range(50)]
    assert ids == sorted(ids)
    date, time, end = new_run_id().split("-")
    assert (len(date), len(time), len(end)) == (8, 6, 4) and int(end, 16) >= 0
    assert new_run_id("evaluation").startswith(f"eval-{date}")


# ------------------------------------------------------------------------------------------------------ size on disk


def test_thinning_keeps_the_first_the_newest_and_an_even_rest() -> None:
    left, gone = list(range(10)), []
    while len(left) > 1:
        gone.append(thinned(left))
        left.remove(gone[-1])
    assert gone == [1, 3, 5, 7, 2, 6, 4, 8, 0] and left == [9]
    assert thinned([0, 30, 10, 20]) == 10


def test_the_files_of_a_run_stay_within_their_size(tmp_path: Path) -> None:
    said: list[str] = []
    one = RecordWriter(tmp_path / "one", {}).write_train(0, [trained_row()]).stat().st_size
    writer = RecordWriter(tmp_path, {"run": "a"}, max_bytes=int(4.5 * one), report=said.append)
    other = RecordWriter(tmp_path, {"run": "a"}, rank=1, max_bytes=int(1.5 * one))
    other.write_train(0, [trained_row()])
    for generation in range(9):
        writer.write_train(generation, [trained_row()])
        sizes = [path.stat().st_size for path in writer.folder.glob("*-rank0.parquet")]
        assert sum(sizes) <= 4.5 * one
    left = sorted(path.name for path in writer.folder.glob("*.parquet"))
    assert left == [f"train-00000{n}-rank{rank}.parquet" for n, rank in ((0, 0), (0, 1), (4, 0), (6, 0), (8, 0))]
    assert len(said) == 1 and "train-000001-rank0.parquet" in said[0]
    for step in range(6):
        writer.write_eval(step, "eval", [trained_row()])
    left = sorted(path.name for path in writer.folder.glob("*-rank0.parquet"))
    assert left == [*(f"eval-00000{n}-eval-rank0.parquet" for n in (3, 4, 5)), "train-000008-rank0.parquet"]


# -------------------------------------------------------------------------------------------------------- vocabulary


def test_the_pieces_of_a_byte_level_tokenizer_are_the_bytes(embedded_model: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    writer = RecordWriter(tmp_path, {})
    writer.write_train(0, [trained_row()])
    writer.write_vocabulary(tokenizer)
    writer.write_vocabulary(None)  # it is there
    known = open_records(tmp_path)[0].vocabulary()
    text = " héllo wörld 🎲 <|im_end|>"
    ids = tokenizer(text).input_ids
    assert b"".join(known[token][0] for token in ids).decode() == text
    assert [special for _, special in (known[token] for token in ids)] == [False] * (len(ids) - 1) + [True]
    assert any(known[token][0] == b"\xf0" for token in ids)  # the die is split


def test_the_pieces_of_other_tokenizers() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "▁go": 1, "on": 2, "<0xE2>": 3, "<s>": 4}
    pieced = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    pieced.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    sentence = PreTrainedTokenizerFast(tokenizer_object=pieced, bos_token="<s>", unk_token="<unk>")
    assert pieces(sentence) == [
        (0, b"<unk>", True), (1, b" go", False), (2, b"on", False), (3, b"\xe2", False), (4, b"<s>", True),
    ]  # fmt: skip
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"ja": 0, "nein": 1})))
    assert pieces(words) == [(0, b"ja", False), (1, b"nein", False)]


def test_the_columns_of_turns_are_those_of_the_schema() -> None:
    row = trained_row()
    assert list(row) == EPISODE.names
    turn = EPISODE.field("turns").type.value_type
    assert isinstance(turn, pa.StructType) and set(row["turns"][0]) == {field.name for field in turn}
