"""Merging LoRA configurations: what differs is named, and the larger adapter computes the same function."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from agile_trainers.adapters.loading import find_adapters, load_policy
from agile_trainers.adapters.lora_settings import differing_settings, layers, merged_config

IDS = torch.arange(3, 43).view(2, 20)
SAVED = {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture
def base(embedded_model):
    return AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)


def save_adapter(base, folder, **config):
    """An adapter whose every weight matters; returns the folder and its logits, as PEFT computes them."""
    model = get_peft_model(base, LoraConfig(**{**SAVED, **config}))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    logits = logits_of(model)
    model.unload()
    assert (logits - logits_of(base)).abs().max() > 0.1
    return folder, logits


@torch.no_grad()
def logits_of(model):
    """In double precision: float32 would add noise of 2e-6 by the order of its sums alone."""
    return copy.deepcopy(model).double().eval()(input_ids=IDS).logits


def merge(folder, **wanted):
    return load_policy(find_adapters(str(folder)), peft_config=LoraConfig(**wanted), merge_lora_configs=True)


WANTED = {
    "rank 8 into 16": {**SAVED, "r": 16, "lora_alpha": 32},
    "rank 16 stays when 8 is asked for": {**SAVED, "r": 4, "lora_alpha": 4},
    "union of targets": {**SAVED, "target_modules": ["v_proj", "o_proj", "up_proj"]},
    "both": {"r": 16, "lora_alpha": 48, "target_modules": "all-linear"},
    "rank-stabilized": {**SAVED, "r": 16, "use_rslora": True},
    "patterns": {**SAVED, "r": 9, "rank_pattern": {"q_proj": 16}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}},
    "dropout": {**SAVED, "lora_dropout": 0.1},
    "gaussian": {"r": 16, "lora_alpha": 48, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 16, "lora_alpha": 48, "target_modules": "all-linear", "init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_the_merged_adapter_computes_the_same_function(base, tmp_path, wanted):
    folder, expected = save_adapter(base, tmp_path)
    model = merge(folder, **wanted)
    assert (logits_of(model) - expected).abs().max() <= 1e-6
    left, right, both = (
        layers(base, config) for config in (LoraConfig(**SAVED), LoraConfig(**wanted), model.peft_config["default"])
    )
    assert set(both) == {*left, *right}
    assert all(layer.rank >= max(side[n].rank for side in (left, right) if n in side) for n, layer in both.items())
    assert all(both[name].scaling == pytest.approx(wanted_scaling(wanted, name, both[name].rank)) for name in both)


def wanted_scaling(wanted, name, rank):
    """By LoRA's definition (alpha / r, or alpha / sqrt(r)), with the new stage's alpha."""
    alpha = next((a for key, a in wanted.get("alpha_pattern", {}).items() if name.endswith(key)), wanted["lora_alpha"])
    return alpha / (rank**0.5 if wanted.get("use_rslora") else rank)


def test_every_new_weight_can_learn(base, tmp_path):
    """A gradient reaches all columns of B: the rows of A that feed them are not zero."""
    folder, _ = save_adapter(base, tmp_path)
    model = merge(folder, r=16, lora_alpha=16, target_modules="all-linear").train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(gradients) == 14 and all((grad.abs().sum(0) > 0).all() for grad in gradients.values())


def test_a_merged_adapter_is_an_ordinary_one(base, tmp_path):
    folder, expected = save_adapter(base, tmp_path / "old")
    model = merge(folder, r=16, lora_alpha=32, target_modules="all-linear")
    model.save_pretrained(tmp_path / "new")
    model.unload()
    loaded = PeftModel.from_pretrained(base, tmp_path / "new")
    assert (logits_of(loaded) - expected).abs().max() <= 1e-6
    assert loaded.peft_config["default"].target_modules == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


@pytest.mark.parametrize(
    "extra", [{"use_dora": True}, {"lora_bias": True}, {"target_modules": ["embed_tokens", "q_proj"]}]
)
def test_other_kinds_of_lora(base, tmp_path, extra):
    config = {**SAVED, **extra}
    folder, expected = save_adapter(base, tmp_path, **extra)
    model = merge(folder, **{**config, "r": 16, "lora_alpha": 20})
    assert (logits_of(model) - expected).abs().max() <= 1e-6


def test_every_differing_field_is_named(base, tmp_path):
    folder, _ = save_adapter(base, tmp_path)
    wanted = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, use_rslora=True, target_modules=["v_proj", "o_proj"])
    with pytest.raises(ValueError) as error:
        load_policy(find_adapters(str(folder)), peft_config=wanted)
    for line in (
        "  r: 8 in the adapter, 16 in peft_config",
        "  lora_alpha: 12 in the adapter, 32 in peft_config",
        "  lora_dropout: 0.0 in the adapter, 0.1 in peft_config",
        "  use_rslora: False in the adapter, True in peft_config",
        "  target_modules: the adapter has q_proj module(s) of its own, peft_config o_proj module(s) of its own",
        "set merge_lora_configs=True",
    ):
        assert line in str(error.value)


def test_the_same_settings_said_otherwise_are_the_same(base):
    """A regular expression, a list, all-linear: what counts is which modules are chosen."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for target in (names, r".*\.(q|k|v|o|gate|up|down)_proj", "all-linear"):
        config = LoraConfig(r=8, target_modules=target, init_lora_weights="gaussian", task_type="CAUSAL_LM")
        assert (
            differing_settings(base, LoraConfig(r=8, target_modules="all-linear", exclude_modules=["lm_head"]), config)
            == {}
        )
    part = LoraConfig(r=8, target_modules=names, layers_to_transform=[1])
    own, _ = differing_settings(base, LoraConfig(r=8, target_modules="all-linear"), part)["target_modules"]
    assert len(own) == 7 and all(name.startswith("model.layers.0.") for name in own)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "eva", "corda", "lora_ga", "mica", False])
def test_an_initialization_that_would_change_the_function_is_refused(base, tmp_path, init):
    folder, _ = save_adapter(base, tmp_path)
    with pytest.raises(
        ValueError, match=f"init_lora_weights={init!r}, which would start.*Leave init_lora_weights unset"
    ):
        merge(folder, r=8, lora_alpha=12, target_modules=["q_proj", "o_proj"], init_lora_weights=init)


def test_what_cannot_be_merged(base):
    with pytest.raises(ValueError, match=r"must be made equal:\n  bias: 'none'.*'all'"):
        merged_config(base, LoraConfig(**SAVED), LoraConfig(**SAVED, bias="all"))
    with pytest.raises(ValueError, match="cannot pad an adapter with use_qalora"):
        odd = {**SAVED, "use_qalora": True, "qalora_group_size": 4}
        merged_config(base, LoraConfig(**odd), LoraConfig(**{**odd, "r": 16}))


def test_the_base_is_left_alone(base, embedded_model):
    before = {name: p.clone() for name, p in base.named_parameters()}
    layers(base, LoraConfig(r=8, target_modules="all-linear", init_lora_weights="pissa"))
    assert dict(base.named_parameters()).keys() == before.keys()
    assert all(torch.equal(before[name], p) for name, p in base.named_parameters())
