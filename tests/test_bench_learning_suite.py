"""The suite of learning tasks: its measures by hand, its halves, and games whose best policy wins."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import learning_suite as bench
from learning_tasks import CHOSEN, EVERY, HELD_OUT, TASKS, Adding, Corridor, Lock, Recall, Slippery

from agile_trainers.envs.scripted_policies import known_policies


def run(curve: list[float], task: str = "lock", seed: int = 0, side: str = "ours", **more: Any) -> Any:
    episodes = len(curve) * TASKS[task].episodes
    return {"side": side, "task": task, "rate": 0.01, "seed": seed, "curve": curve, "episodes": episodes, **more}


def test_half_of_the_tasks_is_held_out() -> None:
    assert sorted([*CHOSEN, *HELD_OUT]) == sorted(TASKS) and len(CHOSEN) == len(HELD_OUT) == 5
    for task in TASKS.values():
        assert task.turns > 1 and task.budget % task.episodes == 0 and len(task.rows) >= task.groups


def test_arrival_takes_the_mean_of_three_rollouts() -> None:
    curve = [0.5, 0.9, 0.9, 0.9, 0.6, 1.0, 1.0]
    assert bench.arrival(curve, 0.75) == 3 and bench.arrival(curve, 0.9) == 4 and bench.arrival(curve, 0.95) is None
    assert bench.arrival([1.0, 1.0], 0.9) is None
    assert bench.episodes_to(run(curve), 0.9) == 4 * 144 and bench.episodes_to(run(curve), 0.95) is None


def test_a_fall_is_below_the_lower_goal_after_the_higher() -> None:
    assert bench.falls([0.9] * 3 + [0.7] * 3 + [0.9] * 3 + [0.75] * 3) == 2
    assert bench.falls([0.8, 0.85, 0.85, 0.1, 0.1, 0.1]) == 0  # it never arrived
    assert bench.falls([0.9, 0.9, 0.9, 0.65, 0.8, 0.9]) == 1  # .783 in the middle
    assert bench.falls([0.9, 0.9, 0.9, 0.7, 0.8, 0.9]) == 0  # .8


def test_trls_rate_is_that_of_the_sweep() -> None:
    first, second = bench.RATES
    arrives = run([0.9] * 5, side="TRL", seed=bench.TUNING, rate=first)
    late = run([0.5] * 4 + [0.9] * 5, side="TRL", seed=bench.TUNING, rate=second)
    never = run([0.5, 0.7, 0.8], side="TRL", seed=bench.TUNING, rate=second)
    worse = run([0.5, 0.6, 0.7], side="TRL", seed=bench.TUNING, rate=first)
    assert bench.chosen_rate([arrives], "lock") is None
    assert bench.chosen_rate([arrives, late], "lock") == first
    assert bench.chosen_rate([worse, late], "lock") == second
    assert bench.chosen_rate([worse, never], "lock") == second


def test_ratios_of_episodes_are_paired() -> None:
    """Of 4 and 8 rollouts, 6 and 12: half of the episodes each time; one side of a pair alone does not count."""
    ours = [run([0.9] * 4, seed=seed) for seed in (0, 1)]  # 3 rollouts each
    theirs = [run([0.1] * 3 + [0.9] * 3, seed=0), run([0.1] * 3 + [0.9] * 3, seed=1), run([0.1] * 9, seed=2)]
    ratio, low, high = bench.paired(ours, theirs, 0.9) or (0, 0, 0)
    assert ratio == pytest.approx(0.5) and low <= ratio <= high
    assert bench.paired(ours, theirs[2:], 0.9) is None
    # A training that did not arrive counts with its budget: 3 of 9 rollouts.
    (ratio, low, high) = bench.paired([run([0.9] * 4, seed=2)], theirs, 0.9) or (0, 0, 0)
    assert ratio == pytest.approx(1 / 3) and (low, high) == (0, math.inf)


def test_a_saved_training_is_found_by_the_values_of_its_options() -> None:
    values = bench.studied({})
    assert values["beta"] == 0.0 and bench.studied({"beta": 0.1}) == {**values, "beta": 0.1}
    saved = run([0.9], options=values)
    assert bench.find([saved], "ours", "lock", 0.01, 0, values) is saved
    assert bench.find([saved], "ours", "lock", 0.01, 0, {**values, "beta": 0.1}) is None
    assert bench.find([saved], "TRL", "lock", 0.01, 0, values) is None
    assert bench.find([saved], "ours", "lock", 0.01, 0, values, "ppo") is None
    # A line from before an option was added is one of its default alone.
    assert bench.ADDED.items() <= bench.studied({}, "ppo").items() | values.items()
    earlier = run([0.9], options={name: value for name, value in values.items() if name not in bench.ADDED})
    assert bench.find([earlier], "ours", "lock", 0.01, 0, values) is earlier
    assert bench.find([earlier], "ours", "lock", 0.01, 0, bench.studied({"replay_successes": 9})) is None


def test_options_are_compared_on_each_half() -> None:
    """3 rollouts of 6 to either goal, in one pair: no interval."""
    options = bench.studied(bench.EARLIER)
    before = run([0.1] * 3 + [0.9] * 3, "recall", rate=bench.RATE, options=options)
    after = run([0.9] * 4, "recall", rate=bench.RATE, options={**options, "num_iterations": 2})
    rows = bench.ablation_table([before, after]).splitlines()[2:]
    assert rows == [
        "| held out | `num_iterations=2` | 1, 1 | 1/1 | 0 | 0.900 | 0.900 | 0.50 | 0.50 |",
        "| held out | none | 1, 1 | 1/1 | 0 | 0.500 | 0.500 | 1.00 | 1.00 |",
    ]


@pytest.mark.parametrize("task", TASKS)
def test_the_best_policy_wins_and_the_one_that_is_taught_does_not(task: str) -> None:
    game = EVERY[task]
    environment = game.make(0)
    policies = known_policies(environment)

    def mixed(messages: list[Any], rng: random.Random) -> str:
        return policies["expert" if rng.random() < game.expert else "random"](messages, rng)

    expert, taught = (won(game, environment, policy) for policy in (policies["expert"], game.teacher or mixed))
    assert expert > 0.98 and taught < 0.75


def won(game: Any, environment: Any, policy: Any, episodes: int = 600) -> float:
    wins = 0
    for number in range(episodes):
        rng = random.Random(number)
        observation, _ = environment.reset(None, dict(game.rows[number % len(game.rows)]))
        messages = [{"role": "user", "content": observation}]
        for _ in range(game.turns):
            answer = policy(messages, rng)
            observation, _, terminated, truncated, info = environment.step(answer)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
            if terminated or truncated:
                break
        assert terminated or truncated
        wins += info["success"]
    return wins / episodes


def test_new_tasks_by_hand() -> None:
    def played(environment: Any, start: int, *answers: str) -> Any:
        seen = [environment.reset(None, {"start": start})[0]]
        for answer in answers:
            observation, reward, *ends, info = environment.step(answer)
            seen.append((observation, reward))
        return [*seen, any(ends), info["success"]]

    assert played(Adding(), 7 * 5 + 6, "7", "3") == [
        "first 5",
        ("second 6", 0.0),
        ("end", 1.0),
        True,
        True,
    ]  # 11 % 3 + 1
    assert played(Adding(), 7 * 5 + 6, "3", "2")[-3:] == [("end", 0.0), True, False]
    assert played(Recall(), 8 * 3 + 2 * 1 + 1, "0", "0", "1") == [
        "3", ("1", 0.0), ("recall second", 0.0), ("end", 1.0), True, True
    ]  # fmt: skip
    assert played(Lock(), 3 * 2 + 1, "3", "1") == ["first 2", ("second 1", 0.0), ("end", 1.0), True, True]
    assert played(Lock(), 3 * 2 + 1, "2", "1")[-3:] == [("end", 0.0), True, False]
    # Signs 1, 0, 2, ...: an even door takes the sign plus 1, an odd one the next; a wrong answer leaves it closed.
    assert played(Corridor(), 3 * 1 + 2, "2", "1", "2") == [
        "at 0 go 1", ("at 1 go 0", 0.0), ("at 1 go 0", 0.0), ("at 2 go 2", 0.0), False, False
    ]  # fmt: skip
    assert played(Corridor(), 0, *["3"] * 14)[-2:] == [True, False]


def test_a_slip_is_a_turn_without_a_step() -> None:
    class Certain(Slippery):
        slips = 0.0

    class Stuck(Slippery):
        slips = 1.0

    def played(environment: Slippery, start: int, *answers: str) -> list[Any]:
        observation = environment.reset(None, {"start": start})[0]
        found = [environment.step(answer) for answer in answers]
        return [observation, *(one[0] for one in found), found[-1][2], found[-1][3]]

    # From cell 0 to goal 1; with the wind, left moves right.
    assert played(Certain(), 0, "right") == ["at 0 goal 1 wind 0", "at 1 goal 1 wind 0", True, False]
    assert played(Certain(), 1, "right", "left") == [
        "at 0 goal 1 wind 1",
        *["at 0 goal 1 wind 1"],
        "at 1 goal 1 wind 1",
        True,
        False,
    ]
    assert played(Stuck(), 0, *["right"] * 8)[-2:] == [False, True]
    slipped = [Slippery(stream) for stream in (0, 1)]
    for one in slipped:
        one.reset(None, {"start": 6})  # from 0 to 4
    moves = [[one.step("right")[0] for _ in range(5)] for one in slipped]
    assert moves[0] != moves[1]


def test_page_shows_the_saved_runs() -> None:
    page = bench.PAGE.read_text(encoding="utf-8")
    for name, table in bench.tables(bench.saved_runs()).items():
        assert f"<!-- begin: benchmark {name} -->\n\n{table}\n\n<!-- end -->" in page


def test_updates_of_a_batch_are_compared_within_an_algorithm() -> None:
    """PPO needs half of the rollouts with four updates; a training without its partner does not count."""
    once, four = (bench.studied({"num_iterations": updates}, "ppo") for updates in (1, 4))
    late, soon = [0.1] * 3 + [0.9] * 3, [0.9] * 4
    known: dict[str, Any] = {"algorithm": "ppo", "cpu": 3.0}
    runs = [
        run(late, options=once, **known),
        run(soon, options=four, **known),
        run(soon, seed=1, options=four, **known),
    ]
    for one in runs:
        one["rate"] = bench.RATE
    shown = bench.algorithm_table(runs).splitlines()[2:]
    assert [row.split(" | ")[1:4] for row in shown] == [["chosen", "1", "1, 1"], ["chosen", "4", "1, 1"]]
    assert shown[1].endswith("| 3 | 0.50 | 0.50 |")
