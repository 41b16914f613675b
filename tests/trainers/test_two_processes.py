"""Real gloo DDP, as torchrun starts it: two processes play the episodes of one and compute its gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from games import relative_error
from several_processes import SCRIPT, episodes, launch

LOGGED = ["return/mean", "return/std", "advantage/std", "advantage/mean", "turns/mean", "tokens_per_turn", "reward",
          "zero_advantage_groups", "turns_without_comparison", "num_tokens", "kl", "success",
          "reward_std", "frac_reward_zero_std", "completions/min_length", "completions/clipped_ratio", "judge/turns",
          "rewards/judge/mean", "rewards/judge/std", "stop/environment_error", "prompt_information", "advantage/zero",
          "return/answers_cut", "episodes_played", "rewrites/context", "rewrites/questions", "tokens_read_again",
          "drift/kl", "drift/masked", "teacher/kl", "turn/3/teacher_kl", "demonstrations/alone", "demonstrations/return",
          "demonstrations/log_prob", "turn/1/demonstration_log_prob",
]  # fmt: skip


CASES = {
    # A group spans both processes: four episodes each, eight in a group.
    "one-group": {
        "num_generations": 8,
        "whiten_advantages": True,
        "importance_sampling_level": "turn",
        "beta": 0.1,
        "entropy_coef": 0.3,
    },
    # The penalty of the second step is of a policy that has moved.
    "batch-statistics": {
        "scale_rewards": "batch",
        "loss_type": "grpo",
        "advantage_granularity": "trajectory",
        "kl_placement": "reward",
        "beta": 0.1,
        "max_steps": 2,
    },
    # Some groups are informative and some are not, and with them the ranks.
    "rows-skipped": {
        "skip_zero_advantage": True,
        "zero_advantage_eps": 0.5,
        "max_tokens_per_micro_batch": 60,
        "num_iterations": 2,
        "max_steps": 2,
        "by_hand": True,
    },
    # Every rank has kept sets of other sizes.
    "truncated": {
        "num_generations": 8,
        "top_p": 0.9,
        "top_k": 30,
        "min_new_tokens": 2,
        "beta": 0.1,
        "max_tokens_per_micro_batch": 60,
    },
    # Five episodes of evaluation: one process scores one more than the other. Some fail.
    "judged": {"judged": True},
    # A group is of one environment, wherever it is played; the batch's statistics are each environment's own.
    "mixture": {
        "environment": {"chatter": "games:Chatter", "one": "games:OneTurn"},
        "max_turns": 4,
        "environment_limits": {"one": {"max_new_tokens": 3}},
        "num_generations": 2,
    },
    # One of them rewrites its context, with questions; the other does not.
    "rewritten": {
        "environment": {"long": "games:Long", "one": "games:OneTurn"},
        "history": {"long": "games:takes_notes", "one": "full"},
        "max_turns": 6,
        "num_generations": 2,
    },
    # Hints of other lengths on each rank, and none for some episodes; the divisor is the sum of the weights of all.
    "taught": {
        "environment": {"hinting": "games:Hinting", "one": "games:OneTurn"},
        "teacher": "policy",
        "teacher_hint": "hint",
        "teacher_turn_decay": 0.5,
        "num_generations": 2,
    },
    # One environment has no teacher, and the mean is over the episodes of the other.
    "taught-one-of-two": {
        "environment": {"hinting": "games:Hinting", "one": "games:OneTurn"},
        "teacher": {"hinting": "policy"},
        "teacher_hint": "hint",
        "loss_type": "grpo",
        "num_generations": 2,
    },
    "taught-distributions": {
        "environment": {"hinting": "games:Hinting", "one": "games:OneTurn"},
        "teacher": "policy",
        "teacher_hint": "hint",
        "teacher_gradient": "distribution_forward",
        "max_tokens_per_micro_batch": 60,
        "num_generations": 2,
    },
    # Demonstrations of one process only, whose credit is beside own episodes of both; the divisor is of own tokens.
    "shown": {"demonstrations": "experts:hums", "num_generations": 8, "demonstrations_per_group": 3},
    # A success of one process takes a place in the other; the groups span both.
    "replayed": {
        "environment": "games:Rarely",
        "numbers": [0, 1],
        "replay_successes": 2,
        "num_generations": 8,
        "max_steps": 6,
    },
    "shown-ReBN": {
        "demonstrations": "experts:hums",
        "demonstration_loss": "weighted",
        "demonstrations_per_group": 3,
        "algorithm": "reinforce",
        "num_generations": 1,
        "max_tokens_per_micro_batch": 60,
    },
    # An agent that asks eight things at once, on a server of each process, beside an environment that is stepped.
    "agents": {
        "environment": {"gathers": "agent:environment_agents:gathers", "one": "games:OneTurn"},
        "max_turns": 9,
        "num_generations": 2,
    },
    # The statistics of a batch are those of each environment, over the processes.
    "mixed-ReBN": {
        "environment": {"chatter": "games:Chatter", "one": "games:OneTurn"},
        "algorithm": "reinforce",
        "num_generations": 1,
        "gamma": 0.9,
        "max_steps": 2,
        "by_hand": True,
    },
    # Zero-advantage groups, of which one process has more than the other, are replaced; the tasks of all are counted.
    "tasks": {
        "judged": True,
        "environment": "games:Uneven",
        "num_generations": 2,
        "numbers": [0, 1, 2, 3, 4, 5],
        "task_sampling": "adaptive",
        "task_column": "number",
        "resample_zero_advantage_groups": 2,
        "max_steps": 2,
    },
    # Each process keeps the policies that play and draws its share of rows that are not due yet.
    "ahead": {
        "batches_ahead": 1,
        "numbers": list(range(12)),
        "drift_correction": "token_mask",
        "num_generations": 2,
        "max_steps": 2,
    },
    "ahead-by-decision": {
        "batches_ahead": 1,
        "drift_correction": "decision_truncate",
        "num_generations": 8,
        "max_steps": 2,
    },
}
EVALUATED = ("judged", "rewritten", "agents", "ahead")
"""The rest differs from these in how a batch is trained on. These are diagnosed too."""


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(scope="module")
def runs(embedded_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    cases = {name: {"per_device_train_batch_size": 8, "diagnosis_interval": 50 * (name in EVALUATED),
                    "evaluated": name in EVALUATED, **case}
             for name, case in CASES.items()}  # fmt: skip
    return [launch(SCRIPT, n, embedded_model, folder / str(n), cases) for n in (1, 2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(runs, case):
    folders = [run / case for run in runs]
    one, two = (torch.load(folder / "result.pt", weights_only=False) for folder in folders)
    assert (one["processes"], two["processes"]) == (1, 2) and two["distributed_type"].endswith("MULTI_CPU")
    for kind in ("train", "eval") if case in EVALUATED else ("train",):
        ours, theirs = (episodes(folder, kind) for folder in folders)
        batches = 1 if "num_iterations" in CASES[case] else CASES[case].get("max_steps", 1)
        if kind == "eval" or case not in ("tasks", "replayed"):  # where some are discarded, or replaced
            assert len(ours) == (8 * batches if kind == "train" else 5)
        assert [r["completion_ids"] for r in ours] == [r["completion_ids"] for r in theirs]
        for name in ("turn_ids", "seed", "return", "environment", "row", "group", "member"):
            assert [r[name] for r in ours] == [r[name] for r in theirs]
    assert any(r["demonstration"] for r in episodes(folders[0], "train")) == case.startswith(("shown", "replayed"))
    for ours, theirs in zip(*(episodes(folder, "train") for folder in folders)):
        pairs = [[turn["advantage"] for turn in episode["turns"]] for episode in (ours, theirs)]
        assert pairs[0] == pytest.approx(pairs[1], abs=1e-5)
    for single, double in zip(one["gradients"], two["gradients"]):
        nothing = not any(gradient.any() for gradient in (*single.values(), *double.values()))
        assert nothing or relative_error(double, single) < 1e-5
    for name, value in one["adapter"].items():
        torch.testing.assert_close(two["adapter"][name], value, rtol=1e-5, atol=1e-7)
    apart = [name for name in one["logged"] if name.startswith(("environments/", "tasks/", "resampling/"))]
    assert bool(apart) == ("environment" in CASES[case] and case != "replayed")
    assert ("rewrites/questions" in one["logged"]) == (case in ("rewritten", "agents"))
    for name in LOGGED + apart:
        # What calls at once find in the cache depends on when they come.
        if name in one["logged"] and not (case == "agents" and name.endswith("tokens_read_again")):
            assert two["logged"][name] == pytest.approx(one["logged"][name], abs=1e-5), name
    if case in EVALUATED:
        check_evaluations(case, one, two)


def check_evaluations(case, one, two):
    judged = [name for name in one["evaluation"] if name.startswith(("eval_reward", "eval_completions", "eval_judge"))]
    assert ("eval_judge/turns" in judged) == ("judged" in CASES[case]) and "eval_reward" in judged
    several = CASES[case].get("environment", {})
    parts = [f"eval_{part}_return" for part in several] if isinstance(several, dict) else []
    for name in ("eval_return", "eval_return_sem", "eval_episodes", "eval_success", *judged, *parts):
        # TRL's statistics of rewards are float32, whose step at 19.7 is 2e-6.
        assert two["evaluation"][name] == pytest.approx(one["evaluation"][name], rel=1e-6, abs=1e-6), name
    rows = [[{**row, "read_again": None} for row in result["rows"]] for result in (one, two)]
    assert rows[0] == rows[1] and len(rows[0]) == 5, "evaluate_policy: each process its share, all the rows"
    assert "one process, got 2" in two["refusal"] and "one process" not in str(one["refusal"])
    for result in (one, two):
        alone = {name: value for name, value in result["alone"].items() if not name.endswith("tokens_read_again")}
        assert alone == {name: result["evaluation"][f"eval_{name}"] for name in alone}
