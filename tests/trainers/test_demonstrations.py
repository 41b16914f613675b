"""Demonstrations in real runs: where they are from, what they are compared with, and how their part of the loss joins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_runs import check_resumed
from experts import hums
from games import Chatter, draw_batch, loss_and_gradients, make_trainer, relative_error, settings
from ppo_games import make_ppo, wake
from recorded import recorded
from split_passes import check_equal, check_layouts, drawn

from agile_trainers.objectives.advantages import group_advantages
from agile_trainers.objectives.demonstrations import ADVANTAGE_SFT, SFT, TREATMENTS, WEIGHTED
from agile_trainers.records.writer import episode_row, write_episodes
from agile_trainers.rollout.metrics import demonstration_metrics
from agile_trainers.rollout.seeds import TRAINING, environment_seed
from agile_trainers.rollout.spec import Demonstration
from agile_trainers.train_batch import DEMONSTRATED, TrainBatch, read_inputs
from agile_trainers.trainers import MultiTurnGRPOConfig, demonstrations
from agile_trainers.types import StopReason, Trajectory, Turn

EXPERT = {"demonstrations": "experts:hums"}


class Late(Chatter):
    """Ends a turn later than it did before, from the second episode on."""

    made = 0

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        Late.made += 1
        first = super().reset(seed, options)
        self.length = 1 + (Late.made > 2)
        return first


class Awaited(Chatter):
    async def step(self, action: str) -> Any:
        return super().step(action)


class Choosing(Chatter):
    """Has policies of its own."""

    def scripted_policies(self) -> dict[str, Any]:
        return {"expert": hums}


def mixed(one: Any) -> list[float]:
    """Makes of one value for each turn."""
    return [float(value) for value in one]


# ------------------------------------------------------------------------------------------------------------- credit


def batch_of(trainer: Any) -> tuple[Any, Any]:
    """The first generation batch, and its credit."""
    played = trainer.rollouts.play([dict(trainer.train_dataset[0])] * 8, 0, 0)
    judged = trainer.batches._credit.judge(played.batch)
    return played, trainer.batches._credit.finish(judged)


def test_an_expert_takes_the_last_places_of_each_group(embedded_model, tmp_path) -> None:
    """From the group's start; the others play what they play in groups of one more."""
    trainer = make_trainer(embedded_model, tmp_path, demonstrations_per_group=2, **EXPERT)
    played, _ = batch_of(trainer)
    assert [one.demonstration for one in played.trajectories] == [False, False, True, True] * 2
    assert played.batch.demonstrations.tolist() == [False, False, True, True] * 2
    for group in (played.trajectories[:4], played.trajectories[4:]):
        assert len({(one.seed, tuple(one.prompt_ids)) for one in group}) == 1
        assert {turn.text for one in group[2:] for turn in one.turns} == {"h"} and group[2].rewards == mixed(
            [1] * len(group[2].turns)
        )
    alone, _ = batch_of(make_trainer(embedded_model, tmp_path))
    for place in (0, 1, 4, 5):
        assert alone.trajectories[place].completion_ids == played.trajectories[place].completion_ids
    # Nothing of the policy's own statistics, tokens and values is an expert's.
    assert not played.batch.valid_mask[2:4].any() and played.batch.action_mask[2:4].any()
    groupless = make_trainer(
        embedded_model, tmp_path, algorithm="reinforce", num_generations=1, demonstrations_per_group=3, **EXPERT
    )
    assert [one.demonstration for one in batch_of(groupless)[0].trajectories] == [False] * 5 + [True] * 3


@pytest.mark.parametrize("granularity", ["turn", "trajectory"])
def test_own_episodes_are_compared_among_themselves(embedded_model, tmp_path, granularity) -> None:
    """A demonstration in a group that fails would push every own episode down."""
    options = {"advantage_granularity": granularity, **EXPERT}
    trainer = make_trainer(embedded_model, tmp_path, environment=Silent, **options)
    played, credit = batch_of(trainer)
    own, expert = credit.advantages[:3], credit.advantages[3]
    assert played.rewards[:4, 0].tolist() == [0.0, 0.0, 0.0, 1.0] and (own == 0).all()
    # (1 - 1/4) / (1/2 + 1e-4): the expert beside all.
    assert expert[played.batch.turn_mask[3]].tolist() == pytest.approx([0.75 / 0.5001], rel=1e-5)
    inside = group_advantages(
        played.batch.turn_rewards, played.batch.turn_mask, played.batch.failed, group_size=4, granularity=granularity
    )
    assert (inside.advantages[:3, 0] < -0.4).all()
    assert credit.metrics["zero_advantage_groups"] == 0.0 and credit.metrics["advantage/zero"] == 1.0


