"""Copies a member out of its population: policy, tokenizer, the population's lineage, and a card that tells of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from agile_trainers.checkpoints.output_lock import LOCK
from agile_trainers.populations.lineage import FILE, Lineage, LineageEvent
from agile_trainers.populations.picture import PICTURE, write_picture


def copy_policy(source: Path, folder: Path) -> None:
    """Copy a policy with its tokenizer, card, critic and reference, but no checkpoint, to an empty or new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_dir() and (path / "adapter_config.json").is_file() and not path.name.startswith("checkpoint-"):
            shutil.copytree(path, folder / path.name)
        elif path.is_file() and path.name not in (LOCK, "training_args.bin"):
            shutil.copy2(path, folder / path.name)


def export_policy(
    lineage: Lineage, trained: LineageEvent, source: Path, folder: Path, name: str, model_id: str
) -> Path:
    """Copy a member's policy, and write lineage, picture and card beside it.

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
    lineage.write(folder)
    write_picture(lineage, folder)
    card = folder / "README.md"
    if card.is_file():  # a member's card may be deleted
        text = card.read_text(encoding="utf-8").replace(f'"{name}"', f'"{model_id}"')
        title = model_id.rpartition("/")[2]
        text = re.sub(rf"(?m)^(.*name: |# ){re.escape(name)}$", lambda found: found[1] + title, text)
        card.write_text(f"{text}\n{_section(lineage, trained)}", encoding="utf-8")
    return folder


def _section(lineage: Lineage, trained: LineageEvent) -> str:
    """Return the part of the card about the population."""
    settings = lineage.settings
    error = "" if trained.standard_error is None else f" ± {trained.standard_error:.3f}"
    place = f"member {trained.member}"
    if trained == lineage.winner:
        place = f"the best policy (of member {trained.member})"
    return (
        f"## Population\n\nThis is {place} of a population of {settings['members']} (strategy "
        f"`{settings['strategy']['name']}`). Its fitness, `{settings['fitness']}` over {settings['num_eval_episodes']} "
        f"evaluation episodes, is {trained.fitness:.3f}{error} after {trained.steps} updates. [{FILE}]({FILE}) lists what "
        f"happened to each member.\n\n![Fitness of the members by update, and their hyperparameters]({PICTURE})\n"
    )
