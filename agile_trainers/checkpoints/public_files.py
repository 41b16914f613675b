"""Rewrites the copies of a run's files that are pushed, so that they hold what may leave the machine and no more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agile_trainers.adapters.folders import RECORD, read_json, write_json
from agile_trainers.checkpoints.disclosure import (
    EPISODE_FILES,
    ROLLOUT_FILES,
    matching,
    public_options,
    public_path,
    shorten_paths,
)
from agile_trainers.checkpoints.integrity import MARKER, mark_complete
from agile_trainers.checkpoints.secrets import Masker, masked
from agile_trainers.envs.registry import describe_environment
from agile_trainers.records.digests import DIGESTS
from agile_trainers.records.plain import to_json
from agile_trainers.records.reader import read_rows
from agile_trainers.records.writer import FINDINGS, METRICS, RUN, VOCABULARY_FILE, write_episodes

_RUN_FIELDS = ("format", "kind", "started", "run", "algorithm", "policy", "model", "environment", "seed", "options")
"""Fields of ``run.json`` that may leave."""
_FINDING = ("name", "step", "advice")
"""Fields of a finding that may leave; its evidence quotes episodes."""
_JSON, _TEXTS = ("prompt", "reset_info", "row"), ("error", "environment")
"""Columns of an episode with text, as JSON and as it is."""
_TOKENS = ("prompt_ids", "completion_ids", "paths")
"""Columns that spell the text of an episode."""


@dataclass
class Text:
    """The text of episodes that is pushed."""

    episodes: int = 0
    characters: int = 0
    masked: int = 0
    """Secrets of a known form, which are masked."""
    touched: int = 0
    """Episodes that held them."""

    def __str__(self) -> str:
        return (
            f"{self.characters:,} characters of {self.episodes:,} episodes: prompts, answers, observations and rows. "
            f"{self.masked:,} secrets of a known form are masked, in {self.touched:,} episodes, whose token ids are left "
            f"out. Secrets of another form are not recognized; the text of {self.episodes - self.touched:,} episodes is as "
            "it was played."
        )


def disclose(folder: Path) -> Text | None:
    """Rewrite the files of a copy that is about to be pushed.

    Args:
        folder: Holds copies or hard links. A file that is rewritten is replaced, so that what it is linked to stays.

    Returns:
        The text of the episodes in it; None without any.
    """
    text = Text()
    for path in (folder / name for name in matching(folder, (*EPISODE_FILES, *ROLLOUT_FILES))):
        if path.name == RUN:
            write_json(path, _public_run(read_json(path)))
        elif path.name == METRICS:
            _rewrite_lines(path, numbers)
        elif path.name == FINDINGS:
            _rewrite_lines(path, lambda finding: {"evidence": "", **{k: masked(finding.get(k)) for k in _FINDING}})
        elif path.suffix == ".parquet" and path.name != VOCABULARY_FILE:
            in_checkpoint = path.parent.name == "rollout"  # whose marker has the digests
            digests = None if in_checkpoint else path.with_name(DIGESTS.replace("*", "pushed"))
            write_episodes(path, [_masked_episode(row, text) for row in read_rows(path)], digests)
    for path in folder.glob("**/*.jinja"):
        template = path.read_text(encoding="utf-8")
        path.unlink()
        path.write_text(masked(template), encoding="utf-8")
    shorten_paths(folder)
    return text if text.episodes else None


def disclose_checkpoint(folder: Path, episodes: bool) -> Text | None:
    """Rewrite the files of a copy of a whole checkpoint, and its marker.

    Args:
        folder: See :func:`disclose`.
        episodes: Whether episodes may leave. Without them, what the run's diagnosis and its task sampling remember of
            them is left out too. Those in which a secret was masked do not leave, since their tensors spell it.
    """
    text = disclose(folder)
    if text is not None and text.masked:  # the tensors of the generation batch spell what was masked
        episodes = False
        for name in matching(folder, ROLLOUT_FILES):
            (folder / name).unlink()
    state, position = folder / "trainer_state.json", folder / "rollout" / "position.json"
    changed = {folder / RECORD}  # by `disclose`
    if state.is_file():
        content = read_json(state)
        history = [numbers(entry) for entry in content.get("log_history", [])]
        write_json(state, {**numbers(content), "log_history": history, "stateful_callbacks": {}})
        changed.add(state)
    if position.is_file() and not episodes:
        write_json(position, {**read_json(position), "watch": {}, "tasks": {}})
        changed.add(position)
    if (folder / MARKER).is_file():
        changed |= {*folder.glob("rollout/*.parquet"), *folder.glob("**/*.jinja")}
        listed = read_json(folder / MARKER)["files"]
        kept = {name: one for name, one in listed.items() if folder / name not in changed}
        mark_complete(folder, kept)
    return text


def numbers(content: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a dictionary that are numbers, truth values or None."""
    return {
        masked(name): value for name, value in content.items() if value is None or isinstance(value, (bool, int, float))
    }


def _public_run(info: dict[str, Any]) -> dict[str, Any]:
    found = {name: masked(value) for name, value in info.items() if name in _RUN_FIELDS}
    found |= {name: public_path(found[name]) for name in ("model", "policy") if isinstance(found.get(name), str)}
    if isinstance(found.get("environment"), str):
        found["environment"] = describe_environment(info["environment"])["environment"]
    options = info.get("options")
    if isinstance(options, dict):
        found["options"] = public_options(options, public=options.get("public_values") or ())
    return masked(found)


def _rewrite_lines(path: Path, change: Any) -> None:
    """Rewrite a file of JSON lines; half a line of a killed run is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.dumps(change(json.loads(line))))
        except (ValueError, AttributeError):
            continue
    path.unlink()
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _masked_episode(row: dict[str, Any], text: Text) -> dict[str, Any]:
    """Mask the texts of an episode. Where something was masked, the token ids, which spell it, are left out."""
    masker = Masker()

    def texts(holder: dict[str, Any], as_json: tuple[str, ...], plain: tuple[str, ...]) -> dict[str, Any]:
        changed = {name: to_json(masker(json.loads(holder[name]))) for name in as_json if holder[name] is not None}
        changed |= {name: masker(holder[name]) for name in plain if holder[name] is not None}
        text.characters += sum(len(one) for one in changed.values())
        return {**holder, **changed}

    masked_row = texts(row, _JSON, _TEXTS)
    masked_row["turns"] = [
        texts(turn, ("info", "messages", "observation"), ("text", "fork")) if turn["observation_is_json"]
        else texts(turn, ("info", "messages"), ("text", "fork", "observation"))
        for turn in row["turns"]
    ]  # fmt: skip
    text.episodes += 1
    text.masked += masker.count
    if masker.count:
        text.touched += 1
        masked_row |= dict.fromkeys(_TOKENS)
    return masked_row
