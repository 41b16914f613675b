"""Objects written for TRL's ``environment_factory``, behind the protocol."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest
from transformers.utils import get_json_schema

from agile_trainers.envs import check_environment, make_environment_factory, play
from agile_trainers.envs.checker import EnvironmentProtocolError, validate_step
from agile_trainers.envs.context import Context
from agile_trainers.envs.libraries.trl_tools import AsyncTRLEnvironment, TRLEnvironment, trl_environment
from agile_trainers.types import Message


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Counter:
    """Count up to the target; written as TRL's documentation asks for."""

    def reset(self, **kwargs: Any) -> str:
        self.target = kwargs.get("target") or random.Random(kwargs["seed"]).randint(1, 9)
        self.value = 0
        return f"Reach {self.target}."

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def add(self, amount: int) -> int:
        """
        Adds to the counter.

        Args:
            amount: What to add.
        """
        if amount > 100:
            raise RuntimeError("too much")
        self.value += amount
        return self.value

    def show(self) -> str:
        """
        Shows the counter.
        """
        return f"It stands at {self.value}.</tool_response>"

    @property
    def success(self) -> bool:
        return self.value == self.target

    def _hidden(self) -> None: ...


class AsyncCounter(Counter):
    """The same, with an async tool and an async reward."""

    async def add(self, amount: int) -> int:  # type: ignore[override]
        """
        Adds to the counter.

        Args:
            amount: What to add.
        """
        await asyncio.sleep(0)
        return super().add(amount)

    async def get_reward(self) -> float:  # type: ignore[override]
        return super().get_reward()


class Silent:
    """Says nothing and rewards nothing by itself."""

    def reset(self, **kwargs: Any) -> None:
        return None

    def look(self) -> str:
        """
        Looks.
        """
        return "dark"


def made(factory: Any, **kwargs: Any) -> Any:
    return trl_environment(factory, **kwargs)()


def test_an_episode() -> None:
    environment = made(Counter)
    messages, info = environment.reset(seed=3, options={"target": 5, "prompt": "Count. "})
    assert messages[1:] == [{"role": "user", "content": "Count. Reach 5."}] and info == {}
    assert messages[0]["role"] == "system" and '"name": "add"' in messages[0]["content"]
    assert "<tool_call>" in messages[0]["content"] and "_hidden" not in messages[0]["content"]
    first = environment.step(f"Let me see.\n{call('add', amount=2)}\n{call('show')}")
    assert first == (
        "<tool_response>\n2\n</tool_response>\n<tool_response>\nIt stands at 2.</tool_response >\n</tool_response>",
        0.0, False, False, {"calls": 2, "failed_calls": 0, "success": False},
    )  # fmt: skip
    assert environment.step(call("add", amount=3))[1:3] == (0.0, False)
    assert environment.step("done") == ("", 1.0, True, False, {"calls": 3, "failed_calls": 0, "success": True})


@pytest.mark.parametrize("reported", [np.True_, 1.0])
def test_a_success_of_numpy_counts(reported: Any) -> None:
    class Grid(Counter):
        success = reported

    environment = made(Grid)
    environment.reset(seed=3)
    assert validate_step(environment.step("done"))[4]["success"] is True


def test_a_success_that_is_none_is_named() -> None:
    class Told(Counter):
        success: Any = None

    environment = made(Told)
    environment.reset(seed=3)
    assert "success" not in environment.step("done")[4]
    environment.object.success = "won"
    with pytest.raises(EnvironmentProtocolError, match=r"success.*'won'.*True or False"):
        validate_step(environment.step("done"))


@pytest.mark.parametrize("returned", [1.0, [], [1.0, 2.0]])
def test_a_reward_function_that_gives_no_list_of_one_is_named(returned: Any) -> None:
    def pays(**given: Any) -> Any:
        return returned

    environment = made(Counter, reward_funcs=pays)
    environment.reset(seed=3)
    with pytest.raises(ValueError, match=r"'pays' returned .* list of one"):
        environment.step("done")


