"""A teacher in real runs: what it costs, what it reads, and how its part of the loss joins the reward's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import Chatter, draw_batch, loss_and_gradients, make_trainer, relative_error

from agile_trainers.objectives.distillation import GRADIENTS

TURNED = {"loss_type": "dr_grpo", "sequence_packing": "none"}


@pytest.fixture(scope="module")
def teacher(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of an adapter that differs from a fresh one."""
    folder = tmp_path_factory.mktemp("teacher") / "adapter"
    trainer = make_trainer(embedded_model, folder)
    noise = torch.Generator().manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=noise) * 0.1
    trainer.save_model(str(folder))
    return str(folder)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_run(embedded_model, tmp_path, teacher, gradient) -> None:
    trainer = make_trainer(embedded_model, tmp_path, teacher=teacher, teacher_gradient=gradient, max_steps=2)
    trainer.train()
    print(trainer.state.log_history[0])
