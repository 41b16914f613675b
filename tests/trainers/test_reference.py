"""The reference: an adapter of its own, moved to the policy when told to, and still there after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpointed_runs import assert_same, run_until, weights
from games import draw_batch, loss_and_gradients, make_trainer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from agile_trainers.adapters.copies import copy_adapter
from agile_trainers.adapters.roles import POLICY, REFERENCE

KINDS = {"lora": {"lora": True, "reference_adapter": True}, "full": {"lora": False}}
MOVES = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
"""Copies the policy after each step."""


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def policy_and_reference(trainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights by name, copied."""
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    if trainer.ref_model is not None:
        return weights, {name: p.detach().clone() for name, p in trainer.ref_model.named_parameters()}
    policy = {name: p for name, p in weights.items() if f".{POLICY}." in name}
    return policy, {name: weights[name.replace(f".{POLICY}.", f".{REFERENCE}.")] for name in policy}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    assert left.keys() == right.keys() and left
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_moves_when_told_to(embedded_model, tmp_path, kind):
    trainer = make_trainer(embedded_model, tmp_path, beta=0.1, max_steps=2, **KINDS[kind])
    start, reference = policy_and_reference(trainer)
    assert same(start, reference)
    trainer.train()
    policy, reference = policy_and_reference(trainer)
    assert same(reference, start) and not same(policy, start)
    trainer.update_reference()
    assert same(*policy_and_reference(trainer)) and same(policy_and_reference(trainer)[0], policy)


@pytest.mark.parametrize("kind", KINDS)
def test_every_so_many_steps(embedded_model, tmp_path, kind):
    """After step 2 of 3 the policy of then is the reference: the KL of step 3 is 0 again, that of step 2 was not."""
    trainer = make_trainer(
        embedded_model,
        tmp_path,
        beta=0.1,
        max_steps=3,
        learning_rate=1.0,
        **KINDS[kind],
        **MOVES | {"ref_model_sync_steps": 2},
    )
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[1] > 1e-6 and kl[2] == pytest.approx(0, abs=1e-9)
    assert not same(*policy_and_reference(trainer))


