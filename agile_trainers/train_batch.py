"""Rows and columns of TRL's batch dict: which rows go together, and how much padding they carry."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from agile_trainers.types import TurnBatch

Batch = dict[str, torch.Tensor]

_PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")
_READ = (*_PROMPT_COLUMNS, "completion_ids", "completion_mask")
"""Columns that a forward pass reads."""


def trim_columns(batch: Batch, multiple: int | None) -> Batch:
    """Drop the columns that are padding in every row of a micro-batch.

    TRL pads to the longest row of the *generation* batch. Prompts are padded on the left, everything of shape (B, T) on
    the right.

    Args:
        batch: A micro-batch.
        multiple: TRL's ``pad_to_multiple_of``, to which the batch was padded and which what is left keeps.
    """
    width, length = (
        -(-int(batch[f"{part}_mask"].sum(dim=1).max()) // (multiple or 1)) * (multiple or 1)
        for part in ("prompt", "completion")
    )
    columns = batch["completion_ids"].size(1)
    trimmed = dict(batch)
    for name, value in batch.items():
        if name in _PROMPT_COLUMNS:
            trimmed[name] = value[:, value.size(1) - width :]
        elif value.ndim == 2 and value.size(1) == columns and name not in ("turn_rewards", "turn_mask"):
            trimmed[name] = value[:, :length]
    return trimmed


def like_length(
    batch: TurnBatch, size: int, multiple: int | None, rows: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, Batch]]:
    """Micro-batches of rows of like length, for forward passes that train nothing.

    Args:
        batch: The episodes.
        size: Rows of a micro-batch.
        multiple: See :func:`trim_columns`.
        rows: (R,) int64, the rows to read. Default: all.

    Yields:
        The rows of a micro-batch, and what a model reads of them, without columns that are padding in all of them.
    """
    lengths = batch.prompt_mask.sum(dim=1) + batch.completion_mask.sum(dim=1)
    ordered = lengths.argsort() if rows is None else rows[lengths[rows].argsort()]
    for chosen in ordered.split(size) if len(ordered) else ():
        yield chosen, trim_columns({name: getattr(batch, name)[chosen] for name in _READ}, multiple)


def read_inputs(part: Batch) -> Batch:
    """A micro-batch as a model's keyword arguments: prompt and completion as one sequence."""
    return {
        "input_ids": torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1),
        "attention_mask": torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1),
    }


def drop_silent_rows(batch: Batch, eps: float, loss_type: str) -> tuple[Batch, float]:
    """Drop the rows of a micro-batch that have no advantage, and with it no gradient.

    Without any other row, the shortest one stays: a rank that skipped its forward and backward pass would leave the others
    waiting.

    Args:
        batch: ``advantages`` and ``tool_mask`` are (B, T).
        eps: An advantage counts as none up to this.
        loss_type: TRL's; some divide by the number of rows or tokens of the micro-batch.

    Returns:
        What is left, and what its loss is to be multiplied by to give that of the whole.
    """
    mask = batch["tool_mask"] * batch["completion_mask"]
    kept = ((batch["advantages"].abs() > eps) & (mask > 0)).any(dim=1)
    if not kept.any():
        kept[_lengths(batch).argmin()] = True
    left = {name: value[kept] if value.ndim else value for name, value in batch.items()}
    if loss_type == "bnpo":
        share = mask[kept].sum().clamp(min=1) / mask.sum().clamp(min=1)
    elif loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):
        share = kept.float().mean()
    else:
        return left, 1.0  # divided by the tokens of the whole generation batch
    return left, share.item()


def sort_by_length(micro_batches: list[Batch], window: int) -> list[Batch]:
    """Exchange rows between the micro-batches of one accumulation window so that each holds rows of like length.

    The window's gradient is a sum over its rows, so only the padding changes. (``loss_type="bnpo"`` and the entropy bonus
    normalize per micro-batch, whose make-up is arbitrary anyway.)

    Args:
        micro_batches: In the order of the updates.
        window: Micro-batches of one optimizer step.
    """
    ordered: list[Batch] = []
    for start in range(0, len(micro_batches), window):
        group = micro_batches[start : start + window]
        order = torch.cat([_lengths(batch) for batch in group]).argsort(stable=True)
        # 0-d entries are the same in every micro-batch.
        joined = {
            name: torch.cat([batch[name] for batch in group])[order] if value.ndim else value
            for name, value in group[0].items()
        }
        size = _lengths(group[0]).size(0)
        ordered += [
            {name: value[i * size : (i + 1) * size] if value.ndim else value for name, value in joined.items()}
            for i in range(len(group))
        ]
    return ordered


def _lengths(batch: Batch) -> torch.Tensor:
    return batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
