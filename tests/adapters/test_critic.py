"""Policy and critic on one base, against the base with an adapter's product added to its weights by hand."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head, use_adapter

from agile_trainers.adapters.critic import add_critic, add_value_head
from agile_trainers.adapters.fused import fuse
from agile_trainers.adapters.roles import CRITIC, POLICY, unfreeze

SCALE = 2.0  # lora_alpha / r
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
POSITIONS = torch.tensor([[2, 5, 8], [4, 7, 9]])
CHECKPOINTING = [None, False, True]  # off, non-reentrant, reentrant


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture
def base(embedded_model):
    return AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)


@pytest.fixture
def model(base):
    """As TRL makes it, then the critic; all weights random, so that no gradient vanishes."""
    policy = get_peft_model(copy.deepcopy(base), LoraConfig(**LORA))
    add_fused_lm_head(policy.get_base_model(), outputs=("log_probs", "entropy"))
    add_critic(policy)
    policy.enable_input_require_grads()
    randomize(policy)
    return policy.train()


def randomize(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".default" in name or ".critic" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def inputs(base):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, base.config.vocab_size, (2, 10), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return ids, mask, labels


def merged(base, weights, adapter):
    """The base's parameters with one adapter's product added; ``weights`` are the leaves."""
    parameters = dict(base.named_parameters())
    prefix = "base_model.model."
    for name, a in weights.items():
        if f".lora_A.{adapter}." in name:
            target = name.removeprefix(prefix).replace(f".lora_A.{adapter}.weight", ".weight")
            parameters[target] = parameters[target] + SCALE * weights[name.replace("lora_A", "lora_B")] @ a
    return parameters


def reference(base, model):
    """Log-probs (2, 9) and values (2, 3) by hand, and the leaves they depend on."""
    ids, mask, labels = inputs(base)
    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
        if ".default" in name or ".critic" in name
    }
    with torch.enable_grad():
        logits = functional_call(
            base, merged(base, weights, POLICY), kwargs={"input_ids": ids, "attention_mask": mask}
        ).logits
        log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * (labels[:, 1:] != -100)
        hidden = functional_call(
            base,
            merged(base, weights, CRITIC),
            kwargs={"input_ids": ids, "attention_mask": mask, "output_hidden_states": True},
        ).hidden_states[-1]
        head = {k: weights[f"base_model.model.value_head.modules_to_save.critic.{k}"] for k in ("weight", "bias")}
        rows = torch.stack([hidden[i, POSITIONS[i]] for i in range(2)])
        values = (rows @ head["weight"].T)[..., 0] + head["bias"]
    return log_probs, values, weights


def loss_of(log_probs, values, parts):
    """Any scalar that every entry enters with a weight of its own."""
    loss = torch.zeros(())
    if "policy" in parts:
        loss = loss + (log_probs * torch.linspace(-1, 2, log_probs.numel()).view_as(log_probs)).sum()
    if "critic" in parts:
        loss = loss + (values**2 * torch.linspace(1, 2, values.numel()).view_as(values)).sum()
    return loss


def relative_error(left, right):
    distance = sum(((left[name] - right[name]) ** 2).sum() for name in right)
    return float((distance / sum((value**2).sum() for value in right.values())).sqrt())


def call(model, base, *, values=True, log_probs=True):
    ids, mask, labels = inputs(base)
    options = {"labels": labels, "fused_lm_head": True} if log_probs else {}
    return model(input_ids=ids, attention_mask=mask, value_positions=POSITIONS if values else None, **options)


@pytest.mark.parametrize("reentrant", CHECKPOINTING, ids=["stored", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("parts", [("policy",), ("critic",), ("policy", "critic")], ids="+".join)
def test_gradients_are_those_of_adapters_merged_by_hand(base, model, parts, reentrant):
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    log_probs, values, leaves = reference(base, model)
    loss_of(log_probs, values, parts).backward()
    expected = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    unfreeze(model, (POLICY, CRITIC))
    outputs = call(model, base)
    torch.testing.assert_close(outputs.log_probs, log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.state_values, values, rtol=1e-5, atol=1e-5)
    loss_of(outputs.log_probs, outputs.state_values, parts).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    touched = {name for name, gradient in gradients.items() if gradient.any()}
    assert touched == {name for name, gradient in expected.items() if gradient.any()}
    assert relative_error(gradients, expected) < 1e-5
    for part, adapter in (("policy", POLICY), ("critic", CRITIC)):
        assert any(f".{adapter}" in name for name in touched) == (part in parts)


def test_values_alone_and_log_probs_alone_are_the_same_numbers(base, model):
    together = call(model, base)
    assert torch.equal(call(model, base, log_probs=False).state_values, together.state_values)
    assert torch.equal(call(model, base, values=False).log_probs, together.log_probs)


def test_a_call_without_positions_is_the_plain_policy(base, model):
    ids, mask, _ = inputs(base)
    parameters = merged(base, dict(model.named_parameters()), POLICY)
    expected = functional_call(base, parameters, kwargs={"input_ids": ids, "attention_mask": mask}).logits
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, expected, rtol=1e-5, atol=1e-5)


def test_values_are_read_at_the_positions_and_nowhere_else(base, model):
    """Tokens after a position do not move its value; the token at it does."""
    ids, mask, _ = inputs(base)
    before = call(model, base, log_probs=False).state_values
    for column in range(3):
        for row in range(2):
            position = int(POSITIONS[row, column])
            for shift, moves in ((0, True), (1, False)):
                if position + shift == ids.size(1):
                    continue
                changed = ids.clone()
                changed[row, position + shift :] = (changed[row, position + shift :] + 1) % base.config.vocab_size
                after = model(input_ids=changed, attention_mask=mask, value_positions=POSITIONS).state_values
                moved = (after[row, column] - before[row, column]).abs() > 1e-4
                assert bool(moved) is moves, (row, column, shift)


def test_a_reference_pass_freezes_the_critic_and_unfreezing_undoes_it(model):
    def trainable():
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    unfreeze(model, (POLICY, CRITIC))
    everything = trainable()
    assert any(".critic" in name for name in everything) and any(".default" in name for name in everything)
    with use_adapter(model, None):
        pass
    assert not any(".critic" in name for name in trainable()), "PEFT no longer freezes: unfreezing may be needless"
    unfreeze(model, (POLICY, CRITIC))
    assert trainable() == everything
    assert "base_model.model.value_head.original_module.weight" not in everything


def test_policy_loads_on_the_plain_base_and_the_critic_on_one_with_a_head(base, model, tmp_path):
    model.save_pretrained(tmp_path)
    ids, mask, _ = inputs(base)
    expected, values = model(input_ids=ids, attention_mask=mask).logits, call(model, base).state_values

    policy = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.equal(policy(input_ids=ids, attention_mask=mask).logits, expected)
    assert not hasattr(policy.get_base_model(), "value_head")

    add_value_head(base)
    critic = PeftModel.from_pretrained(base, tmp_path / "critic")
    hidden = critic.get_base_model().model(input_ids=ids, attention_mask=mask).last_hidden_state
    read = critic.get_base_model().value_head(torch.stack([hidden[i, POSITIONS[i]] for i in range(2)]))[..., 0]
    assert torch.equal(read, values)


def test_every_value_is_zero_at_first_and_the_seed_decides_the_adapter(base):
    adapters = []
    for seed in (0, 0, 1):
        policy = get_peft_model(copy.deepcopy(base), LoraConfig(**LORA))
        state = torch.get_rng_state()
        add_critic(policy, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        assert (call(policy, base, log_probs=False).state_values == 0).all()
        adapters.append({name: p for name, p in policy.named_parameters() if ".critic" in name})
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert not all(torch.equal(adapters[0][name], adapters[2][name]) for name in adapters[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_critic_has_the_dtype_of_the_policy(base, dtype):
    policy = get_peft_model(base.to(torch.bfloat16), LoraConfig(**LORA), autocast_adapter_dtype=dtype == torch.float32)
    add_critic(policy)
    assert {p.dtype for name, p in policy.named_parameters() if ".critic" in name} == {dtype}
    assert call(policy, base, log_probs=False).state_values.dtype == torch.float32


def test_only_an_adapter_that_leaves_the_base_alone_will_do(base):
    with pytest.raises(ValueError, match=r"bias='all'"):
        add_critic(get_peft_model(copy.deepcopy(base), LoraConfig(**LORA, bias="all")))
    with pytest.raises(ValueError, match=r"named 'default'"):
        add_critic(get_peft_model(copy.deepcopy(base), LoraConfig(**LORA), adapter_name="mine"))


# ------------------------------------------------------------------------------------------- a critic on the last layers


def top_model(base, layers=1, critic=True):
    """As ``model``, with a critic on the last layers; without one the policy has the same weights."""
    policy = get_peft_model(copy.deepcopy(base), LoraConfig(**LORA))
    add_fused_lm_head(policy.get_base_model(), outputs=("log_probs", "entropy"))
    randomize(policy)
    if critic:
        add_critic(policy, layers=layers)
        generator = torch.Generator().manual_seed(2)
        for name, parameter in policy.named_parameters():
            if ".critic" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    fuse(policy)
    policy.enable_input_require_grads()
    return policy.train()


def top_reference(base, model):
    """Values (2, 3) by hand: the policy's adapter below the last layer, without gradient, and the critic's in it."""
    ids, mask, _ = inputs(base)
    last = f".layers.{base.config.num_hidden_layers - 1}."
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if ".default" in n or ".critic" in n}
    leaves = {n: w.requires_grad_() for n, w in weights.items() if ".critic" in n}
    below = {n: w for n, w in weights.items() if ".default" in n and last not in n}
    parameters = merged(base, below, POLICY)
    parameters |= {n: p for n, p in merged(base, leaves, CRITIC).items() if last in f".{n}"}
    with torch.enable_grad():
        hidden = functional_call(
            base, parameters, kwargs={"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}
        ).hidden_states[-1]
        rows = torch.stack([hidden[i, POSITIONS[i]] for i in range(2)])
        head = {k: leaves[f"base_model.model.value_head.modules_to_save.critic.{k}"] for k in ("weight", "bias")}
        values = (rows @ head["weight"].T)[..., 0] + head["bias"]
    return values, leaves


@pytest.mark.parametrize("reentrant", CHECKPOINTING, ids=["stored", "non-reentrant", "reentrant"])
def test_a_critic_on_the_last_layer_reads_the_policys_hidden_states(base, reentrant):
    """Values and their gradient are those of weights merged by hand, and the policy's gradient is bitwise its own."""
    model, alone = top_model(base), top_model(base, critic=False)
    assert {n.split(".layers.")[1][0] for n, _ in model.named_parameters() if ".critic" in n and ".layers." in n} == {
        str(base.config.num_hidden_layers - 1)
    }
    if reentrant is not None:
        for each in (model, alone):
            each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    values, leaves = top_reference(base, model)
    loss_of(None, values, ("critic",)).backward()
    expected = {name: leaf.grad for name, leaf in leaves.items()}

    unfreeze(model, (POLICY, CRITIC))
    outputs = call(model, base)
    torch.testing.assert_close(outputs.state_values, values, rtol=1e-5, atol=1e-5)
    loss_of(outputs.log_probs, outputs.state_values, ("policy", "critic")).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error({n: gradients[n] for n in expected}, expected) < 1e-5
    loss_of(call(alone, base, values=False).log_probs, None, ("policy",)).backward()
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(gradients[name], parameter.grad), name


