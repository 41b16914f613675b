"""``agile-trainers chain``: what a file may say, stages that carry an adapter on, and runs that are taken up again."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from cards import cards_of
from chain_files import lineage, pairs
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, TrainerCallback

from agile_trainers.checkpoints import stopping
from agile_trainers.cli.chain import command as chain
from agile_trainers.cli.chain.stages import parse_pipeline, read_pipeline, supervised_rows
from agile_trainers.cli.main import main
from agile_trainers.cli.run_files import stage_rows
from agile_trainers.cli.yaml_files import YAMLFileError
from agile_trainers.populations import PopulationError
from agile_trainers.records.reader import open_records
from agile_trainers.types import Image, StopReason, Trajectory, Turn

IDS = torch.arange(3, 43).view(2, 20)
QUIET = Console(file=StringIO())


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def load(base: Path, folder: Path) -> torch.Tensor:
    return logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))


def adapter(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_a_chain_carries_the_adapter_on(pipeline: dict, embedded_model: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "pipeline.yaml", tmp_path / "chain"
    pipeline["options"]["logging_steps"] = 1
    path.write_text(yaml.safe_dump(pipeline))
    seen: dict[str, torch.Tensor] = {}
    screen = StringIO()
    rows = chain.run_pipeline(
        read_pipeline(path),
        Console(file=screen),
        after_stage=lambda stage, trainer: seen.update({stage.name: logits_of(trainer.model)}),
    )
    headers = [line.split() for line in screen.getvalue().splitlines() if line.lstrip().startswith("step ")]
    titles = (("accuracy", "loss"), ("accuracy", "margin", "loss"), ("return", "turns"), ("return", "turns"))
    assert len(headers) == 4 and all(set(title) < set(header) for title, header in zip(titles, headers))
    names = ["sft", "dpo", "grpo", "ppo-after"]
    assert [row["name"] for row in rows] == ["start", *names] and all(row["trained"] for row in rows[1:])
    assert all(row["evaluation"]["episodes"] == 3 for row in rows)
    for name in names:
        assert torch.equal(load(embedded_model, output / name), seen[name])
    for before, after in pairwise(names):
        assert not torch.equal(seen[before], seen[after])
        assert (load(embedded_model, output / after / "ref") - seen[before]).abs().max() <= 2e-6
    assert json.loads((output / "ppo-after" / "adapter_config.json").read_text())["r"] == 8
    assert (output / "ppo-after" / "critic").is_dir()
    for stage in ("sft", "dpo"):
        assert not list((output / stage).rglob("training_args.bin")), "a pickle of TRL's options, tokens included"
    assert lineage(output / "ppo-after") == ["Multi-turn PPO", "Multi-turn GRPO", "DPO", "SFT"]
    assert json.loads((output / "chain.json").read_text())["stages"] == rows

    cards = cards_of(output)
    assert {
        "sft",
        "sft/checkpoint-1",
        "dpo/ref",
        "dpo/checkpoint-2",
        "grpo/checkpoint-1",
        "ppo-after/critic",
    } < cards.keys()
    assert all("trained with" in card for name, card in cards.items() if not name.endswith(("/ref", "/critic")))
    assert "trained with SFT on `games.jsonl`: 1 updates" in cards["sft/checkpoint-1"]
    assert "| this model | DPO |" in cards["dpo"] and "| `sft` | `SFT` |" in cards["dpo"]
    assert "share of pairs in the right order and loss" in cards["dpo"] and str(tmp_path) not in "".join(cards.values())

    # Again: nothing is done, and the table is the same.
    files = {file: file.stat().st_mtime_ns for file in output.rglob("*.safetensors")}
    again = chain.run_pipeline(read_pipeline(path), QUIET)
    assert [row["evaluation"] for row in again] == [row["evaluation"] for row in rows]
    assert not any(row["trained"] for row in again)
    assert files == {file: file.stat().st_mtime_ns for file in output.rglob("*.safetensors")}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param("sft", marks=SLOW), "dpo", pytest.param("grpo", marks=SLOW)])
def test_a_stage_that_was_interrupted_ends_where_it_would_have(pipeline: dict, tmp_path: Path, name: str) -> None:
    """Killed after its first checkpoint, and taken up again: the same adapter, bit for bit."""
    stages = pipeline["stages"]
    number = [stage.get("name", stage["algorithm"]) for stage in stages].index(name)
    whole = {**pipeline, "stages": [{**stages[0], "max_steps": 1}, stages[number]] if number else stages[:1]}
    cut = copy.deepcopy(whole) | {"output_dir": str(tmp_path / "cut")}
    chain.run_pipeline(parse_pipeline(whole), QUIET)

    # What a kill leaves: no final folder, no second checkpoint.
    shutil.copytree(tmp_path / "chain", tmp_path / "cut")
    folder = tmp_path / "cut" / name
    shutil.rmtree(folder / "checkpoint-2")
    for path in (*folder.glob("adapter_*"), folder / "evaluation.json"):
        path.unlink()
    for stage in (tmp_path / "cut").glob("*/stage.json"):
        state = json.loads(stage.read_text())
        finished = state["finished"] and stage.parent.name != name
        stage.write_text(json.dumps({**state, "finished": finished}))
    rows = chain.run_pipeline(parse_pipeline(cut), QUIET)
    assert [row["trained"] for row in rows] == [False] * (len(rows) - 1) + [True]
    assert adapter(folder) == adapter(tmp_path / "chain" / name)
    assert adapter(folder) != adapter(folder / "checkpoint-1")


def test_a_stage_killed_after_its_last_step_takes_no_further_one(pipeline: dict, tmp_path: Path) -> None:
    """`Trainer` takes one more where its last step is not the last of an epoch."""
    only = parse_pipeline({**pipeline, "stages": pipeline["stages"][:1]})
    chain.run_pipeline(only, QUIET)
    folder = tmp_path / "chain" / "sft"
    trained, state = adapter(folder), json.loads((folder / "stage.json").read_text())
    for path in (*folder.glob("adapter_*"), folder / "evaluation.json"):
        path.unlink(missing_ok=True)
    (folder / "stage.json").write_text(json.dumps({**state, "finished": False}))
    *_, row = chain.run_pipeline(only, QUIET)
    assert row["trained"] and adapter(folder) == trained == adapter(folder / "checkpoint-2")
    assert not (folder / "checkpoint-3").exists()


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_stage_whose_time_is_over_ends_the_chain_which_the_same_command_continues(
    pipeline: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(stopping.logger, "warning", lambda text, *values, **_: said.append(text % values))
    (given,) = (stage for stage in pipeline["stages"] if stage["algorithm"] == algorithm)
    first = {**given, "name": "first", "max_wall_seconds": 1e-9}
    chained = pipeline | {"stages": [first, {**first, "name": "second", "max_wall_seconds": None}]}
    rows = chain.run_pipeline(parse_pipeline(chained), QUIET)
    assert [row["name"] for row in rows] == ["start"] and not (
        tmp_path / "chain" / "first" / "adapter_config.json"
    ).exists()
    assert [path.name for path in (tmp_path / "chain" / "first").glob("checkpoint-*")] == ["checkpoint-1"]
    assert said == [
        "max_wall_seconds=1e-09 is over: stopped at step 1; running the same again goes on from there, with as much time "
        "again."
    ]
    first["max_wall_seconds"] = 1e-8  # its last step
    rows = chain.run_pipeline(parse_pipeline(chained), QUIET)
    assert [row["name"] for row in rows] == ["start", "first", "second"]


def test_sigterm_in_a_stage_of_trls_trainers_saves_a_checkpoint(
    pipeline: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    said: list[str] = []
    monkeypatch.setattr(chain, "Started", Signalled)
    monkeypatch.setattr(stopping.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(stopping.logger, "warning", lambda text, *values, **_: said.append(text % values))
    parsed = parse_pipeline(pipeline | {"stages": [{**pipeline["stages"][0], "save_steps": 500}]})
    with pytest.raises(SystemExit) as stop:
        chain._train(parsed, parsed.stages[0], parsed.model, QUIET, "table")
    assert stop.value.code == 143 and (tmp_path / "chain/sft/checkpoint-1/complete.json").is_file()
    assert said[-1] == "Terminated: stopped at step 1; running the same again goes on from there."


def test_a_damaged_cache_of_an_evaluation_is_made_anew(
    pipeline: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    played = SimpleNamespace(metrics={"return": 1.0, "episodes": 3.0, "turns": 2.0})
    monkeypatch.setattr(chain, "evaluate_policy", lambda *args, **kwargs: played)
    monkeypatch.setattr(chain.logger, "warning", lambda text, *values: said.append(text % values))
    pipeline["options"]["log_rollouts"] = 0
    parsed, scores = parse_pipeline(pipeline), {"return": 1.0, "episodes": 3.0}
    path = tmp_path / "evaluation.json"
    assert chain.evaluate_stage(parsed, "model", tmp_path, {}) == scores and not said
    whole = json.loads(path.read_text())
    monkeypatch.setattr(chain, "evaluate_policy", lambda *args, **kwargs: 1 / 0)
    assert chain.evaluate_stage(parsed, "model", tmp_path, {}) == scores
    monkeypatch.setattr(chain, "evaluate_policy", lambda *args, **kwargs: played)
    for metrics in (None, {"return": "1.0"}, {"return": 1.0, "environments": [1]}):
        path.write_text(json.dumps({**whole, "metrics": metrics}) if metrics else "")
        assert chain.evaluate_stage(parsed, "model", tmp_path, {}) == scores and json.loads(path.read_text()) == whole
        assert str(path) in said[-1] and said[-1].endswith(" The evaluation is played again.")
    assert len(said) == 3


def test_a_damaged_checkpoint_does_not_restart_its_stage_without_a_word(pipeline: dict, tmp_path: Path) -> None:
    """One run, and what a kill or a bad disk may leave of it."""
    cut = {**pipeline, "stages": pipeline["stages"][:1]}
    folder = tmp_path / "chain" / "sft"
    chain.run_pipeline(parse_pipeline(cut), QUIET)
    state = json.loads((folder / "stage.json").read_text())
    (folder / "stage.json").write_text(json.dumps({**state, "finished": False}))
    last = folder / "checkpoint-2" / "adapter_model.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    said = StringIO()
    assert chain.resume_point(folder, Console(file=said, width=500)) == str(folder / "checkpoint-1")
    assert "Passed over: " in said.getvalue() and "adapter_model.safetensors has" in said.getvalue()
    assert f"Going on from {folder / 'checkpoint-1'}." in said.getvalue()

    (folder / "checkpoint-1" / "optimizer.pt").unlink()
    before = adapter(folder)
    with pytest.raises(
        chain.PipelineError,
        match=r"no checkpoint of the stage is complete(.|\n)*optimizer.pt is missing(.|\n)*remove the checkpoints",
    ):
        chain.run_pipeline(parse_pipeline(cut), QUIET)
    assert adapter(folder) == before, "nothing was trained"

    # A kill while the first checkpoint is saved leaves no marker: there is nothing to go on from, and it is said.
    shutil.rmtree(folder / "checkpoint-2")
    (folder / "checkpoint-1" / "complete.json").unlink()
    assert chain.resume_point(folder, Console(file=said, width=500)) is None
    assert "its first checkpoint was not finished; the stage begins again" in said.getvalue()
    shutil.rmtree(folder / "checkpoint-1")
    said = StringIO()
    assert chain.resume_point(folder, Console(file=said)) is None and not said.getvalue()


def test_what_was_trained_with_other_options_is_not_taken_for_finished(pipeline: dict, tmp_path: Path) -> None:
    del pipeline["stages"][2:]
    pipeline["stages"] = [stage | {"max_steps": 1} for stage in pipeline["stages"]]
    chain.run_pipeline(parse_pipeline(pipeline), QUIET)
    changed = copy.deepcopy(pipeline)
    changed["stages"][0]["learning_rate"], changed["lora"]["r"] = 0.5, 2
    with pytest.raises(chain.PipelineError) as error:
        chain.run_pipeline(parse_pipeline(changed), QUIET)
    assert "  learning_rate: 0.01 -> 0.5" in str(error.value) and "  lora: {'r': 4" in str(error.value)

    # The first stage again: what was built on the old one does not fit any more.
    shutil.rmtree(tmp_path / "chain" / "sft")
    with pytest.raises(chain.PipelineError, match="dpo was trained from an earlier run of the previous stage"):
        chain.run_pipeline(parse_pipeline(pipeline), QUIET)

    # Another way to evaluate is none to train.
    shutil.rmtree(tmp_path / "chain" / "dpo")
    first = chain.run_pipeline(parse_pipeline(pipeline), QUIET)
    pipeline["evaluation"]["num_eval_episodes"] = 2
    second = chain.run_pipeline(parse_pipeline(pipeline), QUIET)
    assert [row["trained"] for row in first] == [False, True, True] and not any(row["trained"] for row in second)
    assert [row["evaluation"]["episodes"] for row in second] == [2, 2, 2]


def finished(pipeline: dict) -> list[dict]:
    """Write the ``stage.json`` that the stages of a file leave, without training them, and return their contents."""
    parsed, states, parent = parse_pipeline(pipeline), [], None
    for stage in parsed.stages:
        state = {"id": f"run of {stage.name}", "parent": parent, "finished": True}
        states.append(state | {"made_of": chain.shown_made_of(parsed, stage)})
        record(pipeline, stage.name, states[-1])
        parent = state["id"]
    return states


def record(pipeline: dict, stage: str, state: dict) -> None:
    folder = Path(pipeline["output_dir"]) / stage
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stage.json").write_text(json.dumps(state))


def test_a_stages_lora_is_the_same_in_every_process(pipeline: dict) -> None:
    """`target_modules` becomes a set."""
    stage = pipeline["stages"][0]
    stage["lora"] = {"r": 4, "target_modules": ["v_proj", "q_proj"], "init_lora_weights": "gaussian"}
    del pipeline["stages"][1:], pipeline["lora"]
    (state,) = finished(pipeline)
    assert {name: value for name, value in state["made_of"].items() if "lora" in name} == {
        "stage_lora.r": 4, "stage_lora.target_modules": ["q_proj", "v_proj"], "stage_lora.init_lora_weights": "gaussian",
    }  # fmt: skip
    record(pipeline, "sft", state)
    assert [one and one["id"] for one in chain._checked(parse_pipeline(pipeline))] == ["run of sft"]
    for name, value, told in (
        ("r", 2, "r: 4 -> 2"), ("init_lora_weights", "orthogonal", "init_lora_weights: 'gaussian' -> 'orthogonal'"),
    ):  # fmt: skip
        with pytest.raises(chain.PipelineError, match=rf"options:\n  stage_lora\.{told}\nRestore"):
            chain._checked(parse_pipeline(change(copy.deepcopy(pipeline), f"stages.0.lora.{name}", value)))


def test_a_number_is_the_same_however_it_is_written(pipeline: dict) -> None:
    """PyYAML reads ``1e-3`` as text."""
    search = {
        "algorithm": "grpo",
        "members": 2,
        "rounds": 1,
        "hyperparameters": {"learning_rate": {"low": "1e-5", "high": 0.1}},
    }
    pipeline["stages"] = [
        {**pipeline["stages"][0], "learning_rate": "1e-3"},
        {"evolve": {**search, "options": {"max_steps": 2, "weight_decay": "1e-3"}}},
    ]
    states = finished(pipeline)
    assert states[0]["made_of"]["learning_rate"] == states[1]["made_of"]["weight_decay"] == 0.001
    again = copy.deepcopy(pipeline)
    again["stages"][0]["learning_rate"] = again["stages"][1]["evolve"]["options"]["weight_decay"] = 0.001
    again["stages"][1]["evolve"]["hyperparameters"]["learning_rate"]["low"] = 0.00001
    assert [one and one["id"] for one in chain._checked(parse_pipeline(again))] == ["run of sft", "run of evolve"]
    for one in (1e-4, "1e-4"):
        with pytest.raises(chain.PipelineError, match=r"options:\n  learning_rate: 0\.001 -> 0\.0001\n"):
            chain._checked(parse_pipeline(change(copy.deepcopy(pipeline), "stages.0.learning_rate", one)))
    for place in ("stages.0.run_name", "stages.1.evolve.options.run_name", "stages.1.evolve.options.hub_revision"):
        text = change(copy.deepcopy(pipeline), place, "007")
        finished(text)
        assert chain._checked(parse_pipeline(change(copy.deepcopy(text), place, "007")))
        with pytest.raises(chain.PipelineError, match=r"options:\n  .*: another value\n"):
            chain._checked(parse_pipeline(change(text, place, "7")))


def test_a_stage_after_other_stages_is_not_taken_for_finished(pipeline: dict) -> None:
    """The first stage is removed from the file, or another one comes before it."""
    finished(pipeline)
    with pytest.raises(chain.PipelineError, match=r"chain/dpo was trained .*after other stages"):
        chain._checked(parse_pipeline({**pipeline, "stages": pipeline["stages"][1:]}))
    new = {**pipeline["stages"][0], "name": "new"}
    with pytest.raises(chain.PipelineError, match=r"chain/sft was trained .*after other stages"):
        chain._checked(parse_pipeline({**pipeline, "stages": [new, *pipeline["stages"]]}))


def test_rows_that_were_edited_are_not_those_of_the_stage(pipeline: dict, tmp_path: Path) -> None:
    del pipeline["stages"][1:]
    finished(pipeline)
    (tmp_path / "games.jsonl").write_text((tmp_path / "games.jsonl").read_text().partition("\n")[0])
    with pytest.raises(chain.PipelineError, match=r"options:\n  dataset_content: another value\n"):
        chain._checked(parse_pipeline(pipeline))


@pytest.mark.parametrize("offline", [False, True])
def test_a_stage_that_pushes_is_pushed_at_its_end(
    pipeline: dict, tmp_path: Path, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``save_strategy: "no"`` too. Offline it trains, and a warning says that nothing is pushed."""
    said: list[str] = []
    monkeypatch.setattr("agile_trainers.checkpoints.hub.logger.warning", lambda text, *v: said.append(text % v))
    pushes = {
        "push_to_hub": True,
        "hub_model_id": "me/sft",
        "save_strategy": "no",
        "max_steps": 1,
        "hub_token": "hf_fine",
    }
    parsed = parse_pipeline({**pipeline, "stages": [pipeline["stages"][0] | pushes]})
    folder = tmp_path / "chain" / "sft"
    folder.mkdir(parents=True)
    pushed: list[set[str]] = []
    if not offline:
        monkeypatch.setattr("agile_trainers.checkpoints.hub.is_offline_mode", lambda: False)
        monkeypatch.setattr("agile_trainers.checkpoints.hub.make_repository", lambda *given: given[3]())
        made = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
        monkeypatch.setattr("transformers.trainer.hf_api", lambda: made)
        monkeypatch.setattr(
            "agile_trainers.checkpoints.hub.upload_folder",
            lambda *, repo_id, folder_path, **_: pushed.append({repo_id, *(one.name for one in folder_path.iterdir())}),
        )
    trainer = chain._train(parsed, parsed.stages[0], parsed.model, QUIET, "table")
    assert trainer.hub_model_id == (None if offline else "me/sft") and (folder / "README.md").is_file()
    told = ["HF_HUB_OFFLINE=1: nothing is pushed to me/sft. Push the run later with trainer.push_to_hub()."]
    assert said == told * offline and len(pushed) == (not offline)
    assert offline or {"me/sft", "adapter_model.safetensors", "agile_trainers.json", "README.md"} < pushed[0]


