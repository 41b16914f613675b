"""Packed against padded rows, on tiny models of eight architectures: log-probabilities, entropies and gradients."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from trl.trainer.utils import _ChunkedLogProbFunction, add_fused_lm_head

from agile_trainers.objectives.kept_sets import KeptSets, encode_sets, pad_sets
from agile_trainers.packing import attention, kept_head
from agile_trainers.packing.forward import PackedForward
from agile_trainers.packing.packer import longest_packed, rounding_bound, why_padded
from agile_trainers.packing.trie import Segment

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "llama": LlamaConfig(**SIZES),
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "phi3": Phi3Config(**SIZES, sliding_window=40),
    "gpt2": GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, attn_pdrop=0.0,
                       embd_pdrop=0.0, bos_token_id=1, eos_token_id=2),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=6, first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
    ),  # heads of values are smaller than those of queries and keys
}  # fmt: skip
SCALED: dict[str, Any] = {
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.8),
    "cohere": CohereConfig(**SIZES, logit_scale=2.5),
    "granite": GraniteConfig(**SIZES, logits_scaling=0.3),
}
ANSWER = 16
"""Columns of the completions."""


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config({**CONFIGS, **SCALED}[name]).train()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def rows() -> dict[str, torch.Tensor]:
    """Two prompts, the same row twice, left and right padding, and a selection of tokens that are scored."""
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (6, 24))
    ids[:3, :15], ids[3:, :12] = ids[0, :15].clone(), ids[3, :12].clone()
    ids[1] = ids[0]
    mask = torch.ones_like(ids)
    mask[4, 20:] = 0
    left = torch.zeros(6, 3, dtype=torch.long)
    scored = (torch.rand(6, ANSWER) < 0.6) & mask[:, -ANSWER:].bool()
    scored[1] = scored[0]
    ids, mask = torch.cat([left, ids * mask], 1), torch.cat([left, mask], 1)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-ANSWER] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "scored": scored}


def run(
    model: PreTrainedModel, forward: PackedForward, packed: bool, between: bool = False, kept: KeptSets | None = None
) -> list[torch.Tensor]:
    """Log-probabilities, entropies and every gradient of an arbitrary function of both."""
    batch = rows()
    scored = batch.pop("scored")
    outputs = forward.reading(model, scored, pack=lambda *_: packed, kept=kept)(**batch, fused_lm_head=True)
    weights = torch.randn(scored.shape, generator=torch.Generator().manual_seed(2))
    loss = (outputs.log_probs[:, -ANSWER:] * weights).sum() + 0.3 * (outputs.entropy[:, -ANSWER:] * weights).sum()
    if between:  # other passes, one of them packed otherwise, before the backward pass
        with torch.no_grad():
            model(input_ids=batch["input_ids"])
            half = {name: value[:3] for name, value in batch.items()}
            forward.reading(model, scored[:3], pack=lambda *_: True)(**half, fused_lm_head=True)
    model.zero_grad()
    loss.backward()
    assert not outputs.log_probs[:, -ANSWER:][~scored].any()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [outputs.log_probs[:, -ANSWER:], outputs.entropy[:, -ANSWER:], *gradients]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert len(found) == len(expected) > 10
    error = sum(((a - b) ** 2).sum() for a, b in zip(found[2:], expected[2:], strict=True))
    assert (error / sum((b**2).sum() for b in expected[2:])).sqrt() < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_equal_padded_rows(name):
    """And padded rows equal TRL's own reading of every position."""
    model = make_model(name)
    assert why_padded(model, model) is None
    batch = rows()
    labels = batch["labels"].clone()
    labels[:, -ANSWER:][~batch["scored"]] = -100
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    trls = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions, labels=labels,
        fused_lm_head=True,
    )  # fmt: skip
    forward = PackedForward(model)
    padded = run(model, forward, packed=False)
    assert_same(run(model, forward, packed=True), padded)
    torch.testing.assert_close(padded[0], trls.log_probs[:, -ANSWER:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "mixtral", *SCALED])
def test_the_head_of_kept_sets_is_trls_where_all_tokens_are_kept(name, monkeypatch):
    """Also of models that scale or cap their logits; and in pieces, of which the first has another size than the last."""
    model = make_model(name)
    forward = PackedForward(model)
    everything = KeptSets.of(torch.zeros(6, 0, dtype=torch.int32), torch.zeros(6, ANSWER, dtype=torch.int32))
    trls = run(model, forward, packed=False)
    assert_same(run(model, forward, packed=False, kept=everything), trls)
    monkeypatch.setattr(kept_head, "LOGITS", 7 * model.config.get_text_config().vocab_size)
    assert_same(run(model, forward, packed=False, kept=everything), trls)


