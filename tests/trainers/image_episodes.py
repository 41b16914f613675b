"""Agents that send screenshots, and what the models and processors themselves make of episodes with images."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import weights
from games import make_trainer
from transformers import AutoProcessor

from agile_trainers.envs.agent import Agent
from agile_trainers.envs.images import opened
from agile_trainers.types import StopReason, Trajectory, images_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from image_models import SIZES, make_image_model, noise

CLIENTS = "the clients' own packages are not installed: pip install 'agile-trainers[dev]'"
TURNS = 3


def saved(name: str, folder: Path) -> Path:
    """Save a tiny model that reads images, and its processor, in a folder."""
    model, processor = make_image_model(name)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def native_inputs(processor: Any, episode: Trajectory) -> dict[str, Any]:
    """What the model's own forward pass takes for a whole episode: its ids, and pixels."""
    shown = [*episode.prompt, *episode.messages[:-1]]
    text = processor.apply_chat_template(shown, tokenize=False)
    images = [opened(image) for image in images_of(shown)]
    inputs = dict(processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False))
    del inputs["attention_mask"]
    inputs["input_ids"] = torch.tensor([[*episode.prompt_ids, *episode.completion_ids]])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == processor.image_token_id).long()
    return inputs


def native_log_probs(model: Any, processor: Any, episode: Trajectory) -> torch.Tensor:
    """Log-probs (T,) of a completion by transformers' own forward pass, from pixels, without padding."""
    logits = model(**native_inputs(processor, episode)).logits[0, len(episode.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(episode.completion_ids)[:, None])[:, 0]


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
    import openai

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
    import openai

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
    import anthropic

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


def train_on_screenshots(folder: Path, output: Path, dialect: str) -> None:
    """Train an agent with a client of its own: ids are the processor's, sampler and trainer agree, weights move."""
    pytest.importorskip("anthropic" if dialect == "messages" else "openai", reason=CLIENTS)
    trainer = make_trainer(
        folder, output, environment=Agent(ASK[dialect]), max_turns=TURNS, max_logprob_gap=1e-3, lora=False
    )
    before = weights(trainer)
    episodes = trainer.rollout()
    processor = AutoProcessor.from_pretrained(folder)
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
