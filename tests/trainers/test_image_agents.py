"""Agents whose unmodified clients send screenshots over several turns, trained."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from checkpointed_runs import SAVING, KillBefore, Killed, assert_same, weights
from games import make_trainer
from test_image_runs import native_log_probs
from transformers import AutoProcessor

from agile_trainers.envs.agent import Agent
from agile_trainers.envs.images import opened
from agile_trainers.types import StopReason, Trajectory, images_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import SIZES, make_image_model, noise

CLIENTS = "the clients' own packages are not installed: pip install 'agile-trainers[dev]'"
KINDS = ["idefics3", "qwen2_vl"]
TURNS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model and processor of each kind, as folders."""
    made = {}
    for name in KINDS:
        if name.startswith("qwen"):
            pytest.importorskip("torchvision")
        made[name] = tmp_path_factory.mktemp(name)
        model, processor = make_image_model(name)
        model.save_pretrained(made[name])
        processor.save_pretrained(made[name])
    return made


def screenshots(seed: int) -> list[str]:
    """Images of different sizes, two for the first turn and one for each of the next, as base64 of PNG files."""
    rng, shots = random.Random(seed), []
    for size in rng.sample(SIZES, TURNS + 1):
        file = BytesIO()
        noise(rng.randrange(10**6), size).save(file, "PNG")
        shots.append(base64.b64encode(file.getvalue()).decode())
    return shots


def value_of(text: str) -> float:
    return sum(letter.isalpha() for letter in text) / max(len(text), 1)


def ask_chat(model: Any, task: Any) -> float:
    """Chat Completions: the user sends the screenshots."""
    openai = pytest.importorskip("openai", reason=CLIENTS)
    first, *shots = screenshots(task.seed)
    messages: list[Any] = []
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        for turn, shot in enumerate(shots):
            shown = [first, shot] if turn == 0 else [shot]
            images = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in shown]
            messages.append({"role": "user", "content": [{"type": "text", "text": f"screen {turn}"}, *images]})
            answer = client.chat.completions.create(model=model.name, messages=messages).choices[0].message
            messages.append(answer.to_dict())
    return value_of(answer.content)


def ask_responses(model: Any, task: Any) -> float:
    """Responses: the screenshots are items, and the conversation is known by the last answer's id."""
    openai = pytest.importorskip("openai", reason=CLIENTS)
    first, *shots = screenshots(task.seed)
    previous = None
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        for turn, shot in enumerate(shots):
            shown = [first, shot] if turn == 0 else [shot]
            images = [{"type": "input_image", "image_url": f"data:image/png;base64,{one}"} for one in shown]
            parts: list[Any] = [{"type": "input_text", "text": f"screen {turn}"}, *images]
            asked: Any = [{"role": "user", "content": parts}]
            answer = client.responses.create(model=model.name, input=asked, previous_response_id=previous)
            previous = answer.id
    return value_of(answer.output_text)


def ask_messages(model: Any, task: Any) -> float:
    """Anthropic's Messages."""
    anthropic = pytest.importorskip("anthropic", reason=CLIENTS)
    first, *shots = screenshots(task.seed)
    messages: list[Any] = []
    with anthropic.Anthropic(base_url=model.anthropic_base_url, api_key=model.api_key) as client:
        for turn, shot in enumerate(shots):
            shown = [first, shot] if turn == 0 else [shot]
            sources = [{"type": "base64", "media_type": "image/png", "data": one} for one in shown]
            images = [{"type": "image", "source": source} for source in sources]
            messages.append({"role": "user", "content": [{"type": "text", "text": f"screen {turn}"}, *images]})
            answer = client.messages.create(model=model.name, messages=messages, max_tokens=5)
            messages.append({"role": "assistant", "content": answer.content})
    return value_of("".join(block.text for block in answer.content))


ASK: dict[str, Callable[[Any, Any], float]] = {
    "chat": ask_chat, "responses": ask_responses, "messages": ask_messages,
}  # fmt: skip


def with_sevens(processor: Any, episode: Trajectory) -> tuple[list[int], list[int]]:
    """The ids of an episode, and those that the processor makes of the whole conversation, had each answer been a 7.

    Sampled tokens need not be those of their text, so that all the others are compared.
    """
    tokenizer = processor.tokenizer
    seven, end = tokenizer.encode("7", add_special_tokens=False), tokenizer.eos_token_id
    ids, start = list(episode.prompt_ids), 0
    for k, turn in enumerate(episode.turns):
        ids += [*episode.completion_ids[start : turn.start], *seven, *([end] if end in episode.action_of(k) else [])]
        start = turn.end
    messages = [*episode.prompt, *episode.messages]
    messages = [{**one, "content": "7"} if one["role"] == "assistant" else one for one in messages]
    text = processor.apply_chat_template(messages, tokenize=False)
    images = [opened(image) for image in images_of(messages)]
    return ids, processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("idefics3", "chat"), ("qwen2_vl", "chat"), ("qwen2_vl", "responses"), ("idefics3", "messages")],
)
def test_a_client_that_sends_screenshots_is_trained(folders, tmp_path, name, dialect):
    """Over three turns, with images of different sizes: ids are the processor's, sampler and trainer agree, weights move."""
    trainer = make_trainer(
        folders[name], tmp_path, environment=Agent(ASK[dialect]), max_turns=TURNS, max_logprob_gap=1e-3, lora=False
    )
    before = weights(trainer)
    episodes = trainer.rollout()
    processor = AutoProcessor.from_pretrained(folders[name])
    for episode in episodes:
        assert (episode.error, episode.stop_reason, episode.paths) == (None, StopReason.TERMINATED, None)
        assert (len(episode.turns), len(episode.pictures[0])) == (TURNS, TURNS + 1)
        ids, whole = with_sevens(processor, episode)
        assert whole[: len(ids)] == ids
        expected = native_log_probs(trainer.model, processor, episode).detach()
        for turn in episode.turns:
            sampled = torch.tensor(episode.sampling_logprobs[turn.start : turn.end])
            assert torch.allclose(sampled, expected[turn.start : turn.end], atol=1e-4)
    metrics = trainer.update(episodes)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-3
    moved = {key for key, value in weights(trainer).items() if not torch.equal(value, before[key])}
    assert moved and all(key.startswith(("model.text_model", "model.language_model", "lm_head")) for key in moved)


def ask_with_tools(model: Any, task: Any) -> float:
    """An agent that shows the last screenshot alone, as the result of its tool: each turn's prompt is another one."""
    openai = pytest.importorskip("openai", reason=CLIENTS)
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
        answer = requests.post(f"{model.base_url}/chat/completions", json=body, headers=headers, timeout=60).json()
        messages.append(answer["choices"][0]["message"])
    return value_of(messages[-1]["content"])


def test_the_same_episodes_are_played_again_after_a_kill(folders, tmp_path):
    """With a batch ahead: what was answered is known by its prompt and images, and not sampled again."""
    options: dict[str, Any] = {
        "environment": Agent(ask_plainly), "max_turns": TURNS, "max_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2,
        "batches_ahead": 1, "per_device_train_batch_size": 4, **SAVING,
    }  # fmt: skip
    whole = make_trainer(folders["qwen2_vl"], tmp_path / "whole", **options)
    whole.train()
    killed = make_trainer(folders["qwen2_vl"], tmp_path / "killed", callbacks=[KillBefore(1)], **options)
    with pytest.raises(Killed):
        killed.train()
    killed.close()
    resumed = make_trainer(folders["qwen2_vl"], tmp_path / "killed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed), weights(whole))