class Silent(Chatter):
    """Hears nothing but the expert, in one turn."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        first = super().reset(seed, options)
        self.length = 1
        return first

    def step(self, action: str) -> Any:
        observation, _, *rest, _ = super().step(action)
        return observation, float(action == "h"), *rest, {"success": action == "h"}


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "ppo"])
def test_a_demonstration_that_is_worse_has_no_credit(embedded_model, tmp_path, algorithm) -> None:
    options = {"demonstrations": "experts:mumbles"}
    if algorithm == "ppo":
        trainer = make_ppo(embedded_model, tmp_path, **options)
        batch = draw_batch(trainer)
        assert (batch[DEMONSTRATED] >= 0).all()
        return
    members = 4 if algorithm == "grpo" else 1
    trainer = make_trainer(
        embedded_model, tmp_path, algorithm=algorithm, num_generations=members, environment=Silent, **options
    )
    batch = draw_batch(trainer)
    assert (batch[DEMONSTRATED] == 0).all() and (batch["advantages"] == 0).all()


@pytest.mark.parametrize(
    ("algorithm", "treatment"),
    [*(("grpo", one) for one in TREATMENTS), ("reinforce", WEIGHTED), ("ppo", ADVANTAGE_SFT)],
)
def test_the_gradient_is_the_stated_mixture(embedded_model, tmp_path, algorithm, treatment) -> None:
    """Of that of the own episodes, divided by their own tokens, and the coefficient's share of the expert's."""
    options = {"demonstration_loss": treatment, "demonstration_coef": 0.3, "demonstrations_per_group": 2, **EXPERT}
    if algorithm == "ppo":
        trainer = make_ppo(embedded_model, tmp_path, **options)
    else:
        members = 4 if algorithm == "grpo" else 1
        trainer = make_trainer(embedded_model, tmp_path, algorithm=algorithm, num_generations=members, **options)
    wake(trainer)
    batch = draw_batch(trainer)
    if algorithm == "ppo":
        trainer.critic.count_turns([batch])
        trainer.critic.learned = False
        assert batch["value_weights"][6:].sum() == 0 < batch["value_weights"][:6].sum()
    found = loss_and_gradients(trainer, batch)[1]
    credit = batch[DEMONSTRATED]
    alone = loss_and_gradients(trainer, batch | {DEMONSTRATED: torch.zeros_like(credit)})[1]
    typed = TrainBatch.from_trl({n: v for n, v in batch.items() if n in TrainBatch.__dataclass_fields__})
    trainer.model.zero_grad()
    ids, mask = read_inputs(typed.to_trl()).values()
    positions, length = (mask.cumsum(1) - 1).clamp(min=0), typed.completion_ids.size(1)
    logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -length - 1 : -1]
    taken = logits.double().log_softmax(-1).gather(-1, typed.completion_ids[..., None])[..., 0]
    # The expert's probability is not known here: it is set to 1, and the weight is the policy's own.
    weight = taken.detach().exp() if treatment == WEIGHTED else 1.0
    assert int((credit > 0).sum()) > 0 and int(typed.counted.sum()) == typed.num_items_in_batch
    (-(credit * weight * taken).sum() / typed.num_items_in_batch).backward()
    expert = {name: p.grad.double() for name, p in trainer.model.named_parameters() if p.grad is not None}
    stated = {name: own.double() + expert.get(name, 0.0) for name, own in alone.items()}
    assert relative_error({n: g.double() for n, g in found.items()}, stated) < 1e-6
    assert relative_error(found, alone) > 1e-4


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_credit_of_tokens(embedded_model, tmp_path, loss_type) -> None:
    """The advantage beside the whole group, or 1; an episode's share of a token where the loss is a mean over each."""
    for treatment in (ADVANTAGE_SFT, SFT):
        trainer = make_trainer(
            embedded_model, tmp_path, environment=Silent, loss_type=loss_type, demonstration_loss=treatment,
            demonstration_coef=0.5, **EXPERT,
        )  # fmt: skip
        credit = draw_batch(trainer)[DEMONSTRATED]
        (values,) = credit[3][credit[3] > 0].unique().tolist()
        assert values == pytest.approx(
            0.5 * (1.0 if treatment == SFT else 0.75 / 0.5001) / (2 if loss_type == "grpo" else 1)
        )
        assert (credit[3] > 0).sum() == 2 and credit[:3].sum() == 0  # the letter and the end of the turn


