"""``benchmarks/rewrites.py`` on a small shape, and its saved results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import rewrites

SMALL = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}


def test_the_sides_sample_the_same_and_ours_reads_nothing_twice() -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{**rewrites.SHAPE, **SMALL})).eval()
    result = rewrites.measure(model, 7, repetitions=1, turns=5)
    theirs, ours = (result[side] for side in rewrites.SIDES)
    assert theirs["tokens"] == ours["tokens"] == 16 * 5 * 32
    lengths = [7, 7 + 64, 7 + 128, 7 + 192, 7 + 64]
    assert theirs["read"] == 16 * sum(lengths)
    # The prompt; the last id of an answer with the observation, three times; the last answer and its observation.
    assert ours["read"] == 16 * (7 + 3 * 33 + 64)
    assert (theirs["again"], ours["again"]) == (theirs["read"] - ours["read"], 0)
    assert min(theirs["seconds"] + ours["seconds"]) > 0


def test_the_table_by_hand() -> None:
    result = {
        "everything again": {"seconds": [8.0, 16.0, 8.0], "tokens": 400, "read": 12345, "again": 0},
        "ours": {"seconds": [4.0, 4.0, 1.0], "tokens": 400, "read": 1000, "again": 7},
    }
    assert (
        rewrites.table({"128": result}).splitlines()[2] == "| 128 | 12,345 | 1,000 | 7 | 50 | 100 | 4.0 (2.0 to 8.0) |"
    )


def test_the_saved_results_reach_the_bar_and_are_on_the_page() -> None:
    results = json.loads(rewrites.RESULTS.read_text())
    prompt, bar = rewrites.BAR
    assert median(rewrites.ratios(results[str(prompt)])) >= bar
    assert all(result["ours"]["again"] == 0 for result in results.values())
    assert rewrites.table(results) in rewrites.PAGE.read_text()
