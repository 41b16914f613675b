"""The whole scripts of docs/agilerl.md: AgileRL's are converted row by row, and ours learn on the embedded model.

``make snippets`` runs all of them on three seeds and prints the returns.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from agilerl_options import ROWS
from doc_blocks import ROOT, Block, blocks

SCRIPTS = {
    "reasoning-grpo": "GRPO",
    "reasoning-reinforce": "REINFORCE",
    "reasoning-ppo": "PPO",
    "toy-grpo": "GRPO",
    "toy-reinforce": "REINFORCE",
    "toy-ppo": "PPO",
}
"""Families of algorithms, in the order of the page."""
PAGE = blocks(ROOT / "docs" / "agilerl.md")
THEIRS, OURS = ([block for block in PAGE if block.language == language] for language in ("py", "python"))
OTHER_UNITS = ("max_steps", "generation_batch_size", "output_dir")
"""What is counted or named otherwise here."""
WORDS = (*"0123456", "Start:", "What", "is", "2+2?", "+", "?", "Done.")
EXCHANGED = {
    r'"Qwen/[^"]+"': "MODEL",
    r"max_new_tokens=64": "max_new_tokens=1",
    r"(?<!critic_)learning_rate=5e-6": "learning_rate=5e-3",
    r'output_dir="runs/[\w-]+"': "output_dir=FOLDER, seed=SEED, logging_steps=1, use_cpu=True, bf16=False",
    r"save_steps=16": 'save_steps=16, num_eval_episodes=32, report_to="none", disable_tqdm=True',
}


def keywords(block: Block, called: str) -> dict[str, Any]:
    """Keyword arguments of every call whose name matches, with their values where these are constants."""
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    given: dict[str, Any] = {}
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if re.fullmatch(called, name):
            given |= {k.arg: getattr(k.value, "value", None) for k in call.keywords if k.arg is not None}
    return given


def test_there_is_a_pair_of_every_kind() -> None:
    assert len(THEIRS) == len(OURS) == len(SCRIPTS)
    for name, ours in zip(SCRIPTS, OURS, strict=True):
        assert f'output_dir="runs/{name}"' in ours.text


@pytest.mark.parametrize(("name", "theirs", "ours"), list(zip(SCRIPTS, THEIRS, OURS)), ids=list(SCRIPTS))
def test_every_keyword_is_converted_by_its_row(name: str, theirs: Block, ours: Block) -> None:
    given = keywords(theirs, r"GRPO|LLM\w+|ReasoningGym|local|finetune_\w+|train_llm_rollout")
    made = keywords(ours, r"MultiTurn\w+|ReasoningEnvironment")
    assert len(given) > 15
    for keyword, value in given.items():
        rows = [row for row in ROWS if keyword in row.theirs and SCRIPTS[name] in row.of]
        assert rows, f"{keyword} has no row"
        for row in rows:
            names = [ours for ours, _ in row.ours if ours in made]
            if row.kind not in ("ours", "TRL", "transformers") or row.section.startswith("The manifest"):
                continue
            assert names or any(ours in ("generation_batch_size", "metric_for_best_model") for ours, _ in row.ours), (
                keyword
            )
            if len(row.ours) == 1 and names and names[0] not in OTHER_UNITS and value is not None:
                assert made[names[0]] == value, f"{keyword}={value} there, {names[0]}={made[names[0]]} here"
    episodes = made["max_steps"] * made["per_device_train_batch_size"] * made["gradient_accumulation_steps"]
    assert episodes == given["max_steps"]
    assert episodes // made["max_steps"] == given["batch_size"] * given.get("group_size", 1)


CHEAP = ("toy-grpo", 0)
RUNS = [
    pytest.param(name, seed, marks=() if (name, seed) == CHEAP else pytest.mark.slow, id=f"{name}-{seed}")
    for name in SCRIPTS
    for seed in range(3)
]


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_ours_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, seed: int) -> None:
    from agile_trainers.embedded import make_embedded_model

    text = OURS[list(SCRIPTS).index(name)].text
    for pattern, instead in EXCHANGED.items():
        text, count = re.subn(pattern, instead, text)
        assert count == 1, pattern
    text = text.replace("critic_learning_rate=5e-5", "critic_learning_rate=5e-3")
    if name.startswith("toy"):
        text = text.replace("max_steps=32", "max_steps=16")
    names: dict[str, Any] = {"MODEL": str(make_embedded_model(tmp_path / "model", words=WORDS, seed=seed)),
                             "FOLDER": str(tmp_path), "SEED": seed}  # fmt: skip
    exec(text, names)
    returns = [entry["return/mean"] for entry in names["trainer"].state.log_history if "return/mean" in entry]
    evaluated = [entry["eval_return"] for entry in names["trainer"].state.log_history if "eval_return" in entry]
    first, last = sum(returns[:2]) / 2, sum(returns[-2:]) / 2
    with capsys.disabled():
        print(f"\n{name}, seed {seed}: mean return at first {first:.3f}, at last {last:.3f}; evaluations {evaluated}")
    # Always giving the right answer to one of the two questions earns half.
    assert first < 0.35 and last > (0.8 if name.startswith("toy") else 0.35) and last > first + 0.3
