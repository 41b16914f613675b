"""The tasks of groups are drawn by how often they have an advantage, and zero-advantage groups are replaced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from games import Chatter, Uneven, make_trainer, settings
from mixtures import BOTH
from recorded import recorded

from agile_trainers.rollout.seeds import systematic_sample
from agile_trainers.step.task_sampling import TaskPool, TaskSampling, task_pool
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig, MultiTurnREINFORCEConfig

ROWS = Dataset.from_dict({"number": [0, 1, 2, 3], "level": ["dull", "live", "dull", "live"]})


def sampling(pool: TaskPool, groups: int = 4, seed: int = 3, how: str = "adaptive") -> TaskSampling:
    args: Any = SimpleNamespace(task_sampling=how, seed=seed)
    return TaskSampling(args, pool, groups)


def some(number: int) -> TaskPool:
    return TaskPool(number, tuple(map(str, range(number))))


def observe(tasks: TaskSampling, task: int, *informative: bool) -> None:
    """Count groups of a task: of each, whether it had an advantage."""
    for some in informative:
        tasks.observe([task], [None], [not some])


# --------------------------------------------------------------------------------------------------------------- weights


def test_weights_by_hand():
    tasks = sampling(some(4))
    assert tasks.weights.tolist() == [0.5] * 4, "a task that was not played"
    observe(tasks, 0, True)
    assert tasks.weights[0] == pytest.approx(2 / 3)
    observe(tasks, 0, False)
    kept = 0.5**0.125
    assert tasks.weights[0] == pytest.approx((kept + 1) / (kept + 3))
    # Eight groups later a group counts half: (.5 + 1) / (sum of 9 powers + 2).
    observe(tasks, 1, True, *[False] * 8)
    assert tasks.weights[1] == pytest.approx(1.5 / (sum(kept**n for n in range(9)) + 2))
    assert tasks.state()["1"][0] == pytest.approx(0.5, abs=1e-12)
    observe(tasks, 1, *[False] * 1000)
    assert 12 < tasks.state()["1"][1] < 12.05 and 0.07 < tasks.weights[1] < 0.0715, "played now and then"
    assert tasks.weights[2:].tolist() == [0.5, 0.5], "a task's groups age with its own groups alone"


def test_shares_are_exact_on_average():
    """The first task alone has advantages: weights .5 * (many), so that 3.43 of 4 groups are of it."""
    tasks = sampling(some(2))
    observe(tasks, 0, *[True] * 100)
    observe(tasks, 1, *[False] * 100)
    share = tasks.weights[0] / tasks.weights.sum()
    drawn = [Counter(tasks.draw(generation).tasks or ())[0] for generation in range(2000)]
    assert set(drawn) == {int(4 * share), int(4 * share) + 1}
    assert np.mean(drawn) / 4 == pytest.approx(share, abs=0.015)


def test_the_weight_of_a_task_does_not_depend_on_its_number_of_rows():
    """Three rows of one label and one of the other: each label has half of the groups, and then what its counts say."""
    tasks = sampling(TaskPool(2, ("a", "b"), np.array([0, 0, 0, 1])))
    first = tasks.draw(0)
    assert sorted(first.tasks or ()) == [0, 0, 1, 1] and sorted(first.rows or ())[2:] == [3, 3]
    assert len({*(first.rows or ())}) == 3, "a task's rows repeat only once all are drawn"
    observe(tasks, 0, *[True] * 200)
    observe(tasks, 1, *[False] * 200)
    rows = Counter(row for generation in range(500) for row in tasks.draw(generation).rows or ())
    high, low = tasks.weights
    assert rows[3] / 2000 == pytest.approx(low / (high + low), abs=0.01)
    assert max(rows[row] for row in range(3)) - min(rows[row] for row in range(3)) < 120
    assert tasks.state().keys() == {"a", "b"}


LEVELS = np.array([level for _ in range(64) for level in range(5)])
"""The level of each of 320 rows, in a regular order."""


@pytest.mark.parametrize(
    ("pool", "how", "attempt", "least"),
    [
        (TaskPool(5, tuple("abcde"), LEVELS), "adaptive", 0, 5),
        (TaskPool(320, task_of=np.arange(320)), "adaptive", 0, 3),
        (TaskPool(320, task_of=np.arange(320)), "uniform", 1, 3),
        (TaskPool(5, tuple("abcde"), LEVELS[np.argsort(LEVELS)]), "adaptive", 0, 5),
    ],
    ids=["levels", "rows", "replaced", "sorted levels"],
)
def test_a_regular_order_of_rows_does_not_fill_a_batch_with_one_level(pool, how, attempt, least):
    """Evenly spaced draws of 16 rows out of 320 in the order of rows are all of one level."""
    tasks = sampling(pool, groups=16, how=how)
    levels = LEVELS if len(pool.names) == 0 else pool.task_of
    found = [{int(levels[row]) for row in tasks.draw(n, attempt).rows or ()} for n in range(200)]
    assert min(map(len, found)) >= least and np.mean([len(one) for one in found]) > 4.5


def test_a_draw_depends_on_seed_batch_attempt_and_counts():
    pool = some(50)
    one, other = sampling(pool, 8), sampling(pool, 8)
    assert one.draw(2, 1) == other.draw(2, 1)
    different = [one.draw(2, 1), one.draw(2, 2), one.draw(3, 1), sampling(pool, 8, seed=4).draw(2, 1)]
    assert len({tuple(draw.tasks or ()) for draw in different}) == 4
    observe(one, 0, *[True] * 8)
    other.restore(one.state())
    assert one.draw(2).tasks == other.draw(2).tasks and one.state() == other.state()


def test_uniform_sampling_draws_only_what_nothing_else_decides():
    rows = sampling(TaskPool(4, task_of=np.arange(4)), how="uniform")
    assert rows.draw(0).tasks is None and sorted(rows.draw(0, 1).rows or ()) == [0, 1, 2, 3]
    assert Counter(sampling(some(2), how="uniform").draw(0, 1).environments) == {"0": 2, "1": 2}
    assert sampling(None, how="uniform").draw(0, 5).tasks is None  # type: ignore[arg-type]


def test_systematic_sampling():
    random = np.random.Generator(np.random.Philox(1))
    drawn = [Counter(systematic_sample(np.array([0.0, 1.0, 0.0, 2.0, 0.2]), 8, random).tolist()) for _ in range(1000)]
    assert {index for counts in drawn for index in counts} == {1, 3, 4}
    for index, expected in ((1, 2.5), (3, 5.0), (4, 0.5)):
        assert {counts[index] for counts in drawn} == {int(np.floor(expected)), int(np.ceil(expected))}
        assert np.mean([counts[index] for counts in drawn]) == pytest.approx(expected, abs=0.08)


def test_the_names_of_tasks_outlive_a_change_of_the_data(caplog):
    tasks = sampling(TaskPool(2, ("a", "b"), np.arange(2)))
    tasks.restore({"b": [1.0, 3.0], "gone": [1.0, 1.0]})
    assert tasks.weights.tolist() == [0.5, 0.4] and "gone" in caplog.text


# ------------------------------------------------------------------------------------------------------------------ runs


def run(model: Path, folder: Path, **changes: Any) -> tuple[Any, list[dict[str, Any]], list[dict[str, float]]]:
    """A short run with 4 groups of 2 a batch; its records and its logs."""
    changes = {"num_generations": 2, "environment": Uneven, "max_steps": 3, **changes}
    trainer = make_trainer(model, folder, **changes)
    trainer.train()
    return trainer, recorded(folder), [entry for entry in trainer.state.log_history if "loss" in entry]


def informative(records: list[dict[str, Any]]) -> dict[int, bool]:
    """Group to whether its episodes differ in what they were paid in some turn."""
    groups: dict[int, list[Any]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append([turn["reward"] for turn in record["turns"]])
    return {group: any(rewards != members[0] for rewards in members) for group, members in groups.items()}


def test_adaptive_rows(embedded_model, tmp_path):
    """Even rows never pay. The counts are those of the records, and the weights with which rows were drawn follow."""
    options = {"train_dataset": ROWS, "task_column": "level", "task_sampling": "adaptive", "max_steps": 6}
    trainer, records, logs = run(embedded_model, tmp_path, **options)
    by_hand = sampling(TaskPool(2, ("dull", "live"), np.array([0, 1, 0, 1])))
    numbers = [0, 1, 2, 3]
    for generation, log in enumerate(logs):
        played = sorted((r for r in records if r["generation"] == generation), key=lambda r: r["index"])
        drawn = by_hand.draw(generation)
        assert [record["row"]["number"] for record in played[::2]] == [numbers[row] for row in drawn.rows or ()]
        some = informative(played)
        assert not any(some[record["group"]] for record in played if record["row"]["level"] == "dull")
        by_hand.observe(drawn.tasks, by_hand.names_of(drawn), [not some[group] for group in range(4)])
        live = [group for group, task in enumerate(drawn.tasks or ()) if task == 1]
        assert log["tasks/live/share"] == len(live) / 4 and log["tasks/seen"] > 0
        assert log["tasks/live/zero_advantage"] == sum(not some[group] for group in live) / len(live)
        assert log["zero_advantage_groups"] == pytest.approx(1 - sum(some.values()) / 4)
    assert trainer.rollouts.state() == {"counts": by_hand.state(), "discarded": 0}
    weights = by_hand.weights
    assert logs[-1]["tasks/effective"] == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 2)
    assert (
        logs[0]["tasks/live/share"] == 0.5 and logs[-1]["tasks/live/share"] > 0.5 and "resampling/groups" not in logs[0]
    )


def test_adaptive_environments(embedded_model, tmp_path):
    """Environments are drawn by the weight of their counts."""
    options = {"environment": {"dull": Silent, "live": Chatter}, "max_steps": 6}
    _, records, logs = run(embedded_model, tmp_path, task_sampling="adaptive", diagnosis_interval=0, **options)
    shares = [[r["environment"] for r in records if r["generation"] == n].count("dull") / 8 for n in range(6)]
    assert shares[0] == 0.5 > shares[-1]
    assert [log.get("tasks/dull/share", 0.0) for log in logs] == shares and logs[0]["tasks/dull/zero_advantage"] == 1.0


class Silent(Chatter):
    """Pays the same whatever it hears."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return super().step(action)[0], 0.5, True, False, {}