def test_a_foreign_folder_is_not_touched(pipeline: dict, tmp_path: Path) -> None:
    folder = tmp_path / "chain" / "dpo"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(
        chain.PipelineError, match=r"dpo is not empty and is not a stage.*, restore the file, or remove"
    ):
        chain.run_pipeline(parse_pipeline(pipeline), QUIET)
    assert [path.name for path in (tmp_path / "chain").rglob("*")] == ["dpo", "thesis.txt"]


def test_a_whole_model_is_carried_on_too(pipeline: dict, tmp_path: Path) -> None:
    del pipeline["lora"], pipeline["stages"][3], pipeline["stages"][1]
    pipeline["stages"] = [stage | {"max_steps": 1} for stage in pipeline["stages"]]
    chain.run_pipeline(parse_pipeline(pipeline), QUIET)
    for name in ("sft", "grpo"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "chain" / name)
        assert not (tmp_path / "chain" / name / "adapter_config.json").exists()
    assert lineage(tmp_path / "chain" / "grpo") == ["Multi-turn GRPO", "SFT"]


def change(pipeline: dict, path: str, value: Any) -> dict:
    """``stages.1.learning_rate`` set to a value; None removes it."""
    *parents, last = path.split(".")
    place: Any = pipeline
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    if value is None:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return pipeline


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("enviroment", "x", "'enviroment'.*environment"),
        ("model", None, "`model` is missing"),
        ("stages", "sft", "`stages` must be a list, got 'sft'"),
        ("stages.0", "sft", "stage 1.*mapping.*'sft'"),
        ("stages.2.algorithm", "gpro", "stage 3.*`algorithm`.*'gpro'.*grpo"),
        ("stages.2.max_turnz", 3, "'grpo'.*'max_turnz'.*max_turns"),
        ("stages.0.max_turns", 3, "stage 'sft' knows no 'max_turns'"),
        ("stages.1.learning_rate", "fast", "'dpo'.*learning_rate.*'fast'"),
        ("stages.2.max_turns", 2.5, "'grpo'.*max_turns.*'2.5'"),
        ("stages.2.gamma", 7, "'grpo'.*gamma.* 7"),
        ("stages.2.max_completion_length", 7, "'grpo'.*max_completion_length=7"),
        ("stages.2.max_steps", -1, "'grpo'.*`dataset`.*`max_steps`"),
        ("stages.2.output_dir", "x", "stage 'grpo' knows no 'output_dir'"),
        ("stages.1.dataset", None, "stage 'dpo': `dataset` is missing"),
        ("stages.1.dataset", "chain_files:pears", "chain_files.*'pears'.*pairs"),
        ("stages.1.dataset", "no_such_module:pairs", "there is no module 'no_such_module'"),
        ("stages.1.dataset", "gone.jsonl", "'dpo'.*gone.jsonl"),
        ("stages.3.name", "grpo", "Two stages are named 'grpo'"),
        ("stages.3.name", "GRPO", "Two stages are named 'grpo' and 'GRPO'"),
        *(
            ("stages.3.name", name, "a stage's name is the name of its folder")
            for name in (
                "../grpo",
                "..",
                ".",
                ".hidden",
                "a/b",
                "a\\b",
                "ends.",
                "line\n",
                "",
                "start",
                "Start",
                "chain.json",
                "chain.json.partial",
                "x" * 101,
            )
        ),
        ("stages.2.lora", {"r": 8}, "'grpo'.*`merge_lora_configs: true`"),
        ("stages.3.lora", {"r": 8, "init_lora_weights": "pissa"}, "'ppo-after'.*init_lora_weights=.pissa.*another"),
        ("stages.3.lora.rank", 8, "'ppo-after'.*`lora`.*'rank'"),
        ("lora.target_module", ["q_proj"], "`lora`.*'target_module'.*target_modules"),
        ("lora.r", 0, "`lora`: r must be at least 1, got 0"),
        ("lora.r", 2**70, "`lora`: r must be at most 65536, got 1180591620717411303424"),
        *(
            ("lora.lora_alpha", alpha, f"`lora`: lora_alpha must be .*finite.*, got {alpha}")
            for alpha in (math.nan, math.inf, 0, -16)
        ),
        ("lora.rank_pattern", {"q_proj": 0}, r"`lora`: rank_pattern\['q_proj'\] must be at least 1, got 0"),
        *(
            (
                "lora.alpha_pattern",
                {"q_proj": alpha},
                rf"`lora`: alpha_pattern\['q_proj'\] must be .*finite, got {alpha!r}",
            )
            for alpha in (math.nan, 0, True, "16")
        ),
        ("lora.use_dora", "maybe", "`lora`.*use_dora.*maybe"),
        ("stages.3.merge_lora_configs", "maybe", "'ppo-after'.*merge_lora_configs.*maybe"),
        ("stages.0.dataset_args", {"streaming": "false"}, "'sft'.*streaming='false'.*Write false"),
        ("lora.lora_dropout", "half", "`lora`.*lora_dropout.*'half'"),
        ("lora.lora_dropout", 1.5, r"`lora`: lora_dropout must lie in \[0, 1\], got 1.5"),
        ("stages.1.per_device_train_batch_size", 0, "'dpo': per_device_train_batch_size must be at least 1, got 0"),
        ("stages.1.learning_rate", math.nan, "'dpo': learning_rate must be a finite number, got nan"),
        ("lora.layers_to_transform", [0], "`lora`.*`layers_to_transform`"),
        ("options.batch_size", 3, "`options` knows no 'batch_size'"),
        (
            "evaluation.num_eval_episode",
            3,
            r"`evaluation` knows no 'num_eval_episode'; did you mean num_eval_episodes",
        ),
        ("evaluation.environment_limits", {"typo": {"max_turns": 2}}, "`evaluation`: environment_limits names 'typo'"),
        ("evaluation.history", {"typo": "last:2"}, "`evaluation`: history names 'typo'"),
        ("evaluation.seed", -1, "`evaluation`: seed"),
        ("evaluation.generation_chunk_size", 0, "`evaluation`: generation_chunk_size"),
        ("evaluation.num_eval_episodes", 0, "`evaluation`.*num_eval_episodes.* 0"),
        (
            "environment",
            "agile:gess_number",
            "environment: Unknown environment 'agile:gess_number'.*agile:guess_number",
        ),
        ("environment_args.levle", "easy", "environment.*'levle'"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_trained(
    pipeline: dict, path: str, value: Any, message: str
) -> None:
    with pytest.raises(YAMLFileError, match=message):
        parse_pipeline(change(pipeline, path, value))


def test_the_documented_file_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "chaining.md").read_text(encoding="utf-8")
    content = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    content["options"] |= {"use_cpu": True, "bf16": False}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    stages = parse_pipeline(content).stages
    assert [stage.name for stage in stages] == ["sft", "dpo", "grpo"] and stages[2].config.max_new_tokens == 8


