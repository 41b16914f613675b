"""Fixtures for the tests that look at the page in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from missing_programs import chromium

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Debian's Chromium, with an empty profile."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        profile = tmp_path_factory.mktemp("profile")
        context = running.chromium.launch_persistent_context(profile, executable_path=chromium(), args=FLAGS)
        yield context
        context.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end, nothing may have failed and nothing may have been asked of the network."""
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def go(where: Path | str, place: str = "", width: int = 1280, height: int = 900, scheme: str = "light") -> Any:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        url = where.as_uri() if isinstance(where, Path) else where
        page.goto("about:blank")
        page.goto(url + place)
        page.wait_for_selector("body[data-ready]")
        return page

    page.problems = problems
    yield go
    page.close()
    assert problems == []
    assert not [url for url in asked if not url.startswith(("file:", "about:", "blob:", "http://127.0.0.1:"))]
