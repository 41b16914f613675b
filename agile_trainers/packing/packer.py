"""Decides which forward passes are packed, and checks once that packed and padded rows agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers.utils import logging

from agile_trainers.adapters.roles import base_model
from agile_trainers.objectives.kept_sets import KeptSets
from agile_trainers.packing.attention import BLOCK
from agile_trainers.packing.cost import Cost, rounding_bound
from agile_trainers.packing.forward import Forward, PackedForward, ValueReading
from agile_trainers.packing.kept_head import KeptHead
from agile_trainers.packing.support import adds_virtual_tokens, longest_packed, why_padded
from agile_trainers.packing.trie import Trie, build_trie, shared_prefixes
from agile_trainers.paths import Paths
from agile_trainers.train_batch import READ, Batch, order_by_length, paths_of, read_inputs, rows_read

logger = logging.get_logger(__name__)


def kept_of(part: Batch) -> KeptSets | None:
    """Return the kept sets of the tokens (B * T,) of a micro-batch in TRL's form; None without any."""
    return KeptSets.of(part["kept_words"], part["kept_sizes"]) if "kept_sizes" in part else None


@dataclass
class PackingState:
    """The result of comparing packed with padded rows. Checkpoints contain it, so that a resumed run computes the same."""

    checked: bool = False
    """True once packed and padded rows were compared."""
    refused: str | None = None
    """The reason if they differ."""