def test_a_stage_may_repeat_the_settings_of_its_chain(pipeline: dict) -> None:
    pipeline["stages"][2]["lora"] = dict(pipeline["lora"])
    assert parse_pipeline(pipeline).stages[2].lora is not None


def test_a_chain_trains_on_several_environments(pipeline: dict, tmp_path: Path) -> None:
    limits = {"easy": {"max_turns": 2}, "hard": {"max_turns": 1, "max_new_tokens": 2}}
    stage = {key: value for key, value in pipeline["stages"][2].items() if key not in ("max_turns", "beta")}
    pipeline |= {
        "environment": dict.fromkeys(limits, "chain_files:Talk"), "environment_args": {"easy": {"level": "easy"}},
        "stages": [stage | {"environment_limits": limits, "max_steps": 1}],
    }  # fmt: skip
    rows = chain.run_pipeline(parse_pipeline(pipeline), QUIET)
    for row in rows:
        scores = row["evaluation"]
        easy, hard = (scores["environments"][name] for name in limits)
        assert (scores["episodes"], easy["episodes"], hard["episodes"]) == (3, 2, 1)
        assert scores["return"] == pytest.approx((2 * easy["return"] + hard["return"]) / 3)
    shown = StringIO()
    Console(file=shown, width=200).print(chain.results(rows))
    rows = re.findall(r"^.*\b(?:easy|hard)\b.*[+-]\d\.\d{3}.*$", shown.getvalue(), flags=re.M)
    # One of the three episodes is of its own, and has no error.
    assert len(rows) == 4 and sum("±" in row for row in rows) == 2
    pipeline["stages"][0]["environment_limits"] = {"esay": {"max_turns": 2}}
    with pytest.raises(YAMLFileError, match=r"'grpo'.*environment_limits.*'esay'"):
        parse_pipeline(pipeline)


