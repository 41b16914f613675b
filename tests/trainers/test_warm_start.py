"""Continuing adapters of a folder: policy, reference and critic, ours and AgileRL's, and every way a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from games import Chatter, settings
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import use_adapter

from agile_trainers import trainers as package
from agile_trainers.adapters.critic import add_critic
from agile_trainers.adapters.loading import find_adapters
from agile_trainers.adapters.roles import CRITIC, POLICY, REFERENCE

IDS = torch.arange(3, 43).view(2, 20)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@torch.no_grad()
def logits_of(model, adapter=POLICY):
    with use_adapter(model, adapter_name=adapter):
        return model.eval()(input_ids=IDS).logits


@torch.no_grad()
def values_of(model):
    return model.eval()(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), value_positions=IDS[:, :8] % 20
    ).state_values


def load_base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def run(embedded_model, tmp_path_factory):
    """What a PPO run with a reference leaves behind, with random weights; its logits and values."""
    folder = tmp_path_factory.mktemp("run")
    model = get_peft_model(load_base(embedded_model), LoraConfig(**LORA))
    model.add_adapter(REFERENCE, LoraConfig(**LORA))
    add_critic(model)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if any(f".{adapter}." in name for adapter in (POLICY, REFERENCE, CRITIC)):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder, {
        "policy": logits_of(model),
        "reference": logits_of(model, REFERENCE),
        "base": logits_of(model, None),
        "values": values_of(model),
    }


def agilerl_copy(run, folder, embedded_model, *, head=True):
    """AgileRL's layout by hand: `actor`, `reference` and `critic` side by side, the head outside, Python objects beside."""
    names = {"": "actor", REFERENCE: "reference", CRITIC: "critic"}
    for ours, theirs in names.items():
        (folder / theirs).mkdir(parents=True)
        shutil.copy(run / ours / "adapter_config.json", folder / theirs)
        weights = load_file(run / ours / "adapter_model.safetensors")
        lora = {name: weight for name, weight in weights.items() if "lora_" in name}
        save_file(lora, folder / theirs / "adapter_model.safetensors", metadata={"format": "pt"})
        if theirs == "critic":
            change_config(folder / theirs, modules_to_save=None)
            parts = {f"v_head.summary.{n.rpartition('.')[2]}": w for n, w in weights.items() if "value_head" in n}
            if head:
                save_file(parts, folder / "model.safetensors")
    (folder / "attributes.pt").write_bytes(b"a pickle of anything")
    (folder / "pytorch_model.bin").write_bytes(b"another")
    return folder


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def make(name, model, output_dir, *, peft_config=None, processing_class=None, **changes):
    groups = {} if name in ("PPO", "REINFORCE") else {"num_generations": 4}
    common = {k: v for k, v in settings(output_dir, **changes).items() if k != "num_generations"}
    trainer, config = (getattr(package, f"MultiTurn{name}{part}") for part in ("Trainer", "Config"))
    given = {"environment": Chatter, "peft_config": peft_config, "processing_class": processing_class}
    return trainer(model=model, args=config(**common, **groups), **given)


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "CISPO", "REINFORCE", "PPO"])
def test_the_policy_goes_on_and_its_copy_is_the_reference(run, tmp_path, name):
    folder, expected = run
    changes = {"epsilon_high": 5.0} if name == "CISPO" else {}
    trainer = make(name, folder, tmp_path, beta=0.1, **changes)
    assert torch.equal(logits_of(trainer.model), expected["policy"])
    assert torch.equal(logits_of(trainer.model, REFERENCE), expected["policy"])
    trainer.train()
    assert (logits_of(trainer.model) - expected["policy"]).abs().max() > 1e-4
    assert torch.equal(logits_of(trainer.model, REFERENCE), expected["policy"])
    assert torch.equal(logits_of(trainer.model, None), expected["base"])
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl == [pytest.approx(0, abs=1e-9)]


def test_the_reference_has_the_policys_embeddings_too(embedded_model, tmp_path):
    model = get_peft_model(load_base(embedded_model), LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(tmp_path / "old", save_embedding_layers=False)
    trainer = make("GRPO", tmp_path / "old", tmp_path / "new", beta=0.1)
    assert torch.equal(logits_of(trainer.model), logits_of(model))
    assert torch.equal(logits_of(trainer.model, REFERENCE), logits_of(model))


def test_only_the_policy_is_trained_and_without_beta_there_is_no_reference(run, tmp_path):
    trainer = make("GRPO", run[0], tmp_path)
    assert list(trainer.model.peft_config) == [POLICY]
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in trainer.model.named_parameters() if f".{POLICY}." in name}


def test_settings_are_the_new_stages(run, tmp_path):
    """An optimizer and a configuration in the folder play no part."""
    folder = tmp_path / "old"
    shutil.copytree(run[0], folder)
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
        (folder / name).write_bytes(b"never read")
    trainer = make("GRPO", folder, tmp_path / "new", learning_rate=0.25, temperature=0.7)
    trainer.create_optimizer()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.25}
    assert not trainer.optimizer.state and trainer.temperature == 0.7


