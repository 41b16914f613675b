"""A generation batch before the loss, and the loss of it in forward passes of a budget of tokens."""

from __future__ import annotations

import pytest
import torch
from games import Gradients, loss_and_gradients, make_trainer, relative_error

WHOLE = 10**6
"""Tokens of a pass that holds a whole micro-batch."""


def drawn(trainer):
    """A generation batch of eight ragged rows, before weights that make every ratio differ from 1."""
    trainer.model.train()
    trainer.create_optimizer_and_scheduler(1)
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([{}] * 8)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora" in name:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return batch


def measured(trainer, batch, budget):
    """Loss, gradient, metrics and the rows of each forward pass."""
    rows = []

    def count(_module, _args, kwargs):
        rows.append(len(kwargs["input_ids"]))

    trainer.token_batches.budget = budget
    trainer._metrics["train"].clear()
    handle = trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    loss, gradients = loss_and_gradients(trainer, batch)
    handle.remove()
    metrics = {name: values for name, values in trainer._metrics["train"].items() if "time" not in name}
    return loss, gradients, metrics, rows


def check_equal(trainer, batch, budget=120):
    """The same loss, gradient and metrics in one pass and in several."""
    loss, gradients, metrics, rows = measured(trainer, batch, WHOLE)
    split, gradients_split, metrics_split, rows_split = measured(trainer, batch, budget)
    assert len(rows) == 1 and len(rows_split) > 2 and sum(rows_split) == rows[0]
    assert split == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert relative_error(gradients_split, gradients) < 1e-5
    assert metrics_split.keys() == metrics.keys()
    for name, values in metrics.items():
        assert metrics_split[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def check_layouts(model, folder, **options):
    """The same gradient in one micro-batch of eight padded rows, and in four of two with prefixes computed once."""
    found = []
    for changes in (
        {"sequence_packing": "none"},
        {"sequence_packing": "prefix", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ):
        gradients = Gradients()
        trainer = make_trainer(model, folder, callbacks=[gradients], **options, **changes)
        trainer.train()
        found.append(gradients.steps[0])
    assert trainer.packer.packs
    assert relative_error(found[1], found[0]) < 1e-5
