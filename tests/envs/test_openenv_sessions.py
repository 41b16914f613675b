"""OpenEnv's sessions, driven by its own harness through the endpoint of agents, on a real server with a rubric."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("openenv.core.harness", reason="OpenEnv is not installed: pip install 'agile-trainers[dev]'")

import cloudpickle
from guess_sessions import Guess, Hint, RubricServer
from openenv.core.env_server import create_fastapi_app
from openenv_server import serve

from agile_trainers.envs import make_environment_factory
from agile_trainers.envs.agent import CONTEXT_FULL, MAX_TURNS
from agile_trainers.evaluation.scripted_policies import PlayedAgent, play_agent
from agile_trainers.rollout.agents.requests import Refusal


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(create_fastapi_app(RubricServer, Guess, Hint, max_concurrent_envs=16)) as address:
        yield address


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'guess', 'arguments': arguments})}\n</tool_call>"


def played(url: str, answers: Iterable[str], row: dict[str, Any] | None = None, **limits: int) -> PlayedAgent:
    said = iter(answers)
    factory = make_environment_factory("openenv:guess_sessions:Sessions", url=url, limits=limits)
    (episode,) = play_agent(cloudpickle.loads(cloudpickle.dumps(factory)), lambda *_: next(said), [4], row)
    return episode


def test_a_session_is_played_and_rewarded_by_its_rubric(url: str) -> None:
    episode = played(url, [call(number=3), call(number=5)], row={"low": 2})
    first, second = episode.calls
    assert first["messages"][0] == {"role": "user", "content": "Guess a number from 2 to 9."}
    assert [tool["function"]["name"] for tool in first["tools"]] == ["guess"]
    *_, asked, told, _ = second["messages"]
    assert asked["tool_calls"][0]["function"]["arguments"] in ({"number": 3}, '{"number": 3}')
    assert json.loads(told["content"])["observation"]["hint"] == "wrong"
    assert episode.reward == 0.5 and episode.info == {"step_count": 2}


@pytest.mark.parametrize(
    ("answers", "limits", "reward"),
    [
        (["It is 5."], {}, 0.0),  # no tool was called: verify gives no reward
        ([call(guess=5), call(number="five"), "I give up."], {}, 0.0),  # arguments that the session cannot read
        ([call(guess=5), call(number=5)], {}, 1.0),
        ([call(number=1), call(number=5)], {"max_turns": 1}, 0.0),
        ([call(number=1), call(number=2), call(number=5)], {"max_total_tool_calls": 3}, 0.25),
    ],
)
def test_what_a_policy_may_do_is_an_episode(
    url: str, answers: list[str], limits: dict[str, int], reward: float
) -> None:
    assert played(url, answers, **limits).reward == reward


@pytest.mark.parametrize("code", [MAX_TURNS, CONTEXT_FULL, "other"])
def test_a_limit_of_the_run_ends_the_harness(url: str, code: str) -> None:
    def answers() -> Iterator[str]:
        yield call(number=1)
        raise Refusal(code)

    if code == "other":
        with pytest.raises(RuntimeError, match=r"refused a request.*other"):
            played(url, answers())
        return
    episode = played(url, answers())
    assert episode.reward == 0.0 and episode.info == {"step_count": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [("guess_sessions:Session", "Sessions"), ("guess_sessions:Guess", "number"), ("guess_sessions:State", "State")],
)
def test_what_makes_no_session_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_environment_factory(f"openenv:{name}")
