"""What construction asks of an environment, and what a training run makes of one that misbehaves."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from games import Chatter, make_trainer
from recorded import recorded, sampled
from transformers import TrainerCallback

from agile_trainers.envs.checker import EnvironmentProtocolError, check_environment
from agile_trainers.rollout.metrics import Start, differing_groups

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from misbehaving import KINDS, Misbehaving


class Counted(Chatter):
    """Counts what is done to all instances."""

    made = resets = steps = closed = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        type(self).resets += 1
        return super().reset(seed, options)

    def step(self, action: str) -> Any:
        type(self).steps += 1
        return super().step(action)

    def close(self) -> None:
        type(self).closed += 1


# -------------------------------------------------------------------------------------------------------- construction


def test_construction_makes_one_environment_and_keeps_it(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(embedded_model, tmp_path, environment=Counted)
    assert (Counted.made, Counted.resets, Counted.steps, Counted.closed) == (1, 1, 1, 0)
    trainer.train()
    assert Counted.made == 8, "the episodes of a batch, one of them on the instance of the probe"


class Hanging(Chatter):
    """``reset`` never returns."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        threading.Event().wait()


class Leaving(Chatter):
    """Ends the program, wherever it is asked to."""

    at = "reset"

    def __init__(self) -> None:
        self._leave("init")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._leave("reset")
        return super().reset(seed, options)

    def step(self, action: str) -> Any:
        self._leave("step")
        return super().step(action)

    def close(self) -> None:
        sys.exit("close")

    def _leave(self, where: str) -> None:
        if where == self.at:
            sys.exit(where)


@pytest.mark.parametrize("where", [{"environment_workers": 1}, {"environment_processes": 1}])
def test_a_reset_that_hangs_is_given_up(
    embedded_model: Path, tmp_path: Path, where: dict[str, Any], clock: Any
) -> None:
    clock.pace = 1e6
    with pytest.raises(EnvironmentProtocolError, match=r"Hanging(?s:.*)reset\(.*environment_timeout=0.3 s"):
        make_trainer(embedded_model, tmp_path, environment=Hanging, environment_timeout=0.3, **where)


@pytest.mark.parametrize("at", ["init", "reset", "step"])
@pytest.mark.parametrize("where", [{}, {"environment_workers": 1}])
def test_an_environment_does_not_end_the_program(
    embedded_model: Path, tmp_path: Path, at: str, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Leaving, "at", at)
    called = {"init": "the factory", "reset": r"reset\(", "step": r"step\("}[at]
    with pytest.raises(EnvironmentProtocolError, match=f"Leaving cannot be played(?s:.*){called}.*SystemExit: {at}"):
        make_trainer(embedded_model, tmp_path, environment=Leaving, **where)


def test_the_checker_reports_what_close_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaving, "at", "nowhere")
    report = check_environment(Leaving, timeout=20)
    assert not report.errors and report.warnings == ["close() raised SystemExit: close"] * 2
    monkeypatch.setattr(Leaving, "at", "step")
    assert any("SystemExit: step" in error for error in check_environment(Leaving).errors)


def test_an_unknown_part_of_a_message_is_refused_where_it_is_given(embedded_model: Path, tmp_path: Path) -> None:
    class Parts(Chatter):
        def step(self, action: str) -> Any:
            return [{"role": "user", "content": [{"type": "audio", "audio": "a"}]}], 0.0, True, False, {}

    with pytest.raises(
        EnvironmentProtocolError, match=r"Parts(?s:.*)step\(\) returned message 0 with a bad part.*type='audio'"
    ):
        make_trainer(embedded_model, tmp_path, environment=Parts)


# ------------------------------------------------------------------------------------------------------------ training


