"""The Hub: what is pushed is chosen by name, so that nothing else can slip in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import auth_check, is_offline_mode, upload_folder
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from peft import PeftModel
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from trl import GRPOTrainer

from agile_trainers.adapters import CRITIC, REFERENCE
from agile_trainers.adapters.folders import RECORD
from agile_trainers.checkpoints.background_pushes import BackgroundPushes, limit_silence, remove_stages, stage
from agile_trainers.checkpoints.model_card import CURVE, curve, hyperparameters, model_card, plot_curve
from agile_trainers.rollout.engine import RolloutEngine

logger = logging.get_logger(__name__)

_MODEL = (
    "adapter_config.json", "adapter_model*.safetensors", "adapter_model.safetensors.index.json", "config.json",
    "generation_config.json", "model*.safetensors", "model.safetensors.index.json", RECORD,
)  # fmt: skip
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_EXTRAS = {
    "reference": (f"{REFERENCE}/adapter_config.json", f"{REFERENCE}/*.safetensors"),
    "critic": (f"{CRITIC}/adapter_config.json", f"{CRITIC}/*.safetensors"),
    "rollouts": ("rollouts/*.jsonl",),
}
"""What ``hub_extras`` names."""


class HubModels(GRPOTrainer):
    """``push_to_hub``, ``hub_strategy`` and the model card of the multi-turn trainers."""

    args: Any
    model: Any
    engine: RolloutEngine | None
    hub_model_id: str | None
    push_in_progress: Any

    def _stage_record(self) -> dict[str, Any]:
        raise NotImplementedError

    def _set_up_hub(self) -> None:
        """Once, after the reference was set up."""
        adapters = self.model.peft_config if isinstance(self.model, PeftModel) else {}
        if "reference" in self.args.hub_extras and REFERENCE not in adapters:
            raise ValueError(
                f"hub_extras={self.args.hub_extras!r}: there is no reference to push: it is the frozen base model. Set "
                "reference_adapter=True (LoRA), or leave it out."
            )

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository and check that it can be written to; ``Trainer`` calls this at construction.

        Offline (``HF_HUB_OFFLINE=1``), nothing is asked and nothing pushed while training; a warning says so.

        Raises:
            ValueError: If the Hub refuses the repository's name or the token.
        """
        if not self.is_world_process_zero():
            return
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        if is_offline_mode():
            logger.warning(
                "HF_HUB_OFFLINE=1: nothing is pushed to %s. Push the run later with trainer.push_to_hub().", name
            )
            self.hub_model_id, self.push_in_progress = None, None
            return
        limit_silence()
        token = token or self.args.hub_token
        try:
            super().init_hf_repo(token=token)
            try:
                auth_check(str(self.hub_model_id), token=token, write=True)
            except RepositoryNotFoundError as error:
                if error.response.status_code != 404:  # it was made just now: this Hub does not answer the question
                    raise
        except (HfHubHTTPError, HFValidationError) as error:
            response = getattr(error, "response", None)
            if response is not None and response.status_code not in (400, 401, 403, 404):
                raise
            raise ValueError(
                f"Cannot push to hub_model_id={name!r}: {str(error).strip().splitlines()[0]} Check the name (user/model) "
                "and that the token (hub_token, or that of `hf auth login`) may write there, or set push_to_hub=False."
            ) from error

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model to ``output_dir`` and push it: policy, tokenizer, record, model card and learning curve.

        Reference, critic and episodes only if ``args.hub_extras`` asks for them; the optimizer never (but see
        ``hub_strategy``).

        Args:
            commit_message: Of the commit.
            blocking: Wait for the upload.
            token: Default: ``args.hub_token``, or the one that ``hf auth login`` stored. It is written to no file.
            revision: Branch. Default: ``args.hub_revision``.
            **kwargs: ``dataset_name`` and ``tags`` of the model card.

        Returns:
            ``huggingface_hub.CommitInfo``, a future of it if not ``blocking``; None on all processes but the main one.
        """
        if self.engine is None:
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)
        token = token or self.args.hub_token
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        self._finish_current_push()
        folder = self._stage(Path(self.args.output_dir), None)
        upload = self._uploader(commit_message, token=token, revision=revision)
        if blocking:
            try:
                return upload(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        done = ThreadPoolExecutor(1)
        pushed = done.submit(upload, folder)
        pushed.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
        done.shutdown(wait=False)
        return pushed

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.engine is None:
            return super()._push_from_checkpoint(checkpoint_folder)
        args, strategy = self.args, self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        if self.hub_model_id is None:  # offline
            return
        if self.push_in_progress is None:
            self.push_in_progress = BackgroundPushes()
            remove_stages(Path(args.output_dir))
        if not self.push_in_progress.is_done() and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        folder, message = Path(checkpoint_folder), f"Training in progress, step {self.state.global_step}"
        self._push_later(folder, message)
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            path = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else folder.name
            self._push_later(folder, f"{message}, checkpoint", path_in_repo=path)

    def _push_later(self, folder: Path, message: str, path_in_repo: str | None = None) -> None:
        self.push_in_progress.submit(
            f"{folder.name} to {self.hub_model_id} ({message!r})",
            lambda: self._stage(folder, path_in_repo),
            self._uploader(message, path_in_repo=path_in_repo),
        )

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        if isinstance(getattr(self, "push_in_progress", None), BackgroundPushes):
            self.push_in_progress.summarize()

    def _stage(self, folder: Path, path_in_repo: str | None) -> Path:
        """What is pushed of a folder: the model in it, or all of it under another path."""
        output_dir = Path(self.args.output_dir)
        if path_in_repo is not None:
            # Without the pickle, which nothing here reads.
            return stage({Path("."): folder}, output_dir, leave_out=(TRAINING_ARGS_NAME,))
        chosen = dict.fromkeys(self._chosen(folder), folder)
        chosen |= {Path(name): output_dir for name in ("README.md", CURVE) if (output_dir / name).is_file()}
        if "rollouts" in self.args.hub_extras:
            chosen |= {path.relative_to(output_dir): output_dir for path in output_dir.glob(*_EXTRAS["rollouts"])}
        return stage(chosen, output_dir)

    def _uploader(
        self,
        message: str | None,
        *,
        token: str | None = None,
        revision: str | None = None,
        path_in_repo: str | None = None,
    ) -> Callable[[Path], Any]:
        def upload(folder: Path) -> Any:
            return upload_folder(
                repo_id=str(self.hub_model_id),
                folder_path=folder,
                path_in_repo=path_in_repo,
                commit_message=message,
                token=token or self.args.hub_token,
                revision=revision or self.args.hub_revision,
            )

        return upload

    def _chosen(self, folder: Path) -> list[Path]:
        vocabulary = getattr(self.processing_class, "vocab_files_names", {}).values()
        extras = [pattern for name in self.args.hub_extras if name != "rollouts" for pattern in _EXTRAS[name]]
        patterns = {*_MODEL, *_TOKENIZER, *vocabulary, *extras}
        return sorted({path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern)})

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write ``README.md`` and the learning curve to ``output_dir``.

        Args:
            model_name: Title. Default: the last part of ``hub_model_id``, or of ``output_dir``.
            dataset_name: Hub id of the rows, if there were any.
            tags: More tags.
        """
        if self.engine is None:
            return super().create_model_card(model_name, dataset_name, tags)
        if not self.is_world_process_zero():
            return
        output_dir, model_id = Path(self.args.output_dir), self.hub_model_id or Path(self.args.output_dir).name
        output_dir.mkdir(parents=True, exist_ok=True)
        text = model_card(
            name=model_name or model_id.rpartition("/")[2],
            model_id=model_id,
            record=self._stage_record(),
            log_history=self.state.log_history,
            options=hyperparameters(self.args),
            tags=sorted({*self._tag_names, *([tags] if isinstance(tags, str) else tags or ())}),
            trainer=type(self).__name__,
            dataset=dataset_name,
            paper=self._paper,
        )
        (output_dir / "README.md").write_text(text, encoding="utf-8")
        if curve(self.state.log_history):
            plot_curve(self.state.log_history, output_dir / CURVE)