class Policies(TrainerCallback):
    """Keeps the policy after every step."""

    def __init__(self) -> None:
        self.trainer, self.steps = None, []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(policy_and_reference(self.trainer)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_may_be_a_moving_average(embedded_model, tmp_path, kind):
    """After each of two steps a quarter of the policy is added."""
    kept = Policies()
    trainer = kept.trainer = make_trainer(
        embedded_model, tmp_path, beta=0.1, max_steps=2, **MOVES | {"ref_model_mixup_alpha": 0.25}, learning_rate=1.0,
        callbacks=[kept], **KINDS[kind],
    )  # fmt: skip
    _, average = policy_and_reference(trainer)
    trainer.train()
    for policy in kept.steps:
        average = {name: 0.75 * value + 0.25 * policy[name] for name, value in average.items()}
    reference = policy_and_reference(trainer)[1]
    assert all(torch.allclose(reference[name], value, atol=1e-6) for name, value in average.items())
    assert not same(reference, policy_and_reference(trainer)[0])


@pytest.mark.parametrize(("weight", "beta"), [(0.5, 0.0), (1.0, 0.0), (1.0, 0.1)])
def test_the_reference_may_teach(embedded_model, tmp_path, weight: float, beta: float):
    """It diverges by nothing at the start, and again after the update if that copies the policy whole."""
    trainer = make_trainer(
        embedded_model, tmp_path, beta=beta, reference_adapter=True, teacher="reference", max_steps=2, learning_rate=1.0,
        **MOVES | {"ref_model_mixup_alpha": weight},
    )  # fmt: skip
    trainer.train()
    first, second = (entry["teacher/kl"] for entry in trainer.state.log_history if "teacher/kl" in entry)
    assert first == pytest.approx(0, abs=1e-6)
    assert second == pytest.approx(0, abs=1e-6) if weight == 1.0 else abs(second) > 1e-4
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / REFERENCE / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_moving_average_that_teaches_survives_a_kill(embedded_model, tmp_path):
    changes = {
        "beta": 0.0, "teacher": "reference", "reference_adapter": True, **MOVES, "ref_model_mixup_alpha": 0.1,
    }  # fmt: skip
    whole = run_until(99, "grpo", embedded_model, tmp_path / "whole", **changes)
    run_until(3, "grpo", embedded_model, tmp_path / "killed", **changes)
    assert_same(
        weights(run_until(99, "grpo", embedded_model, tmp_path / "killed", resume=True, **changes)), weights(whole)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_reference_survives_a_resume(embedded_model, tmp_path, kind):
    changes = {"beta": 0.1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0, **KINDS[kind], **MOVES}
    first = make_trainer(embedded_model, tmp_path / "a", max_steps=1, **changes)
    first.train()
    policy, reference = policy_and_reference(first)
    assert same(policy, reference)
    resumed = make_trainer(embedded_model, tmp_path / "a", max_steps=1, **changes)
    assert not same(policy_and_reference(resumed)[1], reference)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert same(policy_and_reference(resumed)[0], policy) and same(policy_and_reference(resumed)[1], reference)


def in_memory(folder, change=0.02):
    """The model of a folder, changed after it was loaded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + change)
    return model


def test_the_reference_of_a_model_that_was_changed_in_memory(embedded_model, tmp_path):
    """It is the model that was passed, not its files, and a resumed run has it whatever model it was given."""
    changes = {"beta": 0.1, "lora": False, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0}
    model = in_memory(embedded_model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(model, tmp_path, **changes)
    assert same(policy_and_reference(trainer)[1], start)
    trainer.train()
    assert same(policy_and_reference(trainer)[1], start) and not same(policy_and_reference(trainer)[0], start)
    resumed = make_trainer(embedded_model, tmp_path, **changes)
    assert not same(policy_and_reference(resumed)[1], start)
    resumed.train(resume_from_checkpoint=True)
    assert same(policy_and_reference(resumed)[1], start)


def test_a_model_as_in_its_files_leaves_no_reference_in_a_checkpoint(embedded_model, tmp_path):
    changes = {"beta": 0.1, "lora": False, "save_strategy": "steps", "save_steps": 1}
    make_trainer(in_memory(embedded_model, change=0.0), tmp_path, **changes).train()
    assert (tmp_path / "checkpoint-1").is_dir() and not (tmp_path / "checkpoint-1" / REFERENCE).exists()


def test_another_model_than_the_files_that_were_the_reference_is_not_resumed_with(embedded_model, tmp_path):
    """And an earlier trainer's model may be trained on."""
    options = {"beta": 0.1, "lora": False, "save_strategy": "steps", "save_steps": 1}
    first = make_trainer(AutoModelForCausalLM.from_pretrained(embedded_model), tmp_path, max_steps=1, **options)
    first.train()
    second = make_trainer(first.model, tmp_path, max_steps=2, **options)
    with pytest.raises(ValueError, match="holds other weights"):
        second.train(resume_from_checkpoint=True)
    on = make_trainer(first.model, tmp_path / "on", max_steps=1, **options)
    on.train()
    assert on.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_reference_that_a_model_holds_already_is_replaced(embedded_model, tmp_path, beta):
    """As TRL's DPO leaves it, and an earlier trainer of ours."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(embedded_model), LoraConfig(r=2, init_lora_weights=False)
    )
    model.add_adapter(REFERENCE, LoraConfig(r=2, init_lora_weights=False))
    trainer = make_trainer(model, tmp_path, lora=False, beta=beta)
    assert set(trainer.model.peft_config) == {POLICY, REFERENCE}  # without one it stays an earlier trainer's
    assert not beta or same(*policy_and_reference(trainer))


def test_a_model_whose_reference_cannot_be_loaded_is_refused(embedded_model, tmp_path):
    other, nameless = in_memory(embedded_model), in_memory(embedded_model)
    other.resize_token_embeddings(other.config.vocab_size + 8)
    with pytest.raises(ValueError, match=r"(?s)has other parameters than these: .*embed_tokens.*save_pretrained"):
        make_trainer(other, tmp_path, beta=0.1, lora=False)
    nameless.config._name_or_path = ""
    with pytest.raises(ValueError, match=r"names none.*save_pretrained"):
        make_trainer(nameless, tmp_path, beta=0.1, lora=False)


def test_only_the_policy_is_trained(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, beta=0.1, reference_adapter=True)
    batch = draw_batch(trainer)
    assert "ref_per_token_logps" in batch
    _, gradients = loss_and_gradients(trainer, batch)
    assert gradients and all(f".{POLICY}." in name for name in gradients)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all(f".{POLICY}." in name for name in trained)


def test_the_adapter_is_saved_beside_the_policy(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, beta=0.1, reference_adapter=True)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "saved" / REFERENCE / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"beta": 0.1, "sync_ref_model": True}, "Set reference_adapter=True"),
        ({"beta": 0.1, "reference_adapter": True, "lora": False}, "Pass `peft_config`"),
        ({"reference_adapter": True}, "no effect with beta=0.0"),
        ({"sync_ref_model": True}, "no effect with beta=0.0"),
        ({"beta": 0.1, "reference_adapter": True, "ref_model_mixup_alpha": 0.5}, "acts with sync_ref_model=True only"),
        ({"beta": 0.1, "lora": False, "sync_ref_model": True, "ref_model_mixup_alpha": 0.0}, "positive"),
        ({"beta": 0.1, "lora": False, "sync_ref_model": True, "ref_model_mixup_alpha": 1.5}, "1.5"),
        ({"teacher": "reference"}, "Set reference_adapter=True"),
        (
            {"beta": 0.1, "reference_adapter": True, "sync_ref_model": True, "ref_model_sync_steps": 0},
            "at least 1, got 0",
        ),
        ({"kl_placement": "reward"}, "no effect with beta=0.0"),
        ({"beta": 0.1, "kl_placement": "rewards"}, "'loss', 'reward', 'advantage', got 'rewards'"),
        ({"activation_offload": True}, "no effect on CPU"),
        ({"lora_target_scope": "model.layers.1", "lora": False}, "needs a LoraConfig as peft_config, got NoneType"),
        ({"advantage_granularity": "anchor"}, r"the environment does not name it: the info of reset\(\) is {}"),
        (
            {"turn_credit": "reward", "advantage_granularity": "trajectory"},
            "acts with advantage_granularity='turn' or .*='anchor' only",
        ),
        ({"turn_advantage_trajectory_fallback": True, "advantage_granularity": "trajectory"}, "='turn' only"),
        ({"turn_advantage_trajectory_fallback": True, "turn_credit": "reward"}, "turn_credit='return' only"),
    ],
)
def test_what_cannot_be_is_refused(embedded_model, tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        make_trainer(embedded_model, tmp_path, **changes)


def test_update_reference_says_why_it_cannot(embedded_model, tmp_path):
    with pytest.raises(ValueError, match="beta is 0"):
        make_trainer(embedded_model, tmp_path).update_reference()
    with pytest.raises(ValueError, match="reference_adapter=True"):
        make_trainer(embedded_model, tmp_path, beta=0.1).update_reference()


def test_adapters_of_another_shape_are_not_copied(embedded_model, tmp_path):
    model = make_trainer(embedded_model, tmp_path).model
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(
        ValueError, match=r"cannot take the weights of 'default'.*is \(4, 64\) there and \(2, 64\) here"
    ):
        copy_adapter(model, POLICY, "other")


def test_lora_target_scope(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, lora_target_scope="layers.1")
    adapted = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert adapted and all(".layers.1." in name for name in adapted)
    everywhere = [n for n, p in make_trainer(embedded_model, tmp_path).model.named_parameters() if p.requires_grad]
    assert len(everywhere) == 2 * len(adapted)


def test_a_scope_that_does_not_exist(embedded_model, tmp_path):
    with pytest.raises(ValueError, match="lora_target_scope='vision_tower'"):
        make_trainer(embedded_model, tmp_path, lora_target_scope="vision_tower")


# ---------------------------------------------------------------------------------------------------- adapters by name


@torch.no_grad()
def logits_of(trainer) -> torch.Tensor:
    return trainer.model(input_ids=torch.arange(3, 23)[None]).logits


def test_adapters_are_used_by_name(embedded_model, tmp_path):
    """Each computes what PEFT computes with it, episodes too, and everything is as before after the block."""
    trainer = make_trainer(
        embedded_model, tmp_path, beta=0.1, reference_adapter=True, num_eval_episodes=4, max_steps=1, learning_rate=1.0
    )
    trainer.train()
    model, policy, trainable = trainer.model, logits_of(trainer), [p.requires_grad for p in trainer.model.parameters()]
    played = trainer.rollout(generation=0)
    model.set_adapter(REFERENCE)
    reference, by_reference = logits_of(trainer), trainer.rollout(generation=0)
    model.set_adapter(POLICY)
    with model.disable_adapter():
        base = logits_of(trainer)
    assert not torch.allclose(policy, reference)
    with trainer.use_adapter(REFERENCE):
        assert torch.equal(logits_of(trainer), reference)
        assert trainer.rollout(generation=0) == by_reference != played
        with trainer.use_adapter(None):
            assert torch.equal(logits_of(trainer), base)
        with trainer.use_adapter(POLICY):
            assert torch.equal(logits_of(trainer), policy)
        assert torch.equal(logits_of(trainer), reference)
        assert "reference_return" in trainer.evaluate(metric_key_prefix="reference")
        for train in (trainer.train, lambda: trainer.update(played)):
            with pytest.raises(RuntimeError, match=r"inside use_adapter.'ref'"):
                train()
    assert torch.equal(logits_of(trainer), policy) and trainer.rollout(generation=0) == played
    assert [p.requires_grad for p in model.parameters()] == trainable
    with pytest.raises(ZeroDivisionError), trainer.use_adapter(REFERENCE):
        _ = 1 / 0
    assert torch.equal(logits_of(trainer), policy)


def test_an_adapter_that_is_not_there_is_named(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path)
    with (
        pytest.raises(ValueError, match=r"no adapter 'ref': the model has 'default'.*reference_adapter=True"),
        trainer.use_adapter("ref"),
    ):
        pass
    whole = make_trainer(embedded_model, tmp_path / "whole", lora=False)
    with pytest.raises(ValueError, match="no adapter None: the model has none"), whole.use_adapter(None):
        pass
    trainer.use_vllm = True
    with pytest.raises(ValueError, match="vLLM samples with the policy"), trainer.use_adapter(None):
        pass
