"""The README's first snippet learns, with the batch it prints; model, environment, lengths and learning rate are exchanged.

``make snippets`` runs three seeds and prints the returns.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import SNIPPET

from agile_environments.probes import PROBE_WORDS

EXCHANGED = {
    r'"Qwen/[^"]+"': "MODEL",
    r'"gem:[^"]+"': "EvenThenOdd",
    r"max_steps=200": "max_steps=16",
    r"max_turns=4": "max_turns=2",
    r"max_new_tokens=64": "max_new_tokens=1",
    r"learning_rate=1e-5": "learning_rate=1e-2",
    r'output_dir="runs/guess"': "output_dir=FOLDER, seed=SEED, use_cpu=True, bf16=False, disable_tqdm=True",
    r"trainer\.push_to_hub\(\)": "",
}


class EvenThenOdd:
    """Two turns: pays 1 for an even digit in the first and 1 for an odd one in the second."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "first", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action in (*"0246",) if self.turn == 0 else action in (*"135",)
        self.turn += 1
        return "second", float(right), self.turn == 2, False, {}


def test_the_printed_rate_and_batch_learn() -> None:
    """1e-5 is the rate of TRL's documentation for LoRA; one update sees eight groups."""
    calls = {
        node.func.id: node for node in ast.walk(ast.parse(SNIPPET)) if isinstance(getattr(node, "func", None), ast.Name)
    }
    printed = {key.arg: ast.literal_eval(key.value) for key in calls["MultiTurnGRPOConfig"].keywords}
    assert printed["learning_rate"] == 1e-5 and "num_generations" not in printed
    assert printed["per_device_train_batch_size"] * printed["gradient_accumulation_steps"] == 8 * 8
    lora = {key.arg: ast.literal_eval(key.value) for key in calls["LoraConfig"].keywords}
    assert lora == {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_first_snippet_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    from agile_trainers.embedded import make_embedded_model

    text = SNIPPET
    for pattern, instead in EXCHANGED.items():
        text, count = re.subn(pattern, instead, text)
        assert count == 1, pattern
    made, trained, _ = text.partition("trainer.train()")
    model = make_embedded_model(tmp_path / "model", words=PROBE_WORDS, seed=seed)
    names: dict[str, Any] = {"MODEL": str(model), "FOLDER": str(tmp_path), "SEED": seed, "EvenThenOdd": EvenThenOdd}
    exec(made, names)
    assert names["trainer"].args.generation_batch_size == 64 and names["trainer"].num_generations == 8
    before = names["trainer"].evaluate()["eval_return"]
    exec(trained, names)
    after = names["trainer"].evaluate()["eval_return"]
    with capsys.disabled():
        print(f"\nREADME's first snippet, seed {seed}: mean return of 2 before {before:.3f}, after {after:.3f}")
    assert before < 0.8 and after > 1.5
