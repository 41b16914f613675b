"""``agile-trainers check`` plans the vLLM server that a run starts itself, for machines of several sizes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from recipe_plans import TINY, folder_of

from agile_trainers.cli import main

RUN = """check grpo --environment agile:guess_number --episodes 2 --use_peft true --lora_r 12
--lora_target_modules all-linear --dtype bfloat16 --max_model_length 512 --use_vllm true --vllm_mode server
--vllm_server_start true --batches_ahead 1 --gpu_memory 24 --per_device_train_batch_size 4
--gradient_accumulation_steps 4"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(TINY, tmp_path_factory.mktemp("plans"))


def check(model: Path, folder: Path, capsys: Any, more: str) -> tuple[int, str]:
    given = [*shlex.split(RUN), "--model_name_or_path", str(model), "--output_dir", str(folder), *shlex.split(more)]
    code = main.main(given)
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "where", "words", "peak"),
    [
        ("--gpus 1", "GPU 0, which the first process of the trainer uses too,", "--gpu-memory-utilization 0.3", "30%"),
        ("", "GPU 1,", "--tensor-parallel-size 1", "0%"),
        ("--gpus 4 --num_processes 2 --vllm_tensor_parallel_size 2", "GPUs 2, 3,", "--tensor-parallel-size 2", "0%"),
        ("--vllm_gpu_memory_utilization 0.5", "GPU 1,", "--gpu-memory-utilization 0.5", "0%"),
    ],
)
def test_it_says_where_the_server_runs_and_how(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, where: str, words: str, peak: str
) -> None:
    """On one GPU its share is part of the peak."""
    code, said = check(model, tmp_path, capsys, more)
    assert code == 0, said
    assert f"The trainer starts a server on {where} with room for 3 adapters (batches_ahead=1)" in said
    command = said[said.index("python -m vllm") :]
    assert words in command and ("0.3" in command) == (more == "--gpus 1")
    seqs = 32 if "processes" in more else 16
    for word in (
        f"--model {model}",
        "--max-lora-rank 16 --max-loras 3",
        f"--max-num-seqs {seqs}",
        "--max-model-len 512",
    ):
        assert word in command
    assert f"{seqs} are played" in said and f"planned peak is {peak} of the GPU" in said
    # Two of the adapter, in fp32: 12 x (hidden + the other side of each linear layer) in two layers.
    trained = 2 * 12 * (2 * (56 + 56) + 2 * (56 + 8) + 3 * (56 + 64))
    assert f"2 x {trained:,} x 4 bytes (batches_ahead)" in said


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--use_peft false --lora_target_modules q_proj", "this model is trained whole"),
        ("--gpus 2 --vllm_tensor_parallel_size 2", "vllm_tensor_parallel_size=2 needs as many GPUs"),
        ("--use_dora true", "vLLM cannot serve an adapter with use_dora=True"),
        ("--load_in_8bit true", "in 8 bit"),
        ("--gpu_memory 0.0001", "The server needs"),
        ("--gpu_memory 0.001 --max_model_length 20000", "hold a conversation of max_model_length=20000"),
    ],
)
def test_it_refuses_what_would_not_start(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, named: str
) -> None:
    code, said = check(model, tmp_path, capsys, more)
    assert code == 1 and named in said, said
