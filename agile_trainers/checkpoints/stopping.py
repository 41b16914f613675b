"""Turns the first SIGINT or SIGTERM into a checkpoint and a stop at the end of the optimizer step."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAID = {
    signal.SIGINT: "Interrupted: saving a checkpoint after this step. Interrupt again to stop at once.",
    signal.SIGTERM: "SIGTERM: saving a checkpoint after this step. A second one stops at once.",
}
_DEFAULT: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM stopped, by convention."""
GRACE_SECONDS = 25.0
"""Seconds from SIGTERM to the end of a process under torchrun, which kills it after 30."""


class GracefulStop(TrainerCallback):
    """Listens for SIGINT (Ctrl-C) and SIGTERM while a trainer trains. All processes stop after the same step.

    Args:
        accelerator: The trainer's.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._requested: signal.Signals | None = None
        self._stopped = ""

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Handle the signals inside this block. A second signal has its earlier effect, but is never ignored."""
        self._requested, self._stopped = None, ""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        if None in before.values() or threading.current_thread() is not threading.main_thread():
            yield  # Python can change no handler here
            return

        def request(number: int, _: Any) -> None:
            for one, handler in before.items():
                # A shell starts what it runs in the background with SIGINT ignored.
                signal.signal(one, _DEFAULT[one] if handler == signal.SIG_IGN else handler)
            self._requested = signal.Signals(number)
            logger.warning(_SAID[self._requested])

        for number in _SIGNALS:
            signal.signal(number, request)
        try:
            with _end_if_a_peer_is_gone():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if a process got a signal."""
        number = torch.tensor(float(self._requested or 0), device=self._accelerator.device)
        # The signal may reach one process a step later than another.
        numbers = self._accelerator.gather(number)
        if numbers.max() > 0:
            self._requested = signal.Signals(int(numbers.max()))
            control.should_save = control.should_training_stop = True
            self._stopped = f"stopped at step {state.global_step}; resume_from_checkpoint=True goes on from there"

    def pass_on(self) -> None:
        """Stop the caller of ``train`` too.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with code 143.
        """
        if self._requested == signal.SIGTERM:
            logger.warning("Terminated: %s.", self._stopped)
            raise SystemExit(TERMINATED)
        if self._requested:
            raise KeyboardInterrupt(self._stopped)


@contextmanager
def _end_if_a_peer_is_gone() -> Iterator[None]:
    """End this process within the grace period after a SIGTERM that torchrun sends because a peer died.

    The main thread may wait for that peer in a collective, where no Python signal handler runs; so a thread waits for the
    signal. Outside torchrun the sender of SIGTERM sets the grace period.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    ours, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    done = threading.Event()

    def watch() -> None:
        while (received := ours.recv(1)) != b"":
            if received[0] == signal.SIGTERM and not done.wait(GRACE_SECONDS):
                os._exit(TERMINATED)

    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="sigterm-grace").start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        wakeup.close()
