"""The transformers generator on a GPU: beside decoding alone, beside one forward pass, and how often the host waits."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import noise_of, play_program
from shapes import SHAPES, make_model

from agile_trainers.rollout.generators import (
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
    TransformersGenerator,
)

pytestmark = pytest.mark.gpu


def _uniforms(episode: int) -> Callable[[int], list[float]]:
    chance = random.Random(episode)
    return lambda count: [chance.random() for _ in range(count)]


def _play(model: Any, episodes: list[int], *, tokens: int, turns: int) -> dict[int, list[GenerationOutput]]:
    """Play episodes of ragged prompts together: each answer is followed by an observation and the next turn."""
    generator = TransformersGenerator(
        model, eos_token_ids=[1], pad_token_id=0, settings=SamplingSettings(min_new_tokens=tokens)
    )
    said: dict[int, list[GenerationOutput]] = {episode: [] for episode in episodes}
    heard = {episode: [2 + (7 * episode + i) % 400 for i in range(5 + 3 * (episode % 9))] for episode in episodes}
    streams = {episode: _uniforms(episode) for episode in episodes}
    for episode in episodes:
        generator.submit(GenerationRequest(episode, heard[episode], tokens, streams[episode]))
    while generator.pending:
        for output in generator.step():
            episode = output.episode
            said[episode].append(output)
            heard[episode] = [*heard[episode], *output.token_ids, *range(10, 14 + episode % 5)]
            if len(said[episode]) < turns:
                generator.submit(GenerationRequest(episode, heard[episode], tokens, streams[episode]))
    return said


def _model(machine: Any, dtype: torch.dtype) -> Any:
    shape = (512, 4, 8, 2, 1024) if not machine.tiny else SHAPES["tiny"]
    return make_model(*shape, device=machine.device, dtype=dtype, words=512).eval()


def test_rows_that_decode_together_say_what_each_says_alone(machine, figures):
    model, rows = _model(machine, torch.float32), machine.pick(64, 4)
    together = _play(model, list(range(rows)), tokens=16, turns=2)
    gap = 0.0
    for episode in range(0, rows, 9):
        alone = _play(model, [episode], tokens=16, turns=2)[episode]
        for ours, theirs in zip(together[episode], alone, strict=True):
            assert ours.token_ids == theirs.token_ids
            gap = max(gap, max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)))
    figures["largest gap of log-probabilities"] = gap
    assert gap < 1e-3


def test_forks_and_requests_at_once_are_answered_as_if_all_was_read(machine, figures):
    model, settings = _model(machine, torch.float32), SamplingSettings()
    generator, anew = (
        TransformersGenerator(model, eos_token_ids=[1], pad_token_id=0, settings=settings) for _ in range(2)
    )
    gap, read, asked = 0.0, 0, play_program(generator, seed=1, requests=machine.pick(200, 30))
    for number, request, output in asked:
        anew.submit(replace(request, uniforms=noise_of(number)))
        (expected,) = (answer for _ in output.token_ids for answer in anew.step())
        anew.release(request.episode)
        assert output.token_ids == expected.token_ids
        gap = max(gap, max(abs(a - b) for a, b in zip(output.logprobs, expected.logprobs, strict=True)))
        read += output.read
    figures["largest gap of log-probabilities"] = gap
    figures["share of the tokens that was read"] = read / sum(len(request.token_ids) for _, request, _ in asked)
    assert gap < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_log_probabilities_are_those_of_a_forward_pass(machine, figures, dtype):
    """What the trainer's correction calls the training-inference mismatch."""
    model, rows = _model(machine, dtype), machine.pick(64, 4)
    said = _play(model, list(range(rows)), tokens=32, turns=1)
    differences = []
    for episode, (output,) in said.items():
        prompt = [2 + (7 * episode + i) % 400 for i in range(5 + 3 * (episode % 9))]
        ids = torch.tensor([prompt + output.token_ids], device=machine.device)
        with torch.no_grad():
            scores = model(input_ids=ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        # The end of an answer is held back while it is shorter than the least length.
        scores[:, 1] = -torch.inf
        scores = scores.log_softmax(-1)
        found = scores[torch.arange(len(output.token_ids)), output.token_ids].tolist()
        differences += [abs(a - b) for a, b in zip(found, output.logprobs, strict=True)]
    figures["mean mismatch"], figures["largest mismatch"] = sum(differences) / len(differences), max(differences)
    assert figures["mean mismatch"] < {torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]


def test_how_often_the_host_waits_for_a_token(machine, figures):
    """torch reports each synchronization: one for a token, whatever the number of rows, and some for the prompts."""
    model, tokens = _model(machine, torch.bfloat16), 32
    counts = {}
    for rows in machine.pick((8, 64), (2, 4)):
        _play(model, list(range(rows)), tokens=4, turns=1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if not machine.tiny:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                _play(model, list(range(rows)), tokens=tokens, turns=1)
            finally:
                if not machine.tiny:
                    torch.cuda.set_sync_debug_mode("default")
        counts[rows] = sum("synchroniz" in str(one.message) for one in seen) / tokens
        figures[f"{rows} rows"] = counts[rows]
    assert max(counts.values()) < 2
