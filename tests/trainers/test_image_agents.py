"""Agents whose unmodified clients send screenshots over several turns, trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpointed_runs import check_resumed
from games import make_trainer
from image_episodes import CLIENTS, TURNS, saved, screenshots, train_on_screenshots, value_of

from agile_trainers.envs.agent import Agent

KINDS = ["idefics3", "qwen2_vl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model and processor of each kind, as folders."""
    made = {}
    for name in KINDS:
        if name.startswith("qwen"):
            pytest.importorskip("torchvision")
        made[name] = saved(name, tmp_path_factory.mktemp(name))
    return made


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("idefics3", "chat"), ("qwen2_vl", "responses"), ("idefics3", "messages")],
)
def test_a_client_that_sends_screenshots_is_trained(folders, tmp_path, name, dialect):
    """Over three turns, with images of different sizes: ids are the processor's, sampler and trainer agree, weights move."""
    train_on_screenshots(folders[name], tmp_path, dialect)


def ask_with_tools(model: Any, task: Any) -> float:
    """An agent that shows the last screenshot alone, as the result of its tool: each turn's prompt is another one."""
    import openai

    asked: list[Any] = [{"role": "user", "content": "go on"}]
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        for shot in screenshots(task.seed)[:TURNS]:
            answer = client.chat.completions.create(model=model.name, messages=asked).choices[0].message
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{shot}"}}
            asked = [one for one in asked if one["role"] != "tool"]
            asked += [answer.to_dict(), {"role": "tool", "tool_call_id": "c", "content": [image]}]
    return value_of(answer.content)


@pytest.mark.parametrize("name", KINDS)
def test_an_agent_that_shows_the_last_screenshot_alone_has_paths_that_are_trained(folders, tmp_path, name):
    pytest.importorskip("openai", reason=CLIENTS)
    trainer = make_trainer(
        folders[name], tmp_path, environment=Agent(ask_with_tools), max_turns=TURNS, max_logprob_gap=1e-3,
        advantage_granularity="trajectory",
    )  # fmt: skip
    episodes = trainer.rollout()
    for episode in episodes:
        assert episode.error is None
        assert [len(pictures) for pictures in episode.pictures] == [1, 1]
    assert trainer.update(episodes)["sampling/sampling_logp_difference/max"] < 1e-3


def ask_plainly(model: Any, task: Any) -> float:
    """The same without a client, which takes a tenth of a second to make."""
    messages, headers = list[Any](), {"Authorization": f"Bearer {model.api_key}"}
    for shot in screenshots(task.seed)[:TURNS]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{shot}"}}
        messages.append({"role": "user", "content": [image]})
        body = {"model": model.name, "messages": messages}
        answer = httpx.post(f"{model.base_url}/chat/completions", json=body, headers=headers, timeout=60).json()
        messages.append(answer["choices"][0]["message"])
    return value_of(messages[-1]["content"])


def test_the_same_episodes_are_played_again_after_a_kill(folders, tmp_path):
    """With a batch ahead: what was answered is known by its prompt and images, and not sampled again."""
    options: dict[str, Any] = {
        "environment": Agent(ask_plainly), "max_turns": TURNS, "max_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2,
        "batches_ahead": 1, "per_device_train_batch_size": 4,
    }  # fmt: skip
    check_resumed(lambda name, **more: make_trainer(folders["qwen2_vl"], tmp_path / name, **options, **more), 1)
