"""``benchmarks/decoding.py`` on a small shape, and its saved results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import decoding

SMALL = {"vocab_size": 64, "hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2}


def test_the_sides_go_on_from_one_cache_and_agree() -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{**decoding.SHAPE, **SMALL})).eval()
    result = decoding.measure(model, 48, tokens=3, repetitions=2)
    assert result["gap"] < 1e-6
    assert result["seconds"].keys() == set(decoding.SIDES)
    assert all(len(times) == 2 and min(times) > 0 for times in result["seconds"].values())
    assert model.config._attn_implementation == "sdpa"
    kv = decoding.cache_of(model, [9, 5])
    seconds, others = decoding.decode(model, "no attention", kv, 3)
    _, answers = decoding.decode(model, "ours", kv, 3)
    assert [len(ids) for ids, _ in answers] == [4, 4] and others != answers and seconds > 0


def test_the_table_by_hand() -> None:
    seconds = {
        "transformers": [8.0, 16.0, 8.0],
        "own attention": [4.0] * 3,
        "ours": [1.0, 2.0, 1.0],
        "no attention": [0.5] * 3,
    }
    row = "| 2000 | 2.0 | 4.0 | 16.0 | 32.0 | 8.0 (8.0 to 8.0) | 4.0 (2.0 to 4.0) |"
    assert decoding.table({"2000": {"seconds": seconds, "gap": 0.0}}).splitlines()[2] == row


def test_the_saved_results_reach_the_bar_and_are_on_the_page() -> None:
    results = json.loads(decoding.RESULTS.read_text())
    context, bar = decoding.BAR
    assert median(decoding.ratios(results[str(context)], "own attention")) >= bar
    assert decoding.table(results) in decoding.PAGE.read_text()
