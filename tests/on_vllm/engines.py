"""Engines of vLLM beside the transformers generator on the same policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from generated import EOS, PAD, letters, qwen2
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from programs import play_program

from agile_trainers.rollout.generators import (
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
    TransformersGenerator,
)
from agile_trainers.rollout.generators.base import Generator
from agile_trainers.rollout.generators.vllm.engine import VllmEngine, VllmGenerator

GREEDY = SamplingSettings(do_sample=False)


def policy(seed: int) -> PeftModel:
    """The same base each time (heads of 32, which vLLM asks for on CPU), under an adapter of this seed."""
    base = qwen2(hidden_size=128, intermediate_size=64)
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()


def make_engine(folder: Path) -> VllmEngine:
    """An engine of the base of :func:`policy`, which is saved to a folder first."""
    qwen2(hidden_size=128, intermediate_size=64).save_pretrained(folder)
    return VllmEngine(
        str(folder),
        dtype=torch.float32,
        max_model_length=256,
        max_batch_size=64,
        max_lora_rank=8,
    )


def serve(engine: VllmEngine, model: PeftModel) -> int:
    return engine.load_adapter(get_peft_model_state_dict(model), model.peft_config["default"])


def make(engine: VllmEngine, settings: SamplingSettings = GREEDY, eos: list[int] = EOS) -> VllmGenerator:
    return VllmGenerator(engine, eos_token_ids=eos, settings=settings, tokenizer=letters())


def on_transformers(model: PeftModel, settings: SamplingSettings, eos: list[int] = EOS) -> TransformersGenerator:
    return TransformersGenerator(model, eos_token_ids=eos, pad_token_id=PAD, settings=settings, tokenizer=letters())


def run(generator: Generator, request: GenerationRequest) -> GenerationOutput:
    generator.submit(request)
    while generator.pending:
        for output in generator.step():
            return output
    raise AssertionError


def answers_of_a_program(generator: Generator, reference: TransformersGenerator) -> None:
    """Compare greedy answers to turns, forks and requests at once with those of a generator that reads everything anew."""
    asked = play_program(generator, seed=5, requests=40)
    assert len(asked) > 20
    for _, request, output in asked:
        expected = run(reference, request)
        reference.release(request.episode)
        assert (output.token_ids, output.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert output.read is not None and 0 < output.read <= len(request.token_ids)


GREEDILY = {
    "greedy": GREEDY,
    "penalty": replace(GREEDY, repetition_penalty=1.7),
    "min_new_tokens": replace(GREEDY, min_new_tokens=4),
    "stop_strings": replace(GREEDY, stop_strings=("jx", "q", "b")),
}


def agree(ours: dict[int, list[GenerationOutput]], theirs: dict[int, list[GenerationOutput]]) -> None:
    """Tokens, log-probabilities and reasons, of which both occur."""
    reasons = set()
    for episode, turns in ours.items():
        for output, reference in zip(turns, theirs[episode], strict=True):
            assert output.token_ids == reference.token_ids
            assert output.finish_reason == reference.finish_reason
            assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
            reasons.add(output.finish_reason)
    assert reasons == {"stop", "length"}
