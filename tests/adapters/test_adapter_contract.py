"""What the adapters take for granted about PEFT, transformers and TRL; an upgrade that changes it fails here, by name."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def parameters(function) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_checkpointing_is_set_through_one_method_by_keyword(embedded_model):
    assert parameters(PreTrainedModel._set_gradient_checkpointing)[:3] == [
        "self",
        "enable",
        "gradient_checkpointing_func",
    ]
    model, given = AutoModelForCausalLM.from_pretrained(embedded_model), []
    model._set_gradient_checkpointing = lambda enable=True, **options: given.append(options)
    model.gradient_checkpointing_enable()
    assert [callable(options["gradient_checkpointing_func"]) for options in given] == [True]


def test_layers_choose_their_adapter_by_one_attribute():
    for layer in (BaseTunerLayer, AuxiliaryTrainingWrapper):
        assert "self._active_adapter" in inspect.getsource(layer.active_adapter.fget)
    assert "self._adapters" in inspect.getsource(AuxiliaryTrainingWrapper.forward)


def test_the_fused_head_returns_what_the_loss_reads():
    assert {"log_probs", "entropy", "aux_loss"} <= set(FusedCausalLMOutput.__dataclass_fields__)
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "model(**model_inputs, labels=labels, fused_lm_head=True)" in source
