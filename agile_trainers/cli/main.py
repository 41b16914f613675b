"""``agile-trainers <command>``. A command's module is imported when the command runs, so that help comes at once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "train a tiny model on guess-the-number, from nothing to a trained agent in minutes",
    "grpo": "train any model on any environment by multi-turn GRPO",
    "gspo": "the same with one importance ratio per episode, or per turn",
    "cispo": "the same with clipped importance weights",
    "reinforce": "the same without groups, by returns normalized over the batch (ReBN)",
    "ppo": "the same without groups, with a critic",
    "chain": "SFT, DPO and any of these in a row, as a YAML file says",
}
"""What each command does. ``demo`` and ``chain`` are modules of their own; ``agile_trainers.cli.train`` runs the others."""


def usage() -> str:
    """The text of ``agile-trainers --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: agile-trainers <command> [options]",
            "",
            "Multi-turn reinforcement learning for language models, on top of TRL.",
            "",
            *lines,
            "",
            "`agile-trainers <command> --help` lists the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The command and its options. Default: the command line.

    Returns:
        The exit code: 0, 2 for a command that does not exist, 130 after Ctrl-C.
    """
    command, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command not in COMMANDS:
        print(f"agile-trainers: there is no command {command!r}.\n\n{usage()}", file=sys.stderr)
        return 2
    # Before TRL is imported: the modules this package builds on call themselves experimental at every import.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        if command in ("demo", "chain"):
            importlib.import_module(f"agile_trainers.cli.{command}").main(arguments)
        else:
            importlib.import_module("agile_trainers.cli.train").main([command, *arguments])
    except KeyboardInterrupt as stop:
        print(f"\nagile-trainers: interrupted{f', {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
