"""Withholds the further updates of a generation batch once the earlier ones have moved the policy far enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from accelerate import Accelerator

from agile_trainers.step.loss import LossPass


class BatchBound:
    """Compares how far the policy has moved since the first update of a batch with a limit, before each update.

    An update that is withheld leaves weights and optimizer state as they were, and counts as a step of the schedule. The
    bound has no state between updates: where a batch is one update, nothing moves after the first that is withheld, so
    that the rest of its updates measure the same and are withheld too.

    Args:
        limit: Nats a token; None withholds no update.
        accelerator: The trainer's.
    """

    def __init__(self, limit: float | None, accelerator: Accelerator) -> None:
        self._limit, self._accelerator = limit, accelerator
        self._sums: torch.Tensor | None = None

    def add(self, handed: LossPass) -> None:
        """Measure a forward pass of the coming update."""
        if self._limit is None or handed.batch.old_per_token_logps is None:
            return
        assert handed.log_probs is not None
        gap = (handed.log_probs - handed.batch.old_per_token_logps)[handed.batch.counted].double()
        new = torch.stack([(gap.exp() - 1 - gap).sum(), gap.new_tensor(float(gap.numel()))])
        self._sums = new if self._sums is None else self._sums + new

    def forget(self) -> None:
        """Drop the passes of an update that was not finished."""
        self._sums = None

    def remember(self) -> Callable[[], None]:
        """Return a function that drops the passes that are added after this call."""
        return partial(setattr, self, "_sums", self._sums)

    def withhold(self, model: torch.nn.Module) -> dict[str, float]:
        """Drop the gradients of an update whose batch has moved the policy beyond the limit, on every process.

        Args:
            model: The model whose gradients are dropped.

        Returns:
            ``batch_kl``, the k3 estimate of KL(policy of the first update || policy) in nats a token of all processes, and
            ``withheld_updates``, 1 or 0. Empty without a limit.
        """
        if self._limit is None:
            return {}
        sums = self._sums if self._sums is not None else torch.zeros(2, dtype=torch.float64)
        self._sums = None
        total, tokens = self._accelerator.reduce(sums.to(self._accelerator.device), reduction="sum").tolist()
        moved = total / max(tokens, 1.0)
        beyond = moved > self._limit
        if beyond:
            for parameter in model.parameters():
                parameter.grad = None  # optimizers skip a parameter without gradient
        return {"batch_kl": moved, "withheld_updates": float(beyond)}
