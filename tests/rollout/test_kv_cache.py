"""Growing buffers and packing, against concatenation and indexing."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicLayer

from agile_trainers.rollout.generators.transformers.kv_cache import GrowingLayer, KVBatch, pack

HEADS, DIM = 2, 3


def test_growing_layer_equals_dynamic_layer() -> None:
    torch.manual_seed(0)
    growing, dynamic = GrowingLayer(), DynamicLayer()
    for width in (5, *[1] * 90, 40, 1, 200, 1):
        keys, values = torch.randn(2, 3, HEADS, width, DIM)
        for ours, theirs in zip(growing.update(keys, values), dynamic.update(keys, values)):
            assert torch.equal(ours, theirs)
        assert growing.get_seq_length() == dynamic.get_seq_length()
        assert growing.get_mask_sizes(7) == dynamic.get_mask_sizes(7)


def test_growing_layer_writes_in_place() -> None:
    layer = GrowingLayer()
    states = torch.randn(1, HEADS, 1, DIM)
    before = layer.update(states, states)[0].data_ptr()
    for _ in range(60):
        assert layer.update(states, states)[0].data_ptr() == before


def batch(mask: list[str], first: int) -> KVBatch:
    """Two layers. Key (row, column) is ``first + 100 * row + column``, plus 0.5 in layer 1; the value minus it."""
    rows, columns = len(mask), len(mask[0])
    number = first + 100.0 * torch.arange(rows)[:, None] + torch.arange(columns)
    cache = Cache(layer_class_to_replicate=GrowingLayer)
    for layer in range(2):
        keys = (number + layer / 2)[:, None, :, None].expand(rows, HEADS, columns, DIM)
        cache.update(keys, -keys, layer)
    return KVBatch(cache, torch.tensor([[mark == "#" for mark in row] for row in mask]))


def test_pack_keeps_tokens_in_order_and_leaves_no_holes() -> None:
    left = batch([".##.#", "#...."], 1000)
    right = batch(["##.", "..#", "###"], 2000)
    packed = pack([(left, [1, 0]), (right, [2])], [1, 3, 3, 0], room=4)
    assert packed.mask.tolist() == [
        [False, False, True],
        [True, True, True],
        [True, True, True],
        [False, False, False],
    ]
    expected = [[1100], [1001, 1002, 1004], [2200, 2201, 2202], []]
    for layer, states in enumerate(packed.cache.layers):
        assert states.get_seq_length() == 3
        capacity = states.keys.shape[2]
        for row, numbers in enumerate(expected):
            for head in range(HEADS):
                kept = states.keys[row, head, :3][packed.mask[row]]
                assert kept.tolist() == [[number + layer / 2] * DIM for number in numbers]
                assert torch.equal(states.values[row, head, :3][packed.mask[row]], -kept)
        assert states.keys[:, :, :3].isfinite().all()
        states.update(torch.zeros(4, HEADS, 4, DIM), torch.zeros(4, HEADS, 4, DIM))
        assert states.keys.shape[2] == capacity  # the room asked for was there


def test_pack_does_not_touch_its_sources() -> None:
    source = batch(["##", ".#"], 0)
    packed = pack([(source, [0])], [2])
    packed.cache.layers[0].keys.zero_()
    assert source.cache.layers[0].keys[0, 0, 1, 0] == 1
