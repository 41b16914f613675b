"""``replay_successes``: what is kept, the places that it takes, its gradient, and what a checkpoint holds of it."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from math import inf, nan, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from checkpointed_runs import SAVING, KillBefore, Killed, assert_same, check_resumed, weights
from datasets import Dataset
from enumerated import grpo, relative_error
from five_tokens import END, PAID_LAYOUTS, Stopping, forward_of, probabilities, rewarded, taken
from games import Chatter, Lucky, make_trainer
from recorded import recorded

from agile_trainers.adapters.folders import CheckpointError
from agile_trainers.checkpoints.integrity import mark_complete
from agile_trainers.envs.checker import validate_context
from agile_trainers.objectives.demonstrations import ADVANTAGE_SFT, SFT, TREATMENTS, WEIGHTED, demonstration_credit
from agile_trainers.packing.packer import PackingState
from agile_trainers.records.plain import DEEPEST_MESSAGE
from agile_trainers.rollout.collate import collate
from agile_trainers.step.credit import Credit
from agile_trainers.step.log_probs import BatchLogProbs
from agile_trainers.step.successes import Successes, Taken, episode_json, kept_episode
from agile_trainers.train_batch import DEMONSTRATED
from agile_trainers.types import StopReason, Trajectory, Turn

ROWS = Dataset.from_dict({"number": [0, 1]})


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


class Silent(Lucky):
    """The same without a report of success."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        *others, _ = super().step(action)
        return *others, {}


