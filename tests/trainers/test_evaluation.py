"""``evaluate`` and ``predict`` as ``Trainer`` documents them, with episodes."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from checkpointed_runs import Told
from datasets import Dataset, IterableDataset
from games import Chatter, make_trainer, settings

from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.evaluation import results
from agile_trainers.monitor.rollout_log import Evaluated, completions_table
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, evaluation
from agile_trainers.trainers.evaluation import with_best_metric


class Secret(Chatter):
    """Chatter of one turn, whose first observation is its row's secret."""

    def reset(self, seed=None, options=None):
        super().reset(0, options)
        self.length = 1
        return f"secret {(options or {}).get('secret')}", {}


def rows(*secrets, **columns):
    return Dataset.from_dict({"secret": list(secrets), **columns})


@dataclass
class FewEpisodes(MultiTurnGRPOConfig):
    num_eval_episodes: int = 2


@pytest.mark.parametrize(
    ("asked", "told"), [({}, ["has 3 rows", "first 2", "=3 to play all"]), ({"num_eval_episodes": 1}, [])]
)
def test_rows_that_the_default_leaves_out_are_told_once(embedded_model, tmp_path, monkeypatch, asked, told):
    said: list[str] = []
    monkeypatch.setattr(evaluation.logger, "warning", lambda text, *values: said.append(text % values))
    trainer = MultiTurnGRPOTrainer(
        str(embedded_model),
        environment=Secret,
        args=FewEpisodes(**settings(tmp_path, **asked)),
        eval_dataset=rows(1, 2, 3),
    )
    trainer.evaluate(num_episodes=1)
    trainer.evaluate(rows(1, 2))
    assert not said
    trainer.evaluate()
    trainer.evaluate()
    assert len(said) == bool(told) and all(words in said[0] for words in told)


@pytest.fixture(scope="module")
def trained(embedded_model, tmp_path_factory):
    """One step with tables, and two evaluation data sets after it."""
    folder = tmp_path_factory.mktemp("evaluated")
    trainer = make_trainer(
        embedded_model, folder, environment=Secret, train_dataset=rows(1, 2), max_steps=1, num_eval_episodes=3,
        eval_dataset={"easy": rows(10, 11), "hard": rows(20)}, eval_strategy="steps", eval_steps=1, log_completions=True,
        reward_funcs=lambda secret, **_: [float(value) for value in secret],
    )  # fmt: skip
    trainer.train()
    return trainer


def test_each_data_set_is_played_and_one_is_played_by_its_name(trained, tmp_path):
    (logged,) = [entry for entry in trained.state.log_history if "eval_easy_return" in entry]
    (hard,) = [entry for entry in trained.state.log_history if "eval_hard_return" in entry]
    assert logged["eval_easy_rewards/<lambda>/mean"] == pytest.approx((10 + 11 + 10) / 3)
    assert hard["eval_hard_rewards/<lambda>/mean"] == 20
    assert hard["eval_hard_reward"] == pytest.approx(hard["eval_hard_return"] + 20)
    metrics = trained.evaluate("hard")
    assert metrics["eval_rewards/<lambda>/mean"] == 20 and metrics["eval_episodes"] == 3
    with pytest.raises(ValueError, match=r"'hrad'.*'easy', 'hard'"):
        trained.evaluate("hrad")
    with pytest.raises(ValueError, match="needs a row"):
        trained.evaluate(rows())


def test_a_process_leaves_its_generator_before_it_gathers(trained, monkeypatch):
    """In its generator it steps an engine that others share, until they have played their episodes too."""
    generators, gather, order = trained.sampler.generators, results.gather_object, []

    @contextmanager
    def listed(*args, **options):
        with generators(*args, **options) as make:
            yield make
        order.append("left")

    def gathering(values):
        order.append("gathers")
        return gather(values)

    monkeypatch.setattr(trained.sampler, "generators", listed)
    monkeypatch.setattr(results, "gather_object", gathering)
    trained.evaluate("hard")
    assert order[0] == "left" and set(order[1:]) == {"gathers"}


def test_the_table_of_completions_holds_the_evaluations_own_episodes(trained):
    folder = f"{trained.args.output_dir}/completions/completions_00001"
    training, easy = pd.read_parquet(f"{folder}.parquet"), pd.read_parquet(f"{folder}_eval_easy.parquet")
    assert len(training) == 8 and set(training["<lambda>"]) <= {1.0, 2.0}
    assert sorted(easy["<lambda>"]) == [10.0, 10.0, 11.0] and easy["advantage"].isna().all()
    assert [prompt[0]["content"] for prompt in easy["prompt"]] == ["secret 10", "secret 11", "secret 10"]
    assert len(trained._logs["prompt"]) == 8


