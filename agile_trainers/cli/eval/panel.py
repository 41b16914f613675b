"""``agile-trainers panel make``: writes a panel, the episodes on which results of different people are compared."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from agile_trainers.adapters.folders import write_json
from agile_trainers.cli.eval.command import dataset_rows, positive_int
from agile_trainers.cli.parser import json_object, seed_number
from agile_trainers.evaluation.panels import make_panel

_ABOUT = (
    "Writes a panel: seeds of the episodes, and hashes of their rows, of their starts and of the environment's source and "
    "version. `agile-trainers eval --panel FILE` plays exactly these episodes."
)


def main(argv: Sequence[str]) -> None:
    """Make a panel and write it.

    Raises:
        ValueError: If an option cannot be used, or the environment has no fixed episodes.
        ImportError: If a library that the environment needs is missing.
    """
    parser = argparse.ArgumentParser(prog="agile-trainers panel", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("action", choices=("make",), help="make: write a panel")
    parser.add_argument("environment", metavar="ENVIRONMENT", help="id of the environment")
    parser.add_argument(
        "--episodes", type=positive_int, metavar="N", help="episodes (default: one for each row, else 200)"
    )
    parser.add_argument(
        "--seed", type=seed_number, default=42, help="seed from which those of the episodes follow (default: 42)"
    )
    parser.add_argument(
        "--environment_args", type=json_object, default={}, metavar="JSON", help="arguments of the environment"
    )
    parser.add_argument("--dataset_name", metavar="NAME", help="rows for reset: Hub id, file or folder")
    parser.add_argument("--dataset_config", metavar="NAME", help="its configuration")
    parser.add_argument("--dataset_test_split", default="test", metavar="NAME", help="its split (default: test)")
    parser.add_argument(
        "--output", type=Path, default=Path("panel.json"), metavar="FILE", help="file (default: panel.json)"
    )
    options = parser.parse_args(argv)
    if options.output.exists():
        raise ValueError(f"--output {options.output} is there already. Choose another name, or remove it.")
    rows = dataset_rows(options)
    names = ("dataset_name", "dataset_config", "dataset_test_split")
    panel = make_panel(
        options.environment,
        options.episodes or (200 if rows is None else len(rows)),
        seed=options.seed,
        arguments=options.environment_args,
        rows=rows,
        dataset=None if rows is None else {name: getattr(options, name) for name in names},
    )
    write_json(options.output, panel.to_dict())
    print(f"{options.output}: panel {panel.hash}, {len(panel.seeds)} episodes of {panel.environment}")
    print(f"different starts: {panel.different_starts or 'not known of an agent without rows'}")
    print(f"hashed of each start: {', '.join(panel.repeats) or 'nothing, an agent has none'}")
    for name, value in panel.version.items():
        print(f"{name}: {value}")
