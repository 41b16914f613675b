"""Decoding one token of each row: no copy of keys or values, and one synchronization with the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from generated import EOS, PAD, SETTINGS, SHAPE, letters, play, qwen2, uniforms
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen2Config,
)
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from agile_trainers.rollout.generators import GenerationRequest, SamplingSettings, TransformersGenerator
from agile_trainers.rollout.generators.transformers.decoding import stop_criteria
from agile_trainers.rollout.generators.transformers.generator import IMPLEMENTATION, attend
from agile_trainers.rollout.generators.transformers.kv_cache import bytes_per_row, fitting_rows

HEADS, KEY_HEADS, DIM = 4, 2, 8


def make(model: torch.nn.Module, settings: SamplingSettings | None = None) -> TransformersGenerator:
    settings = settings or SamplingSettings()
    return TransformersGenerator(model, eos_token_ids=EOS, pad_token_id=PAD, settings=settings, tokenizer=letters())


def decoding(lengths: Sequence[int], tokens: int, settings: SamplingSettings | None = None) -> TransformersGenerator:
    """A generator that has read prompts of these lengths, and has room for ``tokens`` more without growing."""
    generator = make(qwen2(), settings)
    for row, length in enumerate(lengths):
        ids = [2 + (row + i) % 5 for i in range(length)]
        generator.submit(GenerationRequest(row, ids, tokens, uniforms(row)))
    generator.step()
    return generator


def test_stop_strings_are_matched_with_a_vocabulary_once() -> None:
    """A fast tokenizer's vocabulary has another order each time; tokens that were added are matched too."""
    tokenizer, settings = letters(), SamplingSettings(stop_strings=("b",))
    first = stop_criteria(settings, tokenizer)
    assert first is not None and first is stop_criteria(settings, tokenizer)
    assert first is not stop_criteria(SamplingSettings(stop_strings=("a",)), tokenizer)
    assert first is not stop_criteria(settings, letters())
    assert tokenizer.add_tokens(["?b"]) == 1
    later = stop_criteria(settings, tokenizer)
    assert later is not None and later(torch.tensor([[len(tokenizer) - 1]]), None).all()


# ------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize(("heads", "key_heads", "values"), [(4, 4, 8), (4, 2, 8), (6, 1, 8), (6, 2, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_transformers(heads: int, key_heads: int, values: int, masked: bool) -> None:
    torch.manual_seed(0)
    rows, columns = 3, 11
    query = torch.randn(rows, 1, heads, DIM).transpose(1, 2)
    key, value = torch.randn(rows, key_heads, 16, DIM), torch.randn(rows, key_heads, 16, values)
    key, value = key[:, :, :columns], value[:, :, :columns]  # as buffers with room give them
    mask = (torch.arange(columns) >= torch.tensor([[0], [4], [9]]))[:, None, None] if masked else None
    layer = torch.nn.Module()
    layer.num_key_value_groups = heads // key_heads
    found, _ = attend(layer, query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("asked", ["two tokens", "a position bias", "a mask for each head"])
def test_attention_is_transformers_own_where_more_is_asked(asked: str) -> None:
    if asked == "a position bias" and "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
        pytest.skip("transformers 5.13 gives no position bias to an attention")
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.num_key_value_groups = HEADS // KEY_HEADS
    query, columns = torch.randn(2, HEADS, 2 if asked == "two tokens" else 1, DIM), 5
    key, value = torch.randn(2, 2, KEY_HEADS, columns, DIM)
    bias = torch.randn(1, HEADS, 1, columns) if asked == "a position bias" else None
    mask = torch.randn(2, HEADS, 1, columns) if asked == "a mask for each head" else None
    found, _ = attend(layer, query, key, value, mask, position_bias=bias)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, position_bias=bias)
    assert torch.equal(found, expected)
    plain, _ = attend(layer, query[:, :, :1], key, value, None)
    assert not torch.allclose(found[:, :1], plain, atol=1e-3) or asked == "two tokens"


def gemma3() -> Gemma3ForCausalLM:
    """Windows of 8 tokens, shorter than the conversations; the window is in the mask."""
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=layers)).eval()


def eager() -> PreTrainedModel:
    return qwen2(attn_implementation="eager")


def falcon() -> FalconForCausalLM:
    """Its layers call PyTorch's attention themselves."""
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**shape, alibi=False, initializer_range=0.4)).eval()


