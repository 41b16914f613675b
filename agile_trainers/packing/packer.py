"""Decides which forward passes are packed, and checks once that packed and padded rows agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.utils import logging

from agile_trainers.adapters.roles import base_model
from agile_trainers.objectives.kept_sets import KeptSets
from agile_trainers.packing.attention import BLOCK
from agile_trainers.packing.forward import BatchImages, Forward, Pack, PackedForward, Taught, ValueReading
from agile_trainers.packing.kept_head import KeptHead, Teaching
from agile_trainers.packing.trie import Trie, build_trie, shared_prefixes
from agile_trainers.rollout.generators.architecture import same_up_to, takes_position_ids
from agile_trainers.train_batch import READ, Batch, order_by_length, paths_of, read_inputs, rows_read

logger = logging.get_logger(__name__)


def _images_of(part: Batch) -> BatchImages | None:
    """Return the images of a micro-batch in TRL's form; None without any."""
    return BatchImages(part["image_features"], part["image_places"]) if "image_places" in part else None


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
        self._mode, self._accelerator, self._head = mode, accelerator, kept_head
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

    @property
    def _pack(self) -> Pack | None:
        return self._pays if self.packs else None

    def _base(self, model: Any) -> PreTrainedModel:
        return base_model(self._accelerator.unwrap_model(model, keep_torch_compile=False))

    def _forward(self, model: Any) -> PackedForward:
        return self._forwards[id(self._base(model))]

    def reading(
        self,
        model: Forward,
        scored: torch.Tensor | None,
        part: Batch | None = None,
        values: ValueReading | None = None,
        taught: Taught | None = None,
    ) -> Forward:
        """Wrap a model for TRL's ``_get_per_token_logps_and_entropies``; see :meth:`PackedForward.reading`.

        Args:
            model: The model, wrapped for distributed training.
            scored: (B, T) bool, the completion tokens whose log-probability is asked for. None: all.
            part: The micro-batch in TRL's form, for its paths, kept sets and images. Default: it has none.
            values: Values to read in the same pass.
            taught: A teacher to compare with in the same pass.
        """
        part = part or {}
        return self._forward(model).reading(
            model,
            scored,
            pack=self._pack,
            values=values,
            paths=paths_of(part),
            kept=KeptSets.of(part["kept_words"], part["kept_sizes"]) if "kept_sizes" in part else None,
            images=_images_of(part),
            taught=taught,
        )

    def teaching(self, model: Forward, part: Batch, scored: torch.Tensor, *, forward: bool) -> Teaching:
        """Read a teacher's hidden states before the tokens ``scored`` (B, T), without gradient.

        Args:
            model: The teacher, wrapped for distributed training.
            part: The micro-batch in TRL's form, with hints.
            scored: (B, T) bool.
            forward: See :class:`~agile_trainers.packing.kept_head.Teaching`.
        """
        base, heard = self._base(model), list[torch.Tensor]()
        labels = read_inputs(part)["input_ids"].clone()
        labels[:, : -scored.size(1)] = -100
        reading = self._forwards[id(base)].reading(model, scored, pack=self._pack, paths=paths_of(part))
        with torch.no_grad():
            reading(**read_inputs(part), labels=labels, fused_lm_head=True, heard=heard.append)
        return Teaching(heard[0], torch.no_grad()(partial(self._head.logits, base)), forward)

    def values(self, model: Forward, part: Batch, positions: torch.Tensor) -> torch.Tensor:
        """Read a critic's values (B, U) at positions (B, U); see :meth:`PackedForward.values`."""
        paths = paths_of(part)
        ids, mask = read_inputs(part).values() if paths is None else (paths.ids, paths.mask)
        return self._forward(model).values(model, ids, mask, positions, self._pack, paths, _images_of(part))


MARGIN = 0.95
"""Share of the padded rows' cost that packed rows may have."""


@dataclass(frozen=True)
class _Device:
    """Cost of packing on a kind of device, in floating-point operations of its matrix products."""

    plan: float
    """The cost of planning a pass of any size."""
    node: float
    """The cost of planning a node."""
    mask: float
    """The cost of a pair of blocks of nodes in the mask."""
    block: float
    """The cost of a block of attention in a layer."""
    pair: float
    """Factor of a pair of nodes in packed attention."""


_DEVICES = {
    "cpu": _Device(plan=2e7, node=0.0, mask=0.0, block=1.5e6, pair=1.2),
    "cuda": _Device(plan=2e11, node=1e7, mask=1.5e6, block=0.0, pair=1.5),
}
"""On a CPU about 1 ms of planning, and 60 microseconds a block on a core.

A GPU, whose kernel is FlexAttention's, waits while a core plans, and could do 1e14 operations a second. It takes 2 ms, and
as measured 0.1 microseconds a node and 15 nanoseconds a pair of blocks: 20 ms for 96k nodes, 56 ms for 195k.
"""