def test_an_object_whose_call_is_async_rewards() -> None:
    class Pays:
        async def __call__(self, **given: Any) -> list[float]:
            return [0.5]

    environment = made(Silent, reward_funcs=Pays())
    environment.reset(seed=3, options={"prompt": "?"})
    assert asyncio.run(environment.step("done"))[1] == 0.5


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (call("subtract", amount=1), "there is no tool 'subtract'; the tools are: add, show"),
        (call("reset"), "there is no tool 'reset'"),
        (call("add", amount="two"), "add: argument amount: 'two' is not of type 'integer'"),
        (call("add"), "missing argument(s): amount"),
        ("<tool_call>{</tool_call>", "not valid JSON"),
        (call("add", amount=101), "RuntimeError: too much"),
    ],
)
def test_calls_that_fail_are_answered(answer: str, expected: str) -> None:
    environment = made(Counter)
    environment.reset(seed=0)
    observation, reward, terminated, truncated, info = environment.step(answer)
    assert observation.startswith("<tool_response>\nError: ") and expected in observation
    assert (reward, terminated, truncated, info["failed_calls"], environment.object.value) == (0.0, False, False, 1, 0)


def test_old_results_are_dropped_from_what_the_model_sees_but_not_from_what_is_rewarded() -> None:
    environment = made(Counter, keep_results=1, announce="no")
    messages, _ = environment.reset(seed=3, options={"target": 5})
    prompt = [*messages]
    for amount in (2, 3):
        messages += [{"role": "assistant", "content": call("add", amount=amount)}]
        messages += [{"role": "user", "content": environment.step(messages[-1]["content"])[0]}]
    dropped = {"role": "user", "content": "<tool_response>\n(dropped)\n</tool_response>"}
    assert environment.context(Context(messages, prompt)) == [*messages[:2], dropped, *messages[3:]]
    assert [m["content"] for m in environment.completion if m["role"] == "tool"] == ["2", "5"]
    assert not hasattr(made(Counter), "context")
    with pytest.raises(ValueError, match="number of observations is 0"):
        made(Counter, keep_results=0)
    assert not check_environment(trl_environment(Counter, keep_results=1), actions=[call("show")]).findings


def test_the_schemas_are_those_trl_renders() -> None:
    environment = made(Counter)
    theirs = [get_json_schema(method) for method in (environment.object.add, environment.object.show)]
    for schema in theirs:
        schema["function"].pop("return", None)
    assert environment.schemas == theirs


def test_reward_functions_get_the_object_the_conversation_and_the_row() -> None:
    seen: dict[str, Any] = {}

    def by_value(prompts: Any, completions: Any, environments: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, columns=columns)
        return [float(environments[0].value)]

    environment = made(Counter, reward_funcs=[by_value, lambda **_: [None]], reward_weights=[0.5, 9.0])
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go: "}]
    messages, _ = environment.reset(seed=0, options={"prompt": prompt, "target": 4, "colour": "red"})
    assert messages[0]["content"].startswith("Be brief.\n\nThese tools") and len(messages) == 2
    environment.step(call("add", amount=4))
    assert environment.step("ok")[1] == 0.5 * 4 + 1.0
    assert seen["prompts"] == [[prompt[0], {"role": "user", "content": "Go: Reach 4."}]]
    assert [message["role"] for message in seen["completions"][0]] == ["assistant", "tool", "assistant"]
    assert seen["columns"] == {"target": [4], "colour": ["red"]} and prompt[1]["content"] == "Go: "


def test_async_tools_and_rewards_are_awaited() -> None:
    environment = made(AsyncCounter)
    assert isinstance(environment, AsyncTRLEnvironment)
    environment.reset(seed=0, options={"target": 2})

    async def episode() -> list[Any]:
        answers = [call("add", amount=2), call("add", amount=101), call("show"), "done"]
        return [await environment.step(answer) for answer in answers]

    added, failed, shown, ended = asyncio.run(episode())
    assert "\n2\n" in added[0] and "RuntimeError: too much" in failed[0] and "stands at 2" in shown[0]
    assert ended[1:3] == (1.0, True)


