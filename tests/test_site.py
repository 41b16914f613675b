"""The documentation site has every page, loads nothing from another server, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "docs"))

from site_hooks import OWN_SHIM, PAGES, site_uri, with_site_links  # noqa: E402


class _Settings(yaml.SafeLoader):
    """Reads ``mkdocs.yml`` without its Python objects."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def leaves(nav: Any) -> Iterator[str]:
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from leaves(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    """A new page needs a line under ``nav`` in mkdocs.yml."""
    listed = sorted(leaves(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Settings)["nav"]))
    docs = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    assert listed == sorted([*docs, *PAGES.values()])


def test_links_lead_to_the_pages_of_the_site() -> None:
    page = (
        "[a](docs/grpo.md#options) [b](AGENTS.md) [c](setup.py) [d](https://x.org) ![e](docs/images/probes.png) [f](#g)"
    )
    fitted = "[a](grpo.md#options) [b](contributing.md) c [d](https://x.org) ![e](images/probes.png) [f](#g)"
    assert with_site_links(page, ROOT / "README.md", "index.md") == fitted
    task = ROOT / "environments/wordle/README.md"
    assert with_site_links("[`a`](../../docs/tools.md)", task, "environments/wordle.md") == "[`a`](../tools.md)"
    assert site_uri(ROOT / "docs/site_hooks.py") is None and site_uri(ROOT / "docs") is None


class _Loaded(HTMLParser):
    """Collects what a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe") or (tag == "link" and given.get("rel") in ("stylesheet", "preconnect")):
            self.addresses.append(given.get("src") or given.get("href") or "")


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install '.[dev]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES) + 10
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.addresses and not [address for address in loaded.addresses if re.match(r"(https?:)?//", address)]
        assert "\\|" not in page.read_text(encoding="utf-8"), f"{page.name} shows an escaped bar"
        own = [address for address in loaded.addresses if address.endswith(OWN_SHIM)]
        assert len(own) == 1 and (own[0].startswith("/") or (page.parent / own[0]).is_file())
    assert (tmp_path / "search/search_index.js").is_file(), "the search needs it where pages are files"