def kept_of_rows(share: float, vocab: int) -> KeptSets:
    """Sets of all tokens of :func:`rows`, each with this share of the vocabulary and the token itself."""
    kept = torch.rand(6, ANSWER, vocab, generator=torch.Generator().manual_seed(3)) < share
    kept = kept.scatter(2, rows()["input_ids"][:, -ANSWER:, None], True).flatten(0, 1)
    # By their ids, which a larger vocabulary would make the shortest form.
    by_ids = [torch.cat([torch.zeros(1), one.nonzero()[:, 0]]).int().numpy().tobytes() for one in kept]
    sets = by_ids if share < 0.1 else encode_sets(kept)
    return KeptSets.of(*pad_sets([sets[row * ANSWER : (row + 1) * ANSWER] for row in range(6)], ANSWER))


@pytest.mark.parametrize("name", ["qwen2", "mixtral", *SCALED])
def test_logits_of_few_kept_tokens_are_those_of_the_whole_head(name, monkeypatch):
    """In pieces too; of larger sets the whole head is computed, and where its weights are trained."""
    model = make_model(name)
    forward, vocab = PackedForward(model), model.config.get_text_config().vocab_size
    sets, alone, computed = kept_of_rows(0.03, vocab), kept_head.KeptHead._of_kept, []
    monkeypatch.setattr(kept_head.KeptHead, "_of_kept", lambda *given: (computed.append(given), alone(*given))[1])
    monkeypatch.setattr(kept_head, "FEW", 0.0)
    run(model, forward, packed=False, kept=sets)
    model.get_output_embeddings().requires_grad_(False)
    whole = run(model, forward, packed=False, kept=sets)
    monkeypatch.setattr(kept_head, "FEW", 0.2)
    assert not computed and run(model, forward, packed=False, kept=kept_of_rows(0.5, vocab)) and not computed
    for pieces in (kept_head.LOGITS, 7 * sets.ids(vocab)[0].size(1) * model.config.get_text_config().hidden_size):
        monkeypatch.setattr(kept_head, "LOGITS", pieces)
        assert_same(run(model, forward, packed=name == "qwen2", kept=sets), whole)
    assert len(computed) > 4
    model.get_output_embeddings().requires_grad_(True)
    computed.clear()
    assert run(model, forward, packed=False, kept=sets) and not computed


