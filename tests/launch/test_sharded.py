"""Our code on models that FSDP2 has really divided among two processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from launching import run
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.launch
SCRIPT = Path(__file__).with_name("sharded.py")
ROOT = SCRIPT.parents[2]
CASES = ("grpo", "grpo-full", "ppo", "taught")


@pytest.fixture(scope="module")
def runs(embedded_model, tmp_path_factory) -> list[Path]:
    folders = []
    for processes in (1, 2):
        folders.append(tmp_path_factory.mktemp(f"sharded-{processes}"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        done = run(
            [*command, str(SCRIPT), str(embedded_model), str(folders[-1])],
            timeout=300,  # processes that wait for each other in a rollout would wait for ever
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "trainers")},
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return folders


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_are_those_of_one_process(runs, case):
    """Two updates with a rollout of ragged episodes each; the reference moves in between."""
    one, two = (torch.load(folder / case / "result.pt") for folder in runs)
    assert one["share"] == 1.0 and 0.5 <= two["share"] < 0.51
    for ours, theirs in zip(two["gradients"], one["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for adapter in (".default.", ".critic.") if case == "ppo" else ("",):
            names = [name for name in theirs if adapter in name]
            size = sum(float(theirs[name].square().sum()) for name in names) ** 0.5
            error = sum(float((ours[name] - theirs[name]).square().sum()) for name in names) ** 0.5
            assert size > 0 and error < 1e-5 * size


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_whole(runs, embedded_model, case):
    saved = [
        {
            str(path.relative_to(folder / case)): load_file(path)
            for path in (folder / case / "end").rglob("*.safetensors")
        }
        for folder in runs
    ]
    assert len(saved[0]) == {"grpo": 2, "ppo": 2}.get(case, 1)
    for name in saved[0].keys() | saved[1].keys():
        torch.testing.assert_close(saved[1][name], saved[0][name], rtol=1e-5, atol=1e-6)
    folder = runs[1] / case / "end"
    if case == "grpo-full":
        AutoModelForCausalLM.from_pretrained(folder)
    else:
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(embedded_model), folder)
