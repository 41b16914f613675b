"""What ``agile-trainers check`` advises, computes of launches, and says of vLLM's memory."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config
from trl import ModelConfig, get_peft_config

from agile_trainers.cli.check import command as check
from agile_trainers.cli.check.memory_plan import estimate_memory, readable, serving
from agile_trainers.cli.check.tracing import Engine, MemoryPlan, trace
from agile_trainers.cli.launch_configs import SINGLE, Launch, planned, resolve
from agile_trainers.embedded import make_tokenizer
from agile_trainers.rollout.generators.base import tokens_of_a_step
from agile_trainers.sampling.vllm_checks import longest_served

CONFIG = Qwen2Config(
    architectures=["Qwen2ForCausalLM"], hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=160, vocab_size=512, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
LORA = get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["all-linear"]))
PLAN = MemoryPlan(
    dtype=torch.bfloat16, rows=4, episodes=8, tokens=256, decoded=256, new_tokens=32, gradient_checkpointing=True,
    autocast=torch.bfloat16, peft_config=LORA,
)  # fmt: skip


def peak(plan: MemoryPlan) -> int:
    return estimate_memory(CONFIG, plan)[-1].size


def test_an_engines_memory_counts_when_it_is_there() -> None:
    bare = replace(PLAN, engine=Engine(server=True))
    items = {item.name: item.size for item in estimate_memory(CONFIG, bare)}
    assert items["vLLM"] == 0 and "KV cache" not in items
    share, fixed = 10 * items["peak"], items["weights"] + items["gradients"] + items["optimizer"]
    assert peak(replace(PLAN, engine=Engine(share=share))) == items["peak"] + share
    assert peak(replace(PLAN, engine=Engine(share=share, sleeps=True))) == fixed + share
    assert (
        peak(replace(PLAN, engine=Engine(share=share, sleeps=True, offloads=True))) == fixed + share - items["weights"]
    )
    needed = serving(replace(PLAN, engine=Engine(parallel=2)), trace(CONFIG, PLAN))
    step = trace(CONFIG, PLAN)
    assert needed.weights == step.linear + step.others  # two bytes, on two GPUs
    assert needed.episode == 256 * 2 * 2 * 2 * 16  # tokens x layers x (keys, values) x heads x width, x 2 bytes / 2
    assert needed.episodes(needed.weights + 5 * needed.episode) == 5 and needed.episodes(0) == 0


def test_an_8b_model_starts_in_three_tenths_of_80_gb() -> None:
    """Weights, the activations of vLLM's profile run, its sampler's logits and the cache of a planned episode."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    # An engine in the process has no copies of adapters, which would be two thirds of what is traced.
    plan, share = replace(PLAN, rows=1, tokens=8192, decoded=8192, peft_config=None), int(0.3 * 80e9)
    needed = serving(plan, trace(config, plan))
    assert needed.weights == 2 * 8_030_261_248
    assert needed.episode == 8192 * 32 * 2 * 8 * 128 * 2

    def profiled(tokens: int) -> int:
        """Input and output of a layer, gate, up and their product; logits in fp32, three times."""
        return tokens * (2 * 4096 + 3 * 14336) * 2 + 64 * 128256 * 4 * 3

    assert tokens_of_a_step(64, 8192, chunks=True) == 8192
    assert needed.weights + needed.episode + profiled(8192) < 0.8 * share
    # As many tokens as the model reads were 12.5 GiB more.
    assert tokens_of_a_step(64, None, chunks=True) == 8192 and needed.weights + profiled(131072) > share


