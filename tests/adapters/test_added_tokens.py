"""An adapter that was trained with added tokens gets a base with as many rows of embeddings, or an error that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.adapters.loading import find_adapters, load_frozen, load_policy
from agile_trainers.evaluation.policy import check_stored_rows, load_model, load_shapes

FORMS: dict[str, dict[str, Any]] = {
    "PEFT saves them": {},
    "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "trainable tokens": {"trainable_token_indices": {"embed_tokens": [-1]}},
    "targets": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


def adapter(model: Path, folder: Path, **settings: Any) -> torch.Tensor:
    """Save an adapter on a model with two more tokens, and its tokenizer; returns its logits."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<think>", "</think>"])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if "trainable_token_indices" in settings:
        settings = {"trainable_token_indices": {"embed_tokens": [len(tokenizer) - 1]}}
    policy = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **settings}))
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return logits(policy)


@torch.no_grad()
def logits(policy: Any) -> torch.Tensor:
    """On the last tokens, of which two were added."""
    return policy.eval()(input_ids=torch.arange(459, 479)[None]).logits


@pytest.fixture(scope="module")
def tied(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(embedded_model, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("tied")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_the_base_gets_the_rows_of_the_adapter(embedded_model: Path, tmp_path: Path, form: str) -> None:
    expected = adapter(embedded_model, tmp_path, **FORMS[form])
    saved = find_adapters(str(tmp_path))
    assert saved is not None
    policy = load_policy(saved)
    assert torch.equal(logits(policy), expected)
    policy.save_pretrained(tmp_path / "again")
    assert torch.equal(
        logits(load_model(str(tmp_path / "again"), AutoTokenizer.from_pretrained(tmp_path))[0]), expected
    )


def test_a_tied_head_gets_them_too(tied: Path, tmp_path: Path) -> None:
    expected = adapter(tied, tmp_path)
    assert torch.equal(logits(load_model(str(tmp_path))[0]), expected)


def test_rows_that_the_file_lacks_are_not_drawn(embedded_model: Path, tmp_path: Path) -> None:
    """Of targets alone PEFT saves the rows; those of the other end would be random, in each process others."""
    adapter(embedded_model, tmp_path, target_modules=["q_proj", "embed_tokens"])
    saved = find_adapters(str(tmp_path))
    assert saved is not None
    with pytest.raises(ValueError, match=r"trained with 479 rows of embeddings.*has 477: tokens were added.*merge it"):
        load_policy(saved)


@pytest.mark.parametrize("form", ["PEFT saves them", "trainable tokens"])
def test_a_teacher_with_added_tokens_is_named(embedded_model: Path, tmp_path: Path, form: str) -> None:
    adapter(embedded_model, tmp_path, **FORMS[form])
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(embedded_model), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has 477: tokens were added"):
        load_frozen(policy, "teacher", tmp_path)


def test_vllm_would_load_the_base_without_the_rows(embedded_model: Path, tmp_path: Path) -> None:
    adapter(embedded_model, tmp_path)
    check_stored_rows(load_shapes(str(embedded_model))[0])
    policy, _ = load_shapes(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"479 rows of embeddings.*has 477: tokens were added, which vLLM cannot serve"
    ):
        check_stored_rows(policy.get_base_model())
