"""Makes records as a stranger might: hostile values in every column of every file that the viewer reads, one at a time."""

# ruff: noqa: E501 -- one line per episode
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from made_records import guessing_run, populated

from agile_trainers.records.schema import EPISODE, VOCABULARY
from agile_trainers.records.writer import RUN

MARKUP = (
    '0"><meta http-equiv="refresh" content="0;url=https://example.org/"><img src=x onerror="window.hacked=1"></script>'
)
VALUES: list[Any] = [
    MARKUP, None, True, -1, 1.5, 10**20, [MARKUP], {MARKUP: MARKUP}, {"toString": 0, "length": 10**9}, [], {}, "__proto__",
    [[[[[[MARKUP]]]]]],
]  # fmt: skip
"""What stands in the place of each value of a JSON file."""
SOUND: dict[str, Any] = {
    "step": 0, "generation": 0, "phase": "train", "index": 0, "group": 0, "member": 0, "seed": 0, "stop_reason": "terminated",
    "return": 1.0, "num_turns": 1, "num_tokens": 2, "prompt": '[{"role": "user", "content": "go"}]', "reset_info": "{}",
    "turns": [{"start": 0, "end": 1, "text": "a", "observation": "b", "observation_is_json": False, "reward": 1.0, "info": "{}"}],
    "prompt_ids": [1], "completion_ids": [2, 3], "turn_ids": [0, -1], "sampling_logprobs": [-1.0, None],
}  # fmt: skip


def replaced(value: Any, by: Any) -> Iterator[Any]:
    """Yield copies of JSON data, each with one of its values replaced, at any depth."""
    yield by
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        for changed in replaced(part, by):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = changed
            yield copy


def lines_of(value: Any) -> str:
    """JSON lines: each with one value replaced by each of :data:`VALUES`."""
    return "".join(json.dumps(changed) + "\n" for by in VALUES for changed in replaced(value, by))


def hostile_columns(folder: Path) -> list[str]:
    """One file for each column, of text in the place of its type; and one of hostile text in every column of text.

    Returns:
        Names of the files that must not be shown.
    """
    folder.mkdir(parents=True)
    (folder / RUN).write_text("{}")
    sound = pa.Table.from_pylist([dict.fromkeys(EPISODE.names) | SOUND], schema=EPISODE)
    bad = []
    for n, field in enumerate(EPISODE):
        name = f"train-{n:06d}-rank0.parquet"
        if pa.types.is_string(field.type) and field.name not in ("phase", "stop_reason"):
            column: Any = pa.array([MARKUP])
        else:
            column = pa.array([MARKUP])
            bad.append(name)
        pq.write_table(sound.set_column(n, field.name, column), folder / name)
    turn = EPISODE.field("turns").type.value_type
    texts = {field.name: MARKUP for field in turn if pa.types.is_string(field.type)}
    rows = [
        {**SOUND, "turns": [{**SOUND["turns"][0], **texts, "observation_is_json": flag}]}
        for flag in (False, True, None)
    ]
    rows += [{**SOUND, **cells} for cells in (
        {"prompt": json.dumps(value), "reset_info": json.dumps(value), "row": json.dumps(value),
         "turns": [{**SOUND["turns"][0], "info": json.dumps(value), "observation": json.dumps([value]), "observation_is_json": True}]}
        for value in [*VALUES, [{"role": {"toString": 0}, "content": {"toString": 0}}]]
    )]  # fmt: skip
    rows += [{**SOUND, "turns": None}, {**SOUND, "turns": [None]}, {**SOUND, "turns": [dict.fromkeys(texts)]}]
    rows += [
        {**SOUND, "turns": [{**SOUND["turns"][0], "start": a, "end": b}]}
        for a, b in ((-9, 10**9), (10**9, -9), (None, 1))
    ]
    rows += [{**SOUND, "turn_ids": ids, "completion_ids": [None, 10**9, -1]} for ids in ([99, -7], None, [None] * 9)]
    of_paths = {**SOUND["turns"][0], "end": 1, "path": 0, "place": 0, "rewarded": -5, "fork": MARKUP, "text": MARKUP}
    rows += [
        {**SOUND, "turns": [{**of_paths, "messages": json.dumps(said)}, {**of_paths, "parent": 0}, of_paths],
         "paths": [{"of": None, "shared": 0, "ids": [2, 10**9, -1]}, {"of": 0, "shared": 3, "ids": []}]}
        for said in [*VALUES, MARKUP, [{"role": {"toString": 0}, "content": MARKUP}]]
    ]  # fmt: skip
    rows += [{**SOUND, "turns": [{**of_paths, "path": value, "place": value}] * 3} for value in (-7, 10**9, None)]
    rows += [{**SOUND, name: 10**15} for name in ("step", "generation", "group", "member", "seed")]
    rows += [{**SOUND, "return": value} for value in (float("nan"), float("inf"), 1e300, None)]
    table = pa.Table.from_pylist([dict.fromkeys(EPISODE.names) | row for row in rows], schema=EPISODE)
    pq.write_table(table, folder / "train-000999-rank0.parquet")
    pq.write_table(
        pa.table(
            [[1, 2, None, 3], [MARKUP.encode(), None, b"x", b"\xff"], [True, None, False, None]], schema=VOCABULARY
        ),
        folder / "vocabulary.parquet",
    )
    return bad


def write_hostile(folder: Path) -> list[str]:
    """Write runs of every kind. Returns names of files that cannot be shown."""
    rollouts = folder / "<meta http-equiv=refresh content=0>" / "rollouts"
    bad = hostile_columns(rollouts / "columns")
    logs = guessing_run(folder / "logs", steps=2, groups=1)
    (logs / "metrics.jsonl").write_text(
        lines_of({"step": 1, "success": 0.5}) + '{"step": 100000000000000000, "loss": 1}\n{"step": 1, "loss": 1e300}\n'
        '{"step": 9007199254740990, "loss": -1e300}\n' + "[" * 5000 + "\n\n"
    )
    (logs / "findings.jsonl").write_text(lines_of({"name": "a", "step": 1, "evidence": "b", "advice": "c"}))
    (logs / "vocabulary.parquet").write_bytes(b"PAR1" + MARKUP.encode() + b"PAR1")
    info = {"kind": "training", "run": "a", "policy": "p", "environment": "e", "seed": 0, "started": "s", "options": {"a": 1},
            "member": {"hyperparameters": {}}, "model": "m", "algorithm": "a"}  # fmt: skip
    sample = next(logs.glob("train-*.parquet")).read_bytes()
    for n, changed in enumerate(changed for by in VALUES for changed in replaced(info, by)):
        run = folder / "infos" / "rollouts" / f"info-{n:04d}"
        run.mkdir(parents=True)
        (run / RUN).write_text(json.dumps(changed))
        if n % 40 == 0:
            (run / "train-000000-rank0.parquet").write_bytes(sample)
    lineage = json.loads((populated(folder / "population") / "lineage.json").read_text())
    for n, by in enumerate(VALUES):
        for m, changed in enumerate(replaced({**lineage, "events": lineage["events"][:4]}, by)):
            if m % 3 == n % 3:  # each place with a third of the values
                member = folder / "populations" / f"{n}-{m}" / "member-01" / "rollouts" / "a"
                member.mkdir(parents=True)
                (member / RUN).write_text("{}")
                (member.parents[2] / "lineage.json").write_text(json.dumps(changed))
    return bad