def test_numbers_as_yaml_reads_them(pipeline: dict) -> None:
    """YAML takes 1e-2 for a string, and nothing for null."""
    pipeline["lora"] |= {"lora_alpha": "1e1", "lora_dropout": "5e-2"}
    parsed = parse_pipeline(pipeline)
    first, lora = parsed.stages[0], parsed.lora
    assert (
        first.config.learning_rate == 0.01 and first.config.use_cpu is True and first.config.assistant_only_loss is True
    )
    assert lora is not None and (lora.lora_alpha, lora.lora_dropout) == (10.0, 0.05)
    for name, kind in (("learning_rate", "a number"), ("dataloader_num_workers", "a whole number")):
        with pytest.raises(YAMLFileError, match=f"'sft': {name} must be {kind}, got None"):
            parse_pipeline({**pipeline, "stages": [{**pipeline["stages"][0], name: None}]})


def test_booleans_as_texts_are_parsed(pipeline: dict) -> None:
    pipeline["lora"] |= {"use_dora": "no", "use_rslora": "true"}
    pipeline["stages"][2]["merge_lora_configs"] = "no"
    pipeline["options"]["merge_lora_configs"] = "false"
    read = parse_pipeline(pipeline)
    assert (read.lora.use_dora, read.lora.use_rslora, read.lora.init_lora_weights) == (False, True, True)
    assert [stage.merge_lora_configs for stage in read.stages] == [False, False, False, True]
    assert not read.stages[2].config.merge_lora_configs
    pipeline["stages"][2]["lora"] = {"r": 4}
    with pytest.raises(YAMLFileError, match="merge_lora_configs: true"):
        parse_pipeline(pipeline)