def test_a_run_survives_every_kind(embedded_model: Path, tmp_path: Path) -> None:
    """Half of the kinds in each of two batches of a policy that stays; sound environments among them play as alone."""
    kinds = [name for name, kind in KINDS.items() if "inline" in kind.where]
    rows = [name for n, kind in enumerate(kinds) for name in ([None, kind] if n % 4 == 0 else [kind])]
    rows += [None] * (len(rows) % 2)

    def make(name: str, column: list[str | None]) -> Any:
        table = Dataset.from_dict({"prompt": ["x"] * len(rows), "kind": column, "list": [[1]] * len(rows)})
        return make_trainer(
            embedded_model, tmp_path / name, environment=Misbehaving, train_dataset=table, num_generations=2,
            per_device_train_batch_size=len(rows), max_steps=2, max_turns=2, max_new_tokens=3, learning_rate=0.0,
            max_observation_length=30, max_model_length=200, shuffle_dataset=False, sequence_packing="none",
        )  # fmt: skip

    trainer = make("among others", rows)
    trainer.train()
    assert trainer.state.global_step == 2
    assert all(np.isfinite(entry.get("loss", 0.0)) for entry in trainer.state.log_history)
    player = make("alone", [""] * len(rows))
    alone = [one for generation in range(2) for one in player.rollout(generation=generation)]
    found = sorted(recorded(tmp_path / "among others"), key=lambda one: (one["generation"], one["index"]))
    sound = [n for n in range(2 * len(rows)) if rows[n // 2] is None]
    assert len(sound) > 40 and len(found) == len(alone) == 2 * len(rows)
    for got, expected in ((found[n], alone[n]) for n in sound):
        assert [got[key] for key in ("completion_ids", "return", "seed", "error")] == [
            expected.completion_ids, expected.episode_return, expected.seed, expected.error,
        ]  # fmt: skip
        taught = np.array(got["turn_ids"]) >= 0
        np.testing.assert_allclose(
            sampled(got)[taught], np.array(expected.sampling_logprobs)[taught], rtol=0, atol=2.5e-4
        )


def test_a_log_that_cannot_be_written_does_not_end_training(
    embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of three steps has two writes: its episodes, then its log. The end has a log too."""
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    logging.getLogger("agile_trainers").propagate = True
    trainer = make_trainer(embedded_model, tmp_path, max_steps=3, logging_steps=1, max_turns=1)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3
    first, last = [one.message for one in caplog.records if "could not be written" in one.message]
    assert "rollouts" in first and "further failures are counted" in first
    assert last.endswith(": 7 writes failed until the end of training.")


class Blocked(TrainerCallback):
    """Puts a folder where the writer renames a file to, or takes it away, at the beginning of some steps."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, 2, 4):  # of five
            (folder,) = (self.output / "rollouts").iterdir()
            (folder / f"train-{state.global_step:06d}-rank0.parquet").mkdir()


def test_each_streak_of_failures_is_warned_of_once(
    embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is written all the time, which does not end a streak of the episodes."""
    logging.getLogger("agile_trainers").propagate = True
    options = {"max_steps": 5, "logging_steps": 1, "max_turns": 1}
    trainer = make_trainer(embedded_model, tmp_path, callbacks=[Blocked(tmp_path)], **options)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    said = [one.message.partition("written: ")[2] for one in caplog.records if "could not be written" in one.message]
    assert len(said) == 4 and "directory" in said[0] and "directory" in said[2]
    assert said[1] == "2 writes failed. Records are written again."
    assert said[3] == "1 writes failed until the end of training."


class Unseeded(Chatter):
    """Starts wherever it likes."""

    starts = itertools.count()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(0)
        return f"start {next(self.starts)}", {}


def test_groups_that_start_differently_are_counted_and_named_once(
    embedded_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(embedded_model, tmp_path / "a", environment=Unseeded, max_steps=2)
        trainer.train()
    shares = [entry["groups_with_different_starts"] for entry in trainer.state.log_history if "loss" in entry]
    assert shares == [1.0, 1.0]
    warnings = [record.message for record in caplog.records if "groups did not start" in record.message]
    assert len(warnings) == 1
    assert "2 of 2 groups" in warnings[0] and "environment Unseeded" in warnings[0] and "start 1" in warnings[0]
    seeded = make_trainer(embedded_model, tmp_path / "b")
    seeded.train()
    assert seeded.state.log_history[0]["groups_with_different_starts"] == 0.0


def test_differing_groups_by_hand() -> None:
    a, b = Start(0, "a", "a"), Start(0, "b", "b")
    assert differing_groups([a, a, b, b, a, b, None, a, None, None], 2) == [2]
    assert differing_groups([a, None, b, b, b, b], 3) == [0]