# ---------------------------------------------------------------------------------------------------- passes, resuming


@pytest.mark.parametrize(
    ("treatment", "loss_type"), [(WEIGHTED, "dapo"), (WEIGHTED, "grpo"), (ADVANTAGE_SFT, "dr_grpo"), (SFT, "dapo")]
)
def test_split_into_passes_it_is_the_same(embedded_model, tmp_path, treatment, loss_type) -> None:
    trainer = make_trainer(embedded_model, tmp_path, demonstration_loss=treatment, loss_type=loss_type, **EXPERT)
    check_equal(trainer, drawn(trainer))


@pytest.mark.parametrize("treatment", [WEIGHTED, SFT])
def test_micro_batches_and_packing_change_nothing(embedded_model, tmp_path, treatment) -> None:
    """With a KL term, whose references differ."""
    check_layouts(embedded_model, tmp_path, demonstration_loss=treatment, beta=0.1, **EXPERT)


@pytest.mark.parametrize(
    ("treatment", "changes"),
    [
        (WEIGHTED, {"batches_ahead": 1}),
        (ADVANTAGE_SFT, {"num_iterations": 2}),
        (SFT, {"resample_zero_advantage_groups": 1}),
    ],
)
def test_a_killed_run_goes_on(embedded_model, tmp_path, treatment, changes) -> None:
    """In the middle of a generation batch too, to the bit."""
    options = {
        "demonstration_loss": treatment, "max_steps": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2,
        "optim": "adamw_torch", "learning_rate": 1e-2, **EXPERT, **changes,
    }  # fmt: skip
    _, again = check_resumed(lambda name, **more: make_trainer(embedded_model, tmp_path / name, **options, **more), 3)
    assert again.state.global_step == 4


def test_an_answer_that_the_policy_cannot_give_costs_no_other_gradient(embedded_model, tmp_path) -> None:
    """Its log-probability is far below the smallest exponent: KL term and ratios of other tokens stay finite."""
    trainer = make_trainer(embedded_model, tmp_path, beta=0.1, importance_sampling_level="turn", **EXPERT)
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight.mul_(500.0)
    trainer.train()
    (entry,) = [one for one in trainer.state.log_history if "demonstrations/log_prob" in one]
    assert entry["demonstrations/log_prob"] < -90 and torch.isfinite(torch.tensor(entry["grad_norm"]))


# -------------------------------------------------------------------------------------------------------------- sources


def run_of_hummers(model: Path, folder: Path) -> Path:
    """The rollout log of a run in which some answers were good."""
    make_trainer(model, folder, max_steps=2).train()
    return folder


def test_episodes_of_an_earlier_run_are_replayed_with_their_probabilities(embedded_model, tmp_path) -> None:
    """The group starts where the recorded episode did; where it renders to the same ids, these are kept."""
    log = run_of_hummers(embedded_model, tmp_path / "log")
    rows = [row for row in recorded(log, "train") if row["success"]]
    trainer = make_trainer(embedded_model, tmp_path / "run", demonstrations=str(log), seed=5)
    played, _ = batch_of(trainer)
    for group in (played.trajectories[:4], played.trajectories[4:]):
        assert len({one.seed for one in group}) == 1
        row = next(
            row for row in rows if row["completion_ids"] == group[3].completion_ids and row["seed"] == group[3].seed
        )
        sampled = [value or 0.0 for value in row["sampling_logprobs"]]
        assert group[3].sampling_logprobs == pytest.approx(sampled) and any(sampled)
        assert group[3].rewards == [turn["reward"] for turn in row["turns"]]
    # After another prompt the ids are not those that were sampled.
    other = make_trainer(embedded_model, tmp_path / "run", demonstrations=str(log), seed=5, system_prompt="Hum.")
    again, _ = batch_of(other)
    assert [turn.text for turn in again.trajectories[3].turns] == [turn.text for turn in played.trajectories[3].turns]
    assert set(again.trajectories[3].sampling_logprobs) == {0.0}