def test_evaluations_are_played_as_the_last_multi_turn_stage_plays(pipeline: dict) -> None:
    pipeline["stages"][3] |= {"max_turns": 3, "temperature": 0.7}
    pipeline["evaluation"] = {"num_eval_episodes": 3}
    settings = parse_pipeline(pipeline).evaluation
    assert (settings.max_turns, settings.max_new_tokens, settings.temperature) == (3, 3, 0.7)
    assert settings.num_eval_episodes == 3 and settings.seed == 42
    own = {"repetition_penalty": 1.5, "environment_timeout": 5, "model_init_kwargs": {"dtype": "float32"}}
    pipeline["stages"][3] |= own
    settings = parse_pipeline(pipeline).evaluation
    assert {name: getattr(settings, name) for name in own} == own
    pipeline["evaluation"] |= {"max_turns": 5, "seed": 1}
    settings = parse_pipeline(pipeline).evaluation
    assert settings.max_turns == 5 and settings.seed == 1


def test_an_evaluation_writes_the_images_of_its_episodes(pipeline: dict, tmp_path: Path) -> None:
    image = Image(b"a picture")
    prompt: Any = [{"role": "user", "content": [{"type": "image", "image": image}]}]
    turn = Turn(0, 1, "a", "stop", 1.0, None)
    results: Any = SimpleNamespace(
        places=[0], trajectories=[Trajectory([1], [2], [-1.0], [turn], StopReason.TERMINATED, prompt)]
    )
    chain._write_episodes(parse_pipeline(pipeline), "model", tmp_path, results)
    (run,) = open_records(tmp_path)
    assert run.image(image.digest) == image.data


