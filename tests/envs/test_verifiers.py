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

from agile_trainers.envs import check_environment, make_environment_factory
from agile_trainers.envs.libraries.verifiers import VerifiersEnvironment


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