def test_packed_rows_equal_padded_rows_with_kept_sets():
    """Two equal rows that were sampled under other sets are not one."""
    model = make_model("qwen2")
    forward, vocab = PackedForward(model), model.config.vocab_size
    sets = kept_of_rows(0.3, vocab)
    padded = run(model, forward, packed=False, kept=sets)
    assert_same(run(model, forward, packed=True, kept=sets), padded)
    scored = rows()["scored"]
    assert (padded[0][0] - padded[0][1]).abs()[scored[0]].min() > 1e-3 and padded[0][scored].exp().mean() > 2 / vocab


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_packed_rows_equal_padded_rows_under_autocast(name):
    """Weights in fp32, matrix products in bf16, as ``bf16=True`` computes; qwen3's norms give queries and keys in fp32."""
    model = make_model(name)
    forward, bound = PackedForward(model), rounding_bound(model, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        padded = run(model, forward, packed=False)
        packed = run(model, forward, packed=True)
    scored = padded[0] != 0
    assert 0 < (packed[0] - padded[0])[scored].abs().mean() < bound
    error = sum(((a - b) ** 2).sum() for a, b in zip(packed[2:], padded[2:], strict=True))
    assert (error / sum((b**2).sum() for b in padded[2:])).sqrt() < 0.03


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_the_bound_of_the_self_check_separates_rounding_from_an_error_in_bf16(name, monkeypatch):
    """All weights in bf16, log-probabilities spread as the bound assumes; the error: rows see the rows before them."""
    model = make_model(name)
    model.lm_head.weight.data *= 9
    model, forward, batch = model.to(torch.bfloat16), PackedForward(model), rows()
    del batch["scored"]
    there = batch["labels"][:, 1:] != -100

    def read(packed: bool) -> torch.Tensor:
        with torch.no_grad():
            outputs = forward.reading(model, None, pack=lambda *_: packed)(**batch, fused_lm_head=True)
        return outputs.log_probs[there].float()

    padded, packed, bound = read(False), read(True), rounding_bound(model, torch.bfloat16)
    assert 3.0 < padded.std() < 5.0
    assert bound / 20 < (packed - padded).abs().mean() < bound

    def one_row(q, k, v, trie, scale):
        return right(q, k, v, replace(trie, segments=(Segment(0, trie.size, trie.size),)), scale)

    right = attention.trie_attention
    monkeypatch.setattr(attention, "trie_attention", one_row)
    assert (read(True) - padded).abs().mean() > 3 * bound


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_recomputes_with_the_plan_of_the_forward_pass(packed, use_reentrant):
    model = make_model("qwen2")
    forward = PackedForward(model)
    plain = run(model, forward, packed=False)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_same(run(model, forward, packed=packed, between=True), plain)


def test_padding_to_a_multiple_changes_nothing():
    model = make_model("qwen2")
    assert_same(
        run(model, PackedForward(model, multiple=64), True), run(model, PackedForward(make_model("qwen2")), False)
    )


def test_the_head_and_the_decoder_read_what_is_needed(monkeypatch):
    """Distinct tokens in the decoder, distinct scored tokens in the head; padded rows: all, and scored tokens."""
    model, batch, seen = make_model("qwen2"), rows(), {}
    forward = PackedForward(model)
    model.model.register_forward_pre_hook(lambda _, __, inputs: seen.update(read=inputs["input_ids"].numel()),
                                          with_kwargs=True)  # fmt: skip
    count_head(monkeypatch, seen)
    scored = batch.pop("scored")
    tokens = scored.nonzero().tolist()
    starts = [batch["input_ids"][i, 3 : 27 - ANSWER + t + 1] for i, t in tokens]  # up to the scored token
    needed = {tuple(start[:k].tolist()) for start in starts for k in range(1, len(start))}
    for packed in (False, True):
        forward.reading(model, scored, pack=lambda *_, packed=packed: packed)(**batch, fused_lm_head=True)
        assert seen["head"] == (len({tuple(start.tolist()) for start in starts}) if packed else len(tokens))
        assert seen["read"] == (len(needed) if packed else batch["input_ids"].numel())
    assert len(needed) < 0.7 * batch["input_ids"].numel()


def count_head(monkeypatch: pytest.MonkeyPatch, seen: dict[str, int]) -> None:
    """Count the hidden states that TRL's head reads."""
    original = _ChunkedLogProbFunction.apply

    def counted(hidden, *args):
        seen["head"] = len(hidden)
        return original(hidden, *args)

    monkeypatch.setattr(_ChunkedLogProbFunction, "apply", counted)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_without_any_scored_token_have_a_gradient_of_zero(packed):
    """Other processes wait for the backward pass of a micro-batch without an informative group."""
    model, batch = make_model("qwen2"), rows()
    scored = torch.zeros_like(batch.pop("scored"))
    outputs = PackedForward(model).reading(model, scored, pack=lambda *_: packed)(**batch, fused_lm_head=True)
    outputs.log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.model.layers.parameters())


REFUSED = {
    "sinks": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8}, "sinks"),
    "linear attention": (
        "Qwen3NextConfig",
        {"layer_types": ["linear_attention", "full_attention"]},
        "linear_attention",
    ),
    "recurrence": ("MambaConfig", {}, "linear_attention"),
    "capped scores": ("Gemma2Config", {"head_dim": 8}, "caps attention"),
    "slopes instead of positions": ("BloomConfig", {}, "counts positions"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_of_attention_keep_padded_rows(kind):
    name, changes, reason = REFUSED[kind]
    config = getattr(transformers, name)(**{**SIZES, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert reason in str(why_padded(model, model))


def test_windows_bound_the_rows_that_are_packed():
    sizes = {**SIZES, "sliding_window": 40}
    with torch.device("meta"):
        models = {
            name: AutoModelForCausalLM.from_config(config)
            for name, config in {
                "all windows": Phi3Config(**sizes),
                "unused": Qwen2Config(**sizes, use_sliding_window=False),
                "some": Qwen2Config(**sizes, use_sliding_window=True, max_window_layers=1),
                "none": LlamaConfig(**SIZES),
            }.items()
        }
    found = {name: longest_packed(model) for name, model in models.items()}
    assert found == {"all windows": 40, "unused": None, "some": 40, "none": None}


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    """As callbacks that keep an average of the weights need it."""
    model = make_model("qwen2")
    PackedForward(model)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        torch.nn.init.zeros_(parameter)
    ids, read = rows()["input_ids"], torch.tensor([4, 5])
    labels = ids[:1, :2]
    for one, expected in ((copied, torch.full((1, 2), -math.log(60))), (model, None)):
        found = one(input_ids=ids, shift_labels=labels, read=read, fused_lm_head=True).log_probs
        if expected is None:
            assert not torch.allclose(found, torch.full_like(found, -math.log(60)), atol=1e-3)
        else:
            torch.testing.assert_close(found, expected)