def test_rows_of_every_kind(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.csv").write_text("a,b\n1,x\n2,y\n")
    stage_rows(str(tmp_path / "rows.json"), {}).to_parquet(tmp_path / "rows.parquet")
    stage_rows(str(tmp_path / "rows.json"), {}).save_to_disk(tmp_path / "rows")
    (tmp_path / "rows.tsv").write_text("a\tb\n1\tx\n2\ty\n")
    for name in ("rows.json", "rows.csv", "rows.parquet", "rows.tsv", "rows"):
        assert stage_rows(str(tmp_path / name), {}).to_list() == rows
    assert stage_rows("chain_files:pairs", {"count": 30}).to_list() == pairs(30)
    with pytest.raises(ValueError, match=r"'valid'.*'train'"):
        stage_rows(str(tmp_path / "rows"), {"split": "valid"})


def test_dry_run(pipeline: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline))
    assert main(["chain", str(path), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert all(f"{name}: " in output for name in ("sft", "dpo", "grpo", "ppo-after")) and "not begun" in output
    assert not (tmp_path / "chain").exists()
    path.write_text("stages: [")
    for file, told in ((path, "is not YAML"), (tmp_path / "gone.yaml", "There is no file")):
        with pytest.raises(SystemExit, match="2"):
            main(["chain", str(file), "--dry-run"])
        assert told in " ".join(capsys.readouterr().err.split())


def test_a_population_that_is_refused_is_no_crash(
    pipeline: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PopulationError("it holds another population")

    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline))
    monkeypatch.setattr(chain, "run_pipeline", refused)
    with pytest.raises(SystemExit, match="2"):
        main(["chain", str(path)])
    assert "chain: error: it holds another population" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_said_before_anything_is_played(
    pipeline: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline))
    (tmp_path / "chain").touch()
    monkeypatch.setattr(chain, "evaluate_stage", lambda *_: pytest.fail("an evaluation is played"))
    assert main(["chain", str(path)]) == 2
    assert f"output_dir='{tmp_path / 'chain'}' cannot be written to" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_example(tmp_path: Path, seed: int) -> None:
    """Returns rise from stage to stage, references are the policies before, folders load elsewhere."""
    script = Path(__file__).parents[1] / "examples" / "chain_sft_dpo_grpo.py"
    arguments = ["--seed", str(seed), "--output_dir", str(tmp_path)]
    subprocess.run([sys.executable, script, *arguments], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    returns = list(summary["returns"].values())
    assert returns == sorted(returns) and returns[-1] - returns[0] > 0.3
    assert max(summary["differences"].values()) <= 1e-6


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
CHAT = {"prompt": [{"role": "user", "content": "Add.\n\n1 2"}], "completion": [{"role": "assistant", "content": "3"}]}


@pytest.mark.parametrize(
    ("row", "read"),
    [
        (ALPACA, CHAT),
        ({"question": "Add.\n\n1 2", "answer": "3", "id": 7}, CHAT),
        ({"prompt": "Add.\n\n1 2", "response": "3"}, CHAT),
        (CHAT, CHAT),
        ({"text": "1 2 3"}, {"text": "1 2 3"}),
        ({"text": "1 2<|im_end|>"}, {"text": "1 2<|im_end|>"}),
    ],
)
def test_usual_columns_are_read(row: dict, read: dict, pipeline: dict, tmp_path: Path, caplog: Any) -> None:
    """Alpaca's ended in ``KeyError: 'text'``. Plain text is warned of: the later stages play in the chat template."""
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    pipeline["stages"][0] |= {"dataset": str(tmp_path / "own.jsonl"), "assistant_only_loss": False}
    parsed, told = parse_pipeline(pipeline), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agile_trainers.cli.chain.stages.logger.warning", told.append)
        chain._checked(parsed)
    assert supervised_rows(parsed.stages[0], parsed.model).to_list() == [read]
    plain = "Stage 'sft' trains on plain text (text), but stage 'grpo' plays in the chat template"
    assert [one[: len(plain)] for one in told] == [plain] * (row == {"text": "1 2 3"})


@pytest.mark.parametrize(
    ("stage", "row", "said"),
    [
        (
            0,
            {"story": "x", "label": 1},
            r"stage 'sft': dataset .* has the columns 'story', 'label'; sft expects `messages`",
        ),
        (
            1,
            {"prompt": "x", "good": "y", "bad": "z"},
            r"'prompt', 'good', 'bad'; dpo expects `chosen` and `rejected`",
        ),
    ],
)
def test_other_columns_are_named_before_anything_is_trained(
    stage: int, row: dict, said: str, pipeline: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    pipeline["stages"][stage] |= {"dataset": str(tmp_path / "own.jsonl"), "dataset_args": {}}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    with pytest.raises(SystemExit) as stop:
        main(["chain", str(tmp_path / "pipeline.yaml"), "--dry-run"])
    assert stop.value.code == 2 and re.search(said, " ".join(capsys.readouterr().err.split()))


def test_a_stage_that_failed_before_its_first_step_can_be_corrected(pipeline: dict) -> None:
    pipeline["stages"] = [pipeline["stages"][0] | {"max_steps": 1}]
    wrong = copy.deepcopy(pipeline)
    wrong["stages"][0]["lora"] = {"r": 8, "target_modules": ["no_such_module"]}
    with pytest.raises(ValueError, match="no_such_module"):
        chain.run_pipeline(parse_pipeline(wrong), QUIET)
    rows = chain.run_pipeline(parse_pipeline(pipeline), QUIET)
    assert [row["name"] for row in rows if row["trained"]] == ["sft"]
    other = copy.deepcopy(pipeline)
    other["stages"][0]["max_steps"] = 3
    with pytest.raises(chain.PipelineError, match="was trained with other options"):
        chain._checked(parse_pipeline(other))


def test_the_last_table_has_no_empty_column() -> None:
    row = {
        "name": "sft",
        "algorithm": "sft",
        "folder": "x",
        "trained": True,
        "evaluation": {"return": 1.0, "episodes": 3},
    }
    assert [str(one.header) for one in chain.results([row]).columns][-2:] == ["success", "folder"]
    table = chain.results([row, {**row, "trained": False}])
    assert list(table.columns[4].cells) == ["now", "done before"] and str(table.columns[4].header) == "trained"
