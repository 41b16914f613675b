"""Reads a page of the viewer: as a browser would, and what a browser shows."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

SHOTS = Path(__file__).resolve().parents[2] / "runs" / "viewer"


def shoot(page: Any, name: str) -> None:
    """Store a picture of a page in Chromium, to be looked at."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def texts(page: Any, selector: str) -> list[str]:
    """Return the texts of a page's elements in Chromium."""
    return page.locator(selector).all_inner_texts()


_NO_DOCUMENT = """globalThis.document = { readyState: "done" };
globalThis.location = { hash: "" };
globalThis.addEventListener = () => {};"""


def in_node(path: Path, program: str) -> Any:
    """Run a page's script in Node.js, which draws nothing, and return what a program over its ``VIEW`` returns."""
    page = Page(path)
    script, start, _ = page.scripts["script"].rpartition("\nstart().catch(")
    assert start
    source = f"{_NO_DOCUMENT}\n{script}\ntake({json.dumps(page.part('index'))}, new Parts(embedded));\n"
    source += f"process.stdout.write(JSON.stringify((() => {{ {program} }})()));"
    made = subprocess.run(["node", "-"], input=source, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


class Page(HTMLParser):
    """What a browser would find in a page: the elements, and the content of each script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            tag, attributes = self.tags[-1]
            name = attributes.get("id", tag)
            self.scripts[name] = self.scripts.get(name, "") + data

    def part(self, name: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[name])))
