"""What a resumed run takes from its checkpoint, what from its own options, and which checkpoints are its own."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from checkpointed_runs import BEST, SAVING, Falls, KillBefore, Killed, assert_same, make, run_until, weights
from datasets import Dataset
from games import Chatter, make_trainer
from safetensors.torch import load_file

from agile_trainers import MultiTurnPPOTrainer
from agile_trainers.adapters.folders import RECORD, CheckpointError
from agile_trainers.checkpoints.disclosure import disclose
from agile_trainers.checkpoints.integrity import MARKER, check_complete, mark_complete
from agile_trainers.checkpoints.resuming import LOCK, OutputDirInUseError, compare_options, locked, recorded_options
from agile_trainers.envs.registry import describe_environment, make_environment_factory
from agile_trainers.records.reader import open_records


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RECORD).read_text())


def test_a_finished_run_trains_no_further(embedded_model, tmp_path, warned):
    """Neither with the same ``max_steps`` nor with a lower one; it still ends with the checkpoint's weights."""
    done = make("grpo", embedded_model, tmp_path / "done", **{**SAVING, "max_steps": 2})
    done.train()
    for steps in (1, 2):
        shutil.copytree(tmp_path / "done", tmp_path / str(steps))
        again = make("grpo", embedded_model, tmp_path / str(steps), **{**SAVING, "max_steps": steps})
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 2
        assert_same(weights(again), weights(done))
        assert any("at step 2 of" in text and "max_steps" in text for text in warned)
        warned.clear()


def test_auto_starts_or_goes_on(embedded_model, tmp_path, warned):
    whole = make_trainer(embedded_model, tmp_path / "whole", max_steps=2)
    whole.train()
    for steps in (1, 2):
        trainer = make_trainer(embedded_model, tmp_path / "run", max_steps=steps, **SAVING)
        trainer.train(resume_from_checkpoint="auto")
    assert_same(weights(trainer), weights(whole))

    (tmp_path / "run" / "checkpoint-1" / MARKER).unlink()
    (tmp_path / "run" / "checkpoint-2" / MARKER).unlink()
    anew = make_trainer(embedded_model, tmp_path / "run", max_steps=1)
    anew.train(resume_from_checkpoint="auto")
    assert anew.state.global_step == 1 and any(text.startswith("Starting a new run") for text in warned)


def test_options_that_changed_are_told_apart():
    then = {"learning_rate": 1e-3, "optim": "sgd", "gamma": 1.0, "critic_learning_rate": None, "seed": 1, "gone": 1}
    now = {
        "learning_rate": 1e-4,
        "optim": "adamw_torch",
        "gamma": 0.9,
        "critic_learning_rate": 1e-3,
        "seed": 1,
        "new": 2,
    }
    changes, deepspeed = compare_options(then, now, now), compare_options(then, now, now, deepspeed=True)
    assert changes.refused == ["critic_learning_rate: None -> 0.001", "optim: 'sgd' -> 'adamw_torch'"]
    assert changes.idle == [] and deepspeed.idle == ["learning_rate: 0.001 -> 0.0001"]
    assert changes.active == ["gamma: 1.0 -> 0.9", "learning_rate: 0.001 -> 0.0001"]
    assert deepspeed.active == ["gamma: 1.0 -> 0.9"]


def test_a_set_is_recorded_alike_in_each_process():
    """Its order follows the hash seed, and a resumed run would read that an option has changed."""
    names = [f"layer_{number}" for number in range(40)]
    kind = make_dataclass("Arguments", ["modules", "inside", "path"])
    found = recorded_options(kind({*names}, {"modules": frozenset(names)}, Path("a")))
    assert found == {"modules": sorted(names), "inside": {"modules": sorted(names)}, "path": "a"}
    (inside,) = recorded_options(kind({frozenset(names)}, None, None))["modules"]
    assert inside == f"frozenset({{{str(sorted(names))[1:-1]}}})"


