"""What vLLM cannot take is said before an engine is made; none is needed to say it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import naming
from games import make_trainer, settings
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from agile_trainers.config.rules import MACHINE, check_rules
from agile_trainers.rollout.generators.base import SamplingSettings
from agile_trainers.sampling.sampler import sampling_settings
from agile_trainers.sampling.started_server import gpus_of_server, server_command
from agile_trainers.sampling.vllm_checks import (
    base_source,
    check_base_unchanged,
    check_batch_invariant,
    check_server,
    check_slots,
    compute_dtype,
    lora_rank,
    quantization,
    server_urls,
)
from agile_trainers.trainers import MultiTurnGRPOConfig


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def config(tmp_path: Path, **changes: object) -> MultiTurnGRPOConfig:
    return MultiTurnGRPOConfig(**settings(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"vllm_mode": "remote"}, ["vllm_mode", "'remote'", "'colocate'"]),
        *(
            (
                {"vllm_mode": "server", name: value},
                [f"{name}={value!r}", "engine"],
            )
            for name, value in {
                "vllm_gpu_memory_utilization": 0.5,
                "vllm_model_impl": "transformers",
                "vllm_tensor_parallel_size": 2,
                "vllm_enable_sleep_mode": True,
                "offload_policy_during_rollout": True,
            }.items()
        ),
        ({"vllm_mode": "server", "vllm_max_model_length": 99}, ["vllm_max_model_length=99"]),
        (
            {"vllm_server_base_url": "http://localhost:8000"},
            ["vllm_server_base_url='http://localhost:8000'"],
        ),
        *(({"vllm_model_impl": name}, [f"vllm_model_impl={name!r}", "server"]) for name in ("transformers", "auto")),
        ({"vllm_server_port": 9}, ["vllm_server_port=9", "server"]),
        ({"vllm_group_port": 9}, ["vllm_group_port=9"]),
        ({"vllm_max_model_length": 99}, ["vllm_max_model_length=99", "max_model_length"]),
        ({"vllm_structured_outputs_regex": "a+"}, ["vllm_structured_outputs_regex='a+'"]),
        (
            {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_clip_max": 2.0},
            ["vllm_importance_sampling_clip_max=2.0", "vllm_importance_sampling_correction=False"],
        ),
        ({"loss_type": "vespo"}, ["vllm_importance_sampling_mode='token_truncate'", "'token_mask'"]),
    ],
)
def test_options_that_would_be_ignored(tmp_path: Path, changes: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ValueError, match=naming(*names)):
        config(tmp_path, use_vllm=True, **changes).with_environment()


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_gpu_memory_utilization": 0.5},
        {"offload_policy_during_rollout": True},
        {"vllm_server_port": 9},
    ],
)
def test_without_vllm_its_options_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} has no effect with use_vllm=False")):
        config(tmp_path, **changes).with_environment()


@pytest.mark.parametrize("changes", [{"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.1}])
def test_filters_whose_kept_tokens_vllm_does_not_return(tmp_path: Path, changes: dict[str, object]) -> None:
    """On a server they are not known; in this process, where top_k bounds them."""
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"{name}={value} removes tokens.*use_vllm=False"):
        config(tmp_path, use_vllm=True, vllm_mode="server", **changes).with_environment()
    assert config(tmp_path, **changes).with_environment()
    if name != "top_k":
        with pytest.raises(ValueError, match=f"{name}={value} removes tokens.*top_k=1000 beside {name}"):
            config(tmp_path, use_vllm=True, vllm_mode="colocate", **changes).with_environment()
    for known in ({"min_p": 0.0, "min_new_tokens": 2}, {"top_k": 50, "vllm_mode": "colocate", **changes}):
        assert config(tmp_path, use_vllm=True, **known).with_environment()


@pytest.mark.parametrize(
    ("changes", "corrects"),
    [
        ({}, False),
        ({"top_p": 0.9}, False),
        ({"repetition_penalty": 1.2}, True),
        ({"repetition_penalty": 1.2, "vllm_importance_sampling_correction": False}, False),
        ({"vllm_importance_sampling_correction": True}, True),
        ({"use_vllm": True}, True),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, False),
    ],
)
def test_what_is_corrected_for_by_default(tmp_path: Path, changes: dict[str, object], corrects: bool) -> None:
    args = config(tmp_path, **changes).with_environment()
    assert args.vllm_importance_sampling_correction == corrects
    assert args.vllm_importance_sampling_mode == ("turn_truncate" if corrects else None)
    assert args.with_environment() == args
    if "use_vllm" not in changes:  # TRL's own default
        trl = MultiTurnGRPOConfig(output_dir=str(tmp_path), bf16=False, **changes).without_environment()
        asked = changes.get("vllm_importance_sampling_correction", True)
        assert trl.vllm_importance_sampling_correction is asked


@pytest.mark.parametrize("name", ["mode", "clip_min", "clip_max"])
def test_how_to_correct_needs_a_correction(tmp_path: Path, name: str) -> None:
    changes = {f"vllm_importance_sampling_{name}": "token_mask" if name == "mode" else 0.5}
    with pytest.raises(ValueError, match=f"{name}=.* has no effect with vllm_importance_sampling_correction=False"):
        config(tmp_path, **changes).with_environment()
    config(tmp_path, vllm_importance_sampling_correction=True, **changes).with_environment()
    with pytest.raises(ValueError, match="loss_type='vespo'"):
        config(tmp_path, vllm_importance_sampling_correction=True, loss_type="vespo").with_environment()


SERVER = {
    "model_config": {
        "model": "org/base", "dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs", "max_model_len": 2048
    },
    "lora_config": {"max_lora_rank": 16},
    "weight_transfer_config": None,
    "parallel_config": {"data_parallel_size": 1},
}  # fmt: skip


def server_of(changes: dict[str, object], **policy: object) -> None:
    """Check a server that was started otherwise."""
    info = {**SERVER, "model_config": SERVER["model_config"] | {k: v for k, v in changes.items() if "config" not in k}}
    info |= {name: value for name, value in changes.items() if "config" in name}
    usual = {"model": "org/base", "dtype": torch.bfloat16, "rank": 12, "max_model_length": 2048}
    check_server(info, "http://host:1", **{**usual, **policy})


@pytest.mark.parametrize(
    ("changes", "reason", "option"),
    [
        ({"model": "org/other"}, "it serves org/other, and this trains org/base", "vllm serve org/base"),
        ({"dtype": "torch.float16"}, "it computes in torch.float16", "--dtype bfloat16"),
        (
            {"logprobs_mode": "raw_logprobs"},
            "its log-probabilities are raw_logprobs",
            "--logprobs-mode processed_logprobs",
        ),
        ({"max_model_len": 1024}, "its conversations end at 1024 tokens", "--max-model-len 2048"),
        ({"lora_config": None}, "it serves no adapters", "--enable-lora --max-lora-rank 16"),
        ({"lora_config": {"max_lora_rank": 8}}, "its adapters end at rank 8, before r=12", "--max-lora-rank 16"),
    ],
)
def test_servers_that_would_serve_another_policy(changes: dict[str, object], reason: str, option: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"would not serve this policy: {reason}")) as error:
        server_of(changes)
    assert option in str(error.value) and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(error.value)


def test_servers_that_would_serve_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_of({})
    server_of({"max_model_len": 4096})
    server_of({"max_model_len": 10}, max_model_length=None)
    with pytest.raises(ValueError, match="it takes no weights of a model that is trained whole") as error:
        server_of({"lora_config": None}, rank=None)
    assert "weight-transfer-config" in str(error.value) and "--enable-lora" not in str(error.value)
    server_of({"lora_config": None, "weight_transfer_config": {"backend": "nccl"}}, rank=None)
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    server_of({"model": str(tmp_path / "base")}, model="base/")
    with pytest.raises(ValueError, match=r"torch.float32.*raw_logprobs"):
        server_of({"dtype": "torch.float32", "logprobs_mode": "raw_logprobs"})


def test_modes(tmp_path: Path) -> None:
    assert config(tmp_path, use_vllm=True).with_environment().vllm_importance_sampling_mode == "turn_truncate"
    assert MultiTurnGRPOConfig(
        output_dir=str(tmp_path), bf16=False
    ).without_environment().vllm_importance_sampling_mode == ("sequence_mask")
    once = config(tmp_path).with_environment()
    assert once.with_environment() == once  # a trainer's `args` will do for another
    with pytest.raises(ValueError, match=r"vllm_importance_sampling_mode.*'token_truncate'"):
        config(tmp_path, vllm_importance_sampling_mode="word_mask")
    turn = MultiTurnGRPOConfig(output_dir=str(tmp_path), bf16=False, vllm_importance_sampling_mode="turn_mask")
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode='turn_mask'"):
        turn.without_environment()


@pytest.mark.parametrize("name", ["vllm_enable_sleep_mode", "offload_policy_during_rollout"])
def test_what_frees_a_gpu_needs_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True needs a GPU and has no effect on CPU"):
        check_rules(config(tmp_path, use_vllm=True, **{name: True}).with_environment(), MACHINE)


def test_sharded_weights_are_not_moved_about() -> None:
    args = SimpleNamespace(
        vllm_enable_sleep_mode=False,
        offload_policy_during_rollout=True,
        parallelism_config=None,
        use_liger_kernel=False,
        activation_offload=False,
        fp16=False,
        mixed_precision="no",
        device=torch.device("cuda"),
        deepspeed="zero2.json",
        fsdp="",
    )
    with pytest.raises(ValueError, match=r"offload_policy_during_rollout=True.*DeepSpeed.*FSDP"):
        check_rules(args, MACHINE)


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (64, 64), (300, 320), (512, 512)])
def test_room_for_a_rank(rank: int, room: int) -> None:
    assert lora_rank(LoraConfig(r=rank, lora_alpha=3, use_rslora=True, target_modules="all-linear")) == room


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern={'q_proj': 4}"),
        ({"bias": "all"}, "bias='all'"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices=[3]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": 513}, "vLLM serves adapters of up to rank 512, got r=513"),
    ],
)
def test_adapters_that_vllm_would_serve_as_another(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        lora_rank(LoraConfig(**{"target_modules": "all-linear", **changes}))


def test_adapters_of_another_kind() -> None:
    with pytest.raises(ValueError, match=r"vLLM serves LoRA adapters, not \S*IA3"):
        lora_rank(IA3Config(target_modules=["q_proj"]))


def test_where_the_base_comes_from(embedded_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model)
    assert base_source(model) == str(embedded_model)
    assert base_source(get_peft_model(model, LoraConfig(target_modules="all-linear"))) == str(embedded_model)
    small = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 8, "vocab_size": 8, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match="this one was made in memory"):
        base_source(AutoModelForCausalLM.from_config(type(model.config)(**small)))


def test_a_base_that_is_not_that_of_its_files_is_refused(embedded_model: Path, tmp_path: Path) -> None:
    """vLLM would play the files."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    policy = get_peft_model(model.float(), LoraConfig(target_modules=["q_proj"]))
    check_base_unchanged(policy)  # rounded, but no other
    weight = model.model.layers[1].mlp.down_proj.weight
    for folder in (embedded_model, tmp_path / "shards"):
        model.config._name_or_path = str(folder)
        check_base_unchanged(policy)
        with torch.no_grad():
            weight[0, 0] += 0.01
        with pytest.raises(ValueError, match=r"holds other weights \(model.layers.1.mlp.down_proj.weight\)"):
            make_trainer(policy, tmp_path / "run", lora=False, use_vllm=True, stop_strings=None)
        with torch.no_grad():
            weight.copy_(AutoModelForCausalLM.from_pretrained(folder).model.layers[1].mlp.down_proj.weight)
        if folder == embedded_model:
            weight.data = weight.data.bfloat16().float()


