"""Arithmetic, and the data sets of the Hub: rows of the same schema, saved here, through the real loading code."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from agile_environments.math import LEVELS, Math, _value, demonstrations, expert_policy, preferences, random_policy
from agile_trainers.envs import check_environment, make_environment_factory, play
from agile_trainers.envs.questions.answers import exact_match, final_answer, math_match

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install math-verify"
)
RANDOM_SUCCESS = {"easy": 0.057, "normal": 0.011, "hard": 0.0006}
"""What README.md says, over 20,000 problems."""

GSM8K = [
    {
        "question": f"Ann has {n} bags of 1000 apples and eats one. How many are left?",
        "answer": f"There are {n}*1000=<<{n}*1000={n * 1000}>>{n * 1000} apples.\nThen {n * 1000}-1.\n#### {n * 1000 - 1:,}",
    }
    for n in range(1, 9)
]
MATH = [
    {
        "problem": f"Write ${n}/{n + 1}$ as a fraction.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"First \\boxed{{1}}, no: it is $\\boxed{{\\frac{{{n}}}{{{n + 1}}}}}$.",
    }
    for n in range(2, 10)
]
DAPO = [
    {"prompt": f"Find $x$ with $x - {n} = 0$.", "solution": str(n), "data_source": "x", "ability": "MATH"}
    for n in range(40)
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for name, rows in (("gsm8k", GSM8K), ("math", MATH)):
        tables = DatasetDict(train=Dataset.from_list(rows[:5]), test=Dataset.from_list(rows[5:]))
        for split, table in tables.items():
            table.to_parquet(tmp_path / name / f"{split}.parquet")
    Dataset.from_list(DAPO).to_parquet(tmp_path / "dapo_math" / "train.parquet")
    return tmp_path


# ---------------------------------------------------------------------------------------------------------- arithmetic


def test_values_by_hand() -> None:
    by_hand = {"7": 7, "7 - 9": -2, "2 + 3 * 4": 14, "2 * 3 * 4 - 5": 19, "10 - 2 * 3 - 4 * 2": -4, "1 - 1 + 1": 1}
    assert {expression: _value(expression) for expression in by_hand} == by_hand


@pytest.mark.parametrize("level", LEVELS)
def test_success_of_the_scripted_policies(level: str) -> None:
    environment = Math(level)
    assert all(play(environment, expert_policy, seed).success for seed in range(100))
    rate, expected = sum(play(environment, random_policy, n).success for n in range(3000)) / 3000, RANDOM_SUCCESS[level]
    assert abs(rate - expected) < 4 * (expected / 3000) ** 0.5


def test_python_agrees_with_every_answer() -> None:
    for level in LEVELS:
        for seed in range(50):
            row = Math(level).row("train", seed)
            assert row["answer"] == eval(row["question"].split("What is ")[1].split("?")[0])


def test_arithmetic_checks_and_data_for_earlier_stages() -> None:
    factory = make_environment_factory("agile:math", level="hard")
    assert not check_environment(factory, episodes=3, actions=["7"]).findings
    for pair in preferences(5, environment=Math("easy")):
        assert abs(int(pair["chosen"][0]["content"]) - int(pair["rejected"][0]["content"])) in (1, 2)
    (row,) = demonstrations(1, seed=3)
    assert play(Math(), lambda *_: row["messages"][1]["content"], seed=3).success


# ----------------------------------------------------------------------------------------------------------- data sets


@needs_math_verify
@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("gsm8k", "1999", ["\\boxed{1,999}", "so 1999 apples: $\\boxed{1999}$"], ["\\boxed{2000}", "\\boxed{}", ""]),
        (
            "math",
            "\\frac{3}{4}",
            ["\\boxed{\\frac{3}{4}}", "\\boxed{0.75}", "\\boxed{6/8}"],
            ["\\boxed{3}", "3 over 4"],
        ),
        ("dapo_math", "3", ["\\boxed{3}", "\\boxed{x = 3}", "\\boxed{3.0}"], ["\\boxed{-3}", "\\boxed{\\frac{1}{3}}"]),
    ],
)
def test_a_row_of_each_data_set(saved: Path, name: str, answer: str, right: list[str], wrong: list[str]) -> None:
    row = {"gsm8k": GSM8K[1], "math": MATH[1], "dapo_math": DAPO[3]}[name]
    environment = Math(dataset=name, path=str(saved / name))
    observation, _ = environment.reset(options=row)
    question = next(row[column] for column in ("question", "problem", "prompt") if column in row)
    assert observation == f"{question}\n\nReason step by step and put the final answer in \\boxed{{}}."
    assert environment.answer_to(row) == answer
    assert [environment.step(completion)[1] for completion in right] == [1.0] * len(right)
    assert [environment.step(completion)[1] for completion in wrong] == [0.0] * len(wrong)
    assert environment.step(environment.ideal(row))[4] == {"success": True, "answer": environment.answer_to(row)}


@needs_math_verify
def test_splits_of_the_data_sets(saved: Path) -> None:
    for name, rows in (("gsm8k", GSM8K), ("math", MATH)):
        environment = Math(dataset=name, path=str(saved / name))
        assert [environment.row("train", n) for n in range(5)] == rows[:5]
        assert [environment.row("test", n) for n in range(3)] == rows[5:]
    dapo = Math(dataset="dapo_math", path=str(saved / "dapo_math"), test_fraction=0.3)
    prompts = [{dapo.row(split, n)["prompt"] for n in range(dapo.rows.count(split))} for split in ("train", "test")]
    assert not prompts[0] & prompts[1] and len(prompts[0] | prompts[1]) == 40 and prompts[1]


@needs_math_verify
def test_a_gsm8k_demonstration_has_no_calculator_marks_and_a_stream_can_be_read(saved: Path) -> None:
    environment = Math(dataset="gsm8k", path=str(saved / "gsm8k"), streaming=True, max_rows=2)
    (row, other) = environment.demonstrations(2)
    assert row["messages"][1]["content"] == "There are 1*1000=1000 apples.\nThen 1000-1.\nThe answer is \\boxed{999}."
    (pair, _) = environment.preferences(2)
    assert pair["rejected"] == [other["messages"][1]]


@needs_math_verify
def test_the_timeout_of_math_verify_is_left_out_in_threads() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(math_match("\\boxed{\\frac{1}{2}}", "0.5", "")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_hub_ids_are_looked_up_with_the_real_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'agile-trainers[envs]'")
    import datasets

    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> DatasetDict:
        asked.append((args, kwargs))
        return DatasetDict(train=Dataset.from_list(GSM8K[:5]), test=Dataset.from_list(GSM8K[5:]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert Math(dataset="gsm8k", test_fraction=0.123).row("test", 0) == GSM8K[5]
    assert asked == [(("openai/gsm8k", "main"), {"streaming": False})]
    with pytest.raises(ValueError, match=r"'problem'.*question"):
        Math(dataset="math", test_fraction=0.124)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"level": "heavy"}, "'heavy'.*easy, normal, hard"),
        ({"dataset": "gsm"}, "choose one of gsm8k, math, dapo_math"),
        ({"path": "x"}, "path have an effect on a data set only"),
        ({"dataset": "gsm8k", "level": "easy"}, "level='easy' has no effect"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Math(**kwargs)


def test_a_missing_math_verify_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        Math(dataset="gsm8k")
    with pytest.raises(ImportError, match="pip install math-verify"):
        math_match("1", "1", "")


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 7 \n", "7"),
        ("<think>8 or 9</think>\n 9", "9"),
        ("<answer>1</answer> no, <answer> 2\n</answer> \\boxed{3}", "2"),
        ("\\boxed{1} and \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{", "\\boxed{"),
        ("<answer>open", "<answer>open"),
    ],
)
def test_final_answers(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


def test_exact_match_compares_numbers_as_numbers() -> None:
    assert exact_match("1,000", 1000) == exact_match("007", "7") == exact_match("-2.50", -2.5) == 1.0
    assert (
        exact_match("1,00", 100)
        == exact_match("7 apples", 7)
        == exact_match("Yes", "yes")
        == exact_match("", "0")
        == 0.0
    )
