"""Options of ``TrainingArguments`` that change how a step is computed: what is computed stays the same."""

from __future__ import annotations

import pytest
import torch
from games import Gradients, make_trainer, relative_error
from ppo_games import make_ppo
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from agile_trainers.embedded import make_embedded_model

MAKERS = {"grpo": make_trainer, "ppo": make_ppo}
WITH_GRADIENTS_OF = {
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
"""The graphs are captured; compiling them to machine code takes minutes here."""


def gradients(algorithm: str, model, output, **changes) -> dict[str, torch.Tensor]:
    """Of the first step."""
    kept = Gradients()
    MAKERS[algorithm](model, output, callbacks=[kept], **changes).train()
    return {name.replace("_orig_mod.", ""): value.float() for name, value in kept.steps[0].items()}


@pytest.fixture(scope="module")
def plain(embedded_model, tmp_path_factory):
    return {name: gradients(name, embedded_model, tmp_path_factory.mktemp("plain")) for name in MAKERS}


@pytest.mark.parametrize("option", WITH_GRADIENTS_OF)
@pytest.mark.parametrize("algorithm", MAKERS)
def test_the_gradient_is_that_of_a_plain_step(plain, embedded_model, tmp_path, algorithm, option):
    found = gradients(algorithm, embedded_model, tmp_path, **WITH_GRADIENTS_OF[option])
    assert relative_error(found, plain[algorithm]) == 0.0


# Capturing graphs takes seconds; PPO's are those of the policy, and its critic's.
@pytest.mark.parametrize("algorithm", [pytest.param("grpo", marks=pytest.mark.slow), "ppo"])
def test_the_gradient_of_a_compiled_step_is_that_of_a_plain_one(tmp_path, algorithm):
    """With a model of one layer: the graph of each is captured."""
    model = make_embedded_model(tmp_path / "model", num_layers=1)
    plain, compiled = (gradients(algorithm, model, tmp_path, **changes) for changes in ({}, COMPILED))
    assert relative_error(compiled, plain) <= 1e-5


@pytest.mark.parametrize("algorithm", MAKERS)
def test_a_step_in_bf16(embedded_model, tmp_path, algorithm):
    """On the same episodes: in bf16 other tokens may be sampled, which depends on the processor."""
    kept, batches = Gradients(), []
    for bf16 in (False, True):
        trainer = MAKERS[algorithm](embedded_model, tmp_path / str(bf16), callbacks=[kept], bf16=bf16)
        play = trainer._generate_and_score_completions

        def batch(rows, play=play):
            batches.append(batches[0] if batches else play(rows))
            return dict(batches[0])

        trainer._generate_and_score_completions = batch
        trainer.train()
    assert len(batches) == 2
    error = relative_error(*reversed(kept.steps))
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("algorithm", MAKERS)
def test_a_base_in_bf16(embedded_model, tmp_path, algorithm):
    trainer = MAKERS[algorithm](
        embedded_model, tmp_path, bf16=True, model_init_kwargs={"dtype": "bfloat16"}, learning_rate=1.0, max_steps=2
    )
    dtypes = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "base_layer" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(after[name].isfinite().all() for name in before)
    assert any(not torch.equal(after[name], value) for name, value in before.items() if ".default." in name)


def test_a_rollout_uses_the_model_that_is_not_compiled(embedded_model, tmp_path):
    """A compiled one would be compiled again for every length of the cache."""
    trainer = make_trainer(embedded_model, tmp_path)
    trainer.model_wrapped = torch.compile(trainer.model, backend="eager")
    with trainer.sampler.generator() as generator:
        assert generator.model is trainer.model


@pytest.mark.slow
def test_a_compiled_run_is_saved_as_any_other(embedded_model, tmp_path):
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "lora": False}
    whole = make_trainer(embedded_model, tmp_path / "whole", **changes, **COMPILED)
    whole.train()
    resumed = make_trainer(embedded_model, tmp_path / "resumed", **changes, **COMPILED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-2").state_dict()
    weights = whole.accelerator.unwrap_model(resumed.model, keep_torch_compile=False).state_dict()
    for name, value in saved.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0)


def test_liger_layers_are_refused_without_a_gpu(embedded_model, tmp_path):
    with pytest.raises(ValueError, match="use_liger_kernel=True needs a GPU"):
        make_trainer(embedded_model, tmp_path, use_liger_kernel=True)


@pytest.mark.parametrize("algorithm", MAKERS)
def test_every_forward_pass_is_padded_to_a_multiple(plain, embedded_model, tmp_path, algorithm, monkeypatch):
    """Of the policy, the reference, the critic; no gradient changes."""
    seen, score = [], GRPOTrainer._get_per_token_logps_and_entropies

    def watch(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        seen.append((input_ids.size(1) - logits_to_keep, logits_to_keep))
        return score(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", watch)
    options = {"pad_to_multiple_of": 16, "beta": 1e-9, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    changed = gradients(algorithm, embedded_model, tmp_path, **options, gradient_accumulation_steps=2)
    assert len(seen) > 2 and all(prompt % 16 == answer % 16 == 0 for prompt, answer in seen), seen
    assert len(set(seen)) > 1, "what is padding in a whole micro-batch is still dropped"
    assert relative_error(changed, plain[algorithm]) < 1e-5
