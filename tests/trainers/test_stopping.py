"""SIGTERM, which clusters and torchrun send, and SIGHUP save and stop a run as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from checkpointed_runs import BEST, Falls, assert_same, make, weights
from datasets import Dataset
from forks import run
from games import make_trainer
from transformers import TrainerCallback, TrainerControl, TrainerState

from agile_trainers.checkpoints import stopping
from agile_trainers.checkpoints.integrity import check_complete

SAME_SECONDS = stopping._SAME_SECONDS
"""What users wait; other tests do not (`conftest.py`)."""


class Signal(TrainerCallback):
    """Sends itself a signal inside the second step."""

    def __init__(self, number: int):
        self.number = number

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            signal.raise_signal(self.number)


@pytest.fixture(scope="module")
def whole(embedded_model, tmp_path_factory) -> Any:
    """The trainer of a run that nothing stops."""
    trainer = make("grpo", embedded_model, tmp_path_factory.mktemp("whole"), max_steps=4)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_saves_and_exits_with_its_code(embedded_model, tmp_path, whole, warned, hears_hangups, name, status):
    number = signal.Signals[name]
    before = signal.getsignal(number)
    stopped = make("grpo", embedded_model, tmp_path / "run", max_steps=4, callbacks=[Signal(number)])
    with pytest.raises(SystemExit) as exit_:
        stopped.train()
    assert exit_.value.code == status and signal.getsignal(number) is before
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert warned[0].startswith(name) and "saving a checkpoint" in warned[0]
    assert warned[1].startswith("Terminated: stopped" if status == 143 else "Hung up: stopped")
    resumed = make("grpo", embedded_model, tmp_path / "run", max_steps=4)
    resumed.train(resume_from_checkpoint="auto")
    assert_same(weights(resumed), weights(whole))


def test_a_signal_that_arrives_twice_is_one_request(monkeypatch, warned):
    """From outside and from torchrun, which passes it on. A later one has its earlier effect."""
    earlier: list[int] = []
    paused: list[float] = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(stopping.time, "sleep", pause)
    monkeypatch.setattr(stopping, "_SAME_SECONDS", SAME_SECONDS)
    before = signal.signal(signal.SIGTERM, lambda number, _: earlier.append(number))
    try:
        with stopping.GracefulStop(Accelerator()).heard():
            signal.raise_signal(signal.SIGTERM)
            assert paused == [2.0] and not earlier and len(warned) == 1
            signal.raise_signal(signal.SIGTERM)
            assert earlier == [signal.SIGTERM] and len(warned) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_knows_of_anothers_signal_hears_its_own(monkeypatch):
    """Its first is taken for the other's, passed on; a second one stops it, in a save that hangs for example."""
    earlier: list[int] = []
    monkeypatch.setattr(stopping.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda number, _: earlier.append(number))
    told = torch.tensor([[float(signal.SIGTERM), 0.0]])
    stop = stopping.GracefulStop(SimpleNamespace(device="cpu", gather=lambda own: torch.cat([own, told])))
    args = SimpleNamespace(max_wall_seconds=None, save_only_model=False, save_total_limit=None)
    control = TrainerControl()
    try:
        with stop.heard():
            stop.ask(args, TrainerState(global_step=1, max_steps=2), control)
            assert control.should_training_stop
            signal.raise_signal(signal.SIGTERM)
            assert not earlier
            signal.raise_signal(signal.SIGTERM)
            assert earlier == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


class Unread(TrainerCallback):
    """Ends the reader of the outputs inside the second step, as a Ctrl-C in `| tee log` does, with a signal or without."""

    def __init__(self, reader: int, number: int | None):
        self.reader, self.number = reader, number

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        os.close(self.reader)
        if self.number is not None:
            signal.raise_signal(self.number)
        print("an environment's", file=sys.stderr)


