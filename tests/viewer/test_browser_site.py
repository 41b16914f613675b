"""The documentation site in a real Chromium (``make test-viewer``), opened as files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from written_page import shoot

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
CLIPPED = """[...document.querySelectorAll('pre > code')].filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.textContent)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("name", ["index.html", "tutorial/index.html"])
def test_the_search_works_without_a_server(site: Path, browser: Any, name: str) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto((site / name).as_uri())
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").type("zero_advantage_eps")
    page.wait_for_function("() => /^[0-9]+ matching/.test(document.querySelector('.md-search-result__meta').innerText)")
    page.locator(".md-search-result__link[href*='/grpo.html']").first.click()
    page.wait_for_function("() => location.pathname.endsWith('/grpo.html')")
    assert not [url for url in asked if not url.startswith(("file:", "data:", "about:", "blob:"))]
    page.close()


def test_code_of_the_first_page_is_not_clipped(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    assert page.evaluate(CLIPPED) == [] and page.locator("pre > code").count() > 3
    assert page.locator(".md-content h2").first.inner_text().startswith("Install")
    shoot(page, "site")
    page.close()
