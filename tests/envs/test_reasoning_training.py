"""Rows in training: evaluation draws held-out rows only and leaves the training stream as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainers"))

from games import make_trainer
from recorded import recorded

from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import load_rows

ROWS = load_rows([{"question": f"What about {n}?", "answer": str(n)} for n in range(60)], test_fraction=0.3)
Draw = Callable[[], dict[str, Any]]


def environment() -> ReasoningEnvironment:
    """Rewards by an arbitrary rule that an untrained model sometimes meets."""
    return ReasoningEnvironment(ROWS, reward_fn=lambda completion, answer, question: sum(map(ord, completion)) % 5 / 4)


def trained(
    model: Path, folder: Path, train_dataset: Dataset | None, evaluate: bool
) -> tuple[Any, list[Any], list[Any]]:
    trainer = make_trainer(
        model,
        folder,
        environment=environment,
        train_dataset=train_dataset,
        eval_dataset=environment().dataset("test"),
        num_eval_episodes=ROWS.count("test"),
        eval_strategy="steps" if evaluate else "no",
        eval_steps=1,
        max_steps=4,
        max_turns=1,
    )
    trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    return weights, recorded(folder), recorded(folder, "eval")


@pytest.mark.parametrize("epochs", [False, True], ids=["rows by seed", "rows by data set"])
def test_evaluating_in_the_middle_changes_nothing_and_rows_never_mix(
    embedded_model: Path, tmp_path: Path, epochs: bool
) -> None:
    pointers = environment().dataset("train") if epochs else None
    weights, played, none = trained(embedded_model, tmp_path / "plain", pointers, evaluate=False)
    same_weights, same_played, evaluated = trained(embedded_model, tmp_path / "evaluated", pointers, evaluate=True)
    assert not none and len(evaluated) == 4 * ROWS.count("test")
    assert [record["completion_ids"] for record in played] == [record["completion_ids"] for record in same_played]
    assert [record["prompt"] for record in played] == [record["prompt"] for record in same_played]
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)

    split = {ROWS.row(name, n)["question"]: name for name in ROWS.splits for n in range(ROWS.count(name) or 0)}
    assert len(split) == 60
    assert {split[record["prompt"][0]["content"]] for record in same_played} == {"train"}
    questions = [record["prompt"][0]["content"] for record in evaluated[: ROWS.count("test")]]
    assert {split[question] for question in questions} == {"test"} and len(set(questions)) == ROWS.count("test")
    assert {record["reset_info"]["split"] for record in same_played} == {"train"}


def test_the_trainers_own_data_sets_bring_the_rows(embedded_model: Path, tmp_path: Path) -> None:
    """As in TRL: no data in the environment, rows in train_dataset and eval_dataset."""
    rows = [{"question": f"What about {n}?", "answer": str(n)} for n in range(8)]
    trainer = make_trainer(
        embedded_model,
        tmp_path,
        environment=ReasoningEnvironment,
        train_dataset=Dataset.from_list(rows[:6]),
        eval_dataset=Dataset.from_list(rows[6:]),
        num_eval_episodes=2,
        max_turns=1,
        max_steps=3,
    )
    trainer.train()
    trainer.evaluate()
    asked = {kind: {one["prompt"][0]["content"] for one in recorded(tmp_path, kind)} for kind in ("train", "eval")}
    assert asked["train"] == {row["question"] for row in rows[:6]}, "an epoch holds every row"
    assert asked["eval"] == {row["question"] for row in rows[6:]}