class Cost:
    """Compares passes by the operations of matrix products and attention. It depends on shapes only, never on time.

    Args:
        base: The model below the adapters.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        config = base.config.get_text_config()
        embedded = {id(m.weight) for m in (base.get_input_embeddings(), base.get_output_embeddings()) if m is not None}
        sizes = (getattr(p, "ds_numel", p.numel()) for p in base.parameters() if p.ndim > 1 and id(p) not in embedded)
        self._token = 2.0 * sum(sizes)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = config.num_hidden_layers
        self._pair = 4.0 * config.num_attention_heads * head * self._layers
        self._device = _DEVICES["cpu" if base.device.type == "cpu" else "cuda"]

    def padded(self, rows: int, columns: int) -> float:
        """Return the operations of a padded forward pass."""
        return rows * columns * (self._token + columns * self._pair)

    def packed(self, trie: Trie) -> float:
        """Return the operations of a packed forward pass, with what its plan and its blocks of attention cost."""
        device, blocks = self._device, sum(1 + (s.end > s.stop) for s in trie.segments)
        attention = trie.pairs * self._pair * device.pair + blocks * self._layers * device.block
        plan = device.plan + trie.size * device.node + math.ceil(trie.size / BLOCK) ** 2 * device.mask
        return trie.size * self._token + attention + plan

    def pays(self, mask: torch.Tensor, trie: Trie) -> bool:
        """Return whether packing rows with an attention mask (B, S) pays."""
        return self.packed(trie) < MARGIN * self.padded(*mask.shape)

    def pays_to_share(self, mask: torch.Tensor, trie: Trie) -> bool:
        """Return whether a trie costs less than its rows one by one, without any padding."""
        return self.packed(trie) < MARGIN * sum(self.padded(1, length) for length in mask.sum(dim=1).tolist())


def rounding_bound(base: PreTrainedModel, dtype: torch.dtype) -> float:
    """Return the largest mean difference of log-probabilities, in nats a token, that rounding explains.

    In fp32 it is 1e-3, a thousand times what is observed. In half precision each of the 2 L additions to the residual stream
    of L layers rounds by up to u of its value (u = 2^-8 for bf16, 2^-11 for fp16). If the errors are independent, the logits
    of two arrangements of the same sums differ by u sqrt(2 (2 L + 1)) of their spread, which is taken as 4 nats.

    Args:
        base: The model below the adapters.
        dtype: In which its layers compute.
    """
    if dtype == torch.float32:
        return 1e-3
    layers = base.config.get_text_config().num_hidden_layers
    return 1e-3 + 4.0 * torch.finfo(dtype).eps / 2 * math.sqrt(2 * (2 * layers + 1))


_FULL = {"full_attention", "attention"}
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Types of layers that equal full attention on rows that fit the option of the configuration."""


def why_padded(model: torch.nn.Module, base: PreTrainedModel) -> str | None:
    """Return why the rows of a model must stay padded; None if they can be packed.

    Args:
        model: The policy or the reference, with adapters.
        base: The model below the adapters.
    """
    config, name = base.config.get_text_config(), type(base).__name__
    others = set(getattr(config, "layer_types", None) or ()) - _FULL - _WINDOWS.keys()
    checks = {
        f"{name} has layers of type {', '.join(sorted(others))}": bool(others),
        f"{name} is recurrent": base._is_stateful or hasattr(config, "ssm_cfg"),
        f"{name} counts positions itself": not takes_position_ids(base),
        f"{name} has attention sinks": any(n.rpartition(".")[2] == "sinks" for n, _ in base.named_parameters()),
        f"{name} caps attention scores": getattr(config, "attn_logit_softcapping", None) is not None,
        f"{name} attends to later tokens": not getattr(config, "is_causal", True) or base.config.is_encoder_decoder,
        f"{name} reads images or sound": config is not base.config,
        f"{name} does not take an attention function": not base._supports_attention_backend,
        "the adapter adds virtual tokens": _prompts(model),
        f"the device is {base.device.type}": base.device.type not in ("cpu", "cuda", "meta"),
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def adds_virtual_tokens(model: torch.nn.Module) -> bool:
    """Return whether an adapter adds tokens in front of the input, so that columns of tokens and hidden states differ."""
    return isinstance(model, PeftModel) and any(c.is_prompt_learning for c in model.peft_config.values())


def _prompts(model: torch.nn.Module) -> bool:
    adapters = model.peft_config.values() if isinstance(model, PeftModel) else ()
    return any(c.is_prompt_learning or getattr(c, "is_adaption_prompt", False) for c in adapters)


def longest_packed(base: PreTrainedModel) -> int | None:
    """Return the tokens of the longest row on which the model attends fully; None: any.

    Longer rows stay padded: those beyond a window, and those with which a rotary embedding changes for all rows of the pass.
    """
    config = base.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or _WINDOWS)
    windows = [getattr(config, option, None) for kind, option in _WINDOWS.items() if kind in types]
    if hasattr(config, "use_sliding_window") and not config.use_sliding_window:
        windows = []
    return min((n for n in (*windows, same_up_to(config)) if n is not None), default=None)