def test_a_base_that_cannot_be_compared_is_taken(embedded_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model)
    with torch.no_grad():
        for weight in model.parameters():  # as transformers turns those of some models
            weight.copy_(weight.flip(0))
    check_base_unchanged(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    model.config.quantization_config = {"quant_method": "gptq"}
    check_base_unchanged(model)


def test_the_sampler_computes_in_what_the_trainer_computes_in(embedded_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    for bf16, fp16, dtype in (
        (False, False, torch.float32),
        (True, False, torch.bfloat16),
        (False, True, torch.float16),
    ):
        assert compute_dtype(SimpleNamespace(bf16=bf16, fp16=fp16), model) == dtype


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_bases(embedded_model: Path, bits: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model)
    assert quantization(model, ["awq"], "vLLM 1.0 on CPU") is None
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    with pytest.raises(ValueError, match=r"vLLM 1.0.*'bitsandbytes'.*awq, fp8\."):
        quantization(model, ["awq", "fp8"], "vLLM 1.0 on CPU")
    if bits == 4:
        assert quantization(model, ["bitsandbytes"], "an older vLLM") == "bitsandbytes"
    else:
        with pytest.raises(ValueError, match="in 8 bit"):
            quantization(model, ["bitsandbytes"], "an older vLLM")


def test_sampling_settings_are_the_configurations(embedded_model: Path, tmp_path: Path) -> None:
    changes = {"temperature": 0.7, "top_p": 0.8, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2}
    trainer = make_trainer(embedded_model, tmp_path, min_new_tokens=2, stop_strings=["a"], **changes)
    assert sampling_settings(trainer.args) == SamplingSettings(**changes, min_new_tokens=2, stop_strings=("a",))
    assert not sampling_settings(trainer.args, do_sample=False).do_sample


def test_a_server_of_several_copies_is_refused(tmp_path: Path) -> None:
    copies = {"parallel_config": {"data_parallel_size": 2}}
    with pytest.raises(
        ValueError, match=r"http://host:1 runs 2 copies .* loaded on one of them only.*vllm_server_base_url"
    ):
        server_of(copies)
    server_of({**copies, "lora_config": None, "weight_transfer_config": {"backend": "nccl"}}, rank=None)


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1", ["http://a:1"]),
        ("http://a:1, http://b:2/", ["http://a:1", "http://b:2"]),
        (["http://a:1", "http://b:2"], ["http://a:1", "http://b:2"]),
        (None, ["http://0.0.0.0:8000"]),
    ],
)
def test_addresses_of_servers(tmp_path: Path, given: object, urls: list[str]) -> None:
    made = config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=given).with_environment()
    assert server_urls(made) == urls


