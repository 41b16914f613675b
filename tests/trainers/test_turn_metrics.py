"""Metrics of each turn index, computed by hand, and those of a run."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from games import make_trainer

from agile_trainers.step.credit import TurnMeans, credit_by_turn


def test_means_are_over_the_episodes_that_reached_the_turn() -> None:
    rewards = torch.zeros(2, 11)
    rewards[:, :2] = torch.tensor([[1.0, 5.0], [3.0, 99.0]])
    rewards[0, 8:] = torch.tensor([1.0, 2.0, 6.0])
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, 1:] = False
    found = credit_by_turn(rewards, -rewards, mask)
    assert found["turn/1/reward"] == 2.0 and found["turn/2/reward"] == 5.0 and found["turn/9+/reward"] == 3.0
    assert found["turn/1/advantage"] == -2.0 and found["turn/9+/advantage"] == -3.0
    assert len(found) == 18 and "turn/3/reward" not in credit_by_turn(rewards[:, :2], rewards[:, :2], mask[:, :2])


def test_entropy_is_over_tokens_of_all_micro_batches_and_forgotten() -> None:
    entropies = TurnMeans("entropy")
    turn_ids = torch.tensor([[0, 0, -1, 1]])
    entropies.add(torch.tensor([[1.0, 2.0, 50.0, 4.0]]), turn_ids, torch.tensor([[True, True, True, True]]))
    entropies.add(torch.tensor([[6.0, 50.0, 50.0, 50.0]]), turn_ids, torch.tensor([[True, False, False, False]]))
    accelerator = Accelerator(cpu=True)
    assert entropies.close(accelerator) == {"turn/1/entropy": 3.0, "turn/2/entropy": 4.0}
    assert entropies.close(accelerator) == {}


def test_a_run_logs_them(embedded_model, tmp_path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, max_steps=1, logging_steps=1, gradient_accumulation_steps=1)
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "turn/1/reward" in entry)
    assert {"turn/1/entropy", "turn/1/advantage"} < log.keys() and log["turn/1/entropy"] > 0
    turns = [name for name in log if name.startswith("turn/") and name.endswith("/reward")]
    assert len(turns) == min(log["turns/max"], 9)
    if len(turns) == 1:
        assert log["turn/1/entropy"] == pytest.approx(log["entropy"], abs=1e-5)
