"""Members on one base: each is the run it would be alone, and the population is the same however often it was killed."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState
from hub_population import KEY, TOKEN
from hub_runs import run
from hub_server import running_hub
from peft import LoraConfig
from populated import Talk, arguments, different, lora, population, quiet, states
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from agile_trainers.adapters.folders import RECORD, read_json, write_json
from agile_trainers.checkpoints import stopping
from agile_trainers.checkpoints.integrity import mark_complete
from agile_trainers.envs.checker import EnvironmentProtocolError
from agile_trainers.evaluation.results import evaluation_episodes
from agile_trainers.populations import (
    HyperparameterConfig,
    Lineage,
    PopulationError,
    Processes,
    Range,
    Selection,
    Successor,
    split_processes,
)
from agile_trainers.populations import population as module
from agile_trainers.populations.lineage import HeldOut
from agile_trainers.populations.members import Assignment, Rounds, SharedBase, continue_checkpoint, saved_adapter
from agile_trainers.rollout.seeds import SELECTION
from agile_trainers.trainers import MultiTurnGRPOTrainer
from agile_trainers.trainers.registry import find_algorithm
from agile_trainers.types import Trajectory

OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.1, "reference_adapter": True, "lr_scheduler_type": "linear"},
    "ppo": {"beta": 0.1, "gradient_checkpointing": True, "critic_learning_rate": 3e-2},
}


@pytest.fixture(scope="module", params=OPTIONS)
def trained(request, embedded_model, tmp_path_factory) -> Any:
    """A population after successive halving: two members for a step, the better one for another. Read only."""
    bases: list[dict[str, int]] = []

    def note(trainer: Any, member: int) -> None:
        quiet(trainer, member)
        own = trainer.model.get_base_model().named_parameters()
        bases.append(
            {name: value.data_ptr() for name, value in own if "lora_" not in name and "value_head" not in name}
        )

    folder = tmp_path_factory.mktemp("halved")
    made = population(embedded_model, folder, request.param, on_trainer=note, **OPTIONS[request.param])
    made.digest, made.bases = made.base.digest(), bases
    made.rounds, made.winners_when_deleting = [], []
    forget = module.forget_checkpoints

    def forgetting(*given: Any) -> None:
        made.winners_when_deleting.append(len(list(folder.glob("rounds/*/winner.json"))))
        forget(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "forget_checkpoints", forgetting)
        made.run(made.rounds.append)
    return made


def algorithm_of(trained: Any) -> str:
    return "ppo" if "PPO" in trained.lineage.settings["algorithm"] else "grpo"


def test_a_member_is_the_run_that_it_would_be_alone(trained, embedded_model, tmp_path):
    """Weights, moments and value head to the last bit: what other trainers did on the base before left no trace."""
    name = algorithm_of(trained)
    values = trained.arguments(trained.best).learning_rate
    args = arguments(
        name, tmp_path, **{**OPTIONS[name], "learning_rate": values, "save_strategy": "steps", "save_steps": 2}
    )
    alone = find_algorithm(name)(model=str(embedded_model), environment=Talk, args=args, peft_config=lora())
    quiet(alone, 0)
    alone.train()
    assert different(trained.checkpoint(trained.best), tmp_path / "checkpoint-2") == []
    moved = states(trained.checkpoint(trained.best))
    assert any(value.abs().max() > 1e-3 for name, value in moved.items() if "lora_B" in name and "ref" not in name)


def test_the_base_is_there_once_and_never_changes(trained):
    """The three trainers compute with the same memory, weight by weight."""
    assert trained.base.digest() == trained.digest
    first, *others = trained.bases
    shared = {pointer for _, pointer in first.items()}
    assert len(others) == 2 and len(shared) > 10 and all(one == first for one in others)
    assert shared == {value.data_ptr() for value in trained.base.lend().parameters()}


def test_the_lineage_is_complete(trained):
    """Two are born, both train, one stops, the other goes on and wins; the file holds the same."""
    lineage = Lineage.read(trained.output_dir)
    assert lineage == trained.lineage and lineage.finished and lineage.best == trained.best
    best, other = lineage.best, 1 - lineage.best
    told = [(event.round, event.event, event.member) for event in lineage.events]
    assert told[:2] == [(0, "born", 0), (0, "born", 1)] and told[2:4] == [(1, "trained", best), (1, "trained", other)]
    assert sorted(told[4:6]) == [(1, "kept", best), (1, "stopped", other)] and told[6:] == [(2, "trained", best)]
    assert [event.parent for event in lineage.events[:2]] == [None, None] and lineage.members == [0, 1]
    course = [event for event in lineage.events if event.event == "trained" and event.member == best]
    assert [(event.steps, event.episodes) for event in course] == [(1, 8), (2, 16)]
    assert all(event.fitness is not None and event.standard_error > 0 for event in course)
    assert [(one.number, one.episodes, one.replayed, one.rounds) for one in trained.rounds] == [
        (1, 16, False, 2),
        (2, 24, False, 2),
    ]
    again: list[Any] = []
    assert population_again(trained).run(again.append) == lineage
    assert [one.replayed for one in again] == [True, True] and again[1].trained == trained.rounds[1].trained


def population_again(trained: Any) -> Any:
    """The same population, as another process would make it."""
    name = algorithm_of(trained)
    return population(trained.lineage.settings["model"], trained.output_dir, name, **OPTIONS[name])


def test_the_winner_goes_on_alone(trained, tmp_path):
    """As a policy folder for any later run, and exactly, with its optimizer, from its checkpoint."""
    folder = trained.export(tmp_path / "winner")
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", RECORD, "README.md"} <= names
    assert not any(name.startswith("checkpoint-") or name in ("run.lock", "rollouts") for name in names)
    assert "/" not in json.loads((folder / RECORD).read_text())["base_model"]["name"], "people upload it"
    with pytest.raises(ValueError, match="not empty"):
        trained.export(folder)
    name = algorithm_of(trained)
    start = SharedBase(str(folder), arguments(name, tmp_path / "a"))
    options = {"environment": Talk, "args": arguments(name, tmp_path / "b", beta=0.1)}
    ours = find_algorithm(name)(model=start.lend(), **options)
    theirs = find_algorithm(name)(model=str(folder), **options)
    left, right = (dict(one.model.named_parameters()) for one in (ours, theirs))
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    assert ours.checkpoints.record() == theirs.checkpoints.record()
    assert ours.checkpoints.record()["parent"]["source"] == str(folder)


def test_the_winner_is_the_best_policy_of_all_rounds(embedded_model, tmp_path):
    """What a member learned and lost again is kept, and kept once when the run is taken up again."""
    calls, then = [], {}

    def falling(episode: Trajectory) -> float:
        calls.append(episode)
        return 1.0 + (6 < len(calls) <= 12)  # the second member after the first round

    def keep(done: Any) -> None:
        if done.number == 1:
            then.update(load_file(tmp_path / "out/member-01/adapter_model.safetensors"))

    made = population(embedded_model, tmp_path / "out", fitness=falling)
    made.run(keep)
    won = made.lineage.winner
    assert (won.member, won.round, won.steps, won.fitness) == (1, 1, 1, 2.0)
    assert made.best == 1 and made.lineage.events[-1].fitness == 1.0
    for again in (made, population(embedded_model, tmp_path / "out", fitness=falling)):
        again.run()
        exported = again.export(tmp_path / f"winner-{id(again)}")
        weights = load_file(exported / "adapter_model.safetensors")
        now = load_file(made.folder(1) / "adapter_model.safetensors")
        assert all(torch.equal(weights[name], then[name]) for name in then) and weights.keys() == then.keys()
        assert not all(torch.equal(weights[name], now[name]) for name in then)
        assert "is 2.000 ± 0.000 after 1 updates" in (exported / "README.md").read_text(encoding="utf-8")
    assert len(calls) == 18 + 6  # no evaluation was repeated; the last is of held-out episodes
    assert made.lineage.held_out == HeldOut(1, 1, 1.0, 0.0, 6, 0), "chosen by 2, worth 1"
    assert {one.seed for one in calls[18:]}.isdisjoint(one.seed for one in calls[:18])


def test_an_exported_card_tells_of_the_population(trained, tmp_path):
    folder = trained.export(tmp_path / "winner")
    text = (folder / "README.md").read_text(encoding="utf-8")
    won, held_out = trained.lineage.winner, trained.lineage.held_out
    for line in (
        "# winner", 'PeftModel.from_pretrained(base, "winner")',
        f"the best policy (of member {won.member}) of a population of 2 (strategy `halving`)",
        f"`return` over 6 evaluation episodes, by which it was chosen, is {won.fitness:.3f} ± {won.standard_error:.3f} "
        f"after {won.steps} updates. On 6 held-out episodes, by which nothing was chosen, it is {held_out.fitness:.3f} ± ",
    ):  # fmt: skip
        assert line in text, line
    assert "member-0" not in text and yaml.safe_load(text.split("---")[1])["model_name"] == "winner"
    assert Lineage.read(folder) == trained.lineage.public()
    other = trained.export(tmp_path / "other", 1 - trained.best)
    assert f"This is member {1 - trained.best} of" in (other / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"no member 7 that trained; there are \[0, 1\]"):
        trained.export(tmp_path / "none", 7)


@pytest.mark.slow  # processes of their own
def test_the_winner_on_the_hub(embedded_model, tmp_path):
    """It loads by its id with the member's weights, critic included; no secret is in a file."""
    with running_hub() as hub:
        run(hub, "push", embedded_model, tmp_path, Path(__file__).with_name("hub_population.py"))
        _, commit = hub.repositories["tester/winner"]
        assert hub.private == {"tester/winner"}
    found, files = torch.load(tmp_path / "result.pt"), commit["files"]
    assert files.keys() == {
        ".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors", "agile_trainers.json",
        "chat_template.jinja", "critic/README.md", "critic/adapter_config.json", "critic/adapter_model.safetensors",
        "learning_curve.png", "lineage.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert found["commit"] == found["parent"]["commit"] == commit["sha"] and found["vocabulary"] > 100
    pushed, member = found["weights"]
    assert pushed.keys() == member.keys() and all(torch.equal(pushed[name], member[name]) for name in member)
    assert any(value.any() for name, value in member.items() if "value_head.modules_to_save.critic" in name)
    torch.testing.assert_close(*found["logits"], rtol=0, atol=1e-6)
    card = files["README.md"].decode()
    assert 'PeftModel.from_pretrained(base, "tester/winner")' in card and "# winner\n" in card
    assert "Cannot push to repo_id='winner'" in found["refused"] and "may write" in found["refused"]
    local = [path for path in (tmp_path / "population").glob("*.json") if path.name != "private.json"]
    for content in [*files.values(), *(path.read_bytes() for path in local)]:
        assert not any(secret.encode() in content for secret in (TOKEN, KEY))


# -------------------------------------------------------------------------------------------------- killed and resumed


class Killed(BaseException):
    """What nothing in the library expects."""


class Killer(TrainerCallback):
    """Kills the process at every third step or result that it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def see(self) -> None:
        self.seen += 1
        if self.seen == 3:
            raise Killed

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.see()


class CopyBest:
    """A strategy of a user: the best member goes on, and a copy of it trains with the other number of iterations."""

    name = "copy-best"

    def select(self, scores: Any, started: int, space: Any, rng: Any) -> Selection:
        best = max(scores, key=lambda score: score.mean)
        moved = {**best.hyperparameters, "num_iterations": 3 - best.hyperparameters["num_iterations"]}
        kept = Successor(best.member, best.hyperparameters)
        return Selection([kept, Successor(best.member, moved, "copied")], {})


SEARCH: dict[str, Any] = {
    "hyperparameters": HyperparameterConfig(learning_rate=Range(1e-3, 1e-1, log=True), num_iterations=Range(1, 2)),
    "strategy": CopyBest(),
}


def told(lineage: Lineage) -> list[Any]:
    return [replace(event, seconds=0.0) for event in lineage.events]


def test_a_killed_population_is_the_same_bit_for_bit(embedded_model, tmp_path, monkeypatch):
    """Killed inside members, between them, and between a member's last checkpoint and its result."""
    whole = population(embedded_model, tmp_path / "whole", **SEARCH)
    whole.run()
    write, killer = module.write_json, Killer()

    def killing(path: Path, content: dict[str, Any]) -> None:
        if path.parent.parent.name == "rounds":
            killer.see()
        write(path, content)

    def attach(trainer: Any, member: int) -> None:
        quiet(trainer, member)
        trainer.add_callback(killer)

    monkeypatch.setattr(module, "write_json", killing)
    kills = 0
    while True:
        killer.seen = 0
        killed = population(embedded_model, tmp_path / "killed", on_trainer=attach, **SEARCH)
        try:
            killed.run()
            break
        except Killed:
            kills += 1
    assert kills >= 3
    assert told(killed.lineage) == told(whole.lineage) and killed.best == whole.best
    ours, theirs = (load_file(made.output_dir / "best/adapter_model.safetensors") for made in (killed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    last = [event for event in whole.lineage.events if event.event == "trained" and event.round == 2]
    assert sorted(event.steps for event in last) == [2, 4]
    for event in last:
        assert different(whole.checkpoint(event.member), killed.checkpoint(event.member)) == []
    copies = [event for event in whole.lineage.events if event.event == "born" and event.parent is not None]
    assert copies and all(event.changes for event in copies)
    assert {path.name for path in whole.folder(0).glob("checkpoint-*")} <= {f"checkpoint-{one.steps}" for one in last}


class Terminated(TrainerCallback):
    """Gets SIGTERM inside a step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_sigterm_in_a_member_stops_the_population_which_goes_on_when_it_is_run_again(
    embedded_model, tmp_path, monkeypatch
):
    said: list[str] = []
    monkeypatch.setattr(stopping.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(stopping.logger, "warning", lambda text, *values, **_: said.append(text % values))
    terminated = population(
        embedded_model, tmp_path, on_trainer=lambda trainer, _: trainer.add_callback(Terminated()), **SEARCH
    )
    with pytest.raises(SystemExit) as exit_:
        terminated.run()
    assert exit_.value.code == 143
    assert said[-1] == "Terminated: stopped at step 1; running the same again goes on from there."


def test_a_folder_of_another_population_is_refused(embedded_model, trained):
    name = algorithm_of(trained)
    with pytest.raises(PopulationError, match="seed: 0 -> 1"):
        population(embedded_model, trained.output_dir, name, search_seed=1, **OPTIONS[name]).run()


def gone(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_finished_round_is_never_made_of_later_weights(trained, tmp_path):
    """Results, the best policy and the settings that are gone or changed are named, with a way on."""
    name, last = algorithm_of(trained), max(trained.lineage.events, key=lambda event: event.steps).member
    folder = tmp_path / "population"
    result, winner = folder / f"rounds/0001/member-{last:02d}.json", folder / "rounds/0001/winner.json"
    newest, policy = folder / "rounds/0002/winner.json", folder / f"member-{last:02d}"
    other = {"member": 7, "round": 2}
    harms: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: gone(result),
            rf"member-0{last}.json is gone or damaged, and later rounds were decided by it\. Restore it",
        ),
        (lambda: result.write_text("{}"), rf"member-0{last}.json is gone or damaged"),
        (lambda: gone(winner), r"0001/winner.json is gone or damaged"),
        (lambda: gone(folder / "rounds"), rf"is gone\. Round 1 ended at step 1, and .*member-0{last} holds step 2"),
        (
            lambda: newest.write_text(json.dumps(other)),
            "names member 7 of round 2 as the best so far, by the results it is",
        ),
        (
            lambda: gone(folder / "population.json"),
            r"population.json is gone, which tells the settings of what rounds holds",
        ),
        (lambda: gone(winner, newest.parent), rf"It was about member {last} at step 1, and .* is at step 2"),
    ]
    for harm, message in harms:
        shutil.copytree(trained.output_dir, folder)
        harm()
        with pytest.raises(PopulationError, match=message):
            population(trained.lineage.settings["model"], folder, name, **OPTIONS[name]).run()
        before = (folder / "best/adapter_model.safetensors").read_bytes()
        assert before == (trained.output_dir / "best/adapter_model.safetensors").read_bytes()
        shutil.rmtree(folder)

    shutil.copytree(trained.output_dir, folder)
    gone(folder / f"rounds/0002/member-{last:02d}.json")  # whose checkpoint is there
    made = population(trained.lineage.settings["model"], folder, name, **OPTIONS[name])
    assert told(made.run()) == told(trained.lineage) and policy.is_dir()
    newest.write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"best holds a policy of step . of member 7, and the fitness of member"):
        made.export(tmp_path / "exported")
    gone(folder / "best")
    with pytest.raises(PopulationError, match=r"best holds no policy any more\. Restore it: .* are copies"):
        made.export(tmp_path / "exported")


# ----------------------------------------------------------------------------------------------------------- mutations

PARENT: dict[str, Any] = {
    "beta": 0.1, "entropy_coef": 0.05, "gamma": 0.9, "temperature": 1.0, "max_steps": 4, "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
}  # fmt: skip


class Continued:
    """Continuations of one parent's checkpoint for a step, under other options."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder, self.base = folder, SharedBase(str(model), arguments("grpo", folder))
        self.rounds = Rounds(
            self.base, find_algorithm("grpo"), {"environment": Talk, "peft_config": lora()}, "return", self._keep
        )
        self.parent = self.run("parent", None, 1, {})
        self.same = self.run("same", self.parent, 2, {})

    def _keep(self, trainer: Any, member: int) -> None:
        quiet(trainer, member)
        self.trainer = trainer

    def run(self, name: str, source: Path | None, end: int, changes: dict[str, Any]) -> Path:
        args = arguments("grpo", self.folder / name, **{**PARENT, **changes})
        assignment = Assignment(0, 1, args, end, 8, source)
        (result,) = self.rounds.run([assignment], args)
        assert not result.failed
        return assignment.folder / f"checkpoint-{end}"


@pytest.fixture(scope="module")
def continued(embedded_model, tmp_path_factory) -> Continued:
    return Continued(embedded_model, tmp_path_factory.mktemp("continued"))


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in states(checkpoint).items() if "lora_" in name}


def test_a_mutated_learning_rate_reaches_the_optimizer(continued):
    """Twice the rate makes twice the step, from the same moments: Adam's step is proportional to the rate."""
    start, same, twice = (
        weights(one)
        for one in (
            continued.parent,
            continued.same,
            continued.run("rate", continued.parent, 2, {"learning_rate": 2e-2}),
        )
    )
    steps = [torch.cat([(end[name] - start[name]).flatten() for name in start]) for end in (same, twice)]
    assert steps[0].abs().max() > 1e-3
    assert torch.allclose(steps[1], 2 * steps[0], rtol=1e-4, atol=1e-7)
    assert continued.trainer.state.log_history[1]["learning_rate"] == pytest.approx(2e-2 * 3 / 4)


@pytest.mark.parametrize("option, value", [("beta", 0.5), ("entropy_coef", 0.5), ("gamma", 0.1), ("temperature", 0.7)])
def test_a_mutated_option_changes_training(continued, option, value):
    changed = continued.run(option, continued.parent, 2, {option: value})
    assert getattr(continued.trainer, option, getattr(continued.trainer.args, option)) == value
    assert any(
        not torch.equal(one, other) for one, other in zip(weights(changed).values(), weights(continued.same).values())
    )


def test_a_mutated_number_of_iterations_changes_training(continued):
    """A second pass over the same episodes, which are those of the generation batch that would have come next."""
    changed = continued.run("num_iterations", continued.parent, 4, {"num_iterations": 2, "max_steps": 8})
    steps = [entry for entry in continued.trainer.state.log_history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in steps]
    assert rates == pytest.approx([1e-2, 1e-2 * 6 / 8, 1e-2 * 5 / 8])
    assert "return/mean" in steps[1] and "return/mean" not in steps[2]
    same = read_json(continued.same / "trainer_state.json")["log_history"][1]
    assert steps[1]["return/mean"] == same["return/mean"] and steps[1]["kl"] == pytest.approx(same["kl"], rel=1e-5)
    assert read_json(changed / RECORD)["global_step"] == 4


def test_a_copy_has_weights_and_moments_and_is_a_branch(continued, tmp_path):
    copied = continue_checkpoint(continued.parent, tmp_path, 3)
    assert copied.name == "checkpoint-3" and different(copied, continued.parent) == []
    record, before = read_json(copied / RECORD), read_json(continued.parent / RECORD)
    assert (record["global_step"], record["run_id"]) == (3, "") and before["run_id"]
    with pytest.raises(ValueError, match="num_iterations=1"):
        continue_checkpoint(copied_with(copied, 2), tmp_path / "other", 1)


def copied_with(checkpoint: Path, iterations: int) -> Path:
    """Say that a checkpoint was saved with this number of iterations."""
    record = read_json(checkpoint / RECORD)
    write_json(checkpoint / RECORD, {**record, "options": {**record["options"], "num_iterations": iterations}})
    mark_complete(checkpoint)
    return checkpoint


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_member_that_crashes_or_turns_nan_loses_only_itself(embedded_model, tmp_path):
    def harm(trainer: Any, member: int) -> None:
        quiet(trainer, member)
        if member == 1:
            raise RuntimeError("the simulator is gone")
        if member == 2:
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.data.fill_(float("nan"))

    made = population(embedded_model, tmp_path, members=3, max_hours=1e-9, fitness=turns, on_trainer=harm)
    lineage = made.run()
    events = {event.member: event for event in lineage.events if event.event in ("trained", "failed")}
    assert [events[n].event for n in range(3)] == ["trained", "failed", "failed"] and made.best == 0
    assert events[1].reason == "RuntimeError: the simulator is gone" and events[2].reason
    assert json.loads((tmp_path / "rounds/0001/member-01.json").read_text())["failed"] == events[1].reason
    lengths = [1 + spec.seed % 2 for spec in evaluation_episodes(3, 6, domain=SELECTION)]
    assert events[0].fitness == pytest.approx(sum(lengths) / 6)
    assert lineage.finished and max(event.round for event in lineage.events) == 1  # the hours were over


class Brittle(Talk):
    """Fails on a third of the answers, and speaks of success only when it wins."""

    def step(self, action: str) -> Any:
        if sum(map(ord, action)) % 3 == 1:
            raise ValueError("no number")
        observation, reward, over, cut, info = super().step(action)
        return observation, reward, over, cut, info if info["success"] else {}


def test_failed_and_silent_episodes_count_against_a_member(embedded_model, tmp_path):
    once = {"rounds": 1, "max_steps": 1, "num_eval_episodes": 24}
    made = population(embedded_model, tmp_path, environment=Brittle, fitness="success", **once)
    lineage = made.run()
    trained = [event for event in lineage.events if event.event == "trained"]
    assert len(trained) == 2
    for event in trained:
        result = json.loads((tmp_path / f"rounds/0001/member-{event.member:02d}.json").read_text())
        assert event.failed_episodes == result["values"].count(None) > 0
        assert event.unreported_episodes == result["unreported"] == result["values"].count(0.0) > 0
        assert event.fitness == pytest.approx(result["values"].count(1.0) / 24)
    written = json.loads((tmp_path / "lineage.json").read_text())
    told = {event["member"]: event["failed_episodes"] for event in written["events"] if event["event"] == "trained"}
    assert told == {event.member: event.failed_episodes for event in trained}
    assert written["held_out"]["episodes"] == 24 and written["held_out"]["failed_episodes"] > 0
    assert lineage == Lineage.read(tmp_path)


def test_success_that_nobody_reports_is_no_fitness(embedded_model, tmp_path):
    class Mute(Talk):
        def step(self, action: str) -> Any:
            return *super().step(action)[:4], {}

    with pytest.raises(PopulationError, match="fitness='success': the environment reports no success"):
        population(embedded_model, tmp_path, environment=Mute, fitness="success").run()


def test_a_population_knows_its_data(embedded_model, tmp_path):
    """Other rows, another file that the environment reads, and other reward functions are another population."""

    class Reads(Talk):
        def __init__(self, path: str = "") -> None:
            self.path = path

    def judge(completions: Any, **_: Any) -> list[float]:
        return [0.0] * len(completions)

    file = tmp_path / "questions.jsonl"
    file.write_text("one")
    given = {
        "environment": functools.partial(Reads, str(file)), "train_dataset": [{"level": 1}], "eval_dataset": [{"level": 2}],
        "fitness": "return",
    }  # fmt: skip
    first = population(embedded_model, tmp_path / "out", **given)
    with ExitStack() as stack:
        first._open(stack)
    with ExitStack() as stack:
        population(embedded_model, tmp_path / "out", **given)._open(stack)
    for name, changes in {
        "train_dataset": {"train_dataset": [{"level": 3}]},
        "eval_dataset": {"eval_dataset": [{"level": 2}, {"level": 2}]},
        "reward_funcs": {"reward_funcs": judge},
    }.items():
        other = population(embedded_model, tmp_path / "out", **{**given, **changes})
        with pytest.raises(PopulationError, match=f"another population: {name}: "), ExitStack() as stack:
            other._open(stack)
    file.write_text("two")
    changed = population(embedded_model, tmp_path / "out", **given)
    with pytest.raises(PopulationError, match="environment_files: another value"), ExitStack() as stack:
        changed._open(stack)


def turns(episode: Trajectory) -> float:
    """A user's fitness, which every policy has alike."""
    return float(len(episode.turns))


def test_a_policy_with_a_broken_weight_joins_no_batch(trained, tmp_path):
    """An engine that serves several members would fail for all of them."""
    folder = trained.export(tmp_path / "policy")
    weights, config = saved_adapter(folder)
    assert config.r == 2 and all("lora_" in name for name in weights)
    name, broken = next(iter(weights.items()))
    broken[0, 0] = float("inf")
    save_file(dict(weights), folder / "adapter_model.safetensors")
    with pytest.raises(FloatingPointError, match=rf"1 of the policy's {len(weights)} weights are not finite: {name}"):
        saved_adapter(folder)


class Harm(TrainerCallback):
    """Harms all members from a round on: makes no trainer with an error, turns the policy NaN without one."""

    def __init__(self, after: int, error: Exception | None = None) -> None:
        self.after, self.error, self.rounds = after, error, 0

    def attach(self, trainer: Any, member: int) -> None:
        quiet(trainer, member)
        if self.rounds >= self.after:
            if self.error is not None:
                raise self.error
            trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(float("nan"))

    def count(self, done: Any) -> None:
        self.rounds += 1


def test_a_population_without_a_survivor_says_why(embedded_model, tmp_path):
    harm = Harm(0, RuntimeError("the simulator is gone"))
    with pytest.raises(PopulationError, match="round 1, member 0 with: RuntimeError: the simulator is gone"):
        population(embedded_model, tmp_path, on_trainer=harm.attach).run()
    assert not list(tmp_path.glob("rounds/*/*"))


def test_a_round_without_a_survivor_is_played_again(embedded_model, tmp_path):
    """Unless its members diverged, as they would again: then the best policy is that of the round before."""
    harm = Harm(1, RuntimeError("the simulator is gone"))
    made = population(embedded_model, tmp_path, on_trainer=harm.attach)
    with pytest.raises(PopulationError, match=r"round 2, .* is gone\n.*run again.* best policy so far is in .*best"):
        made.run(harm.count)
    assert not made.lineage.finished
    harm = Harm(1)
    lineage = population(embedded_model, tmp_path, on_trainer=harm.attach).run(harm.count)
    failed = [event.reason.partition(":")[0] for event in lineage.events if event.event == "failed"]
    assert failed == ["LogitsError"] and lineage.finished
    assert lineage.winner.round == lineage.held_out.round == 1


@pytest.mark.parametrize(
    "error", [OSError(28, "disk"), MemoryError(), ConnectionError(), torch.AcceleratorError("gone")]
)
def test_an_error_of_the_machine_is_no_members_own(continued, tmp_path, error):
    """It leaves no result, so that a run that goes on trains the member."""
    args = arguments("grpo", tmp_path, **PARENT)
    rounds = Rounds(continued.base, find_algorithm("grpo"), {"environment": Talk}, "return", Harm(0, error).attach)
    with pytest.raises(type(error)):
        list(rounds.run([Assignment(0, 1, args, 1, 8)], args))


def test_an_environment_that_is_down_is_no_members_own(continued, tmp_path):
    class Down(Talk):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            raise ConnectionError("the server is down")

    args = arguments("grpo", tmp_path, **PARENT)
    rounds = Rounds(continued.base, find_algorithm("grpo"), {"environment": Down, "peft_config": lora()}, "return")
    with pytest.raises(EnvironmentProtocolError, match="the server is down"):
        list(rounds.run([Assignment(0, 1, args, 1, 8)], args))


def test_a_larger_budget_finds_another_winner(embedded_model, tmp_path):
    """Its held-out result is its own; while rounds are read again, the best policy is already the later one."""
    calls: list[Trajectory] = []

    def rising(episode: Trajectory) -> float:
        calls.append(episode)
        return float(len(calls))

    first = population(embedded_model, tmp_path / "out", fitness=rising, max_hours=1e-9).run()
    assert (first.held_out.round, first.held_out.fitness) == (1, pytest.approx(15.5))  # episodes 13 to 18
    made = population(embedded_model, tmp_path / "out", fitness=rising, max_hours=10)
    lineage = made.run()
    assert (lineage.winner.round, lineage.held_out.round, lineage.held_out.fitness) == (2, 2, pytest.approx(27.5))
    lineage.held_out = first.held_out
    assert "held-out" not in (made.export(tmp_path / "winner") / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds a policy of step 2 of .* is of step 1"):
        made.run(lambda done: made.export(tmp_path / str(done.number)))


def test_a_policy_is_not_exported_with_the_fitness_of_another(trained, tmp_path, monkeypatch):
    """A member that trained another round, and failed in its evaluation."""
    *events, last = trained.lineage.events
    failed = replace(last, event="failed", fitness=None, reason="The fitness is not a finite number.")
    monkeypatch.setattr(trained, "lineage", replace(trained.lineage, events=[*events, failed]))
    with pytest.raises(ValueError, match=r"holds a policy of step 2 of .* is of step 1: the member failed later"):
        trained.export(tmp_path / "failed", last.member)


def test_checkpoints_are_deleted_before_other_processes_go_on(trained):
    """They wait for the round's winner, and train the next round's copies then."""
    assert trained.winners_when_deleting == [0, 0, 1, 1]


def test_a_member_without_its_checkpoint_does_not_begin_anew(continued, tmp_path):
    args = arguments("grpo", tmp_path, **PARENT)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint any more.* begins round 2"):
        list(continued.rounds.run([Assignment(0, 2, args, 2, 8)], args))


def test_reward_functions_are_the_fitness(embedded_model, continued, monkeypatch, tmp_path):
    """With the return, by their weights; it has no known lowest value, also where the return has."""
    monkeypatch.setattr(Talk, "return_range", (0.0, 100.0), raising=False)
    played: list[list[float]] = []

    def judge(completions: Any, trajectories: list[Trajectory], **_: Any) -> list[float]:
        scores = [float(len(one.turns)) for one in trajectories]
        played.append([2 * score + one.episode_return for score, one in zip(scores, trajectories)])
        return scores

    made = population(embedded_model, tmp_path, reward_funcs=judge)
    assert made.lineage.settings["fitness"] == "reward" and made.lineage.settings["reward_funcs"] == ["judge"]
    given = {"environment": Talk, "peft_config": lora(), "reward_funcs": judge}
    args = arguments("grpo", tmp_path / "member", reward_weights=[2.0])
    rounds = Rounds(continued.base, find_algorithm("grpo"), given, made._fitness)
    (result,) = rounds.run([Assignment(0, 1, args, 1, 8)], args)
    assert len(result.values) == 6 and result.values == pytest.approx(played[-1]) and result.lowest is None


@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_an_adapter_that_changes_the_bases_memory_is_refused(embedded_model, tmp_path, init):
    """PiSSA's changes the base too, but in memory of its own."""
    trainer = MultiTurnGRPOTrainer(
        str(embedded_model), environment=Talk, args=arguments("grpo", tmp_path / "first"), peft_config=lora()
    )
    trainer.save_model()
    file = tmp_path / "first" / "adapter_config.json"
    write_json(file, {**read_json(file), "init_lora_weights": init})
    made = functools.partial(population, tmp_path / "first", tmp_path / "out", merge_lora_configs=True)
    if init == "pissa":
        base = made(peft_config=None).base
        before = base.digest()
        MultiTurnGRPOTrainer(base.lend(), environment=Talk, args=arguments("grpo", tmp_path / "second"))
        assert base.digest() == before
        return
    with pytest.raises(ValueError, match="'olora': each time it is loaded it changes the base"):
        made(peft_config=None)
    with pytest.raises(ValueError, match="'olora': each time it is loaded it changes the base"):
        _ = made().base


def test_a_population_extends_a_saved_adapter(embedded_model, tmp_path):
    """The winner's held-out episodes are played with what was extended, which is not extended again."""
    first = tmp_path / "first"
    trainer = MultiTurnGRPOTrainer(
        str(embedded_model), environment=Talk, args=arguments("grpo", first, max_steps=1), peft_config=lora()
    )
    trainer.save_model(str(first))
    wider = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"merge_lora_configs": True, "model_init_kwargs": {"dtype": "float32"}}
    made = population(first, tmp_path / "out", rounds=1, max_steps=1, peft_config=wider, **options)
    made.run()
    assert made.lineage.held_out is not None and made.arguments(1).model_init_kwargs == {"dtype": "float32"}
    weights = load_file(made.export(tmp_path / "winner") / "adapter_model.safetensors")
    assert {min(weight.shape) for weight in weights.values()} == {4}


# ----------------------------------------------------------------------------------------------------------- bad input

BAD: list[tuple[str, dict[str, Any]]] = [
    ("members must be at least 2", {"members": 1}),
    ("max_steps=-1", {"max_steps": -1}),
    ("rounds must be between 1 and 2", {"rounds": 3}),
    ("fitness must be", {"fitness": "reward"}),
    ("max_episodes must be above 0", {"max_episodes": 0}),
    ("max_episodes=15 .*one step of 2 members plays 16", {"max_episodes": 15}),
    ("max_hours must be above 0", {"max_hours": 0}),
    ("max_hours must be above 0, got nan", {"max_hours": math.nan}),
    ("seed must not be negative, got -1", {"search_seed": -1}),
    ("strategy must be one of", {"strategy": "evolution"}),
    ("peft_config=LoraConfig", {"peft_config": None}),
    ("bias='all'", {"peft_config": LoraConfig(bias="all")}),
    ("init_lora_weights='pissa'", {"peft_config": LoraConfig(init_lora_weights="pissa")}),
    ("push_to_hub=True", {"push_to_hub": True}),
    ("report_to=.'wandb'.", {"report_to": ["wandb"]}),
    ("save_total_limit=1", {"save_total_limit": 1}),
    ("save_only_model=True", {"save_only_model": True}),
    ("max_wall_seconds=60.*max_hours", {"max_wall_seconds": 60}),
    ("offload_policy_during_rollout=True", {"offload_policy_during_rollout": True, "use_vllm": True}),
    ("vllm_tensor_parallel_size=2", {"vllm_tensor_parallel_size": 2, "use_vllm": True}),
    ("gamma.*got 2", {"hyperparameters": HyperparameterConfig(gamma=Range(0.5, 2.0))}),
    (
        "leave it out, or batches_ahead=1",
        {
            "hyperparameters": HyperparameterConfig(num_iterations=Range(1, 4)),
            "batches_ahead": 1,
        },
    ),
    ("eval_dataset must be one data set", {"eval_dataset": {"a": [{"x": 1}]}}),
    ("num_eval_episodes=1 leaves some", {"environment": {"a": Talk, "b": Talk}, "num_eval_episodes": 1}),
]


@pytest.mark.parametrize("message, changes", BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_refused_before_anything_is_loaded(embedded_model, tmp_path, message, changes):
    with pytest.raises(ValueError, match=message):
        population(embedded_model, tmp_path, **changes)


def test_a_process_without_a_gpu_is_refused(monkeypatch):
    """Of three on a machine of two; on one without any they train on CPU."""
    for name, value in {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    gpus = {"0", "1"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: os.environ["CUDA_VISIBLE_DEVICES"] in gpus)
    del os.environ["CUDA_VISIBLE_DEVICES"]
    with pytest.raises(ValueError, match="no GPU for process 2 of 3"):
        split_processes()
    for local, there, left in (("1", {"0", "1"}, "1"), ("2", set(), None)):
        for name, value in {"WORLD_SIZE": "3", "RANK": local, "LOCAL_RANK": local}.items():
            monkeypatch.setenv(name, value)
        del os.environ["CUDA_VISIBLE_DEVICES"]
        gpus = there
        assert split_processes() == Processes(int(local), 3)
        assert left in (None, os.environ["CUDA_VISIBLE_DEVICES"])


def test_other_kinds_of_input_are_refused(embedded_model, tmp_path, monkeypatch):
    ask: Callable[..., Any] = population
    with pytest.raises(TypeError, match="model must be a folder"):
        module.Population(
            "grpo", object(), arguments("grpo", tmp_path), Talk, SEARCH["hyperparameters"], peft_config=lora()
        )  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a MultiTurnPPOConfig"):
        module.Population("ppo", "x", arguments("grpo", tmp_path), Talk, SEARCH["hyperparameters"], peft_config=lora())
    with pytest.raises(PopulationError, match=r"run\(\)"):
        _ = ask(embedded_model, tmp_path).best
    args = arguments("grpo", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="split_processes"):
        module.Population("grpo", "x", args, Talk, SEARCH["hyperparameters"], peft_config=lora())
