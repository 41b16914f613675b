"""Panels: what is played is what was named; results are compared as pairs from their files, or refused with the reason."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from scipy import stats
from shipped_panels import shipped
from transformers import AutoModelForCausalLM

from agile_trainers.cli.main import main
from agile_trainers.envs.registry import make_environment_factory
from agile_trainers.evaluation.panels import SHIPPED, check_panel, make_panel, panel_of, read_panel, sealed, sources

LIMITS = ["--max_turns", "3", "--max_new_tokens", "1"]
ROWS = [{"question": f"{n}?", "answer": str(n)} for n in range(6)]
SOURCE = """
import importlib, os, random

Inner = importlib.import_module("panel_helper").Inner

START = os.environ.get("START", "Number")

class Counted:
    def reset(self, seed=None, options=None):
        self.seed = seed
        return f"{START} {options or seed}", {"time": random.random()}

    def step(self, action):
        return "", float(len(action) > self.seed % 3), True, False, {}

class Unseeded(Counted):
    def reset(self, seed=None, options=None):
        return f"{random.random()}", {}

class Wrapped:
    def __init__(self):
        self.inner = Inner()
        self.reset, self.step = self.inner.reset, self.inner.step
"""

HELPER = """
class Inner:
    def reset(self, seed=None, options=None):
        return f"{seed}", {}

    def step(self, action):
        return "", 0.0, True, False, {}
