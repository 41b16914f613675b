"""Real gloo DDP, started by torchrun: two processes play the episodes of one and compute its gradient."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from games import relative_error

from agile_trainers.rollout.record import read_records

SCRIPT = Path(__file__).with_name("two_processes.py")
LOGGED = ["return/mean", "return/std", "advantage/std", "advantage/mean", "turns/mean", "tokens_per_turn", "reward",
          "groups_without_signal", "turns_without_comparison", "num_tokens", "kl", "success"]  # fmt: skip


def launch(processes: int, model: Path, output: Path, changes: dict) -> dict:
    output.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(model), str(output), json.dumps(changes)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output / "result.pt", weights_only=False)


def episodes(folder: Path, kind: str) -> list[dict]:
    records = [record for path in sorted((folder / "rollouts").glob(f"*{kind}*")) for record in read_records(path)]
    return sorted(records, key=lambda r: (r.get("group", 0), r.get("member", r["seed"])))


@pytest.mark.parametrize(
    "changes",
    [
        # A group spans both processes: four episodes each, eight in a group.
        {"num_generations": 8, "whiten_advantages": True, "importance_sampling_level": "turn", "beta": 0.1},
        {"num_generations": 4, "scale_rewards": "batch", "loss_type": "grpo", "advantage_granularity": "trajectory"},
    ],
    ids=["one group over both ranks", "batch statistics"],
)
def test_two_processes_are_one(embedded_model, tmp_path, changes):
    one = launch(1, embedded_model, tmp_path / "one", {**changes, "per_device_train_batch_size": 8})
    two = launch(2, embedded_model, tmp_path / "two", {**changes, "per_device_train_batch_size": 4})
    assert (one["processes"], two["processes"]) == (1, 2) and two["distributed_type"].endswith("MULTI_CPU")
    for kind in ("generation", "eval"):
        ours, theirs = episodes(tmp_path / "one", kind), episodes(tmp_path / "two", kind)
        assert len(ours) == (8 if kind == "generation" else 5)
        assert [r["completion_ids"] for r in ours] == [r["completion_ids"] for r in theirs]
        for name in ("turn_ids", "seed", "return"):
            assert [r[name] for r in ours] == [r[name] for r in theirs]
    for ours, theirs in zip(episodes(tmp_path / "one", "generation"), episodes(tmp_path / "two", "generation")):
        assert [t["advantage"] for t in ours["turns"]] == pytest.approx(
            [t["advantage"] for t in theirs["turns"]], abs=1e-6
        )
    assert relative_error(two["gradients"][0], one["gradients"][0]) < 1e-5
    for name, value in one["adapter"].items():
        torch.testing.assert_close(two["adapter"][name], value, rtol=1e-5, atol=1e-7)
    for name in LOGGED:
        if name in one["logged"]:
            assert two["logged"][name] == pytest.approx(one["logged"][name], abs=1e-5), name
    for name in ("eval_return", "eval_return_sem", "eval_episodes", "eval_success"):
        assert two["evaluation"][name] == pytest.approx(one["evaluation"][name], abs=1e-6), name
