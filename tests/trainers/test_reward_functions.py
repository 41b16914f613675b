"""TRL's reward functions over episodes: what they get, when they are called, and what is logged of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from games import LORA, Chatter, make_trainer, settings
from peft import LoraConfig
from safetensors.torch import load_file

from agile_trainers.envs.libraries.trl_tools import UNREWARDED
from agile_trainers.step import reward as reward_functions
from agile_trainers.step.reward import Rewards, add_return_reward, over_sound_episodes, share_without_spread
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from agile_trainers.types import StopReason, Trajectory, Turn


class Unrewarded(Chatter):
    """Chatter that leaves all reward to others."""

    def step(self, action):
        observation, _, done, truncated, info = super().step(action)
        return observation, 0.0, done, truncated, info


class FailsToReset(Chatter):
    """Chatter whose reset fails for odd seeds, and whose step fails for some answers, once training has begun."""

    training = False

    def reset(self, seed=None, options=None):
        if self.training and seed % 2:
            raise RuntimeError("no state")
        return super().reset(seed, options)

    def step(self, action):
        if self.training and len(action) % 3 == 0:
            raise RuntimeError("no answer")
        return super().step(action)


@pytest.fixture
def failing():
    FailsToReset.training = True
    yield FailsToReset
    FailsToReset.training = False


def letters(completions, **_):
    return [float(len(completion[0]["content"])) for completion in completions]


def test_the_best_checkpoint_is_found_where_all_reward_comes_from_reward_functions(embedded_model, tmp_path):
    """Two functions disagree about the steps; their weights decide for the second of three. A third one trains."""

    def rising(completions, trainer_state, **_):
        return [float(trainer_state.global_step)] * len(completions)

    def peak(completions, trainer_state, **_):
        return [[0.0, 0.0, 4.0, 0.0][trainer_state.global_step]] * len(completions)

    trainer = make_trainer(
        embedded_model, tmp_path, environment=Unrewarded, reward_funcs=[rising, peak, letters],
        reward_weights=[0.5, 2.0, 1e-3], max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, num_eval_episodes=3, load_best_model_at_end=True, learning_rate=3.0,
    )  # fmt: skip
    assert trainer.args.metric_for_best_model == "reward" and trainer.args.greater_is_better
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [entry["eval_return"] for entry in logged] == [0.0, 0.0, 0.0]
    added = [1e-3 * entry["eval_rewards/letters/mean"] for entry in logged]
    expected = [0.5 + added[0], 9.0 + added[1], 1.5 + added[2]]
    assert [entry["eval_reward"] for entry in logged] == pytest.approx(expected, rel=1e-6)
    spread = [1e-3 * entry["eval_rewards/letters/std"] for entry in logged]
    assert max(spread) > 0 and [entry["eval_reward_std"] for entry in logged] == pytest.approx(spread, rel=1e-3)
    assert [entry["eval_rewards/rising/mean"] for entry in logged] == [1.0, 2.0, 3.0]
    assert [entry["eval_rewards/peak/std"] for entry in logged] == [0.0, 0.0, 0.0]
    assert trainer.state.best_global_step == 2 and trainer.state.best_metric == logged[1]["eval_reward"]
    best = load_file(tmp_path / "checkpoint-2/adapter_model.safetensors")
    other = load_file(tmp_path / "checkpoint-3/adapter_model.safetensors")
    now = {name.replace(".default", ""): value for name, value in trainer.model.state_dict().items()}
    assert all(torch.equal(now[name], value) for name, value in best.items())
    assert any(not torch.equal(value, best[name]) for name, value in other.items())


def test_the_best_checkpoint_is_by_the_return_without_reward_functions(embedded_model, tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    args = make_trainer(embedded_model, tmp_path, **options).args
    assert args.metric_for_best_model == "return" and args.greater_is_better
    with pytest.raises(ValueError, match="metric_for_best_model='eval_loss'"):
        make_trainer(embedded_model, tmp_path, metric_for_best_model="eval_loss", **options)
    with pytest.raises(ValueError, match=r"metric_for_best_model.*'a_return'"):
        rows = Dataset.from_dict({"secret": [1]})
        make_trainer(embedded_model, tmp_path, eval_dataset={"a": rows, "b": rows}, **options)


def test_failed_episodes_are_not_scored(embedded_model, tmp_path, failing):
    scored = []

    def judge(completions, trajectories, log_extra, **_):
        scored.extend(trajectories)
        log_extra("letters", [completion[0]["content"] for completion in completions])
        return [float(len(completion[0]["content"])) for completion in completions]

    failing.training = False
    trainer = make_trainer(
        embedded_model, tmp_path, environment=failing, reward_funcs=judge, per_device_train_batch_size=16, seed=5
    )
    failing.training = True
    trainer.train()
    logged = trainer.state.log_history[0]
    failed = logged["stop/environment_error"]
    assert 0 < failed < 1 and not any(trajectory.stop_reason.failed for trajectory in scored)
    assert len(scored) == round((1 - failed) * 16)
    values = [float(len(trajectory.turns[0].text)) for trajectory in scored]
    assert logged["rewards/judge/mean"] == pytest.approx(sum(values) / len(values))
    assert logged["reward"] == pytest.approx(logged["return/mean"] + logged["rewards/judge/mean"])
    first = list(trainer._logs["extra"]["letters"])
    assert len(first) == 16 and first.count(None) == 16 - len(scored)
    # An evaluation that fails from end to end is no reason to stop either.
    failing.reset = lambda self, seed=None, options=None: 1 / 0
    try:
        metrics = trainer.evaluate(num_episodes=2)
    finally:
        del failing.reset
    assert metrics["eval_stop/environment_error"] == 1.0 and len(scored) == len(values)


def test_reward_functions_get_the_turns_their_environments_and_the_loggers(embedded_model, tmp_path):
    """And functions that take none of it are called as TRL calls them; what is logged is logged once."""
    given = {}

    def judge(trajectories, environments, trainer_state, log_metric, log_extra, completions, **_):
        given.update(trajectories=trajectories, environments=environments, step=trainer_state.global_step)
        log_metric("judge/longest", max(len(episode.turns) for episode in trajectories))
        log_metric("judge/longest", 100)
        log_extra("turns", [len(episode.turns) for episode in trajectories])
        return [sum(turn.reward for turn in episode.turns) for episode in trajectories]

    class Asynchronous:
        async def __call__(self, prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
            return [None] + [1.0] * (len(prompts) - 1)

    trainer = make_trainer(embedded_model, tmp_path, reward_funcs=[judge, Asynchronous()], max_steps=2)
    trainer.train()
    episodes, first, second = given["trajectories"], *trainer.state.log_history[:2]
    assert isinstance(episodes[0], Trajectory) and episodes[0].stop_reason is StopReason.TERMINATED
    assert len(set(map(id, given["environments"]))) == len(episodes) == 8 and given["step"] == 1
    for episode, environment in zip(episodes, given["environments"]):
        assert isinstance(environment, Chatter) and environment.turn == len(episode.turns)
        assert episode.turns[-1].info["success"] == (episode.turns[-1].reward > 0.5)
    assert second["rewards/judge/mean"] == pytest.approx(second["return/mean"])
    assert second["rewards/judge/std"] == pytest.approx(second["return/std"])
    assert second["rewards/Asynchronous/mean"] == 1.0
    longest = max(len(episode.turns) for episode in episodes)
    assert second["judge/longest"] == (longest + 100) / 2 and "judge/longest" in first
    assert list(trainer._logs["extra"]["turns"]) == [len(episode.turns) for episode in episodes]
    metrics = trainer.evaluate(num_episodes=5)
    longest = max(len(episode.turns) for episode in given["trajectories"])
    assert metrics["eval_judge/longest"] == (longest + 100) / 2 and len(given["trajectories"]) == 5
    assert not trainer._pending_metrics and not trainer._pending_extra_logs
    assert len(trainer._logs["extra"]["turns"]) == 8, "the training table is training's"


def test_an_object_of_trls_environment_factory_is_what_its_reward_functions_get(embedded_model, tmp_path):
    from agile_trainers.envs.libraries.trl_tools import trl_environment

    class Counter:
        def reset(self, **_):
            self.count = 0
            return "Count."

        def increment(self, by: int) -> int:
            """Count on.

            Args:
                by: How far.
            """
            self.count += by
            return self.count

        def get_reward(self):
            return 0.0

    seen = []

    def counted(environments, **_):
        seen.extend(environments)
        return [float(environment.count) for environment in environments]

    make_trainer(embedded_model, tmp_path, environment=trl_environment(Counter), reward_funcs=counted).train()
    assert len(set(map(id, seen))) == 8 and all(type(environment) is Counter for environment in seen)


def by_environment(environments, **_):
    return [0.0] * len(environments)


def by_all_of_trls(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
    return [0.0] * len(completions)


def by_secret(secret, completions, **_):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"reward_funcs": by_environment, "environment_processes": 2}, r"'by_environment' takes environments"),
        ({"reward_funcs": by_environment, "max_environments": 2}, r"'by_environment' takes environments"),
        ({"reward_funcs": by_secret}, r"'by_secret' requires the argument 'secret'.*train_dataset.*none"),
        (
            {"reward_funcs": by_secret, "train_dataset": {"secret": [1, 2]}, "eval_strategy": "steps", "eval_steps": 1},
            r"'by_secret' requires the argument 'secret'.*eval_dataset",
        ),
        ({"reward_funcs": by_secret, "train_dataset": {"secret": [1] * 2, "trajectories": [1] * 2}}, r"column 'trajec"),
        ({"train_dataset": {"completions": [1] * 2}}, r"column 'completions' of train_dataset"),
        (
            {"reward_funcs": lambda completions: [0.0], "train_dataset": {"x": [1] * 2}},
            r"does not take the argument 'prompts'",
        ),
        ({"reward_funcs": by_all_of_trls, "train_dataset": {"x": [1] * 2}}, r"does not take the argument 'x'"),
        (
            {"reward_funcs": by_environment, "reward_weights": [float("nan")]},
            r"one for each reward function, got \[nan\]",
        ),
        ({"reward_funcs": by_environment, "reward_weights": ["1"]}, r"one for each reward function, got \['1'\]"),
    ],
)
def test_what_a_reward_function_cannot_get_is_said_at_construction(embedded_model, tmp_path, change, named):
    if "train_dataset" in change:
        change = {**change, "train_dataset": Dataset.from_dict(change["train_dataset"])}
    with pytest.raises(ValueError, match=named):
        make_trainer(embedded_model, tmp_path, **change)


def test_an_environment_that_was_played_again_is_not_shown(embedded_model, tmp_path):
    trainer = make_trainer(embedded_model, tmp_path, reward_funcs=by_environment)
    episodes = trainer.rollout()
    trainer.evaluate(num_episodes=1)
    with pytest.raises(ValueError, match="'by_environment' takes environments"):
        trainer.update(episodes)
    trainer.update(trainer.rollout())


@pytest.mark.parametrize("wrong", ["returned", "logged as 'note'"])
def test_as_many_values_as_completions(embedded_model, tmp_path, wrong):
    def short(completions, log_extra, **_):
        log_extra("note", ["x"] * (len(completions) - (wrong != "returned")))
        return [0.0] * (len(completions) - (wrong == "returned"))

    with pytest.raises(ValueError, match=rf"'short' {wrong} 7 values for 8"):
        make_trainer(embedded_model, tmp_path, reward_funcs=short).train()


def test_functions_of_equal_names_are_logged_apart(embedded_model, tmp_path):
    """Also one that is called as the environment's return."""

    def environment(completions, **_):
        return [5.0] * len(completions)

    ones, twos = (lambda completions, x=x, **_: [x] * len(completions) for x in (1.0, 2.0))
    trainer = make_trainer(embedded_model, tmp_path, reward_funcs=[environment, ones, twos])
    assert trainer.reward_func_names == ["environment", "environment_2", "<lambda>", "<lambda>_2"]
    trainer.train()
    logged = trainer.state.log_history[0]
    assert [logged[f"rewards/{name}/mean"] for name in trainer.reward_func_names[1:]] == [5.0, 1.0, 2.0]
    assert logged["rewards/environment/mean"] == pytest.approx(logged["return/mean"])