def test_zero_advantage_groups_are_replaced(embedded_model, tmp_path):
    """The batch holds what a replay of the records leaves: each zero-advantage group is replaced, twice at most."""
    limit, scored = 2, []

    def judge(trajectories: list[Any], log_extra: Any, environments: Any, **_: Any) -> list[float]:
        scored.extend(trajectories)
        log_extra("text", [trajectory.turns[0].text for trajectory in trajectories])
        assert all(environment is not None for environment in environments), "they are scored before they play again"
        return [0.0] * len(trajectories)

    trainer, records, logs = run(
        embedded_model, tmp_path, resample_zero_advantage_groups=limit, reward_funcs=judge, log_completions=True
    )
    total = 0
    for generation, log in enumerate(logs):
        played = [record for record in records if record["generation"] == generation]
        some, groups = informative(played), {record["group"]: record for record in played}
        kept = {n for n, r in groups.items() if r["turns"][0]["advantage"] is not None}
        expected, discarded = set(), set()
        for place in range(4):
            tries = [place + 4 * attempt for attempt in range(limit + 1)]
            used = next((n for n, group in enumerate(tries) if some.get(group)), limit)
            expected.add(tries[used])
            discarded |= {*tries[:used]}
        assert kept == expected and groups.keys() == expected | discarded
        total += 2 * len(discarded)
        assert log["resampling/groups"] == len(discarded) and log["episodes_played"] == 8 * (generation + 1) + total
        assert log["resampling/first_zero_advantage"] == sum(not some[group] for group in range(4)) / 4
        assert (
            log["resampling/zero_advantage"]
            == sum(not some[group] for group in kept) / 4
            == log["zero_advantage_groups"]
        )
        returns = [record["return"] for record in played if record["group"] < 4]
        assert log["resampling/first_reward"] == pytest.approx(np.mean(returns))
        trained = [record["return"] for record in played if record["group"] in kept]
        assert log["reward"] == pytest.approx(np.mean(trained), abs=1e-6)
    assert 0 < total == trainer.rollouts.discarded and len(scored) == len(records) == 24 + total
    assert len({(record["seed"], record["generation"]) for record in records}) == len(records) / 2, "seeds are new"
    tokens = sum(len(record["prompt_ids"]) + len(record["completion_ids"]) for record in records)
    assert logs[-1]["num_tokens"] == tokens
    assert all(log["resampling/zero_advantage"] <= log["resampling/first_zero_advantage"] for log in logs)
    table = trainer._logs["extra"]["text"]
    last = sorted((r for r in records if r["generation"] == 2 and r["turns"][0]["advantage"] is not None), key=_place)
    assert list(table)[-8:] == [record["turns"][0]["text"] for record in last]


