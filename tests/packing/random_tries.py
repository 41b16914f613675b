"""Tries of random rows, and which nodes of a trie see each other."""

from __future__ import annotations

import torch

from agile_trainers.packing.trie import Trie, build_trie


def random_trie(rows: int, length: int) -> Trie:
    ids = torch.cat([torch.zeros(rows, 3, dtype=torch.long), torch.randint(0, 2, (rows, length))], 1)
    return build_trie(ids, torch.ones_like(ids))


def visible(trie: Trie) -> torch.Tensor:
    """(N, N) bool, query by key, straight from the definition."""
    ends, n = torch.from_numpy(trie.ends()), torch.arange(trie.size)
    return (n[None] <= n[:, None]) & (n[:, None] < ends[None])
