"""Updates and rollouts at a share of the memory that they would need: smaller passes, the same result.

A rehearsal has no memory that could be capped; a layer raises torch's error instead when it is given too many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from games import Gradients, make_trainer, relative_error

from agile_trainers.embedded import make_embedded_model
from agile_trainers.types import StopReason, Trajectory, Turn

pytestmark = pytest.mark.gpu


@contextmanager
def capped(machine: Any, needed: float, model: torch.nn.Module, tokens: int) -> Iterator[None]:
    """Leave half of ``needed`` bytes above what is in use; on CPU, half of ``tokens`` in a forward pass."""
    if not machine.tiny:
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_allocated() + needed / 2
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return

    def run_out(_module: Any, args: tuple[torch.Tensor, ...], _output: Any) -> None:
        if args[0].size(0) * args[0].size(1) > tokens / 2:
            raise torch.OutOfMemoryError

    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp.down_proj"))
    handle = layer.register_forward_hook(run_out)
    try:
        yield
    finally:
        handle.remove()


def measured(machine: Any, work: Callable[[], Any]) -> float:
    """Bytes that a call needs above what is in use before it."""
    if machine.tiny:
        work()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return float(torch.cuda.max_memory_allocated() - before)


def test_an_update_at_half_of_its_memory_has_the_same_gradient(machine, figures, tmp_path):
    """Its passes become smaller; gradients are those of the whole."""
    sizes = machine.pick({"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "intermediate_size": 4096}, {})
    model = make_embedded_model(tmp_path / "model", **sizes)
    answer, rows = machine.pick(512, 20), 8
    chance = torch.Generator().manual_seed(0)
    episodes = []
    for row in range(rows):
        prompt, said = (torch.randint(10, 300, (count,), generator=chance).tolist() for count in (10 + row, answer))
        turns = [Turn(0, answer, "answer", "length", float(row % 3), "observation")]
        episodes.append(Trajectory(prompt, said, [0.0] * answer, turns, StopReason.TERMINATED, seed=row // 4))
    found, needed = [], 0.0
    for share in ("whole", "half"):
        seen = Gradients()
        trainer = make_trainer(
            model, tmp_path / share, use_cpu=machine.tiny, per_device_train_batch_size=rows, callbacks=[seen],
            max_new_tokens=answer, sequence_packing="none", max_logprob_gap=1e9, max_steps=2,
            max_tokens_per_micro_batch=None if not machine.tiny else 10**6,
        )  # fmt: skip
        if share == "whole":
            trainer.update(episodes)  # makes the optimizer's state
            needed = measured(machine, lambda trainer=trainer: trainer.update(episodes))
        else:
            trainer.update(episodes)
            with capped(machine, needed, trainer.model, rows * (answer + 17)):
                trainer.update(episodes)
            figures["tokens of a pass"] = trainer.token_batches.budget
        found.append(seen.steps[-1])
        del trainer
    figures["GiB"] = needed / 2**30
    figures["difference of gradients"] = float(relative_error(found[1], found[0]))
    assert figures["difference of gradients"] < machine.pick(1e-2, 1e-5)
