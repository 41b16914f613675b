"""Reads the YAML files of the command line, within bounds, and rejects duplicate keys."""

from __future__ import annotations

import errno
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from agile_trainers.cli.errors import cut
from agile_trainers.imports import nearest

_BYTES = 1_000_000
_VALUES = 100_000
"""Values of a file, its aliases written out."""
_LEVELS = 50
_NUMBER = 1000
"""Characters of a value that is no text; the time to read a number grows with their square."""


class YAMLFileError(ValueError):
    """Raised when a file cannot be used; the message gives place and reason."""


class _Loader(yaml.SafeLoader):
    """A loader of bounded content that rejects duplicate keys, of which YAML silently keeps the last.

    Nodes are measured when they are composed, with everything that their aliases stand for: a few lines of aliases of
    aliases can stand for more values than fit in memory.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._measured: dict[yaml.Node, tuple[int, int]] = {}
        """Values and levels of a node."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        line, is_alias = self.peek_event().start_mark.line + 1, self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > _LEVELS:
            raise YAMLFileError(f"line {line}: values are nested in more than {_LEVELS} levels. Make the file flatter.")
        node = super().compose_node(parent, index)
        assert node is not None
        self._level -= 1
        if is_alias and node not in self._measured:
            raise YAMLFileError(f"line {line}: an alias stands for the value that holds it. Remove the alias.")
        if node not in self._measured:
            children = [self._measured[one] for one in _children(node)]
            values, levels = 1 + sum(one[0] for one in children), 1 + max((one[1] for one in children), default=0)
            if values > _VALUES or levels > _LEVELS:
                raise YAMLFileError(
                    f"line {line}: with its aliases written out, this holds {values:,} values in {levels} levels. At most "
                    f"{_VALUES:,} values and {_LEVELS} levels are read. Write the values out once, without aliases."
                )
            self._measured[node] = values, levels
        return node

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _NUMBER:
            raise YAMLFileError(
                f"line {node.start_mark.line + 1}: a number or date of {len(node.value):,} characters. At most {_NUMBER} "
                "are read. Put a text in quotation marks."
            )
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line, value = key.start_mark.line + 1, self.construct_object(key)
            if value in lines:
                raise YAMLFileError(
                    f"{cut(repr(value))} is given twice, in lines {lines[value]} and {line}. Keep one of them."
                )
            lines[value] = line
        return super().construct_mapping(node, deep)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


@contextmanager
def naming_place(where: object) -> Iterator[None]:
    """Name the file, or the place in it, before the message of an error that its values cause.

    Raises:
        YAMLFileError: For any error of a value, an import included.
    """
    try:
        yield
    except (ValueError, TypeError, ImportError) as error:
        raise YAMLFileError(f"{where}: {error}") from error


def read_yaml(path: str | Path) -> dict[Any, Any]:
    """Read a mapping from a YAML file.

    Args:
        path: The file, in UTF-8.

    Raises:
        YAMLFileError: If the file does not exist, is not YAML, is empty, is not a mapping, has duplicate keys, or holds more
            than a file of options does.
    """
    path = Path(path)
    try:
        content = yaml.load(_text(path), _Loader)
    except FileNotFoundError as error:
        there = [one.name for one in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(path.name, there, count=1) or ". Check the path."
        raise YAMLFileError(f"There is no file {path}{near}") from error
    except OSError as error:
        raise YAMLFileError(f"{path} cannot be read: {error.strerror}. Name a YAML file.") from error
    except YAMLFileError as error:
        raise YAMLFileError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = cut(str(getattr(error, "problem", error)))
        raise YAMLFileError(
            f"{path}{where}: this is not YAML: {problem}. Expected lines such as `max_steps: 100`."
        ) from error
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:  # PyYAML lets them through
        raise YAMLFileError(
            f"{path}: a value cannot be read: {cut(str(error))}. Put a text in quotation marks, and save as UTF-8."
        ) from error
    if isinstance(content, dict) and (odd := [key for key in content if not isinstance(key, str)]):
        raise YAMLFileError(f"{path}: {cut(repr(odd[0]))} is not the name of an option. Put names in quotation marks.")
    if not isinstance(content, dict):
        raise YAMLFileError(
            f"{path} holds {'nothing' if content is None else f'a {type(content).__name__}'}. Expected a mapping of names "
            "to values, in lines such as `max_steps: 100`."
        )
    return content


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    if (size := path.stat().st_size) > _BYTES:
        raise YAMLFileError(f"the file has {size:,} bytes. At most {_BYTES:,} are read. Name a YAML file of options.")
    return path.read_text(encoding="utf-8")
