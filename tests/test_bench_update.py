"""The logic of ``benchmarks/update_vs_trl.py``: the episodes that it trains on, its counters, its tables."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import update_vs_trl as bench


def test_the_workloads_have_the_tokens_that_the_page_states():
    batches = {name: workload.make(random.Random(0), 1000) for name, workload in bench.WORKLOADS.items()}
    assert all(len(batch) == 16 for batch in batches.values())
    rows = {name: [len(e.ids) for e in batch] for name, batch in batches.items()}
    assert set(rows["whole"]) == set(rows["sure"]) == {70 + 8 * 32 + 7 * 70}
    assert sorted(rows["ragged"]) == sorted(
        70 + turns * 32 + (turns - 1) * 70 for turns in range(1, 9) for _ in range(2)
    )
    assert set(rows["long"]) == {1024 + 256}
    assert bench.distinct_tokens(batches["long"]) == 2 * 1024 + 16 * 256
    # The members share the prompt, four turns and the four observations after them.
    shared = 70 + 4 * (32 + 70)
    assert bench.distinct_tokens(batches["sure"]) == 2 * (shared + 8 * (816 - shared))
    assert bench.distinct_tokens(batches["whole"]) == 2 * (70 + 8 * (816 - 70))
    returns = [sum(e.rewards) for e in batches["zero_advantage"]]
    assert len(set(returns[:8])) == 8 and len(set(returns[8:])) == 1
    for batch in batches.values():
        for e in batch:
            assert len(e.action_positions) == sum(end - start for start, end in e.turns)
            assert e.action_positions[0] == len(e.prompt) - 1
            assert e.trajectory(0).rewards == e.rewards


def test_the_limit_computes_the_gradient_of_the_whole_rows(embedded_model):
    """Whether the common start is read once or with every row."""
    prompt = [5, 6, 7, 8]
    episodes = [
        bench.Episode(prompt, [9, 10, member + 20, 11, 12], [(0, 1), (3, 5)], [0.0, 1.0])
        for member in range(bench.GROUP)
    ]
    limit = bench.Limit(embedded_model)
    gradients = []
    for plan in ((False, 1), (True, 2)):
        limit.run(episodes, 1, *plan)
        gradients.append({n: p.grad.clone() for n, p in limit.model.named_parameters() if p.grad is not None})
    rows, shared = (torch.cat([g.flatten() for g in found.values()]) for found in gradients)
    assert rows.norm() > 0 and (rows - shared).norm() < 1e-5 * rows.norm()


def test_saved_bytes_are_the_most_at_any_moment():
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(2, 4, requires_grad=True)
    with bench.SavedBytes([weight]).counting() as saved:
        for _ in range(3):
            (x @ weight).exp().sum().backward()  # keeps x and the output of exp, 2 x 4 floats each
    assert saved.peak == 2 * 32


def test_tokens_of_the_head_are_counted():
    original = ChunkedLogProbFunction.apply
    with bench.counting_head() as tokens:
        ChunkedLogProbFunction.apply(torch.ones(3, 4), torch.ones(5, 4), None, torch.zeros(3, dtype=torch.long), 1.0, 5)
    assert tokens == [3] and ChunkedLogProbFunction.apply == original


@pytest.fixture
def results():
    seconds = {"ours": [3.0, 4.0, 9.0], "TRL": [4.0, 4.0, 10.0], "limit": [3.0, 3.0, 3.0]}
    whole = {
        "seconds": seconds,
        "saved_bytes": {"ours": 2**20, "TRL": 2**22},
        "head_tokens": {"ours": 7, "TRL": 9},
        "action_tokens": 7,
        "tokens": 11,
        "distinct_tokens": 10,
        "limit": "",
    }
    ppo = {"GRPO": [1.0], "PPO": [2.0], "PPO, critic_layers=1": [2.0], "forward": [1.0], "backward": [2.0]}
    growth = {"tokens": [1024], "seconds": {"ours": [1.0], "TRL": [2.0], "limit": [0.5]}}
    return {"whole": whole, "growth": growth, "ppo": {"seconds": ppo}}


def test_the_page_gets_the_tables(results):
    page = "a\n<!-- begin: benchmark update -->\nold\n<!-- end -->\nb\n<!-- begin: benchmark ppo -->\n<!-- end -->\nc"
    written = bench.with_tables(page, bench.sections(results))
    row = "| whole | 11 | 10 | 4.00 s | 4.00 s | 3.00 s | 0.90 (0.75 to 1.00) | 0.75 | 1.33 (1.00 to 3.00) | 1.25 |"
    assert row in written and "old" not in written and written.startswith("a\n") and written.endswith("c")
    assert "| PPO, critic_layers=1 | 2.00 | 2.00 (2.00 to 2.00) | 1.75 | 1.58 |" in written
    assert bench.with_tables(written, bench.sections(results)) == written


def test_what_is_missed_is_said(results):
    assert bench.missed(results) == [
        "whole: 0.90 of TRL's time, bar 0.75",
        "whole: 1.33 of limit's time, bar 1.25",
        "PPO, critic_layers=1: 2.00 of GRPO's time, bar 1.75",
    ]
