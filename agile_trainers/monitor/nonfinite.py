"""Skips optimizer steps whose gradient is not finite, and refuses to save weights that are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers.utils import logging

logger = logging.get_logger(__name__)

MOST_SKIPPED_IN_A_ROW = 5
MOST_SKIPPED_WITH_LOSS_SCALING = 25
"""Limit with a dynamic loss scale, which starts too high on purpose and is halved with each skipped step."""


class NonFiniteError(FloatingPointError):
    """Gradients or weights are NaN or infinite, and training cannot continue."""


@dataclass
class StepGuard:
    """Skips and counts the optimizer steps of a run whose gradient is not finite.

    A skipped step leaves weights, optimizer state and learning rate schedule as they were. DeepSpeed skips such a step by
    itself (its overflow check, in every ZeRO stage), and it is counted here too.
    """

    skipped: int = 0
    """Number of skipped steps of the run."""
    in_a_row: int = 0
    """Number of skipped steps since the last one that was made."""

    def inspect(self, norm: Any, model: torch.nn.Module, optimizer: Any, accelerator: Accelerator, step: int) -> None:
        """Skip the coming optimizer step if its gradient is not finite on some process.

        Args:
            norm: The gradient's norm, over all parameters; a number, a tensor, or None if it was not computed.
            model: The model whose gradients are dropped if the step is skipped.
            optimizer: Accelerate's.
            accelerator: The trainer's.
            step: Number of optimizer steps before.

        Raises:
            NonFiniteError: When too many steps in a row were skipped.
        """
        # DeepSpeed and a gradient scaler (which must see such gradients to lower its scale) skip by themselves.
        skips = accelerator.distributed_type != DistributedType.DEEPSPEED and accelerator.scaler is None
        finite = norm is None or bool(torch.isfinite(torch.as_tensor(norm)).all())
        if not _agree(finite, accelerator):
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            if skips:
                for parameter in model.parameters():
                    parameter.grad = None  # optimizers skip a parameter without gradient
                optimizer._is_overflow = True  # so that `Trainer` does not advance the schedule
            self._report(norm, step, scales_loss=accelerator.mixed_precision == "fp16")
            return
        self.in_a_row = 0
        if skips:
            optimizer._is_overflow = False

    def _report(self, norm: Any, step: int, *, scales_loss: bool) -> None:
        most = MOST_SKIPPED_WITH_LOSS_SCALING if scales_loss else MOST_SKIPPED_IN_A_ROW
        if self.in_a_row >= most:
            raise NonFiniteError(
                f"The gradient was not finite in {self.in_a_row} optimizer steps in a row, up to step {step + 1}. All of "
                "them were skipped: the weights are finite, and so are the checkpoints. Likely causes: a learning_rate "
                "that is too high, rewards so large that their squares overflow, or overflow in half precision (try "
                "bf16=True or float32). Change it and resume from the newest checkpoint."
            )
        logger.warning(
            "Step %d was skipped: the norm of its gradient is %s. Weights, optimizer and schedule are unchanged. "
            "%d such steps in a row; training stops at %d.",
            step + 1, float(norm), self.in_a_row, most,
        )  # fmt: skip


def check_finite(model: torch.nn.Module, accelerator: Accelerator, step: int) -> None:
    """Raise unless every trained weight is finite, on every process.

    Args:
        model: The trainer's model. Each process checks its own part of sharded weights (ZeRO-3, FSDP2).
        accelerator: The trainer's.
        step: Number of optimizer steps, for the message.

    Raises:
        NonFiniteError: On every process, if one finds a weight that is NaN or infinite. It names the first.
    """
    broken = None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not torch.isfinite(_own_part(parameter)).all():
            broken = name
            break
    if not _agree(broken is None, accelerator):
        raise NonFiniteError(
            f"The weights are not finite at step {step} (first: {broken or 'on another process'}); no checkpoint of them is "
            "saved. Resume from the newest checkpoint, which is finite, with a lower learning_rate or max_grad_norm."
        )


def _own_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    data = getattr(parameter, "ds_tensor", parameter).detach()  # DeepSpeed's partition
    return data.to_local() if hasattr(data, "to_local") else data


def _agree(mine: bool, accelerator: Accelerator) -> bool:
    """Return True if ``mine`` is True on all processes."""
    if accelerator.num_processes == 1:
        return mine
    against = torch.tensor(0.0 if mine else 1.0, device=accelerator.device)
    return float(accelerator.reduce(against, reduction="sum")) == 0.0