@pytest.mark.parametrize("name", ["math/easy", "../../../out", "a" * 250])
def test_the_table_of_a_data_set_of_any_name_has_a_file(tmp_path, name):
    training, folder = {"prompt": ["a"]}, tmp_path / "run" / "completions"
    folder.mkdir(parents=True)
    path = folder / "completions_00001.parquet"
    path.write_text("training")
    played = Evaluated([], [], {}, [], {})
    with completions_table(training, played, [], tmp_path / "run", 1, f"eval_{name}", writes=True):
        path.write_text("evaluation")
    assert path.read_text() == "training"
    (other,) = folder.glob("completions_00001_eval_*.parquet")
    assert other.read_text() == "evaluation" and len(list(tmp_path.rglob("*"))) == 4
    other.unlink()
    other.mkdir()  # it cannot be written, and the run goes on
    with completions_table(training, played, [], tmp_path / "run", 1, f"eval_{name}", writes=True):
        path.write_text("evaluation")
    assert path.read_text() == "training"


def test_predict_plays_every_row_once_and_trains_nothing(trained):
    before = (trained._step, dict(trained._metrics["train"]), list(trained.state.log_history))
    folder = Path(trained.args.output_dir, "rollouts")
    files = len(list(folder.iterdir()))
    output = trained.predict(rows(*range(30, 35)))
    with pytest.raises(TypeError, match="predict plays the rows of a test_dataset, got None"):
        trained.predict(None)
    assert output.predictions.shape == (5,) and output.label_ids is None
    assert [messages[0]["role"] for messages in output.predictions] == ["assistant"] * 5
    assert output.metrics["test_episodes"] == 5 and output.metrics["test_rewards/<lambda>/mean"] == 32
    assert before == (trained._step, dict(trained._metrics["train"]), list(trained.state.log_history))
    assert files == len(list(folder.iterdir())), "nothing is written"