def test_a_resumed_run_says_which_options_take_effect(embedded_model, tmp_path, warned):
    """And it is so: the next step is taken with the new rate, weight decay and number of turns."""
    run_until(4, "grpo", embedded_model, tmp_path / "run", max_steps=5)  # the next step begins a generation batch
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    same = make("grpo", embedded_model, tmp_path / "same", max_steps=5)
    same.train(resume_from_checkpoint=True)
    assert warned == []
    changes = {"learning_rate": 0.02, "weight_decay": 0.5, "max_turns": 1}
    resumed = make("grpo", embedded_model, tmp_path / "run", max_steps=5, **changes)
    resumed.train(resume_from_checkpoint=True)
    (active,) = warned
    assert "learning_rate: 0.01 -> 0.02" in active and "max_turns: 4 -> 1" in active and "take effect" in active
    rates = [[e["learning_rate"] for e in t.state.log_history if "learning_rate" in e] for t in (same, resumed)]
    assert rates[1] == [*rates[0][:4], 2 * rates[0][4]] and rates[0][4] == pytest.approx(0.01 / 5)
    assert {group["weight_decay"] for group in resumed.optimizer.param_groups} == {0.0, 0.5}
    assert [e["turns/max"] for e in resumed.state.log_history if "turns/max" in e][-1] == 1


def test_options_that_do_not_fit_the_saved_states_are_refused(embedded_model, tmp_path, saved):
    trainer = make("grpo", embedded_model, tmp_path, max_steps=2, optim="sgd")
    with pytest.raises(CheckpointError, match=r"optim.*'adamw_torch' -> 'sgd'"):
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1"))


def test_what_the_batch_in_progress_lacks_is_refused(embedded_model, tmp_path):
    """The loss would miss a column of it; between two batches the same change takes effect."""
    rows = {"train_dataset": Dataset.from_dict({"number": list(range(8))})}
    reference = {"sync_ref_model": False, "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}
    batch = {
        "beta": 0.0, "reference_adapter": False, "num_iterations": 1, "diagnosis_interval": 0, "max_steps": 3,
        **reference, **rows,
    }  # fmt: skip
    run_until(2, "grpo", embedded_model, tmp_path, save_steps=1, **batch)  # a batch serves two steps
    inside, between = (str(tmp_path / f"checkpoint-{step}") for step in (1, 2))
    for option, more in {
        "beta": {"beta": 0.1},
        "replay_successes": {"replay_successes": 2},
        "teacher": {"teacher": "policy", "teacher_hint": "hint"},
    }.items():
        trainer = make("grpo", embedded_model, tmp_path / option, **{**batch, **more})
        with pytest.raises(CheckpointError, match=rf"without what these options need: {option}"):
            trainer.train(resume_from_checkpoint=inside)
        trainer = make("grpo", embedded_model, tmp_path / option, **{**batch, **more})
        trainer.train(resume_from_checkpoint=between)
        assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"beta": 0.1, "kl_placement": "reward"}, {"kl_placement": "loss"}),
        ({"beta": 0.1, "kl_placement": "loss"}, {"kl_placement": "advantage"}),
        ({"beta": 0.0, "kl_placement": "loss"}, {"kl_placement": "reward"}),
        ({"beta": 0.1, "kl_placement": "reward"}, {"beta": 0.0}),
        ({"teacher": "a", "teacher_gradient": "immediate"}, {"teacher_gradient": "distribution_forward"}),
        ({"teacher": "a"}, {"teacher": {"sum": "a", "chain": "b"}}),
        ({"teacher": "a"}, {"teacher": None}),
        ({"turn_value_position": "state"}, {"turn_value_position": "mean"}),
    ],
)
def test_columns_of_the_batch_in_progress(then, now):
    """A loss would read columns that the batch lacks, or take those that it has for others.

    What is switched off is not read.
    """
    after = {**then, **now}
    for inside in (True, False):
        changes = compare_options(then, after, after, inside=inside)
        early = inside and after.get("beta") != 0.0 and bool(after.get("teacher", True))
        assert bool(changes.early) == early and bool(changes.active) != early


def test_other_rows_are_told(embedded_model, tmp_path, warned):
    rows = Dataset.from_dict({"number": list(range(16))})
    run_until(2, "reinforce", embedded_model, tmp_path, save_steps=1, max_steps=3, train_dataset=rows)
    for name, other, told in (("same", rows, 0), ("fewer", rows.select(range(12)), 1)):
        trainer = make("reinforce", embedded_model, tmp_path / name, max_steps=3, train_dataset=other)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert sum("it had 16 rows with the columns ['number'], and has 12" in text for text in warned) == told


