"""Folders of models that are damaged, or name files elsewhere: one kind of error, which names the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.adapters.folders import RECORD, CheckpointError, read_json, write_json
from agile_trainers.adapters.loading import find_adapters
from agile_trainers.adapters.untrusted import LOADERS, check_model_folder, naming_folder
from agile_trainers.checkpoints.integrity import check_complete, mark_complete
from agile_trainers.evaluation.policy import load_model
from agile_trainers.records import plain


@pytest.fixture
def model(embedded_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded_model, tmp_path / "model"))


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def change(file: Path, value: Any, *keys: Any) -> None:
    """Put a value into a file of JSON at a place, or in its place."""
    content = json.loads(file.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    if keys:
        inner[keys[-1]] = value
    file.write_text(json.dumps(content if keys else value))


DAMAGES: dict[str, tuple[Any, ...]] = {
    "config is a list": ("config.json", []),
    "a size in words": ("config.json", "many", "hidden_size"),
    "no such dtype": ("config.json", "", "dtype"),
    "no architecture": ("config.json", [], "architectures"),
    "kind of rope": ("config.json", 1.5, "rope_parameters", "rope_type"),
    "no such layer": ("config.json", "x", "layer_types", 0),
    "no such model": ("config.json", 7, "model_type"),
    "generation is a list": ("generation_config.json", []),
    "padding in words": ("generation_config.json", "x", "pad_token_id"),
    "tokenizer is a list": ("tokenizer.json", []),
    "a token without an id": ("tokenizer.json", None, "model", "vocab", "a"),
    "tokens are a table": ("tokenizer.json", {"a": 1}, "added_tokens"),
    "a token is a number": ("tokenizer.json", 7, "added_tokens", 0, "content"),
    "a panic": ("tokenizer.json", {"type": "Precompiled", "precompiled_charsmap": ""}, "normalizer"),
    "class is a number": ("tokenizer_config.json", 1.5, "tokenizer_class"),
    "length is a table": ("tokenizer_config.json", {}, "model_max_length"),
    "a special token is a table": ("tokenizer_config.json", {"a": 1}, "eos_token"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_model_is_one_kind_of_error(model: Path, kind: str) -> None:
    name, *rest = DAMAGES[kind]
    change(model / name, *rest)
    with pytest.raises(ValueError, match=rf"{model}(/{name})? (cannot be loaded|is damaged|holds a list)") as refused:
        load_model(str(model))[1]("text")
    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize("size", [0, 7, 100, 5000])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_was_cut_off(model: Path, name: str, size: int) -> None:
    (model / name).write_bytes((model / name).read_bytes()[:size])
    if (model / name).stat().st_size == size:
        with pytest.raises(ValueError, match=rf"{model}(/{name})? cannot be (loaded|read)"):
            load_model(str(model))


@pytest.mark.parametrize(
    "damage",
    [
        ("adapter_config.json", 10**30, "bias"),
        ("adapter_config.json", "../x", "bias"),
        ("adapter_config.json", float("nan"), "trainable_token_indices"),
        ("adapter_config.json", "", "target_modules"),
        ("tokenizer.json", None, "model", "vocab", "a"),
    ],
)
def test_a_damaged_adapter_is_one_kind_of_error(adapter: Path, damage: tuple[Any, ...]) -> None:
    name, *rest = damage
    change(adapter / name, *rest)
    with pytest.raises(
        ValueError, match=rf"{adapter}(/adapter_config.json is damaged| cannot be loaded)|class in {adapter}"
    ):
        load_model(str(adapter))


def test_errors_that_are_not_the_folders_stay(tmp_path: Path) -> None:
    for error in (ImportError("bitsandbytes"), torch.OutOfMemoryError(), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), naming_folder(str(tmp_path)):
            raise error
    for error in (OSError(28, "No space left"), OSError("org/model is no repository"), ValueError("org/model: no")):
        with pytest.raises(type(error)) as raised, naming_folder("org/model"):
            raise error
        assert raised.value is error
    with pytest.raises(KeyError), naming_folder(str(tmp_path), within=LOADERS):
        raise KeyError("of the user's own function")


def test_a_class_that_vllm_has_changed_is_no_damaged_file() -> None:
    """Its constructor asks for vLLM's configuration."""
    with (
        pytest.raises(
            ValueError, match=r"^a/base cannot be loaded in this process any more: .*model_impl='transformers'"
        ),
        naming_folder("a/base"),
    ):
        raise AssertionError(
            "Current vLLM config is not set. This typically means get_current_vllm_config() was called"
        )