@pytest.mark.parametrize(("environment", "limit", "judged"), [(Silent, 2, 3), (Silent, 0, 1), (Uneven, 0, 1)])
def test_credit_is_computed_once_for_each_time_that_groups_are_played(
    embedded_model, tmp_path, environment, limit, judged
):
    """The last judgement of the candidates is the credit of the update."""
    options = {"environment": environment, "num_generations": 2, "max_steps": 1, "diagnosis_interval": 0}
    trainer = make_trainer(embedded_model, tmp_path, resample_zero_advantage_groups=limit, **options)
    rule, computed = trainer.batches._credit._rule, []
    trainer.batches._credit._rule = lambda turns: computed.append(rule(turns)) or computed[-1]
    finish, finished = trainer.batches._credit.finish, []
    trainer.batches._credit.finish = lambda one: finished.append(one.credit) or finish(one)
    trainer.train()
    assert len(computed) == judged and len(finished) == 1 and finished[0] is computed[-1]


def _place(record: dict[str, Any]) -> int:
    return record["index"] % 8


def test_of_several_environments(embedded_model, tmp_path):
    """Fresh groups are drawn from all of them."""
    both = {"dull": Silent, "live": Chatter}
    _, records, logs = run(
        embedded_model, tmp_path, environment=both, resample_zero_advantage_groups=3, diagnosis_interval=0
    )
    for generation in range(3):
        played = [record for record in records if record["generation"] == generation]
        assert Counter(record["environment"] for record in played if record["index"] < 8) == {"dull": 4, "live": 4}
        kept = [record["environment"] for record in played if record["turns"][0]["advantage"] is not None]
        assert kept.count("live") > 4 and logs[generation]["environments/live/share"] == kept.count("live") / 8


