"""Times decoding on a CPU: the transformers generator, beside the same one with the model's own attention and cache.

The model has the shape of Qwen2.5 0.5B (24 layers, 14 query and 2 key heads of 64) and random weights in fp32. 16 rows of
unequal length, from half the context to all of it, decode a few tokens on one thread. Keys and values are random: reading
the prompts would take hours, and the time does not depend on them. All sides go on from the same cache, and must sample the
same tokens. They take turns, so that a ratio compares measurements of the same minute. Seconds are CPU seconds, which other
work on the machine changes less than those of the clock. The exit code is 1 if ``BAR`` is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import Cache, DynamicLayer
from update_vs_trl import PAGE, with_tables

from agile_trainers.rollout.generators import GenerationRequest, SamplingSettings, TransformersGenerator
from agile_trainers.rollout.generators.transformers.decoding import CachedLineage
from agile_trainers.rollout.generators.transformers.kv_cache import GrowingLayer, KVBatch

RESULTS = Path(__file__).resolve().parent / "results" / "decoding.json"
ROWS, CONTEXTS, BAR = 16, (500, 2000, 4000), (2000, 3.0)
"""``BAR``: at this context, this many times the tokens per second of the model's own attention in our cache."""
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SIDES = ("transformers", "own attention", "ours", "no attention")
"""The model's own attention with transformers' ``DynamicCache``; the same with this library's cache; both of this library;
and the limit, a pass whose attention returns its queries."""

Answers = list[tuple[list[int], list[float]]]


def _nothing(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register("nothing", _nothing)


def cache_of(model: Qwen2ForCausalLM, lengths: Sequence[int]) -> KVBatch:
    """Make a left-padded cache of random keys and values for rows of these lengths."""
    config, columns = model.config, max(lengths)
    size = (len(lengths), config.num_key_value_heads, columns, config.hidden_size // config.num_attention_heads)
    layers = [GrowingLayer(torch.randn(size), torch.randn(size), columns) for _ in range(config.num_hidden_layers)]
    return KVBatch(Cache(layers=layers), torch.arange(columns) >= columns - torch.tensor(lengths)[:, None])


def _draw(noise: random.Random, count: int) -> list[float]:
    return [noise.random() for _ in range(count)]


def decode(model: Qwen2ForCausalLM, side: str, kv: KVBatch, tokens: int) -> tuple[float, Answers]:
    """Decode a token to warm up and ``tokens`` more from a cache; return the CPU seconds of a token, and the answers."""
    settings = SamplingSettings()
    generator = TransformersGenerator(model, eos_token_ids=[1], pad_token_id=0, settings=settings)
    for row, length in enumerate(kv.mask.sum(1).tolist()):
        noise = random.Random(row)
        ids = [noise.randrange(2, model.config.vocab_size) for _ in range(length + 1)]
        generator._lineages[row] = [CachedLineage(row, ids, kv, row, length, busy=False)]
        generator.submit(GenerationRequest(row, ids, tokens + 1, partial(_draw, noise)))
    generator._repack_if_due()
    batch = generator._batch
    assert batch is not None
    if side != "ours":
        generator._decoded_by = []
    if side == "transformers":
        copied = Cache(layer_class_to_replicate=DynamicLayer)
        for index, layer in enumerate(kv.layers):
            copied.update(layer.keys, layer.values, index)
        batch.kv.cache = copied
    if side == "no attention":
        model.config._attn_implementation = "nothing"
    finished = generator.step()
    started = time.process_time()
    for _ in range(tokens):
        finished += generator.step()
    seconds = time.process_time() - started
    model.config._attn_implementation = "sdpa"
    finished.sort(key=lambda answer: answer.episode)
    return seconds / tokens, [(answer.token_ids, answer.logprobs) for answer in finished]


def measure(model: Qwen2ForCausalLM, context: int, tokens: int, repetitions: int) -> dict[str, Any]:
    """Measure all sides at a context, in turns.

    Raises:
        RuntimeError: If two sides sample other tokens, or other log-probabilities than rounding explains.
    """
    kv = cache_of(model, [context - row * context // (2 * ROWS) for row in range(ROWS)])
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    gap = 0.0
    for _ in range(repetitions):
        answers = {}
        for side in SIDES:
            spent, answers[side] = decode(model, side, kv, tokens)
            seconds[side].append(spent)
        for side in ("transformers", "own attention"):
            if [ids for ids, _ in answers[side]] != [ids for ids, _ in answers["ours"]]:
                raise RuntimeError(f"At {context} tokens, {side} samples other tokens.")
            pairs = zip(answers[side], answers["ours"], strict=True)
            gap = max([gap, *(abs(p - q) for (_, a), (_, b) in pairs for p, q in zip(a, b, strict=True))])
        print(context, {side: round(times[-1], 3) for side, times in seconds.items()}, f"{gap:.1e}", flush=True)
    if gap > 1e-5:  # of 24 layers in fp32; each side is half of that from float64
        raise RuntimeError(f"At {context} tokens, log-probabilities differ by {gap:.1e}.")
    return {"seconds": seconds, "gap": gap}


def ratios(result: dict[str, Any], side: str) -> list[float]:
    """Return how many times the tokens per second of ``side`` this library's are, in each repetition."""
    seconds = result["seconds"]
    return [theirs / ours for theirs, ours in zip(seconds[side], seconds["ours"], strict=True)]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Write the results as a table of Markdown."""
    lines = [
        "| context | transformers' attention and cache | its attention, our cache | both ours | no attention at all "
        "| ours / transformers' | ours / its attention |",
        "|---|---|---|---|---|---|---|",
    ]
    for context, result in results.items():
        speeds = [f"{ROWS / median(result['seconds'][side]):.1f}" for side in SIDES]
        times = []
        for side in SIDES[:2]:
            found = ratios(result, side)
            times.append(f"{median(found):.1f} ({min(found):.1f} to {max(found):.1f})")
        lines.append(f"| {' | '.join([context, *speeds, *times])} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, save, and write the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4, help="tokens of a row in a measurement, after the first")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
    results = {str(c): measure(model, c, options.tokens, options.repetitions) for c in CONTEXTS}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), {"decoding": table(results)}))
    print(table(results))
    context, bar = BAR
    return 0 if median(ratios(results[str(context)], "own attention")) >= bar else 1


if __name__ == "__main__":
    sys.exit(main())
