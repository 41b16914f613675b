"""Draws the tokens of an episode, and marks those that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from agile_trainers.rollout.collate import collate
from agile_trainers.types import NO_TURN, Trajectory

TRAINED, GIVEN = "bold green", "dim"
_HEAD, _TAIL = 24, 8
"""Number of tokens shown at the beginning and at the end of a long part."""


def draw_layout(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> RenderableType:
    """Make a table of the parts of an episode: prompt, answers, observations.

    The trained tokens are read from a trainer's batch. They are in brackets, and green on a terminal with colours.

    Args:
        trajectory: The episode.
        tokenizer: Decodes the ids.
    """
    batch = collate([trajectory], pad_token_id=tokenizer.pad_token_id or 0, end_token_id=tokenizer.eos_token_id or 0)
    turn_ids = [NO_TURN] * len(trajectory.prompt_ids) + batch.turn_ids[0].tolist()[: len(trajectory.completion_ids)]
    if batch.failed[0]:
        turn_ids = [NO_TURN] * len(turn_ids)
    table = Table("part", "tokens", "text", box=None, pad_edge=False)
    table.columns[1].justify, table.columns[2].overflow = "right", "fold"
    start = 0
    for turn, group in groupby(turn_ids):
        ids = (trajectory.prompt_ids + trajectory.completion_ids)[start : start + len(list(group))]
        part = f"answer {turn + 1}" if turn != NO_TURN else "observation" if start else "prompt"
        table.add_row(part, str(len(ids)), _text(ids, tokenizer, trained=turn != NO_TURN))
        start += len(ids)
    trained = sum(turn != NO_TURN for turn in turn_ids)
    legend = Text.assemble(
        ("[trained]", TRAINED), " and ", ("given", GIVEN), f": {trained} of {start} tokens are trained on."
    )
    return Group(table, legend)


def _text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, trained: bool) -> Text:
    if len(ids) > _HEAD + _TAIL:
        left_out = Text(f" ... {len(ids) - _HEAD - _TAIL} more ... ")
        return _text(ids[:_HEAD], tokenizer, trained) + left_out + _text(ids[-_TAIL:], tokenizer, trained)
    pieces = [tokenizer.decode([token]) for token in ids] if trained else [tokenizer.decode(ids)]
    shown = [piece.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") for piece in pieces]
    return Text("".join(f"[{piece}]" for piece in shown) if trained else shown[0], style=TRAINED if trained else GIVEN)