"""


class Lengths:
    """Six games, in each of which answers of even or of odd length win."""

    return_range = (0.0, 1.0)

    def __init__(self, level: str = "normal"):
        self.level = level

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.game = (seed or 0) % 6
        return f"{self.level} {self.game}", {}

    def step(self, action: str) -> Any:
        won = (len(action) + self.game) % 2 == 0
        return "", float(won), True, False, {"success": won}


class Learning(Lengths):
    """Begins otherwise once somebody has played it, as a server or a cache may."""

    played = False

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        text, information = super().reset(seed, options)
        return f"{text}{' again' * Learning.played}", information

    def step(self, action: str) -> Any:
        Learning.played |= action != "0"
        return super().step(action)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the module of an environment and its helper, as changed."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str = SOURCE, helper: str = HELPER) -> None:
        for name, text in {"panel_env": source, "panel_helper": helper}.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        sys.path_importer_cache.clear()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

    write()
    return write


def check(panel: Any, rows: Any = None) -> None:
    check_panel(panel, make_environment_factory(panel.environment, **panel.arguments), rows)


def run(*arguments: Any) -> int:
    return main([str(one) for one in arguments])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> dict[str, Path]:
    """Results of a model and of an adapter on one panel, and others of the model."""
    folder = tmp_path_factory.mktemp("panels")
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder / "adapter")
    for name, count in {"panel": 24, "short": 6}.items():
        made = ["panel", "make", f"{__name__}:Lengths", "--episodes", count, "--output", folder / f"{name}.json"]
        assert run(*made, "--environment_args", '{"level": "easy"}') == 0
    results = {"folder": folder, "panel": folder / "panel.json", "short": folder / "short.json"}
    for name, model, options in [
        ("model", embedded_model, ["--panel", results["panel"]]),
        ("adapter", folder / "adapter", ["--panel", results["panel"]]),
        ("two turns", embedded_model, ["--panel", results["panel"], "--max_turns", "2", "--temperature", "0.5"]),
        ("attempts", embedded_model, ["--panel", results["panel"], "--attempts", "2"]),
        ("other panel", embedded_model, ["--panel", results["short"]]),
        ("no panel", embedded_model, ["--environment", f"{__name__}:Lengths", "--episodes", "2"]),
    ]:
        out, card = folder / name, [] if name == "adapter" else ["--no_card"]
        assert run("eval", model, *LIMITS, *options, *card, "--output_dir", out / "eval") == 0
        (results[name],) = out.glob("eval/eval-*/results.json")
    return results


def test_two_results_are_compared_from_their_files(
    played: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same as McNemar's test on the pairs; the hash of the panel is on the card and in the results."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for name, file in zip(("model", "adapter"), files):
        file.write_bytes(played[name].read_bytes())
    contents = [json.loads(file.read_text()) for file in files]
    panel = json.loads(played["panel"].read_text())
    assert {one["panel"]["panel"] for one in contents} == {panel["panel"]} and len(panel["seeds"]) == 24
    outcomes = [one["environments"][0]["policies"][0]["outcomes"] for one in contents]
    assert outcomes[0]["seed"] == outcomes[1]["seed"] == panel["seeds"]
    pairs = list(zip(*(one["success"] for one in outcomes)))
    won, lost = pairs.count((True, False)), pairs.count((False, True))
    capsys.readouterr()
    assert run("eval", "--compare", *files, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (compared,) = found["comparisons"]
    assert won + lost > 0 and compared["p_value"] == pytest.approx(stats.binomtest(won, won + lost).pvalue)
    assert compared["difference"] == pytest.approx((won - lost) / 24) and compared["episodes"] == 24
    summaries = [one["environments"][0]["policies"][0] for one in contents]
    for own, again in zip(summaries, found["policies"]):
        assert again.items() >= {name: own[name] for name in ("success", "episode_return", "turns", "units")}.items()
    assert found["panel"] == panel["panel"] and found["differences"] == []
    assert run("eval", "--compare", *files) == 0
    shown = capsys.readouterr().out
    assert (
        f"Panel {panel['panel']}, of seed 42 and 6 different starts." in shown
        and "exact McNemar test, 24 pairs" in shown
    )
    card = (played["folder"] / "adapter/README.md").read_text()
    (entry,) = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"]
    assert {metric["args"]["panel"] for metric in entry["metrics"]} == {panel["panel"]}


@pytest.mark.parametrize(
    ("other", "allowed", "said"),
    [
        ("two turns", [], "max_turns=3 and max_turns=2; temperature=1.0 and temperature=0.5"),
        ("two turns", ["temperature"], "in the same way: max_turns=3 and max_turns=2."),
        ("attempts", [], "attempts=1 and attempts=2"),
        ("attempts", ["attempts"], "--allow_difference attempts: expected any of max_turns"),
        ("other panel", [], "which differ in: seeds, starts."),
        ("no panel", [], "is no result on a panel"),
        ("panel", [], "is no result on a panel"),
    ],
)
def test_results_that_are_not_comparable_are_refused(
    played: dict[str, Path], other: str, allowed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--allow_difference", *allowed] if allowed else []
    assert run("eval", "--compare", played["model"], played[other], *more) == 2
    assert said in capsys.readouterr().err


def test_a_difference_that_is_allowed_is_named(played: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    allowed = ["--allow_difference", "max_turns", "temperature"]
    assert run("eval", "--compare", played["model"], played["two turns"], *allowed) == 0
    shown = capsys.readouterr().out
    assert "were played differently: max_turns=3 and max_turns=2." in shown
    assert "were played differently: temperature=1.0 and temperature=0.5." in shown


def cut(outcomes: dict[str, Any]) -> None:
    for column in outcomes.values():
        if isinstance(column, list) and len(column) == 24:
            column.pop()


def repeat(outcomes: dict[str, Any]) -> None:
    for column in outcomes.values():
        if isinstance(column, list) and len(column) == 24:
            column[1] = column[0]


def reorder(outcomes: dict[str, Any]) -> None:
    for column in outcomes.values():
        if isinstance(column, list) and len(column) == 24:
            column.reverse()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "23 episodes, of 24"),
        (repeat, "episode 1 is of (seed, row)"),
        (reorder, "episode 0 is of (seed, row)"),
        (lambda outcomes: outcomes["stop_reason"].__setitem__(3, "won"), "'won' is not a valid StopReason"),
        (lambda outcomes: outcomes.pop("return"), "'return'"),
    ],
)
def test_results_edited_by_hand_are_refused(
    played: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also where the digest was made anew, as far as the panel shows it."""
    content = json.loads(played["model"].read_text())
    change(content["environments"][0]["policies"][0]["outcomes"])
    for written, expected in ((content, "was edited after it was written"), (sealed(content), said)):
        (tmp_path / "results.json").write_text(json.dumps(written))
        assert run("eval", "--compare", played["adapter"], tmp_path / "results.json") == 2
        assert expected in capsys.readouterr().err