@pytest.fixture(scope="module")
def two_steps(embedded_model, tmp_path_factory):
    """The folder of a run of two steps whose last checkpoint is lost. Read only."""
    folder = tmp_path_factory.mktemp("two_steps") / "run"
    make_trainer(embedded_model, folder, max_steps=2, **SAVING).train()
    shutil.rmtree(folder / "checkpoint-2")
    return folder


@pytest.mark.parametrize("name", ["last-checkpoint", "kept-7", "latest"])
def test_a_checkpoint_of_any_name_goes_on(embedded_model, tmp_path, two_steps, name):
    """The Hub's copy, a renamed one, and a link: its step is what it says itself, for the rollout log too."""
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    if name == "latest":
        (tmp_path / name).symlink_to("checkpoint-1")
    else:
        (tmp_path / "checkpoint-1").rename(tmp_path / name)
    if name == "last-checkpoint":  # pushed without the states of callbacks
        disclose(tmp_path / name)
    resumed = make_trainer(embedded_model, tmp_path, max_steps=3, **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / name))
    (run,) = open_records(tmp_path)
    assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2, 3]
    assert sorted({row["generation"] for row in run.index()}) == [0, 1, 2]


def test_a_checkpoint_that_does_not_load_sets_none_aside(embedded_model, tmp_path):
    for name in ("own", "other"):
        make_trainer(embedded_model, tmp_path / name, max_steps=1, **SAVING).train()
    (tmp_path / "other" / "checkpoint-1" / "scheduler.pt").write_bytes(b"no state")
    mark_complete(tmp_path / "other" / "checkpoint-1")
    trainer = make_trainer(embedded_model, tmp_path / "own", max_steps=2, **SAVING)
    with pytest.raises(CheckpointError, match="checkpoint-1"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-1"))
    assert check_complete(tmp_path / "own" / "checkpoint-1") and not (tmp_path / "own" / "superseded").exists()


def test_a_moved_run_keeps_its_best_checkpoint(embedded_model, tmp_path):
    """And the record and the card of what it saves tell of that policy, not of the last."""
    trainer = make_trainer(embedded_model, tmp_path / "a", max_steps=3, callbacks=[Falls(), KillBefore(2)], **BEST)
    with pytest.raises(Killed):
        trainer.train()
    trainer.close()
    (tmp_path / "a").rename(tmp_path / "b")
    trainer = make_trainer(embedded_model, tmp_path / "b", max_steps=3, callbacks=[Falls()], **BEST)
    trainer.train(resume_from_checkpoint=str(tmp_path / "b" / ".." / "b" / "checkpoint-2"))
    best = tmp_path / "b" / "checkpoint-1"
    assert best.samefile(trainer.state.best_model_checkpoint)
    trainer.save_model()
    saved, kept = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "b", best))
    assert_same(saved, kept)
    card = (tmp_path / "b" / "README.md").read_text()
    (first,) = [one["eval_return"] for one in trainer.state.log_history if one["step"] == 1 and "eval_return" in one]
    assert record_of(tmp_path / "b")["global_step"] == 1 and ": 1 updates." in card
    assert f"value: {round(first, 4)}\n" in card


@pytest.mark.parametrize("resume", ["", 3])
def test_what_names_no_checkpoint_is_refused(embedded_model, tmp_path, resume):
    with pytest.raises(ValueError, match=f"resume_from_checkpoint={resume!r}: expected True, 'auto', or the folder"):
        make("grpo", embedded_model, tmp_path, max_steps=1).train(resume_from_checkpoint=resume)


def test_workers_that_persist_draw_nothing_that_a_resume_draws_in_another_epoch(embedded_model, tmp_path):
    """Their iterator is made once in a run, and the generator with which TRL shuffles a batch stays as it is."""
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_pin_memory": False}
    loader = make_trainer(embedded_model, tmp_path, **options).get_train_dataloader()
    before = torch.get_rng_state()
    assert list(loader)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------------------ environments


class Sized(Chatter):
    def __init__(self, size: int = 1):
        self.size = size


