"""The probes' promises, by enumeration, and that each catches what it is there to catch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from agile_environments.probes import DIGITS, PROBE_WORDS, PROBES, EqualReward, Probe
from agile_trainers.envs import validate_step

FACTORIES = {name: probe.factory for name, probe in PROBES.items()}


def returns(probe: Probe, start: int, actions: Sequence[str]) -> float:
    """The return of fixed answers."""
    probe.reset(seed=start)
    total = 0.0
    for action in actions:
        _, reward, terminated, truncated, _ = validate_step(probe.step(action))
        total += reward
        if terminated or truncated:
            break
    return total


def mean_random_return(factory: type[Probe]) -> float:
    """Mean over all starts and all answers. Eight turns have too many: there the turns do not depend on each other, so
    that by linearity answering alike on every turn has the same mean."""
    probe = factory()
    sequences = list(itertools.product(factory.vocabulary, repeat=min(factory.max_turns, 5)))
    if factory.max_turns == 8:
        sequences = [(word,) * 8 for word in factory.vocabulary]
    values = [returns(probe, start, actions) for start in range(factory.starts) for actions in sequences]
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_random_return_is_exact(factory: type[Probe]) -> None:
    assert mean_random_return(factory) == pytest.approx(factory.random_return, abs=1e-12)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_the_expert_reaches_the_optimal_return_and_success_on_every_start(factory: type[Probe]) -> None:
    probe, total = factory(), 0.0
    for start in range(factory.starts):
        observation, _ = probe.reset(seed=start)
        for turn in range(1, factory.max_turns + 1):
            observation, reward, terminated, truncated, info = probe.step(probe.optimal_action(str(observation)))
            total += reward
            assert not truncated
            if terminated:
                break
            assert turn < factory.max_turns and not info["success"]
        assert info["success"] is True
    assert total / factory.starts == pytest.approx(factory.optimal_return, abs=1e-12)


def test_no_play_of_the_grid_is_better_than_its_optimum() -> None:
    factory = FACTORIES["grid"]
    probe = factory()
    best = [
        max(returns(probe, start, play) for play in itertools.product(("left", "right"), repeat=5))
        for start in range(12)
    ]
    assert math.fsum(best) / 12 == pytest.approx(factory.optimal_return)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_the_seed_enumerates_the_starts(factory: type[Probe]) -> None:
    def transcript(seed: int) -> tuple[str, ...]:
        observation, _ = probe.reset(seed=seed)
        shown = [str(observation)]
        while True:
            observation, _, terminated, truncated, _ = probe.step("wrong")
            shown.append(str(observation))
            if terminated or truncated:
                return tuple(shown)

    probe = factory()
    transcripts = [transcript(seed) for seed in range(factory.starts)]
    assert len(set(transcripts)) == factory.starts
    assert transcript(factory.starts + 2) == transcripts[2 % factory.starts]
    assert {word for shown in transcripts for text in shown for word in text.split(" ")} <= set(PROBE_WORDS)
    assert set(factory.vocabulary) <= set(PROBE_WORDS)


def test_start_options() -> None:
    probe = FACTORIES["conditional"]()
    assert probe.reset(seed=1, options={"start": 5})[0] == "5"
    assert probe.reset(seed=1, options={"start": None})[0] == "1"
    assert probe.reset()[0] in DIGITS
    with pytest.raises(ValueError, match="from 0 to 6, got 7"):
        probe.reset(options={"start": 7})
    with pytest.raises(ValueError, match=r"ConditionalTarget.*strat.*start"):
        probe.reset(options={"strat": 1})


def test_hand_computed_rewards() -> None:
    def play(name: str, start: int, *actions: str) -> list[float]:
        probe = FACTORIES[name]()
        probe.reset(seed=start)
        return [validate_step(probe.step(action))[1] for action in actions]

    assert play("constant", 0, "4") == [1.0] and play("constant", 0, "3") == [0.0]
    assert play("conditional", 5, " 3\n") == [1.0]  # 5 % 3 + 1
    assert play("conditional", 5, "3 3") == [0.0]
    assert play("two_inputs", 6 * 7 + 5, "3") == [1.0]  # (6 + 5) % 3 + 1
    assert play("memory", 6, "0", "6") == [0.0, 1.0] and play("memory", 6, "6", "0") == [0.0, 0.0]
    # digits 1, 2, 0: 1 % 3 + 1, (2 + 1) % 3 + 1, (0 + 2) % 3 + 1
    assert play("delayed", 9 + 2 * 3, "2", "1", "3") == [0.0, 0.0, 1.0]
    assert play("delayed", 9 + 2 * 3, "2", "2", "3") == [0.0, 0.0, pytest.approx(2 / 3)]
    # digits 2, 5, 1, 4, 0, 3, 6, 2
    assert play("eight_turns", 2 * 7 + 3, *"33222213") == [1, 1, 1, 1, 0, 0, 1, 1]
    assert play("equal_reward", 0, "4 4 4 4") == [1.0]
    # start 2 of 12: cell 0, goal 3; the wall holds, any other word stays
    assert play("grid", 2, "left", "right", "right", "stay", "right") == [-0.1, -0.1, -0.1, -0.1, 1.0]


def test_the_grid_truncates_at_its_limit_but_arriving_last_is_an_end() -> None:
    def last(*actions: str) -> tuple[bool, bool, bool]:
        probe = FACTORIES["grid"]()
        assert probe.reset(seed=2)[0] == "at 0 goal 3"
        for action in actions:
            _, _, terminated, truncated, info = probe.step(action)
        return terminated, truncated, info["success"]

    assert last("left", "left", "left", "left") == (False, False, False)
    assert last("left", "left", "left", "left", "left") == (False, True, False)
    assert last("left", "left", "right", "right", "right") == (True, False, True)


def test_memory_hides_the_digit() -> None:
    probe = FACTORIES["memory"]()
    assert {(probe.reset(seed=seed)[0], probe.step("0")[0]) for seed in range(7)} == {
        (digit, "recall") for digit in DIGITS
    }


def test_delayed_reward_does_not_let_turns_share_what_they_learn() -> None:
    probe, answers = FACTORIES["delayed"](), {}
    for start in range(27):
        observation, _ = probe.reset(seed=start)
        for _ in range(3):
            name, digit = str(observation).split(" ")
            answers[name, digit] = probe.optimal_action(str(observation))
            observation, *_ = probe.step("0")
    for digit in "012":
        assert len({answers[name, digit] for name in ("first", "second", "third")}) == 3


def length_after_training(pay_every_token: bool) -> float:
    """Expected answer length of a policy with one parameter (the logit of going on), trained by exact expected policy
    gradients on the probe's rewards with the mean return as baseline, over lengths 1 to 8."""
    probe, lengths, logit = EqualReward(), range(1, 9), 0.0
    rewards = []
    for length in lengths:
        probe.reset(seed=0)
        rewards.append(probe.step(" ".join("4" * length))[1] * (length if pay_every_token else 1))
    for step in range(101):
        go_on = 1 / (1 + math.exp(-logit))
        chances = [go_on ** (length - 1) * (1 - go_on if length < 8 else 1.0) for length in lengths]
        mean = sum(chance * length for chance, length in zip(chances, lengths))
        if step == 100:
            return mean
        # d log p(length) / d logit: (1 - go_on) for each time it went on, -go_on for stopping
        scores = [(length - 1) * (1 - go_on) - (go_on if length < 8 else 0.0) for length in lengths]
        baseline = sum(chance * reward for chance, reward in zip(chances, rewards))
        logit += 0.05 * sum(c * (r - baseline) * s for c, r, s in zip(chances, rewards, scores))
    raise AssertionError


def test_equal_reward_moves_an_estimator_that_pays_each_token_and_no_other() -> None:
    untrained = sum(0.5**length * length for length in range(1, 8)) + 8 * 0.5**7
    threshold = PROBES["equal_reward"].threshold
    assert length_after_training(pay_every_token=False) == pytest.approx(untrained, abs=1e-12)
    assert length_after_training(pay_every_token=True) > untrained * (1 + threshold)


def test_budgets() -> None:
    assert {name: probe.episodes for name, probe in PROBES.items()} == {
        "constant": 4096,
        "conditional": 4096,
        "two_inputs": 12288,
        "memory": 16384,
        "delayed": 16384,
        "grid": 32768,
        "equal_reward": 4096,
        "eight_turns": 16384,
    }
    assert [name for name, probe in PROBES.items() if probe.criterion == "length"] == ["equal_reward"]
    assert all(probe.threshold == 0.95 for probe in PROBES.values() if probe.criterion == "success")
