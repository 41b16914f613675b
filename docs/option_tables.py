"""Write the tables of options in ``docs/`` from the fields of the configurations (``make docs-tables``)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from agile_trainers import (
    MultiTurnCISPOConfig,
    MultiTurnGRPOConfig,
    MultiTurnGSPOConfig,
    MultiTurnPPOConfig,
    MultiTurnREINFORCEConfig,
)
from agile_trainers.trainers.config import MultiTurnConfig
from agile_trainers.trainers.options import option_table

DOCS = Path(__file__).resolve().parent
CONFIGS = {
    config.__name__: config
    for config in (
        MultiTurnConfig,
        MultiTurnGRPOConfig,
        MultiTurnGSPOConfig,
        MultiTurnCISPOConfig,
        MultiTurnREINFORCEConfig,
        MultiTurnPPOConfig,
    )
}
"""What has a table on some page, by the name that the page gives it."""
_TABLE = re.compile(r"(<!-- begin: options of (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def with_tables(page: str) -> str:
    """A page with its tables as the fields have them.

    Args:
        page: Markdown with ``<!-- begin: options of MultiTurnGRPOConfig -->`` and ``<!-- end -->`` around each table.
    """
    return _TABLE.sub(lambda found: f"{found[1]}{option_table(CONFIGS[found[2]])}\n{found[3]}", page)


def main() -> int:
    """Write every page whose tables are out of date, and name it."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if with_tables(page) != page:
            path.write_text(with_tables(page), encoding="utf-8")
            print(f"Written: {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