def test_environments_are_told_apart_by_their_arguments():
    def closing_over(size: int) -> Any:
        return lambda: Sized(size)

    pairs = [
        (partial(Sized, 1), partial(Sized, 2)),
        (partial(Sized, size=1), partial(Sized, size=2)),
        (closing_over(1), closing_over(2)),
        (lambda: Sized(1), lambda: Sized(2)),
        (make_environment_factory("agile:guess_number"), make_environment_factory("agile:guess_number", level="hard")),
        (partial(make_environment_factory("agile:guess_number"), max_turns=3), "agile:guess_number"),
        (Sized, Chatter),
    ]
    for left, right in pairs:
        assert describe_environment(left) == describe_environment(left)
        assert describe_environment(left) != describe_environment(right)
    assert describe_environment(make_environment_factory("agile:guess_number")) == describe_environment(
        "agile:guess_number"
    )
    assert describe_environment(make_environment_factory("agile:guess_number", level="hard")) == {
        "environment": "agile:guess_number", "environment_arguments": {"level": "hard"}
    }  # fmt: skip


_FACTORIES = """
import collections, functools, types
from dataclasses import dataclass
import numpy as np
import pydantic
from agile_trainers.envs.registry import describe_environment
from agile_trainers.records.plain import stable_text

@dataclass
class Options:
    words: set

class Model(pydantic.BaseModel):
    words: set[str]

class Raises:
    def __repr__(self):
        raise RuntimeError

class Shows:
    def __init__(self, **held):
        vars(self).update(held)

    def __repr__(self):
        return f"Shows({self.words})"

class Slots:
    __slots__ = "words"
    __repr__ = Shows.__repr__

    def __init__(self, words):
        self.words = words

WORDS = {"apple", "fig", "pear", "plum"}
loop = {}
loop["loop"] = loop
asks = functools.partial(print, WORDS)
several = [Model(words=WORDS), types.SimpleNamespace(words=WORDS), collections.deque([WORDS]), {"a": (WORDS,), "b": [{}]},
           collections.UserDict(a=WORDS), types.MappingProxyType({"a": WORDS}), np.array([WORDS, None]),
           collections.OrderedDict(a=WORDS), collections.Counter([frozenset(WORDS)]), Shows(words=WORDS, other=Raises()),
           Slots(WORDS), ValueError(WORDS)]
holds = {(0, 1): Options(WORDS), frozenset(WORDS): loop, b"x": [Raises(), 10**6000], "asks": asks, "several": several}
make = lambda: (holds, [one for one in WORDS if one in {"apple", "fig", "pear"}])
factory = (lambda held: lambda: held)(holds)
told = [describe_environment(one) for one in (make, factory, functools.partial(print, holds, given=make.__code__))]
print(told, stable_text(object()), stable_text(several))
"""


def test_descriptions_are_those_of_another_process_and_of_a_moved_line():
    told = []
    for seed, moved in (("1", ""), ("2", "\n\n")):
        told.append(subprocess.run(
            [sys.executable, "-c", moved + _FACTORIES], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, text=True,
            capture_output=True,
        ).stdout)  # fmt: skip
    assert told[0] == told[1] and told[0].count("code") >= 3 and told[0].count("{'apple', 'fig', 'pear', 'plum'}") >= 10
    descriptions = [describe_environment(it)["environment_arguments"] for it in (
        lambda: [n + 1 for n in "ab"], lambda: [n + 2 for n in "ab"], partial(Sized, {1, 2, 10}), partial(Sized, {-1, 0, 1}),
        partial(Sized, {10, 2}), partial(Sized, {2, 10}),
    )]  # fmt: skip
    assert descriptions[0] != descriptions[1] and [one["0"] for one in descriptions[2:]] == [
        "{1, 2, 10}", str({-1, 0, 1}), "{2, 10}", "{2, 10}",
    ], "numbers as in earlier checkpoints"  # fmt: skip
    rows = SimpleNamespace(rows=[{"n": n, "of": (n,)} for n in range(2)], level=1.5)
    held = partial(Sized, {"a": (1, None, 2.5), None: b"x", 3: {"x"}, "b": rows})
    assert describe_environment(held)["environment_arguments"] == {
        "0": {"a": [1, None, 2.5], "null": "b'x'", "3": "{'x'}", "b": repr(rows)}
    }, "as in earlier checkpoints"  # fmt: skip


def test_another_environment_from_the_same_factory_is_refused(embedded_model, tmp_path):
    run_until(1, "grpo", embedded_model, tmp_path, environment=partial(Sized, size=1))
    other = make("grpo", embedded_model, tmp_path, environment=partial(Sized, size=2))
    with pytest.raises(CheckpointError, match=r"environment_arguments\.size: another value\. Give"):
        other.train(resume_from_checkpoint=True)