def conversation(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "start 3"}, {"role": "assistant", "content": "ch"}]
    return {"seed": 4, "messages": messages, "rewards": [0.75], **changes}


def with_conversations(model: Path, folder: Path, *rows: Any, **changes: Any) -> Any:
    path = folder / "shown.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return make_trainer(model, folder / "run", demonstrations=str(path), **changes)


def test_conversations_are_replayed_against_the_environment(embedded_model, tmp_path) -> None:
    said = [{"role": "system", "content": "a\u2028b\x85c"}, *conversation()["messages"]]  # lines to Python, not to JSON
    line = json.dumps(conversation(messages=said), ensure_ascii=False)
    played, _ = batch_of(with_conversations(embedded_model, tmp_path, "\ufeff" + line, ""))
    assert {one.seed for one in played.trajectories} == {4}
    assert [turn.text for turn in played.trajectories[3].turns] == ["ch"] and played.trajectories[3].rewards == [0.75]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            conversation(rewards=[0.25]),
            r"got the rewards \[0.25\] when it was recorded and \[0.75\] now.*record it again",
        ),
        (conversation(seed=5), "has no answers left, and its environment asks for more"),
        (
            conversation(messages=[{"role": "assistant", "content": "ch"}] * 2, rewards=[0.75, 0.75]),
            r"has 2 answers, and its episode ended after 1 of them \(terminated\)",
        ),
        (
            conversation(messages=[{"role": "assistant", "content": "h" * 5000}]),
            "has [0-9]+ tokens, more than the 5 that are left. Raise max_new_tokens",
        ),
    ],
)
def test_a_replay_that_disagrees_is_an_error(embedded_model, tmp_path, row, told) -> None:
    with pytest.raises(ValueError, match=told):
        with_conversations(embedded_model, tmp_path, row).train()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": []}, "shown.jsonl, line 1, \\$: 'rewards' is a required property"),
        (conversation(rewards=[]), "line 1, \\$.rewards: .* non-empty"),
        (conversation(rewards=[0.75, 1.0]), "has 1 answers and 2 rewards"),
        (conversation(rewards=[None]), r"\$.rewards\[0\]: None is not of type 'number'"),
        (
            conversation(messages=[{"role": "assistant", "content": [{}]}]),
            r"messages\[0\].content: .* not of type 'string'",
        ),
        (conversation(row="x" * 1000), r"\$.row: x{100,200}' is not of type 'object', 'null'. A line is"),
        (conversation(environment="chess"), "is of the environment 'chess'; the run has None"),
        ("", "has no episode that succeeded"),
        ("{", "shown.jsonl, line 1 is no JSON"),
    ],
)
def test_a_file_that_holds_no_conversations_is_refused(embedded_model, tmp_path, row, told) -> None:
    with pytest.raises(ValueError, match=told):
        with_conversations(embedded_model, tmp_path, row)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"demonstrations": "expert"}, "none of the environment's scripted policies .it has none"),
        ({"demonstrations": "wizard", "environment": Choosing}, "scripted policies .'expert'"),
        ({"demonstrations": "experts:nobody"}, "names no function: experts has no 'nobody'"),
        ({"environment": Awaited, **EXPERT}, "the environment's step is async. Record its episodes"),
        ({"environment": "agent:environment_agents:gathers", **EXPERT}, "is an agent, which may ask in any order"),
        ({"demonstrations_per_group": 3, **EXPERT}, "demonstrations_per_group=3 leaves fewer than two own episodes"),
        ({"demonstrations_per_group": 2}, "demonstrations_per_group=2 has no effect"),
        ({"task_sampling": "adaptive", **EXPERT}, "which make every group informative"),
        ({"whiten_advantages": True, **EXPERT}, "over own episodes alone"),
        (
            {"algorithm": "distillation", "num_generations": 1, "teacher": "policy", "teacher_hint": "hint", **EXPERT},
            "does not train on rewards",
        ),
    ],
)
def test_what_cannot_be_demonstrated_is_refused(embedded_model, tmp_path, options, told) -> None:
    with pytest.raises(ValueError, match=told):
        make_trainer(embedded_model, tmp_path, **options)


