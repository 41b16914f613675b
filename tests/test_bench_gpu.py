"""The logic of ``make bench-gpu``, on CPU and a tiny model: the figures mean nothing, what they are made of does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import gpu


def test_it_refuses_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main([]) == 2
    assert "torch sees none here" in capsys.readouterr().err


def test_both_sides_do_the_same_work_and_are_written_down(tmp_path, monkeypatch):
    measured = []

    def measure(case, model):
        measured.append((case, plain(case, model)))
        return measured[-1][1]

    plain = gpu.measure
    monkeypatch.setattr(gpu, "measure", measure)
    assert gpu.main(["--tiny", "--output", str(tmp_path / "gpu.md")]) == 0
    (ours, trl, turns), speeds = zip(*measured)
    assert [(c.side, c.turns) for c in (ours, trl, turns)] == [("ours", 1), ("TRL", 1), ("ours", 4)]
    assert speeds[0].tokens == speeds[1].tokens and speeds[0].sampled == speeds[1].sampled == speeds[2].sampled == 256
    assert all(speed.rollout > 0 and speed.update > 0 for speed in speeds)
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert sum(line.startswith("| tiny | 64 |") for line in lines) == 3


def test_the_table_says_what_failed():
    case = gpu.Case("1.5B", 16384, 1, "TRL", vllm=True)
    rows = gpu.table([(case, "OutOfMemoryError: 3 GiB | 2"), (case, gpu.Speed(1234.4, 56.2, 7.89, 1, 1))]).splitlines()
    assert rows[2] == "| 1.5B | 16384 | 1 | vLLM | TRL | OutOfMemoryError: 3 GiB / 2 |  |  |"
    assert rows[3] == "| 1.5B | 16384 | 1 | vLLM | TRL | 1234 | 56 | 7.9 |"


@pytest.mark.slow
def test_a_measurement_that_dies_leaves_its_reason(tmp_path):
    assert "Error" in str(gpu.measure_apart(gpu.Case("tiny", 64, 1, "ours", vllm=False), tmp_path / "nowhere"))


def test_all_of_it_is_measured_on_a_gpu():
    cases = gpu.cases(tiny=False, vllm=True)
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 3
    assert {(case.shape, case.tokens) for case in cases} == {(s, t) for s in ("0.5B", "1.5B") for t in (4096, 16384)}
    assert all(case.new_tokens * case.turns == gpu.NEW_TOKENS for case in cases)
