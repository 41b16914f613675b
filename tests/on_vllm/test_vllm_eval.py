"""Evaluations on vLLM beside those on transformers, of the same saved policies."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch
from doc_blocks import of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agile_trainers.cli.main import main
from agile_trainers.evaluation import EpisodeOptions, EpisodeResults, SamplingSettings, VllmSampler, evaluate_policy

GAME = "agile:guess_number"
OPTIONS = EpisodeOptions(max_turns=3, max_new_tokens=4)
NAMES = ("adapter", "base", "wider", "merged")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> dict[str, str]:
    """Folders of a base, of adapters on it of ranks 2 and 12, and of a model with other weights."""
    folder = tmp_path_factory.mktemp("saved")
    for seed, (name, rank) in enumerate([("adapter", 2), ("wider", 12), ("merged", 4)]):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(embedded_model)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(base, config)
        if name == "merged":
            model = model.merge_and_unload()
            base.generation_config.save_pretrained(folder / name)
        model.save_pretrained(folder / name)
    for file in embedded_model.iterdir():
        if not (folder / "merged" / file.name).exists():
            (folder / "merged" / file.name).write_bytes(file.read_bytes())
    return {"base": str(embedded_model)} | {name: str(folder / name) for name in NAMES if name != "base"}


@pytest.fixture(scope="module")
def sampler() -> Iterator[VllmSampler]:
    with VllmSampler(gpu_memory_utilization=0.3) as made:
        yield made


def tokens(results: EpisodeResults) -> list[Any]:
    return [(one.prompt_ids, one.completion_ids, one.rewards, one.seed) for one in results.trajectories]


def play(model: Any, **changes: Any) -> EpisodeResults:
    return evaluate_policy(model, None, GAME, 12, **{"options": OPTIONS, "greedy": True, **changes})


def test_greedy_episodes_are_those_of_transformers(saved: dict[str, str], sampler: VllmSampler) -> None:
    """The base and both adapters on one engine; a model with other weights on the next one."""
    loaded = {name: sampler.load(path) for name, path in saved.items()}
    engines, found = [], []
    for name in (*NAMES, "adapter"):
        ours, theirs = play(loaded[name]), play(saved[name])
        found.append(tokens(ours))
        engines.append(sampler._engine)
        assert found[-1] == tokens(theirs), name
        for one, other in zip(ours.trajectories, theirs.trajectories):
            assert one.sampling_logprobs == pytest.approx(other.sampling_logprobs, abs=1e-4)
    assert engines[0] is engines[1] is engines[2], "one engine for the policies on one base"
    assert engines[2] is not engines[3] is not engines[4] and not hasattr(engines[0], "engine")
    assert found[0] == found[4] and all(one != found[0] for one in found[1:4])


def test_sampled_episodes_repeat_themselves_and_have_noise_of_their_own(
    saved: dict[str, str], sampler: VllmSampler
) -> None:
    model = sampler.load(saved["adapter"])
    once, again, other = (
        tokens(play(model, greedy=False, sampling_seed=seed, generation_chunk_size=None)) for seed in (0, 0, 1)
    )
    assert once == again != other


def live_bytes() -> int:
    """Bytes of the tensors that something refers to."""
    gc.unfreeze()  # vLLM hides what an engine's start leaves
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta]
    return sum({one.data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


def test_a_closed_sampler_frees_the_engine_and_starts_another(saved: dict[str, str], sampler: VllmSampler) -> None:
    model = sampler.load(saved["wider"])
    once, before = tokens(play(model)), live_bytes()
    sampler.close()
    assert before - live_bytes() > 2**30, "the cache of 1 GiB, and the weights"
    assert tokens(play(model)) == once


def test_what_vllm_cannot_serve(
    saved: dict[str, str], sampler: VllmSampler, embedded_model: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(embedded_model)
    get_peft_model(base, LoraConfig(use_dora=True, target_modules="all-linear")).save_pretrained(tmp_path / "dora")
    with pytest.raises(ValueError, match="use_dora=True"):
        sampler.load(str(tmp_path / "dora"))
    shutil.copytree(saved["adapter"], tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged/adapter_model.safetensors")
    missing, *_ = weights
    save_file(
        {name: weight for name, weight in weights.items() if name != missing},
        tmp_path / "damaged/adapter_model.safetensors",
    )
    with pytest.raises(ValueError, match="is missing"):
        sampler.load(str(tmp_path / "damaged"))
    shutil.copytree(embedded_model, tmp_path / "quantized")
    config = json.loads((embedded_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "quantized/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'bitsandbytes'"):
        sampler.load(str(tmp_path / "quantized"))
    model = sampler.load(saved["adapter"])
    with pytest.raises(ValueError, match=r"temperature=2\.5"):
        play(model, greedy=False, sampling=SamplingSettings(temperature=2.5))
    with pytest.raises(ValueError, match=r"device='cpu'.*loaded already"):
        play(model, device="cpu")


def test_the_example_of_the_docs(
    saved: dict[str, str], sampler: VllmSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler.close()
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/adapter").symlink_to(saved["adapter"])
    monkeypatch.chdir(tmp_path)
    (block,) = (one.text for one in of("python") if "VllmSampler" in one.text)
    names: dict[str, Any] = {}
    exec(block.replace("600", "8"), names)
    assert names["results"].metrics["episodes"] == 8


def test_the_command_on_vllm_reports_what_it_reports_on_transformers(
    saved: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", saved["adapter"], "--against", saved["base"], saved["merged"], "--environment", GAME, "--greedy"]
    command += ["--max_turns", "2", "--max_new_tokens", "3", "--episodes", "16", "--no_card", "--json", "--output_dir"]
    reports = []
    for name, more in (("theirs", []), ("ours", ["--use_vllm", "--vllm_gpu_memory_utilization", "0.3"])):
        assert main([*command, str(tmp_path / name), *more]) == 0
        content = json.loads(capfd.readouterr().out)
        assert content["settings"]["use_vllm"] == (name == "ours")
        for environment in content["environments"]:
            for policy in environment["policies"]:
                assert len(list(Path(policy.pop("records")).glob("eval*.parquet"))) == 1
        reports.append(content["environments"])
    assert reports[0] == reports[1]
    assert len(reports[1][0]["policies"]) == 3 and len(reports[1][0]["comparisons"]) == 2