class Never(Lucky):
    """Never pays in training, whatever it hears."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, _, *others, _ = super().step(action)
        return observation, 0.0, *others, {"success": False}


def make(model: Path, folder: Path, **changes: Any) -> Any:
    return make_trainer(
        model, folder, **{"environment": Lucky, "train_dataset": ROWS, "replay_successes": 8, **changes}
    )


def episode(name: str, success: bool | None, start: int = 0, reward: float | None = None) -> Trajectory:
    """One turn from a start; its text names it."""
    paid = float(bool(success)) if reward is None else reward
    turn = Turn(0, 1, name, "stop", paid, info={} if success is None else {"success": success})
    return Trajectory([1], [2], [-0.5], [turn], StopReason.TERMINATED, options={"number": start})


def exchange(kept: Successes, *episodes: Trajectory) -> Taken:
    """A batch of these."""
    totals = torch.tensor([one.episode_return for one in episodes])
    groups = totals.view(-1, kept._members)
    return kept.exchange(episodes, totals[:, None], totals, (groups == groups[:, :1]).all(1).tolist())[0]


def names(found: Taken) -> dict[int, str]:
    return {place: one.turns[0].text for place, one in found.episodes.items()}


def successes(count: int = 8, members: int = 2) -> Successes:
    return Successes(count, members, Accelerator())


# ----------------------------------------------------------------------------------------------------------- what is kept


def test_the_latest_success_takes_the_last_place_of_a_group_that_fails() -> None:
    kept = successes()
    assert not exchange(kept, episode("a", False), episode("b", True)).rewards  # nothing was kept before
    found = exchange(kept, episode("c", False), episode("d", False))
    assert names(found) == {1: "b"} and found.rewards == {1: [1.0]} and found.episodes[1].demonstration
    assert not exchange(kept, episode("e", True), episode("f", False)).rewards  # which succeeds itself
    assert names(exchange(kept, episode("g", False), episode("h", False))) == {1: "e"}


def test_a_group_whose_turns_have_an_advantage_keeps_its_places() -> None:
    """Equal totals of different rewards: the rule that compares turns learns from each."""
    kept = successes()
    exchange(kept, episode("a", True), episode("b", False))
    failed, totals = [episode("c", False), episode("d", False)], torch.zeros(2)
    assert not kept.exchange(failed, totals[:, None], totals, [False])[0].rewards
    assert kept.exchange(failed, totals[:, None], totals, [True])[0].rewards


class PaysOnce:
    """Two turns; a member is paid in the turn that its answers choose, so that totals are equal."""

    def reset(self, seed=None, options=None):
        self.first = None
        return f"row {options['number']}", {}

    def step(self, action):
        if self.first is None:
            self.first = float(sum(map(ord, action)) % 2)
            return "again", self.first, False, False, {"success": False}
        return "", 1.0 - self.first, True, False, {"success": False}


def test_credit_says_which_groups_learn_nothing(embedded_model, tmp_path) -> None:
    """Totals alone are no reason: at the granularity of turns these groups have advantages."""
    rows = Dataset.from_list([{"number": 0}, {"number": 1}])
    trainer = make_trainer(embedded_model, tmp_path, environment=PaysOnce, train_dataset=rows, replay_successes=8)
    seen = []
    exchanged = trainer.rollouts.successes.exchange
    trainer.rollouts.successes.exchange = lambda *given: seen.append(given) or exchanged(*given)
    trainer.train()
    (_, _, totals, zero), *_ = seen
    assert torch.equal(totals, torch.ones_like(totals)) and not all(zero)


def test_a_success_is_of_its_start_alone() -> None:
    kept = successes()
    exchange(kept, episode("a", True, start=0), episode("b", False, start=0))
    assert not exchange(kept, episode("c", False, start=1), episode("d", False, start=1)).rewards
    elsewhere = [episode("e", False), episode("f", False)]
    for one in elsewhere:
        one.environment_name = "another"
    assert not exchange(kept, *elsewhere).rewards


def test_a_group_that_has_something_to_learn_from_keeps_its_places() -> None:
    """Episodes that fail with different rewards have advantages; the success would take one of them."""
    kept = successes()
    exchange(kept, episode("a", True), episode("b", False))
    assert not exchange(kept, episode("c", False, reward=0.5), episode("d", False, reward=0.0)).rewards
    assert names(exchange(kept, episode("e", False, reward=0.5), episode("f", False, reward=0.5))) == {1: "a"}


def test_without_reports_of_success_the_best_return_counts() -> None:
    kept = successes()
    exchange(kept, episode("a", None, reward=0.25), episode("b", None, reward=0.5))
    assert names(exchange(kept, episode("c", None, reward=0.0), episode("d", None, reward=0.0))) == {1: "b"}
    exchange(kept, episode("e", None, reward=0.75), episode("f", None, reward=0.0))
    assert names(exchange(kept, episode("g", None, reward=0.5), episode("h", None, reward=0.5))) == {1: "e"}


def test_what_nothing_rewards_is_neither_kept_nor_compared() -> None:
    kept, pair = successes(), [episode("a", True), episode("b", True)]
    kept.exchange(pair, torch.tensor([[nan], [nan]]), torch.tensor([nan, nan]), [True])
    assert not kept.state()
    exchange(kept, episode("c", True), episode("d", False))
    found, metrics = kept.exchange(pair, torch.tensor([[nan], [nan]]), torch.tensor([nan, nan]), [True])
    assert names(found) == {1: "c"} and metrics == {"replay/groups": 1.0, "replay/kept": 1.0}


def test_the_start_that_succeeded_least_recently_leaves() -> None:
    kept = successes(count=2)
    for start in (0, 1, 0, 2):
        exchange(kept, episode(f"of {start}", True, start), episode("", False, start))
    found = [names(exchange(kept, episode("", False, start), episode("", False, start))) for start in range(3)]
    assert found == [{1: "of 0"}, {}, {1: "of 2"}]


def test_a_state_is_json_and_restores_the_same() -> None:
    kept, again = successes(), successes()
    exchange(kept, episode("a", True), episode("b", False), episode("c", None, 1, 0.5), episode("d", None, 1, 0.5))
    kept._kept[next(iter(kept._kept))].rewards.append(nan)  # of a function that scores some episodes only
    again.restore(json.loads(json.dumps(kept.state(), allow_nan=False)))
    assert again.state() == kept.state() and [one.worth for one in again._kept.values()] == [inf, 0.5]
    with pytest.raises(ValueError, match="it is no episode: KeyError"):
        again.restore({"start": {"worth": None, "rewards": [], "episode": "{}"}})


@pytest.mark.parametrize(
    "changes",
    [{}, {"environment": "agent:environment_agents:gathers", "max_turns": 9}, {"top_p": 0.5, "temperature": 2.0}],
    ids=str,
)
def test_a_played_episode_is_kept_to_the_bit(embedded_model, tmp_path, changes) -> None:
    """With the paths of an agent, and the sets of a filter."""
    played = make_trainer(embedded_model, tmp_path, **changes).rollout()
    for one in played:
        again = kept_episode(episode_json(one))
        assert again.demonstration and not one.demonstration
        again.demonstration = False
        assert again == one and (again.paths, again.kept) == (one.paths, one.kept)
    assert ("top_p" in changes) == any(one.kept for one in played)
    assert ("environment" in changes) == any(one.paths for one in played)


# ------------------------------------------------------------------------------------------------------------ in a run


def test_what_an_environment_says_of_itself_may_be_larger_than_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its info is shortened, here to ten thousand items; the messages are kept as deep as prompts may be."""
    monkeypatch.setattr("agile_trainers.step.successes.LARGEST", 10_000)
    items: list[Any] = ["ha"]
    for _ in range(25):
        items = [items] * 10
    deep: Any = 1
    for _ in range(DEEPEST_MESSAGE - 1):
        deep = [deep]
    one, message = episode("a", True), {"more": deep}
    one.reset_info, one.turns[0].info = {"items": items}, {"success": True, "items": items}
    said = one.prompt = one.turns[0].observation = validate_context(
        [{"role": "user", "content": "", **message}], "reset()"
    )
    kept = kept_episode(episode_json(one))
    prompt, turn = kept.prompt, kept.turns[0]
    # Nothing that pytest would show whole is in a comparison.
    assert [prompt == said, turn.observation == said, kept.success, turn.info["success"]] == [True] * 4


