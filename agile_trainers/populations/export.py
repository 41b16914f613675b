"""Copies a member out of its population: policy, tokenizer, the population's lineage, and a card that tells of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from huggingface_hub import EvalResult

from agile_trainers.adapters import CRITIC, REFERENCE
from agile_trainers.checkpoints.disclosure import ADAPTER_FILES, CARD, CURVE, MODEL_FILES, TOKENIZER_FILES, matching
from agile_trainers.checkpoints.model_card import add_results, result
from agile_trainers.populations.lineage import FILE, Lineage, LineageEvent, with_error

_VOCABULARY = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
"""Vocabularies of tokenizers that are not in ``tokenizer.json``."""


def copy_policy(source: Path, folder: Path) -> None:
    """Copy a policy with its tokenizer, card, critic and reference, and nothing else, to an empty or new folder."""
    further = [f"{name}/{file}" for name in (REFERENCE, CRITIC) for file in (*ADAPTER_FILES, CARD)]
    patterns = (*MODEL_FILES, *TOKENIZER_FILES, *_VOCABULARY, CARD, CURVE, *further)
    folder.mkdir(parents=True, exist_ok=True)
    for path in matching(source, patterns):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, folder / path)


def export_policy(
    lineage: Lineage, trained: LineageEvent, source: Path, folder: Path, name: str, model_id: str
) -> Path:
    """Copy a member's policy, and write lineage and card beside it.

    Args:
        lineage: The population's.
        trained: The ``trained`` event that the policy is of.
        source: Its folder.
        folder: An empty folder, or a new one.
        name: The policy's name in the card of ``source``.
        model_id: Hub id or folder name under which the card loads the policy. Its last part is the card's title.

    Returns:
        The folder.
    """
    copy_policy(source, folder)
    lineage.public().write(folder)
    card = folder / "README.md"
    if card.is_file():  # a member's card may be deleted
        text = card.read_text(encoding="utf-8").replace(f'"{name}"', f'"{model_id}"')
        title = model_id.rpartition("/")[2]
        text = re.sub(rf"(?m)^(.*name: |# ){re.escape(name)}$", lambda found: found[1] + title, text)
        card.write_text(f"{text}\n{_section(lineage, trained)}", encoding="utf-8")
        if held_out := _held_out_result(lineage, trained):
            add_results(folder, [held_out])
    return folder


def _held_out_result(lineage: Lineage, trained: LineageEvent) -> EvalResult | None:
    """Return the winner's result on held-out episodes for the card's metadata; None for others, or without one."""
    found, settings = lineage.held_out, lineage.settings
    if found is None or found.fitness is None or trained != lineage.winner:
        return None
    error = {} if found.standard_error is None else {"standard_error": round(found.standard_error, 4)}
    played = {"episodes_of": "held-out episodes", "episodes": found.episodes, **error}
    name = f"{settings['fitness']} on held-out episodes"
    return result(str(settings["environment"]), str(settings["fitness"]), name, found.fitness, played)


def _section(lineage: Lineage, trained: LineageEvent) -> str:
    """Return the part of the card about the population."""
    settings = lineage.settings
    place = f"member {trained.member}"
    if trained == lineage.winner:
        place = f"the best policy (of member {trained.member})"
    held_out = lineage.held_out
    chosen = f" over {settings['num_eval_episodes']} evaluation episodes"
    replayed = ""
    if held_out is not None and held_out.fitness is not None and trained == lineage.winner:
        chosen += ", by which it was chosen,"
        shown = with_error(held_out.fitness, held_out.standard_error)
        replayed = f" On {held_out.episodes} held-out episodes, by which nothing was chosen, it is {shown}."
    return (
        f"## Population\n\nThis is {place} of a population of {settings['members']} (strategy "
        f"`{settings['strategy']['name']}`). Its fitness, `{settings['fitness']}`{chosen} is "
        f"{with_error(trained.fitness, trained.standard_error)} after {trained.steps} updates.{replayed} [{FILE}]({FILE}) "
        "lists what happened to each member.\n"
    )