@pytest.mark.parametrize("given", ["http://a:1,", "http://a:1,http://a:1/", [""]])
def test_addresses_that_are_none(tmp_path: Path, given: object) -> None:
    with pytest.raises(ValueError, match=naming("vllm_server_base_url", repr(given))):
        config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=given).with_environment()


STARTS = {"use_vllm": True, "vllm_mode": "server", "vllm_server_start": True}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {**STARTS, "vllm_server_base_url": "http://a:1"},
            ["vllm_server_base_url='http://a:1'", "vllm_server_start=True"],
        ),
        ({**STARTS, "vllm_server_port": 9}, ["vllm_server_port=9", "vllm_server_start=True"]),
        ({**STARTS, "vllm_enable_sleep_mode": True}, ["vllm_enable_sleep_mode=True", "engine in this process"]),
        ({"use_vllm": True, "vllm_server_start": True}, ["vllm_server_start=True", "vllm_mode='server'"]),
        ({"vllm_server_start": True}, ["vllm_server_start=True", "use_vllm=False"]),
    ],
)
def test_a_server_of_ones_own_has_its_own_address(tmp_path: Path, changes: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ValueError, match=naming(*names)):
        config(tmp_path, **changes).with_environment()


def test_a_server_of_ones_own_is_an_engine_of_ours(tmp_path: Path) -> None:
    changes = {"vllm_gpu_memory_utilization": 0.5, "vllm_tensor_parallel_size": 2, "vllm_model_impl": "transformers"}
    config(tmp_path, **STARTS, **changes, batches_ahead=1).with_environment()


