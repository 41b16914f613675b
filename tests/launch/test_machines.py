"""Two machines without a common disk do what one machine with two processes does, and resume from their own disks.

Each machine is a launch with a working directory of its own; they meet on the loopback interface.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launched_runs import ROOT, distance, episodes, weights
from launching import run

from agile_trainers.adapters.folders import RECORD, read_json

pytestmark = pytest.mark.launch
CASES = ("grpo", "ppo")
SCRIPT = Path(__file__).with_name("machines.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_machines(folders: list[Path], *arguments: str | Path, config: str = "ddp") -> list[CompletedProcess[str]]:
    """Two processes on as many machines as there are folders, in which they stand."""
    port = free_port()
    path = os.pathsep.join(str(ROOT / name) for name in ("tests", "tests/trainers", "tests/launch"))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", port]
    command += ["--config_file", ROOT / f"accelerate_configs/cpu/{config}.yaml"]
    command += ["--num_machines", len(folders), "--main_process_ip", "127.0.0.1"]
    if config != "ddp":
        command += ["--deepspeed_multinode_launcher", "standard"]

    def start(rank: int) -> CompletedProcess[str]:
        words = [*command, "--machine_rank", rank, SCRIPT, *arguments]
        return run(list(map(str, words)), timeout=600, cwd=folders[rank], env={**os.environ, "PYTHONPATH": path})

    with ThreadPoolExecutor() as pool:
        return list(pool.map(start, range(len(folders))))


def succeed(done: list[CompletedProcess[str]]) -> None:
    assert [one.returncode for one in done] == [0] * len(done), "".join(one.stderr[-3000:] for one in done)


@pytest.fixture(scope="module")
def folders(embedded_model, tmp_path_factory) -> dict[str, Path]:
    """Where one machine with two processes trained, and two machines with one each."""
    root = tmp_path_factory.mktemp("machines")
    found = {name: root / name for name in ("one", "a", "b")}
    for folder in found.values():
        folder.mkdir()
    model = shutil.copytree(embedded_model, root / "model")
    succeed(launch_machines([found["one"]], model, "train", *CASES))
    succeed(launch_machines([found["a"], found["b"]], model, "train", *CASES))
    return {**found, "model": model}


@pytest.mark.parametrize("case", CASES)
def test_two_machines_are_one(folders, case):
    one, a, b = (weights(folders[name] / "run" / case / "end") for name in ("one", "a", "b"))
    assert distance(a, one) == 0.0 and distance(b, one) == 0.0
    played = {name: episodes(folders[name] / "run" / case) for name in ("one", "a", "b")}
    ids = [[record["completion_ids"] for record in played[name]] for name in ("one", "a", "b")]
    assert ids[1] and ids[2] and sorted(ids[0]) == sorted(ids[1] + ids[2])
    results = [
        json.loads((folders[name] / "run" / case / f"result-{rank}.json").read_text())["evaluation"]
        for name, rank in (("one", 0), ("a", 0), ("b", 1))
    ]
    assert len({result["eval_return"] for result in results}) == 1


@pytest.mark.parametrize("case", CASES)
def test_each_machine_holds_what_it_resumes_from(folders, case):
    for name, rank in (("a", 0), ("b", 1)):
        checkpoint = folders[name] / "run" / case / "checkpoint-3"
        files = {path.name for path in checkpoint.rglob("*")}
        assert {"complete.json", "optimizer.pt", "adapter_model.safetensors", f"rng_state_{rank}.pth"} <= files
        assert f"rng_state_{1 - rank}.pth" not in files


def test_a_disk_that_does_not_fit_the_option_is_refused(folders):
    for name in ("a", "b"):
        not_shared, shared = json.loads((folders[name] / "refused.json").read_text())
        assert "do not share output_dir" in not_shared and "Set save_on_each_node=True" in not_shared
        assert "share output_dir" in shared and "Set save_on_each_node=False" in shared


def test_a_killed_run_resumes_from_the_last_step_that_both_hold(folders, tmp_path):
    """The first machine had moved its last checkpoint into place when the second was killed."""
    root = shutil.copytree(folders["a"].parent, tmp_path / "machines")
    for case in CASES:
        shutil.rmtree(root / "b" / "run" / case / "checkpoint-3")
    succeed(launch_machines([root / "a", root / "b"], root / "model", "resume", *CASES))
    for case in CASES:
        whole, *resumed = (root / name / "run" / case for name in ("one", "a", "b"))
        for folder in resumed:
            assert distance(weights(folder / "resumed-end"), weights(whole / "end")) == 0.0
        records = [read_json(folder / "checkpoint-3" / RECORD) for folder in resumed]
        assert records[0]["run_id"] == records[1]["run_id"]
        assert (resumed[0] / "superseded" / "1" / "checkpoint-3").is_dir()


def test_machines_in_another_order_are_refused(folders, tmp_path):
    root = shutil.copytree(folders["a"].parent, tmp_path / "machines")
    succeed(launch_machines([root / "b", root / "a"], root / "model", "resume", "grpo"))
    for name in ("a", "b"):
        assert "lacks rng_state_0.pth, rng_state_1.pth" in (root / name / "error.txt").read_text()


def test_deepspeed_needs_a_shared_disk(embedded_model, tmp_path):
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agile-trainers[deepspeed]'")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    model = shutil.copytree(embedded_model, tmp_path / "model")
    done = launch_machines(folders, model, "train", "grpo", config="zero2")
    assert all(one.returncode != 0 for one in done)
    assert any("DEEPSPEED saves one checkpoint from all machines" in one.stderr for one in done)