@pytest.mark.parametrize("name", ["forgets_the_generator", "says_nothing"])
def test_a_function_that_fails_is_named(embedded_model, tmp_path, name) -> None:
    trainer = make_trainer(embedded_model, tmp_path, demonstrations=f"experts:{name}")
    with pytest.raises(ValueError, match=rf"demonstrations='experts:{name}' failed .*seed \d+: TypeError"):
        trainer.train()


class Fragile(Chatter):
    """Fails in the episodes of a seed."""

    failing = -1

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed
        return super().reset(seed, options)

    def step(self, action: str) -> Any:
        if self.seed == Fragile.failing:
            raise RuntimeError("fragile")
        return super().step(action)


def test_an_environment_that_fails_costs_the_demonstration(embedded_model, tmp_path, monkeypatch) -> None:
    told: set[str] = set()
    monkeypatch.setattr(demonstrations.logger, "warning_once", told.add)
    trainer = make_trainer(embedded_model, tmp_path, environment=Fragile, **EXPERT)
    monkeypatch.setattr(Fragile, "failing", environment_seed(3, TRAINING, 0, 0))
    played, _ = batch_of(trainer)
    assert [one.demonstration for one in played.trajectories] == [False] * 7 + [True]
    assert played.batch.failed.tolist() == [True] * 4 + [False] * 4
    (text,) = told
    assert "the environment failed while it played (RuntimeError: fragile" in text
    trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "return/mean" in entry]
    # Of six own episodes, three in the group that fails.
    assert log["stop/environment_error"] == 0.5 and log["groups_with_different_starts"] == 0


@pytest.mark.parametrize(
    "changes", [{"demonstration_loss": "bc"}, {"demonstration_coef": 0.0}, {"demonstrations_per_group": 0}]
)
def test_values_out_of_range(tmp_path, changes) -> None:
    (option,) = changes
    with pytest.raises(ValueError, match=option):
        MultiTurnGRPOConfig(**settings(tmp_path, **EXPERT, **changes))


def test_an_environment_that_does_not_repeat_itself_is_found(embedded_model, tmp_path) -> None:
    Late.made = 0
    trainer = make_trainer(embedded_model, tmp_path, environment=Late, **EXPERT)
    with pytest.raises(ValueError, match="has no answers left, and its environment asks for more"):
        trainer.train()


def test_of_several_places_each_is_played_by_itself(embedded_model, tmp_path) -> None:
    options = {"demonstrations": "experts:drones", "demonstrations_per_group": 4, "num_generations": 8}
    played, _ = batch_of(make_trainer(embedded_model, tmp_path, **options))
    assert len({tuple(turn.text for turn in one.turns) for one in played.trajectories[4:]}) > 1
    trainer = make_trainer(embedded_model, tmp_path, environment=Choosing, demonstrations="expert")
    assert {turn.text for turn in batch_of(trainer)[0].trajectories[3].turns} == {"h"}


def test_an_end_that_the_environment_pays_for_is_not_a_disagreement() -> None:
    played = Trajectory([1], [2], [0.0], [Turn(0, 1, "h", "stop", 3.0)], StopReason.MAX_TURNS, end_reward=2.0)
    for rewards in ([3.0], [1.0]):
        Demonstration("here", [], rewards).check(played)
    with pytest.raises(ValueError, match="here"):
        Demonstration("here", [], [2.0]).check(played)


# ---------------------------------------------------------------------------------------------------- metrics, records


