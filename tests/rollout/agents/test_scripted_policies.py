"""Agents that a function answers in the place of a model: what is kept, and the rows for SFT that come of it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.envs.checker import EnvironmentProtocolError
from agile_trainers.evaluation.scripted_policies import demonstrate_agent, play_agent

TOOL = {"type": "function", "function": {"name": "roll", "description": "", "parameters": {"type": "object"}}}
ROLL = '<tool_call>{"name": "roll", "arguments": {}}</tool_call>'


def post(model: Model, path: str, /, **fields: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{model.base_url}/{path}",
        json.dumps({"model": model.name, **fields}).encode(),
        {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def ask(model: Model, messages: list[Any], /, **fields: Any) -> list[dict[str, Any]]:
    """The choices that the endpoint answers with."""
    choices: list[dict[str, Any]] = post(model, "chat/completions", messages=messages, **fields)["choices"]
    return choices


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_every_call_is_kept_with_its_tools_and_a_conversation_is_one_row() -> None:
    def solve(model: Model, task: Task) -> dict[str, Any]:
        messages: list[Any] = [user(f"{task.row} {task.seed}")]
        (first,) = ask(model, messages, tools=[TOOL])
        messages += [
            first["message"],
            {"role": "tool", "tool_call_id": first["message"]["tool_calls"][0]["id"], "content": "6"},
        ]
        (second,) = ask(model, messages, tools=[TOOL])
        ask(model, [user("alone")], n=2)
        return {"reward": float(second["message"]["content"]), "success": True}

    def policy(messages: list[Any], rng: Any) -> str:
        return ROLL if len(messages) == 1 and messages[0]["content"] != "alone" else messages[-1]["content"]

    (episode,) = play_agent(Agent(solve), policy, [7], {"a": 1})
    asked = [[one["content"] for one in call["messages"]] for call in episode.calls]
    begun = ["{'a': 1} 7", ""]
    assert asked == [begun, [*begun, "6", "6"], ["alone", "alone"], ["alone", "alone"]]
    assert [call["tools"] for call in episode.calls] == [[TOOL], [TOOL], [], []]
    assert (episode.reward, episode.success) == (6.0, True)
    rows = demonstrate_agent(Agent(solve), policy, [7])
    assert [row["messages"][-1]["content"] for row in rows] == ["6", "alone"]
    assert json.loads(rows[0]["tools"]) == [TOOL] and rows[1]["tools"] is None


def test_policies_draw_by_the_seed_alone() -> None:
    def solve(model: Model, task: Task) -> float:
        return sum(float(ask(model, [user("?")])[0]["message"]["content"]) for _ in range(3))

    def rewards(seeds: list[int]) -> dict[int, float]:
        played = play_agent(Agent(solve), lambda messages, rng: str(rng.random()), seeds)
        return {seed: episode.reward for seed, episode in zip(seeds, played, strict=True)}

    one, other = rewards([3, 1, 2]), rewards([1, 3])
    assert other == {seed: one[seed] for seed in (1, 3)} and len({*one.values()}) == 3


def test_agents_are_played_in_a_notebook_whose_loop_is_running() -> None:
    async def cell() -> float:
        agent = Agent(lambda model, task: float(ask(model, [user("?")])[0]["message"]["content"]))
        return play_agent(agent, lambda messages, rng: "3", [0])[0].reward

    assert asyncio.run(cell()) == 3.0


def test_an_answer_goes_on_from_the_one_that_it_names() -> None:
    """With the instructions of its own request alone; one of another episode is none."""
    ids: list[str] = []

    def solve(model: Model, task: Task) -> float:
        for text in ("one", "two", "three"):
            named = {"previous_response_id": ids[-1]} if text != "one" else {}
            ids.append(post(model, "responses", input=text, instructions=f"on {text}", **named)["id"])
        for unknown in ("resp_nope", ids[0] if task.seed else "x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                post(model, "responses", input="?", previous_response_id=unknown)
        return 0.0

    rows = demonstrate_agent(Agent(solve), lambda messages, rng: messages[-1]["content"].upper(), [0, 1])
    said = ["on three", "one", "ONE", "two", "TWO", "three", "THREE"]
    assert [[one["content"] for one in row["messages"]] for row in rows][2] == said
    assert [row["messages"][0]["content"] for row in rows] == ["on one", "on two", "on three"] * 2


def test_what_training_refuses_is_refused_and_a_judge_is_no_demonstration() -> None:
    def solve(model: Model, task: Task) -> float:
        for fields, status in (({"model": "gpt-4o"}, "404"), ({"response_format": {"type": "json_object"}}, "400")):
            with pytest.raises(urllib.error.HTTPError, match=status):
                ask(model, [user("no")], **fields)
        ask(model, [user("right?")], model="policy-frozen")
        return float(ask(model, [user("?")], tool_choice="required")[0]["message"]["content"])

    agent = Agent(solve, not_enforced=["tool_choice"])
    (row,) = demonstrate_agent(agent, lambda messages, rng: "3", [0])
    assert [one["content"] for one in row["messages"]] == ["?", "3"]


def refusal(send: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as refused:
        send()
    return f"{refused.value.code} {refused.value.read().decode()}"


def test_a_prefilled_answer_a_long_name_and_a_request_after_the_end_are_refused() -> None:
    """A prefill gave rows with two messages of the assistant after each other."""
    kept: list[Model] = []

    def solve(model: Model, task: Task) -> float:
        kept.append(model)
        assert "end with role 'assistant'" in refusal(
            lambda: ask(model, [user("?"), {"role": "assistant", "content": "{"}])
        )
        assert "1,001 characters" in refusal(lambda: ask(model, [{**user("?"), "name": "n" * 1001}]))
        if task.seed:
            assert "The episode is over" in refusal(lambda: ask(kept[0], [user("?")]))
            with pytest.raises(Exception, match="The episode is over"):
                kept[0].reward(1.0)
        return float(ask(model, [user("?")])[0]["message"]["content"])

    rows = demonstrate_agent(Agent(solve), lambda messages, rng: "3", [0, 1])
    assert [len(row["messages"]) for row in rows] == [2, 2]


def test_rewards_of_calls_count_as_in_training() -> None:
    def solve(model: Model, task: Task) -> float:
        with pytest.raises(Exception, match="has none yet"):
            model.reward(1.0)
        first = post(model, "chat/completions", messages=[user("?")], n=2)
        judged = post(model, "chat/completions", messages=[user("?")], model="policy-frozen")
        ask(model, [user("?")])
        for value, call, expected in (
            ("x", None, "finite number"),
            (True, None, "finite number"),
            (1.0, "no-such", "no-such"),
            (1.0, first["id"], "2 choices"),
            (1.0, judged["id"], "policy-frozen"),
        ):
            with pytest.raises(Exception, match=expected):
                model.reward(value, call)  # type: ignore[arg-type]
        model.reward(0.25, f"{first['id']}:1")
        model.reward(2.0)
        return 4.0

    (episode,) = play_agent(Agent(solve), lambda messages, rng: "3", [0])
    assert episode.reward == 6.25


def test_a_request_that_is_sent_again_is_answered_once() -> None:
    body = json.dumps({"model": "policy", "messages": [user("?")]}).encode()

    def solve(model: Model, task: Task) -> float:
        def send(**headers: str) -> str:
            headers |= {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{model.base_url}/chat/completions", body, headers)
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
            return f"{answer['id']} {answer['choices'][0]['message']['content']}"

        first = send()
        assert send(**{"x-stainless-retry-count": "1"}) == first != send()
        assert send(**{"Idempotency-Key": "k"}) == send(**{"Idempotency-Key": "k"})
        return 0.0

    (episode,) = play_agent(Agent(solve), lambda messages, rng: str(rng.random()), [0])
    assert len(episode.calls) == 3


def test_failures_are_told() -> None:
    def fails(messages: list[Any], rng: Any) -> str:
        raise KeyError("lost")

    with pytest.raises(urllib.error.HTTPError, match="400"):
        play_agent(Agent(lambda model, task: ask(model, [user("?")])), fails, [0])
    with pytest.raises(EnvironmentProtocolError):
        play_agent(Agent(lambda model, task: None), fails, [0])
    with pytest.raises(ValueError, match="no agent"):
        play_agent(dict, fails, [0])  # type: ignore[arg-type]
