"""FlexAttention of packed rows beside a dense mask: forward, backward, memory, and many models in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shapes import Attention, branching, dense, make_model, visible, with_adapter

from agile_trainers.packing.attention import Plan

pytestmark = pytest.mark.gpu


def _inputs(machine: Any, heads: int, key_heads: int, nodes: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Laid out as transformers does: (1, N, heads, D), transposed."""
    torch.manual_seed(0)
    shapes = [(1, nodes, count, size) for count in (heads, key_heads, key_heads)]
    made = [torch.randn(shape, device=machine.device, dtype=dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in made]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("size", "heads", "key_heads"), [(64, 14, 2), (64, 4, 4), (128, 28, 4), (256, 8, 4)], ids=lambda x: str(x)
)
def test_output_and_gradients_equal_those_of_a_dense_mask(machine, figures, size, heads, key_heads, dtype):
    """On 128 nodes and on 1,000, which are no multiple of a block."""
    attention, allowed = Attention(machine.device), {torch.bfloat16: 2e-2, torch.float32: 2e-3}[dtype]
    for nodes in (128, machine.pick(1000, 200)):
        trie = branching(nodes, machine.device)
        q, k, v = _inputs(machine, heads, key_heads, nodes, size, dtype)
        weights = torch.randn(1, heads, nodes, size, device=machine.device)
        found = attention(q, k, v, Plan(trie))
        expected = dense(q, k, v, visible(trie, torch.arange(nodes, device=machine.device)))
        ours = [found, *torch.autograd.grad((found.float() * weights).sum(), (q, k, v))]
        theirs = [expected, *torch.autograd.grad((expected * weights).sum(), (q, k, v))]
        for name, a, b in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
            error = float((a.float() - b.float()).norm() / b.float().norm())
            figures[f"{name} {nodes}"] = error
            assert error < allowed, name


@pytest.mark.parametrize("size", [64, 128])
def test_memory_of_many_nodes_grows_with_the_nodes_alone(machine, figures, size):
    """Full scores of 16k nodes would take 0.5 GiB a head; output, log-sum-exp and gradients take a few rows a node."""
    nodes, heads, key_heads = machine.pick(16384, 512), 8, 2
    trie = branching(nodes, machine.device)
    q, k, v = _inputs(machine, heads, key_heads, nodes, size, torch.bfloat16)
    attention, plan = Attention(machine.device), Plan(trie)
    attention(q, k, v, plan).sum().backward()  # compiles
    before = machine.peak() and torch.cuda.memory_allocated()
    if machine.peak():
        torch.cuda.reset_peak_memory_stats()
    found = attention(q, k, v, plan)
    found.sum().backward()
    own = sum(x.numel() * x.element_size() for x in (q, k, v, found))
    figures["GiB"], figures["GiB of q, k, v and output"] = (machine.peak() - before) / 2**30, own / 2**30
    assert machine.peak() - before < 6 * own
    some = torch.linspace(0, nodes - 1, 64, device=machine.device).long()
    expected = dense(q[:, :, some], k, v, visible(trie, some))
    torch.testing.assert_close(found[:, :, some].float(), expected, rtol=0, atol=2e-2)


def test_five_models_in_one_process_keep_their_compiled_attention(machine, figures):
    """Each with its own heads, LoRA and checkpoints: packed rows give the log-probabilities and gradients of padded ones,
    and no pass falls back to full scores, whose memory at this length would be seen."""
    rows, columns = machine.pick((8, 2048), (4, 48))
    torch.manual_seed(1)
    ids = torch.randint(2, 500, (rows, columns), device=machine.device)
    ids[:, : columns // 2] = ids[0, : columns // 2].clone()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    batch["labels"][:, : columns // 2] = -100
    scored = torch.ones(rows, columns // 2, dtype=torch.bool, device=machine.device)
    nodes = columns // 2 * (rows + 1)
    for heads, key_heads, size in [(14, 2, 64), (12, 2, 128), (8, 8, 64), (8, 1, 128), (16, 4, 64)]:
        base = make_model(
            heads * size, 2, heads, key_heads, 256, device=machine.device, dtype=torch.float32, words=512
        )  # fmt: skip
        forward, model = with_adapter(base)
        seen = {}
        for packed in (False, True):
            model.zero_grad()
            before = machine.peak() and torch.cuda.memory_allocated()
            if machine.peak():
                torch.cuda.reset_peak_memory_stats()
            with torch.autocast(machine.device.type, torch.bfloat16):
                outputs = forward.reading(model, scored, pack=lambda *_, packed=packed: packed)(
                    **batch, fused_lm_head=True
                )
            outputs.log_probs.sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            seen[packed] = outputs.log_probs.detach().float(), gradient, machine.peak() - before
        (padded, padded_gradient, _), (found, gradient, took) = seen[False], seen[True]
        name = f"{heads}/{key_heads} x {size}"
        error = float((gradient - padded_gradient).norm() / padded_gradient.norm())
        figures |= {f"{name} gap": float((found - padded).abs().mean()), f"{name} gradients": error}
        figures[f"{name} GiB"] = took / 2**30
        assert figures[f"{name} gap"] < 2e-2 and error < 5e-2
        assert took < max(1.0, heads * nodes * nodes * 2)  # full scores of one layer, in bf16