def test_a_success_changed_by_hand_is_refused(
    played: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = played["model"].read_text()
    (tmp_path / "results.json").write_text(text.replace('"temperature": 1.0', '"temperature": 0.9'))
    assert run("eval", "--compare", played["adapter"], tmp_path / "results.json") == 2
    assert "was edited after it was written" in capsys.readouterr().err


@pytest.mark.parametrize("resealed", [False, True])
def test_a_panel_edited_by_hand_is_refused(resealed: bool) -> None:
    content = make_panel("agile:guess_number", 6).to_dict()
    panel_of(content, "panel.json")
    content["seeds"][2], content["seeds"][3] = content["seeds"][3], content["seeds"][2]
    if resealed:
        with pytest.raises(ValueError) as told:
            panel_of(content, "panel.json")
        content["panel"] = str(told.value).split("hash ")[1].split(",")[0]
    said = (
        r"seeds were chosen: episode 2 has \d+, seed=42 gives" if resealed else "was edited: its content has the hash"
    )
    with pytest.raises(ValueError, match=said):
        panel_of(content, "panel.json")
    with pytest.raises(ValueError, match="is no panel"):
        panel_of({"panel": "1"}, "panel.json")


@pytest.mark.parametrize(
    "change", [{"starts": None}, {"starts": None, "repeats": []}, {"repeats": ["first step"]}], ids=str
)
def test_a_panel_whose_starts_were_taken_out_is_refused(change: dict[str, Any]) -> None:
    panel = make_panel("agile:guess_number", 6)
    check(panel)
    with pytest.raises(ValueError, match="was edited: it has hashes of the first observations, unless"):
        check(replace(panel, **change))
    check(make_panel("agile:archive", 3))


def test_an_environment_that_changes_while_it_is_played_is_refused(
    tmp_path: Path, embedded_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Learning, "played", False)
    made = ["panel", "make", f"{__name__}:Learning", "--episodes", "3", "--output", tmp_path / "panel.json"]
    assert run(*made) == 0
    play = ["eval", embedded_model, "--panel", tmp_path / "panel.json", *LIMITS, "--no_card", "--output_dir"]
    assert run(*play, tmp_path / "out") == 2
    assert "starts otherwise than in the panel" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/eval-*/results.json"))


def test_a_history_whose_source_changed_is_refused(
    played: dict[str, Path], module: Any, tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = "def keep(messages):\n    return messages\n"
    play = ["eval", embedded_model, "--panel", played["folder"] / "short.json", *LIMITS, "--no_card"]
    for name, source in {"a": HELPER + history, "b": HELPER + history.replace("messages\n", "messages[:1]\n")}.items():
        module(helper=source)
        assert run(*play, "--history", "panel_helper:keep", "--output_dir", tmp_path / name) == 0
    results = [next((tmp_path / name).glob("eval-*/results.json")) for name in "ab"]
    capsys.readouterr()
    assert run("eval", "--compare", *results) == 2
    assert "history_source={'source of panel_helper': '" in capsys.readouterr().err
    assert run("eval", "--compare", *results, "--allow_difference", "history_source") == 0


def test_equal_episodes_and_other_prompts_are_named(
    played: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(played["model"].read_text())
    (tmp_path / "copy.json").write_text(json.dumps(content))
    prompts = content["environments"][0]["policies"][0]["outcomes"]["prompt"]
    prompts[:2] = ["other", "other"]
    (tmp_path / "prompts.json").write_text(json.dumps(sealed(content)))
    capsys.readouterr()
    for other, same, apart in [
        ("copy.json", True, False),
        ("prompts.json", True, True),
        (played["adapter"], False, False),
    ]:
        assert run("eval", "--compare", played["model"], tmp_path / other) == 0
        shown = capsys.readouterr().out
        assert ("said the same in every episode" in shown) is same
        assert ("began 2 of 24 episodes with different tokens" in shown) is apart


def test_rows_of_a_data_set_that_changed_are_refused(
    module: Any, tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, panel = tmp_path / "rows.jsonl", tmp_path / "panel.json"
    write = lambda rows: file.write_text("".join(json.dumps(row) + "\n" for row in rows))  # noqa: E731
    write(ROWS)
    assert run("panel", "make", "panel_env:Counted", "--dataset_name", file, "--output", panel) == 0
    said = capsys.readouterr().out
    assert "6 episodes of panel_env:Counted" in said and "hashed of each start: observation, first step" in said
    play = ["eval", embedded_model, "--panel", panel, *LIMITS, "--no_card", "--output_dir", tmp_path / "out"]
    changed = [*ROWS[:4], {**ROWS[4], "answer": "5"}, ROWS[5]]
    for rows, expected in [
        (changed, "the row of episode 4 has the hash"),
        (ROWS[::-1], "All rows are there, in another order."),
        (ROWS[:5], "the row of episode 5 has the hash"),
    ]:
        write(rows)
        assert run(*play) == 2
        assert expected in capsys.readouterr().err
    write(ROWS)
    assert run(*play) == 0
    (results,) = (tmp_path / "out").glob("eval-*/results.json")
    content = json.loads(results.read_text())
    assert content["environments"][0]["policies"][0]["outcomes"]["row"] == content["panel"]["rows"]
    read = read_panel(str(panel))
    with pytest.raises(ValueError, match="The panel has rows: give --dataset_name"):
        check(read)
    with pytest.raises(ValueError, match="The panel has no rows: leave out"):
        check(make_panel("panel_env:Counted", 6), ROWS)


def test_an_environment_that_changed_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own source, what it inherits from or wraps, what it says, and the version of its library."""
    panel, wrapped = make_panel("panel_env:Counted", 5), make_panel("panel_env:Wrapped", 5)
    assert panel.repeats == ["observation", "first step"] and panel.different_starts == 5
    check(panel), check(wrapped)
    module(SOURCE.replace("> self.seed % 3", ">= self.seed % 3"))
    with pytest.raises(ValueError, match=r"source of panel_env was '[0-9a-f]{32}', and is"):
        check(panel)
    module(helper=HELPER + "# a comment")
    check(panel)  # the name is computed: the source does not say what is imported
    with pytest.raises(ValueError, match=r"source of panel_helper was '[0-9a-f]{32}', and is"):
        check(wrapped)
    module(SOURCE + "import panel_helper\n")
    imports = make_panel("panel_env:Counted", 5)
    module(SOURCE + "import panel_helper\n", HELPER + "# a comment")
    with pytest.raises(ValueError, match=r"source of panel_helper was '[0-9a-f]{32}', and is"):
        check(imports)
    monkeypatch.setenv("START", "A number")
    module()
    with pytest.raises(
        ValueError, match=r"Episode 0 \(seed \d+\) starts otherwise than in the panel, by its observation"
    ):
        check(panel)
    monkeypatch.delenv("START")
    module()
    check(panel)
    libraries = {"panel_env": ["panel-env"]}
    monkeypatch.setattr("agile_trainers.evaluation.panels._distributions", lambda: libraries)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with_library = make_panel("panel_env:Counted", 3)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.1")
    with pytest.raises(ValueError, match=r"version of panel-env was '1\.0', and is '1\.1'"):
        check(with_library)


def test_what_a_module_imports_from_its_project_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through packages, relative imports and functions, but no installed library, even one below the same folder."""
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "panel_package/__init__.py": "",
        "panel_package/games/__init__.py": "import numpy, installed\nfrom . import rules",
        "panel_package/games/rules.py": "def grade():\n    from ..grading import lax\n    import panel_rows.read, not_there",
        "panel_package/grading/__init__.py": "",
        "panel_package/grading/lax.py": "from panel_package import games",
        "panel_package/other.py": "",
        "panel_rows/read.py": "from agile_trainers.envs.questions.answers import math_match\nimport agile_trainers.types",
        "lib/site-packages/installed/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "lib/site-packages")
    importlib.import_module("panel_package.games")
    theirs = [
        "panel_package",
        *(f"panel_package.{one}" for one in ("games", "games.rules", "grading", "grading.lax")),
        "panel_rows.read",
    ]
    ours = [f"agile_trainers.envs.questions.{one}" for one in ("answers", "mathematics")]
    assert list(sources(["panel_package.games"])) == [f"source of {name}" for name in sorted([*theirs, *ours])]
    for name in [name for name in sys.modules if name.startswith("panel_")]:
        monkeypatch.delitem(sys.modules, name)


def test_another_class_under_the_same_id_is_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from panel_env import Counted, Unseeded

    monkeypatch.setattr("agile_trainers.envs.registry._registered", {"task": Counted})
    panel = make_panel("task", 4)
    monkeypatch.setattr("agile_trainers.envs.registry._registered", {"task": Unseeded})
    with pytest.raises(ValueError, match="class was 'panel_env:Counted', and is 'panel_env:Unseeded'"):
        check(panel)


def test_an_environment_without_fixed_episodes_makes_no_panel(module: Any) -> None:
    with pytest.raises(
        ValueError, match=r"panel_env:Unseeded ignores its seed: seed \d+ \(episode 0\) started otherwise"
    ):
        make_panel("panel_env:Unseeded", 4)
    with pytest.raises(ValueError, match="looks like a secret"):
        make_panel("agile:guess_number", 4, arguments={"key": "sk-proj-" + "a1B2" * 12})


def test_shipped_panels_are_those_that_are_made(tmp_path: Path) -> None:
    """If this fails after a change of a ready task: ``make panels``."""
    assert json.loads(SHIPPED.read_text()) == shipped()
    assert SHIPPED.stat().st_size < 2000
    assert run("panel", "make", "agile:guess_number", "--output", tmp_path / "panel.json") == 0
    assert read_panel("agile:guess_number") == read_panel(str(tmp_path / "panel.json"))


def test_a_shipped_panel_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agile_environments.courier.Courier.step", lambda self, action: ("", 1.0, True, False, {}))
    with pytest.raises(
        ValueError, match=r"agile:courier is not the task of this release: its panel has the hash [0-9a-f]{32}"
    ):
        read_panel("agile:courier")
    with pytest.raises(ValueError, match="no such file"):
        read_panel("agile:curier")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["MODEL", "--panel", "P", "--seed", "7"], "--seed has no effect with --panel, which decides it"),
        (["MODEL", "--panel", "P", "--environment", "agile:wordle"], "--environment has no effect with --panel"),
        (
            ["--compare", "A", "B", "--max_turns", "3"],
            "--max_turns has no effect with --compare, which reads files alone",
        ),
        (["MODEL", "--compare", "A", "B"], "MODEL has no effect with --compare"),
        (["MODEL", "--environment", "agile:wordle", "--allow_difference", "top_p"], "no effect without --compare"),
        (["MODEL"], "MODEL and --environment ID are required"),
        (["--compare", "A"], "needs at least two files of results, got 1"),
    ],
)
def test_options_without_effect_are_refused(
    embedded_model: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", *(str(embedded_model) if one == "MODEL" else one for one in arguments)]
    try:
        assert run(*command) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert said in capsys.readouterr().err
