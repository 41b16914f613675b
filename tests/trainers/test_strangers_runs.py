"""Runs that start or go on from folders that another person made: they are refused in time, or lose nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpointed_runs import SAVING, make

from agile_trainers.adapters.folders import RECORD, CheckpointError, write_json
from agile_trainers.checkpoints import model_card
from agile_trainers.checkpoints.integrity import check_complete, mark_complete
from agile_trainers.checkpoints.resuming import LOCK
from agile_trainers.populations.members import SharedBase
from agile_trainers.trainers import MultiTurnGRPOConfig


def test_a_card_that_cannot_be_written_costs_no_checkpoint(embedded_model, tmp_path, monkeypatch, caplog):
    """Nor the saved model, beside which no lock is left."""
    monkeypatch.setattr(model_card, "model_card", lambda **_: {}["source"])
    trainer = make("grpo", embedded_model, tmp_path, **{**SAVING, "max_steps": 1})
    trainer.train()
    trainer.save_model()
    assert check_complete(tmp_path / "checkpoint-1")
    assert (tmp_path / "adapter_model.safetensors").is_file() and not (tmp_path / LOCK).exists()
    assert "model card" in caplog.text and "KeyError: 'source'" in caplog.text


def test_a_hostile_checkpoint_is_passed_over(embedded_model, tmp_path, saved, warned):
    """The run goes on from the one before it, and says why."""
    shutil.copytree(saved / "checkpoint-1", tmp_path / "run" / "checkpoint-1")
    for step, change in ((3, {"options": []}), (4, {"global_step": "4"}), (5, {"parent": "[x](https://evil.example)"})):
        folder = Path(shutil.copytree(saved / "checkpoint-1", tmp_path / "run" / f"checkpoint-{step}"))
        write_json(folder / RECORD, {**json.loads((folder / RECORD).read_text()), **change})
        mark_complete(folder)
    (tmp_path / "run" / "checkpoint-5" / "link").symlink_to("/")
    resumed = make("grpo", embedded_model, tmp_path / "run", **{**SAVING, "max_steps": 2})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    reasons = [text for text in warned if text.startswith("Not resumed from")]
    assert ["checkpoint-5" in reasons[0], "global_step" in reasons[1], "options" in reasons[2]] == [True] * 3


def test_an_adapter_that_the_run_does_not_have(embedded_model, tmp_path, saved):
    """``Trainer`` adds every adapter in a subfolder to the model, with the settings that are there."""
    folder = Path(shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1"))
    shutil.copytree(folder / "ref", folder / "theirs")
    config = folder / "theirs" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_modules": "(?:(?:.+)+)+!"}))
    mark_complete(folder)
    trainer = make("grpo", embedded_model, tmp_path / "run", max_steps=2)
    with pytest.raises(CheckpointError, match=r"adapters that this run does not have: \['theirs'\]"):
        trainer.train(resume_from_checkpoint=str(folder))


def test_the_best_checkpoint_is_one_of_a_run(embedded_model, tmp_path, saved, warned):
    """A checkpoint names it by a path, and it is read when training ends. With a limit of one, all others are deleted."""
    folder = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(saved / "checkpoint-1", folder)
    (tmp_path / "theirs").mkdir()
    state = json.loads((folder / "trainer_state.json").read_text())
    best = {"best_model_checkpoint": str(tmp_path / "theirs"), "best_metric": 1e9, "best_global_step": 1}
    write_json(folder / "trainer_state.json", {**state, **best})
    mark_complete(folder)
    changes = {"max_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "return", "save_total_limit": 1}
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "num_eval_episodes": 2, "eval_on_start": False}
    trainer = make("grpo", embedded_model, tmp_path / "run", **{**SAVING, **changes, **evaluating})
    trainer.train(resume_from_checkpoint=True)
    assert any("best checkpoint is not loaded" in text and "theirs" in text for text in warned)
    assert check_complete(tmp_path / "run" / "checkpoint-2")


def test_trainers_and_populations_name_a_damaged_folder(embedded_model, tmp_path):
    """In the words of the loaders alone, it would be ``list index out of range``."""
    model = Path(shutil.copytree(embedded_model, tmp_path / "model"))
    write_json(model / "config.json", {**json.loads((model / "config.json").read_text()), "architectures": []})
    args = MultiTurnGRPOConfig(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False)
    for load in (lambda: make("grpo", model, tmp_path / "run"), lambda: SharedBase(str(model), args)):
        with pytest.raises(ValueError, match=rf"{model} cannot be loaded: IndexError"):
            load()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rollout/rank-0.safetensors"])
def test_states_that_no_loader_can_read(embedded_model, tmp_path, saved, name):
    """The marker lists what is there, so that only the loader can tell."""
    folder = Path(shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1"))
    (folder / name).write_bytes(b"no state")
    mark_complete(folder)
    with pytest.raises(CheckpointError, match=rf"{folder}.* cannot be (loaded|read): \w+"):
        make("grpo", embedded_model, tmp_path / "run", max_steps=2).train(resume_from_checkpoint=str(folder))
