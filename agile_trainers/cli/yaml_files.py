"""Reads the YAML files of the command line and rejects duplicate keys."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from agile_trainers.imports import nearest


class YAMLFileError(ValueError):
    """Raised when a file cannot be used; the message gives place and reason."""


class _UniqueKeys(yaml.SafeLoader):
    """A loader that rejects duplicate keys, of which YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise YAMLFileError(
                    f"{key.value!r} is given twice, in lines {lines[key.tag, key.value]} and {line}. Keep one of them."
                )
            lines[key.tag, key.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[Any, Any]:
    """Read a mapping from a YAML file.

    Args:
        path: The file, in UTF-8.

    Raises:
        YAMLFileError: If the file does not exist, is not YAML, is empty, is not a mapping, or has duplicate keys.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError as error:
        there = [one.name for one in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(path.name, there, count=1) or ". Check the path."
        raise YAMLFileError(f"There is no file {path}{near}") from error
    except OSError as error:
        raise YAMLFileError(f"{path} cannot be read: {error.strerror}. Name a YAML file.") from error
    except UnicodeDecodeError as error:
        raise YAMLFileError(
            f"{path} is not text in UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8."
        ) from error
    except YAMLFileError as error:
        raise YAMLFileError(f"{path}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise YAMLFileError(
            f"{path}{where}: this is not YAML: {error.problem}. Expected lines such as `max_steps: 100`."
        ) from error
    except yaml.YAMLError as error:
        raise YAMLFileError(f"{path} is not YAML: {error}. Expected lines such as `max_steps: 100`.") from error
    if content is None:
        raise YAMLFileError(f"{path} is empty. Expected lines such as `max_steps: 100`.")
    if not isinstance(content, dict):
        raise YAMLFileError(
            f"{path} holds a {type(content).__name__}. Expected a mapping of names to values, in lines such as "
            "`max_steps: 100`."
        )
    return content
