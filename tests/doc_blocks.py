"""The code blocks of README.md, ``docs/`` and ``environments/``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("environments/*/README.md"))]
MEASURED = [ROOT / "benchmarks/README.md", *sorted(ROOT.glob("benchmarks/results/*.md"))]
"""The pages of figures, which have no code."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    found, begun, language, lines = [], 0, "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif begun:
            found.append(Block(str(page.relative_to(ROOT)), begun, language, "\n".join(lines) + "\n"))
            begun = 0
        else:
            begun, language, lines = number, line.strip().strip("`"), []
    assert not begun, f"{page}:{begun} is never closed"
    return tuple(found)


BLOCKS = [block for page in PAGES for block in blocks(page)]
SNIPPET = blocks(PAGES[0])[0].text
"""The README's first block."""


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


EXCHANGED = (
    (r"Qwen/Qwen2\.5-[\d.]+B-Instruct", "model"),
    (r'load_rows\("openai/gsm8k", "main"\)', "load_rows(GSM8K)"),
    (r'dataset="gsm8k"', 'dataset="gsm8k", path="gsm8k"'),
    (r'(?<="runs/counter", )(?=max_steps=)', "num_eval_episodes=2, "),
    (r"max_steps=(200|256)\b", "max_steps=1"),
    (r"max_new_tokens=\d+", "max_new_tokens=2"),
    (r"batches_ahead=1", "batches_ahead=1, max_new_tokens=2"),
    (r"max_steps=120", "max_steps=1"),
    (r"members=8", "members=2"),
    (r"rounds=4", "rounds=1"),
    (r"num_eval_episodes=256", "num_eval_episodes=2"),
    (r"gradient_accumulation_steps=8", "gradient_accumulation_steps=2"),
    (r"generation_batch_size=64", "generation_batch_size=16"),
    (r"\bepisodes=100\b", "episodes=4"),
    (r"critic_warmup_steps=10", "critic_warmup_steps=0"),
    (r"(\w+)\(1[02]00\)", r"\1(20)"),
    (r"\b600\b", "20"),
    (r"checkpoint-40", "checkpoint-1"),
    (r'"runs/demo"', '"runs/guess"'),
    (r"(?=output_dir=)", 'use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, '),
)
"""Patterns in Python blocks, and what takes their place: the model, the Hub's data, lengths, the device."""

NOT_RUN = {
    r"trainer\.push_to_hub\(\)": "pushes to the Hub; tests/trainers/test_hub.py pushes to a server of its own",
    r"vllm serve .*": "needs vLLM; tests/on_vllm/test_vllm_server.py starts it with these options",
    r"with VllmSampler\(.*\n.*": "needs vLLM; tests/on_vllm/test_vllm_eval.py runs it",
    r"pip install .*": "installs; that the extras exist is checked here",
    r"make .*": "that the target exists is checked here",
}


def exchanged(text: str) -> str:
    for pattern in NOT_RUN:
        text = re.sub(rf"^{pattern}$", "", text, flags=re.M)
    if "gradient_accumulation_steps" not in text:  # an update is of one group, not of eight
        text = text.replace("output_dir=", "gradient_accumulation_steps=1, output_dir=")
    for pattern, instead in EXCHANGED:
        text = re.sub(pattern, instead, text)
    return text
