"""The code blocks of README.md, ``docs/`` and ``environments/``."""

from __future__ import annotations

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
