"""A training step on the agent of every client library, on a model that has learned to call the tool now and then.

The model is a real one on the transformers generator: what it samples are tokens, which come back as messages, and the
trainer's log-probs of them must be those of the sampling (``max_logprob_gap``).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

import framework_agents as play
from games import make_trainer
from served_agents import QUESTION, TOWNS

from agile_trainers.embedded import make_embedded_model, sft_trainer
from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.types import StopReason

MAX_TURNS = 6
WORDS = f"{QUESTION} {json.dumps(play.CHAT_TOOL)} Be short. Look at the weather. rain in returncode output exit".split()
PROMPTS = {"system_template": "Be short.", "instance_template": "{{task}}"}


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _code(line: str) -> str:
    return f"Thought: I look.\n<code>\n{line}\n</code>"


def _command(line: str) -> str:
    return f"THOUGHT: I look.\n\n```mswea_bash_command\n{line}\n```"


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
POLICIES: dict[str, list[str]] = {
    "tools": ["It rains.", *(_call("weather", town=town) for town in TOWNS)],
    "smolagents tools": [_call("final_answer", answer="rain"), *(_call("weather", town=town) for town in TOWNS)],
    "smolagents code": [_code("final_answer('rain')"), *(_code(f"print(weather(town='{town}'))") for town in TOWNS)],
    "commands": [_call("bash", command=SUBMIT), *(_call("bash", command=f"echo {town}") for town in TOWNS)],
    "commands in text": [_command(SUBMIT), *(_command(f"echo {town}") for town in TOWNS)],
}
"""The answers of each kind of agent. The first ends the agent, and is one of five; the others are as likely."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a model that says one of a kind's answers, whatever it is asked."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder, rng = tmp_path_factory.mktemp("policy"), random.Random(0)
            words = [*WORDS, *" ".join(POLICIES[kind]).split()]
            model = make_embedded_model(folder / "begun", texts=[*POLICIES[kind] * 50, *WORDS * 5])
            rows = []
            for _ in range(480):
                messages = []
                for _ in range(rng.randrange(1, 4)):
                    asked = " ".join(rng.choices(words, k=rng.randrange(1, 50)))
                    said = rng.choice([*POLICIES[kind], *POLICIES[kind][1:]])
                    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
                rows.append({"messages": messages})
            trainer = sft_trainer(
                model, rows, folder / "trained", max_steps=60, learning_rate=5e-3, per_device_train_batch_size=8
            )
            trainer.train()
            trainer.save_model()
            made[kind] = folder / "trained"
        return made[kind]

    return make


CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "openai, Chat Completions": (play.openai_chat, "tools"),
    "openai, Chat Completions, stream": (partial(play.openai_chat, stream=True), "tools"),
    "openai, Chat Completions, n=3, logprobs": (partial(play.openai_chat, n=3, logprobs=True), "tools"),
    "openai, Responses": (play.openai_responses, "tools"),
    "openai, Responses, stream": (partial(play.openai_responses, stream=True), "tools"),
    "anthropic": (play.anthropic_messages, "tools"),
    "anthropic, stream": (partial(play.anthropic_messages, stream=True), "tools"),
    "openai-agents, Responses": (play.openai_agents, "tools"),
    "openai-agents, Responses, last id alone": (partial(play.openai_agents, auto_previous_response_id=True), "tools"),
    "openai-agents, Chat Completions": (partial(play.openai_agents, kind="chat", stream=True), "tools"),
    "langgraph with langchain-openai": (play.langgraph, "tools"),
    "langgraph with langchain-openai, Responses": (partial(play.langgraph, use_responses_api=True), "tools"),
    "pydantic-ai": (play.pydantic, "tools"),
    "pydantic-ai, Messages": (partial(play.pydantic, kind="messages"), "tools"),
    "litellm, openai": (play.by_litellm, "tools"),
    "litellm, anthropic": (partial(play.by_litellm, provider="anthropic"), "tools"),
    "mini-swe-agent": (partial(play.mini_swe_agent, prompts=PROMPTS), "commands"),
    "mini-swe-agent, text": (
        partial(play.mini_swe_agent, config="mini_textbased.yaml", prompts=PROMPTS),
        "commands in text",
    ),
    "smolagents, ToolCallingAgent": (
        partial(play.smol_tools, system="Be short.", tool_choice="auto"),
        "smolagents tools",
    ),
    "smolagents, CodeAgent": (partial(play.smol_code, system="Be short."), "smolagents code"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_step(
    name: str, policy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
    ask, kind = CASES[name]
    asked = list[int]()

    def solve(model: Model, task: Task) -> float:
        folder = (tmp_path,) if "commands" in kind else ()
        try:
            said = ask(model, *folder)
            said = asyncio.run(said) if asyncio.iscoroutine(said) else said
        except Exception as error:
            if "max_turns" not in str(error):
                raise
            said = ""
        asked.append(len(said))
        return float(len(asked) % 2)

    trainer = make_trainer(
        policy(kind), tmp_path / "run", environment=Agent(solve), max_turns=MAX_TURNS, max_new_tokens=80, stop_strings=None,
        max_logprob_gap=1e-3, learning_rate=1e-3,
    )  # fmt: skip
    episodes = trainer.rollout()
    assert [episode.error for episode in episodes] == [None] * 8
    assert {episode.stop_reason for episode in episodes} <= {StopReason.TERMINATED, StopReason.MAX_TURNS}
    answers = sum(len(episode.turns) for episode in episodes)
    forks = sum(turn.fork is not None for episode in episodes for turn in episode.turns)
    assert answers > 12, "the agents ended at once"
    metrics = trainer.update(episodes)
    mismatch = metrics["sampling/sampling_logp_difference/mean"]
    assert mismatch < 1e-3
    print(f"\n{name}: {answers} answers, {forks} forks, mismatch {mismatch:.1e}")
    odd = sum(turn.text not in POLICIES[kind] for episode in episodes for turn in episode.turns)
    if name.startswith("smolagents"):  # it rewrites every call that it can read
        assert answers - 8 - odd <= forks <= answers - 8
    elif name.startswith("mini-swe-agent"):  # it leaves answers out that it cannot read
        assert forks <= odd
    elif "n=3" not in name:
        assert forks == 0
