"""The comparison with AgileRL, without AgileRL: names, batches, formulas and tables by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import agilerl_gradients as bench
from agilerl_names import common_name
from agilerl_scripts import called, pair

THEIRS = "pretrained_model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.actor.weight"
OURS = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"


def test_both_sides_names_become_one():
    assert common_name(THEIRS) == common_name(OURS) == "policy:layers.0.self_attn.q_proj.A"
    assert common_name(OURS.replace("default", "ref")) == common_name(THEIRS.replace("actor", "reference"))
    head = "base_model.model.value_head.modules_to_save.critic.bias"
    assert common_name(head) == common_name("v_head.summary.bias") == "value:bias"
    assert common_name("base_model.model.value_head.original_module.bias") == common_name("model.norm.weight") == ""


def test_a_batch_by_hand():
    episode = bench.Played([5, 6], [7, 8, 9, 10], [(0, 2), (3, 4)], [1.0, -1.0], 0)
    assert episode.actions == [2, 3, 5] and episode.turn_of == [0, 0, 1]
    arrays = bench.as_arrays([episode, bench.Played([5], [7], [(0, 1)], [2.0], 1)], pad=0)
    assert arrays["token_ids"].tolist() == [[5, 6, 7, 8, 9, 10], [5, 7, 0, 0, 0, 0]]
    # Index t is the token that position t predicts.
    assert arrays["turn_ids"].tolist() == [[-1, 0, 0, -1, 1], [0, -1, -1, -1, -1]]
    assert arrays["rewards"].tolist() == [[1.0, -1.0], [2.0, 0.0]]
    trajectory = episode.trajectory([-0.1, -0.2, -0.3])
    assert trajectory.sampling_logprobs == [-0.1, -0.2, 0.0, -0.3] and trajectory.rewards == [1.0, -1.0]


def evidence(episodes: list[bench.Played], **changes: Any) -> bench.Evidence:
    options = SimpleNamespace(gamma=0.5, gae_lambda=0.5, beta=0.1, vf_coef=0.5)
    zeros = [np.zeros(len(e.actions)) for e in episodes]
    given = {"policy": zeros, "reference": zeros, "values": zeros, "sampled": zeros} | changes
    one = bench.Case("PPO", "", turns=len(episodes[0].turns))
    return bench.Evidence(
        one, episodes, given["policy"], given["reference"], given["values"], given["sampled"], options
    )


def single(*rewards: float, length: int = 2) -> list[bench.Played]:
    return [bench.Played([5], [7] * length, [(0, length)], [reward], 0) for reward in rewards]


def test_returns_and_estimates_by_hand():
    assert bench.returns([1.0, 2.0, 4.0], 0.5).tolist() == [3.0, 4.0, 4.0]
    # deltas 1 + .5 * 3 - 2 = .5 and 4 - 3 = 1
    assert bench.gae([1.0, 4.0], np.array([2.0, 3.0]), 0.5, 0.5).tolist() == [0.5 + 0.25, 1.0]


def test_length_is_paid_for_there_only():
    at = evidence([*single(1.0, length=1), *single(1.0, 0.0, length=3)])
    there, here = (np.concatenate(terms(at).log_probs) for terms in (bench.reinforce_there, bench.reinforce_here))
    # Returns there: 1; 1.75, 1.5, 1; 0, 0, 0. Here: each token its turn's reward.
    assert here[0] == pytest.approx(here[1]) and there[1] < there[2] < there[3] == pytest.approx(there[0])
    values = np.array([1, 1.75, 1.5, 1, 0, 0, 0])
    assert there * -7 == pytest.approx((values - values.mean()) / values.std(ddof=1))


def test_values_are_read_at_the_last_or_the_first_token_of_a_turn():
    episode = bench.Played([5], [7, 7, 8, 7, 7], [(0, 2), (3, 5)], [1.0, 2.0], 0)
    other = bench.Played([5], [7, 7, 8, 7, 7], [(0, 2), (3, 5)], [0.0, 0.0], 1)
    at = evidence([episode, other], values=[np.array([0.0, 10.0, 1.0, 20.0]), np.zeros(4)])
    there, here = (bench.ppo_turns(at, there=side) for side in (True, False))
    assert there.values is not None and here.values is not None
    # Last turn, there: advantage 2 - 20; here: 2 - 1. The coefficient is -.5 * advantage / 4 turns.
    assert there.values[0].tolist()[3] == pytest.approx(-0.5 * -18 / 4) and there.values[0][2] == 0
    assert here.values[0].tolist()[2] == pytest.approx(-0.5 * 1 / 4) and here.values[0][3] == 0


def test_penalties_are_pooled_as_told():
    episodes = [bench.Played([5], [7, 7], [(0, 2)], [0.0], 0), bench.Played([5], [7], [(0, 1)], [0.0], 1)]
    at = evidence(episodes, policy=[np.array([1.0, 2.0]), np.array([2.0])])
    summed = np.concatenate(bench.penalized(at, lambda gaps: float(gaps.sum())).log_probs)
    averaged = np.concatenate(bench.penalized(at, lambda gaps: float(gaps.mean())).log_probs)
    # Rewards -.3 and -.2 with the sum, -.15 and -.2 with the mean.
    assert summed[0] > 0 > summed[2] and averaged[0] < 0 < averaged[2]


def test_gradients_are_compared_by_role():
    ours = {"policy:a": torch.tensor([3.0, 4.0]), "critic:a": torch.tensor([1.0])}
    theirs = {"policy:a": torch.tensor([3.0, 4.0]), "critic:a": torch.tensor([2.0])}
    assert bench.difference(ours, theirs, "policy") == 0.0 and bench.difference(ours, theirs, "critic") == 1.0
    with pytest.raises(ValueError, match="critic:a"):
        bench.difference(ours, {"policy:a": theirs["policy:a"]})


def test_a_case_changes_both_scripts_alike(tmp_path):
    one = next(one for one in bench.SAME if one.accumulation == 8)
    scripts = pair("reasoning", one.algorithm, **one.ours)
    theirs, ours = bench.runnable(scripts, one.algorithm, Path("model"), tmp_path, **one.theirs)
    there, here = called(theirs, "GRPO"), called(ours, "Config")
    assert there["mini_batch_size"] == here["per_device_train_batch_size"] * here["gradient_accumulation_steps"] == 64
    assert there["batch_size"] * there["group_size"] == here["generation_batch_size"] == 64
    assert there["max_grad_norm"] == here["max_grad_norm"] and "Qwen" not in theirs + ours


def test_what_fails_is_named():
    row = {"steps": {"AgileRL": 8, "ours": 8}, "steps_per_rollout": {"ours": 8}, "rates": [5e-6], "equal": True}
    same = {"algorithm": "PPO", "title": "t", "first": 1e-7, "last": 2e-7}
    different = {"title": "d", "difference": 0.5, "AgileRL": 1e-7, "ours": 1e-7, "explained": "e"}
    good = {"cadence": {"a": row}, "same": [same], "different": [different]}
    assert bench.missed(good) == []
    bad = {
        "cadence": {"a": {**row, "steps": {"AgileRL": 8, "ours": 1}}},
        "same": [{**same, "first": 1e-4}],
        "different": [{**different, "ours": 0.1}],
    }
    assert len(bench.missed(bad)) == 3
    assert bench.cadence_table(good["cadence"]).endswith("| a | 8 | 8 = 8 | `5e-06` |")
    assert bench.same_table([same]).endswith("| PPO | t | 1e-07 | 2e-07 |")
    assert bench.different_table([different]).endswith("| d | 0.5 | 1e-07 | 1e-07 | e |")