@pytest.mark.parametrize("kind", [Counter, AsyncCounter])
def test_a_limit_rewards_the_episode_as_trl_does(kind: Any) -> None:
    """TRL scores every rollout: value 2 reached when the calls are used up is worth 1, and 3 of the function's."""

    async def doubled(environments: Any, **_: Any) -> list[float]:
        return [2.0 * environments[0].value]

    environment = made(kind, reward_funcs=[doubled if kind is AsyncCounter else lambda environments, **_: [4.0]],
                       reward_weights=[0.5])  # fmt: skip
    environment.reset(seed=0, options={"target": 2})

    async def episode() -> Any:
        step, over = environment.step(call("add", amount=2)), environment.end("max_turns")
        return [await it if asyncio.iscoroutine(it) else it for it in (step, over)]

    step, reward = asyncio.run(episode())
    assert step[1:4] == (0.0, False, False) and reward == 1.0 + 0.5 * 4.0


def test_all_rewards_may_be_the_trainers() -> None:
    environment = made(Silent, announce="no")
    environment.reset(seed=0, options={"prompt": "Look around."})
    assert environment.step("no")[1:4] == (0.0, True, False) and environment.end("max_turns") == 0.0


def test_the_seed_reaches_reset_and_starts_are_reproducible() -> None:
    environment = made(Counter)
    starts = [environment.reset(seed=seed)[0][-1]["content"] for seed in range(20)]
    assert starts == [environment.reset(seed=seed)[0][-1]["content"] for seed in range(20)] and len(set(starts)) > 4
    report = check_environment(
        trl_environment(Counter), episodes=3, max_turns=3, actions=[call("add", amount=1), "done"]
    )
    assert not report.findings, str(report)


def test_a_policy_that_calls_and_stops_succeeds() -> None:
    def policy(messages: list[Message], rng: random.Random) -> str:
        if messages[-1]["content"].startswith("Reach"):
            return call("add", amount=int(messages[-1]["content"].split()[1].strip(".")))
        return "done"

    environment = made(Counter)
    assert all(play(environment, policy, seed).success for seed in range(8))


def test_without_announcement_the_prompt_is_the_rows() -> None:
    environment = made(Silent, reward_funcs=lambda environments, **_: [1.0], announce="no")
    messages, _ = environment.reset(seed=0, options={"prompt": "Look around."})
    assert messages == [{"role": "user", "content": "Look around."}]
    assert "success" not in environment.step("no")[4]
    with pytest.raises(ValueError, match=r"no 'prompt' and reset\(\) returned None"):
        environment.reset(seed=0)


def test_by_id() -> None:
    factory = make_environment_factory(f"trl:{__name__}:Counter")
    assert type(factory()) is TRLEnvironment
    with pytest.raises(ValueError, match=r"has no 'Countr'.*Counter"):
        make_environment_factory(f"trl:{__name__}:Countr")
    with pytest.raises(ValueError, match=r"cannot be made from the arguments .*colour"):
        make_environment_factory(f"trl:{__name__}:Counter", colour="red")


def test_a_reward_function_without_a_signature_is_taken() -> None:
    assert type(trl_environment(Counter, reward_funcs=[max])()) is TRLEnvironment


@pytest.mark.parametrize(
    ("factory", "kwargs", "message"),
    [
        (Counter, {"reward_weights": [1.0]}, "0 reward_funcs need as many weights"),
        (Counter, {"announce": "user"}, "announce must be 'system' or 'no'"),
        (object, {}, "at least one public method"),
        (
            Counter,
            {"reward_funcs": [lambda completion_ids, **_: [1.0]]},
            r"'<lambda>' requires 'completion_ids', which the trainer's reward_funcs get",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(factory: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trl_environment(factory, **kwargs)
