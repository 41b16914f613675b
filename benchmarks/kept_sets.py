"""Measures the bytes of kept sets, and the CPU seconds of a forward and backward pass with and without them.

Usage: python benchmarks/kept_sets.py [--tokens N] [--vocabulary V]

The distributions are made: logits that fall with the logarithm of the rank (Zipf's law, as of a trained model's next token),
and normal ones, as of an untrained model, which are the worst case. Bytes are given for 1,000 tokens, whatever was measured.
Filters are the generator's own. The pass is that of the trainer, of one model of two layers whose head is frozen.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from agile_trainers.objectives.kept_sets import KeptSets, encode_sets, pad_sets
from agile_trainers.packing.forward import PackedForward
from agile_trainers.rollout.generators import SamplingSettings
from agile_trainers.rollout.generators.transformers.decoding import Sampler

FILTERS = {
    "top_k=50": SamplingSettings(top_k=50),
    "top_p=.95": SamplingSettings(top_p=0.95),
    "top_k=50, top_p=.95": SamplingSettings(top_k=50, top_p=0.95),
}
ROWS = 50
"""Tokens that are filtered at the same time."""


def logits_of(kind: str, rows: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Make (R, V) logits of a kind: ``normal``, or ``zipf`` with its exponent."""
    noise = torch.randn(rows, vocabulary, generator=generator)
    if kind == "normal":
        return noise
    ranks = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(rows)])
    return -float(kind.removeprefix("zipf ")) * (ranks + 1).log() + 0.1 * noise


def sets_of(kind: str, settings: SamplingSettings, tokens: int, vocabulary: int) -> tuple[list[bytes], float]:
    """Return the sets of some tokens, and the CPU seconds of encoding them."""
    sampler, generator = Sampler(settings, []), torch.Generator().manual_seed(0)
    sets, seconds = list[bytes](), 0.0
    for _ in range(tokens // ROWS):
        log_probs = sampler.distribution(logits_of(kind, ROWS, vocabulary, generator))
        began = time.process_time()
        sets += encode_sets(log_probs > -torch.inf)
        seconds += time.process_time() - began
    return sets, seconds


def seconds_of_pass(vocabulary: int, sets: list[bytes] | None, tokens: int) -> float:
    """Return the CPU seconds of a forward and backward pass over some tokens, after one to warm up."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model.get_output_embeddings().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)
    forward, rows = PackedForward(model), 8
    ids = torch.randint(0, vocabulary, (rows, tokens // rows + 1))
    labels = ids.clone()
    labels[:, 0] = -100
    kept = None
    if sets is not None:
        each = tokens // rows
        parts = [sets[row * each : (row + 1) * each] for row in range(rows)]
        kept = KeptSets.of(*pad_sets(parts, each))
    taken = []
    for _ in range(2):
        began = time.process_time()
        outputs = forward.reading(model, None, kept=kept)(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True
        )
        finite = torch.where(outputs.log_probs.isfinite(), outputs.log_probs, 0.0)  # the ids are not those of the sets
        (finite.mean() + 0.01 * outputs.entropy.mean()).backward()
        taken.append(time.process_time() - began)
    return taken[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    options = parser.parse_args()
    tokens, vocabulary = options.tokens, options.vocabulary
    torch.set_num_threads(1)
    print(f"1,000 tokens of {vocabulary} ids; a bit for each would be {vocabulary / 8e3:.1f} MB", flush=True)
    measured: dict[str, list[bytes] | None] = {"no filter": None}
    for kind in ("zipf 2", "zipf 1.2", "normal"):
        for name, settings in FILTERS.items():
            sets, seconds = sets_of(kind, settings, tokens, vocabulary)
            words, sizes = pad_sets([sets], len(sets))
            total = (words.nbytes + sizes.nbytes) / tokens
            print(f"{kind} | {name} | {total:.1f} kB | encoded in {seconds / tokens * 1000:.2f} CPU s", flush=True)
            measured[f"{kind}, {name}"] = sets
    for name, found in measured.items():
        print(f"forward and backward pass, {name}: {seconds_of_pass(vocabulary, found, tokens):.2f} CPU s", flush=True)


if __name__ == "__main__":
    main()