def test_what_has_no_advantage_stays(embedded_model, tmp_path):
    options = {"environment": Silent, "resample_zero_advantage_groups": 2, "max_steps": 1}
    _, records, (log,) = run(embedded_model, tmp_path, **options)
    assert len(records) == 24 and log["resampling/groups"] == 8 and log["zero_advantage_groups"] == 1.0
    assert {record["group"] for record in records if record["turns"][0]["advantage"] is not None} == {8, 9, 10, 11}


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("task_sampling", "sometimes"), ("resample_zero_advantage_groups", -1),
    ],
)  # fmt: skip
def test_values(tmp_path, option, value):
    with pytest.raises(ValueError, match=option):
        MultiTurnGRPOConfig(**settings(tmp_path, **{option: value}))


@pytest.mark.parametrize("config", [MultiTurnPPOConfig, MultiTurnREINFORCEConfig])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("task_sampling", "adaptive"), ("task_column", "level"), ("resample_zero_advantage_groups", 1),
    ],
)  # fmt: skip
def test_without_groups(tmp_path, config, option, value):
    args = config(**settings(tmp_path, num_generations=1, **{option: value}))
    with pytest.raises(ValueError, match=f"{option}=.*{config.__name__}"):
        args.with_environment()


STREAM = ROWS.to_iterable_dataset()
UNNAMED = STREAM.map(lambda row: row)


@pytest.mark.parametrize(
    ("rows", "mixture", "changes", "named"),
    [
        (None, None, {"task_sampling": "adaptive"}, "needs tasks"),
        (None, None, {"task_column": "level"}, "there is none"),
        (ROWS, None, {"task_column": "difficulty"}, "it has number, level"),
        (UNNAMED, None, {"task_column": "difficulty"}, "it has number, level"),
        (STREAM, None, {"task_sampling": "adaptive"}, "task_sampling='adaptive' draws rows"),
        (STREAM, None, {"resample_zero_advantage_groups": 2}, "resample_zero_advantage_groups=2 draws rows"),
        (ROWS, None, {"task_sampling": "adaptive", "shuffle_dataset": False}, "shuffle_dataset=False has no effect"),
    ],
)
def test_what_does_not_fit_the_rows(tmp_path, rows, mixture, changes, named):
    with pytest.raises(ValueError, match=named):
        task_pool(MultiTurnGRPOConfig(**settings(tmp_path, **changes)), rows, mixture)


def test_a_stream_that_does_not_name_its_columns_has_them(tmp_path):
    assert UNNAMED.column_names is None
    assert task_pool(MultiTurnGRPOConfig(**settings(tmp_path, task_column="level")), UNNAMED, None) is None


def test_the_shares_of_a_column_are_logged_with_batches_ahead(embedded_model, tmp_path):
    options = {"train_dataset": ROWS, "task_column": "level", "max_steps": 3}
    now, ahead = (run(embedded_model, tmp_path / str(n), batches_ahead=n, **options)[2] for n in (0, 1))
    for logs in (now, ahead):
        assert len(logs) == 3 and all(any(name.startswith("tasks/") for name in log) for log in logs)


def test_by_hand_the_caller_chooses(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, environment=BOTH, resample_zero_advantage_groups=1)
    with pytest.raises(ValueError, match="resample_zero_advantage_groups=1 chooses the groups"):
        trainer.rollout()
