"""Lays the paths of episodes out as the rows that a model reads.

A row of the loss is an episode, and a row of the model is a path. Most episodes are one path, their prompt and completion;
then the rows are the same, and nothing of this file is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Paths:
    """The Q paths of B episodes, as rows of S columns.

    A *cell* is an index into the flattened rows, ``row * S + column``.
    """

    ids: torch.Tensor
    """(Q, S) int64, right-padded."""
    mask: torch.Tensor
    """(Q, S) int64, 1 on tokens."""
    episodes: torch.Tensor
    """(Q,) int64, the episode of each row, ascending."""
    cells: torch.Tensor
    """(B, T) int64, cell of each action token; -1 elsewhere."""
    flat: torch.Tensor
    """(B, F) int64, cell of each token of ``path_ids``; 0 where there is none, or its path is left out."""
    there: torch.Tensor
    """(B, F) bool, True on tokens of ``path_ids`` that are in the rows."""

    @classmethod
    def of(cls, path_ids: torch.Tensor, path_lengths: torch.Tensor, places: torch.Tensor) -> Paths:
        """Lay out the paths that hold action tokens.

        Args:
            path_ids: (B, F) int64, the paths of each episode, one after another.
            path_lengths: (B, M) int64.
            places: (B, T) int64, column in ``path_ids`` of each action token, -1 elsewhere. Paths without any are left out;
                an episode without any keeps its first.
        """
        ends = path_lengths.cumsum(dim=1)
        columns = torch.arange(path_ids.size(1), device=path_ids.device).expand_as(path_ids).contiguous()
        path = torch.searchsorted(ends, columns, right=True).clamp(max=path_lengths.size(1) - 1)
        there = columns < ends[:, -1:]
        column = columns - (ends - path_lengths).gather(1, path)
        sampled = (places >= 0).long()
        used = torch.zeros_like(path_lengths).scatter_add(1, path.gather(1, places.clamp(min=0)), sampled)
        used[:, 0] += used.sum(dim=1) == 0
        episodes, chosen = used.nonzero(as_tuple=True)
        row = torch.full_like(path_lengths, -1)
        row[episodes, chosen] = torch.arange(len(episodes), device=row.device)
        lengths = path_lengths[episodes, chosen]
        width = int(lengths.max())
        row = row.gather(1, path)
        kept = there & (row >= 0)
        flat = torch.where(kept, row * width + column, 0)
        ids = path_ids.new_zeros(len(episodes) * width)
        ids[flat[kept]] = path_ids[kept]
        mask = (torch.arange(width, device=row.device) < lengths[:, None]).long()
        cells = torch.where(places >= 0, flat.gather(1, places.clamp(min=0)), -1)
        return cls(ids.view(-1, width), mask, episodes, cells, flat, kept)

    def at(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the cells (B, U) of columns (B, U) of ``path_ids``; any cell for a column that is not in the rows."""
        return self.flat.gather(1, self._inside(columns))

    def has(self, columns: torch.Tensor) -> torch.Tensor:
        """Return (B, U) bool, True for columns (B, U) of ``path_ids`` that are in the rows."""
        return self.there.gather(1, self._inside(columns))

    def _inside(self, columns: torch.Tensor) -> torch.Tensor:
        return columns.clamp(0, self.flat.size(1) - 1)
