"""Uploads to the Hub in the background, one after another; retries where that can help and reports what failed."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import get_session, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
)
from transformers.utils import logging

logger = logging.get_logger(__name__)

WAITS = (2.0, 10.0, 60.0)
"""Seconds of waiting before the second, third and fourth attempt."""
SILENCE_SECONDS = 300.0
"""Timeout for an answer of the Hub; the client of ``huggingface_hub`` has none."""
STAGE = ".push-"
"""Prefix of the folders below ``output_dir`` that hold the files of an upload."""


def limit_silence() -> None:
    """Give the Hub client of this process a timeout, if it has none."""
    client = get_session()
    if client.timeout.read is None:
        # A new one is made after an error of the connection, so the first one's timeout would not do.
        made, hooks, follow = type(client), client.event_hooks, client.follow_redirects
        set_client_factory(lambda: made(event_hooks=hooks, follow_redirects=follow, timeout=SILENCE_SECONDS))


def stage(files: Mapping[Path, Path], output_dir: Path) -> Path:
    """Collect the files of an upload in a folder below ``output_dir``, since checkpoints are deleted over time.

    Args:
        files: Relative path of each file to the folder it lies in. Files of checkpoints no longer change and are
            hard-linked where the file system allows it; files of ``output_dir`` itself are copied.
        output_dir: Parent of the new folder.

    Returns:
        The folder. The caller removes it.

    Raises:
        OSError: If the disk is full, or a file cannot be read. Nothing is left behind then.
    """
    folder = Path(tempfile.mkdtemp(prefix=STAGE, dir=output_dir))
    try:
        for path, source in files.items():
            put = shutil.copy2 if source == output_dir else _link
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            put(source / path, folder / path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def remove_stages(output_dir: Path) -> None:
    """Remove the folders that killed uploads left."""
    for folder in output_dir.glob(f"{STAGE}*"):
        shutil.rmtree(folder, ignore_errors=True)


class BackgroundPushes:
    """Runs the uploads of a run in order. It has the methods that ``Trainer`` calls on its ``push_in_progress``."""

    def __init__(self) -> None:
        self.jobs: list[Future[Any]] = []
        self.failures: list[str] = []
        """Uploads that failed, each with its reason."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hub-push")
        self._stop = threading.Event()

    def submit(self, what: str, prepare: Callable[[], Path], upload: Callable[[Path], Any]) -> None:
        """Prepare an upload now and run it in the background.

        Args:
            what: The upload's name in messages.
            prepare: Makes the folder to upload. If the disk is full, this upload is given up and training goes on.
            upload: Uploads that folder, which is removed afterwards.
        """
        try:
            folder = prepare()
        except OSError as error:
            self._give_up(what, error)
            return
        self.jobs.append(self._thread.submit(self._push, what, folder, upload))

    def is_done(self) -> bool:
        """Return True if no upload is pending or running."""
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        """Wait for every upload to succeed or to be given up."""
        for job in self.jobs:
            job.result()

    def cancel(self) -> None:
        """Cancel the uploads that have not begun, and all retries."""
        self._stop.set()
        self.jobs = [job for job in self.jobs if not job.cancel()]

    def close(self) -> None:
        """Cancel as :meth:`cancel` does, and take no further upload. One that is running goes on."""
        self.cancel()
        self._thread.shutdown(wait=False)

    def summarize(self) -> None:
        """Log the uploads that failed, once."""
        if self.failures:
            logger.warning(
                "%d of the run's pushes did not arrive:\n%s\nNothing is lost: the checkpoints are in output_dir. Push them "
                "with trainer.push_to_hub(), or `hf upload`.",
                len(self.failures), "\n".join(self.failures),
            )  # fmt: skip
            self.failures = []

    def _push(self, what: str, folder: Path, upload: Callable[[Path], Any]) -> None:
        try:
            retrying = Retrying(
                retry=retry_if_exception(_may_pass), wait=_pause, sleep=sleep_using_event(self._stop), reraise=True,
                stop=stop_after_attempt(1 + len(WAITS)) | stop_when_event_set(self._stop),
                before_sleep=lambda state: logger.warning(
                    "Pushing %s failed (%s). Trying again in %.0f s.", what, _reason(_error(state)), state.upcoming_sleep
                ),
            )  # fmt: skip
            retrying(upload, folder)
        except Exception as error:
            self._give_up(what, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _give_up(self, what: str, error: Exception) -> None:
        self.failures.append(f"{what}: {_reason(error)}")
        logger.warning("Pushing %s failed: %s. Training goes on.", what, _reason(error))


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # no links on this file system, or not between the two; a full disk shows when copying
        shutil.copy2(source, target)


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    response = getattr(error, "response", None)
    if isinstance(error, HfHubHTTPError) and response is not None:
        return response.status_code >= 500 or response.status_code in (408, 429)
    return isinstance(error, (HTTPError, OSError))


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _pause(state: RetryCallState) -> float:
    """Return the seconds to wait before another attempt: those that the Hub asks for, if they are more than ours."""
    wait, response = WAITS[min(state.attempt_number, len(WAITS)) - 1], getattr(_error(state), "response", None)
    after = response.headers.get("Retry-After", "") if response is not None and response.status_code == 429 else ""
    return max(wait, float(after)) if after.isdigit() else wait


def _reason(error: BaseException | None) -> str:
    first = str(error).strip().splitlines()
    response = getattr(error, "response", None)
    status = f"{response.status_code} " if response is not None else ""
    return f"{status}{type(error).__name__}: {first[0] if first else 'no message'}"
