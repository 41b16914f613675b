"""Adds the pages outside ``docs/`` to the documentation site, and fits links between pages to it (``make docs``)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "AGENTS.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    **{
        f"benchmarks/results/{page.name}": f"benchmarks/{page.name}"
        for page in sorted(ROOT.glob("benchmarks/results/*.md"))
    },
    **{
        f"environments/{page.parent.name}/README.md": f"environments/{page.parent.name}.md"
        for page in sorted(ROOT.glob("environments/*/README.md"))
    },
}
"""Pages outside ``docs/``, and where the site has them."""
_SHIM = "https://unpkg.com/iframe-worker/shim"
"""File that the theme's offline plugin loads from another server; with it, the search works from ``file://``."""
OWN_SHIM = "javascripts/iframe_worker.js"
"""The same file, in the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?!https?:|#)[^)\s#]+)(#[^)\s]*)?\)")


def site_uri(path: Path) -> str | None:
    """Return where the site has a file, relative to its root; None if it is not part of the site."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    if name in PAGES:
        return PAGES[name]
    inside = name.startswith("docs/") and path.is_file() and path.suffix != ".py"
    return name.removeprefix("docs/") if inside else None


def with_site_links(markdown: str, source: Path, uri: str) -> str:
    """Rewrite the links of a page, which are relative to its place in the repository.

    Links to pages and images of the site lead to their place there. Of a link to another file of the repository only the
    text remains.

    Args:
        markdown: The page.
        source: Its file.
        uri: Its place in the site.
    """

    def rewritten(link: re.Match[str]) -> str:
        mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        there = site_uri((source.parent / target).resolve())
        return text if there is None else f"{mark}[{text}]({os.path.relpath(there, Path(uri).parent)}{anchor})"

    return _LINK.sub(rewritten, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside ``docs/``; mkdocs calls this."""
    from mkdocs.structure.files import File

    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page; mkdocs calls this."""
    return with_site_links(markdown, Path(page.file.abs_src_path), page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the search's script from the site; mkdocs calls this."""
    from mkdocs.utils import get_relative_url

    return output.replace(_SHIM, get_relative_url(OWN_SHIM, page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Load the search's script from the site in the page of errors too, which may be at any address; mkdocs calls this."""
    return output_content.replace(_SHIM, f"/{OWN_SHIM}")
