"""``agile-trainers view``: writes a page that shows the episodes of runs in a browser, or serves it."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from math import inf
from pathlib import Path

from agile_trainers.cli.errors import Terminated, printable
from agile_trainers.records.reader import RunRecords, open_records
from agile_trainers.viewer.html import write_page
from agile_trainers.viewer.parts import with_members
from agile_trainers.viewer.server import LiveRuns, Server

_ABOUT = (
    "Writes one HTML file that shows the episodes of a run: a timeline, the groups of a step, each episode turn by turn "
    "with its tokens coloured by advantage, ratio and more, and comparisons. It opens offline, in any current browser."
)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of ``agile-trainers view``."""
    parser = argparse.ArgumentParser(prog="agile-trainers view", description=_ABOUT)
    parser.add_argument(
        "path", type=Path, metavar="RUN_OR_FILE", help="output_dir of a run, a folder of several, or a file of records"
    )
    parser.add_argument("--against", type=Path, metavar="OTHER", help="another run, or folder of runs, to compare with")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: view.html in the run's folder)"
    )
    parser.add_argument(
        "--megabytes", type=_megabytes, default=100, help="size of the file from which no more episodes are added; of a "
        "longer run, the first, the last and evenly spaced steps are in it (default: 100)",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--serve", action="store_true", help="serve the page on this machine and follow the run")
    parser.add_argument("--port", type=_port, default=0, help="port of --serve (default: a free one)")
    return parser


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"expected a number of megabytes from 0 on, such as 100 or 0.5, got {text!r}")
    return value


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"expected a port from 0 (a free one) to 65535, got {text!r}")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Parse the options, and write or serve the page.

    Args:
        argv: The options.

    Raises:
        ValueError: If there are no records.
        OSError: If the file cannot be written, or the port is taken.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.serve and options.output is not None:
        parser.error("--output has no effect with --serve, which writes no file: leave one of them out")
    return _serve(options) if options.serve else _write(options)


def _find(options: argparse.Namespace) -> tuple[list[RunRecords], int]:
    """Return the runs, those to compare with last, and the number of these."""
    runs = _ordered(open_records(options.path))
    others = _ordered(open_records(options.against)) if options.against is not None else []
    return [*runs, *others], len(others)


def _ordered(runs: list[RunRecords]) -> list[RunRecords]:
    """Order runs: members of a population by fitness, then training before evaluation, the newest first, and the policies
    of one evaluation as they were named."""
    by_name = sorted(runs, key=lambda run: run.name)
    newest = sorted(by_name, key=lambda run: run.name[: len("eval-YYYYmmdd-HHMMSS-abcd")], reverse=True)
    return with_members(sorted(newest, key=lambda run: run.info.get("kind") == "evaluation"))


def _write(options: argparse.Namespace) -> int:
    runs, compared = _find(options)
    folder = options.path if options.path.is_dir() else options.path.parent
    written = write_page(runs, options.output or folder / "view.html", megabytes=options.megabytes, compared=compared)
    names = ", ".join(run.name for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    print(f"{written.path}: {written.episodes:,} episodes of {printable(names)}, {written.size / 1e6:.1f} MB")
    for problem in written.problems:
        print(f"Not shown: {printable(problem)}", file=sys.stderr)
    if written.left_out:
        print(
            f"Of {written.left_out:,} further episodes only the numbers are in it. --megabytes with more than "
            f"{options.megabytes:g} adds their texts and tokens."
        )
    if options.open:
        webbrowser.open(written.path.resolve().as_uri())
    return 0


def _serve(options: argparse.Namespace) -> int:
    compared = _find(options)[1]
    with Server(LiveRuns(lambda: _find(options)[0], compared), options.port) as server:
        print(f"{server.url} shows the run while it goes on. Ctrl-C ends it.", flush=True)
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except Terminated:
            raise
        except KeyboardInterrupt:
            print()
    return 0