def test_metrics_are_of_the_policys_own_episodes(embedded_model, tmp_path) -> None:
    """A success of the expert alone is told apart."""
    trainer = make_trainer(embedded_model, tmp_path, environment=Silent, **EXPERT)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["success"] == entry["return/mean"] == entry["reward"] == 0.0 and entry["groups_without_success"] == 1.0
    assert entry["demonstrations/success"] == entry["demonstrations/return"] == entry["demonstrations/alone"] == 1.0
    assert entry["demonstrations/log_prob"] < -1 and entry["entropy"] > 1  # of own tokens, though none has an advantage
    assert [row["demonstration"] for row in recorded(tmp_path, "train")] == [None, None, None, True] * 2
    shown = [row for row in recorded(tmp_path, "train") if row["demonstration"]]
    assert all(row["turns"][0]["advantage"] == pytest.approx(0.75 / 0.5001, rel=1e-3) for row in shown)


def test_without_reports_of_success_the_best_of_each_environment_counts(monkeypatch) -> None:
    """Whose returns cannot be compared."""

    def told(environment: str, seed: int, worth: float) -> dict[str, Any]:
        turn = {"text": "go", "start": 0, "end": 1, "reward": worth}
        return {
            "error": None, "turns": [turn], "return": worth, "success": None, "environment": environment, "seed": seed,
            "paths": None, "demonstration": True, "step": 0, "index": seed,
        }  # fmt: skip

    log = [told("small", 0, 1.0), told("small", 1, 0.5), told("large", 2, 10.0), told("large", 3, 9.0)]
    monkeypatch.setattr(demonstrations, "read_records", lambda path: log)
    assert [start[:2] for start, _ in demonstrations._logged(Path("log"), lambda text: [1])] == [
        ("small", 0),
        ("large", 2),
    ]


def test_an_instance_that_cannot_be_closed_is_named(monkeypatch) -> None:
    class Stuck:
        def close(self) -> None:
            raise OSError("its server is gone")

    said: list[str] = []
    monkeypatch.setattr(demonstrations.logger, "warning_once", said.append)
    demonstrations.Demonstrations._drop(Stuck())
    demonstrations.Demonstrations._drop(object())
    (warning,) = said
    assert "Stuck: close()" in warning and "OSError: its server is gone" in warning


def test_a_large_row_reaches_reset_as_it_was(tmp_path) -> None:
    """What is shortened where it is only shown is whole where it is played again."""
    row = {"maze": [[place] * 20 for place in range(1000)]}
    line = {"messages": [{"role": "assistant", "content": "a"}], "rewards": [1.0], "seed": 3, "row": row}
    (tmp_path / "one.jsonl").write_text(json.dumps(line))
    played = Trajectory([1], [2], [-0.5], [Turn(0, 1, "a", "stop", 1.0)], StopReason.TERMINATED, options=row)
    write_episodes(tmp_path / "eval-000000-eval-rank0.parquet", [episode_row(played)])
    logged = demonstrations._logged(tmp_path / "eval-000000-eval-rank0.parquet", lambda text: [1])
    for ((start, _),) in (demonstrations._told(tmp_path / "one.jsonl", lambda text: [1]), logged):
        assert json.loads(start[2]) == row


def test_who_succeeds_alone_by_hand() -> None:
    def row(value: float, success: bool | None) -> dict[str, Any]:
        return {"return": value, "success": success}

    rows = [row(0, False), row(1, True), row(2, True), row(3, True), row(5, False), row(0, True)]
    found = demonstration_metrics(rows, [False, False, True, False, False, True], 3)
    # Of the first group the policy succeeds too, and of the second.
    assert found == {"demonstrations/return": 1.0, "demonstrations/success": 1.0, "demonstrations/alone": 0.0}
    rows[3] = row(3, False)
    assert demonstration_metrics(rows, [False, False, True, False, False, True], 3)["demonstrations/alone"] == 0.5
    silent = [row(one["return"], None) for one in rows]
    assert demonstration_metrics(silent, [False, False, True, False, False, True], 3) == {
        "demonstrations/return": 1.0, "demonstrations/alone": 0.5,
    }  # fmt: skip
