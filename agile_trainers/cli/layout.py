"""Draws the tokens of an episode, and marks those that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from agile_trainers.rollout.collate import collate
from agile_trainers.types import NO_TURN, Trajectory, path_nodes

TRAINED, GIVEN = "bold green", "dim"
_HEAD, _TAIL = 24, 8
"""Number of tokens shown at the beginning and at the end of a long part."""


def draw_layout(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> RenderableType:
    """Make a table of the parts of an episode: prompt, answers, observations.

    The trained tokens are read from a trainer's batch. They are in brackets, and green on a terminal with colours. Of
    several paths, each is drawn from the token on that it does not share with an earlier one.

    Args:
        trajectory: The episode.
        tokenizer: Decodes the ids.
    """
    whole = trajectory.prompt_ids + trajectory.completion_ids
    paths = trajectory.paths if trajectory.paths and trajectory.turns else [whole]
    nodes = path_nodes(paths)
    turns_at = _turns_at(trajectory, [node for own in nodes for node in own], tokenizer)
    table = Table("part", "tokens", "text", box=None, pad_edge=False)
    table.columns[1].justify, table.columns[2].overflow = "right", "fold"
    drawn = dict[int, int]()
    for number, (path, own) in enumerate(zip(paths, nodes), 1):
        start = sum(node in drawn for node in own)
        if len(paths) > 1:
            begins = f"begins with {start} of path {drawn[own[start - 1]]}'s" if start else ""
            table.add_row(f"path {number}", str(len(path)), Text(begins))
        for turns, group in groupby(own[start:], lambda node: turns_at.get(node, ())):
            ids = path[start : start + len(list(group))]
            answered = any(node in turns_at for node in own[:start])
            table.add_row(_part(turns, answered), str(len(ids)), _text(ids, tokenizer, trained=bool(turns)))
            start += len(ids)
        drawn |= {node: number for node in own if node not in drawn}
    trained = f": {len(turns_at)} of {len(drawn)} tokens are trained on."
    again = sum(map(len, turns_at.values())) - len(turns_at)
    shared = f" {again} of them count again, for another answer with the same beginning." if again else ""
    return Group(table, Text.assemble(("[trained]", TRAINED), " and ", ("given", GIVEN), trained, shared))


def _turns_at(
    trajectory: Trajectory, nodes: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> dict[int, tuple[int, ...]]:
    """Return the turns that a trainer's batch trains each distinct token for.

    Args:
        trajectory: The episode.
        nodes: Number of each token of its paths, one path after another.
        tokenizer: Has the ids of padding and end.
    """
    without = replace(trajectory, pictures=None)  # of which only the places are asked for
    batch = collate([without], pad_token_id=tokenizer.pad_token_id or 0, end_token_id=tokenizer.eos_token_id or 0)
    found = dict[int, tuple[int, ...]]()
    for column, turn in enumerate(batch.turn_ids[0].tolist()):
        if turn != NO_TURN and not batch.failed[0]:
            place = len(trajectory.prompt_ids) + column if batch.places is None else int(batch.places[0, column])
            found[nodes[place]] = (*found.get(nodes[place], ()), turn)
    return found


def _part(turns: Sequence[int], answered: bool) -> str:
    if not turns:
        return "observation" if answered else "prompt"
    return f"answer{'s' if len(turns) > 1 else ''} {' and '.join(str(turn + 1) for turn in turns)}"


def _text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, trained: bool) -> Text:
    if len(ids) > _HEAD + _TAIL:
        left_out = Text(f" ... {len(ids) - _HEAD - _TAIL} more ... ")
        return _text(ids[:_HEAD], tokenizer, trained) + left_out + _text(ids[-_TAIL:], tokenizer, trained)
    pieces = [tokenizer.decode([token]) for token in ids] if trained else [tokenizer.decode(ids)]
    shown = [piece.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") for piece in pieces]
    return Text("".join(f"[{piece}]" for piece in shown) if trained else shown[0], style=TRAINED if trained else GIVEN)
