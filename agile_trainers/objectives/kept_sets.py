"""Represents the tokens that a filter kept when a token was sampled, and renormalises log-probabilities over them.

``top_k``, ``top_p``, ``min_p`` and a minimum of tokens sample from a truncated policy: for a token a of the kept set S,
log pi_S(a) = log pi(a) - log pi(S). The set is that of the policy that sampled, and a constant for the gradient.

A set is bytes, the words of an array of int32: a form, and then the ids of the tokens that were kept, or of those that were
removed, or a bit for each token of the vocabulary, whichever is shortest. The set of all tokens is empty bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_IDS, _REMOVED, _BITS = range(3)
_WIDTH = 32
"""Bits of a word."""


def encode_sets(kept: torch.Tensor) -> list[bytes]:
    """Encode the kept set of each row.

    Args:
        kept: (R, V) bool, True on tokens that were kept.

    Returns:
        R sets.
    """
    return sets_of_bits(as_bits(kept).cpu().numpy(), kept.size(1))


def as_bits(kept: torch.Tensor) -> torch.Tensor:
    """Return (R, W) int32, a bit for each token, on the device: what it takes to read R sets in one copy."""
    words = _words_of(kept.size(1))
    padded = torch.nn.functional.pad(kept, (0, words * _WIDTH - kept.size(1)))
    place = torch.arange(_WIDTH, dtype=torch.int32, device=kept.device)
    return (padded.view(len(kept), words, _WIDTH).int() << place).sum(dim=-1, dtype=torch.int32)


def sets_of_bits(bits: np.ndarray, vocab: int) -> list[bytes]:
    """Encode sets from what :func:`as_bits` returned."""
    sets = list[bytes]()
    for words in bits.astype("<i4", copy=False):
        kept = np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little").view(bool)
        count = int(kept.sum())
        if count == vocab:
            sets.append(b"")
        elif min(count, vocab - count) >= len(words):
            sets.append(_encoded(_BITS, words))
        elif count <= vocab - count:
            sets.append(_encoded(_IDS, kept.nonzero()[0]))
        else:
            sets.append(without((~kept).nonzero()[0]))
    return sets


def _words_of(vocab: int) -> int:
    """Return the words of a bit for each token."""
    return -(-vocab // _WIDTH)


def _encoded(form: int, words: np.ndarray) -> bytes:
    return np.concatenate([[form], words]).astype("<i4").tobytes()


def without(ids: Sequence[int] | np.ndarray) -> bytes:
    """Encode the set of all tokens but some."""
    return _encoded(_REMOVED, np.asarray(ids))


def pad_sets(rows: Sequence[Sequence[bytes]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange the sets of B rows of tokens as tensors.

    Args:
        rows: The sets of each row's tokens, from its first one on.
        length: T.

    Returns:
        (B, W) int32, the words of each row's sets, one after another; and (B, T) int32, the number of words of each.
    """
    sizes = torch.zeros(len(rows), length, dtype=torch.int32)
    joined = [np.frombuffer(b"".join(sets), dtype="<i4") for sets in rows]
    words = torch.zeros(len(rows), max(map(len, joined)), dtype=torch.int32)
    for row, (sets, own) in enumerate(zip(rows, joined, strict=True)):
        sizes[row, : len(sets)] = torch.tensor([len(one) // 4 for one in sets], dtype=torch.int32)
        words[row, : len(own)] = torch.from_numpy(own.copy())
    return words, sizes


class KeptSets(NamedTuple):
    """The kept sets of some tokens."""

    words: torch.Tensor
    """(N,) int32, those of all sets, and maybe of others."""
    starts: torch.Tensor
    """(R,) int64, the first word of each set."""
    sizes: torch.Tensor
    """(R,) int64, the number of its words; 0 for the set of all tokens."""

    @classmethod
    def of(cls, words: torch.Tensor, sizes: torch.Tensor) -> KeptSets:
        """Return the sets that :func:`pad_sets` arranged, those of one row after those of another."""
        first = torch.arange(len(words), device=words.device)[:, None] * words.size(1)
        sizes = sizes.long()
        return cls(words.flatten(), (sizes.cumsum(dim=1) - sizes + first).flatten(), sizes.flatten())

    def at(self, places: torch.Tensor | slice) -> KeptSets:
        """Select sets."""
        return KeptSets(self.words, self.starts[places], self.sizes[places])

    def ids(self, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (R, S) int64, the ids of the tokens that were kept, and (R, S) bool, where there are any.

        None unless each set is stored as its ids, which are ``most`` at most.
        """
        if not len(self.sizes) or int(self.sizes.min()) < 2 or not 1 < int(self.sizes.max()) <= most + 1:
            return None
        if (self.words[self.starts] != _IDS).any():
            return None
        place = torch.arange(int(self.sizes.max()) - 1, device=self.words.device)
        there = place < self.sizes[:, None] - 1
        return self.words[torch.where(there, self.starts[:, None] + 1 + place, 0)].long(), there

    def mask(self, vocab: int) -> torch.Tensor:
        """Return (R, V) bool, True on tokens that were kept."""
        device, count = self.words.device, len(self.sizes)
        if not len(self.words):
            return torch.ones(count, vocab, dtype=torch.bool, device=device)
        heads = self.words[self.starts.clamp(max=len(self.words) - 1)]
        form = torch.where(self.sizes > 0, heads, _REMOVED)
        listed = torch.where(form == _BITS, 0, self.sizes - 1).clamp(min=0)
        row = torch.arange(count, device=device).repeat_interleave(listed)
        place = torch.arange(len(row), device=device) - (listed.cumsum(0) - listed)[row]
        mask = (form == _REMOVED)[:, None].repeat(1, vocab)
        mask[row, self.words[self.starts[row] + 1 + place].long()] = (form == _IDS)[row]
        dense = (form == _BITS).nonzero()[:, 0]
        words = self.words[self.starts[dense][:, None] + 1 + torch.arange(_words_of(vocab), device=device)]
        bits = words[..., None] >> torch.arange(_WIDTH, dtype=torch.int32, device=device) & 1
        mask[dense] = bits.flatten(1)[:, :vocab].bool()
        return mask


def truncated_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities and entropies under the policy that is renormalised over the kept tokens.

    Args:
        logits: (R, V), at the temperature that was sampled at.
        tokens: (R,) int64, of the kept ones.
        kept: (R, V) bool. None: all.

    Returns:
        (R,) each, in nats.
    """
    removed = torch.zeros_like(logits, dtype=torch.bool) if kept is None else ~kept
    log_probs = logits.masked_fill(removed, -torch.inf).log_softmax(dim=-1)
    entropies = -(log_probs.exp() * log_probs.masked_fill(removed, 0.0)).sum(dim=-1)
    return log_probs.gather(-1, tokens[:, None])[:, 0], entropies