def test_the_longest_conversation_of_an_8b_model_in_three_tenths_of_80_gb() -> None:
    """Without max_model_length: as long as the cache of one conversation fits beside weights and activations."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    share, token, weights = int(0.3 * 80e9), 32 * 2 * 8 * 128 * 2, 2 * 8_030_261_248
    fits = longest_served(model, torch.bfloat16, 131072, share)
    assert fits == (share - weights - 2 * 2**30) // token // 16 * 16 == 44176  # of 131,072, which take 16 GiB
    assert longest_served(model, torch.bfloat16, 32768, share) == 32768
    assert longest_served(model, torch.bfloat16, 131072, share, parallel=2) == 131072
    with pytest.raises(ValueError, match=r"vLLM gets 15\.0 GiB of the GPU, of which weights take 15\.0 GiB"):
        longest_served(model, torch.bfloat16, 131072, weights)


@pytest.mark.parametrize(
    ("engine", "divided"),
    [("ddp", ()), ("zero1", ("optimizer",)), ("zero2", ("gradients", "optimizer")),
     ("zero3", ("weights", "gradients", "optimizer")), ("fsdp2", ("weights", "gradients", "optimizer"))],
)  # fmt: skip
def test_what_processes_share(engine: str, divided: tuple[str, ...]) -> None:
    plan = replace(PLAN, peft_config=None, autocast=None, dtype=torch.float32)
    one, six = (
        {item.name: item.size for item in estimate_memory(CONFIG, replace(plan, launch=launch))}
        for launch in (SINGLE, Launch(engine, 6))
    )
    # DeepSpeed optimizes a copy of the weights; DDP sends a copy of the gradients.
    factors = {
        "weights": 1.0,
        "gradients": 2.0 if engine == "ddp" else 1.0,
        "optimizer": 1.5 if "zero" in engine else 1.0,
    }
    for name, factor in factors.items():
        assert six[name] == pytest.approx(factor * one[name] / (6 if name in divided else 1), abs=2), name
    whole = 5 * six["weights"]
    assert six.get("whole model", 0) == (whole if "weights" in divided else 0), "gathered for a rollout"


def test_mixed_precision_of_deepspeed_is_eighteen_bytes_less_the_fp32_gradient() -> None:
    """16 bytes a weight: 2 and 2 in bf16, and 12 of Adam in fp32 (https://huggingface.co/papers/1910.02054, section 3.1)."""
    plan = replace(PLAN, peft_config=None, launch=Launch("zero3", 4, "bf16"))
    items = estimate_memory(CONFIG, plan)
    numbers = trace(CONFIG, plan).trained
    assert sum(item.size for item in items[:3]) == pytest.approx(16 * numbers / 4, abs=3)
    assert sum(item.size for item in estimate_memory(CONFIG, replace(plan, dtype=torch.float32))[:3]) == pytest.approx(
        16 * numbers / 4, abs=3
    )


@pytest.mark.parametrize(
    ("options", "launch"),
    [
        ("--accelerate_config ddp --num_processes 6", Launch("ddp", 6, "bf16")),
        ("--accelerate_config zero3", Launch("zero3", 2, "bf16")),
        ("--accelerate_config zero2 --num_processes 1", Launch("zero2", 1, "bf16")),
        ("--accelerate_config fsdp2 --mixed_precision no", Launch("fsdp2", 2, "no")),
        ("--accelerate_config cpu/zero3", Launch("zero3", 2, "no")),
        ("--accelerate_config single", Launch("single", 1, "bf16")),
        ("--num_processes 4 --use_deepspeed --zero_stage 1", Launch("zero1", 4, "no")),
    ],
)
def test_what_a_launch_starts(options: str, launch: Launch) -> None:
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args([*resolve(options.split()), "script.py"])
    assert planned(parsed) == launch


def folder_of(folder: Path) -> str:
    CONFIG.save_pretrained(folder)
    make_tokenizer(vocab_size=512).save_pretrained(folder)
    return str(folder)


def run(folder: Path, *options: str) -> tuple[int, str]:
    file = io.StringIO()
    common = ["--environment", "agile:guess_number", "--model", folder_of(folder), "--episodes", "2"]
    code = check.main([*common, *options], Console(file=file, width=400))
    return code, file.getvalue()


@pytest.mark.usefixtures("one_plan")
def test_batches_are_over_all_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1", "--gpu_memory", "79"]
    code, report = run(tmp_path, *options, "--accelerate_config", "ddp", "--num_processes", "8")
    assert code == 0 and "There are 8 processes, under ddp." in report
    with pytest.raises(SystemExit):
        run(tmp_path, *options)
    assert "num_generations" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(tmp_path, *options, "--num_procesess", "8")
    assert "did you mean --num_processes" in capsys.readouterr().err


def test_an_engine_that_has_too_little_memory_is_a_problem(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--use_vllm", "--gpu_memory", "0.0004", "--use_peft")
    assert code == 1 and "vllm_gpu_memory_utilization=0.3 leaves it" in report and "raise it" in report
    code, report = run(tmp_path, "--use_vllm", "--gpu_memory", "24", "--vllm_enable_sleep_mode")
    assert code == 0 and "of the longest episodes at the same time" in report and "7.20 GiB" in report
    code, report = run(tmp_path, "--use_vllm", "--scripted_policy", "random")
    assert code == 0 and "--gpu_memory says how many fit" in report


@pytest.mark.usefixtures("one_plan")
def test_a_plan_for_another_machine_loads_no_weights_and_has_a_gpus_precision(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--gpu_memory", "24")
    assert code == 0 and "by the random policy" in report
    code, report = run(tmp_path)
    assert code == 1 and "The model cannot play" in report, "this folder has no weights"
    options = ["--environment", "agile:guess_number", "--model_name_or_path", str(tmp_path)]
    for more, expected in (
        ([], False),
        (["--gpu_memory", "24"], True),
        (["--gpu_memory", "24", "--bf16", "false"], False),
    ):
        (_, _, args, *_), _, _, elsewhere = check.parse_options("grpo", [*options, *more])
        assert args.bf16 is expected and elsewhere == bool(more)


def test_almost_full_is_a_warning_with_advice(tmp_path: Path) -> None:
    _, report = run(tmp_path, "--gpu_memory", "24")
    line = next(line for line in report.splitlines() if line.strip().startswith("peak"))
    size, unit = line.split()[1:3]
    need = float(size) * {"GiB": 1.0, "MiB": 1 / 1024}[unit]
    code, report = run(tmp_path, "--gpu_memory", f"{need / 0.9:.6f}")
    assert code == 0 and re.search(r"The planned peak is (8[6-9]|9\d)% of the GPU's", report)
    assert "What lowers it: dtype=bfloat16" in report
    code, report = run(tmp_path, "--gpu_memory", f"{need / 1.1:.6f}")
    assert code == 1 and "is more than the GPU's" in report and "What lowers it: dtype=bfloat16" in report


def test_sizes_are_written_in_gib() -> None:
    assert readable(3 * 2**29) == "1.50 GiB" and readable(2**27) == "0.12 GiB"


def test_the_tokens_that_an_engine_reads_in_a_step() -> None:
    """All requests have one; a prompt that cannot be read in chunks is read whole."""
    assert tokens_of_a_step(4, 512, chunks=True) == 2048 and tokens_of_a_step(9000, 64, chunks=True) == 9000
    assert tokens_of_a_step(4, 32768, chunks=False) == 32768 and tokens_of_a_step(4, None, chunks=False) == 4096


def test_a_context_that_vllm_cannot_hold_is_a_problem(tmp_path: Path) -> None:
    """The weights and a short episode fit into it, and the 4,096 tokens of the model do not."""
    options = ["--use_vllm", "--use_peft", "--gpu_memory", "0.003", "--max_turns", "1", "--max_new_tokens", "8"]
    code, report = run(tmp_path, *options)
    assert code == 1 and "hold a conversation of max_model_length=4096 tokens" in report
    assert "hold a conversation" not in run(tmp_path, *options, "--max_model_length", "300")[1]