def test_values_of_the_last_layer_alone_are_the_same_numbers(base):
    model = top_model(base)
    together = call(model, base)
    with torch.no_grad():
        torch.testing.assert_close(call(model, base, log_probs=False).state_values, together.state_values)
    assert torch.equal(call(model, base, values=False).log_probs, together.log_probs)


def test_a_saved_critic_knows_its_layers(base, tmp_path):
    model = top_model(base)
    model.save_pretrained(tmp_path)
    saved = LoraConfig.from_pretrained(tmp_path / "critic")
    plain = LoraConfig.from_pretrained(tmp_path)

    def policy():
        return get_peft_model(copy.deepcopy(base), LoraConfig(**LORA))

    add_critic(policy(), config=saved, layers=1)
    with pytest.raises(ValueError, match="trained with critic_layers=1, and critic_layers is None"):
        add_critic(policy(), config=saved)
    with pytest.raises(ValueError, match="trained with all layers, and critic_layers is 1"):
        add_critic(policy(), config=plain, layers=1)


def test_layers_that_are_not_there_are_an_error(base):
    policy = get_peft_model(copy.deepcopy(base), LoraConfig(**LORA))
    with pytest.raises(ValueError, match=f"at most {base.config.num_hidden_layers}, .* got 9"):
        add_critic(policy, layers=9)
    below = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0]))
    with pytest.raises(ValueError, match="critic_layers=1: the policy's adapter has no weights in these layers"):
        add_critic(below, layers=1)