def test_it_is_trained_on_with_its_own_probabilities_and_logged_apart(embedded_model, tmp_path) -> None:
    """Success and returns are of the episodes that were played, the replaced one among them."""
    trainer = make(embedded_model, tmp_path, max_steps=8)
    trainer.train()
    logs = [one for one in trainer.state.log_history if "replay/groups" in one]
    assert len(logs) == 8 and logs[0]["replay/groups"] == 0.0
    replayed = [one for one in logs if one["replay/groups"]]
    assert replayed and all(one["replay/kept"] in (1.0, 2.0) for one in replayed)
    rows = recorded(tmp_path, "train")
    shown = [row for row in rows if row["demonstration"]]
    assert len(shown) == sum(round(2 * one["replay/groups"]) for one in logs)
    for row in shown:
        (source,) = [
            one for one in rows
            if one["generation"] < row["generation"] and not one["demonstration"] and one["row"] == row["row"]
            and one["completion_ids"] == row["completion_ids"] and one["sampling_logprobs"] == row["sampling_logprobs"]
        ][-1:]  # fmt: skip
        assert (
            source["success"]
            and row["member"] == 3
            and (row["turns"][0]["advantage"] or 0.0) == pytest.approx(0.75 / 0.5001, rel=1e-3)
        )
        beside = [one for one in rows if (one["generation"], one["group"]) == (row["generation"], row["group"])]
        own = [one for one in beside if not one["demonstration"]]
        assert len(own) == 4 and not any(one["success"] for one in own)  # the replaced one is recorded too
    for one, log in enumerate(logs):
        own = [row["success"] for row in rows if row["generation"] == one and not row["demonstration"]]
        assert len(own) == 8 and log["success"] == pytest.approx(sum(own) / 8)
    assert any("demonstrations/log_prob" in one for one in replayed)


def test_nothing_changes_before_a_group_fails(embedded_model, tmp_path) -> None:
    """An environment that always pays: the weights are those without the option."""
    found = [
        make(embedded_model, tmp_path / str(count), environment=Chatter, replay_successes=count, max_steps=2)
        for count in (0, 8)
    ]
    for trainer in found:
        trainer.train()
    assert_same(*map(weights, found))


