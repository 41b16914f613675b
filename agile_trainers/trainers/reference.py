"""The reference policy: an adapter of its own if asked for, moved to the policy when told to, part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from agile_trainers.adapters import (
    POLICY,
    REFERENCE,
    SavedAdapters,
    add_reference,
    copy_adapter,
    load_reference,
    restore_adapter,
    starts_elsewhere,
    write,
)

_WEIGHTS = "model.safetensors"


class ReferencePolicy(GRPOTrainer):
    """``update_reference`` of the multi-turn trainers, and what keeps a moved reference through a resume."""

    args: Any
    model: Any
    ref_model: Any
    _reference_moved = False
    _saved: SavedAdapters | None = None
    """Where the policy was loaded from, if from adapters."""

    def _set_up_reference(self) -> None:
        """Once, after TRL's own constructor."""
        self._reference_moved = self.args.sync_ref_model
        is_peft = isinstance(self.model, PeftModel)
        if self.args.reference_adapter:
            if not is_peft:
                raise ValueError(
                    "reference_adapter=True keeps the reference as an adapter, but the model is trained whole: its "
                    "reference is a copy of its own already. Pass `peft_config` or leave reference_adapter unset."
                )
            add_reference(self.model)
        if self._saved is not None and self.args.keep_reference:
            load_reference(self.model, self._saved.folders[REFERENCE])
        elif self.beta != 0.0 and is_peft and (self._saved or starts_elsewhere(self.model.peft_config[POLICY])):
            # Disabled, such an adapter leaves another policy than the one that training starts from.
            add_reference(self.model)
            copy_adapter(self.model, POLICY, REFERENCE)  # TRL's copy leaves out embeddings
        if self.args.reference_update_steps:
            if is_peft and REFERENCE not in self.model.peft_config:
                raise ValueError(
                    f"reference_update_steps={self.args.reference_update_steps} moves the reference, which here is the "
                    "frozen base model. Set reference_adapter=True."
                )
            self.add_callback(_UpdateReference(self))

    def update_reference(self) -> None:
        """Make the current policy the reference. Batches that were scored before keep the reference of then.

        Raises:
            ValueError: If there is no reference (``beta=0``), or it is the frozen base model (LoRA without
                ``reference_adapter``).
        """
        policy = self.accelerator.unwrap_model(self.model)
        self._reference_moved = True
        if self.ref_model is not None:
            target = self.accelerator.unwrap_model(self.ref_model)
            SyncRefModelCallback.sync_target_model(policy, target, 1.0)
        elif isinstance(policy, PeftModel) and REFERENCE in policy.peft_config:
            copy_adapter(policy, POLICY, REFERENCE)
        elif self.args.beta == 0.0:
            raise ValueError("There is no reference to update: beta is 0.0.")
        else:
            raise ValueError("The reference is the frozen base model, which cannot move. Set reference_adapter=True.")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._reference_moved and self.ref_model is not None:
            # An adapter is saved with the others; a whole reference would be made again from the base model.
            weights = self.accelerator.get_state_dict(self.ref_model)  # of which every process may have a share
            if self.args.should_save:
                folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}" / REFERENCE
                folder.mkdir(exist_ok=True)
                save_file({name: weight.clone().contiguous() for name, weight in weights.items()}, folder / _WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        if isinstance(self.model, PeftModel) and any(
            file.parent != folder for file in folder.glob("*/adapter_config.json")
        ):
            if self.is_fsdp_enabled:  # `Trainer` restores the active one alone
                for adapter in self.model.peft_config:
                    restore_adapter(self.model, adapter, folder if adapter == POLICY else folder / adapter)
            else:
                # Finding adapters in subfolders, `Trainer` leaves out the one beside them.
                self.model.load_adapter(str(folder), POLICY, is_trainable=True)
        for name, parameter in self.model.named_parameters():
            # PEFT loads adapters in fp32; TRL trains those of a quantized base in bf16.
            parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
        self._restore_reference(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.is_deepspeed_enabled:
            # DeepSpeed has loaded what is trained, and nothing else.
            policy = self.accelerator.unwrap_model(self.model)
            if isinstance(policy, PeftModel) and REFERENCE in policy.peft_config:
                restore_adapter(policy, REFERENCE, Path(checkpoint) / REFERENCE)
            self._restore_reference(Path(checkpoint))

    def _restore_reference(self, folder: Path) -> None:
        """A whole reference that had moved."""
        file = folder / REFERENCE / _WEIGHTS
        if self.ref_model is None or not file.is_file():
            return
        self._reference_moved = True
        weights = load_file(file)
        for name, parameter in self.accelerator.unwrap_model(self.ref_model).named_parameters():
            write(parameter, weights[name])


class _UpdateReference(TrainerCallback):
    def __init__(self, trainer: ReferencePolicy):
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.reference_update_steps == 0:
            self._trainer.update_reference()
