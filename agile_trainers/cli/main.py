"""``agile-trainers <command>``: runs a command, whose module is imported only then, so that help is quick."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from agile_trainers.cli import COMMANDS, OWN_MODULES
from agile_trainers.cli.errors import guard, take_debug
from agile_trainers.imports import nearest
from agile_trainers.trainers.registry import algorithm_names


def usage() -> str:
    """Return the text of ``agile-trainers --help``."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: agile-trainers <command> [options]\n\n"
        f"Multi-turn reinforcement learning for language models, on top of TRL.\n\n{commands}\n\n"
        "module.path:Class in place of an algorithm trains by one of your own, also in `chain` and `check`.\n"
        "`agile-trainers <command> --help` lists the options of a command.\n"
        "--debug shows the traceback of an error."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The command and its options. Default: the command line.

    Returns:
        The exit code: 0, 1 if a check fails, 2 for an unknown command or a user's mistake, 130 after Ctrl-C.

    Raises:
        Exception: A crash, and with ``--debug`` any error.
    """
    command, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        return guard(command, _help, debug=False)
    known = [*COMMANDS, *algorithm_names()]
    if command not in known and ":" not in command:
        print(f"agile-trainers: there is no command {command!r}{nearest(command, known)}\n\n{usage()}", file=sys.stderr)
        return 2
    # Set before TRL is imported, whose experimental modules warn at every import.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # A warning at every import on a CPU without the package `kernels`, which no command needs.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # DeepSpeed's, which is imported to see whether it is used; the commands say themselves that there is no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: `module:Name` may be in the current folder
    debug, arguments = take_debug(arguments)
    return guard(command, lambda: _run(command, arguments, debug), debug=debug)


def _help() -> None:
    print(usage())


def _run(command: str, arguments: list[str], debug: bool) -> int | None:
    if command in OWN_MODULES:
        return importlib.import_module(f"agile_trainers.cli.{OWN_MODULES[command]}").main(arguments)
    importlib.import_module("agile_trainers.cli.train").main([command, *arguments], debug=debug)
    return None


if __name__ == "__main__":
    raise SystemExit(main())
