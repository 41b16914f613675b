"""Every CPU configuration of ``accelerate_configs/``, with two processes, does what one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from chain_files import lineage
from launched_runs import ROOT, SCRIPT, distance, episodes, launch, of, weights
from launching import run
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agile_trainers.adapters.critic import add_value_head
from agile_trainers.adapters.roles import CRITIC, REFERENCE

pytestmark = pytest.mark.launch
CASES = ("grpo", "grpo-full", "reinforce", "reinforce-full", "ppo")
STAGES = {"ddp": None, "zero1": 1, "zero2": 2, "zero3": 3}


@pytest.fixture(scope="module")
def single(embedded_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    done = launch("cpu/single", SCRIPT, embedded_model, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module", params=STAGES)
def runs(request, single, embedded_model, tmp_path_factory) -> tuple[str, Path]:
    if request.param != "ddp":
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agile-trainers[deepspeed]'")
    folder = tmp_path_factory.mktemp(request.param)
    done = launch(f"cpu/{request.param}", SCRIPT, embedded_model, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(runs, single, case):
    """The episodes are the same, and so is what plain SGD made of their gradients."""
    ours, theirs = episodes(runs[1] / case / "whole"), episodes(single / case / "whole")
    assert len(ours) == len(theirs) == (16 if case == "grpo" else 24)
    assert [record["completion_ids"] for record in ours] == [record["completion_ids"] for record in theirs]
    assert [record["return"] for record in ours] == [record["return"] for record in theirs]
    start, one, two = (weights(f / case / n) for f, n in ((single, "start"), (single, "end"), (runs[1], "end")))
    for adapter in {"ppo": (".", CRITIC), "reinforce": (".", REFERENCE)}.get(case, (".",)):
        moved = distance(of(adapter, one), of(adapter, start))
        assert moved > 0.01 and distance(of(adapter, two), of(adapter, one)) < 1e-5 * moved
    logged = [json.loads((f / case / "result.json").read_text()) for f in (runs[1], single)]
    for ours, theirs in zip(*(result["logged"] for result in logged)):
        for name in ("loss", "return/mean", "advantage/std", "kl", "value/loss", "grad_norm"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert logged[0]["evaluation"]["eval_return"] == pytest.approx(logged[1]["evaluation"]["eval_return"], abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_where_it_was(runs, case):
    whole, resumed = (weights(runs[1] / case / name) for name in ("end", "resumed-end"))
    assert distance(whole, resumed) == 0.0


def moments(checkpoint: Path) -> list[torch.Tensor]:
    """Every tensor of the optimizer's state, of all processes."""
    found: list[torch.Tensor] = []

    def collect(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.float())
        elif isinstance(value, dict):
            for part in value.values():
                collect(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                collect(part)

    files = [checkpoint / "optimizer.pt", *sorted(checkpoint.rglob("*optim_states.pt"))]
    for file in files:
        if file.is_file():
            state = torch.load(file, weights_only=False)
            collect(state.get("optimizer_state_dict", state))
    return found


def test_a_step_without_a_finite_gradient_is_skipped(runs):
    """One process had it, all skip it: weights, moments and schedule stay as they were, and the run goes on."""
    name, folder = runs
    one, two, three = (folder / "poisoned" / f"checkpoint-{step}" for step in (1, 2, 3))
    policies = [of(".", weights(checkpoint)) for checkpoint in (one, two, three)]
    assert distance(*policies[:2]) == 0.0 and distance(*policies[1:]) > 0.0
    before, after, later = moments(one), moments(two), moments(three)
    assert len(before) > 2 and all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(after, later, strict=True))
    logged = json.loads((folder / "poisoned" / "result.json").read_text())["logged"]
    assert [entry["skipped_steps"] for entry in logged] == [0, 1, 1, 1], name
    assert logged[2]["learning_rate"] == pytest.approx(logged[1]["learning_rate"])


@pytest.mark.parametrize("case", CASES)
def test_the_engine_is_the_one_that_was_named(runs, case):
    name, folder = runs
    shares = json.loads((folder / case / "result.json").read_text())["shares"]
    assert shares["processes"] == 2 and shares["stage"] == STAGES[name]
    assert shares["engine"] == ("MULTI_CPU" if name == "ddp" else "DEEPSPEED")
    held = shares["parameters"] / 2 if name == "zero3" else shares["parameters"]
    assert held <= shares["held"] <= 1.01 * held, "only zero3 divides the parameters, and then all of them"
    if name in ("zero1", "zero2"):
        assert shares["trained"] / 2 <= shares["optimized"] <= 1.01 * shares["trained"] / 2


@pytest.mark.parametrize("case", ["grpo", "reinforce", "ppo"])
@pytest.mark.parametrize("saved", ["end", "whole/checkpoint-2"])
def test_plain_peft_loads_every_adapter(runs, single, embedded_model, case, saved):
    """Equal to what one process saved, in what the loaded model says."""
    ids = torch.arange(40).view(2, 20) + 300
    adapters = {"ppo": ("", CRITIC), "reinforce": ("", REFERENCE)}.get(case, ("",))
    for adapter in adapters:
        logits = []
        for folder in (runs[1], single):
            base = AutoModelForCausalLM.from_pretrained(embedded_model)
            if adapter == CRITIC:
                add_value_head(base)
            model = PeftModel.from_pretrained(base, folder / case / saved / adapter)
            logits.append(model(ids).logits)
        assert not torch.equal(logits[0], AutoModelForCausalLM.from_pretrained(embedded_model)(ids).logits)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["grpo-full", "reinforce-full"])
