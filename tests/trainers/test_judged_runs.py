"""Judges in real runs: when they are asked, what their scores and faults do to training, and what a resumed run finds."""

from __future__ import annotations

import json
import signal
import sqlite3
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from checkpointed_runs import SAVING, Killed, assert_same, weights
from datasets import Dataset
from fake_judge import BAD_ANSWERS, FakeJudge, draw, record_of, score_of, serving
from games import Chatter, Long, make_trainer
from several_processes import episodes, launch
from tenacity import wait_none
from transformers import TrainerCallback

from agile_trainers import Judge
from agile_trainers.judges import asking
from agile_trainers.records.reader import read_records

KEY = "sk-" + "k3y5" * 6
JUDGED = Path(__file__).with_name("judged_processes.py")


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WAITS", wait_none())


@pytest.fixture
def closing():
    """Closes what is added."""
    opened: list[Any] = []
    yield opened
    for one in opened:
        one.close()


def play(trainer: Any) -> Any:
    """Play and reward a generation batch."""
    rows = [dict(trainer.train_dataset[0])] * trainer.args.generation_batch_size
    return trainer.rollouts.play(rows, 0, 0)


def fifth(body: dict[str, Any], before: int) -> str | None:
    """A fifth of the questions is answered badly or not at all."""
    text = body["messages"][1]["content"]
    chosen = draw(text, "faulty")
    return "status 500" if chosen < 0.1 else [*BAD_ANSWERS][int(100 * chosen) % 7] if chosen < 0.2 else None


def answers_of(episode: Any) -> list[str]:
    return [turn.text for turn in episode.turns]


# ------------------------------------------------------------------------------------------------------------- rewards


def test_scores_are_rewards_and_an_episode_without_one_is_left_out(embedded_model, tmp_path, closing) -> None:
    """Its group is compared without it, by GRPO's formula; each score is the judge's."""
    fake = FakeJudge(lambda body, before: "none" if draw(str(record_of(body)), "x") < 0.3 else None)
    with serving(fake) as url:
        judge = Judge(url, "r", model="m")
        trainer = make_trainer(
            embedded_model, tmp_path, environment=Long, reward_funcs=judge, reward_weights=[2.0],
            advantage_granularity="trajectory",
        )  # fmt: skip
        closing.append(trainer)
        played = play(trainer)
        judged = trainer.batches._credit.judge(played.batch)
    lost = torch.tensor([episode.unjudged for episode in played.trajectories])
    assert 0 < lost.sum() < 6
    given = torch.tensor([score_of(answers_of(episode)) for episode in played.trajectories])
    returns = torch.tensor([episode.episode_return for episode in played.trajectories])
    assert torch.equal(played.rewards[:, 1].isnan(), lost) and torch.equal(played.batch.failed, lost)
    assert torch.allclose(played.rewards[~lost, 1], given[~lost])
    totals = (returns + 2 * given).view(2, 4)
    for group, kept, advantages in zip(totals, ~lost.view(2, 4), judged.credit.advantages[:, 0].view(2, 4)):
        values = group[kept]
        expected = (values - values.mean()) / (values.std() + 1e-4) if len(values) > 1 else torch.zeros(len(values))
        assert torch.allclose(advantages[kept], expected, atol=1e-5) and not advantages[~kept].any()


def test_scores_of_turns_are_rewards_of_these_turns(embedded_model, tmp_path, closing) -> None:
    fake = FakeJudge()
    with serving(fake) as url:
        judge = Judge(url, "r", model="m", per="turn")
        last = Judge(url, "r", model="m", name="last")
        trainer = make_trainer(
            embedded_model, tmp_path, environment=Long, reward_funcs=[judge, last], reward_weights=[0.5, 3.0]
        )
        closing.append(trainer)
        played = play(trainer)
    for row, episode in enumerate(played.trajectories):
        scores = [score_of([text]) for text in answers_of(episode)]
        expected = [turn.reward + 0.5 * score for turn, score in zip(episode.turns, scores, strict=True)]
        expected[-1] += 3 * score_of(answers_of(episode))
        assert played.batch.turn_rewards[row].tolist() == pytest.approx(expected, abs=1e-6)
        assert played.rewards[row, 1].item() == pytest.approx(sum(scores))