def test_a_file_of_pytorch_that_ends_early_is_named(tmp_path: Path) -> None:
    """PyTorch says "Invalid argument", with an errno as of the machine."""
    torch.save({"step": torch.zeros(1000)}, tmp_path / "optimizer.pt")
    (tmp_path / "optimizer.pt").write_bytes((tmp_path / "optimizer.pt").read_bytes()[:-300])
    with pytest.raises(ValueError, match=f"^{tmp_path} cannot be loaded"), naming_folder(str(tmp_path)):
        torch.load(tmp_path / "optimizer.pt")


@pytest.mark.parametrize("file", ["torch/utils/cpp_extension.py", "deepspeed/ops/op_builder/builder.py"])
def test_an_extension_that_cannot_be_built_is_no_damaged_file(tmp_path: Path, file: str) -> None:
    """DeepSpeed builds its optimizer while transformers reads a checkpoint."""
    built = compile("def build(): raise RuntimeError('Error building extension cpu_adam')", f"/lib/{file}", "exec")
    names: dict[str, Any] = {}
    exec(built, names)

    def from_pretrained() -> None:
        names["build"]()

    with pytest.raises(RuntimeError, match="Error building"), naming_folder(str(tmp_path), within=LOADERS):
        from_pretrained()


# ------------------------------------------------------------------------------------------------------ files elsewhere


def index(folder: Path, name: Any, file: str = "model.safetensors.index.json") -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": name}}
    (folder / file).write_text(json.dumps(content))


ELSEWHERE = ["../private/w.safetensors", "/etc/passwd", "..", "sub/w.safetensors", "", ".", "a\\b", 7, None, ["x"]]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_weights_of_a_model_are_beside_their_index(model: Path, name: Any) -> None:
    """transformers joins the names to the folder, whatever they are."""
    index(model, name)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json is not read: weight_map names"):
        find_adapters(str(model))
    with pytest.raises(CheckpointError, match="weight_map"):
        load_model(str(model))


def test_weights_elsewhere_were_read(model: Path, tmp_path: Path) -> None:
    """By transformers alone: the attack is real. An honest index is read."""
    (tmp_path / "private").mkdir()
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    save_file(weights, tmp_path / "private" / "w.safetensors", {"format": "pt"})
    (model / "model.safetensors").unlink()
    for name in ("../private/w.safetensors", "w.safetensors"):
        content = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (model / "model.safetensors.index.json").write_text(json.dumps(content))
        shutil.copy(tmp_path / "private" / "w.safetensors", model) if "/" not in name else None
        assert torch.equal(AutoModelForCausalLM.from_pretrained(model).lm_head.weight, weights["lm_head.weight"])
    load_model(str(model))


def test_an_index_of_another_name(model: Path) -> None:
    index(model, "../w.safetensors", "other.safetensors.index.json")
    check_model_folder(str(model))
    change(model / "config.json", "other.safetensors.index.json", "transformers_weights")
    with pytest.raises(CheckpointError, match=r"other.safetensors.index.json is not read"):
        check_model_folder(str(model))


def test_a_checkpoint_is_read_within_its_folder(checkpointed: Path) -> None:
    """A resume reads the weights by the same index."""
    index(checkpointed, "../w.safetensors")
    mark_complete(checkpointed)
    with pytest.raises(CheckpointError, match=r"weight_map names '\.\./w.safetensors'"):
        check_complete(checkpointed)


@pytest.fixture
def checkpointed(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-1"
    write_json(folder / RECORD, {"lora": None, "global_step": 1})
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "optimizer.pt").write_bytes(b"")
    mark_complete(folder)
    assert check_complete(folder) == folder
    return folder


def test_json_is_read_up_to_a_gigabyte(tmp_path: Path) -> None:
    """A hole in a file takes no place on the disk."""
    with (tmp_path / "lineage.json").open("wb") as file:
        file.truncate(plain.LARGEST_JSON + 1)
    with pytest.raises(CheckpointError, match=r"has 1,073,741,825 bytes, expected at most 1,073,741,824"):
        read_json(tmp_path / "lineage.json")