# --------------------------------------------------------------------------------------------------------------- branches


def test_going_on_from_an_older_checkpoint_sets_the_old_branch_aside(embedded_model, tmp_path, warned):
    """A later resume goes on with the new branch, although the old one had got further."""
    make_trainer(embedded_model, tmp_path, max_steps=3, **SAVING).train()
    first = record_of(tmp_path / "checkpoint-1")["run_id"]
    assert {record_of(path)["run_id"] for path in tmp_path.glob("checkpoint-*")} == {first}
    branch = make_trainer(embedded_model, tmp_path, max_steps=2, temperature=0.5, **SAVING)
    branch.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    aside = tmp_path / "superseded" / "1"
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert all(check_complete(path) for path in aside.iterdir())
    assert any("(checkpoint-2, checkpoint-3)" in text for text in warned)
    second = record_of(tmp_path / "checkpoint-2")["run_id"]
    assert second != first

    later = make_trainer(embedded_model, tmp_path, max_steps=3, temperature=0.5, **SAVING)
    later.train(resume_from_checkpoint=True)
    assert record_of(tmp_path / "checkpoint-3")["run_id"] == second


def test_the_checkpoint_a_new_run_starts_from_stays_where_it_is(embedded_model, tmp_path):
    make_trainer(embedded_model, tmp_path, max_steps=2, **SAVING).train()
    new = make_trainer(tmp_path / "checkpoint-1", tmp_path, max_steps=1, lora=False)
    new.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_folder_without_what_its_algorithm_needs_is_not_whole(embedded_model, tmp_path, monkeypatch):
    """Even if its marker says so, and whatever the name of the algorithm that has a critic."""
    monkeypatch.setattr(MultiTurnPPOTrainer, "_name", "An algorithm of the user's")
    make("ppo", embedded_model, tmp_path, **{**SAVING, "max_steps": 1}).train()
    shutil.rmtree(tmp_path / "checkpoint-1" / "critic")
    mark_complete(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match="without the critic"):
        check_complete(tmp_path / "checkpoint-1")


def test_checkpoints_rotate_by_step_not_by_time(embedded_model, tmp_path):
    make_trainer(embedded_model, tmp_path, max_steps=2, **SAVING).train()
    (tmp_path / "checkpoint-1").touch()  # as copying from another disk does
    last = make_trainer(embedded_model, tmp_path, max_steps=3, save_total_limit=2, **SAVING)
    last.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


# -------------------------------------------------------------------------------------------------------------------- lock


HOLD = """
import os, sys, time
from pathlib import Path
from agile_trainers.checkpoints.resuming import locked

with locked(Path(sys.argv[1])):
    Path(sys.argv[2]).mkdir()
    Path(sys.argv[2], str(os.getpid())).touch()
    time.sleep(600)
"""


def test_two_runs_in_one_folder(embedded_model, tmp_path):
    """The second one is refused, and told of the first; a killed one blocks nobody."""
    held, trainer = tmp_path / "held", make_trainer(embedded_model, tmp_path / "run")
    (tmp_path / "run").mkdir(exist_ok=True)
    with ThreadPoolExecutor() as threads:
        process = threads.submit(forks.run, ["-c", HOLD, tmp_path / "run", held])
        while not (found := [*held.glob("*")]) and not process.done():
            time.sleep(0.01)
        assert found, process.result().stderr
        try:
            with pytest.raises(OutputDirInUseError, match=f"{found[0].name}.*output_dir"):
                trainer.train()
        finally:
            os.kill(int(found[0].name), signal.SIGKILL)
    assert process.result().returncode == -signal.SIGKILL
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_lock_is_on_the_file_that_is_there(tmp_path, monkeypatch):
    """Its holder ends, and removes it, after this process has opened it."""
    flock, calls = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(how)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) > 1 and json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_a_lock_of_another_host_blocks_nobody(tmp_path, warned):
    with locked(tmp_path):
        (tmp_path / LOCK).write_text(json.dumps({"pid": 7, "host": "elsewhere"}))
        with locked(tmp_path):
            assert any("process 7 on elsewhere" in text for text in warned)