class Packer:
    """Runs the forward passes of a trainer's policy and reference.

    Args:
        mode: The option ``sequence_packing``.
        models: The policy, and the reference if it is a model of its own; before distributed training wraps the policy.
        accelerator: The trainer's.
        forbidden: Why the run itself does not allow packing; None if it does.
        dtype: In which the layers compute.
        compiled: True with ``torch_compile``.
        kept_head: Computes log-probabilities where tokens have kept sets.

    Raises:
        ValueError: With ``mode="prefix"``, if a model cannot be packed.
    """

    def __init__(
        self,
        mode: str,
        models: list[torch.nn.Module],
        accelerator: Accelerator,
        *,
        forbidden: str | None,
        dtype: torch.dtype,
        compiled: bool,
        kept_head: KeptHead,
    ) -> None:
        self._mode, self._accelerator = mode, accelerator
        bases = [base_model(model) for model in models]
        reasons = [why_padded(model, base) for model, base in zip(models, bases, strict=True)]
        reason = next((r for r in [forbidden, *reasons] if r is not None), None)
        if reason is not None and mode == "prefix":
            raise ValueError(
                f"sequence_packing='prefix' cannot pack the rows of this run: {reason}. Set sequence_packing='auto', which "
                "keeps padded rows where they are needed, or 'none'."
            )
        if reason is not None and mode == "auto":
            logger.warning("Rows stay padded: %s.", reason)
        self._packs = mode != "none" and reason is None
        self.multiple = BLOCK if compiled or bases[0].device.type != "cpu" else 1
        """The tokens of a packed pass are padded to a multiple of it."""
        self._forwards = {
            id(base): PackedForward(base, kept_head, selects=not adds_virtual_tokens(model), multiple=self.multiple)
            for model, base in zip(models, bases, strict=True)
        }
        if self._packs:
            self._cost, self._longest = Cost(bases[0]), longest_packed(bases[0])
            self._bound = rounding_bound(bases[0], dtype)
        self.state = PackingState()

    # -------------------------------------------------------------------------------------------------- decisions

    @property
    def packs(self) -> bool:
        """True if passes may be packed: the models allow it, and packed rows were found equal to padded ones."""
        return self._packs and self.state.checked and self.state.refused is None

    @property
    def needs_check(self) -> bool:
        """True until packed and padded rows were compared, where passes may be packed at all."""
        return self._packs and not self.state.checked

    def _pays(self, mask: torch.Tensor, trie: Trie) -> bool:
        if self._longest is not None and int(mask.sum(dim=1).max()) > self._longest:
            return False
        return self._mode == "prefix" or self._cost.pays(mask, trie)

    def sharing(self, part: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return an order of episodes in which those that share a prefix are neighbours, if that pays.

        Args:
            part: See :func:`~agile_trainers.train_batch.read_inputs`.

        Returns:
            Order (B,), lengths and shared tokens of :func:`~agile_trainers.packing.trie.shared_prefixes`; None if rows of
            similar length, whose padding is small, cost less.
        """
        if not self.packs:
            return None
        ids, mask, episodes = rows_read(part)
        if self._mode == "auto" and not self._cost.pays_to_share(mask, build_trie(ids, mask)):
            return None
        order, lengths, shared = shared_prefixes(ids, mask, episodes)
        return order.to(ids.device), lengths, shared

    def pays(self, part: Batch, rows: torch.Tensor) -> bool:
        """Return whether a pass of some rows (R,) of a batch is packed, whichever of their tokens it reads."""
        ids, mask, _ = rows_read({name: part[name][rows.to(part[name].device)] for name in READ if name in part})
        # The pass has no columns that are padding in all of its rows.
        columns = mask.any(dim=0)
        return self._pays(mask[:, columns], build_trie(ids, mask))

    def arranged(self, part: Batch) -> torch.Tensor:
        """Return an order (B,) of rows in which those that a pass should read together are neighbours."""
        sharing = self.sharing(part)
        return order_by_length(part) if sharing is None else sharing[0]

    def prepare(self, model: Forward, part: Batch) -> None:
        """Compare packed with padded rows, once, before the first generation batch of any process that pays.

        Every process must call it, with as many rows as the others, where it may run a forward pass of the policy.

        Args:
            model: The policy, wrapped for distributed training.
            part: Rows to compare on, and to estimate by: see :func:`~agile_trainers.train_batch.read_inputs`.

        Raises:
            ValueError: With ``mode="prefix"``, if they differ.
        """
        if not self.needs_check:
            return
        ids, mask, _ = rows_read(part)
        pays = self._pays(mask, build_trie(ids, mask))
        if not self._accelerator.gather(torch.tensor(int(pays), device=ids.device)).any():
            return
        self.state.checked, self.state.refused = True, self._difference(model, part)
        if self.state.refused is None:
            return
        if self._mode == "prefix":
            raise ValueError(
                f"sequence_packing='prefix' does not fit this model: {self.state.refused}. Set sequence_packing='none'."
            )
        logger.warning("Rows stay padded: %s.", self.state.refused)

    def _difference(self, model: Forward, part: Batch) -> str | None:
        """Return how packed rows differ from padded ones, on all processes alike; None if they do not."""
        ids, mask = read_inputs(part).values()
        length, paths = part["completion_ids"].size(1), paths_of(part)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-length] = -100
        if paths is not None:
            labels[:, -length:].masked_fill_(paths.cells < 0, -100)
        error, found = "", []
        for pack in (None, lambda mask, trie: True):
            reading = self._forward(model).reading(model, None, pack=pack, paths=paths)
            try:
                with torch.no_grad(), self._accelerator.autocast():
                    outputs = reading(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
                found.append(outputs.log_probs.float())
            except Exception as problem:
                if pack is None:
                    raise
                error = f"{type(problem).__name__}: {problem}"
                found.append(torch.full_like(found[0], torch.inf))
        there = (labels[:, 1:] != -100).float()
        difference = ((found[0] - found[1]).abs().nan_to_num(nan=torch.inf) * there).sum() / there.sum().clamp(min=1)
        worst = float(self._accelerator.gather(difference).max())
        if worst <= self._bound:
            return None
        return error or (
            f"packed and padded rows differ by {worst:.2g} nats a token, more than rounding explains ({self._bound:.2g})"
        )

    # ----------------------------------------------------------------------------------------------------- passes

    def _forward(self, model: Any) -> PackedForward:
        return self._forwards[id(base_model(self._accelerator.unwrap_model(model, keep_torch_compile=False)))]

    def reading(
        self,
        model: Forward,
        scored: torch.Tensor | None,
        values: ValueReading | None = None,
        paths: Paths | None = None,
        kept: KeptSets | None = None,
    ) -> Forward:
        """Wrap a model for TRL's ``_get_per_token_logps_and_entropies``; see :meth:`PackedForward.reading`."""
        pack = self._pays if self.packs else None
        return self._forward(model).reading(model, scored, pack=pack, values=values, paths=paths, kept=kept)

    def values(self, model: Forward, part: Batch, positions: torch.Tensor) -> torch.Tensor:
        """Read a critic's values (B, U) at positions (B, U); see :meth:`PackedForward.values`."""
        paths = paths_of(part)
        ids, mask = read_inputs(part).values() if paths is None else (paths.ids, paths.mask)
        pack = self._pays if self.packs else None
        return self._forward(model).values(model, ids, mask, positions, pack, paths)
