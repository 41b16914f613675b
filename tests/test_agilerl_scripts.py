"""Scripts for AgileRL and their conversions: converted row by row, the page's among them; ours learn on the embedded model.

``make snippets`` runs all of ours on three seeds and prints the returns; `make test-agilerl` runs both sides.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from agilerl_options import ROWS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from agilerl_scripts import ALGORITHMS, EPISODES, NAMES, OURS, THEIRS, called, pair, set_keywords

WORDS = (*"0123456", "Start:", "What", "is", "2+2?", "+", "?", "Done.")
OTHER_UNITS = ("max_steps", "generation_batch_size", "save_steps", "eval_steps", "gradient_accumulation_steps")
"""What is counted otherwise here."""
SHOWN = [("reasoning", "GRPO"), ("toy", "PPO")]
"""Pairs of the page, in its order."""


def test_the_page_shows_two_of_the_pairs() -> None:
    assert len(THEIRS) == len(OURS) == len(SHOWN)
    for (environment, algorithm), theirs, ours in zip(SHOWN, THEIRS, OURS, strict=True):
        made = pair(environment, algorithm)
        for name, here, there in ((ALGORITHMS[algorithm].agent, made.theirs, theirs), ("Config", made.ours, ours)):
            assert called(here, name) == called(there, name)
        assert called(made.theirs, "train_llm_rollout") == called(theirs, "train_llm_rollout")


@pytest.mark.parametrize(("environment", "algorithm"), NAMES)
def test_every_keyword_is_converted_by_its_row(environment: str, algorithm: str) -> None:
    scripts = pair(environment, algorithm)
    given = {
        name: value
        for call in (ALGORITHMS[algorithm].agent, "local", "train_llm_rollout")
        for name, value in called(scripts.theirs, call).items()
    }
    made = called(scripts.ours, "Config") | called(scripts.ours, "Trainer")
    assert len(given) > 15
    for keyword, value in given.items():
        rows = [row for row in ROWS if keyword in row.theirs and algorithm in row.of]
        assert rows or keyword in ("env", "tokenizer"), f"{keyword} has no row"
        for row in rows:
            if row.kind not in ("ours", "TRL", "transformers") or len(row.theirs) != len(row.ours):
                continue
            name = row.ours[row.theirs.index(keyword)][0]
            if name not in OTHER_UNITS and row.ours[row.theirs.index(keyword)][1] is None:
                assert made[name] == value, f"{keyword}={value} there, {name}={made.get(name)} here"


@pytest.mark.parametrize(("environment", "algorithm"), NAMES)
def test_the_cadence_is_agilerls(environment: str, algorithm: str) -> None:
    """Rollouts end when the turns are played, and an unset ``mini_batch_size`` steps at each micro-batch."""
    scripts = pair(environment, algorithm)
    theirs = called(scripts.theirs, ALGORITHMS[algorithm].agent) | called(scripts.theirs, "train_llm_rollout")
    ours = called(scripts.ours, "Config")
    episodes = theirs["batch_size"] * theirs.get("group_size", 1)
    rollouts = theirs["max_steps"] / (episodes * {"reasoning": 1, "toy": 2}[environment])
    steps = episodes / theirs["micro_batch_size_per_gpu"] * theirs.get("update_epochs", 1)
    assert episodes == ours["generation_batch_size"] == EPISODES
    per_rollout = episodes / (ours["per_device_train_batch_size"] * ours["gradient_accumulation_steps"])
    assert per_rollout * ours.get("num_iterations", 1) == steps == scripts.steps_per_rollout
    assert ours["max_steps"] == rollouts * steps and ours["eval_steps"] == theirs["evaluation_interval"] * steps
    assert ours["lr_scheduler_type"] == "constant" and ours["weight_decay"] == 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("environment", "algorithm"), NAMES)
def test_ours_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: str, algorithm: str, seed: int
) -> None:
    from agile_trainers.embedded import make_embedded_model

    scripts = pair(environment, algorithm, turns=16 * EPISODES * {"reasoning": 1, "toy": 2}[environment])
    tree = ast.parse(scripts.ours)
    model = make_embedded_model(tmp_path / "model", words=WORDS, seed=seed)
    set_keywords(tree, f"MultiTurn{algorithm}Trainer", model=str(model))
    rates = {"critic_learning_rate": 5e-3} if algorithm == "PPO" else {}
    set_keywords(
        tree, f"MultiTurn{algorithm}Config", max_new_tokens=1, learning_rate=2e-3, seed=seed, logging_steps=1, use_cpu=True,
        bf16=False, output_dir=str(tmp_path / "run"), num_eval_episodes=32, report_to="none", disable_tqdm=True,
        max_grad_norm=1.0, diagnosis_interval=0, **rates,
    )  # fmt: skip
    names: dict[str, Any] = {}
    exec(ast.unparse(tree), names)
    returns = [entry["return/mean"] for entry in names["trainer"].state.log_history if "return/mean" in entry]
    first, last = sum(returns[:2]) / 2, sum(returns[-2:]) / 2
    with capsys.disabled():
        print(f"\n{environment}, {algorithm}, seed {seed}: mean return at first {first:.3f}, at last {last:.3f}")
    # Always giving the right answer to one of the two questions earns half.
    assert first < 0.35 and last > (0.8 if environment == "toy" else 0.35) and last > first + 0.3
