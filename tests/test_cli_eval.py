"""``agile-trainers eval`` on the embedded model: what it prints, writes and adds to a model card."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import load_dataset
from huggingface_hub import EvalResult, ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from agile_trainers.checkpoints.model_card import add_results
from agile_trainers.cli.main import main
from agile_trainers.evaluation.statistics import standard_error
from agile_trainers.records.reader import open_records

GUESS = ["--environment", "agile:guess_number", "--max_turns", "2", "--max_new_tokens", "2"]
TEXT = "\n# My adapter\n\nWritten by hand.  \n---\nA rule above, and umlauts: äöü.\n"


class Sums:
    """A question a row, with an answer that the row names."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.row = options or {"question": "1+1?", "answer": "2"}
        return self.row["question"], {}

    def step(self, action: str) -> Any:
        print("a word that is no JSON")
        return "", float(len(action)), True, False, {}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Path:
    """An adapter that plays other than its base."""
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def card(adapter: Path) -> Path:
    """The adapter's card, with text and comments of a user."""
    path = adapter / "README.md"
    path.write_bytes(("---\nlicense: mit  # ours\ntags:\n- games\n---" + TEXT).encode())
    return path


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    """Run the command and return its JSON."""
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_adapter_against_its_base(
    adapter: Path, card: Path, embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    against = ["--against", str(embedded_model), str(adapter)]
    for others in (against, []):
        command = ["eval", str(adapter), *others, *GUESS, "--episodes", "12", "--output_dir", str(tmp_path)]
        assert main(command) == 0
    shown = capsys.readouterr().out
    for expected in ("success", "return", "turns", "stop: max_turns", "No difference shown", "for 2 comparisons"):
        assert expected in shown
    results = sorted(tmp_path.glob("eval-*/results.json"))
    assert len(results) == 2, "two evaluations stay apart"
    contents = [json.loads(path.read_text()) for path in results]
    two, one = sorted(contents, key=lambda it: len(it["environments"][0]["policies"]))
    assert one["environments"][0]["policies"][0]["success"] == two["environments"][0]["policies"][0]["success"]
    (environment,) = one["environments"]
    names = [str(adapter), str(embedded_model), f"{adapter} (2)"]
    assert [each["policy"] for each in environment["policies"]] == names
    assert [each["against"] for each in environment["comparisons"]] == names[1:]
    assert {each["comparisons"] for each in environment["comparisons"]} == {2}
    runs = open_records(tmp_path)
    assert len(runs) == 4 and {run.info["kind"] for run in runs} == {"evaluation"}
    first, *_ = (run for run in runs if run.info["run"] == f"{one['run']}-0-0")
    episodes = first.index()
    assert len(episodes) == 12 and first.info["policy"] == str(adapter) and first.vocabulary()
    policy = environment["policies"][0]
    assert policy["records"] == str(first.folder)
    assert policy["episode_return"]["value"] == pytest.approx(sum(each["return"] for each in episodes) / 12)
    files = [str(path) for path in Path(policy["records"]).glob("*.parquet") if path.name.startswith("eval")]
    assert len(load_dataset("parquet", data_files=files, split="train")) == 12
    seeds = {tuple(each["seed"] for each in sorted(run.index(), key=lambda it: it["index"])) for run in runs}
    assert len(seeds) == 1, "all policies play the same episodes"


def test_results_are_added_to_the_card_once_and_its_text_stays(
    adapter: Path, card: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [adapter, *GUESS, "--episodes", "6", "--output_dir", tmp_path]
    before = card.read_bytes()
    evaluate(capsys, *arguments, "--no_card")
    assert card.read_bytes() == before
    found = evaluate(capsys, *arguments)
    once = card.read_bytes()
    evaluate(capsys, *arguments)
    assert card.read_bytes() == once, "evaluated twice, the card is the same"
    evaluate(capsys, *arguments, "--greedy")
    evaluate(capsys, *arguments, "--attempts", "2", "--seed", "7")
    text = card.read_bytes().decode()
    assert text.endswith("---" + TEXT) and "license: mit\n" in text
    data = ModelCard.load(card).data
    metrics = [result.metric_name for result in data.eval_results]
    expected = [name + how for how in (" (greedy)", "") for name in ("success", "mean episode return")]
    assert sorted(metrics) == sorted([*expected, "pass@1", "pass@2"])
    assert {result.dataset_type for result in data.eval_results} == {"agile:guess_number"} and data.tags == ["games"]
    (policy,) = found["environments"][0]["policies"]
    first = yaml.safe_load(once.decode().split("---")[1])["model-index"][0]["results"][0]["metrics"]
    assert first[0]["value"] == round(policy["success"]["value"], 4)
    assert first[1]["value"] == round(policy["episode_return"]["value"], 4)
    (run,) = (run for run in open_records(tmp_path) if run.info["run"] == f"{found['run']}-0-0")
    returns = [episode["return"] for episode in run.index()]
    assert first[1]["args"]["standard_error"] == round(standard_error(returns), 4)


class Fussy:
    """Reads a number with ``int``, and speaks of success only when it wins."""

    return_range = (0.0, 1.0)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seed = seed
        return "A number?", {"time": (seed or 0) * 1.5}

    def step(self, action: str) -> Any:
        won = int(action) == 5
        return "", float(won), True, False, {"success": True} if won else {}


def recorded(folder: Path, adapter: Path, **options: Any) -> Path:
    """A copy of the adapter with the record of a run."""
    shutil.copytree(adapter, folder, ignore=shutil.ignore_patterns("README.md"))
    (folder / "agile_trainers.json").write_text(json.dumps({"options": options, "global_step": 3}))
    return folder


def test_limits_and_sampling_are_those_of_training(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are taken from the record, stated on the card, and another limit is another row."""
    trained = recorded(
        tmp_path / "trained", adapter, max_turns=2, max_new_tokens=1, temperature=0.7, stop_strings=None,
        environment_limits={"elsewhere": {"max_turns": 9}}, learning_rate=1.0,
    )  # fmt: skip
    other = recorded(tmp_path / "other", adapter, max_turns=3, max_new_tokens=1, temperature=0.7)
    base = ["--environment", "agile:guess_number", "--episodes", "4", "--output_dir", str(tmp_path / "out")]
    assert main(["eval", str(trained), "--against", str(other), *base]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"{trained} was trained with: max_turns=2, max_new_tokens=1, temperature=0.7" in said
    assert f"{other} was trained with max_turns=3, and is played like {trained}" in said
    (path,) = (tmp_path / "out").glob("eval-*/results.json")
    content = json.loads(path.read_text())
    settings = content["settings"]
    assert (settings["max_turns"], settings["max_new_tokens"], settings["temperature"]) == (2, 1, 0.7)
    assert settings["top_p"] == 1.0 and settings["environment_limits"] is None
    policy = content["environments"][0]["policies"][0]
    assert policy["turns"] <= 2 and policy["action_tokens"] <= 2

    several = recorded(
        tmp_path / "several", adapter, max_turns=8, max_new_tokens=1, history={"guess": "last:1", "sums": "full"},
        environment_limits={"guess": {"max_turns": 1}, "sums": {"max_turns": 3}},
    )  # fmt: skip
    record = several / "agile_trainers.json"
    named = {"environment": "guess=agile:guess_number, sums=elsewhere:Sums"}
    record.write_text(json.dumps(json.loads(record.read_text()) | named))
    assert main(["eval", str(several), *base]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "{'agile:guess_number': {'max_turns': 1}}" in said and "{'agile:guess_number': 'last:1'}" in said, (
        "and nothing of others"
    )
    path = max((tmp_path / "out").glob("eval-*/results.json"), key=lambda path: path.stat().st_mtime)
    assert json.loads(path.read_text())["environments"][0]["policies"][0]["turns"] == 1.0

    by_class = {"environment": "guess=guess_number, sums=Sums"}  # a class is recorded by its name alone
    record.write_text(json.dumps(json.loads(record.read_text()) | by_class))
    assert main(["eval", str(several), *base]) == 0
    assert "{'agile:guess_number': {'max_turns': 1}}" in capsys.readouterr().out.replace("\n", " ")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"environment": "guess=Other, sums=Sums"}))
    assert main(["eval", str(several), *base]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert (
        "trained with environment_limits of Other, Sums and history of Other, Sums, which is none that is played"
        in said
    )

    evaluate(capsys, trained, *base)
    assert main(["eval", str(trained), *base, "--max_turns", "1", "--temperature", "0.7"]) == 0
    assert "Set otherwise: max_turns=1, trained with 2." in capsys.readouterr().out.replace("\n", " ")
    index = yaml.safe_load((trained / "README.md").read_text().split("---")[1])["model-index"][0]["results"]
    rows = [metric for entry in index for metric in entry["metrics"] if metric["type"] == "success_rate"]
    assert [row["args"]["limits"]["max_turns"] for row in rows] == [2, 1]
    expected = {"max_new_tokens": 1, "temperature": 0.7, "top_p": 1.0}
    assert all(row["args"]["limits"].items() >= expected.items() for row in rows)
    assert {row["args"]["episodes_of"] for row in rows} == {"held out"} and {row["args"]["seed"] for row in rows} == {
        42
    }

    assert main(["eval", str(adapter), *base, "--max_new_tokens", "1", "--no_card"]) == 0
    assert "No model has a record of its limits. Played with max_turns=8, max_new_tokens=1" in (
        capsys.readouterr().out.replace("\n", " ")
    )


def test_failed_and_silent_episodes_are_told(
    adapter: Path, embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``int(answer)`` fails on words: no verdict, bounds, and every episode counts; a time in the info makes no game."""
    common = ["--environment", f"{__name__}:Fussy", "--episodes", "40", "--max_new_tokens", "1", "--no_card"]
    found = evaluate(capsys, embedded_model, "--against", adapter, *common, "--output_dir", tmp_path)
    (report,) = found["environments"]
    first = report["policies"][0]
    won = first["stop_reasons"].get("terminated", 0)
    assert first["failed"] == 40 - won > 2 and first["episode_return"]["episodes"] == 40
    (compared,) = report["comparisons"]
    assert compared["verdict"] == "no verdict" and "because an environment failed" in compared["sentence"]
    assert compared["bounds"][0] <= 0 <= compared["bounds"][1]
    (note,) = [note for note in report["notes"] if note.startswith(f"{embedded_model}: the environment failed")]
    assert f"in {first['failed']} of 40 episodes" in note and "ValueError: invalid literal for int()" in note
    greedy = evaluate(capsys, embedded_model, *common, "--greedy", "--output_dir", tmp_path)["environments"][0]
    assert greedy["policies"][0]["units"] == 1 and "1 independent ones" in " ".join(greedy["notes"])


RESULT = EvalResult("reinforcement-learning", "a:game", "a:game", "success_rate", 0.5, metric_name="success")


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (None, "# model\n"),
        ("Only text.\r\n", "Only text.\r\n"),
        ("---\n---\nText.\n", "Text.\n"),
        ("---\r\ntags: [a]\r\n---\r\nText.\r\n", "---\r\nText.\r\n"),
        ("---\nmodel-index:\n- name: mine\n  results: []\ntags: [a]\n---\nText.", "tags:\n- a\n"),
    ],
)  # fmt: skip
def test_any_card_gets_a_result(tmp_path: Path, before: str | None, kept: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if before is not None:
        (folder / "README.md").write_bytes(before.encode())
    for value in (0.4, 0.5):
        RESULT.metric_value = value
        text = add_results(folder, [RESULT]).read_bytes().decode()
        assert kept in text
        (found,) = ModelCard(text).data.eval_results
        assert found.metric_value == value and found.dataset_name == "a:game"
    assert ("mine" in text) == ("mine" in (before or ""))
    other = EvalResult("text-generation", "b", "b", "accuracy", 1.0)
    assert len(ModelCard(add_results(folder, [other]).read_text()).data.eval_results) == 2


def test_a_card_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    for text in ("---\na: [\n---\n", "---\n- a list\n---\n", "---\nmodel-index: [3]\n---\n"):
        card.write_text(text)
        with pytest.raises(ValueError, match=r"README.md cannot be read"):
            add_results(tmp_path, [RESULT])
        assert card.read_text() == text


def test_rows_metrics_and_several_environments(
    embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("evaluate", reason="evaluate is not installed: pip install 'agile-trainers[eval]'")
    sums = f"{__name__}:Sums"
    rows = [
        {"question": "2+2?", "answer": "4", "environment": sums, "secret": None},
        {"question": "3+2?", "answer": "5", "environment": sums, "secret": None},
        {"question": None, "answer": None, "environment": "agile:guess_number", "secret": 3},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    common = [embedded_model, "--max_new_tokens", "2", "--no_card", "--output_dir", tmp_path / "out"]
    data = ["--dataset_name", tmp_path / "rows.jsonl"]
    single = evaluate(capsys, *common, *data, "--environment", sums, "--metric", "answer_match", "--attempts", "3")
    (policy,) = single["environments"][0]["policies"]
    assert (policy["episodes"], policy["units"], policy["success"]) == (6, 2, None)
    assert policy["metrics"] == {"answer_match": 0.0} and policy["pass_at_k"] == {}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = json.dumps({sums: {"max_new_tokens": 1}})
    both = evaluate(
        capsys, *common, *data, "--environment", sums, "agile:guess_number", "--environment_limits", limits, "--greedy",
        "--environment_args", json.dumps({"agile:guess_number": {"level": "easy"}}),
    )  # fmt: skip
    alone = evaluate(capsys, *common, *data, "--environment", sums)
    assert alone["environments"][0]["policies"][0]["episodes"] == 2, "those of the other are not played in it"
    others = [*map(str, common), *map(str, data), "--environment", "agile:guess_number", "agile:countdown"]
    assert main(["eval", *others]) == 2
    assert f"rows of {sums}, which --environment does not name" in capsys.readouterr().err.replace("\n", " ")
    first, second = (each["policies"][0] for each in both["environments"])
    assert (first["episodes"], second["episodes"]) == (2, 1) and first["action_tokens"] == 1.0
    assert second["turns"] <= 3, "the level's number of guesses"


def test_a_metric_that_fails_does_not_lose_the_episodes(
    embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("evaluate", reason="evaluate is not installed: pip install 'agile-trainers[eval]'")
    model = tmp_path / "model"
    shutil.copytree(embedded_model, model)
    arguments = [*GUESS, "--episodes", 4, "--metric", "answer_match", "--output_dir", tmp_path / "out"]
    assert main(["eval", str(model), *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    error = " ".join(printed.err.split())
    assert "guess_number: The metric answer_match needs references, but 4 episodes have none." in error
    assert "with `reference`" in error and len(list((tmp_path / "out").glob("eval-*/results.json"))) == 1
    assert main(["eval", str(model), *map(str, arguments), "--reference", "secret"]) == 0
    assert "answer_match" in capsys.readouterr().out and "success_rate" in (model / "README.md").read_text()
    rows = [{"question": "2+2?", "answer": answer} for answer in ("4", "4", None, None)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "--environment",
        f"{__name__}:Sums",
        "--max_new_tokens",
        2,
        "--generation_chunk_size",
        1,
        *arguments[-4:],
    ]
    assert main(["eval", str(model), *map(str, arguments), "--dataset_name", str(tmp_path / "rows.jsonl")]) == 2
    printed = capsys.readouterr()
    assert "needs references, but 2 episodes have none" in " ".join(printed.err.split()) and "return" in printed.out
    assert len(list((tmp_path / "out").glob("eval-*/results.json"))) == 3


class Answered(Sums):
    def step(self, action: str) -> Any:
        return *super().step(action)[:-1], {"answer": "2"}


def test_an_environment_without_right_answers_costs_no_other(
    embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It was said at its first episode, which ended everything."""
    pytest.importorskip("evaluate", reason="evaluate is not installed: pip install 'agile-trainers[eval]'")
    model, (with_it, without) = str(embedded_model), (f"{__name__}:{name}" for name in ("Answered", "Sums"))
    command = ["eval", model, "--against", model, "--environment", without, with_it, "--metric", "answer_match"]
    assert main([*command, "--episodes", "2", "--max_new_tokens", "1", "--no_card", "--output_dir", str(tmp_path)]) == 2
    assert f"{without}: The metric answer_match needs references, but 2" in " ".join(capsys.readouterr().err.split())
    assert caplog.text.count("has no right answer") == caplog.text.count(f"{without} has no right answer 'answer'") == 1
    (path,) = tmp_path.glob("eval-*/results.json")
    first, second = json.loads(path.read_text())["environments"]
    assert [[each["metrics"] for each in one["policies"]] for one in (first, second)] == [
        [{}] * 2,
        [{"answer_match": 0}] * 2,
    ]
    assert len(first["comparisons"]) == len(second["comparisons"]) == 1


class Broken(Sums):
    def step(self, action: str) -> Any:
        raise RuntimeError("boom")


class Leaves(Sums):
    """Is away after some resets, or gets a signal, and says nothing at first."""

    resets, signal = 0, 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        Leaves.resets += 1
        if Leaves.resets > 7:  # two tries, and a try and four episodes of the first policy
            if Leaves.signal:
                signal.raise_signal(Leaves.signal)
            raise ConnectionError("the server is away")
        return "", {}


class Spoils(Sums):
    """Writes what is no card."""

    def __init__(self, card: str) -> None:
        self.card = Path(card)

    def step(self, action: str) -> Any:
        self.card.write_text("---\na: [\n---\n")
        return super().step(action)


def spoiled(folder: Path, how: str, embedded_model: Path, adapter: Path) -> Path:
    """A model that cannot be played."""
    shutil.copytree(adapter if how == "base" else embedded_model, folder)
    if how == "weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-8])
    elif how == "base":
        config = folder / "adapter_config.json"
        named = json.loads(config.read_text()) | {"base_model_name_or_path": str(folder / "gone")}
        config.write_text(json.dumps(named))
    else:
        for file in folder.glob("*token*"):
            file.unlink()
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("weights", "SafetensorError"),
        ("base", "which cannot be loaded"),
        ("tokenizer", "The tokenizer of '{folder}' makes no tokens of the first prompt"),
        ("environment", "step() raised RuntimeError: boom"),
    ],
)
def test_what_cannot_be_played_is_told_before_the_first_episode(
    embedded_model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    folder, command = tmp_path / how, ["eval", str(embedded_model), "--environment", f"{__name__}:Sums"]
    if how == "environment":
        command.append(f"{__name__}:Broken")
    else:
        command += ["--against", str(spoiled(folder, how, embedded_model, adapter))]
    assert main([*command, "--episodes", "2", "--max_new_tokens", "1", "--output_dir", str(tmp_path / "out")]) == 2
    assert message.format(folder=folder) in capsys.readouterr().err.replace("\n", " ")
    assert not list((tmp_path / "out").glob("**/*")), "nothing was played"


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(0, 2, "the server is away"), (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated (SIGTERM)")],
)
def test_an_error_on_the_way_leaves_what_was_played(
    embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, number: int, status: int, said: str,
) -> None:  # fmt: skip
    """And a warning of both policies is shown once."""
    command = ["eval", str(embedded_model), "--against", str(embedded_model), "--environment", f"{__name__}:Leaves"]
    common = ["--episodes", "4", "--max_new_tokens", "1", "--no_card", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(Leaves, "resets", 0)
    monkeypatch.setattr(Leaves, "signal", number)
    assert main([*command, *common]) == status
    printed = capsys.readouterr()
    assert said in printed.err and "4 episodes each" in printed.out
    (path,) = tmp_path.glob("eval-*/results.json")
    (environment,) = json.loads(path.read_text())["environments"]
    assert len(environment["policies"]) == 1 and environment["comparisons"] == []
    assert caplog.text.count("the first observation is empty") == 1


def test_a_card_that_cannot_be_read_loses_no_episodes(
    embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(embedded_model, model)
    command = ["eval", str(model), "--environment", f"{__name__}:Spoils", "--episodes", "2", "--max_new_tokens", "1",
               "--environment_args", json.dumps({"card": str(model / "README.md")}), "--output_dir", str(out)]  # fmt: skip
    assert main(command) == 2, "it was spoiled meanwhile"
    printed = capsys.readouterr()
    assert "README.md cannot be read" in printed.err and "2 episodes each" in printed.out
    shutil.rmtree(out)
    assert main(command) == 2, "it was so before"
    assert "README.md cannot be read" in capsys.readouterr().err and not list(out.glob("**/*"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", "-1", "at least 0"),
        ("--dtype", "floaty", "float32, bfloat16"),
        ("--device", "cuda:99", "cannot be used here"),
    ],
)
def test_an_error_names_the_option(capsys: pytest.CaptureFixture[str], option: str, value: str, message: str) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "model", "--environment", "agile:guess_number", option, value])
    assert f"argument {option}: " in (said := capsys.readouterr().err) and message in said and repr(value)[1:-1] in said


def test_the_measure_of_comparisons(embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(embedded_model), "--against", str(embedded_model), "--episodes", "6", "--no_card", "--max_turns", "1",
              "--max_new_tokens", "2", "--output_dir", str(tmp_path)]  # fmt: skip
    found = evaluate(capsys, *common, "--environment", "agile:guess_number", "--measure", "return")
    (compared,) = found["environments"][0]["comparisons"]
    assert (compared["measure"], compared["other"]["measure"]) == ("return", "success")
    assert main(["eval", *common, "--environment", f"{__name__}:Sums", "--measure", "success"]) == 2
    printed = capsys.readouterr()
    assert "reports no success; its returns were compared" in printed.err and "No verdict on" in printed.out
    assert "(no interval)" in printed.out and "No interval of the return: 6 independent episodes" in printed.out
    with pytest.raises(SystemExit):
        main(["eval", str(embedded_model), "--environment", "agile:guess_number", "--measure", "return"])
    assert "no effect without --against" in capsys.readouterr().err
