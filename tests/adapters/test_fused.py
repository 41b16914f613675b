"""The fused LoRA layer against PEFT's own, with weights that let nothing vanish."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora.layer import Linear
from peft.utils import get_peft_model_state_dict
from torch import nn

from agile_trainers.adapters.fused import FusedLinear, fuse


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted(**options):
    """PEFT's model and a fused copy of it; scaling is 3."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["first", "second"], **options)
    model = get_peft_model(Network(), config).double()
    model.add_adapter("critic", LoraConfig(r=2, lora_alpha=10, target_modules=["first", "second"]))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter, dtype=torch.float64)
    fused = copy.deepcopy(model)
    fuse(fused)
    assert {type(m) for m in fused.modules() if isinstance(m, Linear)} == {FusedLinear}
    return model.train(), fused.train()


@pytest.fixture
def products(monkeypatch):
    """How often PEFT's own forward ran inside a fused layer."""
    calls = []
    original = Linear.forward
    monkeypatch.setattr(
        Linear, "forward", lambda self, *args, **kwargs: calls.append(type(self)) or original(self, *args, **kwargs)
    )
    return calls


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
@pytest.mark.parametrize("adapter", ["default", "critic"])
def test_output_and_gradients_are_peft_s(adapter, shape, products):
    model, fused = adapted()
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    outputs = []
    for network in (model, fused):
        network.set_adapter(adapter)
        products.clear()
        output = network(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
        output.square().sum().backward()
        outputs.append((output, gradient))
    assert FusedLinear not in products
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    trained = 0
    for (name, a), b in zip(fused.named_parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12, msg=name)
        trained += a.grad is not None
    assert trained == 4


def by_hand(network, x, adapter, scaling):
    for layer in (network.get_submodule("base_model.model.first"), network.get_submodule("base_model.model.second")):
        weight = layer.base_layer.weight + scaling * layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
        bias = layer.base_layer.bias
        x = nn.functional.linear(x, weight, bias)
        x = torch.tanh(x) if bias is not None else x
    return x


def test_scaling_by_hand():
    _, fused = adapted()
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(fused(x), by_hand(fused, x, "default", 3.0), rtol=1e-12, atol=1e-12)
    fused.set_adapter("critic")
    torch.testing.assert_close(fused(x), by_hand(fused, x, "critic", 5.0), rtol=1e-12, atol=1e-12)


def test_dropout_is_peft_s():
    model, fused = adapted(lora_dropout=0.5)
    outputs = []
    for network in (model, fused):
        torch.manual_seed(2)
        outputs.append(network(torch.ones(4, 6, dtype=torch.float64)))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(outputs[0], by_hand(model, torch.ones(4, 6, dtype=torch.float64), "default", 3.0))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.base_model.disable_adapter_layers(), id="disabled"),
        pytest.param(lambda m: m.merge_adapter(), id="merged"),
        pytest.param(lambda m: m.base_model.set_adapter(["default", "critic"]), id="two at once"),
        pytest.param(
            lambda m: setattr(m.base_model.model.first.lora_B["default"].weight, "ds_id", 1), id="partitioned"
        ),
    ],
)
def test_anything_else_runs_as_in_peft(change, products):
    model, fused = adapted()
    x = torch.randn(4, 6, dtype=torch.float64)
    for network in (model, fused):
        change(network)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-12, atol=1e-12)
    assert FusedLinear in products


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_variants_run_as_in_peft(options, products):
    model, fused = adapted(**options)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-12, atol=1e-12)
    assert FusedLinear in products


def test_autocast_is_as_precise_as_peft_s(products):
    model, fused = adapted()
    x = torch.randn(64, 6)
    exact = model(x.double())
    model.float(), fused.float()
    products.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, ours = model(x), fused(x)
    assert FusedLinear not in products and ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours - exact).abs().mean() <= 1.02 * (theirs - exact).abs().mean()


def test_a_fused_model_s_adapter_is_saved_and_loaded_as_before():
    model, fused = adapted()
    state = get_peft_model_state_dict(model)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in get_peft_model_state_dict(fused).items()
    }
    for parameter in fused.parameters():
        parameter.data.mul_(0.5)
    set_peft_model_state_dict(fused, state)
    torch.testing.assert_close(get_peft_model_state_dict(fused), state)