def test_a_whole_model_loads(runs, single, case):
    ids = torch.arange(40).view(2, 20) + 300
    one, two = (AutoModelForCausalLM.from_pretrained(folder / case / "end")(ids).logits for folder in (single, runs[1]))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


def test_deepspeed_reads_no_strangers_pickle(embedded_model, tmp_path):
    """The trainer refuses five checkpoints whose pickle DeepSpeed runs."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agile-trainers[deepspeed]'")
    done = launch("cpu/zero2", "--num_processes", "1", SCRIPT.with_name("hostile.py"), embedded_model, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert found.keys() == {"dot", "outside", "absolute", "link", "unsigned"}
    for kind, result in found.items():
        assert result["by_deepspeed"] and not result["by_trainer"] and result["refused"], kind


def by_command(config: str, model: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    options = ["--environment", "agile:guess_number", "--max_steps", "1", "--bf16", "False", "--report_to", "none"]
    where = ["--model_name_or_path", model, "--output_dir", output]
    return launch(config, "--module", "agile_trainers.cli.train", "grpo", *where, *options, *more)


def test_another_engine_than_the_configuration_names_is_refused(embedded_model, tmp_path):
    """Without GPUs, accelerate runs FSDP as DDP."""
    done = by_command("fsdp2", embedded_model, tmp_path, "--use_cpu")
    assert done.returncode != 0
    assert "The launch configuration names FSDP, but accelerate would silently run MULTI_CPU" in done.stderr


def test_processes_that_know_nothing_of_each_other_are_refused(embedded_model, tmp_path):
    """So it is where the CPU is neither asked for nor the command's default."""
    done = by_command("ddp", embedded_model, tmp_path, "--use_cpu", "False")
    assert done.returncode != 0
    assert "2 processes were started, but each would train by itself" in done.stderr


def test_without_a_gpu_the_command_trains_on_the_cpus(embedded_model, tmp_path):
    """As one run of two processes, whose batch is as large as both."""
    done = by_command("ddp", embedded_model, tmp_path, "--max_turns", "2", "--max_new_tokens", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    state = json.loads((tmp_path / "agile_trainers.json").read_text())
    assert state["global_step"] == 1 and state["options"]["gradient_accumulation_steps"] == 4


def test_an_example_runs_on_two_processes(tmp_path, monkeypatch):
    """SFT and GRPO with LoRA, from a model that both processes need."""
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))  # it draws
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agile-trainers[deepspeed]'")
    pytest.importorskip("gem", reason="needs GEM: pip install 'agile-trainers[envs]'")
    options = ["--output_dir", tmp_path, "--sft_steps", "3", "--rl_steps", "1"]
    done = launch("cpu/zero2", ROOT / "examples" / "gem_guess_number.py", *options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("after: return") == 1 and (tmp_path / "adapter_model.safetensors").is_file()


def test_a_chain_runs_on_two_processes(pipeline, embedded_model, tmp_path):
    """SFT, DPO, GRPO and PPO, as one run; what is finished is not done again."""
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    command = ["cpu/ddp", "--module", "agile_trainers.cli.main", "chain", tmp_path / "pipeline.yaml"]
    for times in (1, 0):
        done = launch(*command)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("3 episodes each") == 1, "one table, by the first process"
        assert done.stdout.count("ppo-after: ppo on") == times
    assert lineage(tmp_path / "chain" / "ppo-after") == ["Multi-turn PPO", "Multi-turn GRPO", "DPO", "SFT"]
    for stage in ("sft", "dpo", "grpo", "ppo-after"):
        states = (tmp_path / "chain" / stage / "checkpoint-2").glob("rng_state_*.pth")
        assert len(list(states)) == 2, "each process saves its own"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_command_line_launches_too(embedded_model, tmp_path, algorithm):
    """With the configuration for GPUs: in bf16. A group is played by both processes together."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agile-trainers[deepspeed]'")
    options = f"""{algorithm} --accelerate_config accelerate_configs/zero3.yaml --main_process_port 0 --use_peft --use_cpu
        --lora_target_modules all-linear --environment agile:guess_number --max_turns 2 --max_new_tokens 2 --max_steps 1
        --per_device_train_batch_size 4 --dtype bfloat16 --report_to none --model_name_or_path {embedded_model}
        --output_dir {tmp_path} {"--num_generations 8" if algorithm == "grpo" else ""}"""
    done = run(
        [sys.executable, "-m", "agile_trainers.cli.main", *options.split()],
        timeout=900,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((tmp_path / "agile_trainers.json").read_text())["global_step"] == 1
    saved = load_file(tmp_path / ("." if algorithm == "grpo" else CRITIC) / "adapter_model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
