"""Attention over a trie against one that knows every pair of nodes."""

from __future__ import annotations

import pytest
import torch
from random_tries import random_trie, visible
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from agile_trainers.packing.attention import Plan, trie_attention
from agile_trainers.packing.trie import Trie


def inputs(trie: Trie, heads: int, key_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Laid out as transformers does: (1, N, heads, D), transposed."""
    shapes = [(1, trie.size, count, 16) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("heads", "key_heads", "values"), [(4, 4, 16), (4, 2, 16), (6, 1, 16), (4, 2, 8), (4, 4, 24)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_output_and_gradients_equal_those_of_a_full_mask(heads, key_heads, values, dtype, error):
    """Heads of values may be smaller or larger than those of queries and keys. Sums have the precision of the input."""
    torch.manual_seed(0)
    trie = random_trie(6, 9)
    assert max(s.end - s.stop for s in trie.segments) > 0 and len(trie.segments) > 6
    q, k, _ = inputs(trie, heads, key_heads, dtype)
    v = torch.randn(1, key_heads, trie.size, values, dtype=dtype).requires_grad_()
    weights = torch.randn(1, heads, trie.size, values, dtype=dtype)
    found = trie_attention(q, k, v, trie, 0.3)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=visible(trie), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=error / 5)
    gradients = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=error)


def test_half_precision_accumulates_in_full():
    torch.manual_seed(0)
    trie = random_trie(8, 12)
    q, k, v = inputs(trie, 4, 2, torch.bfloat16)
    exact = trie_attention(q.float(), k.float(), v.float(), trie, 0.25)
    assert (trie_attention(q, k, v, trie, 0.25) - exact).abs().max() < 2 * torch.finfo(torch.bfloat16).eps


def test_the_backward_pass_keeps_nothing_per_block():
    """Queries, keys, values, output and one number per head and node: no mask, no copy of a key."""
    trie = random_trie(6, 9)
    q, k, v = inputs(trie, 4, 2, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        trie_attention(q, k, v, trie, 0.25)
    assert sum(kept) == q.numel() + k.numel() + v.numel() + q.numel() + 4 * trie.size


@pytest.mark.parametrize(("rows", "length"), [(3, 60), (12, 90), (1, 300)])
def test_flex_attentions_mask_is_that_of_every_pair(rows, length):
    """The GPU's mask, made from the ends of blocks, against the dense one; then run without compilation."""
    torch.manual_seed(1)
    trie = random_trie(rows, length)
    mask = Plan(trie).mask
    blocks = -(-trie.size // 128)
    dense = torch.zeros(blocks * 128, blocks * 128, dtype=torch.bool)
    dense[: trie.size, : trie.size] = visible(trie)
    needed = dense.view(blocks, 128, blocks, 128).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), needed)
    of_keys = dense.new_zeros(blocks, blocks)  # by key, for the backward pass
    for counts, listed in ((mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices)):
        for key in range(blocks):
            queries = listed[0, 0, key, : counts[0, 0, key]].long()
            assert not of_keys[key, queries].any()
            of_keys[key, queries] = True
    assert torch.equal(of_keys, needed.T)
    q, k, v = (x.detach() for x in inputs(trie, 4, 2, torch.float32))
    found = flex_attention(q, k, v, block_mask=mask, scale=0.25, enable_gqa=True)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=visible(trie), scale=0.25, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
