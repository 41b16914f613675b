"""Keeps the reference policy: creates it, updates it to the current policy, saves and restores it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl.trainer.callbacks import SyncRefModelCallback

from agile_trainers.adapters.copies import add_reference, copy_adapter
from agile_trainers.adapters.loading import SavedAdapters, load_frozen, restore_adapter
from agile_trainers.adapters.lora_settings import check_bias, starts_elsewhere
from agile_trainers.adapters.roles import POLICY, REFERENCE
from agile_trainers.adapters.sharding import assign_parameter, whole
from agile_trainers.step.log_probs import Models

_WEIGHTS = "model.safetensors"


class ReferencePolicy:
    """The reference policy of a run with ``beta``.

    Args:
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
        models: Returns the policy and the reference model, as the trainer has them now.
        saved: The adapters that the policy was loaded from, if any.

    Raises:
        ValueError: For options that do not fit the kind of reference.
    """

    def __init__(
        self, args: Any, accelerator: Accelerator, models: Callable[[], Models], saved: SavedAdapters | None
    ) -> None:
        self._args, self._accelerator, self._models = args, accelerator, models
        model = models().policy
        self._moved = False  # away from the model's files
        is_peft = isinstance(model, PeftModel)
        if args.reference_adapter:
            if not is_peft:
                raise ValueError(
                    "reference_adapter=True keeps the reference as an adapter, but the model is trained whole, and its "
                    "reference is a separate copy already. Pass `peft_config` or leave reference_adapter unset."
                )
            add_reference(model)
        elif args.beta != 0.0 and is_peft:
            check_bias(model.peft_config[POLICY], "policy and reference")
        if saved is not None and args.keep_reference:
            load_frozen(model, REFERENCE, saved.folders[REFERENCE])
        elif args.beta != 0.0 and is_peft and (saved or starts_elsewhere(model.peft_config[POLICY])):
            # Disabling such an adapter gives another policy than the one that training starts from.
            add_reference(model)
            copy_adapter(model, POLICY, REFERENCE)  # TRL's copy leaves out embeddings
        if models().reference is not None:  # the policy is whole
            self._moved = self._start_from_policy()
        if args.sync_ref_model and is_peft and REFERENCE not in model.peft_config:
            raise ValueError(
                "sync_ref_model=True moves the reference, which here is the frozen base model. Set reference_adapter=True."
            )

    @property
    def _policy(self) -> Any:
        return self._accelerator.unwrap_model(self._models().policy)

    def _start_from_policy(self) -> bool:
        """Give the reference model the policy's weights, and return whether its own were others.

        TRL has loaded it from the files that the policy's configuration names, and a model that was passed as an object may
        have been changed since, by an earlier training or a merged adapter.

        Raises:
            ValueError: If the policy has other parameters than these files.
        """
        policy, reference = (
            # A compiled model has other names.
            dict(self._accelerator.unwrap_model(model, keep_torch_compile=False).named_parameters())
            for model in (self._models().policy, self._models().reference)
        )
        odd, differs = sorted(policy.keys() ^ reference.keys()), False
        for name in () if odd else reference:
            own, parameter = policy[name], reference[name]
            with whole([own, parameter]):
                there = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                if own.shape != there.shape:
                    odd.append(name)
                    break
                value = own.detach().to(there, copy=True)
                differs |= not torch.equal(value, there)
            assign_parameter(parameter, value)
        if odd:
            raise ValueError(
                f"beta={self._args.beta} needs a reference, which is loaded from the files that the model names "
                f"({self._policy.config._name_or_path!r}), and the model has other parameters than these: {odd[0]}. Save it "
                "with model.save_pretrained(folder) and pass model=folder."
            )
        return any(gather_object([differs]))  # all processes save it, or none

    def update(self, weight: float) -> None:
        """Move the reference to the current policy; see :meth:`MultiTurnTrainer.update_reference`."""
        policy, reference = self._policy, self._models().reference
        self._moved = True
        if reference is not None:
            SyncRefModelCallback.sync_target_model(policy, self._accelerator.unwrap_model(reference), weight)
        elif isinstance(policy, PeftModel) and REFERENCE in policy.peft_config:
            copy_adapter(policy, POLICY, REFERENCE, weight=weight)
        elif self._args.beta == 0.0:
            raise ValueError("There is no reference to update: beta is 0.0.")
        else:
            raise ValueError("The reference is the frozen base model, which cannot move. Set reference_adapter=True.")

    def save(self, folder: Path) -> None:
        """Save a reference model in a checkpoint where the model's files are another; an adapter is saved with the others.

        Every process has to call it, since each may hold a shard of the weights.
        """
        reference = self._models().reference
        if not self._moved or reference is None:
            return
        weights = self._accelerator.get_state_dict(reference)
        if self._args.should_save:
            (folder / REFERENCE).mkdir(exist_ok=True)
            kept = {name: weight.clone().contiguous() for name, weight in weights.items()}
            save_file(kept, folder / REFERENCE / _WEIGHTS)

    def restore(self, folder: Path) -> None:
        """Load the reference model that :meth:`save` wrote, if any.

        Raises:
            ValueError: If it wrote none, and the reference is now another than the model's files.
        """
        file, reference = folder / REFERENCE / _WEIGHTS, self._models().reference
        if reference is None:
            return
        if not file.is_file():
            if self._moved:
                raise ValueError(
                    f"The reference of the run in {folder} is the model in the files that it names "
                    f"({self._policy.config._name_or_path!r}), and the model that was passed holds other weights. Pass the "
                    "name of these files as `model`: the checkpoint has the policy."
                )
            return
        self._moved = True
        weights = load_file(file)
        for name, parameter in self._accelerator.unwrap_model(reference).named_parameters():
            assign_parameter(parameter, weights[name])

    def restore_after_deepspeed(self, folder: Path) -> None:
        """Load the reference after DeepSpeed, which loads trained parameters only."""
        policy = self._policy
        if isinstance(policy, PeftModel) and REFERENCE in policy.peft_config:
            restore_adapter(policy, REFERENCE, folder / REFERENCE)
        self.restore(folder)


class ReferenceUpdates(TrainerCallback):
    """Moves the reference to the policy every ``ref_model_sync_steps``, as TRL moves one that is a model."""

    def __init__(self, reference: ReferencePolicy) -> None:
        self._reference = reference

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self._reference.update(args.ref_model_mixup_alpha)
