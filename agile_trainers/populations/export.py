"""Copies a member out of its population: policy, tokenizer, the population's lineage, and a card that tells of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from agile_trainers.checkpoints.output_lock import LOCK
from agile_trainers.populations.lineage import FILE, Lineage
from agile_trainers.populations.picture import PICTURE, write_picture


def copy_member(lineage: Lineage, member: int, source: Path, folder: Path, model_id: str) -> Path:
    """Copy a member's policy with its tokenizer, critic and reference, and write lineage, picture and card beside it.

    Args:
        lineage: The population's.
        member: A member that trained.
        source: Its folder.
        folder: An empty folder, or a new one.
        model_id: Hub id or folder name under which the card loads the policy. Its last part is the card's title.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_dir() and (path / "adapter_config.json").is_file() and not path.name.startswith("checkpoint-"):
            shutil.copytree(path, folder / path.name)
        elif path.is_file() and path.name not in (LOCK, "training_args.bin"):
            shutil.copy2(path, folder / path.name)
    lineage.write(folder)
    write_picture(lineage, folder)
    card = folder / "README.md"
    if card.is_file():  # a member's card may be deleted
        text = card.read_text(encoding="utf-8").replace(f'"{source.name}"', f'"{model_id}"')
        title = model_id.rpartition("/")[2]
        text = re.sub(rf"(?m)^(.*name: |# ){re.escape(source.name)}$", lambda found: found[1] + title, text)
        card.write_text(f"{text}\n{_section(lineage, member)}", encoding="utf-8")
    return folder


def _section(lineage: Lineage, member: int) -> str:
    """Return the part of the card about the population."""
    settings, last = lineage.settings, lineage.course(member)[-1]
    error = "" if last.standard_error is None else f" ± {last.standard_error:.3f}"
    place = "the best member" if member == lineage.best else f"member {member}"
    return (
        f"## Population\n\nThis is {place} of a population of {settings['members']} (strategy "
        f"`{settings['strategy']['name']}`). Its fitness, `{settings['fitness']}` over {settings['num_eval_episodes']} "
        f"evaluation episodes, is {last.fitness:.3f}{error} after {last.steps} updates. [{FILE}]({FILE}) lists what "
        f"happened to each member.\n\n![Fitness of the members by update, and their hyperparameters]({PICTURE})\n"
    )