def test_a_lost_start_is_learned_again(embedded_model, tmp_path) -> None:
    """No episode of the run succeeds; the kept one becomes likely, and without it the policy does not move."""
    first = make(embedded_model, tmp_path / "first", environment=Lucky, max_steps=4)
    first.train()
    kept = first.rollouts.successes.state()
    assert len(kept) == 2
    for count, steps in ((8, 12), (0, 2)):
        trainer = make(
            embedded_model, tmp_path / str(count), environment=Never, max_steps=steps, replay_successes=count,
            optim="adamw_torch", learning_rate=3e-3,
        )  # fmt: skip
        if count:
            trainer.rollouts.successes.restore(kept)
        before = weights(trainer)
        trainer.train()
        if count:
            told = [one["demonstrations/log_prob"] for one in trainer.state.log_history if "replay/groups" in one]
            assert len(told) == 12 and told[-1] > told[0] + 1.0
        else:
            assert_same(weights(trainer), before)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "max_steps": 9, "seed": 5},
        {"batches_ahead": 1},
        {"environment": Silent, "demonstration_loss": WEIGHTED, "resample_zero_advantage_groups": 1},
        {"task_column": "number", "task_sampling": "adaptive"},
    ],
    ids=str,
)
def test_a_killed_run_goes_on(embedded_model, tmp_path, changes) -> None:
    """In the middle of a generation batch too, to the bit."""
    options = {
        "max_steps": 7, "per_device_train_batch_size": 4, "steps_per_generation": 2, "optim": "adamw_torch",
        "learning_rate": 1e-4, **changes,
    }  # fmt: skip
    whole, _ = check_resumed(lambda name, **more: make(embedded_model, tmp_path / name, **options, **more), 5)
    assert any(one.get("replay/groups") for one in whole.state.log_history if one["step"] > 6), "nothing was replayed"


