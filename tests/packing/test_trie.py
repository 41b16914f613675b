"""The trie against its definition: the set of distinct prefixes, and which of them begin which others."""

from __future__ import annotations

import random

import pytest
import torch

from agile_trainers.packing.trie import Segment, build_trie, shared_prefixes


def padded(rows: list[list[int]], width: int, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows somewhere between padding on both sides."""
    ids, mask = torch.full((len(rows), width), 9), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = chance.randint(0, width - len(row))
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = torch.tensor(row), 1
    return ids, mask


@pytest.mark.parametrize("seed", range(40))
def test_nodes_are_the_distinct_prefixes_and_see_their_beginnings(seed):
    chance = random.Random(seed)
    alphabet = chance.randint(1, 3)
    rows = [[chance.randrange(alphabet) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, 7))]
    ids, mask = padded(rows, 12, chance)
    trie = build_trie(ids, mask)
    prefixes = {}
    for i, row in enumerate(rows):
        for k, column in enumerate(mask[i].nonzero()[:, 0]):
            node, prefix = int(trie.nodes[i, column]), tuple(row[: k + 1])
            assert prefixes.setdefault(node, prefix) == prefix
            assert (trie.tokens[node], trie.depths[node]) == (row[k], k)
    assert (trie.nodes[mask == 0] == -1).all()
    assert len(prefixes) == trie.size == len({tuple(row[: k + 1]) for row in rows for k in range(len(row))})
    ends = trie.ends()
    for q, longer in prefixes.items():
        for k, shorter in prefixes.items():
            assert (longer[: len(shorter)] == shorter) == (k <= q < ends[k])
    assert trie.pairs == sum(map(len, prefixes.values()))
    order, lengths, shared = shared_prefixes(ids, mask)
    assert lengths.tolist() == [len(rows[i]) for i in order]
    assert int(lengths.sum() - shared.sum()) == trie.size


def test_segments_by_hand():
    """1 2 3 4, 1 2 5 and 1 2 3 6 7: a trunk of two nodes, then 3 with two branches, and 5."""
    ids = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 2, 5], [1, 2, 3, 6, 7]])
    trie = build_trie(ids, (ids > 0).long())
    assert trie.tokens.tolist() == [1, 2, 3, 4, 6, 7, 5]
    assert trie.segments == (Segment(0, 2, 7), Segment(2, 3, 6), Segment(3, 4, 4), Segment(4, 6, 6), Segment(6, 7, 7))
    assert trie.nodes.tolist() == [[-1, 0, 1, 2, 3], [-1, -1, 0, 1, 6], [0, 1, 2, 4, 5]]
    grown = trie.padded(8)
    assert grown.size == 8 and grown.ends().tolist() == [7, 7, 6, 4, 6, 6, 7, 8]


def test_tokens_that_nothing_depends_on_are_left_out():
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    read = torch.tensor([[False, True, False, False], [False, False, True, False]])
    trie = build_trie(ids, torch.ones_like(ids), read)
    assert trie.tokens.tolist() == [1, 2, 5] and trie.nodes.tolist() == [[0, 1, -1, -1], [0, 1, 2, -1]]
    nothing = build_trie(ids, torch.ones_like(ids), torch.zeros_like(read))
    assert nothing.tokens.tolist() == [1]


def test_a_row_of_padding_is_refused():
    with pytest.raises(ValueError, match="without any token"):
        build_trie(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]]))
