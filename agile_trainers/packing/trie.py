"""Plans a packed forward pass: the rows of a batch become a trie of distinct prefixes, laid out as one row of tokens.

A node is a token after a certain prefix. Nodes are numbered in depth-first order, so that the descendants of a node are the
nodes from it up to ``end``; a node sees exactly its ancestors and itself: node q sees node k if ``k <= q < end[k]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class Segment:
    """A path of the trie without branches: nodes ``start`` to ``stop``, whose further descendants end before ``end``."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class Trie:
    """The distinct prefixes of some rows. N is the number of nodes, B and S are rows and columns of the padded batch."""

    tokens: torch.Tensor
    """(N,) int64, the token of each node."""
    depths: torch.Tensor
    """(N,) int64, the position of each node in its rows."""
    nodes: torch.Tensor
    """(B, S) int64, the node of each token; -1 for padding and for tokens that need not be read."""
    segments: tuple[Segment, ...]
    """All nodes, in order."""

    @property
    def size(self) -> int:
        """Number of nodes."""
        return self.tokens.numel()

    @property
    def pairs(self) -> int:
        """Number of pairs of a node and a node that it sees, which attention computes."""
        own = sum((s.stop - s.start) * (s.stop - s.start + 1) // 2 for s in self.segments)
        return own + sum((s.stop - s.start) * (s.end - s.stop) for s in self.segments)

    def padded(self, multiple: int) -> Trie:
        """Return the trie with nodes of no row at the end, so that its size is a multiple of ``multiple``."""
        size, extra = self.size, -self.size % multiple
        if not extra:
            return self
        zeros = self.tokens.new_zeros(extra)
        own = Segment(size, size + extra, size + extra)
        return Trie(torch.cat([self.tokens, zeros]), torch.cat([self.depths, zeros]), self.nodes, (*self.segments, own))

    def ends(self) -> np.ndarray:
        """Return for each node (N,) int64 the number of the first node after it that is no descendant."""
        return np.repeat([s.end for s in self.segments], [s.stop - s.start for s in self.segments]).astype(np.int64)


def _rows(ids: torch.Tensor, mask: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens of each row without padding, and their columns."""
    array, there = ids.cpu().numpy(), mask.cpu().numpy().astype(bool)
    columns = [np.flatnonzero(row) for row in there]
    return [row[where] for row, where in zip(array, columns, strict=True)], columns


def _sorted(rows: list[np.ndarray]) -> list[int]:
    """Return the order in which rows that share a prefix are neighbours."""
    if len(rows) == 1:
        return [0]  # most episodes are one row, whose bytes nothing compares
    # Unsigned and big-endian, bytes compare as their numbers do.
    keys = [row.astype(">u8").tobytes() for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def shared_prefixes(
    ids: torch.Tensor, mask: torch.Tensor, episodes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order episodes so that those that share a prefix are neighbours, and measure what they share.

    The episodes ``order[i:j]`` have at most ``lengths[i:j].sum() - shared[i + 1 : j].sum()`` distinct tokens, and exactly as
    many if each has one row.

    Args:
        ids: (Q, S) int64.
        mask: (Q, S), 1 on tokens, 0 on padding.
        episodes: (Q,) int64, the episode of each row, ascending from 0. Default: each row is an episode.

    Returns:
        ``order`` (B,) int64; and in this order ``lengths`` (B,), distinct tokens of each episode, and ``shared`` (B,), the
        number that the episode before has too, 0 for the first.
    """
    rows, _ = _rows(ids, mask)
    own = [[row] for row in rows]
    if episodes is not None:
        numbers = episodes.tolist()
        own = [[] for _ in range(numbers[-1] + 1)]
        for row, episode in zip(rows, numbers, strict=True):
            own[episode].append(row)
    # By their first rows.
    order = _sorted([them[_sorted(them)[0]] for them in own])
    lengths = [_distinct(own[i]) for i in order]
    together = [_distinct(own[a] + own[b]) for a, b in pairwise(order)]
    shared = [0] + [a + b - both for (a, b), both in zip(pairwise(lengths), together, strict=True)]
    return torch.tensor(order), torch.tensor(lengths), torch.tensor(shared[: len(order)])


def _distinct(rows: list[np.ndarray]) -> int:
    """Return the number of distinct prefixes of some rows."""
    order = _sorted(rows)
    return sum(map(len, rows)) - sum(_common(rows[a], rows[b]) for a, b in pairwise(order))


def build_trie(ids: torch.Tensor, mask: torch.Tensor, read: torch.Tensor | None = None) -> Trie:
    """Build the trie of some rows.

    Args:
        ids: (B, S) int64, with padding anywhere.
        mask: (B, S), 1 on tokens, 0 on padding.
        read: (B, S) bool, the tokens at which a hidden state is read. Tokens that none of these depends on are left out.
            Default: all.

    Returns:
        The trie, on the device of ``ids``. It has at least one node, also if nothing is read.

    Raises:
        ValueError: For a row without any token.
    """
    rows, columns = _rows(ids, mask)
    if not all(len(row) for row in rows):
        raise ValueError("A row without any token cannot be packed: its mask is 0 everywhere.")
    if read is not None:
        wanted = read.cpu().numpy().astype(bool)
        kept = [int(np.flatnonzero([True, *wanted[i, where]])[-1]) for i, where in enumerate(columns)]
        kept[0] = kept[0] if any(kept) else 1
        rows = [row[:length] for row, length in zip(rows, kept, strict=True)]
        columns = [where[:length] for where, length in zip(columns, kept, strict=True)]
    nodes = np.full(tuple(ids.shape), -1, dtype=np.int64)
    tokens: list[np.ndarray] = []
    depths: list[np.ndarray] = []
    path = np.empty(0, dtype=np.int64)  # nodes of the row before
    row_before = path
    size, open_segments, cuts = 0, list[list[int]](), list[list[int]]()
    for i in _sorted(rows):
        row, common = rows[i], _common(row_before, rows[i])
        own = np.arange(size, size + len(row) - common)
        path, row_before = np.concatenate([path[:common], own]), row
        nodes[i, columns[i]] = path
        tokens.append(row[common:])
        depths.append(np.arange(common, len(row)))
        if len(own):
            _branch(open_segments, cuts, common, size)
            open_segments.append([size, size + len(own), len(row)])
            size += len(own)
    _branch(open_segments, cuts, 0, size)
    device = ids.device
    return Trie(
        torch.from_numpy(np.concatenate(tokens)).to(device),
        torch.from_numpy(np.concatenate(depths)).to(device),
        torch.from_numpy(nodes).to(device),
        tuple(Segment(*cut) for cut in sorted(cuts)),
    )


def _branch(open_segments: list[list[int]], cuts: list[list[int]], depth: int, size: int) -> None:
    """Close the segments of the current path below ``depth``, and cut the one that reaches over it.

    Args:
        open_segments: The current path from the root, as (first node, node after the last, depth after the last).
        cuts: Receives the closed segments.
        depth: The depth at which the next row branches off.
        size: Number of nodes so far.
    """
    while open_segments and open_segments[-1][2] > depth:
        start, stop, bottom = open_segments.pop()
        kept = stop - start - (bottom - depth)  # nodes of it that stay on the path
        cuts.append([start + max(kept, 0), stop, size])
        if kept > 0:
            open_segments.append([start, start + kept, depth])
            break