def test_the_saved_reference_is_kept_on_request(run, tmp_path):
    folder, expected = run
    trainer = make("GRPO", folder, tmp_path, beta=0.1, keep_reference=True)
    assert torch.equal(logits_of(trainer.model), expected["policy"])
    assert torch.equal(logits_of(trainer.model, REFERENCE), expected["reference"])
    trainer.train()
    assert torch.equal(logits_of(trainer.model, REFERENCE), expected["reference"])
    (kl,) = (entry["kl"] for entry in trainer.state.log_history if "kl" in entry)
    assert kl > 1e-3


def test_a_kept_reference_may_have_another_rank(run, tmp_path):
    folder, expected = run
    lora = LoraConfig(**{**LORA, "r": 8, "lora_alpha": 16})
    changes = {"beta": 0.1, "keep_reference": True, "merge_lora_configs": True, "peft_config": lora}
    trainer = make("GRPO", folder, tmp_path, **changes)
    assert (logits_of(trainer.model) - expected["policy"]).abs().max() <= 1e-5
    assert torch.equal(logits_of(trainer.model, REFERENCE), expected["reference"])
    trainer.train()


def test_the_critic_starts_from_the_folder(run, tmp_path):
    """A PPO run goes on as one; by default."""
    trainer = make("PPO", run[0], tmp_path)
    assert torch.equal(values_of(trainer.model), run[1]["values"])
    assert torch.equal(logits_of(trainer.model), run[1]["policy"])
    trainer.train()
    assert (values_of(trainer.model) - run[1]["values"]).abs().max() > 1e-4


def test_the_critic_starts_from_the_policy(run, tmp_path):
    model = make("PPO", run[0], tmp_path, critic_start="policy").model
    weights = dict(model.named_parameters())
    pairs = [(w, weights[n.replace(f".{POLICY}.", f".{CRITIC}.")]) for n, w in weights.items() if f".{POLICY}." in n]
    assert len(pairs) == 28 and all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(values_of(model), torch.zeros(2, 8))


def test_a_second_trainer_of_one_model_has_its_critic(embedded_model, tmp_path):
    model = get_peft_model(load_base(embedded_model), LoraConfig(**LORA))
    again = {"processing_class": AutoTokenizer.from_pretrained(embedded_model)}
    make("PPO", model, tmp_path, **again)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if f".{CRITIC}." in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    values = values_of(model)
    for start in ("auto", "saved"):
        second = make("PPO", model, tmp_path, critic_start=start, **again)
        assert torch.equal(values_of(model), values) and values.any()
    second.train()
    assert not torch.equal(values_of(model), values)
    with pytest.raises(ValueError, match=r"with all layers, and critic_layers is 1.*critic_start='new'"):
        make("PPO", model, tmp_path, critic_layers=1, **again)
    make("PPO", model, tmp_path, critic_start="new", critic_layers=1, **again)
    assert not values_of(model).any()


def test_the_critic_starts_anew(run, tmp_path):
    model = make("PPO", run[0], tmp_path, critic_start="new").model
    b = [weight for name, weight in model.named_parameters() if f"lora_B.{CRITIC}." in name]
    assert len(b) == 14 and not any(weight.any() for weight in b)


def test_an_agilerl_folder(run, embedded_model, tmp_path):
    folder = agilerl_copy(run[0], tmp_path / "theirs", embedded_model)
    trainer = make("PPO", folder, tmp_path / "ours", beta=0.1, keep_reference=True)
    assert torch.equal(logits_of(trainer.model), run[1]["policy"])
    assert torch.equal(logits_of(trainer.model, REFERENCE), run[1]["reference"])
    assert torch.equal(values_of(trainer.model), run[1]["values"])
    trainer.train()
    trainer.save_model()
    policy = PeftModel.from_pretrained(load_base(embedded_model), tmp_path / "ours")
    assert torch.equal(logits_of(policy), logits_of(trainer.model))


def test_agilerls_value_head_is_not_read_from_a_pickle(run, embedded_model, tmp_path, caplog):
    folder = agilerl_copy(run[0], tmp_path / "theirs", embedded_model, head=False)
    model = make("PPO", folder, tmp_path / "ours").model
    assert "the head starts at zero" in caplog.text
    assert torch.equal(values_of(model), torch.zeros(2, 8))
    saved = load_file(folder / "critic" / "adapter_model.safetensors")
    name = next(name for name in saved if "lora_B" in name)
    assert torch.equal(dict(model.named_parameters())[name.replace("lora_B.", f"lora_B.{CRITIC}.")], saved[name])