def test_a_checkpoint_that_lacks_them_or_holds_others_is_refused(embedded_model, tmp_path) -> None:
    killed = make(embedded_model, tmp_path, max_steps=4, callbacks=[KillBefore(3)], **SAVING)
    with pytest.raises(Killed):
        killed.train()
    file = tmp_path / "checkpoint-3/rollout/successes.json"
    text = file.read_text()
    for broken, told in (
        ('{"kept": {"a": {"worth": null, "rewards": [1.0], "episode": "{}"}}}', "it is no episode"),
        ('{"kept": {"a": {"worth": "much", "rewards": [], "episode": ""}}}', "worth"),
        ('{"kept": 3}', "kept"),
    ):
        file.write_text(broken)
        mark_complete(file.parents[1])
        with pytest.raises(CheckpointError, match=told):
            make(embedded_model, tmp_path, max_steps=4).train(resume_from_checkpoint=str(file.parents[1]))
    file.write_text(text)
    mark_complete(file.parents[1])
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "pushed/checkpoint-3")
    (tmp_path / "pushed/checkpoint-3/rollout/successes.json").unlink()
    mark_complete(tmp_path / "pushed/checkpoint-3")
    with pytest.raises(CheckpointError, match="was pushed without the successes that it kept"):
        make(embedded_model, tmp_path, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "pushed/checkpoint-3"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"replay_successes": -1}, "replay_successes must not be negative, got -1"),
        ({"train_dataset": None}, "by the row of train_dataset that they started from, and this run has none"),
        ({"num_generations": 2}, "acts in groups of at least three.*num_generations=2"),
        ({"algorithm": "reinforce", "num_generations": 1}, "MultiTurnREINFORCEConfig with num_generations=1 has none"),
        ({"demonstrations": "experts:hums"}, "replay_successes=8 cannot be combined with demonstrations"),
        ({"whiten_advantages": True}, "which would be over own episodes alone"),
        ({"replay_successes": 0, "demonstration_coef": 2.0}, "it acts with demonstrations or replay_successes only"),
        ({"demonstrations_per_group": 2}, "demonstrations_per_group=2 has no effect"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(embedded_model, tmp_path, options, told) -> None:
    with pytest.raises(ValueError, match=told):
        make(embedded_model, tmp_path, **options)


def test_by_hand_the_caller_plays(embedded_model, tmp_path) -> None:
    trainer = make(embedded_model, tmp_path)
    with pytest.raises(ValueError, match="replay_successes=8 take places in the groups"):
        trainer.update(trainer.rollout())


# --------------------------------------------------------------------------------------------------------- enumeration


def kept_one(layout: str) -> tuple[Stopping, int, torch.Tensor, Trajectory]:
    """All episodes; which of them is kept, of the highest return; its log-probabilities where another policy played it."""
    world = rewarded(PAID_LAYOUTS[layout])
    returns = [one.episode_return for one in world.episodes]
    for one, paid in zip(world.episodes, returns, strict=True):
        one.options, one.turns[-1].info = {"number": 0}, {"success": paid > 0}
    chosen = max(range(len(returns)), key=lambda one: (returns[one], one))
    log_q = (taken(world, world.log_softmax(world.model)).detach() * 0.5)[chosen]
    source = kept_episode(episode_json(world.episodes[chosen]))
    source.sampling_logprobs = log_q.tolist()[: len(source.completion_ids)]
    return world, chosen, log_q, source


@pytest.fixture(scope="module")
def advantages_of(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], torch.Tensor]:
    """The trainer's (N, N, N, 3, K) in all groups of a layout, whose last one is replaced. No treatment changes them."""

    @functools.cache
    def judged(layout: str) -> torch.Tensor:
        world, _, _, source = kept_one(layout)
        kept = successes(members=3)
        source.demonstration = False
        exchange(kept, source, *(episode("", False) for _ in range(2)))
        count = len(world.episodes)
        episodes = [world.episodes[one] for group in itertools.product(range(count), repeat=3) for one in group]
        found = exchange(kept, *episodes)
        replaced = torch.tensor([place in found.episodes for place in range(len(episodes))])
        one, *others = found.episodes.values()
        assert one.turns == source.turns and all(other == one for other in others)
        rows = torch.tensor(list(itertools.product(range(count), repeat=3))).flatten().masked_fill(replaced, count)
        folder = tmp_path_factory.mktemp("groups")
        credit = grpo(embedded_model, folder, 3, replay_successes=4, train_dataset=ROWS).batches._credit
        judged = credit.judge(collate([*world.episodes, one], pad_token_id=0, end_token_id=END).rows(rows))
        return credit.finish(judged).advantages.double().view(count, count, count, 3, -1)

    return judged


