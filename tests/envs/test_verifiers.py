"""Real task sets of verifiers behind the protocol."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest

if (
    importlib.util.find_spec("verifiers") is None
):  # its import takes seconds, which only who runs these tests shall wait for
    pytest.skip("verifiers is not installed: pip install 'agile-trainers[verifiers]'", allow_module_level=True)

import cloudpickle

from agile_trainers.envs import check_environment, make_environment_factory
from agile_trainers.envs.agent import agent_of
from agile_trainers.envs.libraries.verifiers import VerifiersEnvironment
from agile_trainers.evaluation.scripted_policies import play_agent
from agile_trainers.rollout.agents.requests import Refusal

SEAT = {"harness": {"id": "asking_harness"}, "runtime": {"type": "subprocess"}}


def step(environment: Any, answer: str) -> Any:
    return asyncio.run(environment.step(answer))


def test_an_answer_is_scored_by_the_tasks_own_rewards() -> None:
    environment: Any = make_environment_factory("verifiers:reverse_taskset")()
    messages, info = environment.reset(seed=4)
    assert messages == [
        {"role": "system", "content": "Only the word."},
        {"role": "user", "content": "Reverse water."},
    ] and info == {"row": 1}
    right = {"success": True, "rewards": {"exact": 1.0, "length": 1.0}, "metrics": {"turns": 1.0}}
    assert step(environment, " retaw\n") == ("", 1.5, True, False, right)
    half = {"success": False, "rewards": {"exact": 0.0, "length": 1.0}, "metrics": {"turns": 1.0}}
    assert step(environment, "water") == ("", 0.5, True, False, half)
    assert step(environment, "no")[1] == 0.0


def test_rows_and_seeds() -> None:
    environment = VerifiersEnvironment("reverse_taskset", words=4)
    asked = [environment.reset(seed=seed)[1]["row"] for seed in range(8)]
    assert asked == [0, 1, 2, 3] * 2
    assert environment.reset(seed=0, options={"row": 3})[0][1]["content"] == "Reverse grass."
    with pytest.raises(ValueError, match=r"verifiers:reverse_taskset.*row 4.* 3"):
        environment.reset(seed=0, options={"row": 4})
    with pytest.raises(ValueError, match="colour"):
        environment.reset(seed=0, options={"colour": 1})


def by_its_harness(**env: Any) -> Any:
    return make_environment_factory("verifiers:reverse_taskset", env=env)


@pytest.mark.parametrize("answer", [" retaw\n", "water", "no"])
def test_a_harness_is_scored_as_an_answer_is(answer: str) -> None:
    (episode,) = play_agent(cloudpickle.loads(cloudpickle.dumps(by_its_harness(agent=SEAT))), lambda *_: answer, [4])
    assert [(one["role"], one["content"]) for one in episode.calls[0]["messages"]] == [
        ("system", "Only the word."),
        ("user", "Reverse water."),
        ("assistant", answer),
    ]
    environment: Any = make_environment_factory("verifiers:reverse_taskset")()
    environment.reset(seed=4)
    _, reward, _, _, info = step(environment, answer)
    assert (episode.reward, episode.info) == (reward, info)


def test_several_traces_have_their_mean() -> None:
    answers = iter(["retaw", "water", "no", "no"])
    (episode,) = play_agent(by_its_harness(id="best-of-n", n=4, agent=SEAT), lambda *_: next(answers), [1])
    assert episode.reward == (1.5 + 0.5) / 4 and episode.info["rewards"] == {"exact": 0.25, "length": 0.5}
    assert episode.info["metrics"]["best"] == 0.25 and not episode.success


def test_a_seat_that_is_not_trained_has_another_model() -> None:
    with pytest.raises(RuntimeError, match=r"seat 'user' is not trained.*'user': \{'model': 'policy-frozen'\}"):
        play_agent(by_its_harness(id="user-sim", user=SEAT, assistant=SEAT), lambda *_: "hello", [1])
    user = SEAT | {"model": "policy-frozen", "max_turns": 2}
    (episode,) = play_agent(by_its_harness(id="user-sim", user=user, assistant=SEAT), lambda *_: "retaw", [1])
    assert episode.reward == 1.5 and episode.info["metrics"]["user_turns"] == 2


@pytest.mark.parametrize(
    ("code", "kept"), [("max_turns_reached", True), ("context_length_exceeded", True), ("no", False)]
)
def test_what_a_limit_refuses_leaves_the_reward_so_far(code: str, kept: bool) -> None:
    def refused(*_: Any) -> str:
        raise Refusal(code)

    if kept:
        (episode,) = play_agent(by_its_harness(agent=SEAT), refused, [1])
        assert episode.reward == 0.0 and not episode.success
        return
    with pytest.raises(RuntimeError, match=r"verifiers:reverse_taskset: ProviderError: .*no"):
        play_agent(by_its_harness(agent=SEAT), refused, [1])


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"agnet": SEAT}, r"env of verifiers:reverse_taskset.*agnet.*agent"),
        ({"agent": {"harness": {"id": "null"}}}, r"'agent'.*no runtime.*rents a sandbox.*'subprocess'"),
        ({"agent": SEAT | {"max_turn": 3}}, r"agent.max_turn"),
    ],
)
def test_seats_that_make_no_sense_are_refused(env: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_its_harness(**env)


def test_rows_choose_a_harness_task() -> None:
    agent = agent_of(by_its_harness(agent=SEAT))
    assert agent is not None
    (episode,) = play_agent(agent, lambda *_: "retaw", [0], row={"row": 1})
    assert episode.reward == 1.5
    agent.check_row({"row": 2})
    with pytest.raises(ValueError, match=r"row 3.*0 to 2"):
        agent.check_row({"row": 3})


def test_instances_share_the_tasks_and_not_the_episode() -> None:
    factory = make_environment_factory("verifiers:reverse_taskset")
    first, second = (factory() for _ in range(2))
    first.reset(seed=0)
    second.reset(seed=1)
    assert first.tasks is second.tasks  # type: ignore[attr-defined]
    assert step(first, "enots")[1] == step(second, "retaw")[1] == 1.5


def test_the_checker_finds_nothing() -> None:
    factory = make_environment_factory("verifiers:reverse_taskset")
    report = check_environment(factory, episodes=3, max_turns=2, actions=["enots", "retaw"])
    assert not report.findings, str(report)


def test_a_task_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import reverse_taskset
    import verifiers.v1 as vf

    class Hits(vf.State):
        hits: int = 3

    class WithState(vf.Task[reverse_taskset.ReverseData, Hits, vf.TaskConfig]):
        @vf.reward
        async def counted(self, trace: vf.Trace) -> float:
            return float(trace.state.hits)

    monkeypatch.setattr(reverse_taskset, "ReverseTask", WithState)
    environment = make_environment_factory("verifiers:reverse_taskset")()
    environment.reset(seed=0)
    assert step(environment, "enots")[1] == 3.0


@pytest.mark.parametrize("kind", ["parts", "call", "result"])
def test_prompts_that_are_no_texts_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import reverse_taskset
    import verifiers.v1 as vf

    message = {
        "parts": vf.UserMessage(content=[vf.TextContentPart(text="2+2?")]),
        "call": vf.AssistantMessage(content=None, tool_calls=[vf.ToolCall(id="a", name="f", arguments="{}")]),
        "result": vf.ToolMessage(tool_call_id="a", content="r"),
    }[kind]

    def data(prompt: str, **options: Any) -> Any:
        return made(prompt=[message, vf.UserMessage(content=prompt)], **options)

    made = reverse_taskset.ReverseData
    monkeypatch.setattr(reverse_taskset, "ReverseData", data)
    with pytest.raises(ValueError, match="one answer: a prompt has parts, images or calls of tools"):
        make_environment_factory("verifiers:reverse_taskset")


@pytest.mark.parametrize(("kind", "reason"), [("setup", "define setup"), ("runtime", "files look into a runtime")])
def test_tasks_of_more_than_an_answer_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    import reverse_taskset
    import verifiers.v1 as vf

    class WithSetup(reverse_taskset.ReverseTask):
        async def setup(self, trace: Any, runtime: Any) -> None:
            return None

    class WithRuntime(reverse_taskset.ReverseTask):
        @vf.reward(weight=1.0)
        async def files(self, runtime: Any) -> float:
            return 1.0

    monkeypatch.setattr(reverse_taskset, "ReverseTask", WithSetup if kind == "setup" else WithRuntime)
    with pytest.raises(ValueError, match=f"cannot be played with one answer: .*{reason}"):
        make_environment_factory("verifiers:reverse_taskset")


@pytest.mark.parametrize(
    ("taskset", "kwargs", "message"),
    [
        ("reverse_taskset", {"wrods": 2}, r"wrods.*words"),
        ("reverse_taskset", {"words": 0}, "no task"),
        ("reverse_taskst", {}, "'verifiers:reverse_taskst'"),
    ],
)
def test_what_makes_no_sense_is_refused(taskset: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_environment_factory(f"verifiers:{taskset}", **kwargs)


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "verifiers" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'agile-trainers\[verifiers\]'"):
        make_environment_factory("verifiers:reverse_taskset")
