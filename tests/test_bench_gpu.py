"""The logic of ``make bench-gpu``, on CPU and a tiny model: the figures mean nothing, what they are made of does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import gpu
from case_log import CaseLog


def test_it_refuses_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main([]) == 2
    assert "torch sees none here" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return gpu.make_model("tiny", tmp_path_factory.mktemp("tiny"))


def test_both_sides_do_the_same_work(tiny):
    measured = [(case, gpu.measure(case, tiny)) for case in gpu.cases(True, False) if isinstance(case, gpu.Case)]
    (ours, trl, turns), speeds = zip(*measured)
    assert [(c.side, c.turns) for c in (ours, trl, turns)] == [("ours", 1), ("TRL", 1), ("ours", 4)]
    assert speeds[0].tokens == speeds[1].tokens and speeds[0].sampled == speeds[1].sampled == speeds[2].sampled == 256
    assert all(speed.rollout > 0 and speed.update > 0 for speed in speeds)


def test_decoding_is_measured_beside_generate(tiny):
    figures = gpu.Decoding("tiny", 4, 24).figures(tiny)
    assert set(figures) == {"ours, tokens/s", "generate, tokens/s"} and min(figures.values()) > 0


def test_an_update_is_measured_beside_trl_and_its_limits(tiny, monkeypatch):
    seconds = {"ours": [2.0, 4.0, 3.0], "TRL": [6.0, 8.0, 6.0], "limit": [1.0, 4.0, 2.0]}
    monkeypatch.setattr("update_vs_trl.compare", lambda *_: {"seconds": seconds, "distinct_tokens": 1000})
    monkeypatch.setattr(gpu, "products_per_second", lambda: 1e9)
    figures = gpu.Update("tiny", "whole").figures(tiny)
    weights = 2048 * 64 + 2 * (64 * (64 + 2 * 64 + 64) + 192 + 3 * 64 * 128 + 2 * 64) + 64
    assert figures["matrix products, s"] == pytest.approx(4 * weights * 1000 / 1e9)
    assert figures["ours, s"] == 3.0 and figures["ours / TRL"] == 0.5 and figures["ours / bare model"] == 1.5


def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    log, tried = CaseLog(tmp_path / "folder" / "bench.jsonl"), []

    def measure(case, model, log, seconds):
        assert model.is_dir() and seconds <= 100
        tried.append(case.name)
        log.write(case.name, "failed" if len(tried) == 2 else "passed", 1.0)
        if len(tried) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "measure_apart", measure)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(log, tmp_path, seconds=100, rehearse=True)
    with log.file.open("a") as file:
        file.write('{"case": "cut of')
    names = [case.name for case in gpu.cases(True, False)]
    assert tried == names[:3]
    log.file.write_text(log.file.read_text() + "\n")
    gpu.run(log, tmp_path, seconds=100, rehearse=True)
    assert tried[3:] == [names[1], *names[3:]], "what failed is tried again, what passed is not"
    assert "| passed |" in log.table() and len(log.results()) == len(names)
    gpu.run(log, tmp_path, seconds=1, rehearse=True)
    assert len(tried) == len(names) + 1


@pytest.mark.slow
def test_a_measurement_that_dies_leaves_its_reason(tmp_path):
    log = CaseLog(tmp_path / "bench.jsonl")
    case = gpu.cases(True, False)[-1]
    gpu.measure_apart(case, tmp_path / "nowhere", log, 100)
    assert "Error" in log.results()[case.name]["reason"]


def test_what_is_measured_on_a_gpu():
    cases = gpu.cases(tiny=False, vllm=True)
    assert len(cases) == len({case.name for case in cases})
    steps = [case for case in cases if isinstance(case, gpu.Case)]
    assert len(steps) == 2 * 2 * 2 * 3
    assert all(case.new_tokens * case.turns == gpu.NEW_TOKENS for case in steps)
    assert {(case.shape, case.rows) for case in cases if isinstance(case, gpu.Decoding)} >= {
        ("0.5B", 64),
        ("0.5B", 256),
    }
    assert {case.shape for case in cases if isinstance(case, gpu.Update)} == {"0.5B", "7B"}