def test_the_command_of_a_server(embedded_model: Path, tmp_path: Path) -> None:
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(embedded_model), lora := LoraConfig(r=12))
    args = config(tmp_path, **STARTS, batches_ahead=3, trust_remote_code=True).with_environment()

    def command(**given: Any) -> str:
        given = {"seqs": 16, "max_model_length": 512, "on_gpu": True} | given
        return " ".join(server_command(args, policy, lora, torch.bfloat16, **given))

    on_gpu = command()
    for words in (
        f"--model {embedded_model} --dtype bfloat16 --logprobs-mode processed_logprobs", "--max-lora-rank 16 --max-loras 5",
        "--max-num-seqs 16 --max-num-batched-tokens 8192 --max-model-len 512", "--enable-lora", "--trust-remote-code",
    ):  # fmt: skip
        assert words in on_gpu
    assert "--enforce-eager" not in on_gpu and "--revision" not in on_gpu and "--quantization" not in on_gpu
    assert "--no-enable-chunked-prefill" in command(on_gpu=False) and "--max-model-len" not in command(
        max_model_length=None
    )
    policy.get_base_model().config._commit_hash = "abc"
    policy.get_base_model().config.quantization_config = {"quant_method": "fp8"}
    assert "--quantization fp8 --revision abc --tokenizer-revision abc" in command()


