"""Batches that are played ahead: by which policy, in which order, and that neither timing nor a kill changes it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chatter import Late
from checkpointed_runs import SAVING, Told, assert_same, run_until, weights
from datasets import Dataset
from games import make_trainer
from scripted_runs import by_script, said, sampling_with, watched
from transformers import TrainerCallback

from agile_trainers.adapters.copies import Snapshots
from agile_trainers.adapters.folders import CheckpointError
from agile_trainers.checkpoints.integrity import MARKER, mark_complete
from agile_trainers.rollout.seeds import TRAINING, environment_seed
from agile_trainers.sampling.sampler import VersionedGenerator
from agile_trainers.step.ahead import RowOrder

ROWS = {"environment": Told, "train_dataset": Dataset.from_dict({"number": list(range(12))})}
FOUR: dict[str, Any] = {"train_dataset": ROWS["train_dataset"].select(range(4)), "environment": Told}
RUN: dict[str, Any] = {"max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 0.3}


one_and_two = pytest.mark.parametrize("ahead", [1, 2])
"""What holds for 2 batches ahead, whose play is that of three policies, is tested for 2 alone where it takes long."""


@pytest.fixture(scope="module")
def runs(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Any, Any, Path]]:
    """A run with checkpoints of every step, its batches, and its folder, for so many batches ahead."""

    @functools.cache
    def run(ahead: int) -> tuple[Any, Any, Path]:
        folder = tmp_path_factory.mktemp("ahead")
        trainer = make_trainer(embedded_model, folder, batches_ahead=ahead, **RUN, **SAVING)
        trained = watched(trainer)
        trainer.train()
        return trainer, trained, folder

    return run


@one_and_two
def test_each_batch_is_played_by_the_policy_of_some_batches_earlier(
    embedded_model: Path, runs: Any, ahead: int, tmp_path: Path
) -> None:
    """In order, each once; the episodes are those that the checkpoint of that policy plays."""
    trainer, trained, folder = runs(ahead)
    assert len(trained) == 4 and not trainer.rollouts.ahead.versions
    for generation, episodes in enumerate(trained):
        assert [one.seed for one in episodes[::4]] == [
            environment_seed(3, TRAINING, generation, group) for group in range(2)
        ]
        version = max(generation - ahead, 0)
        assert {one.version for one in episodes} == {version}
    for generation in (ahead, 3):  # the last one of the first policy, and a later policy's
        version = generation - ahead
        model, whole = (folder / f"checkpoint-{version}", {"lora": False}) if version else (embedded_model, {})
        player = make_trainer(model, tmp_path / str(version), **RUN, **whole)
        assert said(trained[generation]) == said(player.rollout(generation=generation))
    assert said(trained[3]) != said(trained[3][::-1])


@one_and_two
def test_the_sampler_is_compared_with_the_policy_that_played(runs: Any, ahead: int) -> None:
    """Its mismatch stays that of rounding, whatever the update has changed since; that is the drift."""
    logs = [log for log in runs(ahead)[0].state.log_history if "loss" in log]
    assert len(logs) == 4
    for generation, log in enumerate(logs):
        assert log["sampling/sampling_logp_difference/mean"] < 1e-5
        assert ("drift/kl" in log) == (generation > 0)
    assert all(log["drift/kl"] > 1e-4 for log in logs[1:])
    assert all(0 < log["drift/effective_sample_size"] < 1 for log in logs[1:])


def test_the_log_says_who_waits(runs: Any, embedded_model: Path, tmp_path: Path) -> None:
    """One process takes turns: what samples and plays does not train."""
    for log in (log for log in runs(2)[0].state.log_history if "loss" in log):
        busy = {name: log[f"busy/{name}"] for name in ("trainer", "sampler", "environments")}
        assert min(busy.values()) >= 0 and sum(busy.values()) <= 1 + 1e-9
        assert 0 <= log["time/waiting"] <= log["time/rollout"]
    assert busy["trainer"] > 0
    trainer = make_trainer(embedded_model, tmp_path, **{**RUN, "max_steps": 1})
    trainer.train()
    assert not [name for name in trainer.state.log_history[0] if name.startswith("busy") or name == "time/waiting"]


@pytest.mark.parametrize(
    ("script", "kills", "steps", "ahead"), [(True, (1, 4), 5, 1), (False, (3,), 7, 2)], ids=["script", "model"]
)
def test_a_killed_run_goes_on(
    embedded_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: bool,
    kills: tuple[int, ...],
    steps: int,
    ahead: int,
) -> None:
    """From any step, in the middle of a generation batch too, with adapters that it no longer has: to the bit."""
    settings: dict[str, Any] = {
        **RUN, "per_device_train_batch_size": 4, "steps_per_generation": 2, "batches_ahead": ahead, "max_steps": steps,
        **ROWS, "num_generations": 2, "optim": "adamw_torch", "learning_rate": 1e-2,
    }  # fmt: skip
    if script:
        settings["max_logprob_gap"] = 1e9
        init = make_trainer

        def scripted(*args: Any, **changes: Any) -> Any:
            trainer = init(*args, **changes)
            return sampling_with(trainer, by_script(trainer))

        monkeypatch.setattr("checkpointed_runs.make_trainer", scripted)
    monkeypatch.setitem(run_until.__globals__["CASES"], "ahead", settings)
    whole = run_until(99, "ahead", embedded_model, tmp_path / "whole")
    for kill in kills:
        run_until(kill, "ahead", embedded_model, tmp_path / "run", resume="auto")
    again = run_until(99, "ahead", embedded_model, tmp_path / "run", resume="auto")
    assert again.state.global_step == steps
    assert_same(weights(again), weights(whole))


def test_a_checkpoint_without_its_open_episodes(embedded_model: Path, tmp_path: Path, runs: Any) -> None:
    """As the Hub has it: the run would play them again with another policy, and nobody would know."""
    copied = shutil.copytree(runs(2)[2] / "checkpoint-3", tmp_path / "checkpoint-3")
    (copied / "rollout" / "ahead-0.json").unlink()
    files = json.loads((copied / MARKER).read_text())["files"]
    mark_complete(copied, {name: one for name, one in files.items() if not name.endswith("ahead-0.json")})
    trainer = make_trainer(embedded_model, tmp_path, batches_ahead=2, **RUN, **SAVING)
    with pytest.raises(CheckpointError, match="without the episodes that it had begun ahead of their update"):
        trainer.train(resume_from_checkpoint=True)


def test_timing_changes_nothing(embedded_model: Path, tmp_path: Path, runs: Any) -> None:
    trainer = make_trainer(embedded_model, tmp_path, environment=Late, environment_workers=5, batches_ahead=2, **RUN)
    trained = watched(trainer)
    trainer.train()
    punctual, batches, _ = runs(2)
    assert [said(one) for one in trained] == [said(one) for one in batches]
    for name, one in weights(trainer).items():
        assert torch.allclose(one, weights(punctual)[name], atol=1e-6), name


@pytest.mark.parametrize(("rows", "ahead"), [(True, 2), (False, 1)], ids=["rows", "seeds"])
def test_a_policy_that_stays_plays_the_same_whatever_is_ahead(
    embedded_model: Path, tmp_path: Path, rows: bool, ahead: int
) -> None:
    """Two generation batches to an optimizer step; evaluations between; rows in the order of several shuffled epochs."""

    def play(ahead: int) -> list[Any]:
        trainer = make_trainer(
            embedded_model, tmp_path / str(ahead), batches_ahead=ahead, steps_per_generation=1,
            eval_strategy="steps", eval_steps=1, num_eval_episodes=2, gradient_accumulation_steps=2,
            **({**FOUR, "eval_dataset": FOUR["train_dataset"]} if rows else {}),
            **{**RUN, "learning_rate": 0.0, "max_steps": 2},
        )  # fmt: skip
        trained = watched(trainer)
        trainer.train()
        evaluated = [log["eval_return"] for log in trainer.state.log_history if "eval_return" in log]
        assert len(evaluated) == 2 and len(set(evaluated)) == 1
        assert len(trained) == 4
        return [said(one) for one in trained]

    assert play(0) == play(ahead)


def test_tokens_are_weighed_by_the_ratio_of_both_policies(embedded_model: Path, tmp_path: Path) -> None:
    """From the log-probabilities that two checkpoints compute, with TRL's loss and its gradient."""
    trainer = make_trainer(
        embedded_model, tmp_path, batches_ahead=1, drift_correction="token_truncate", drift_clip_max=1.2,
        **{**RUN, "max_steps": 2},
    )  # fmt: skip
    scores: list[Any] = []
    batches: list[Any] = []
    score, make = trainer.batches.score_snapshot, trainer.batches.finish

    def scoring(models: Any, batch: Any, scored: Any, version: int) -> None:
        score(models, batch, scored, version)
        scores.append(scored)

    def making(*arguments: Any) -> Any:
        batches.append(make(*arguments))
        return batches[-1]

    trainer.batches.score_snapshot, trainer.batches.finish = scoring, making
    trainer.train()
    (scored,), (first, second) = scores, batches
    assert first.importance_sampling_ratio is None and (first.old_per_token_logps is not None)
    trained = second.turn_ids >= 0
    ratio = (scored.old - scored.snapshot).exp()
    assert ((ratio > 1.2) & trained).any() and ((ratio < 0.9) & trained).any()
    expected = torch.where(trained, ratio.clamp(max=1.2), 1.0)
    assert torch.allclose(second.importance_sampling_ratio, expected, atol=1e-6)
    assert torch.equal(second.old_per_token_logps, scored.old)


