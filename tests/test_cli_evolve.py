"""``agile-trainers evolve`` and the stage of a chain: what a file may say, a run, its winner, and taking it up again."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from chain_files import lineage
from launching import run
from rich.console import Console

from agile_trainers.cli.chain import command as chain
from agile_trainers.cli.chain.stages import parse_pipeline
from agile_trainers.cli.evolve.command import MemberProgress
from agile_trainers.cli.evolve.plan import read_population
from agile_trainers.cli.main import main
from agile_trainers.cli.yaml_files import YAMLFileError
from agile_trainers.populations import Lineage, LineageEvent, Round, Tournament

OPTIONS = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
    "num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_turns": 1,
    "max_new_tokens": 3, "num_eval_episodes": 4,
}  # fmt: skip
SEARCH: dict[str, Any] = {
    "algorithm": "grpo", "members": 2, "rounds": 2, "fitness": "return",
    "hyperparameters": {"learning_rate": {"low": "1e-3", "high": 1.0, "log": True}},
}  # fmt: skip


def file_of(model: Path, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "model": str(model), "environment": "chain_files:Talk",
        "environment_args": {"level": "easy"}, "lora": {"r": 2, "target_modules": r".*q_proj"},
        "options": {**OPTIONS, "max_steps": 2}, **copy.deepcopy(SEARCH),
    }  # fmt: skip


@pytest.fixture(scope="module")
def chained(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any], str]:
    """A chain of a population and a stage after it: its file, its rows and its output."""
    folder, screen = tmp_path_factory.mktemp("chain"), StringIO()
    pipeline = {
        **{name: value for name, value in file_of(embedded_model, folder / "chain").items() if name not in SEARCH},
        "options": OPTIONS, "evaluation": {"num_eval_episodes": 3},
        "stages": [
            {"evolve": {**SEARCH, "options": {"max_steps": 2}}, "name": "search"},
            {"algorithm": "reinforce", "max_steps": 1, "learning_rate": "1e-2", "save_strategy": "no"},
        ],
    }  # fmt: skip
    pipeline["options"] = {name: value for name, value in OPTIONS.items() if name != "num_generations"}
    pipeline["stages"][0]["evolve"]["options"]["num_generations"] = 2
    rows = chain.run_pipeline(parse_pipeline(pipeline), Console(file=screen, width=160))
    return pipeline, rows, screen.getvalue()


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_the_winner_goes_on_to_the_next_stage(chained: Any) -> None:
    pipeline, rows, printed = chained
    stage = Path(pipeline["output_dir"]) / "search"
    found = Lineage.read(stage / "population")
    assert found.finished and found.members == [0, 1]
    assert weights(stage / "winner") == weights(stage / "population" / "best")
    assert [(row["name"], row["algorithm"]) for row in rows[1:]] == [
        ("search", "evolve grpo"), ("reinforce", "reinforce"),
    ]  # fmt: skip
    assert rows[1]["folder"] == str(stage / "winner") and rows[1]["evaluation"]["episodes"] == 3
    assert lineage(stage.parent / "reinforce") == ["Multi-turn REINFORCE", "Multi-turn GRPO"]
    parent = json.loads((stage.parent / "reinforce" / "agile_trainers.json").read_text())["parent"]
    assert "winner" in json.dumps(parent)
    assert "round 1 of 2" in printed and "round 2 of 2" in printed and "stopped" in printed

    again = chain.run_pipeline(parse_pipeline(pipeline), Console(file=StringIO()))
    assert not any(row["trained"] for row in again) and again[1]["evaluation"] == rows[1]["evaluation"]
    changed = copy.deepcopy(pipeline)
    changed["stages"][0]["evolve"]["members"] = 3
    with pytest.raises(chain.PipelineError, match=r"other options:\n  evolve\.members: 2 -> 3\n"):
        chain.run_pipeline(parse_pipeline(changed), Console(file=StringIO()))


def test_the_command_takes_a_population_up_where_it_was_left(
    chained: Any, embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The population of the chain is the file's own: its rounds are read, and the winner is the same."""
    pipeline, *_ = chained
    folder = Path(pipeline["output_dir"]) / "search" / "population"
    path = tmp_path / "population.yaml"
    path.write_text(yaml.safe_dump(file_of(embedded_model, folder)), encoding="utf-8")
    trained = {one: one.stat().st_mtime_ns for one in folder.glob("member-*/**/*.safetensors")}
    assert main(["evolve", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    found = Lineage.read(folder)
    best, won = found.best, found.winner
    assert won is not None
    assert "2 members of grpo" in said and f"finished, the best is member {best}" in said and "0.001 to 1" in said
    assert main(["evolve", str(path)]) == 0
    said = capsys.readouterr().out
    assert "(done before)" in said and f"The winner is member {won.member} after {won.steps} updates: return " in said
    assert f"Its policy is in {folder / 'winner'}." in said and f"agile-trainers view {folder}" in said
    (command,) = re.findall(r"agile-trainers eval .*", said)
    assert command.endswith("""--environment chain_files:Talk --environment_args '{"level": "easy"}' --episodes 500""")
    assert trained and all(one.stat().st_mtime_ns == time for one, time in trained.items())
    assert weights(folder / "winner") == weights(folder.parent / "winner")

    path.write_text(yaml.safe_dump({**file_of(embedded_model, folder), "members": 3}), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["evolve", str(path)])
    assert "holds another population: members: 2 -> 3." in capsys.readouterr().err


def change(content: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """``options.max_steps`` set to a value; None removes it."""
    *parents, last = place.split(".")
    where: Any = content
    for key in parents:
        where = where[key]
    if value is None:
        del where[last]
    else:
        where[last] = value
    return content


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("memberz", 3, "'memberz'.*members"),
        ("model", None, "`model` is missing"),
        ("algorithm", "gpro", "`algorithm`.*'gpro'.*grpo"),
        ("hyperparameters", None, "`hyperparameters` is missing"),
        ("hyperparameters.learning_rate", 1e-3, r"'learning_rate' must be a range .*low.*0.001"),
        ("hyperparameters.learning_rate", {"low": 1}, "'learning_rate' must be a range"),
        ("hyperparameters.learning_rate.lgo", True, "'learning_rate' knows no 'lgo'.*log"),
        ("hyperparameters.learning_rate.low", "small", "'learning_rate'.*low.*'small'"),
        ("hyperparameters.learning_rate", {"low": None, "high": 1}, "'learning_rate'.*low must be a number, got None"),
        ("hyperparameters.learning_rate.high", 1e-4, "'learning_rate'.*0 < low < high"),
        ("rounds", "two", "`rounds`.*'two'"),
        ("rounds", [1, "2"], "`rounds`"),
        ("strategy", "genetic", "`strategy` must be one of halving, tournament.*'genetic'"),
        ("strategy", {"halving": {"size": 3}}, "'halving' knows no 'size'"),
        ("strategy", {"tournament": {"size": 0}}, "'tournament'.*size"),
        ("fitness", "loss", "`fitness` must be return or success.*'loss'"),
        ("fitness", "chain_files:none", "fitness 'chain_files:none'.*chain_files has no 'none'"),
        ("members", "many", "members.*'many'"),
        ("options.max_turnz", 2, "`options` knows no 'max_turnz'.*max_turns"),
        ("dataset", "gone.jsonl", "there is no file gone.jsonl"),
        ("eval_dataset_args", {"count": 3}, "`eval_dataset_args` has no effect without `eval_dataset`"),
        ("environment", "agile:gess_number", "Unknown environment"),
        ("hyperparameters.max_turns", {"low": 1, "high": 2}, "hyperparameters: max_turns is the same for all members"),
        ("seed", -1, "seed must not be negative, got -1"),
        ("members", 1, "members must be at least 2, got 1"),
        ("rounds", 9, "rounds must be between 1 and 2"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_trained(
    embedded_model: Path, tmp_path: Path, place: str, value: Any, message: str
) -> None:
    path = tmp_path / "population.yaml"
    path.write_text(yaml.safe_dump(change(file_of(embedded_model, tmp_path / "out"), place, value)), encoding="utf-8")
    with pytest.raises(YAMLFileError, match=message) as error:
        read_population(path)
    assert str(path) in str(error.value) and not (tmp_path / "out").exists()


def test_a_file_says_everything_that_python_can(embedded_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "population.yaml"
    content = file_of(embedded_model, tmp_path / "out") | {
        "strategy": {"tournament": {"size": 3, "mutation_probability": 1}}, "fitness": "chain_files:pairs", "rounds": [1],
        "max_episodes": "100", "max_hours": 0.5, "seed": 7, "dataset": "chain_files:pairs", "dataset_args": {"count": 30},
        "eval_dataset": "chain_files:pairs", "eval_dataset_args": {"count": 2},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    plan = read_population(path).plan
    assert plan.search["strategy"] == Tournament(size=3, mutation_probability=1.0)
    assert plan.search["fitness"].__name__ == "pairs" and plan.search["rounds"] == [1]
    assert (plan.search["max_episodes"], plan.search["max_hours"], plan.search["seed"]) == (100, 0.5, 7)
    assert plan.hyperparameters["learning_rate"].low == 1e-3 and plan.hyperparameters["learning_rate"].log is True
    assert (plan.dataset, plan.dataset_args, plan.config.max_steps) == ("chain_files:pairs", {"count": 30}, 2)
    assert (plan.eval_dataset, plan.eval_dataset_args) == ("chain_files:pairs", {"count": 2})
    assert plan.lora is not None and plan.lora.r == 2


def test_a_range_of_whole_numbers(embedded_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "population.yaml"
    content = file_of(embedded_model, tmp_path / "out")
    content["hyperparameters"] = {"num_iterations": {"low": 1, "high": 3}}
    content["options"] = {**content["options"], "max_steps": 12}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    found = read_population(path)
    made = found.plan.make(found.model, found.environment, found.plan.lora, load=False)
    assert made._space.whole == {"num_iterations"}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"evolve": SEARCH, "algorithm": "grpo"}, "stage 1 with `evolve` knows no 'algorithm'"),
        ({"evolve": {**SEARCH, "model": "x"}}, "'evolve', `evolve` knows no 'model'"),
        ({"evolve": {**SEARCH, "members": 1}}, "'evolve'.*members must be at least 2"),
        ({"evolve": {}}, "stage 1, `evolve`: `algorithm` must be one of"),
    ],
)
def test_a_stage_that_cannot_be_run_is_refused(embedded_model: Path, tmp_path: Path, stage: Any, message: str) -> None:
    content = {name: value for name, value in file_of(embedded_model, tmp_path).items() if name not in SEARCH}
    content["options"] = {**OPTIONS, "max_steps": 2}
    with pytest.raises(YAMLFileError, match=message):
        parse_pipeline({**content, "stages": [stage]})


def test_a_population_takes_the_adapter_of_an_earlier_stage_with_settings_of_its_own(
    embedded_model: Path, tmp_path: Path
) -> None:
    content = {name: value for name, value in file_of(embedded_model, tmp_path).items() if name not in SEARCH}
    first = {"algorithm": "reinforce", "max_steps": 1, "lora": content.pop("lora")}
    content["options"] = {name: value for name, value in OPTIONS.items() if name != "num_generations"}
    search = {"evolve": {**SEARCH, "options": {"max_steps": 2, "num_generations": 2}}}
    assert [one.name for one in parse_pipeline({**content, "stages": [first, search]}).stages] == [
        "reinforce",
        "evolve",
    ]
    with pytest.raises(YAMLFileError, match=r"'evolve'.*Members share one frozen base"):
        parse_pipeline({**content, "stages": [search]})


def test_a_stage_that_its_hours_ended_goes_on_with_more(chained: Any, tmp_path: Path) -> None:
    """What the stages after it were trained from is then another run."""
    pipeline = {**copy.deepcopy(chained[0]), "output_dir": str(tmp_path)}
    shutil.copytree(chained[0]["output_dir"], tmp_path, dirs_exist_ok=True)
    path, options = tmp_path / "search" / "population" / "lineage.json", pipeline["stages"][0]["evolve"]

    def state_with(limit: float | None, recorded: float, rounds: int) -> Any:
        lineage = json.loads(path.read_text())
        lineage["settings"]["max_hours"] = recorded
        lineage["settings"]["rounds"] = list(range(rounds))
        path.write_text(json.dumps(lineage))
        options["max_hours"] = limit
        return chain._checked(parse_pipeline({**pipeline, "stages": pipeline["stages"][:1]}))[0]

    there = json.loads((tmp_path / "search" / "stage.json").read_text())
    for limit, recorded, rounds in ((2.0, 1.0, 3), (2e-9, 1e-9, 3), (2.0, 1e-9, 2), (1e-9, 1e-9, 3)):
        assert state_with(limit, recorded, rounds) == there, "more hours would change nothing"
    for limit in (2.0, None):
        state = state_with(limit, 1e-9, 3)
        assert not state["finished"] and state["id"] != there["id"]
    with pytest.raises(chain.PipelineError, match="reinforce was trained from an earlier run of the previous stage"):
        chain._checked(parse_pipeline(pipeline))


def test_a_chain_in_several_processes_takes_no_population(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {name: value for name, value in file_of(embedded_model, tmp_path).items() if name not in SEARCH}
    content["options"] = {**OPTIONS, "max_steps": 2}
    monkeypatch.setattr("agile_trainers.cli.chain.stages._stage", lambda raw, *_: parsed)
    parsed = type("Stage", (), {"population": object(), "name": "evolve", "lora": None})()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(YAMLFileError, match=r"'evolve': .*agile-trainers evolve"):
        parse_pipeline({**content, "stages": [{"evolve": SEARCH}]})


def test_the_table_of_a_round() -> None:
    values, moved = {"learning_rate": 1e-4, "num_iterations": 2}, {"learning_rate": 8e-5, "num_iterations": 2}
    trained = [
        LineageEvent(1, 1, "trained", values, steps=10, fitness=0.5, standard_error=0.125),
        LineageEvent(1, 0, "trained", values, steps=10, fitness=0.25),
        LineageEvent(1, 2, "failed", values, reason="NonFiniteError: NaN\nmore"),
    ]
    decided = [
        LineageEvent(1, 0, "stopped", values, reason="-0.25 ± 0.1 against member 1"),
        LineageEvent(1, 1, "mutated", moved, changes={"learning_rate": (1e-4, 8e-5)}),
        LineageEvent(1, 3, "born", moved, parent=1, changes={"learning_rate": (1e-4, 8e-5)}, steps=10),
    ]
    done, screen = Round(1, trained, decided, 1280, 3725.0, False, 4), StringIO()
    MemberProgress(Console(file=screen, width=80), "success").show(done)
    title, header, _, *rows = [line.rstrip() for line in screen.getvalue().splitlines() if line.strip()]
    assert title.split() == ["round", "1", "of", "4,", "1,280", "episodes,", "1:02:05"]
    assert header.split() == ["member", "learning_rate", "num_iterations", "steps", "success", "then"]
    assert [re.sub(r"\s+", " ", row.strip()) for row in rows] == [
        "1 0.0001 2 10 0.500 ± 0.125 mutated",
        "0 0.0001 2 10 0.250 stopped",
        "2 0.0001 2 - failed",
        "3 8e-05 2 10 copy of 1",
        "member 2, failed: NonFiniteError: NaN",
        "member 0, stopped: -0.25 ± 0.1 against member 1",
        "member 1, mutated: learning_rate 0.0001 to 8e-05",
        "member 3, copy of 1: learning_rate 0.0001 to 8e-05",
    ]


def test_a_strategy_by_its_name_has_its_defaults(embedded_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "population.yaml"
    path.write_text(yaml.safe_dump({**file_of(embedded_model, tmp_path), "strategy": "tournament"}), encoding="utf-8")
    file = read_population(path)
    made = file.plan.make(file.model, file.environment, file.plan.lora)
    assert made.lineage.settings["strategy"] == vars(Tournament())


def without_times(folder: Path) -> Any:
    content = json.loads((folder / "lineage.json").read_text(encoding="utf-8"))
    for event in content["events"]:
        del event["seconds"]
    return content


@pytest.mark.slow
def test_two_processes_divide_the_members(chained: Any, embedded_model: Path, tmp_path: Path) -> None:
    """The result is that of the chain's population, which one process trained."""
    path = tmp_path / "population.yaml"
    path.write_text(yaml.safe_dump(file_of(embedded_model, tmp_path / "out")), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = run([*command, "agile_trainers.cli.main", "evolve", str(path)], timeout=600, cwd=tmp_path,
               env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    pipeline, *_ = chained
    alone = Path(pipeline["output_dir"]) / "search" / "population"
    assert without_times(tmp_path / "out")["events"] == without_times(alone)["events"]
    assert weights(tmp_path / "out" / "winner") == weights(alone.parent / "winner")
    assert done.stdout.count("The winner is member") == 1


@pytest.mark.slow
def test_the_example_of_populations(tmp_path: Path) -> None:
    """A small one; run again it trains nothing, and ends with the same policy."""
    script = Path(__file__).parents[1] / "examples" / "population_guess_number.py"
    options = ["--members", "3", "--rounds", "2", "--steps", "2", "--sft_steps", "5", "--eval_episodes", "24"]
    command = [sys.executable, str(script), "--output_dir", str(tmp_path), *options]
    once = subprocess.run(command, check=True, capture_output=True, text=True)
    first = weights(tmp_path / "winner")
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (
        "(done before)" in again.stdout and "(done before)" not in once.stdout and weights(tmp_path / "winner") == first
    )
    assert "wins" in once.stdout
