"""Bases of 4 and 8 bits train, are saved, gone on with and loaded, with the transformers generator on CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from games import Gradients, draw_batch, loss_and_gradients, make_trainer, relative_error
from peft import PeftModel
from peft.utils.integrations import dequantize_bnb_weight
from ppo_games import make_ppo
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from agile_trainers.adapters.critic import add_value_head
from agile_trainers.adapters.roles import CRITIC

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="needs bitsandbytes: pip install 'agile-trainers[quantization]'"
)
ALGORITHMS, BITS = ("grpo", "ppo"), (4, 8)


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def quantization(bits: int) -> BitsAndBytesConfig:
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def make(algorithm: str, bits: int, model: Path, output: Path, **changes: Any) -> Any:
    options = {"quantization_config": quantization(bits), "max_turns": 2, "stop_strings": None, "max_new_tokens": 2}
    options |= {"per_device_train_batch_size": 4, **changes}
    return make_trainer(model, output, **options) if algorithm == "grpo" else make_ppo(model, output, **options)


def adapters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def unpacked(model: Any) -> Any:
    return unpack(copy.deepcopy(model))


def unpack(plain: Any) -> Any:
    """The model in fp32, in place, whose quantized layers are ordinary ones with the weights that the 4 or 8 bits stand for.

    Its results are the same on every processor up to fp32's rounding. A quantized layer rounds its input too (to 8 bits,
    or to the adapters' bf16), and a difference in the last digit, by which kernels differ, may become a whole step there.
    """
    plain.eval()
    for module in plain.modules():
        layer = getattr(module, "base_layer", None)
        if isinstance(layer, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            weight = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None))
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            module.base_layer = linear
    return plain.float()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_trains_is_saved_and_loaded(embedded_model, tmp_path, algorithm, bits):
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0}
    gradients = Gradients()
    whole = make(algorithm, bits, embedded_model, tmp_path / "whole", callbacks=[gradients], **saving)
    kind = {4: bitsandbytes.nn.Linear4bit, 8: bitsandbytes.nn.Linear8bitLt}[bits]
    layers = [module for module in whole.model.modules() if isinstance(module, kind)]
    base = [layer.weight.detach().clone() for layer in layers]
    assert len(base) == 14
    start = adapters(whole)
    whole.train()
    assert all(torch.equal(layer.weight, before) for layer, before in zip(layers, base)), "the base is never trained"
    assert all(value.isfinite().all() for step in gradients.steps for value in step.values())
    for adapter in (".default.", ".critic.") if algorithm == "ppo" else (".default.",):
        assert any(not torch.equal(value, start[name]) for name, value in adapters(whole).items() if adapter in name)

    resumed = make(algorithm, bits, embedded_model, tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    ours, theirs = adapters(resumed), adapters(whole)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())

    ids = torch.arange(20).view(2, 10) + 300
    for adapter in ("", CRITIC) if algorithm == "ppo" else ("",):
        model = AutoModelForCausalLM.from_pretrained(embedded_model, quantization_config=quantization(bits))
        if adapter:
            add_value_head(model)
        loaded = PeftModel.from_pretrained(model, tmp_path / "whole" / "checkpoint-2" / adapter)
        saved = {name.replace(".default.", f".{adapter or 'default'}."): p for name, p in loaded.named_parameters()}
        for name, value in theirs.items():
            if f".{adapter or 'default'}." in name:
                torch.testing.assert_close(saved[name].float(), value.float(), rtol=0, atol=0)
    policy = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(embedded_model, quantization_config=quantization(bits)),
        tmp_path / "whole" / "checkpoint-2",
    )
    with torch.no_grad():
        # Not `forward` of the whole model: TRL's replacement of it calls the model that was copied.
        ours, theirs = (unpacked(model).get_decoder()(ids).last_hidden_state for model in (policy, whole.model))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_saved_policy_is_continued_on_a_quantized_base(embedded_model, tmp_path):
    first = make("grpo", 4, embedded_model, tmp_path / "a", learning_rate=1.0)
    first.train()
    first.save_model()
    second = make("grpo", 4, tmp_path / "a", tmp_path / "b")
    assert any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in second.model.modules())
    ours, theirs = adapters(second), adapters(first)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].float(), value.float(), rtol=0, atol=0)


def test_gradients_flow_through_the_four_bit_base(embedded_model, tmp_path, monkeypatch):
    """After a rollout, on whatever CPU, they are those of a base with the same weights that is not quantized."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)  # where weights would be packed
    trainer = make("grpo", 4, embedded_model, tmp_path)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL's bf16 would round each kernel's result another way
            parameter.data = torch.randn(parameter.shape).mul(0.1)
    batch = draw_batch(trainer)
    _, ours = loss_and_gradients(trainer, batch)
    unpack(trainer.model)
    _, theirs = loss_and_gradients(trainer, batch)
    assert relative_error(ours, theirs) < 1e-5
