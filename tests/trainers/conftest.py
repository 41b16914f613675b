"""Fixtures that several tests of the trainers share."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2
import pytest
import torch
from checkpointed_runs import SAVING, make
from enumerated import Table
from trl import GRPOTrainer

from agile_trainers.checkpoints import record as checkpoint_module
from agile_trainers.checkpoints import resuming, stopping
from agile_trainers.monitor import nonfinite

# PEFT compiles the template of its model card at each save, which takes longer than the save.
jinja2.Environment.compile = functools.lru_cache(maxsize=64)(jinja2.Environment.compile)  # type: ignore[method-assign, assignment]


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    messages: list[str] = []
    record = lambda text, *values, **_: messages.append(text % values)  # noqa: E731
    for module in (checkpoint_module, stopping, nonfinite, resuming):
        monkeypatch.setattr(module.logger, "warning", record)
    return messages


@pytest.fixture(scope="module")
def saved(embedded_model, tmp_path_factory) -> Path:
    """A run of GRPO after one of its steps, in the middle of a generation batch. Read only."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    make("grpo", embedded_model, folder, **{**SAVING, "max_steps": 1}).train()
    return folder


@pytest.fixture
def table(monkeypatch):
    """The policy, in the place of a network: TRL's loss asks for its log-probabilities."""
    policy = Table(0)

    def scored(self, model, input_ids, *args, **kwargs):
        log_probs = policy.log_probs(input_ids[:, [1, 3, 4]])  # without the prompt and the observation
        return log_probs, torch.zeros_like(log_probs), None

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", scored)
    return policy