@pytest.mark.parametrize(
    ("info", "expected"), [({"rewarded": False}, 0.5), ({UNREWARDED: True}, None), ({"rewarded": None, "call": 3}, 0.5)]
)
def test_no_name_in_an_environments_info_takes_its_reward(info, expected):
    """But the mark of objects of TRL that nothing rewards."""
    args = SimpleNamespace(reward_weights=None, environment_processes=0, max_environments=None)
    (environment, *_), *_ = add_return_reward(args, None, None, {})
    turn = Turn(0, 1, "a", "stop", reward=0.5, info=info)
    assert environment(trajectories=[Trajectory([1], [2], [0.0], [turn], StopReason.TERMINATED)]) == [expected]


def test_the_share_of_groups_without_spread_by_hand():
    """Groups of two: alike, apart, one unscored (alike with itself), both unscored."""
    none = float("nan")
    rewards = torch.tensor([0.1, 0.1, 0.0, 1.0, 0.5, none, none, none])
    assert share_without_spread(rewards, 2) == 0.5
    assert share_without_spread(rewards[:4], 2) == 0.5 and share_without_spread(rewards[:4], 4) == 0.0


def test_rewards_of_a_batch_by_hand():
    none = float("nan")
    rewards = torch.tensor([[1.0, 2.0], [3.0, none], [none, none]])
    made: Any = Rewards(None, ["a", "b"], torch.tensor([1.0, 0.5]), None, {}, {}, [None, None])
    found = made.summary(rewards)
    assert found == pytest.approx(
        {
            "reward": 2.5, "reward_std": 0.5**0.5, "reward_sem": 0.5,
            "rewards/a/mean": 2.0, "rewards/a/std": 2**0.5, "rewards/b/mean": 2.0,
            "rewards/b/std": 0.0,
        }
    )  # fmt: skip


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32, np.array], ids=lambda kind: kind.__name__)
def test_the_share_of_nan_counts_numbers_of_any_kind(kind: Any) -> None:
    """NaN in two of four; a tensor without dimensions is a number too."""
    shares, rewards = [], [1.0, float("nan"), float("nan"), 0.5]
    wrapped = over_sound_episodes(lambda **_: [kind(reward) for reward in rewards], False)
    episodes = [Trajectory([1], [2], [0.0], [], StopReason.TERMINATED)] * 4
    given = wrapped(trajectories=episodes, log_extra=None, log_metric=lambda *metric: shares.append(metric))
    assert shares == [("rewards/nan", 0.5)] and torch.tensor(given).isnan().tolist() == [False, True, True, False]


