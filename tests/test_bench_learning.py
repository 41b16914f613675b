"""The benchmark from start to success: it goes on where it ended, chooses rates by the sweep; the page shows its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learning
from learning_side import Progress, Scored
from learning_tasks import EVERY

from agile_trainers.embedded import make_embedded_model, words_of


def finished(
    side: str, task: str, rate: float, seed: int, episodes: int, arrived: bool = True, last: float = 0.9
) -> Any:
    return {
        "side": side, "task": task, "rate": rate, "seed": seed, "arrived": arrived, "episodes": episodes,
        "curve": [0.5, last, last, last], "cpu": 2.0, "process_cpu": 8.0, "process_wall": 9.0,
    }  # fmt: skip


def test_a_rate_is_that_with_the_fewest_episodes() -> None:
    first, second = learning.RATES
    sweep = [finished("TRL", "delayed", first, learning.TUNING, 3000)]
    assert learning.chosen_rate(sweep, "TRL", "delayed") is None  # not all were tried
    assert learning.budget(sweep, "TRL", "delayed", learning.TUNING) == 3000  # another has to be better
    assert learning.budget(sweep, "ours", "delayed", learning.TUNING) == learning.BUDGETS["delayed"]
    assert learning.budget(sweep, "TRL", "delayed", 0) == learning.BUDGETS["delayed"]
    slower = finished("TRL", "delayed", second, learning.TUNING, 3000, arrived=False)
    assert learning.chosen_rate([*sweep, slower], "TRL", "delayed") == first
    faster = finished("TRL", "delayed", second, learning.TUNING, 2000)
    assert learning.chosen_rate([*sweep, faster], "TRL", "delayed") == second
    neither = [finished("TRL", "delayed", first, learning.TUNING, 9000, arrived=False, last=0.4), slower]
    assert learning.chosen_rate(neither, "TRL", "delayed") == second  # nearest
    failed = {"side": "TRL", "task": "delayed", "rate": first, "seed": learning.TUNING, "failed": "died"}
    assert learning.chosen_rate([failed, slower], "TRL", "delayed") == second


def test_what_is_left_is_the_sweep_and_then_each_seed() -> None:
    sweep = learning.left([])
    assert len(sweep) == 24 and {seed for *_, seed in sweep} == {learning.TUNING}
    assert [side for side, *_ in sweep[:5]] == [*learning.SIDES, "ours"]  # in turns
    done = [finished(*one, 1000) for one in sweep]
    after = learning.left(done)
    assert (
        len(after) == 36 and [seed for *_, seed in after] == [0] * 8 + [1] * 8 + [2] * 8 + [0] * 4 + [1] * 4 + [2] * 4
    )
    assert learning.left([*done, finished(*after[0], 1000)]) == after[1:]


def test_arriving_takes_three_rollouts_in_a_row() -> None:
    progress = Progress(10, 0.9, 60)
    for rights in (10, 10, 6):
        progress.outcomes += [True] * rights + [False] * (10 - rights)
        assert not progress.ended()
    progress.outcomes += [True] * 10 + [True] * 10
    assert progress.curve() == [1.0, 1.0, 0.6, 1.0, 1.0] and not progress.ended()  # .867
    progress.outcomes += [True] * 9 + [False]
    assert progress.arrived()
    assert not Progress(10, 0.9, 20).ended()


@pytest.mark.parametrize("task", learning.TASKS)
def test_seeds_name_the_same_start_states_as_rows(task: str) -> None:
    """The sides that play seeds begin like those that play rows, each state as often."""
    rows = EVERY[task].rows
    by_seed = [Scored(task, []).reset(seed)[0] for seed in range(len(rows))]
    assert by_seed == [Scored(task, []).reset(None, row)[0] for row in rows]


def test_an_episode_is_counted_at_its_end() -> None:
    progress = Progress(1, 0.9, 10)
    outcomes = progress.outcomes
    game = Scored("guess_number", outcomes, progress.begun)
    game.reset(None, {"secret": 3})
    game.step("5")
    assert outcomes == []
    game.step("3")
    game.reset(None, {"secret": 3})
    for _ in range(EVERY["guess_number"].turns):
        game.step("12")
    assert outcomes == [True, False]
    assert progress.by_start([{"secret": 2}, {"secret": 3}], 2) == [None, 0.5]
    assert progress.by_start([{"secret": 3}], 1) == [0.0]  # of the last rollout
    progress.forget()
    assert progress.curve() == [] and progress.begun == []


@pytest.mark.slow
@pytest.mark.parametrize("side", ["ours", "TRL"])
def test_a_training_in_a_process_of_its_own(side: str, tmp_path: Path) -> None:
    rows = [{"messages": [{"content": "first second third 0 1 2 3 4 5 6 end"}]}]
    model = make_embedded_model(tmp_path / "model", words=words_of(rows), max_position_embeddings=512)
    training = {
        "task": "delayed", "rate": 0.01, "seed": 0, "episodes": 216, "budget": 432, "model": str(model), "goal": 0.9,
        "folder": str(tmp_path / "run"), "lora": learning.LORA, "options": learning.OPTIONS.get(side, {}),
    }  # fmt: skip
    command = [sys.executable, str(learning.SIDE), side, json.dumps(training)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["episodes"] == 432 and len(result["curve"]) == 2 and not result["arrived"]


def test_page_shows_the_saved_runs() -> None:
    page = learning.PAGE.read_text(encoding="utf-8")
    for name, table in learning.tables(learning.saved_runs()).items():
        assert f"<!-- begin: benchmark {name} -->\n\n{table}\n\n<!-- end -->" in page
