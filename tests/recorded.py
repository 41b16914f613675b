"""The rollout log of a run, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agile_trainers.records.reader import open_records


def recorded(folder: Path | str, phase: str = "train") -> list[dict[str, Any]]:
    """All columns of every episode of training, or of every evaluation (``"eval"``), in order of run, step and process."""
    episodes = [episode for run in open_records(folder) for episode in run.episodes()]
    return [episode for episode in episodes if episode["phase"] == phase]


def sampled(record: dict[str, Any]) -> np.ndarray:
    """(T,) the sampler's log-probabilities, 0 on observation tokens; exact to 1.3e-4."""
    return np.array([value or 0.0 for value in record["sampling_logprobs"]])