@pytest.mark.parametrize(
    ("used", "visible", "wanted", "gpus"),
    [
        ([0], "01", 1, (["1"], False)),
        ([0, 1], "2357", 2, (["5", "7"], False)),
        ([1, 0], "456", 1, (["6"], False)),
        ([0], "3", 1, (["3"], True)),
        ([1, 0], "89", 1, (["9"], True)),
    ],
)
def test_a_server_gets_the_gpus_that_are_left(used: list[int], visible: str, wanted: int, gpus: object) -> None:
    assert gpus_of_server(used, list(visible), wanted) == gpus


@pytest.mark.parametrize(("used", "visible"), [([0], "0"), ([0], "01"), ([0, 1], "012")])
def test_too_few_gpus_for_a_server(used: list[int], visible: str) -> None:
    with pytest.raises(ValueError, match=f"vllm_tensor_parallel_size=2 .* there are {len(visible) - len(used)}"):
        gpus_of_server(used, list(visible), 2)


@pytest.mark.parametrize(
    ("slots", "ahead", "warns"), [(1, 0, False), (2, 1, True), (3, 1, False), (3, 2, True), (8, 2, False)]
)
def test_a_server_with_too_few_slots(caplog: pytest.LogCaptureFixture, slots: int, ahead: int, warns: bool) -> None:
    check_slots({"lora_config": {"max_lora_rank": 8, "max_loras": slots}}, "http://a:1", ahead)
    said = [record.getMessage() for record in caplog.records]
    assert (
        (len(said) == 1 and f"--max-loras {ahead + 2}" in said[0] and "http://a:1" in said[0]) if warns else said == []
    )


def test_batch_invariance_that_ends_a_cpu_engine() -> None:
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=1 ends vLLM at its first request on a CPU"):
        check_batch_invariant({"VLLM_BATCH_INVARIANT": "1"}, on_cpu=True)
    for environment, on_cpu in (
        ({}, True),
        ({"VLLM_BATCH_INVARIANT": "0"}, True),
        ({"VLLM_BATCH_INVARIANT": "1"}, False),
    ):
        check_batch_invariant(environment, on_cpu=on_cpu)
