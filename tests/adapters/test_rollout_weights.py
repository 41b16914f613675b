"""Weights of a rollout: cast once they give the same bits, merged the same function, and the model keeps its own bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from agile_trainers.adapters.fused import cast_once, fuse

IDS = torch.arange(12).view(2, 6)


def policy(tied: bool = True, **lora: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(**{"r": 4, "target_modules": "all-linear", **lora}))
    fuse(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.eval()


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def counted(model: Any) -> Counter[str]:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), Counted() as count:
        model(IDS)
    return count.operations


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """The same parameters with the same bytes, afterwards."""
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    yield
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    for name, (parameter, value) in before.items():
        assert after[name] is parameter and parameter.dtype == value.dtype and parameter.equal(value)
    assert not any(layer.disable_adapters for layer in model.modules() if hasattr(layer, "base_layer"))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_cast_once_give_the_same_bits(tied: bool) -> None:
    model = policy(tied)
    layers = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    (head,) = (name for name in layers if name.endswith("lm_head"))
    cast = [module for name, module in layers.items() if not (tied and name == head)]
    size = 2 * sum(value.numel() for module in cast for value in module.parameters())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(IDS).logits
        with unchanged(model), cast_once(model, torch.bfloat16) as taken:
            assert model(IDS).logits.equal(expected) and taken == size
            assert layers[head].weight.dtype == (torch.float32 if tied else torch.bfloat16)


def test_a_token_casts_no_weight() -> None:
    model = policy()
    before = counted(model)
    with cast_once(model, torch.bfloat16):
        after = counted(model)
    # Of each layer seven weights, three biases, and fourteen of the adapter. The tied head is cast as before.
    assert before["_to_copy"] - after["_to_copy"] == 2 * (7 + 3 + 14)
    assert {name: before[name] for name in before if name != "_to_copy"} == {
        name: after[name] for name in after if name != "_to_copy"
    }


def test_casts_that_do_not_fit_are_left_out() -> None:
    model = policy()
    with cast_once(model, torch.bfloat16) as size:
        pass
    for room, expected in ((size, size), (size - 1, 0)):
        with cast_once(model, torch.bfloat16, room) as taken:
            assert taken == expected
            assert {module.weight.dtype for module in model.modules() if type(module) is torch.nn.Linear} == (
                {torch.bfloat16, torch.float32} if expected else {torch.float32}
            )


def test_an_error_inside_gives_the_weights_back() -> None:
    model = policy()
    with unchanged(model), pytest.raises(RuntimeError, match="inside"), cast_once(model, torch.bfloat16):
        raise RuntimeError("inside")