@pytest.mark.parametrize(
    ("number", "dicts"), [(None, False), (None, True), (signal.SIGINT, False), (signal.SIGTERM, True)]
)
def test_an_output_that_nothing_reads_costs_no_checkpoint(embedded_model, tmp_path, warned, monkeypatch, number, dicts):
    """The step's row comes before its checkpoint, and ended training."""
    reader, writer = os.pipe()
    outputs = [os.fdopen(one, "w", buffering=1) for one in (writer, os.dup(writer))]
    for name, stream in zip(("stdout", "stderr"), outputs, strict=True):
        monkeypatch.setattr(sys, name, stream)
    trainer = make_trainer(
        embedded_model, tmp_path, max_steps=4, save_strategy="no", logging_steps=1, disable_tqdm=dicts,
        callbacks=[Unread(reader, number)],
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as stop:
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    if number == signal.SIGINT:
        return
    assert stop.value.code == (143 if number else 141)
    said = "Terminated" if number else "Nothing reads the output any more"
    assert warned[-1].startswith(f"{said}: stopped at step 2;")
    for stream in outputs:
        print("goes nowhere", file=stream)
        stream.close()


class Evaluated(TrainerCallback):
    """Sends itself SIGTERM in the evaluation after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"save_strategy": "best", "load_best_model_at_end": False, "save_total_limit": None},
        {"save_only_model": True},
    ],
    ids=["best alone stays", "best alone is saved", "model alone"],
)
def test_the_checkpoint_of_a_stop_is_there_to_go_on_from(embedded_model, tmp_path, changes):
    """The stop is at step 2, whose evaluation is worse than that of step 1."""
    trainer = make_trainer(
        embedded_model, tmp_path, max_steps=4, callbacks=[Falls(), Signal(signal.SIGTERM)], **{**BEST, **changes}
    )
    with pytest.raises(SystemExit):
        trainer.train()
    assert check_complete(tmp_path / "checkpoint-2")
    assert trainer.state.best_global_step == 1 and check_complete(tmp_path / "checkpoint-1", resumes=False)
    assert {name: getattr(trainer.args, name) for name in changes} == changes
    assert trainer.args.save_total_limit == {**BEST, **changes}["save_total_limit"]


@pytest.mark.parametrize("by_hand, step", [(False, 2), (False, 1), (True, 1)])
def test_a_signal_in_an_evaluation_saves_its_step(embedded_model, tmp_path, warned, by_hand, step):
    """Of the last step too, although the run is over."""
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "num_eval_episodes": 2}
    if by_hand:  # an epoch does not end with its first step
        options["train_dataset"] = Dataset.from_dict({"number": list(range(16))})
    trainer = make_trainer(embedded_model, tmp_path, callbacks=[Evaluated(step)], **options)
    with pytest.raises(SystemExit) as exit_:
        if by_hand:
            trainer.update(trainer.rollout())
        trainer.train()
    assert exit_.value.code == 143 and check_complete(tmp_path / f"checkpoint-{step}")
    assert warned[-1].startswith("Terminated: training was over." if step == 2 else "Terminated: stopped at step 1;")


class Breaks(Signal):
    """Sends itself a signal, and raises an error in the same step, or at the end of the run."""

    def __init__(self, number: int, at_end: bool):
        super().__init__(number)
        self.at_end = at_end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.raise_signal(self.number)
        if not self.at_end:
            raise RuntimeError("the server is gone")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("the server is gone")


@pytest.mark.parametrize(
    ("number", "by_hand", "at_end"),
    [
        (signal.SIGTERM, False, False), (signal.SIGTERM, True, True),
        (signal.SIGINT, False, True), (signal.SIGINT, True, False),
    ],
)  # fmt: skip
def test_an_error_after_a_signal_does_not_keep_its_caller_going(
    embedded_model, tmp_path, warned, number, by_hand, at_end
):
    """A loop of trainings that goes on after errors ends too, and the error is told."""
    before = signal.getsignal(number)
    trainer = make_trainer(embedded_model, tmp_path, max_steps=2, callbacks=[Breaks(number, at_end)])
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt) as stop:
        trainer.update(trainer.rollout()) if by_hand else trainer.train()
    assert str(stop.value.__cause__) == "the server is gone" and signal.getsignal(number) is before
    assert not trainer.updates.is_open and bool(list(tmp_path.glob("checkpoint-1"))) is at_end
    said = "RuntimeError ended training; a resume goes on from the newest checkpoint"
    assert warned[-1] == f"Terminated: {said}." if number == signal.SIGTERM else str(stop.value) == said


class Early(TrainerCallback):
    """Sends itself SIGTERM before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_while_a_run_by_hand_begins_stops_its_caller(embedded_model, tmp_path, warned):
    trainer = make_trainer(embedded_model, tmp_path, callbacks=[Early()])
    with pytest.raises(SystemExit) as stop:
        trainer.start()
    assert stop.value.code == 143 and stop.value.__cause__ is None and not trainer.updates.is_open
    assert warned[-1] == "Terminated: training had not begun."


LONELY = """
import os, signal, sys, threading
from agile_trainers.checkpoints import stopping

read, write = os.pipe()  # nothing is ever written: what waits for it waits like a collective whose peer is gone
with stopping._end_if_a_peer_is_gone():
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Timer(0.1, signal.raise_signal, [signal.SIGTERM]).start()
    threading.Timer(float(sys.argv[1]), os._exit, [7]).start()
    while True:
        os.read(read, 1)
"""


@pytest.mark.parametrize(("launched", "seconds"), [(True, "0.4"), (True, "20"), (False, "0.4")])
def test_under_torchrun_a_rank_ends_although_its_peer_never_answers(launched, seconds):
    """Shortly before torchrun kills it. Elsewhere it waits: whoever sent the signal decides how long."""
    own = {"TORCHELASTIC_RUN_ID": "1"} if launched else {}
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment |= {**own, "WORLD_SIZE": "2", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}
    ends = launched and seconds == "0.4"
    done = run(["-c", LONELY, "60" if ends else "1"], env=environment)
    assert done.returncode == (stopping.TERMINATED if ends else 7), done.stderr
    assert stopping.TERMINATED == 143


# ------------------------------------------------------------------------------------------------------ max_wall_seconds


@pytest.fixture
def wall_clock(monkeypatch) -> list[float]:
    """The trainer's clock, which stands still unless a test moves it."""
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    return now


class Slow(TrainerCallback):
    """A step takes 10 s."""

    def __init__(self, clock: list[float]):
        self.clock = clock

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock[0] += 10.0


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_run_whose_time_is_over_saves_and_ends_and_a_resume_has_as_much_again(
    embedded_model, tmp_path, whole, warned, wall_clock, by_hand
):
    def part(resume: str | None) -> Any:
        trainer = make(
            "grpo", embedded_model, tmp_path / "run", max_steps=4, max_wall_seconds=15, callbacks=[Slow(wall_clock)]
        )
        if not by_hand:
            trainer.train(resume_from_checkpoint=resume)
            return trainer
        trainer.start(resume)
        while trainer.updates.is_open:
            trainer.update(trainer.rollout())
        return trainer

    steps, resume = [], None
    for _ in range(2):
        trainer = part(resume)
        steps.append((trainer.state.global_step, trainer.stop.out_of_time))
        resume = "auto"
    # A generation batch of `update` serves four steps; a step that was begun is finished.
    assert steps == [(2, True), (4, False)]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))[:1] == ["checkpoint-2"]
    assert_same(weights(trainer), weights(whole))
    assert warned == [
        "max_wall_seconds=15 is over: stopped at step 2; --resume_from_checkpoint auto, or "
        "train(resume_from_checkpoint=True), goes on from there, with as much time again."
    ]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "60"])
def test_a_time_that_is_none_is_refused(embedded_model, tmp_path, seconds):
    with pytest.raises(ValueError, match="max_wall_seconds must be"):
        make("grpo", embedded_model, tmp_path, max_wall_seconds=seconds)