def test_the_tokenizer_beside_the_adapter_is_used(run, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(run[0], folder)
    tokenizer = make("GRPO", run[0], tmp_path / "a").processing_class
    tokenizer.chat_template = tokenizer.chat_template + "{# of the earlier stage #}"
    tokenizer.save_pretrained(folder)
    assert "of the earlier stage" in make("GRPO", folder, tmp_path / "b").processing_class.chat_template


def test_without_an_environment_too(run, tmp_path):
    from datasets import Dataset

    trainer = package.MultiTurnGRPOTrainer(
        model=str(run[0]),
        args=package.MultiTurnGRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8, beta=0.1
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["hello"] * 8}),
    )
    assert torch.equal(logits_of(trainer.model), run[1]["policy"])
    assert torch.equal(logits_of(trainer.model, REFERENCE), run[1]["policy"])


def test_a_hub_repository(run, tmp_path, monkeypatch, embedded_model):
    """As the Hub's cache holds it: found by its id, with the commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--agent"
    shutil.copytree(run[0], repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    saved = find_adapters("someone/agent")
    assert saved is not None and saved.commit == commit
    assert saved.folders.keys() == {POLICY, REFERENCE, CRITIC}
    assert find_adapters("someone/else") is None


def damage(folder, what):
    weights = folder / "adapter_model.safetensors"
    if what == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "noise":
        weights.write_bytes(b"noise")
    elif what == "pickle":
        torch.save(load_file(weights), folder / "adapter_model.bin")
        weights.unlink()
    elif what == "no weights":
        weights.unlink()
    elif what == "less":
        save_file(dict(list(load_file(weights).items())[1:]), weights)
    elif what == "more":
        save_file({**load_file(weights), "base_model.model.model.layers.7.lora_A.weight": torch.zeros(1)}, weights)
    elif what == "shape":
        change_config(folder, r=5)
    elif what == "json":
        (folder / "adapter_config.json").write_text("{")
    elif what == "foreign":
        change_config(folder, peft_type="IA3")
    elif what == "pissa":
        change_config(folder, init_lora_weights="pissa_niter_4")
    elif what == "nameless":
        change_config(folder, base_model_name_or_path=None)
    elif what == "base gone":
        change_config(folder, base_model_name_or_path="somewhere/else")
    elif what == "moved":
        shutil.copytree(folder, folder / "checkpoint-3")
        (folder / "adapter_config.json").unlink()
    elif what == "critic":
        (folder / CRITIC / "adapter_model.safetensors").write_bytes(b"noise")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut off", "adapter_model.safetensors is damaged or incomplete"),
        ("noise", "adapter_model.safetensors is damaged or incomplete"),
        ("pickle", "adapter_model.bin, a pickle, which can run code"),
        ("no weights", "has adapter_config.json but no adapter_model.safetensors"),
        ("less", "does not fit the model .* is missing"),
        ("more", "layers.7.lora_A.*not in the model"),
        ("shape", r"does not fit the model .*size mismatch.*\[4, 64\].*\[5, 64\].*and 25 more"),
        ("json", "adapter_config.json is not a PEFT configuration: JSONDecodeError"),
        ("foreign", "holds a IA3 adapter; only LORA"),
        ("pissa", "init_lora_weights='pissa_niter_4'"),
        ("nameless", "does not name its base model"),
        ("base gone", "was trained on 'somewhere/else' .* which cannot be loaded"),
        ("moved", "neither an adapter .* nor a model .*subfolders: checkpoint-3, critic, ref"),
        ("critic", "critic/adapter_model.safetensors is damaged"),
    ],
)
def test_a_folder_that_is_wrong_is_an_error_that_says_so(run, tmp_path, monkeypatch, what, message):
    folder = tmp_path / "broken"
    shutil.copytree(run[0], folder)
    damage(folder, what)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(torch, "load", None)  # whoever unpickles fails
    with pytest.raises(ValueError, match=message):
        make("PPO", folder, tmp_path / "out")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_reference": True}, "keep_reference=True.*beta=0.0"),
        ({"merge_lora_configs": True}, "merges `peft_config` with the adapter"),
        ({"peft_config": LoraConfig(**{**LORA, "r": 8})}, "  r: 4 in the adapter, 8 in peft_config"),
    ],
)
def test_options_that_cannot_act_are_refused(run, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make("GRPO", run[0], tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("GRPO", {"keep_reference": True, "beta": 0.1}, "keep_reference=True needs a `model`"),
        ("GRPO", {"merge_lora_configs": True}, "merges `peft_config` with the adapter"),
        ("PPO", {"critic_start": "saved"}, "critic_start='saved'.*folder"),
        ("PPO", {"critic_start": "old"}, "'auto', 'new', 'policy', 'saved', got 'old'"),
    ],
)
def test_options_that_need_an_adapter_are_refused_without(embedded_model, tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        make(name, embedded_model, tmp_path, peft_config=LoraConfig(**LORA), **changes)


def test_the_same_settings_again_change_nothing(run, tmp_path):
    model = make("GRPO", run[0], tmp_path, peft_config=LoraConfig(**LORA)).model
    assert torch.equal(logits_of(model), run[1]["policy"])
