"""Tiny models, scripts of answers and references that every generator is tested against."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agile_trainers.rollout.generators import (
    GenerationOutput,
    GenerationRequest,
    Generator,
    SamplingSettings,
    TransformersGenerator,
)

VOCAB, PAD = 40, 0


EOS = [1, 7, 19, 31]
"""Several, so that greedy answers end too."""


PAIRS = ["ab", "bc", "cd", "jx", "xj", "qa", "zz", "ee", "oh", "no", "yes", "stop", "and"]


LETTERS = ["<pad>", *"abcdefghijklmnopqrstuvwxyz", *PAIRS]
"""The text of each id."""


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def qwen2(**changes: object) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**{**shape, **changes})).eval()


def letters() -> PreTrainedTokenizerFast:
    """Token ``i`` is the text ``LETTERS[i]``."""
    tokenizer = Tokenizer(WordLevel({text: i for i, text in enumerate(LETTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split("", "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def observation(episode: int, turn: int) -> list[int]:
    """Between 1 and 9 ids, the same for the same episode and turn."""
    draw = random.Random(100 * episode + turn)
    return [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 9))]


def uniforms(episode: int) -> Callable[[int], list[float]]:
    stream = np.random.default_rng(episode)
    return lambda n: stream.random(n).tolist()


def play(
    generator: Generator, episodes: Sequence[int], turns: int = 4, limit: int = 7
) -> dict[int, list[GenerationOutput]]:
    """Play episodes event-driven; an episode asks again as soon as it was answered."""
    ids = {e: observation(e, 0) for e in episodes}
    noise = {e: uniforms(e) for e in episodes}
    outputs: dict[int, list[GenerationOutput]] = {e: [] for e in episodes}
    for e in episodes:
        generator.submit(GenerationRequest(e, ids[e], limit, noise[e]))
    while generator.pending:
        for output in generator.step():
            e = output.episode
            outputs[e].append(output)
            ids[e] = [*ids[e], *output.token_ids]
            if len(outputs[e]) < turns:
                ids[e] = [*ids[e], *observation(e, len(outputs[e]))]
                generator.submit(GenerationRequest(e, ids[e], limit, noise[e]))
            else:
                generator.release(e)
    return outputs


def processed(logits: torch.Tensor, ids: list[int], made: int, settings: SamplingSettings) -> torch.Tensor:
    """Log-probabilities of the next token by the definitions of the settings, in float64."""
    scores = logits.double()
    for token in set(ids):
        penalty = settings.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    if made < settings.min_new_tokens:
        scores[EOS] = -torch.inf
    if not settings.do_sample:
        return scores.log_softmax(-1)
    scores /= settings.temperature
    best = scores.sort(descending=True).indices
    if settings.top_k:
        scores[best[settings.top_k :]] = -torch.inf
    probs = scores.softmax(-1)
    mass_before = probs[best].cumsum(-1) - probs[best]
    scores[best[mass_before >= settings.top_p]] = -torch.inf
    probs = scores.softmax(-1)
    if settings.min_p is not None:
        scores[probs < settings.min_p * probs.max()] = -torch.inf
    return scores.log_softmax(-1)


SETTINGS = {
    "temperature": SamplingSettings(temperature=0.6),
    "hot": SamplingSettings(temperature=2.5),
    "top_k": SamplingSettings(top_k=3),
    "top_p": SamplingSettings(top_p=0.7),
    "min_p": SamplingSettings(min_p=0.15),
    "repetition_penalty": SamplingSettings(repetition_penalty=1.7),
    "repetition_penalty, greedy": SamplingSettings(repetition_penalty=1.7, do_sample=False),
    "min_new_tokens": SamplingSettings(min_new_tokens=4),
    "min_new_tokens, greedy": SamplingSettings(min_new_tokens=4, do_sample=False),
    "stop_strings": SamplingSettings(stop_strings=("jx", "q")),
    "greedy takes no filters": SamplingSettings(temperature=0.3, top_k=3, top_p=0.7, min_p=0.5, do_sample=False),
    "all": SamplingSettings(
        temperature=1.8, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.3, min_new_tokens=2, stop_strings=("q",)
    ),
}


GREEDY = SamplingSettings(do_sample=False)


def gemma3() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=layers)).eval()


def mamba() -> MambaForCausalLM:
    """No keys and values at all."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    return MambaForCausalLM(MambaConfig(**shape, initializer_range=0.4)).eval()


def make(model: torch.nn.Module, settings: SamplingSettings = GREEDY, **options: object) -> TransformersGenerator:
    options = {"eos_token_ids": EOS, "pad_token_id": PAD, **options}
    return TransformersGenerator(model, settings=settings, **options)


def assert_same(outputs: list[GenerationOutput], expected: list[GenerationOutput], tolerance: float = 2e-5) -> None:
    for output, reference in zip(outputs, expected, strict=True):
        assert output.token_ids == reference.token_ids
        assert output.finish_reason == reference.finish_reason
        assert output.logprobs == pytest.approx(reference.logprobs, abs=tolerance)


class Log:
    """Shape and number of real tokens of every forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.read = 0
        self.handle = model.register_forward_pre_hook(self._hook, with_kwargs=True)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _hook(self, _: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        shape = kwargs["input_ids"].shape
        self.shapes.append(tuple(shape))
        self.read += int(kwargs["attention_mask"][:, -shape[1] :].sum())