def test_unused_columns_are_removed_before_they_are_checked(embedded_model, tmp_path):
    """TRL keeps `prompt` alone; so does every reset: the check's, training's and evaluation's, of data sets and streams."""
    seen = []

    class Asked(Secret):
        def reset(self, seed=None, options=None):
            seen.append(options)
            return super().reset(seed, options)

    told = rows(1, 2, prompt=["a", "b"])
    trainer = make_trainer(
        embedded_model, tmp_path, environment=Asked, train_dataset=told, remove_unused_columns=True, num_eval_episodes=2,
        eval_dataset={"a": IterableDataset.from_generator(lambda: iter([{"secret": 1, "prompt": "c"}]))},
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.predict(told)
    assert len(seen) == 1 + 8 + 2 + 2 and all(set(options) == {"prompt"} for options in seen)
    with pytest.raises(ValueError, match=r"remove_unused_columns=True.*train_dataset.*secret"):
        make_trainer(embedded_model, tmp_path, train_dataset=rows(1, 2), remove_unused_columns=True)


def test_greedy_repetitions_of_a_row_are_no_news(embedded_model, tmp_path):
    """Ten rows played three times each have the standard errors of ten."""

    class OfTheRow(Told):
        def reset(self, seed=None, options=None):
            return super().reset(0, options)

    rows = Dataset.from_dict({"number": list(range(8))})
    trainer = make_trainer(embedded_model, tmp_path, environment=OfTheRow, eval_greedy=True, train_dataset=rows)
    data = Dataset.from_dict({"number": list(range(10))})
    once, again = (trainer.evaluate(data, num_episodes=count) for count in (10, 30))
    assert once["eval_return"] == pytest.approx(again["eval_return"])
    for name in ("eval_return_sem", "eval_reward_sem"):
        assert again[name] == pytest.approx(once[name]) and once[name] > 0


def test_the_metric_is_chosen_where_one_is_needed(tmp_path):
    def chosen(environments=None, **changes):
        args = MultiTurnGRPOConfig(**settings(tmp_path, eval_strategy="steps", eval_steps=1, **changes))
        return with_best_metric(args.with_environment(), by_reward=False, eval_dataset=None, environments=environments)

    assert chosen().metric_for_best_model is None
    assert chosen(save_strategy="best").metric_for_best_model == "return"
    plateau = chosen(lr_scheduler_type="reduce_lr_on_plateau")
    assert plateau.metric_for_best_model == "return" and plateau.lr_scheduler_kwargs["mode"] == "max"
    short = {"save_strategy": "best", "metric_for_best_model": "sum_return"}
    assert chosen(["sum", "web"], **short).metric_for_best_model == "sum_return"
    for real in ("return/max", "return_sem", "reward_std", "sum_return/mean", "sum_return_sem", "web_turns"):
        assert chosen(["sum", "web"], **{**short, "metric_for_best_model": real}).metric_for_best_model == real
    with pytest.raises(ValueError, match="'sum_return' is no metric of an evaluation; did you mean return"):
        chosen(["web"], **short)
    given = chosen(save_strategy="best", metric_for_best_model="turns/mean", greater_is_better=False)
    assert given.metric_for_best_model == "turns/mean" and given.greater_is_better is False
    with pytest.raises(ValueError, match="greater_is_better=False"):
        chosen(save_strategy="best", greater_is_better=False)


class Fails(Chatter):
    """Fails on some answers once training has begun, and wins on the others."""

    training, share = False, 2
    return_range = (-1.0, 1.0)

    def step(self, action):
        if self.training and sum(map(ord, action)) % self.share == 0:
            raise ValueError("invalid literal for int()")
        return "", 1.0, True, False, {"success": True}


def test_failed_episodes_count_in_what_chooses_the_best_checkpoint(embedded_model, tmp_path, monkeypatch):
    """In the return, the success and the reward; and they are told, above all if every episode failed."""
    said = []
    monkeypatch.setattr(results.logger, "warning", said.append)
    trainer = make_trainer(
        embedded_model,
        tmp_path,
        environment=Fails,
        num_eval_episodes=20,
        reward_funcs=lambda completions, **_: [0.5] * len(completions),
    )
    monkeypatch.setattr(Fails, "training", True)
    metrics = trainer.evaluate()
    failed = metrics["eval_failed"]
    won = 20 - failed
    assert 0 < failed < 20 and metrics["eval_return/mean"] == 1.0
    assert metrics["eval_return"] == pytest.approx((won - failed) / 20) and metrics["eval_success"] == won / 20
    assert metrics["eval_reward"] == pytest.approx(1.5 * won / 20), "nothing is declared of the function's rewards"
    assert f"{failed:.0f} of 20 evaluation episodes failed" in said[0] and "invalid literal for int()" in said[0]
    monkeypatch.setattr(Fails, "share", 1)
    metrics = trainer.evaluate()
    assert math.isnan(metrics["eval_return"]) and math.isnan(metrics["eval_reward"]) and "eval_success" not in metrics
    assert "All 20 evaluation episodes failed" in said[1]


class Split(Chatter):
    def reset(self, seed=None, options=None):
        return super().reset(seed, options)[0], {"split": "train"}


def test_training_questions_are_told_apart(embedded_model, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(results.logger, "warning", said.append)
    table = {name: [{"question": f"{name} {n}", "answer": "1"} for n in range(5)] for name in ("train", "test")}
    make = functools.partial(ReasoningEnvironment, table)
    trainer = make_trainer(embedded_model, tmp_path, environment=make, num_eval_episodes=4, max_turns=1)
    trainer.evaluate()
    assert len(said) == 1 and "plays questions of the split 'train'" in said[0]
    trainer.evaluate(make().dataset("test"))
    assert len(said) == 1
    generated = functools.partial(ReasoningEnvironment, lambda rng: {"question": str(rng.random()), "answer": "1"})
    make_trainer(
        embedded_model, tmp_path / "generated", environment=generated, num_eval_episodes=4, max_turns=1
    ).evaluate()
    assert len(said) == 1, "a generated question is not met twice"
    make_trainer(embedded_model, tmp_path / "own", environment=Split, num_eval_episodes=4).evaluate()
    assert len(said) == 1, "an environment may call anything a split"


def test_in_bf16_an_evaluation_before_training_is_that_of_the_same_policy_after(embedded_model, tmp_path):
    """Autocast is set up as training begins; the weights are cast for each rollout."""
    trainer = make_trainer(embedded_model, tmp_path, bf16=True, learning_rate=0.0, num_eval_episodes=16)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    same = {*before} - {"eval_num_tokens", "eval_runtime", "eval_samples_per_second", "epoch"}
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
