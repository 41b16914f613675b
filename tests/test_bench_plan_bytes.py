"""``benchmarks/plan_bytes.py`` on a small shape: the plan is what is counted; its saved results are within the bar."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import plan_bytes
from plan_bytes import CASES, RESULTS, WITHIN, Case, compare, extrapolate, table

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": True, "vocab_size": 512,
}  # fmt: skip
LIMITS = {"per_device_train_batch_size": 4, "max_turns": 2, "max_new_tokens": 64, "max_model_length": 512}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"], "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "gradient_checkpointing": False, "use_vllm": True},
        LORA,
        {**LORA, "load_in_4bit": True},
    ],
    ids=["whole_in_fp32", "whole, no checkpointing, vLLM", "lora", "4 bit"],
)
def test_planned_bytes_are_counted_bytes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "load_in_4bit" in options:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'agile-trainers[quantization]'")
    monkeypatch.setattr(plan_bytes, "PROMPT", 60)
    monkeypatch.setattr(plan_bytes, "OBSERVATION", 12)
    rows = compare(Case("small", {**LIMITS, **options}), {"small": SMALL})
    assert {"weights", "gradients", "optimizer", "activations", "temporaries"} <= rows.keys()
    assert ("KV cache" in rows) == ("use_vllm" not in options)
    for name, row in rows.items():
        if name != "peak":
            assert row["planned"] == pytest.approx(row["counted"], rel=0.02), name


def test_a_polynomial_of_degree_two_is_extrapolated_exactly() -> None:
    values = [3 * tokens**2 + 5 * tokens + 7 for tokens in plan_bytes.LENGTHS]
    assert extrapolate(values, 6400) == 3 * 6400**2 + 5 * 6400 + 7


def test_the_saved_results_are_within_the_bar_and_on_the_page() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results.keys() == CASES.keys()
    for name, rows in results.items():
        assert rows["sum"]["planned"] == pytest.approx(rows["sum"]["counted"], rel=WITHIN), name
    assert table(results) in (ROOT / "benchmarks/results/performance.md").read_text(encoding="utf-8")