def test_the_order_of_rows_can_be_read_ahead(embedded_model: Path, tmp_path: Path) -> None:
    settings = {**RUN, "steps_per_generation": 2, "num_iterations": 2, "per_device_train_batch_size": 4}
    trainer = make_trainer(embedded_model, tmp_path, **{**settings, **ROWS, "num_generations": 2})
    order = RowOrder(lambda: super(type(trainer), trainer)._get_train_sampler(), 8, 4)
    sampler, expected = trainer._get_train_sampler(), []
    for _ in range(3):
        rows = list(sampler)
        expected += [rows[start : start + 8] for start in range(0, len(rows), 32)]
    assert [order.of(generation) for generation in range(9)] == expected
    assert [order.of(generation) for generation in (7, 1, 8)] == [expected[index] for index in (7, 1, 8)]


def test_snapshots_hold_and_give_back(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, **RUN)
    model, before = trainer.model, weights(trainer)
    snapshots = Snapshots(lambda: model)
    snapshots.take(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    moved = weights(trainer)
    with snapshots.holding(3):
        assert_same(weights(trainer), before)
    assert_same(weights(trainer), moved)
    with snapshots.holding(None):
        assert_same(weights(trainer), moved)
    snapshots.keep(())
    assert not snapshots.weights


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"batches_ahead": -1}, "batches_ahead must not be negative, got -1"),
        ({"batches_ahead": 1, "lora": False}, "is trained whole"),
        ({"batches_ahead": 1, "resample_zero_advantage_groups": 1}, "batches that are under way already"),
        (
            {"batches_ahead": 1, "vllm_importance_sampling_correction": True},
            "which drift_correction takes the place of",
        ),
        ({"batches_ahead": 1, "repetition_penalty": 1.1}, "whose episodes are played by adapters as they are"),
        ({"batches_ahead": 1, "drift_correction": "word"}, "drift_correction must be one of"),
        ({"drift_correction": None}, "has no effect with batches_ahead=0"),
        ({"drift_clip_max": 3.0}, "has no effect with batches_ahead=0"),
    ],
)
def test_what_cannot_be_played_ahead(embedded_model: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_trainer(embedded_model, tmp_path, **changes)


def test_a_run_by_hand_plays_its_own_batches(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, batches_ahead=1)
    with pytest.raises(ValueError, match="the caller plays them"):
        trainer.rollout()


@pytest.mark.parametrize("most", [6, 1])
def test_the_versions_share_the_rows(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Any, most: int
) -> None:
    """As many episodes are decoded at once as without batches ahead, since they need the same memory.

    With fewer rows than versions, the oldest ones decode.
    """
    expected = [said(one) for one in runs(2)[1]]
    rows: list[int] = []
    stepped = VersionedGenerator.step

    def step(generator: VersionedGenerator) -> Any:
        outputs = stepped(generator)
        made: list[Any] = [*generator._generators.values()]
        rows.append(sum(len(one._with_cache()) for one in made))
        return outputs

    monkeypatch.setattr(VersionedGenerator, "step", step)
    trainer = make_trainer(embedded_model, tmp_path, batches_ahead=2, generation_chunk_size=most, **RUN)
    trained = watched(trainer)
    trainer.train()
    assert min(4, most) <= max(rows) <= most
    assert [said(one) for one in trained] == expected


@pytest.mark.parametrize("case", ["longer", "interrupted"])
def test_train_is_called_again(embedded_model: Path, tmp_path: Path, case: str) -> None:
    """It goes on counting generation batches, and plays as many ahead as the new run has."""
    trainer = make_trainer(embedded_model, tmp_path, batches_ahead=1, num_iterations=2, **RUN)
    trained = watched(trainer)
    if case == "interrupted":
        trainer.add_callback(Interrupting())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.state.global_step == 3
    else:
        trainer.train()
    done = len(trained)
    trainer.args.max_steps = 6 if case == "longer" else 4
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps and len(trained) - done == trainer.args.max_steps // 2
    assert not trainer.rollouts.ahead.versions
    seeds = [one.seed for batch in trained for one in batch[::4]]
    assert len(set(seeds)) == len(seeds), "no batch is played twice"


class Interrupting(TrainerCallback):
    """Raises Ctrl-C once, after the third step."""

    done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and not self.done:
            self.done = True
            raise KeyboardInterrupt


def test_more_passes_of_each_batch_after_a_resume(embedded_model: Path, tmp_path: Path) -> None:
    """Batches are counted by the passes that there are now."""
    options = {**RUN, "num_iterations": 1, "max_steps": 2}
    make_trainer(embedded_model, tmp_path, **options, **SAVING).train()
    options |= {"num_iterations": 2, "max_steps": 6, "batches_ahead": 1}
    trainer = make_trainer(embedded_model, tmp_path, **options)
    trained = watched(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6 and len(trained) == 2


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_the_base_are_no_part_of_a_version(embedded_model: Path, tmp_path: Path, bias: str) -> None:
    """Nor of a reference."""
    for options, sharing in (({"batches_ahead": 1}, "earlier ones"), ({"beta": 0.1}, "policy and reference")):
        with pytest.raises(ValueError, match=rf"bias='{bias}'\) trains biases of the base, which .*{sharing}"):
            make_trainer(embedded_model, tmp_path, lora={"bias": bias}, **options)
    make_trainer(embedded_model, tmp_path, lora={"bias": bias}).close()
