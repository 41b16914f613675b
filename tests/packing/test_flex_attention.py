"""FlexAttention's compilation on a CPU: what is compiled, how often, and what happens at PyTorch's limit.

A backend of our own stands in for inductor, since PyTorch decides before it what is compiled anew. It runs the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_tries import random_trie, visible
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from agile_trainers.packing import attention
from agile_trainers.packing.attention import Plan
from agile_trainers.packing.packer import Cost
from agile_trainers.packing.trie import Trie

FIVE = [(4, 2, 16), (4, 4, 16), (2, 1, 32), (8, 2, 8), (6, 2, 16)]
"""Heads, key heads and head size of five models."""
SIZES = [(2, 30), (4, 60), (8, 90), (10, 90)]
"""Rows and longest row: tries of one to several blocks."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that are compiled."""
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(attention, "_BACKEND", backend)
    attention._compiled.cache_clear()
    yield compiled
    attention._compiled.cache_clear()


def made(trie: Trie, heads: int, key_heads: int, size: int) -> list[torch.Tensor]:
    """Queries, keys and values as transformers lays them out."""
    return [torch.randn(1, trie.size, count, size).transpose(1, 2) for count in (heads, key_heads, key_heads)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trie: Trie) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=visible(trie), scale=0.25, enable_gqa=True)


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Attention with a backward pass on a CPU, which FlexAttention has not."""
    return scaled_dot_product_attention(q, k, v, scale=0.25, enable_gqa=True)


@pytest.mark.slow
def test_five_models_do_not_share_a_limit(graphs: list[Any]) -> None:
    """Each is compiled at most twice, for one block and for several, whatever its nodes."""
    torch.manual_seed(0)
    tries = [random_trie(*size) for size in SIZES]
    assert len({trie.size for trie in tries}) == 4 and tries[0].size <= attention.BLOCK < tries[1].size
    counts = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for shape in FIVE:
            before = len(graphs)
            for trie in tries:
                q, k, v = made(trie, *shape)
                # As `_attend` runs, which is disabled for the compilation of a whole model.
                found = torch.compiler.disable(attention._flex)(q, k, v, Plan(trie).mask, 0.25)
                torch.testing.assert_close(found, dense(q, k, v, trie), rtol=0, atol=2e-6)
            counts.append(len(graphs) - before)
    assert max(counts) <= 2 and attention._compiled.cache_info().currsize == 5


def test_each_pattern_of_gradients_is_compiled_once(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five models. The kernel is replaced."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "flex_attention", kernel)
    tries = [random_trie(*size) for size in SIZES[1:]]
    trained = torch.ones(()).requires_grad_()
    everything = (True, True, True)
    patterns = [
        everything,
        (True, False, False),
        (False, True, True),
        (False, False, False),
        None,
    ]  # None: a scoring pass
    pairs = [(FIVE[0], pattern) for pattern in patterns] + [(shape, everything) for shape in FIVE[1:]]
    with torch._dynamo.config.patch(recompile_limit=1):
        for shape, pattern in pairs:
            for trie in tries:
                with torch.set_grad_enabled(pattern is not None):
                    needed = zip(made(trie, *shape), pattern or everything, strict=True)
                    inputs = [x * trained if needs else x for x, needs in needed]
                    output = attention._flex(*inputs, Plan(trie).mask, 0.25)
                assert output.requires_grad == any(pattern or ())
                assert torch.equal(output, kernel(*inputs))
    assert attention._compiled.cache_info().currsize == len(graphs) == len(pairs)


def test_beyond_the_limit_is_an_error(graphs: list[Any]) -> None:
    """Not full scores of all pairs."""
    torch.manual_seed(0)
    one, several = random_trie(*SIZES[0]), random_trie(*SIZES[2])
    with torch._dynamo.config.patch(recompile_limit=1):
        attention._flex(*made(one, 4, 2, 16), Plan(one).mask, 0.25)
        with pytest.raises(
            RuntimeError, match=r"all pairs.*1 graphs for .*heads=4, key_heads=2.*recompile_limit.*packing"
        ):
            attention._flex(*made(several, 4, 2, 16), Plan(several).mask, 0.25)


def test_without_compilation_is_an_error(graphs: list[Any]) -> None:
    trie = random_trie(*SIZES[0])
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(RuntimeError, match=r"TORCHDYNAMO_DISABLE is set\. Unset"),
    ):
        attention._flex(*made(trie, 4, 2, 16), Plan(trie).mask, 0.25)


def test_a_plans_cost_by_hand() -> None:
    """A GPU waits for the trie and for the mask, which grows with the square of the blocks."""
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    with torch.device("meta"):
        base = Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2))
    cost = Cost(base)
    for rows, length in SIZES:
        trie = random_trie(rows, length)
        blocks = -(-trie.size // 128)
        token = 2 * (4 * 8 * 8 + 3 * 8 * 8)
        plan = 2e11 + trie.size * 1e7 + blocks**2 * 1.5e6
        assert cost.packed(trie) == pytest.approx(plan + trie.size * token + trie.pairs * 4 * 8 * 1.5, rel=1e-12)
