"""Several environments in one pool: each episode gets an instance of its own kind and its own limits, wherever they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from elsewhere import Elsewhere, Toy
from episodes import CHAT, Factory, Scripted, ScriptedSampler, go_on, specs

from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import StopReason

MAX_TURNS, TERMINATED = StopReason.MAX_TURNS, StopReason.TERMINATED
LIMITS = {"toy": Limits(4, 3, 1000), "long": Limits(2, 1, 1000)}


def named(count: int, *names: str) -> list[EpisodeSpec]:
    return [replace(spec, environment=names[spec.seed % len(names)]) for spec in specs(*[None] * count)]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "where",
    [{}, {"workers": 2}, {"max_environments": 1}, {"workers": 2, "max_environments": 2}, {"processes": 1}],
    ids=str,
)
def test_each_episode_plays_its_own(where: dict[str, int]) -> None:
    """One that ends after a turn, and one that is cut after two of its two turns, answers of one token."""
    pool = EnvironmentPool({"toy": Toy, "long": Elsewhere}, **where)
    engine = RolloutEngine(pool, CHAT, Limits(1, 1, 1), environment_limits=LIMITS)
    policy = ScriptedSampler()
    for _ in range(2):  # the second time on the instances of the first
        episodes = engine.run(named(4, "toy", "long"), policy)
        assert [episode.environment_name for episode in episodes] == ["toy", "long"] * 2
        assert [episode.rewards for episode in episodes] == [[1.0], [1.0, 2.0]] * 2
        assert [episode.stop_reason for episode in episodes] == [TERMINATED] * 4
    asked = {
        name: {r.max_new_tokens for r in policy.requests if r.episode % 2 == place} for place, name in enumerate(LIMITS)
    }
    assert asked == {"toy": {3}, "long": {1}}
    pool.close()


def test_limits_are_the_environments() -> None:
    class Endless(Scripted):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return super().reset(seed, {"answers": [go_on("up")]})

    engine = RolloutEngine(
        EnvironmentPool({"toy": Endless, "long": Endless}), CHAT, Limits(1, 1, 1), environment_limits=LIMITS
    )
    episodes = engine.run(named(2, "toy", "long"), ScriptedSampler())
    assert [len(episode.turns) for episode in episodes] == [4, 2]
    assert [episode.stop_reason for episode in episodes] == [MAX_TURNS] * 2


def test_instances_are_kept_apart_and_all_closed() -> None:
    factories = {"toy": Factory(), "long": Factory()}
    pool = EnvironmentPool(factories)
    engine = RolloutEngine(pool, CHAT, Limits(1, 1, 1), environment_limits=LIMITS)
    engine.run(named(4, "toy", "long"), ScriptedSampler())
    engine.run(named(3, "long"), ScriptedSampler())
    engine.run(named(2, "toy"), ScriptedSampler())
    made = {name: [instance.resets for instance in factory.made] for name, factory in factories.items()}
    assert {name: sorted(resets) for name, resets in made.items()} == {"toy": [2, 2], "long": [1, 2, 2]}
    pool.close()
    assert [instance.closed for factory in factories.values() for instance in factory.made] == [1] * 5
