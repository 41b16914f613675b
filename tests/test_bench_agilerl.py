"""The benchmarks beside AgileRL, without AgileRL: calls of another process, gradients, tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import evolution_vs_agilerl as evolution
import update_vs_agilerl as bench
from counting import reading_gradients
from other_side import OtherSide, OtherSideError

SIDE = f"""
import os, sys
sys.path.insert(0, {str(bench.SCRIPT.parent)!r})
from other_side import serve
total = [0]
def add(number):
    print("said")  # not an answer
    total[0] += number
    return {{"total": total[0]}}
def die():
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)
serve({{"add": add, "die": die, "fail": lambda: 1 / 0}})
"""


def test_calls_of_another_process(tmp_path):
    script = tmp_path / "side.py"
    script.write_text(SIDE)
    with OtherSide(Path(sys.executable), script) as side:
        assert [side("add", number=number)["total"] for number in (2, 3)] == [2, 5]
        with pytest.raises(OtherSideError, match="ZeroDivisionError"):
            side("fail")
        assert side("add", number=1) == {"total": 6}
        with pytest.raises(OtherSideError, match=r"code 3(.|\n)*last words"):
            side("die")


def test_gradients_are_read_before_they_are_clipped_and_after_the_last_pass():
    model = torch.nn.Linear(2, 1, bias=False)
    with reading_gradients(model) as found:
        for x in (1.0, 2.0):
            model(torch.tensor([x, 3.0])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model.zero_grad()
    assert found["weight"].tolist() == [[3.0, 6.0]]
    model(torch.ones(2)).backward()
    assert found["weight"].tolist() == [[3.0, 6.0]]


def test_gradients_are_compared_by_the_name_of_the_matrix():
    def named(adapter: str, *values: float) -> dict[str, torch.Tensor]:
        return {f"m.lora_{m}.{adapter}.weight": torch.tensor([v]) for m, v in zip("AB", values)}

    ours, theirs = bench.plain_names(named("default", 3.0, 4.0)), bench.plain_names(named("actor", 6.0, 8.0))
    assert bench.compare_gradients(ours, theirs) == pytest.approx({"difference": 1.0, "cosine": 1.0, "norms": 2.0})
    turned = bench.plain_names(named("actor", 4.0, -3.0))
    assert bench.compare_gradients(ours, turned) == pytest.approx({"difference": 2**0.5, "cosine": 0.0, "norms": 1.0})
    with pytest.raises(ValueError, match="lora_B"):
        bench.compare_gradients(ours, bench.plain_names(named("actor", 6.0)))


def test_the_table_has_paired_ratios():
    result = {
        "seconds": {"ours": [1.0, 2.0, 6.0], "AgileRL": [4.0, 4.0, 8.0]},
        "saved_bytes": {"ours": 2**20, "AgileRL": 2**22},
        "gradient": {"difference": 2e-6},
    }
    lines = bench.table({"packing": "", "whole": result, "ppo": {**result, "gradient": None}}).splitlines()[2:]
    assert lines[0] == "| whole | 2.00 s | 4.00 s | 0.50 (0.25 to 0.75) | 1 | 4 | 2e-06 |"
    assert lines[1].startswith("| whole, PPO | ") and lines[1].endswith(" |  |")


def test_the_table_of_the_evolution_has_means_over_seeds(monkeypatch):
    monkeypatch.setitem(evolution.SETTINGS, "rounds", 2)

    def side(chance: float, mebibytes: int) -> dict:
        rounds = [{"chance": [chance / 2, 0.1], "seconds": 1.0}, {"chance": [chance, 0.2], "seconds": 3.0}]
        resident = {"before": 2**20, "peak": (1 + mebibytes) * 2**20}
        return {"rounds": rounds, "resident": resident, "bytes": {"base": 2**11, "member": 2**10}}

    results = [{"ours": side(chance, 5), "AgileRL": side(0.4, 7)} for chance in (0.8, 0.6)]
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in evolution.table(results).splitlines()[2:]
    }
    half, whole = (f"right answers of the best member after {count} episodes" for count in (2048, 4096))
    assert rows[half] == ["0.350 (0.300 to 0.400)", "0.200 (0.200 to 0.200) |"]
    assert rows[whole][0] == "0.700 (0.600 to 0.800)"
    assert rows["the same of the worst member at the end"][0] == "0.200 (0.200 to 0.200)"
    assert rows["CPU seconds"][1].startswith("3 (")
    assert rows["most memory, MiB above that before"] == ["5 (5 to 5)", "7 (7 to 7) |"]
    assert rows["KiB of frozen weights, all members"][0] == "2 (2 to 2)"


def test_the_table_of_mutations_names_the_rate_that_the_optimizer_keeps():
    found = {"PPO lr_actor": {"before": {"lr": 1e-4}, "after": {"lr": 1e-5, "optimizer": [1e-4]}}, "integers": {}}
    assert evolution.mutation_table(found).splitlines()[2:] == ["| `PPO lr_actor` | 0.0001 | 1e-05 | 0.0001 |"]
