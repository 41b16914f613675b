"""The hook ``end``: what an environment gives when a limit of the trainer ends an episode, wherever it runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from elsewhere import AsyncScored, Elsewhere, Scored
from episodes import Scripted, ScriptedSampler, end, go_on, make_engine, specs

from agile_trainers.envs.checker import EnvironmentProtocolError, check_environment
from agile_trainers.records.writer import episode_row
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.environment_probe import probe_environment
from agile_trainers.types import StopReason, Trajectory


def played(kind: Any, *options: dict[str, Any], **settings: Any) -> list[Trajectory]:
    engine = make_engine(kind, max_turns=3, **settings)
    try:
        return engine.run(specs(*(options or ({},))), ScriptedSampler())
    finally:
        engine.pool.close()


PLACES = {
    "inline": {},
    "threads": {"workers": 2},
    "processes": {"processes": 2, "timeout": 60.0},
}


@pytest.mark.parametrize("kind", [Scored, AsyncScored])
@pytest.mark.parametrize("place", PLACES)
def test_the_reward_at_a_limit_is_added_to_the_last_turn(kind: Any, place: str) -> None:
    """Turns give 1, 2, 3; the end gives 30. A failing end fails its episode alone."""
    first, failed = played(kind, {}, {"what": "raise at the end"}, **PLACES[place])
    assert first.rewards == [1.0, 2.0, 33.0] and first.end_reward == 30.0
    assert first.stop_reason is StopReason.MAX_TURNS and first.stop_reason.truncated
    assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR and "a bug" in str(failed.error)
    info = json.loads(episode_row(first, step=0, index=0)["turns"][-1]["info"])
    assert info == {"end_reward": 30.0}


@pytest.mark.parametrize("place", PLACES)
def test_without_the_hook_nothing_changes(place: str) -> None:
    (episode,) = played(Elsewhere, **PLACES[place])
    assert episode.rewards == [1.0, 2.0] and episode.end_reward is None


def test_a_full_context_is_a_limit_too() -> None:
    """The prompt has nine tokens and a turn 12: two turns fit."""
    (episode,) = played(Scored, max_model_length=24)
    assert episode.stop_reason is StopReason.CONTEXT_FULL and len(episode.turns) == 2
    assert episode.rewards == [1.0, 2.0 + 10.0]


def test_only_limits_of_the_trainer_ask() -> None:
    """An environment that ends or truncates an episode has rewarded its last step; without a turn there is none."""

    class Asked(Scripted):
        def end(self, reason: str) -> float:
            return 5.0

    answers = [end(1.0)], [("up", 1.0, False, True, {})], [go_on("up", 1.0)]
    over, cut, limited = played(Asked, *({"answers": it} for it in answers))
    assert [over.end_reward, cut.end_reward, limited.end_reward] == [None, None, 5.0]
    assert (over.episode_return, cut.episode_return, limited.episode_return) == (1.0, 1.0, 8.0)
    (full,) = played(Asked, max_model_length=9)
    assert full.stop_reason is StopReason.CONTEXT_FULL and not full.turns and full.end_reward is None


@pytest.mark.parametrize("reward", [float("nan"), "1", True, 1e39])
def test_a_reward_at_the_end_that_is_none_fails_the_episode(reward: Any) -> None:
    class Wrong(Scored):
        def end(self, _: str) -> Any:
            return reward

    (episode,) = played(Wrong)
    assert episode.stop_reason is StopReason.ENVIRONMENT_ERROR and "end() returned" in str(episode.error)
    assert episode.rewards == [1.0, 2.0, 3.0]


def test_what_the_end_rewarded_is_not_estimated_by_a_critic() -> None:
    """``None`` leaves the episode unfinished, as if there were no hook; 0 is a reward."""

    class Given(Scored):
        def end(self, _: str) -> Any:
            return self.what

    batch = collate(played(Given, {"what": None}, {"what": 0.0}, {"what": 1.0}), pad_token_id=0, end_token_id=1)
    assert batch.cut.tolist() == [True, True, True] and batch.unfinished.tolist() == [True, False, False]


def test_the_checker_and_the_probe_know_the_hook() -> None:
    class Unseen(Scored):
        def end(self) -> float:
            return 1.0

    class Random(Scored):
        made = 0

        def end(self, _: str) -> float:
            Random.made += 1
            return float(Random.made)

    class NotAwaited(Scored):
        async def _later(self) -> float:
            return 1.0

        def end(self, _: str) -> Any:
            later = self._later()
            later.close()
            return later

    assert not check_environment(Scored, max_turns=2).findings
    assert not check_environment(AsyncScored, max_turns=2).findings
    (wrong,) = check_environment(Unseen).errors
    assert "cannot be called as end(reason)" in wrong and "another name" in wrong
    (differs,) = check_environment(Random, max_turns=2).warnings
    assert "gave different results on two instances" in differs
    (later,) = check_environment(NotAwaited).errors
    assert "end() returned" in later and "async def" in later
    for kind, error in ((Unseen, "end\\(reason\\)"), (NotAwaited, "async def")):
        with pytest.raises(EnvironmentProtocolError, match=error):
            probe_environment(EnvironmentPool(kind), 0, None)
