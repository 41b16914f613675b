"""Names of runs, sets of seeds, and the parts that the Episodes page is made from; without a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_records import guessing_run, play, populated, run_of
from written_page import Page

from agile_trainers.cli.main import main
from agile_trainers.records.reader import RunRecords, open_records
from agile_trainers.records.writer import RecordWriter, episode_row
from agile_trainers.viewer.parts import OUTLINE_TURNS, figures, labels, outline, searched_texts, seed_sets


def run(folder: str, name: str = "20260101-000000-abcd", **info: Any) -> RunRecords:
    return RunRecords(Path("/home/me") / folder / "rollouts" / name, [], name, info)


def test_a_run_is_named_by_its_folder_and_algorithm() -> None:
    grpo, ppo = {"algorithm": "Multi-turn GRPO"}, {"algorithm": "Multi-turn PPO"}
    assert labels([run("a/grpo", **grpo), run("b/ppo", **ppo)]) == ["grpo · GRPO", "ppo · PPO"]
    assert labels([run("a/x", **grpo), run("b/x", **grpo)]) == ["a/x · GRPO", "b/x · GRPO"]
    assert labels([run("a", "one", **grpo), run("a", "two", **grpo), run("a", **ppo)]) == [
        "a · GRPO · one", "a · GRPO · two", "a · PPO",
    ]  # fmt: skip
    assert labels([run("eval", policy="Qwen"), run("eval", policy={"x": 1}), run("eval")]) == [
        "Qwen · eval", '{"x": 1} · eval', "eval",
    ]  # fmt: skip
    assert labels([]) == []
    assert len(labels([run("a", policy="p" * 10_000)])[0]) < 100
    loose = RunRecords(Path("/data/rollouts"), [], "rollouts"), RunRecords(Path("/data/more"), [], "x.parquet")
    assert labels(loose) == ["data", "more"]


def test_runs_that_differ_in_the_seed_alone_are_a_set() -> None:
    def of(seed: Any, rate: float = 1e-3, **info: Any) -> RunRecords:
        options = {"learning_rate": rate, "seed": seed, "length_column_name": f"<str, withheld: {seed}>"}
        return run("r", **{"algorithm": "GRPO", "environment": "e", "seed": seed, "options": options} | info)

    assert seed_sets([of(0), of(1), of(2)]) == [0, 0, 0]
    assert seed_sets([of(0), of(0, algorithm="PPO"), of(1), of(1, algorithm="PPO")]) == [0, 1, 0, 1]
    assert seed_sets([of(0), of(1, rate=2e-3), of(2, environment="f"), of(3, model="m")]) == [0, 1, 2, 3]
    assert seed_sets([of(0), of(0), of(1)]) == [0, 1, 0], "a second run of a seed is another curve"
    assert seed_sets([of(None), of(None), of(True), of("1"), run("x"), run("x")]) == [0, 1, 2, 3, 4, 5]
    members = [of(0), of(1)]
    for place, one in enumerate(members):
        one.member = {"member": place}
    assert seed_sets(members) == [0, 1]


def test_the_figures_of_an_episode(tmp_path: Path) -> None:
    record: dict[str, Any] = {
        "turns": [{"advantage": -0.5}, {"advantage": 2.0}], "clipped": [None, True, False, False],
        "advantages": [None, -0.25, float("nan"), 2.0], "environment": None, "prompt": "go",
    }  # fmt: skip
    assert figures(record)["clip"] == [1, 3] and figures(record)["low"] == -0.25
    assert figures(record | {"advantages": None})["low"] == -0.5
    assert figures(record | {"clipped": [None]})["clip"] is None
    assert figures(record | {"advantages": None, "turns": []})["low"] is None
    start = figures(record)["start"]
    assert figures(record | {"prompt": "stop"})["start"] != start != figures(record | {"environment": "e"})["start"]
    assert figures(record | {"row": 1})["start"] == figures(record | {"row": 1, "prompt": "stop"})["start"]


def test_every_text_of_an_episode_is_searched(tmp_path: Path) -> None:
    long = "x" * 10_000 + "end"
    game = play([long, "b"], ["c", [{"role": "tool", "content": "ü"}]], [0.0, 1.0], prompt="start", error="broke")
    (records,) = open_records(run_of(tmp_path, [game]))
    (record,) = records.episodes()
    assert searched_texts(record) == ["You play.\nstart", long, "c", "b", '[{"role": "tool", "content": "ü"}]', "broke"]
    assert searched_texts({"turns": [], "prompt": {"a": 1}, "row": 7, "error": None}) == ['{"a": 1}\n7', ""]


def test_an_outline_has_the_numbers_of_all_turns(tmp_path: Path) -> None:
    turns = 3 * OUTLINE_TURNS
    game = play(["a"] * turns, ["b"] * turns, [float(k) for k in range(turns)])
    writer = RecordWriter(tmp_path, {"run": "20260101-000000-abcd"})
    advantages = [k / 8 for k in range(turns)]
    writer.write_train(
        0, [episode_row(game, step=0, phase="train", index=0, advantages=advantages, returns=advantages)]
    )
    (record,) = open_records(tmp_path)[0].episodes()
    shown = outline(record)
    assert [turn["reward"] for turn in shown["turns"]] == list(range(turns))
    assert [turn["advantage"] for turn in shown["turns"]] == advantages
    assert ["text" in turn for turn in shown["turns"]] == [True] * OUTLINE_TURNS + [False] * 2 * OUTLINE_TURNS
    assert shown["credit"] == 0.0


def test_a_page_names_its_runs_and_sets(tmp_path: Path) -> None:
    for place in ("one", "two"):
        guessing_run(tmp_path / place, steps=1, groups=1, name=f"20260101-000000-{place}")
    assert main(["view", str(tmp_path)]) == 0
    runs = Page(tmp_path / "view.html").part("index")["runs"]
    assert [(entry["label"], entry["set"]) for entry in runs] == [("two · grpo", 0), ("one · grpo", 1)]


def test_the_winner_of_all_rounds_comes_first(tmp_path: Path) -> None:
    """Also one that was stopped before the last round."""
    path = populated(tmp_path) / "lineage.json"
    lineage = json.loads(path.read_text())
    for event in lineage["events"]:
        if event["member"] == 0 and event["event"] == "trained":
            event["fitness"] = 0.99
    path.write_text(json.dumps(lineage))
    assert main(["view", str(tmp_path)]) == 0
    runs = Page(tmp_path / "view.html").part("index")["runs"]
    assert [entry["label"] for entry in runs] == ["member-00 · grpo", "member-03 · grpo", "member-01 · grpo"]
    assert [entry["info"]["member"]["state"] for entry in runs] == ["the best, at step 2", "the best at the end", ""]