def gpt_oss() -> GptOssForCausalLM:
    """Attention sinks."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(
        GptOssConfig(**{**SHAPE, **experts}, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    ).eval()


@pytest.mark.parametrize(
    ("build", "admitted"), [(qwen2, True), (gemma3, True), (eager, False), (falcon, False), (gpt_oss, False)]
)
def test_tokens_are_those_of_the_models_own_attention(build: Callable[[], PreTrainedModel], admitted: bool) -> None:
    """In float64, so that a column too many or too few cannot hide behind rounding; the others' are equal anyway."""
    model = build().double() if admitted else build()
    own = model.config._attn_implementation
    passes: set[tuple[str, bool]] = set()

    def note(model: PreTrainedModel, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        passes.add((model.config._attn_implementation, inputs["input_ids"].shape[1] == 1))

    model.register_forward_pre_hook(note, with_kwargs=True)
    found = play(make(model), range(4))
    assert passes == {(own, False), (IMPLEMENTATION if admitted else own, True)}
    assert model.config._attn_implementation == own
    generator = make(model)
    generator._decoded_by = []
    for episode, turns in play(generator, range(4)).items():
        for ours, theirs in zip(found[episode], turns, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-12 if admitted else 0)


def test_log_probabilities_differ_by_rounding() -> None:
    model = qwen2(initializer_range=0.1)
    generator = make(model)
    generator._decoded_by = []
    own = play(generator, range(8), turns=6)
    for episode, turns in play(make(model), range(8), turns=6).items():
        for ours, theirs in zip(turns, own[episode], strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-6)


def test_an_error_in_a_pass_leaves_the_models_own_attention() -> None:
    generator = decoding([3, 7], 4)
    generator.model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generator.step()
    assert generator.model.config._attn_implementation == "sdpa"


class Made(TorchDispatchMode):
    """Records the elements of every tensor that an operation writes to new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        read = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in read:
                self.sizes.append(made.numel())
        return result


@pytest.mark.parametrize("autocast", [False, True])
def test_no_copy_of_keys_or_values_is_made(autocast: bool) -> None:
    """Neither for all heads, nor of the cache. Under autocast rotary embeddings give keys in fp32."""
    lengths = (150, 90, 200)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        generator = decoding(lengths, 6)
        with Made() as ours:
            generator.step()
        smallest = len(lengths) * KEY_HEADS * max(lengths) * DIM
        assert max(ours.sizes) < smallest
    with Made() as copies:
        repeat_kv(torch.zeros(len(lengths), KEY_HEADS, max(lengths), DIM), HEADS // KEY_HEADS)
    assert max(copies.sizes) == smallest * HEADS // KEY_HEADS  # the spy sees what transformers before 5.23 copies


# ------------------------------------------------------------------------------------------------ synchronizations


class Synchronizations(TorchFunctionMode):
    """Records calls for which a GPU's results would have to be waited for, or that copy from pageable memory."""

    READS = (
        "tolist",
        "item",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "nonzero",
        "numpy",
        "cpu",
        "masked_select",
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        copies = func is torch.tensor and kwargs.get("device") is not None
        boolean = name in ("__getitem__", "__setitem__") and any(
            isinstance(index, list) or (isinstance(index, torch.Tensor) and index.dtype == torch.bool)
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if name in self.READS or copies or boolean:
            self.names.append(name)
        return func(*args, **kwargs)


def test_the_counter_counts() -> None:
    x = torch.arange(4)
    with Synchronizations() as seen:
        assert bool((x >= 0).all()) and x.sum().item() == 6 and int(x[1]) == 1
        assert x.tolist() and len(x.nonzero()) == len(x[x > 0])
        torch.tensor([1.0], device=x.device)
        x[[0, 1]] = 3
    assert seen.names == [
        "__bool__", "item", "__int__", "tolist", "nonzero", "__getitem__", "tensor", "__setitem__"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["plain", *SETTINGS])
def test_a_token_waits_for_the_device_once(name: str) -> None:
    """Rows that end leave their place empty, with less than half of 16 ended."""
    generator = decoding([3 + row for row in range(16)], 12, SETTINGS.get(name))
    generator.step()
    for _ in range(3):
        with Synchronizations() as seen:
            generator.step()
        filters = generator._settings.filters
        assert seen.names == (["cpu", "numpy"] if filters else ["tolist"]), "numpy, of what was copied"


def test_the_models_own_attention_waits_once_more() -> None:
    """Whether the mask can be left out."""
    generator = decoding([5, 9, 3], 8)
    generator._decoded_by = []
    with Synchronizations() as seen:
        generator.step()
    assert sorted(seen.names) == ["__bool__", "tolist"]


# ---------------------------------------------------------------------------------------------------------- memory


def test_bytes_of_a_row_by_hand() -> None:
    shape = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    config = Qwen2Config(**shape, num_attention_heads=28, num_key_value_heads=4)  # Qwen2.5 7B
    # A token has keys and values of 4 heads of 128 in 28 layers. 3,584 tokens before the last answer, and a quarter of room.
    cache = 2 * 4 * 128 * 28 * 2 * 4480
    assert cache == pytest.approx(30.6 * 2**30 / 128, rel=1e-2)  # 128 episodes of 4k
    reading = 4096 * 2 * (4 * 3584 + 2 * 18944)
    sampling = 152064 * (4 + 4 * 8 + 4)
    assert reading > cache
    assert bytes_per_row(config, 4096, 512, torch.bfloat16) == cache + reading + sampling
    assert bytes_per_row(config, 4096, 512, torch.float32) == 2 * (cache + reading) + sampling
    narrow = Qwen2Config(**{**shape, "intermediate_size": 4096}, num_attention_heads=28, num_key_value_heads=4)
    assert bytes_per_row(narrow, 4096, 512, torch.bfloat16) == 2 * cache + sampling  # while its buffers grow
    gpt2 = GPT2Config(n_embd=8, n_head=2, n_layer=3, vocab_size=10)  # no key heads, no width of its feed-forward part
    assert bytes_per_row(gpt2, 100, 36, torch.float32) == 2 * 3 * 8 * 4 * 128 + 100 * 4 * (4 * 8 + 2 * 32) + 400


def test_fitting_rows() -> None:
    assert fitting_rows(1000, 100) == 8
    assert fitting_rows(999, 100) == 7
    assert fitting_rows(10, 100) == 1  # a row that does not fit is tried alone
