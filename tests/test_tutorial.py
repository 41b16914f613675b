"""The tutorial runs page by page, as printed; each training learns.

``make test`` takes a few steps of each; ``make snippets`` runs them whole and compares what was learned with the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT, blocks

PAGES = ("environment", "tools", "data", "chain", "summary", "agent", "evaluation", "sharing")
SHORT = (
    (r"max_steps=\d+", "max_steps=1"), (r"range\((2560|600)\)", "range(64)"),
    (r"(demonstrations|preferences)\(\d+\)", r"\1(96)"),
    (r"max_steps: \d+", "max_steps: 1"), (r"num_eval_episodes: 256", "num_eval_episodes: 8"),
    (r" +num_eval_episodes=256,\n", ""),
    (r"(?=output_dir=)", "num_eval_episodes=8, "),
)  # fmt: skip
LEARNED = {
    "environment": (0.3, 0.9),
    "tools": (0.75, 0.85),
    "data": (0.3, 0.8),
    "summary": (0.3, 0.9),
    "agent": (0.3, 0.8),
}
"""Success that a page's training begins below and ends above."""


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, short: bool) -> dict[str, dict[str, Any]]:
    """Run every block of every page in order; a page has a namespace of its own, as a script."""
    from agile_trainers.cli import main

    monkeypatch.chdir(folder)
    namespaces: dict[str, dict[str, Any]] = {}
    for page in PAGES:
        names = namespaces[page] = {"__name__": page}
        for block in blocks(ROOT / f"docs/tutorial/{page}.md"):
            text = re.sub(r"^trainer\.push_to_hub\(\)$", "", block.text, flags=re.M)
            for pattern, instead in SHORT if short else ():
                text = re.sub(pattern, instead, text)
            if block.language == "python":
                exec(compile("\n" * block.line + text, f"{page}.md", "exec", dont_inherit=True), names)
            elif block.language == "yaml":
                (folder / "pipeline.yaml").write_text(text, encoding="utf-8")
            elif block.language == "sh":
                for command in text.splitlines():
                    words = command.partition(" #")[0].split()
                    assert words[0] == "agile-trainers" and main.main(words[1:]) == 0
    return namespaces


@pytest.mark.slow
def test_the_tutorial_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = run(monkeypatch, tmp_path, short=True)
    assert names["sharing"]["policy"].peft_config and len(names["evaluation"]["results"].trajectories) == 64
    assert all(
        (tmp_path / "runs/tutorial/chain" / stage / "evaluation.json").is_file() for stage in ("sft", "dpo", "grpo")
    )


@pytest.mark.slow
def test_the_tutorial_learns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(monkeypatch, tmp_path, short=False)
    for page, (below, above) in LEARNED.items():
        before, after = names[page]["before"], names[page]["after"]
        with capsys.disabled():
            print(f"\n{page}: success before {before:.2f}, after {after:.2f}")
        assert before < below and after > above
