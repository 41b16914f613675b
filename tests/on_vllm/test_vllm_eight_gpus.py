"""The commands of ``docs/eight_gpus.md`` with a tiny model, on CPU: a parallel server, two processes of training."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from launching import run
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from serving import Served, serving
from transformers import AutoModelForCausalLM

from agile_trainers.embedded import make_embedded_model
from agile_trainers.rollout.generators.vllm.server import VllmServer
from agile_trainers.rollout.generators.vllm.servers import VllmServers

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/eight_gpus.md").read_text(encoding="utf-8")
BLOCKS = [shlex.split(block.replace("\\\n", "")) for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)]
COMMANDS = [[word for word in block if not re.match(r"^[A-Z_]+=", word)] for block in BLOCKS]
SERVERS = [words[2:] for words in COMMANDS if words[0] == "vllm"]
LORA, WHOLE = (words[1:] for words in COMMANDS[1:4:2])
SMALL = """\
--dtype float32 --max_turns 2 --max_new_tokens 8 --max_model_length 256 --per_device_train_batch_size 4
--gradient_accumulation_steps 2 --max_steps 2 --num_iterations 1 --save_steps 2 --logging_steps 1 --report_to none
--num_processes 2"""
LENGTH = 512
LONGER = """
class Longer:
    \"\"\"Pays for the length of an answer, so that a group is informative.\"\"\"

    def reset(self, seed=None, options=None):
        return f"Question {seed % 7}?", {}

    def step(self, action):
        return "Go on.", len(action) / 10, False, False, {}
"""


def smaller(words: list[str], **exchanged: str) -> list[str]:
    """The options of the page's server without its model, for a CPU."""
    changes = {"--dtype": "float32", "--max-model-len": str(LENGTH), **exchanged}
    words = words[1:]
    for name, value in changes.items():
        words[words.index(name) + 1] = value
    return words


def train(words: list[str], model: Path, url: str, output: Path, config: str) -> CompletedProcess[str]:
    """Run a command of training of the page, with a tiny model, on CPU."""
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    words[words.index("--accelerate_config") + 1] = str(ROOT / f"accelerate_configs/cpu/{config}.yaml")
    output.mkdir()
    (output / "longer.py").write_text(LONGER, encoding="utf-8")
    words += [*SMALL.split(), "--model_name_or_path", str(model), "--vllm_server_base_url", url]
    words += ["--environment", "longer:Longer", "--output_dir", str(output)]
    port = str(20000 + os.getpid() % 20000)
    command = [sys.executable, "-m", "agile_trainers.cli.main", *words, "--main_process_port", port]
    return run(command, timeout=900, cwd=output)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Served]]:
    """The first server of the page: LoRA and tensor parallelism over two workers."""
    model = make_embedded_model(tmp_path_factory.mktemp("base") / "model")
    with serving(model, LENGTH, more=smaller(SERVERS[0])) as server:
        yield model, server


@pytest.mark.parametrize("words", SERVERS, ids=["lora", "whole", "two machines", "its second"])
def test_vllm_knows_the_options_of_each_server(words: list[str]) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(found)
    assert found.model_tag == "Qwen/Qwen2.5-7B-Instruct"


def test_a_server_with_data_parallelism_answers_by_the_adapter(tmp_path: Path) -> None:
    """Both engines get the adapter, if one process answers for them; the trainer refuses it all the same.

    It stands before the tests of ``served``, whose server would hold its memory meanwhile.
    """
    folder = make_embedded_model(tmp_path / "model")
    more = smaller(SERVERS[0], **{"--tensor-parallel-size": "1"})
    more += ["--data-parallel-size", "2", "--api-server-count", "1"]
    with serving(folder, LENGTH, more=more) as served:
        server = VllmServers([VllmServer(served.url, timeout=0, max_batch_size=16, vocab_size=1000)])
        assert server.servers[0].client.get_world_size() == 2
        torch.manual_seed(0)
        adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), adapter)
        fields = {"max_tokens": 8, "temperature": 0, "logprobs": 0}

        def answers() -> set[tuple[int, ...]]:
            with ThreadPoolExecutor(8) as pool:
                return {tuple(one[0]) for one in pool.map(lambda _: server.generate([5, 6, 7], fields), range(16))}

        base = answers()
        server.load_adapter(get_peft_model_state_dict(model), model.peft_config["default"])
        with torch.no_grad():
            ours = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
        assert answers() == {tuple(ours)} != base
        server.close()


def test_two_processes_train_on_the_server(served: tuple[Path, Served], tmp_path: Path) -> None:
    model, server = served
    assert VllmServer(server.url, timeout=0, max_batch_size=1, vocab_size=1000).client.get_world_size() == 2
    done = train(LORA, model, server.url, tmp_path / "run", "ddp")
    assert done.returncode == 0, done.stderr[-4000:]
    log = json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    steps: list[dict[str, Any]] = [entry for entry in log if "vllm/sync_bytes" in entry]
    assert len(steps) == 2
    weights = load_file(tmp_path / "run/adapter_model.safetensors")
    assert {entry["vllm/sync_bytes"] for entry in steps} == {sum(weight.nbytes for weight in weights.values())}
    for entry in steps:  # the second batch is of the adapter that the first update made
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    assert any(weight.abs().max() > 0 for name, weight in weights.items() if "lora_B" in name)


def test_the_whole_model_comes_to_the_transfer_that_needs_gpus(served: tuple[Path, Served], tmp_path: Path) -> None:
    model, server = served
    done = train(WHOLE, model, server.url, tmp_path / "run", "zero3")
    assert done.returncode != 0 and "over NCCL, which needs GPUs" in done.stderr + done.stdout
