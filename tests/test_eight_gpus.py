"""The commands of ``docs/eight_gpus.md``: each is planned without GPU and vLLM, and server and trainer fit each other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_plans import SHAPES, SIX, TINY, folder_of, planned
from trl.import_utils import is_vllm_available

from agile_trainers.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/eight_gpus.md").read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    """The page's commands of a program, without the variables before them."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)
    words = [shlex.split(block.replace("\\\n", "")) for block in blocks]
    plain = [[word for word in one if not re.match(r"^[A-Z_]+=", word)] for one in words]
    return [one for one in plain if one[0] == program]


def variables(block: int) -> dict[str, str]:
    found = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)[block]
    return dict(re.findall(r"\b([A-Z_]{4,})=(\S+)", found))


TRAINED, SERVED = commands("agile-trainers"), commands("vllm")


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def check(words: list[str], model: Path, folder: Path, capsys: Any) -> tuple[int, str]:
    """Check a command of training, word for word; the model is another."""
    words = [str(ROOT / word) if word.startswith(("examples/", "accelerate_configs/")) else word for word in words[1:]]
    words = words if words[0] == "check" else ["check", *words, "--gpu_memory", "79"]
    code = main.main([*words, "--model_name_or_path", str(model), "--episodes", "2", "--output_dir", str(folder)])
    return code, capsys.readouterr().out


@pytest.mark.skipif(is_vllm_available(), reason="vLLM is installed here")
@pytest.mark.parametrize("words", TRAINED, ids=lambda words: Path(option(words, "--config") or "").stem)
def test_each_command_is_planned_where_neither_gpu_nor_vllm_is(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = check(words, folder_of(TINY, tmp_path), tmp_path, capsys)
    assert code == 0, report
    assert "vLLM is not installed here" in report and "on other GPUs" in report and "KV cache" not in report
    processes = option(words, "--num_processes")
    episodes = 16 * int(processes or 1)
    flat = " ".join(report.split())
    assert f"There are {processes} processes, under" in flat and f"{episodes} episodes are played" in flat
    assert "2 episodes by the random policy" in flat, "no weights are loaded"


@pytest.mark.slow
@pytest.mark.parametrize("words", TRAINED, ids=lambda words: Path(option(words, "--config") or "").stem)
def test_each_command_is_planned_for_7b(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(words, folder_of(SHAPES["7B"], tmp_path), tmp_path, capsys)
    (share,) = re.findall(r"planned peak is (\d+)% of the GPU's 79.0 GiB", " ".join(report.split()))
    assert code == 0 and 20 < int(share) < 85 and "7,615,616,512" in report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8x80gb_7b_lora_server", "8x80gb_7b_whole_server"])
def test_the_peaks_are_the_pages(name: str) -> None:
    (said,) = re.findall(rf"{'LoRA, DDP' if 'lora' in name else 'whole model, ZeRO-3'} \| 2 \| 6 \| ([\d.]+) GiB", PAGE)
    assert planned(ROOT / f"examples/recipes/{name}.yaml") == pytest.approx(float(said), abs=0.06)


def test_each_trainer_has_a_server_that_fits() -> None:
    assert len(SERVED) == 4 and len(TRAINED) == 4
    for server, trainer in zip(SERVED, [TRAINED[0], TRAINED[1], *[TRAINED[3]] * 2], strict=True):
        recipe = yaml.safe_load((ROOT / (option(trainer, "--config") or "")).read_text(encoding="utf-8"))
        assert server[2] == recipe["model_name_or_path"] and option(server, "--dtype") == recipe["dtype"]
        assert option(server, "--logprobs-mode") == "processed_logprobs"
        assert int(option(server, "--max-model-len") or 0) >= recipe["max_model_length"]
        heads = SHAPES["7B"]["num_attention_heads"]
        assert heads % int(option(server, "--tensor-parallel-size") or 1) == 0
        lora = bool(recipe.get("use_peft"))
        assert lora == ("--enable-lora" in server) != ("--weight-transfer-config" in server)
        if lora:
            assert int(option(server, "--max-lora-rank") or 0) == recipe["lora_r"]
            assert "--data-parallel-size" not in server, "the trainer refuses it"
        groups = int(option(trainer, "--num_processes") or 0) * recipe["per_device_train_batch_size"]
        assert groups * recipe["gradient_accumulation_steps"] % 8 == 0


def test_the_commands_of_one_machine_split_its_gpus() -> None:
    for server, trainer in ((0, 1), (2, 3)):
        sets = [set(variables(block)["CUDA_VISIBLE_DEVICES"].split(",")) for block in (server, trainer)]
        assert not sets[0] & sets[1] and sets[0] | sets[1] == set("01234567")
        served, trained = SERVED[server // 2], TRAINED[server // 2]
        assert option(served, "--tensor-parallel-size") == str(len(sets[0]))
        assert option(trained, "--num_processes") == str(len(sets[1]))
        name = Path(option(trained, "--config") or "").stem
        assert SIX[name].processes == len(sets[1])
        assert SIX[name].engine == Path(option(trained, "--accelerate_config") or "").stem
