"""A pipeline of a chain, its rows and environment, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agile_environments.guess_number import GuessNumber, halving_player, random_legal_player
from agile_trainers.envs.players import compare


def pairs(count: int) -> list[dict[str, Any]]:
    """Found by its path: ``chain_files:pairs``."""
    return compare(GuessNumber(level="easy"), halving_player, random_legal_player, range(count))


class Talk(GuessNumber):
    """The same game, but any answer earns something, even an untrained model's."""

    def step(self, action: str) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, sum(map(ord, action)) % 5 / 4, terminated, truncated, info


def lineage(folder: Path) -> list[str]:
    """The algorithms that a folder's record names, the latest first."""
    found, stage = [], json.loads((folder / "agile_trainers.json").read_text())
    while stage is not None:
        found.append(stage["algorithm"])
        stage = stage["parent"]
    return found
