"""Pushes a run to the Hub, also in the background; :func:`~agile_trainers.checkpoints.disclosure.copy_public` says what."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from socket import gaierror
from ssl import SSLError
from typing import Any

from huggingface_hub import (
    HfApi,
    auth_check,
    create_branch,
    get_session,
    is_offline_mode,
    repo_info,
    set_client_factory,
    upload_folder,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_chain,
    wait_fixed,
)
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress, logging

from agile_trainers.adapters.folders import CONFIG, WEIGHTS
from agile_trainers.checkpoints.disclosure import (
    CARD,
    CURVE,
    FURTHER_FILES,
    MODEL_FILES,
    PRIVATE,
    STAGE,
    STATE_FILES,
    TOKENIZER_FILES,
    Masker,
    copy_public,
    matching,
)

logger = logging.get_logger(__name__)

WAITS = (2.0, 10.0, 60.0)
"""Seconds of waiting before the second, third and fourth attempt of a push."""
SILENCE_SECONDS = 300.0
"""Timeout for an answer of the Hub; the client of ``huggingface_hub`` has none."""
_NETWORK = {errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN}
"""Errors of the network that have no class of their own. What fails on this machine fails again."""
_NOT_PUSHED = (PRIVATE, "checkpoint-*", "rollouts/*", "*.bin")
"""Files of an ``output_dir`` that the command for later leaves out: checkpoints are large, the others may hold secrets."""


class HubUnreachableError(ConnectionError):
    """Raised when nothing can be pushed, since the Hub cannot be reached or fails; the message says how to push later."""


@contextmanager
def reporting_unreachable(name: str, folder: str | Path | None = None) -> Iterator[None]:
    """Raise one error in the place of those of a connection.

    Args:
        name: Name of the repository.
        folder: Folder of the saved model, for the message; None before training.

    Raises:
        HubUnreachableError: If the Hub cannot be reached from inside the block.
    """
    try:
        yield
    except (HTTPError, ConnectionError) as raised:
        if isinstance(raised, HfHubHTTPError) and not _may_pass(raised):  # the Hub has refused
            if folder is not None:
                raised.add_note(f"Nothing was pushed to {name}. The model is in {folder}.")
            raise
        error: BaseException = raised
        if isinstance(error, HubUnreachableError) and error.__cause__ is not None:
            error = error.__cause__  # of a block inside
        if isinstance(error, OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE=1"
        elif isinstance(error, HfHubHTTPError):
            reason = f"the Hub failed ({_reason(error)})"
        else:
            reason = f"the Hub cannot be reached ({str(error) or type(error).__name__})"
        if folder is None:
            raise HubUnreachableError(
                f"Cannot push to {name}: {reason}. Connect to it, or set HF_HUB_OFFLINE=1 to train now and push later, or "
                "leave push_to_hub unset."
            ) from error
        excluded = " ".join(f"--exclude '{pattern}'" for pattern in _NOT_PUSHED)
        raise HubUnreachableError(
            f"Nothing was pushed to {name}: {reason}. The model is in {folder}. Push it later with "
            f"trainer.push_to_hub(), or: hf upload {name} {folder} . {excluded}"
        ) from error


def limit_silence() -> None:
    """Give the Hub client of this process a timeout, if it has none."""
    client = get_session()
    if client.timeout.read is None:
        # A new one is made after an error of the connection, so the first one's timeout would not do.
        made, hooks, follow = type(client), client.event_hooks, client.follow_redirects
        set_client_factory(lambda: made(event_hooks=hooks, follow_redirects=follow, timeout=SILENCE_SECONDS))


class BackgroundPushes(PushInProgress):
    """Runs the uploads of a run one after another; retries where that can help, and reports what failed."""

    def __init__(self) -> None:
        super().__init__([])
        self.failures: list[str] = []
        """Uploads that failed, each with its reason."""
        self._api = HfApi()
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
        self.jobs.append(self._api.run_as_future(self._push, what, folder, upload))

    def cancel(self) -> None:
        """Cancel the uploads that have not begun, and all retries. One that is running goes on."""
        self._stop.set()
        super().cancel()

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
            retried(what, lambda: upload(folder), self._stop)
        except Exception as error:
            self._give_up(what, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _give_up(self, what: str, error: Exception) -> None:
        self.failures.append(f"{what}: {_reason(error)}")
        logger.warning("Pushing %s failed: %s. Training goes on.", what, _reason(error))


def retried(what: str, upload: Callable[[], Any], stopped: threading.Event | None = None) -> Any:
    """Upload, and try again after each of :data:`WAITS` where that can help; return what the upload returns.

    Args:
        what: The upload's name in messages.
        upload: Uploads.
        stopped: Once set, it is not tried again.
    """

    def again(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        logger.warning("Pushing %s failed (%s). Trying again in %.0f s.", what, _reason(error), state.upcoming_sleep)

    stopped = stopped or threading.Event()
    retrying = Retrying(
        retry=retry_if_exception(_may_pass), wait=wait_chain(*map(wait_fixed, WAITS)),
        stop=stop_after_attempt(1 + len(WAITS)) | stop_when_event_set(stopped),
        sleep=sleep_using_event(stopped), before_sleep=again, reraise=True,
    )  # fmt: skip
    return retrying(upload)


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 429)
    of_network = isinstance(error, OSError) and error.errno in _NETWORK
    return of_network or isinstance(error, (HTTPError, ConnectionError, TimeoutError, gaierror, SSLError))


def _reason(error: BaseException | None) -> str:
    first = str(error).strip().splitlines()
    response = getattr(error, "response", None)
    status = f"{response.status_code} " if response is not None else ""
    return f"{status}{type(error).__name__}: {first[0] if first else 'no message'}"


class HubPushes:
    """Pushes models, checkpoints and model card of a run to its repository, from the main process.

    Args:
        trainer: One of TRL's trainers too; before its own constructor, which makes the repository.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told_unreachable = False

    @property
    def _args(self) -> Any:
        return self._trainer.args

    @property
    def _name(self) -> str:
        """Name of the repository, as far as it is known before it is made."""
        return self._args.hub_model_id or Path(self._args.output_dir).absolute().name

    def begin(self, token: str | None, init: Callable[..., None]) -> None:
        """Make the repository and check write access to it, unless offline.

        Args:
            token: The Hub token. Default: ``args.hub_token``.
            init: ``Trainer.init_hf_repo``.

        Raises:
            ValueError: If the Hub refuses the repository's name, ``hub_revision`` or the token.
            HubUnreachableError: If it cannot be reached.
        """
        trainer = self._trainer
        if not trainer.is_world_process_zero():
            return
        if is_offline_mode():
            logger.warning(
                "HF_HUB_OFFLINE=1: nothing is pushed to %s. Push the run later with trainer.push_to_hub().", self._name
            )
            trainer.hub_model_id, trainer.push_in_progress = None, None
            return
        token = token or self._args.hub_token

        def make() -> str:
            init(token=token)
            return str(trainer.hub_model_id)

        with reporting_unreachable(self._name):
            make_repository("hub_model_id", self._name, token, make, self._args.hub_revision)

    def check(self) -> None:
        """Check what is to be pushed, after the trainer's constructor.

        Raises:
            ValueError: If DeepSpeed's settings hold a secret that checkpoints would be pushed with.
        """
        trainer = self._trainer
        if trainer.args.push_to_hub and getattr(trainer, "is_deepspeed_enabled", False):
            check_deepspeed(trainer.accelerator.state.deepspeed_plugin.deepspeed_config, trainer.args.hub_strategy)

    def save_and_push(
        self, message: str | None, blocking: bool, token: str | None, revision: str | None, **of_card: Any
    ) -> Any:
        """Save the model to ``output_dir`` and push it, with its card.

        Reference, critic and optimizer only in whole checkpoints (``hub_strategy``), and never episodes.

        Args:
            message: Message of the commit.
            blocking: Wait for the upload.
            token: Hub token; no file contains it. Default: ``args.hub_token``, or the one that ``hf auth login`` stored.
            revision: Branch. Default: ``args.hub_revision``.
            **of_card: ``dataset_name`` and ``tags`` of the model card.

        Returns:
            ``huggingface_hub.CommitInfo``, a future of it if not ``blocking``; None on all processes but the main one.

        Raises:
            HubUnreachableError: If the Hub cannot be reached. The model is saved, and the message says how to push it later.
        """
        trainer, token = self._trainer, token or self._args.hub_token
        trainer.callback_handler.on_push_begin(self._args, trainer.state, trainer.control)
        trainer.save_model(_internal_call=True)
        if not trainer.is_world_process_zero():
            return None
        if trainer.hub_model_id is None:
            with reporting_unreachable(self._name, self._args.output_dir):
                if is_offline_mode():
                    raise OfflineModeIsEnabled
                trainer.init_hf_repo(token=token)
        trainer.create_model_card(**of_card)
        self.wait()
        return self.push(message, blocking, token, revision)

    def push_saved(self) -> None:
        """Push where the model was saved; where the Hub cannot be reached, warn once."""
        try:
            self._trainer.push_to_hub(commit_message="Model save")
        except HubUnreachableError as error:
            if not self._told_unreachable:
                logger.warning("%s", error)
            self._told_unreachable = True

    def push(self, message: str | None, blocking: bool, token: str | None, revision: str | None) -> Any:
        """Push the model in ``output_dir``, on the main process.

        Returns:
            ``huggingface_hub.CommitInfo``, or a future of it if not ``blocking``.

        Raises:
            HubUnreachableError: If the Hub cannot be reached.
        """
        folder = self._stage(Path(self._args.output_dir), None)
        push = self._uploader(message, token=token, revision=revision)
        name = self._trainer.hub_model_id or self._name

        def attempt(staged: Path) -> Any:
            make_branch(name, revision, token or self._args.hub_token)
            return push(staged)

        def upload(staged: Path) -> Any:
            with reporting_unreachable(name, self._args.output_dir):
                return retried(f"to {name} ({message!r})", lambda: attempt(staged))

        if blocking:
            try:
                return upload(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        pushed = HfApi().run_as_future(upload, folder)
        pushed.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
        return pushed

    def push_checkpoint(self, folder: Path) -> None:
        """Push a checkpoint in the background, as ``hub_strategy`` says."""
        trainer, args, strategy = self._trainer, self._args, self._args.hub_strategy
        if not trainer.is_world_process_zero() or strategy == HubStrategy.END:
            return
        if trainer.hub_model_id is None:  # offline
            return
        if trainer.push_in_progress is None:
            trainer.push_in_progress = BackgroundPushes()
            for left in Path(args.output_dir).glob(f"{STAGE}*"):  # by an upload that was killed
                shutil.rmtree(left, ignore_errors=True)
        if not trainer.push_in_progress.is_done() and not args.hub_always_push:
            return
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
        message = f"Training in progress, step {trainer.state.global_step}"
        self._push_later(folder, message)
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            path = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else folder.name
            self._push_later(folder, f"{message}, checkpoint", path_in_repo=path)

    def wait(self) -> None:
        """Wait for the background pushes, and log those that failed."""
        pushes = getattr(self._trainer, "push_in_progress", None)
        if pushes is not None and not pushes.is_done():
            logger.info("Waiting for the current checkpoint push to be finished, this might take a couple of minutes.")
            pushes.wait_until_done()
        if isinstance(pushes, BackgroundPushes):
            pushes.summarize()

    def close(self) -> None:
        """Cancel the background pushes that have not begun."""
        if isinstance(getattr(self._trainer, "push_in_progress", None), BackgroundPushes):
            self._trainer.push_in_progress.cancel()

    def _push_later(self, folder: Path, message: str, path_in_repo: str | None = None) -> None:
        self._trainer.push_in_progress.submit(
            f"{folder.name} to {self._trainer.hub_model_id} ({message!r})",
            lambda: self._stage(folder, path_in_repo),
            self._uploader(message, path_in_repo=path_in_repo),
        )

    def _stage(self, folder: Path, path_in_repo: str | None) -> Path:
        """Collect the files to push: those of the model in ``folder``, or of the whole checkpoint under another path."""
        output_dir = Path(self._args.output_dir)
        chosen = dict.fromkeys(matching(folder, self._patterns(path_in_repo)), folder)
        if path_in_repo is None:
            chosen |= dict.fromkeys(matching(output_dir, (CARD, CURVE)), output_dir)
        return copy_public(chosen, output_dir)

    def _patterns(self, path_in_repo: str | None) -> list[str]:
        processing = self._trainer.processing_class
        vocabulary = getattr(getattr(processing, "tokenizer", processing), "vocab_files_names", {}).values()
        of_checkpoint = () if path_in_repo is None else (*FURTHER_FILES, *STATE_FILES, CARD, CURVE)
        return [*MODEL_FILES, *TOKENIZER_FILES, *vocabulary, *of_checkpoint]

    def _replaced(self, folder: Path, path_in_repo: str | None) -> list[str] | None:
        """Return patterns of what is deleted where a folder is pushed: an earlier run's files that may be read with it.

        Files that a user added to a checkpoint stay. An adapter deletes nothing of the main folder, which may hold its base.
        """
        if path_in_repo is not None:
            return [*self._patterns(path_in_repo), "rollout/*"]
        if not any(folder.glob("model*.safetensors")):
            return None
        return [CONFIG, WEIGHTS, "model.safetensors", "model.safetensors.index.json"]

    def _uploader(
        self,
        message: str | None,
        *,
        token: str | None = None,
        revision: str | None = None,
        path_in_repo: str | None = None,
    ) -> Callable[[Path], Any]:
        return lambda folder: upload_folder(
            repo_id=str(self._trainer.hub_model_id),
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=message,
            token=token or self._args.hub_token,
            revision=revision or self._args.hub_revision,
            delete_patterns=self._replaced(folder, path_in_repo),
        )


def check_deepspeed(config: Mapping[str, Any], strategy: HubStrategy) -> None:
    """Reject settings of DeepSpeed with a secret in them, if checkpoints are pushed, whose states hold the settings.

    Args:
        config: The settings.
        strategy: ``hub_strategy``.

    Raises:
        ValueError: If there is a value of a known form or name of secrets, such as ``comet.api_key``.
    """
    masker = Masker()
    masker(dict(config))
    if masker.count and strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        raise ValueError(
            f"hub_strategy={strategy.value!r} pushes DeepSpeed's states, which hold its configuration, and that holds a "
            "secret (an api_key, for example). Set COMET_API_KEY in the environment, or use another hub_strategy."
        )


def make_branch(name: str, revision: str | None, token: str | None) -> None:
    """Make the branch that is pushed to, if there is none. A reference such as ``refs/pr/1`` must be there.

    Args:
        name: Full name of the repository.
        revision: The branch; None for the main one.
        token: The Hub token.

    Raises:
        HfHubHTTPError: If the Hub refuses the name, or has no such reference.
    """
    if revision is None:
        return
    if revision.startswith("refs/"):
        repo_info(name, revision=revision, token=token)
    else:
        create_branch(name, branch=revision, token=token, exist_ok=True)


def make_repository(
    option: str, name: str, token: str | None, make: Callable[[], str], revision: str | None = None
) -> str:
    """Make the repository and the branch, check write access to it, and return its full name.

    Args:
        option: The argument that names the repository, for the error.
        name: The name that the user gave, for the error.
        token: The Hub token.
        make: Makes the repository and returns its full name.
        revision: The branch that is pushed to. Default: the main one.

    Raises:
        ValueError: If the Hub refuses the repository's name, the branch or the token.
    """
    limit_silence()
    try:
        made = make()
        try:
            auth_check(made, token=token, write=True)
        except RepositoryNotFoundError as error:
            if error.response.status_code != 404:  # the repository was made just now, so this Hub has no such endpoint
                raise
        make_branch(made, revision, token)
    except (HfHubHTTPError, HFValidationError) as error:
        response = getattr(error, "response", None)
        if response is not None and response.status_code not in (400, 401, 403, 404):
            raise
        branch = "" if revision is None else f", revision {revision!r}"
        raise ValueError(
            f"Cannot push to {option}={name!r}{branch}: {str(error).strip().splitlines()[0]} Check the name (user/model), "
            "the branch and that the token (hub_token, or that of `hf auth login`) may write there."
        ) from error
    return made