@pytest.mark.parametrize(
    ("treatment", "layout"),
    [*((WEIGHTED, layout) for layout in PAID_LAYOUTS), *((one, "two turns") for one in TREATMENTS if one != WEIGHTED)],
)
def test_the_gradient_is_that_of_the_formula(
    embedded_model: Path, tmp_path: Path, advantages_of: Callable[[str], torch.Tensor], treatment: str, layout: str
) -> None:
    """Over *all* groups of three own episodes, each likely as the policy makes it; those that fail get the kept one.

    The expectation is by plain Python: in a group of returns that differ, each minus their mean; in one that fails, the kept
    return minus the mean of two failures and itself. The kept one was played by another policy.
    """
    world, chosen, log_q, source = kept_one(layout)
    coefficient, returns = 0.7, [one.episode_return for one in world.episodes]
    p, count = probabilities(world).detach(), len(world.episodes)
    every = list(itertools.product(range(count), repeat=3))
    advantages = advantages_of(layout)
    trainer = grpo(
        embedded_model, tmp_path, 3, sequence_packing="prefix", demonstration_loss=treatment,
        demonstration_coef=coefficient, replay_successes=4, train_dataset=ROWS,
    )  # fmt: skip
    weight = torch.einsum("i,j,k->ijk", p, p, p)
    fails = torch.tensor([not any(returns[one] for one in group) for group in every]).view(count, count, count)
    last = torch.where(fails[..., None], 0.0, advantages[..., 2, :])
    ours = torch.zeros(count, advantages.size(-1), dtype=torch.float64)
    for member, credit in enumerate((advantages[..., 0, :], advantages[..., 1, :], last)):
        ours += (weight[..., None] * credit).transpose(0, member).sum(dim=(1, 2))
    replayed = (weight * fails)[..., None] * demonstration_credit(advantages[..., 2, :], treatment)
    theirs = replayed.sum(dim=(0, 1, 2))

    # By the definition.
    likely, expected, kept_expected = p.tolist(), torch.zeros_like(ours).tolist(), torch.zeros_like(theirs).tolist()
    reached = [[k < len(one.turns) for k in range(ours.size(1))] for one in world.episodes]
    for group in every:
        chance = prod(likely[one] for one in group)
        if not any(returns[one] for one in group):
            for k in range(ours.size(1)):
                if reached[chosen][k]:
                    compared = [0.0 for one in group[:2] if reached[one][k]] or [0.0, 0.0]
                    value = returns[chosen] - sum([*compared, returns[chosen]]) / (len(compared) + 1)
                    kept_expected[k] += chance * (1.0 if treatment == SFT else value)
            continue
        for k in range(ours.size(1)):
            there = [returns[one] for one in group if reached[one][k]]
            mean = sum(there) / len(there) if len(there) > 1 else sum(returns[one] for one in group) / 3
            for one in group:
                expected[one][k] += chance * (returns[one] - mean) * reached[one][k]
    by_hand, kept_credit = (torch.tensor(one, dtype=torch.float64) for one in (expected, kept_expected))
    torch.testing.assert_close(ours, by_hand, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(theirs, kept_credit, rtol=1e-6, atol=1e-7)

    # Through the trainer's loss: all own episodes and the kept one, each weighed by its expected credit.
    trainer.packer._forwards |= {id(world.model): forward_of(world.model, 1.0)}
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    source.demonstration = True
    batch = collate([*world.episodes, source], pad_token_id=0, end_token_id=END)
    scale = (count + 1) * trainer.max_completion_length
    spread = torch.cat([by_hand, torch.zeros_like(theirs)[None]]) * scale
    units = torch.cat([spread[:count], torch.ones_like(theirs)[None]])
    output = trainer.batches.finish(batch, Credit(units), BatchLogProbs(torch.ones(count + 1) > 0), None)
    turns = batch.turn_ids.clamp(min=0)
    credits = torch.cat([torch.zeros_like(by_hand), kept_credit[None]]) * scale
    output.token_columns[DEMONSTRATED] = output.token_columns[DEMONSTRATED].double() * credits.gather(1, turns)
    output.advantages = spread.gather(1, turns) * output.counted
    output.has_advantage, output.old_per_token_logps = torch.ones(count + 1) > 0, None
    log_p, turn_ids = taken(world, world.log_softmax(world.model)), world.batch().turn_ids
    index = turn_ids.clamp(min=0)
    own = (by_hand.gather(1, index) * log_p).sum()
    factor = {
        SFT: torch.ones_like(log_q), ADVANTAGE_SFT: torch.ones_like(log_q),
        WEIGHTED: (log_p[chosen].detach() - log_q).exp().clamp(max=1.0),
    }[treatment] * (turn_ids[chosen] >= 0)  # fmt: skip
    exact = world.gradient(own + coefficient * (factor * kept_credit.gather(0, index[chosen]) * log_p[chosen]).sum())
    for refused in ("padded", None):
        trainer.packer.state = PackingState(checked=True, refused=refused)
        world.model.zero_grad()
        trainer._compute_loss(world.model, output.to_trl()).backward()
        gradient = -torch.cat([one.grad.flatten() for one in world.model.parameters()])
        assert relative_error(gradient, exact) < 1e-6
