"""Turns the first SIGINT, SIGTERM or SIGHUP, the end of ``max_wall_seconds``, or an output that nothing reads any more into
a checkpoint and a stop after the step."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from agile_trainers.imports import is_unread, outliving_readers
from agile_trainers.rollout.environment_pool import end_silent_calls

logger = logging.get_logger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAID = {
    signal.SIGINT: "Interrupted: saving a checkpoint after this step. Interrupt again to stop at once.",
    signal.SIGTERM: "SIGTERM: saving a checkpoint after this step. A second one stops at once.",
    signal.SIGHUP: "SIGHUP (a closed terminal): saving a checkpoint after this step.",
}
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM stopped, by convention."""
SPARE_SECONDS = 5.0
"""Seconds by which a process ends before torchrun would kill it."""
RUN_AGAIN = "running the same again"
"""Way to go on with a chain or a population, which find their checkpoints themselves."""
_SAME_SECONDS = 2.0
"""Seconds in which further signals are the first one again: torchrun passes on what its processes may have got too."""


class GracefulStop(TrainerCallback):
    """Listens for SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) while a trainer trains, and watches its clock and
    whether its output is read. All processes stop after the same step.

    Args:
        accelerator: The trainer's.
    """

    out_of_time: bool = False
    """True if ``max_wall_seconds`` ended the run; its caller goes on."""
    way_on: str = "--resume_from_checkpoint auto, or train(resume_from_checkpoint=True),"
    """Way to go on from the checkpoint of a stop, as its message names it."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._requested: signal.Signals | None = None
        self._stopped = ""
        self._began = 0.0
        self._saved_step = -1
        """The step of the last checkpoint that a run can go on from."""
        self._changed: dict[str, Any] = {}
        """Options of the run that differ until its end, with the user's values."""

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle the signals inside this block. One two seconds later has its earlier effect, but is never ignored.

        An error of the block after a signal goes on as :meth:`pass_on` does: a caller that goes on after errors stops too.
        """
        self._requested, self._stopped = None, ""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup's
            del before[signal.SIGHUP]
        if None in before.values() or threading.current_thread() is not threading.main_thread():
            with outliving_readers():
                yield  # Python can change no handler here
            return

        got = False  # by this process; `_requested` may be another's

        def request(number: int, _: Any) -> None:
            nonlocal got
            if got:
                return
            got = True
            self._requested = self._requested or signal.Signals(number)
            logger.warning(_SAID[self._requested])
            end_silent_calls()
            # They are handled meanwhile. Without a pause, one could wait for a long call and look like a later one.
            time.sleep(_SAME_SECONDS)
            for one, handler in before.items():
                # A shell starts what it runs in the background with SIGINT ignored.
                default = signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL
                signal.signal(one, default if handler == signal.SIG_IGN else handler)

        for number in before:
            signal.signal(number, request)
        try:
            with _end_if_a_peer_is_gone(), outliving_readers():
                yield
        except Exception as error:
            self.pass_on(f"{type(error).__name__} ended training; a resume goes on from the newest checkpoint", error)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def before_epoch(self, state: TrainerState, control: TrainerControl) -> bool:
        """Return whether the run ends before its next step, which ``Trainer`` checks only after one."""
        if not control.should_training_stop and state.global_step >= state.max_steps:
            logger.warning(
                "Nothing is left to train: the checkpoint is at step %d of %d. Raise max_steps or num_train_epochs.",
                state.global_step, state.max_steps,
            )  # fmt: skip
            control.should_training_stop = True
        return control.should_training_stop

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of this part of the run; a resumed one has the whole time again."""
        self._began, self.out_of_time, self._saved_step = time.monotonic(), False, -1
        self._change_back(args)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if a process got a signal or its time is over."""
        self.ask(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop after the last step's evaluation too: it may take long, or keep the step from being saved."""
        self.ask(args, state, control)

    def ask(self, args: Any, state: Any, control: Any) -> None:
        """Make ``Trainer`` save and stop if a process got a signal, is not read any more, or its time is over.

        All processes call this.
        """
        requested = self._requested or (signal.SIGPIPE if is_unread() else 0)
        over = args.max_wall_seconds is not None and time.monotonic() - self._began >= args.max_wall_seconds
        own = torch.tensor([[float(requested), float(over)]], device=self._accelerator.device)
        # The signal may reach one process a step later than another, and their clocks differ.
        number, time_is_over = self._accelerator.gather(own).amax(dim=0).tolist()
        if not (number or time_is_over):
            return
        control.should_training_stop = True
        # With save_strategy="best", `Trainer` has not saved a step whose evaluation was no new best.
        control.should_save |= self._saved_step != state.global_step
        self._change(args, "save_only_model", False)  # no run goes on from a model alone
        early, said = state.global_step < state.max_steps, bool(self._stopped)
        if early:
            self._keep(args, state)
            self._stopped = f"stopped at step {state.global_step}; {self.way_on} goes on from there"
        if number:
            self._requested = signal.Signals(int(number))
        elif early and not said:
            self.out_of_time = True
            logger.warning(
                "max_wall_seconds=%g is over: %s, with as much time again.", args.max_wall_seconds, self._stopped
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the step is saved."""
        self._saved_step = -1 if args.save_only_model else state.global_step
        if self._stopped:
            self._keep(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the options that a stop changed their values again."""
        self._change_back(args)

    def _keep(self, args: Any, state: Any) -> None:
        """Keep the checkpoint of a stop, once it is saved: with ``save_total_limit=1`` the best alone would stay."""
        if args.save_total_limit == 1 and self._saved_step == state.global_step:
            self._change(args, "save_total_limit", 2)

    def _change(self, args: Any, name: str, value: Any) -> None:
        self._changed.setdefault(name, getattr(args, name))
        setattr(args, name, value)

    def _change_back(self, args: Any) -> None:
        for name, value in self._changed.items():
            setattr(args, name, value)
        self._changed = {}

    def pass_on(self, why: str = "", error: Exception | None = None) -> None:
        """Stop the caller of ``train`` too, if a signal was heard.

        Args:
            why: The state of the run. Default: it is stopped or over.
            error: The one that ended training, if any.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with code 143; after SIGHUP, with 129; with 141 if nothing reads the output any more.
        """
        why = why or self._stopped or "training was over"
        if self._requested == signal.SIGINT:
            raise KeyboardInterrupt(why) from error
        if self._requested is None:
            return
        said = {
            signal.SIGTERM: "Terminated: %s.",
            signal.SIGHUP: "Hung up: %s.",
            signal.SIGPIPE: "Nothing reads the output any more: %s. Next time, write the output to a file.",
        }[self._requested]
        logger.warning(said, why, exc_info=error)  # which the exit does not show
        raise SystemExit(128 + self._requested) from error


@contextmanager
def _end_if_a_peer_is_gone() -> Iterator[None]:
    """End this process within the grace period after a SIGTERM that torchrun sends because a peer died.

    The main thread may wait for that peer in a collective, where no Python signal handler runs; so a thread waits for the
    signal. Outside torchrun the sender of SIGTERM sets the grace period.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    from torch.distributed.launcher.api import LaunchConfig

    ours, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    done = threading.Event()
    # Before torch 2.12, torchrun does not read the variable.
    given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") if hasattr(LaunchConfig, "shutdown_timeout") else None
    limit = float(given or 30)
    grace = max(limit - SPARE_SECONDS, limit / 2)

    def watch() -> None:
        while (received := ours.recv(1)) != b"":
            if received[0] == signal.SIGTERM and not done.wait(grace):
                os._exit(TERMINATED)

    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="sigterm-grace").start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        wakeup.close()
