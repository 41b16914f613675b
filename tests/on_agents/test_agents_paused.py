"""Real clients whose time is up while a rollout is paused: what they send again gets the answer that was sampled once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="the clients of agents are not installed; make test-agents installs them")

import anthropic
import openai
from leftovers import nothing_is_left

from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits

TOKENIZER = make_tokenizer()
SPEC = EpisodeSpec(1, (1, 7))
SHORT: dict[str, Any] = {"timeout": 0.5, "max_retries": 100}


def chat(model: Model, **options: Any) -> str:
    client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key, **options)
    messages: Any = [{"role": "user", "content": "go"}]
    return str(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)


def stream(model: Model, **options: Any) -> str:
    client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key, **options)
    messages: Any = [{"role": "user", "content": "go"}]
    chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def messages(model: Model, **options: Any) -> str:
    client = anthropic.Anthropic(base_url=model.base_url.removesuffix("/v1"), api_key=model.api_key, **options)
    said: Any = client.messages.create(model="policy", max_tokens=20, messages=[{"role": "user", "content": "go"}])
    return str(said.content[0].text)


@pytest.mark.parametrize("ask", [chat, stream, messages])
def test_a_client_waits_through_an_update(ask: Callable[..., str]) -> None:
    sampled: list[GenerationRequest] = []
    heard: list[str] = []

    def say(request: GenerationRequest) -> list[int]:
        sampled.append(request)
        text = "".join("abcdefgh"[int(draw * 8)] for draw in request.uniforms(6))
        return [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]

    def solve(model: Model, task: Task) -> float:
        heard.append(ask(model, **SHORT))
        return 1.0

    with nothing_is_left():
        pool = EnvironmentPool(Agent(solve), timeout=300.0)
        limits = Limits(max_turns=5, max_new_tokens=20, max_model_length=1000)
        engine = RolloutEngine(pool, ChatRenderer(TOKENIZER, on_rewrite="fork"), limits)
        (whole,) = engine.run([SPEC], ScriptedGenerator(say))
        sampled.clear()
        with engine.open() as rollout:
            rollout.admit([0], [SPEC])
            rollout.play_until(lambda: bool(sampled), ScriptedGenerator(say, 10**9))
            deadline = time.monotonic() + 60
            while pool._answers.qsize() < 4 and time.monotonic() < deadline:
                time.sleep(0.05)  # until it has hung up and asked again, twice
            (episode,) = rollout.play([0], ScriptedGenerator(say))
        pool.close()
    assert episode.error is None and episode.completion_ids == whole.completion_ids and len(episode.turns) == 1
    assert heard[0] == heard[1] == whole.turns[0].text and len(sampled) == 2
    assert episode.turns[0].info["call"]["repeated"] >= 2