def test_members_of_a_group_are_ranked_and_evaluated_without(embedded_model, tmp_path, closing) -> None:
    fake = FakeJudge()
    with serving(fake) as url:
        trainer = make_trainer(embedded_model, tmp_path, reward_funcs=Judge(url, "r", model="m", per="group"))
        closing.append(trainer)
        played = play(trainer)
        assert len(fake.requests) == 2
        metrics = trainer.evaluate(num_episodes=4)
        assert len(fake.requests) == 2 and metrics["eval_reward"] == pytest.approx(metrics["eval_return"])
    for group in (0, 4):
        texts = [json.dumps(answers_of(episode)) for episode in played.trajectories[group:][:4]]
        values = [score_of(json.loads(text)) for text in texts]
        ranks = played.rewards[group:, 1][:4]
        for i in range(4):
            better, equal = (sum(one > values[i] for one in values), texts.count(texts[i]) - 1)
            assert ranks[i].item() == pytest.approx(1 - (better + equal / 2) / 3)


def test_what_is_held_out_is_logged_and_changes_nothing(embedded_model, tmp_path, closing) -> None:
    """Not even where it fails: weights are equal bit by bit."""
    trained, logs = [], []

    def fault(body: dict[str, Any], before: int) -> str | None:
        """Other episodes are lost by each judge."""
        of_both = [{"role": "system", "content": ""}, {"content": json.dumps(body["messages"])}]
        return fifth({"messages": of_both}, before)

    with serving(FakeJudge(fault)) as url:
        for held_out in (False, True):
            judges = [Judge(url, "r", model="m")]
            if held_out:
                judges.append(Judge(url, "another rubric", model="m", held_out=True, per="turn"))
            trainer = make_trainer(
                embedded_model, tmp_path / str(held_out), environment=Long, reward_funcs=judges, max_steps=2
            )
            closing.append(trainer)
            trainer.train()
            trained.append(weights(trainer))
            logs.append(trainer.state.log_history[0])
    assert_same(*trained)
    assert "judges/held_out" not in logs[0] and 0 < logs[1]["judges/held_out"] < 1
    assert logs[0]["reward"] == logs[1]["reward"] and logs[1]["rewards/held_out_judge/mean"] > 0
    assert logs[1]["judges/judge/tokens_asked"] > 0 and logs[1]["judges/held_out_judge/failed"] > 0


def test_a_score_that_is_held_out_rewards_nothing(embedded_model, tmp_path, closing) -> None:
    """An episode that nothing else rewards is left out, as it is without this judge."""

    def nothing(completions, **_):
        return [None] * len(completions)

    with serving(FakeJudge()) as url:
        judge = Judge(url, "r", model="m", held_out=True)
        trainer = make_trainer(embedded_model, tmp_path, reward_funcs=[nothing, judge])
        closing.append(trainer)
        rewards = torch.tensor([[torch.nan, torch.nan, 0.7], [torch.nan, 2.0, 0.7], [1.0, torch.nan, torch.nan]])
        assert trainer.rewards.totals(rewards).isnan().tolist() == [True, False, False]
        assert trainer.rewards.totals(rewards)[1:].tolist() == [2.0, 1.0]


