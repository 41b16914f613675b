"""Reads the rows of supervised stages: columns that TRL's trainers know, and others that are usual."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging

from agile_trainers.cli.chain.stages import SUPERVISED, Pipeline, Stage
from agile_trainers.cli.run_files import stage_rows
from agile_trainers.cli.yaml_files import YAMLFileError

logger = logging.get_logger(__name__)

_PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"), ("question", "response"),
    ("prompt", "response"), ("query", "response"), ("input", "output"),
)  # fmt: skip
"""Columns of a prompt and its answer that are read as ``prompt`` and ``completion``."""
_EXPECTED = {
    "sft": "`messages` (a conversation), `prompt` and `completion`, or `text`. Of others, "
    + ", ".join(f"`{prompt}` and `{answer}`" for prompt, answer in _PAIRS)
    + " are read too, with `input` beside `instruction`",
    "dpo": "`chosen` and `rejected`, and `prompt` where these are only the answers",
}


def check_rows(pipeline: Pipeline, finished: Mapping[str, bool]) -> None:
    """Check the columns of each supervised stage whose rows are in a file or made by a function, and warn of plain text.

    Args:
        pipeline: The chain.
        finished: Names of stages to whether they have finished; these need no rows.

    Raises:
        YAMLFileError: If a stage's trainer cannot read its columns.
    """
    for number, stage in enumerate(pipeline.stages):
        named = str(stage.dataset)
        local = Path(named).exists() or ":" in named  # the Hub is asked when the stage begins
        if stage.algorithm not in SUPERVISED or finished.get(stage.name) or not local:
            continue
        first = _first(stage, stage_rows(named, stage.dataset_args))
        plays = [later.name for later in pipeline.stages[number + 1 :] if later.algorithm not in SUPERVISED]
        if plays and _is_plain(stage, first) and has_template(pipeline.model, beside=first):
            logger.warning(
                f"Stage {stage.name!r} trains on plain text ({', '.join(first)}), but stage {plays[0]!r} plays in the chat "
                "template of the model: what is learned may not show there. Give conversations: `messages`, or `prompt` and "
                "`completion` as lists of messages."
            )


def supervised_rows(stage: Stage, model: str) -> Any:
    """Load the rows of a stage; a prompt and its answer under other names become ``prompt`` and ``completion``.

    These are messages if the model has a chat template, else text.

    Raises:
        YAMLFileError: If the stage's trainer cannot read the columns.
    """
    rows = stage_rows(str(stage.dataset), stage.dataset_args)
    first = _first(stage, rows)
    pair = _pair(stage, first)
    if pair is None:
        return rows
    chat = has_template(model)

    def of_trl(row: dict[str, Any]) -> dict[str, Any]:
        asked = [str(row[pair[0]]), *([str(row["input"])] if pair[0] == "instruction" and row.get("input") else [])]
        prompt, answer = "\n\n".join(asked), str(row[pair[1]])
        if not chat:
            return {"prompt": f"{prompt}\n", "completion": answer}
        return {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": answer}],
        }

    return rows.map(of_trl, remove_columns=list(first))


def has_template(model: str, beside: Mapping[str, Any] | None = None) -> bool:
    """Return whether a model's tokenizer has a chat template; True if it cannot be read yet.

    Args:
        model: Folder or Hub id.
        beside: A row; False if its text is written in the template already, as special tokens in it tell.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return True
    texts = [text for text in (beside or {}).values() if isinstance(text, str)]
    written = any(token in text for text in texts for token in tokenizer.all_special_tokens)
    return tokenizer.chat_template is not None and not written


def _first(stage: Stage, rows: Any) -> dict[str, Any]:
    """Return the first row, if the stage's trainer can read it."""
    first: dict[str, Any] | None = next(iter(rows), None)
    where = f"stage {stage.name!r}: dataset {stage.dataset}"
    if first is None:
        raise YAMLFileError(f"{where} has no rows.")
    if not _is_known(stage, first) and _pair(stage, first) is None:
        raise YAMLFileError(
            f"{where} has the columns {', '.join(map(repr, first))}; {stage.algorithm} expects {_EXPECTED[stage.algorithm]}."
        )
    return first


def _is_known(stage: Stage, row: Mapping[str, Any]) -> bool:
    if stage.algorithm == "dpo":
        return {"chosen", "rejected"} <= row.keys()
    text = getattr(stage.config, "dataset_text_field", "text")
    return bool({"messages", "conversations", "input_ids", text} & row.keys()) or {"prompt", "completion"} <= row.keys()


def _pair(stage: Stage, row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the columns of a prompt and its answer, if they have other names than TRL's."""
    if stage.algorithm == "dpo" or _is_known(stage, row):
        return None
    return next((pair for pair in _PAIRS if set(pair) <= row.keys()), None)


def _is_plain(stage: Stage, row: Mapping[str, Any]) -> bool:
    """Return whether a row is text, not messages."""
    if _pair(stage, row) is not None:
        return False
    return not any(isinstance(row.get(name), list) for name in ("messages", "conversations", "completion", "chosen"))