def test_a_reward_model_scores_what_did_not_fail(embedded_model, tmp_path, failing):
    """It reads every conversation, also of failed episodes, whose scores do not count."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    judge = AutoModelForSequenceClassification.from_pretrained(embedded_model, num_labels=1, dtype=torch.float32)
    judge.config.pad_token_id = tokenizer.pad_token_id
    failing.training = False
    trainer = make_trainer(
        embedded_model, tmp_path, environment=failing, reward_funcs=judge, per_device_train_batch_size=16, seed=5
    )
    failing.training = True
    trainer.train()
    logged, (name,) = trainer.state.log_history[0], trainer.reward_func_names[1:]
    scores = torch.tensor(list(trainer._logs["rewards"][name]))
    failed = torch.tensor([row != row for row in trainer._logs["rewards"]["environment"]])
    assert 0 < failed.sum() < 16 and torch.equal(scores.isnan(), failed)
    assert logged["stop/environment_error"] == failed.float().mean()
    assert logged[f"rewards/{name}/mean"] == pytest.approx(scores.nanmean().item()) and scores.nanmean() != 0


def test_a_configuration_makes_two_trainers(embedded_model, tmp_path):
    """Its ``reward_weights``, and everything else in it, stays what the user gave."""
    args = MultiTurnGRPOConfig(**settings(tmp_path, reward_weights=[0.5], beta=0.1, learning_rate=None))
    before = repr(vars(args))

    def make():
        def brevity(completions, **_):
            return [1.0] * len(completions)

        return MultiTurnGRPOTrainer(
            str(embedded_model), brevity, args, environment=Chatter, peft_config=LoraConfig(**LORA)
        )

    first = make()
    first.train()
    assert repr(vars(args)) == before
    second = make()
    assert repr(vars(args)) == before and repr(vars(second.args)) == repr(vars(first.args))
    assert first.reward_weights.tolist() == second.reward_weights.tolist() == [1.0, 0.5]


def test_a_function_that_never_gives_a_reward_is_named(embedded_model, tmp_path, monkeypatch):
    """Once, after a few batches; one that gives a reward now and then is not."""
    calls = []

    def broken(completions, **_):
        return [float("nan")] * len(completions)

    def rare(completions, **_):
        calls.append(1)
        return [1.0 if len(calls) == 2 else None] * len(completions)

    said = []
    monkeypatch.setattr(reward_functions.logger, "warning", said.append)
    make_trainer(embedded_model, tmp_path, reward_funcs=[broken, rare], max_steps=5).train()
    (text,) = said
    assert "'broken' gave no reward (None or NaN) to any episode of the 3 batches" in text


@pytest.mark.parametrize(
    "error", [SystemExit(0), GeneratorExit(), BaseExceptionGroup("several", [SystemExit(0)])], ids=repr
)
@pytest.mark.parametrize("awaited", [False, True])
def test_an_exit_of_a_reward_function_is_an_error_that_names_it(error, awaited):
    """Without a message, `sys.exit(0)` would end training with the status of success."""

    def leaves(completions, **_):
        raise error

    async def leaves_later(completions, **_):
        raise error

    episode = Trajectory([1], [2], [0.0], [], StopReason.TERMINATED)
    wrapped = over_sound_episodes(leaves_later if awaited else leaves, False)
    with pytest.raises(RuntimeError, match=rf"The reward function 'leaves.*' raised {type(error).__name__}"):
        called = wrapped(completions=["a"], trajectories=[episode], log_extra=None, log_metric=None)
        if awaited:
            asyncio.run(called)


def test_ctrl_c_in_a_reward_function_stays_ctrl_c():
    def interrupted(completions, **_):
        raise KeyboardInterrupt

    episode = Trajectory([1], [2], [0.0], [], StopReason.TERMINATED)
    with pytest.raises(KeyboardInterrupt):
        over_sound_episodes(interrupted, False)(
            completions=["a"], trajectories=[episode], log_extra=None, log_metric=None
        )


@pytest.mark.parametrize(
    "returned", [None, 1.0, ["1"], [[1.0]], [object()], [{}], [torch.ones(2)], [1e39], [-(10**400)]]
)
def test_what_is_no_list_of_rewards_is_named(returned: Any) -> None:
    def generous(**_: Any) -> Any:
        return returned

    given = {"trajectories": [Trajectory([1], [2], [0.0], [], StopReason.TERMINATED)], "log_metric": lambda *_: None}
    with pytest.raises(ValueError, match="reward function 'generous' returned a"):
        over_sound_episodes(generous, False)(**given, log_extra=None)


@pytest.mark.parametrize(
    ("values", "weights"),
    [((3e38, 3e38), [1.0, 1.0]), ((3e38, 0.0), [2.0, 1.0]), ((-3e38, -3e38), [1.0, 1.0]), ((3e38, -3e38), [2.0, 2.0])],
    ids=["sum", "weight", "negative", "opposite infinities"],
)
def test_rewards_whose_sum_leaves_float32_are_an_error(embedded_model, tmp_path, values, weights):
    """An infinite reward gave the whole group advantages that are NaN, and the step was skipped."""

    def first(completions, **_):
        return [values[0]] * len(completions)

    def second(completions, **_):
        return [values[1]] * len(completions)

    trainer = make_trainer(embedded_model, tmp_path, reward_funcs=[first, second], reward_weights=weights)
    with pytest.raises(ValueError, match=r"exceeds 3\.4e\+38 .*first -?3e\+38, second .*reward_weights"):
        trainer.train()
