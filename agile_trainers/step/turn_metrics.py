"""Computes reward, advantage and entropy of each turn index: the first turn of all episodes, the second, and so on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from accelerate import Accelerator

FIRST = 8
"""Number of turn indices with metrics of their own; those of later turns are pooled under ``turn/9+/``."""


def credit_by_turn(rewards: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Compute the mean reward and advantage of each turn index.

    Args:
        rewards: (B, K), those that credit is computed from.
        advantages: (B, K), those that enter the loss.
        mask: (B, K) bool, turns that happened in episodes that did not fail.

    Returns:
        ``turn/1/reward``, ``turn/1/advantage``, ``turn/2/...``, of the indices that an episode reached.
    """
    index = torch.arange(mask.size(1), device=mask.device).expand_as(mask)
    return _means("reward", *_sums(rewards, index, mask)) | _means("advantage", *_sums(advantages, index, mask))


class TurnEntropies:
    """Collects the entropy of the tokens of each turn index over the micro-batches of an optimizer step."""

    def __init__(self) -> None:
        self._totals: torch.Tensor | None = None

    def add(self, entropies: torch.Tensor, turn_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Add a micro-batch.

        Args:
            entropies: (B, T), in nats.
            turn_ids: (B, T) int64, -1 outside of turns.
            mask: (B, T) bool, the tokens that count.
        """
        new = torch.stack(_sums(entropies.detach(), turn_ids, mask & (turn_ids >= 0)))
        self._totals = new if self._totals is None else self._totals + new

    def remember(self) -> Callable[[], None]:
        """Return a function that drops the micro-batches that are added after this call."""
        return partial(setattr, self, "_totals", self._totals)

    def close(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the mean entropy of each turn index, ``turn/1/entropy`` and so on, over all processes, and forget it."""
        totals = self._totals if self._totals is not None else torch.zeros(2, FIRST + 1, device=accelerator.device)
        self._totals = None
        return _means("entropy", *accelerator.reduce(totals, reduction="sum"))


def _sums(values: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sum and number of the values of each turn index, (FIRST + 1,) each."""
    slots = index[mask].clamp(max=FIRST)  # the last slot pools the later turns
    empty = torch.zeros(FIRST + 1, device=values.device)
    kept = values[mask].float()
    return empty.index_add(0, slots, kept), empty.index_add(0, slots, torch.ones_like(kept))


def _means(name: str, sums: torch.Tensor, counts: torch.Tensor) -> dict[str, float]:
    titles = [*map(str, range(1, FIRST + 1)), f"{FIRST + 1}+"]
    found = zip(titles, sums.tolist(), counts.tolist(), strict=True)
    return {f"turn/{title}/{name}": total / count for title, total, count in found if count}