class Waiting(Chatter):
    """One turn or three, by its row; a second turn waits until the judge was asked about an episode that has ended."""

    asked: threading.Event
    waited: list[bool]

    def reset(self, seed=None, options=None):
        observation = super().reset(seed, options)
        self.length, self.turns = 1 + 2 * options["number"], 0
        return observation

    def step(self, action):
        self.turns += 1
        if self.turns == 2:
            self.waited.append(self.asked.wait(20))
        return super().step(action)


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_episode_is_judged_while_others_are_played(embedded_model, tmp_path, closing, ahead: int) -> None:
    fake = FakeJudge()
    Waiting.asked, Waiting.waited = fake.asked, []
    with serving(fake) as url:
        trainer = make_trainer(
            embedded_model, tmp_path, environment=Waiting, reward_funcs=Judge(url, "r", model="m"),
            train_dataset=Dataset.from_dict({"number": [0, 1] * 4}), batches_ahead=ahead, max_steps=2,
        )  # fmt: skip
        closing.append(trainer)
        trainer.train()
    assert Waiting.waited and all(Waiting.waited)
    assert trainer.state.log_history[0]["judges/failed"] == 0


# ------------------------------------------------------------------------------------------------------ kill and resume


class KillInside(TrainerCallback):
    """Ends the run in its second step, when its batch was judged."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            raise Killed


@pytest.mark.parametrize("options", [
    {"batches_ahead": 1},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"per": "turn", "environment": Long}, marks=pytest.mark.slow),
    pytest.param({"per": "group", "orders": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_killed_run_goes_on_bit_by_bit_with_the_answers_it_had(
    embedded_model, tmp_path, closing, options: dict[str, Any]
) -> None:
    """A judge that would answer otherwise the second time, and has no faults then, is not asked a second time."""
    of_judge = {name: options[name] for name in ("per", "orders") if name in options}
    of_run = {name: value for name, value in options.items() if name not in of_judge}
    first: set[str] = set()

    def text_of(body: dict[str, Any]) -> str:
        return body["messages"][1]["content"]

    def fault(body: dict[str, Any], before: int) -> str | None:
        return None if text_of(body) in first else fifth(body, before)

    def answer(body: dict[str, Any]) -> Any:
        again = text_of(body) in first
        return "asked again" if again else fake_truth(body)

    fake_truth = FakeJudge().answer
    fake = FakeJudge(fault, answer)
    runs = []

    def run(folder: str, url: str, *, kill: bool = False, resume: bool = False) -> Any:
        judge = Judge(url, "r", model="m", attempts=2, **of_judge)
        trainer = make_trainer(
            embedded_model, tmp_path / folder, reward_funcs=judge, callbacks=[KillInside()] if kill else [], max_steps=3,
            **{**(SAVING if kill else {}), "optim": "adamw_torch", "learning_rate": 1e-2, **of_run},
        )  # fmt: skip
        closing.append(trainer)
        try:
            trainer.train(resume_from_checkpoint=resume or None)
        except Killed:
            trainer.engine.pool.close()
            wait(judge._asker._asked.values())  # of episodes of a batch ahead, which may be asked about again otherwise
        judge.close()
        return trainer

    with serving(fake) as url:
        runs.append(weights(run("whole", url)))
        before = len(fake.requests)
        run("killed", url, kill=True)
        first |= {text_of(body) for body in fake.requests[before:]}
        before = len(fake.requests)
        resumed = run("killed", url, resume=True)
        runs.append(weights(resumed))
        asked_again = [text_of(body) for body in fake.requests[before:] if text_of(body) in first]
    assert_same(*runs)
    assert resumed.state.global_step == 3
    assert any(entry["judges/failed"] > 0 for entry in resumed.state.log_history if "judges/failed" in entry)
    assert asked_again == []


def test_a_run_that_sigkill_ends_goes_on_bit_by_bit(embedded_model, tmp_path) -> None:
    """What it was told is on the disk, and so is what failed: a judge that answers otherwise from then on is not asked."""
    first: set[str] = set()
    truth = FakeJudge().answer

    def text_of(body: dict[str, Any]) -> str:
        return body["messages"][1]["content"]

    fake = FakeJudge(
        lambda body, before: None if text_of(body) in first else fifth(body, before),
        lambda body: "asked again" if text_of(body) in first else truth(body),
    )

    def run(folder: str, **options: Any) -> int:
        case = {folder: {"url": url, "per": "episode", "max_steps": 3, **options}}
        return forks.run([JUDGED, embedded_model, tmp_path, json.dumps(case)]).returncode

    with serving(fake) as url:
        assert run("whole") == 0
        before = len(fake.requests)
        assert run("killed", kill=True) == -signal.SIGKILL
        first |= {text_of(body) for body in fake.requests[before:]}
        before = len(fake.requests)
        assert run("killed", resume=True) == 0
        again = [text_of(body) for body in fake.requests[before:]]
    assert again and not first & set(again), "the third step is asked about alone"
    assert_same(*(torch.load(tmp_path / folder / "weights.pt") for folder in ("whole", "killed")))
    said = [turn["info"].get("judgements") for row in read_records(tmp_path / "killed") for turn in row["turns"][-1:]]
    assert any("failed" in one["judge"] for one in said)


def test_two_processes_ask_about_each_group_once(embedded_model, tmp_path) -> None:
    """Each asks about its own groups, and the rewards are those of one process."""
    found, asked = [], []
    for processes in (1, 2):
        fake = FakeJudge()
        with serving(fake) as url:
            cases = {"group": {"url": url, "per": "group", "max_steps": 2}}
            output = launch(JUDGED, processes, embedded_model, tmp_path / str(processes), cases)
        asked.append(sorted(json.dumps(body["messages"]) for body in fake.requests))
        found.append([
            (one["completion_ids"], one["turns"][-1]["info"]["judgements"]) for one in episodes(output / "group", "train")
        ])  # fmt: skip
    assert len(asked[0]) == len(set(asked[0])) == 4 and asked[0] == asked[1]
    assert len(found[0]) == 16 and found[0] == found[1]
    one, two = (torch.load(tmp_path / processes / "group" / "weights.pt") for processes in ("1", "2"))
    for name, value in one.items():
        torch.testing.assert_close(two[name.removeprefix("module.")], value, rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------- records and secrets


def test_records_have_what_was_said_and_no_file_has_the_key(
    embedded_model, tmp_path, closing, monkeypatch, caplog
) -> None:
    """The server repeats the key in its errors and its reasons."""
    monkeypatch.setenv("JUDGES_KEY", KEY)
    plain = FakeJudge().answer
    fake = FakeJudge(fifth, lambda body: {**plain(body), "reason": f"<b>fine</b>, {KEY}"})
    with serving(fake) as url:
        judge = Judge(url, "r", model="m", key_env="JUDGES_KEY", attempts=1)
        trainer = make_trainer(embedded_model, tmp_path, reward_funcs=judge, log_rollouts=1, **SAVING)
        closing.append(trainer)
        trainer.train()
        trainer.save_model()
    assert set(fake.keys) == {f"Bearer {KEY}"}
    said = [row["turns"][-1]["info"]["judgements"]["judge"] for row in read_records(tmp_path)]
    assert len(said) == 8 and {"<b>fine</b>, ***"} == {one["reason"] for one in said if "score" in one}
    assert any("failed" in one for one in said)
    held = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    texts = [str(trainer._logs), repr(judge), str(vars(judge)), caplog.text]
    with sqlite3.connect(tmp_path / "judged-0.sqlite") as stored:
        texts += [str(row) for row in stored.execute("SELECT * FROM answers")]
    stored.close()
    assert held == [] and not any(KEY in text for text in texts)
    assert any("***" in text for text in texts[4:])


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(("judges", "changed", "told"), [
    ([{}, {}], {}, "Two reward functions are called 'judge'"),
    ([{"held_out": True}], {"reward_weights": [1.0]}, "reward_weights must be 0 for the judge 'held_out_judge'"),
    ([{"per": "group"}], {"num_generations": 1, "algorithm": "reinforce"}, "compares the members of a group"),
])  # fmt: skip
def test_judges_that_do_not_fit_a_run(embedded_model, tmp_path, judges, changed, told: str) -> None:
    made = [Judge(len, "r", **one) for one in judges]
    with pytest.raises(ValueError, match=told):
        make_trainer(embedded_model, tmp_path, reward_funcs=made, **changed)
