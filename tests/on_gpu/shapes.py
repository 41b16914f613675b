"""Models and rows of the GPU cases, made in code."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from agile_trainers.packing.attention import IMPLEMENTATION, Plan, TrieAttention
from agile_trainers.packing.forward import PackedForward
from agile_trainers.packing.trie import Trie, build_trie

SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "0.5B": (896, 24, 14, 2, 4864),
    "7B": (3584, 28, 28, 4, 18944),
    "tiny": (64, 2, 4, 2, 128),
}
"""Width, layers, heads, key-value heads and inner width, as of Qwen2.5."""


def make_model(
    width: int,
    layers: int,
    heads: int,
    key_heads: int,
    inner: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    words: int,
) -> Qwen2ForCausalLM:
    """A model with random weights, made on the device."""
    config = Qwen2Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        intermediate_size=inner, vocab_size=words, max_position_embeddings=32768, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def with_adapter(model: PreTrainedModel) -> tuple[PackedForward, Any]:
    """The model as it is trained, with TRL's head, checkpoints, and LoRA with weights of its own; and its passes."""
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    forward = PackedForward(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    return forward, adapted.train()


def branching(nodes: int, device: torch.device) -> Trie:
    """A trie of exactly so many nodes: groups of eight rows share half of their tokens."""
    generator = torch.Generator().manual_seed(0)
    length = max(8, nodes // 16)
    prompt = torch.randint(2, 60, (length,), generator=generator)
    rows = torch.cat([prompt.expand(32, -1), torch.randint(2, 60, (32, length), generator=generator)], 1)
    ids, count = rows, 32
    while count > 1 and build_trie(ids[: count - 1], torch.ones_like(ids[: count - 1])).size >= nodes:
        count -= 1
    ids = ids[:count]
    for columns in range(ids.size(1), 0, -1):  # cut the last row's end
        mask = torch.ones_like(ids)
        mask[-1, columns:] = 0
        if (trie := build_trie(ids.to(device), mask.to(device))).size <= nodes:
            return trie.padded(nodes) if trie.size < nodes else trie
    raise AssertionError(f"no trie of {nodes} nodes")


def visible(trie: Trie, queries: torch.Tensor) -> torch.Tensor:
    """(Q, N) bool, which nodes each of the nodes ``queries`` sees, from the definition."""
    ends = torch.from_numpy(trie.ends()).to(queries.device)
    nodes = torch.arange(trie.size, device=queries.device)
    return (nodes[None] <= queries[:, None]) & (queries[:, None] < ends[None])


class Attention:
    """Attention of packed rows, as a model's layers call it."""

    def __init__(self, device: torch.device) -> None:
        self._model = make_model(*SHAPES["tiny"], device=device, dtype=torch.float32, words=64)
        self._switch = TrieAttention(self._model)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        """(1, heads, N, D) each; returns the output in this layout."""
        with self._switch.using(plan):
            output, _ = AttentionInterface()[IMPLEMENTATION](self._model, q, k, v, None)
        return output.transpose(1, 2)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention with a dense mask (Q, N), computed in full precision."""
    groups = q.size(1) // k.size(1)
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    return scaled_dot_product_attention(q.float(), k, v, attn_mask=seen)
