"""The files, names and links that README, AGENTS.md, ``docs/`` and the other pages mention exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
from doc_blocks import MEASURED, PAGES, ROOT

WRITTEN = [*PAGES, ROOT / "AGENTS.md", *MEASURED]
FOLDERS = "agile_trainers|environments|tests|docs|examples|benchmarks|accelerate_configs|requirements"
READERS_OWN = {"your_script.py", "my_script.py", "constant_baseline.py", "dppo.py"}
"""Names that stand for a file of the reader's."""


@cache
def tracked() -> frozenset[str]:
    """Every file of the repository and each of its folders, with a slash before it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return frozenset(f"/{path}" for file in files for path in (file, *file.parents))


def missing_files(text: str) -> set[str]:
    """Python files, and paths below one of the repository's folders, that end no path of the repository.

    A name after a path of the package (`agile_trainers/a/b.py`, `c.py`) is one of the same folder.
    """
    paths = set(re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w./-]*\w", text)) | set(
        re.findall(r"(?<![\w/.])[\w/]+\.py\b", text)
    )
    for line in text.splitlines():
        for folder, after in re.findall(r"`(agile_trainers/[\w/]+/)\w+\.py`((?:,? (?:and )?`\w+\.py`)+)", line):
            paths |= {f"{folder}{name}" for name in re.findall(r"\w+\.py", after)}
    return {path for path in paths - READERS_OWN if not any(file.endswith(f"/{path}") for file in tracked())}


def missing_names(text: str) -> set[str]:
    """Dotted names of the package, and of the tasks beside it, that nothing has."""
    missing = set()
    for name in set(re.findall(r"\bagile_(?:trainers|environments)(?:\.\w+)+(?::\w+)?", text)):
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            missing.add(name)
    return {name for name in missing if not any(name.endswith(suffix) for suffix in (".json", ".safetensors"))}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> set[str]:
    broken = set()
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.add(link)
    return broken


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert (missing_files(text), missing_names(text), broken_links(page)) == (set(), set(), set())


def test_the_readme_links_every_page() -> None:
    readme = PAGES[0].read_text(encoding="utf-8")
    assert not [page.name for page in ROOT.glob("docs/*.md") if f"](docs/{page.name})" not in readme]


def test_the_changelogs_links_lead_somewhere() -> None:
    """Its entries of released versions may name what is gone."""
    assert broken_links(ROOT / "CHANGELOG.md") == set()


def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[here](#a-title) [there](#b) [gone](gone.md)\n", encoding="utf-8")
    assert missing_files("`agile_trainers/gone.py`, `trainers/trainer.py`, `docs/`, `tests/gone/`, `gone.py`") == {
        "agile_trainers/gone.py", "tests/gone", "gone.py",
    }  # fmt: skip
    assert missing_files("`agile_trainers/envs/base.py`, `checker.py` and `sampler.py`") == {
        "agile_trainers/envs/sampler.py"
    }
    assert missing_names("agile_trainers.types.Gone agile_trainers.gone.x agile_trainers.types.Turn") == {
        "agile_trainers.types.Gone", "agile_trainers.gone.x",
    }  # fmt: skip
    assert broken_links(page) == {"#b", "gone.md"}
