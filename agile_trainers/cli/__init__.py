"""The command line, ``agile-trainers``."""

from __future__ import annotations

from agile_trainers.trainers.registry import ALGORITHMS

COMMANDS = {
    "demo": "trains a tiny model on guess-the-number, in minutes on a CPU",
    **{name: algorithm.summary for name, algorithm in ALGORITHMS.items()},
    "chain": "runs a YAML file of stages: SFT, DPO and any of these",
    "evolve": "trains a population, which finds hyperparameters by itself",
    "check": "checks that a run is ready to train, and shows its episodes",
    "eval": "plays a policy's episodes, and compares it with others",
    "panel": "writes a panel: episodes on which results are compared",
    "view": "shows the episodes of a run in a browser, token by token",
    "play": "lets you answer in place of the model, in the terminal",
    "envs": "lists the environments, and the packages that others need",
    "env": "lists what works on this machine, and what others need",
}
"""Command to its summary."""
OWN_MODULES = {
    **{name: f"{name}.command" for name in ("chain", "evolve", "check", "eval")},
    **{name: name for name in ("demo", "view", "play")},
    **{"panel": "eval.panel", "envs": "environments", "env": "machine"},
}
"""Command to its module below ``agile_trainers.cli``; ``agile_trainers.cli.train`` runs the others."""
