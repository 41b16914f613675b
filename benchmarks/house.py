"""Counts what makes the package hard to read, side by side for several commits, as one table in Markdown.

    python benchmarks/house.py 6476772 main

All numbers are of ``agile_trainers/``. A line of code has a token that is no comment and no docstring. An arrow is a pair of
files of which one imports the other (inside a function too) or names it in a string. A circle is a set of files that reach
each other by imports.

Options and rows are traced: a process with the commit's code makes a trainer and trains one step of replaced groups. A
*stop* of the options is a function of ours that gets the configuration as an argument before the first token is sampled; a
*return* hands it back, or an object that holds it as ``args``. Those of a row are functions that get or return it, or its
episode, alone or in a list, during the whole step. A *callback* is a function in a file that is already on the stack, called
from another file of ours. ``self`` is no argument here: reads of ``self.args`` are no stops.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[1]
TRAINING = {"trainers", "config", "step", "algorithms", "monitor"}
"""Folders in which `engine` is the one that plays episodes, not vLLM's."""
NAMED = ("up", "stops", "row stops", "callbacks")
"""Lists behind the counts, for `--names`."""
NO_CODE = {"NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "COMMENT"}
PRAGMA = re.compile(r"# *(fmt|noqa|type|ruff|-{5})")


def _text(node: ast.AST) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def code_and_comments(text: str, tree: ast.AST) -> tuple[int, int]:
    """Count the lines of code, and those that hold a comment alone; pragmas and rulers are neither."""
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(_text(node.value), str))
    docs = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    code, comments = set[int](), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
        elif token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            comments += not PRAGMA.match(token.string)
    return len(code - docs), comments


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules and names that a file imports: each with ``import``, ``typing`` (for type checkers) or ``string``."""
    checks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    typing = {id(node) for check in checks for node in ast.walk(check)}
    for node in ast.walk(tree):
        kind = "typing" if id(node) in typing else "import"
        if isinstance(node, ast.Import):
            yield from ((alias.name, kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", kind) for alias in node.names)
        elif re.fullmatch(r"agile_trainers(\.\w+)+(:\w+)?", str(_text(node))):
            yield str(_text(node)).partition(":")[0], "string"


def file_of(name: str, files: Any) -> str | None:
    """Return the file of a module, or of the module that a name is in."""
    first, *parts = name.split(".")
    while first == "agile_trainers" and parts:
        for file in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
            if file in files:
                return file
        parts.pop()
    return None


def circles(names: list[str], arrows: set[tuple[str, str]]) -> str:
    """Count strongly connected sets of at least two files."""
    graph = np.zeros((len(names), len(names)))
    for a, b in arrows:
        graph[names.index(a), names.index(b)] = 1
    sizes = Counter(connected_components(graph, connection="strong")[1]).values()
    return f"{sum(size > 1 for size in sizes)} ({sum(size for size in sizes if size > 1)} files)"


def takes_trainer(node: ast.AST) -> bool:
    """Return whether a function has a parameter named or annotated as a trainer; a class of trainers is none."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    kinds = [(one.arg, ast.unparse(one.annotation).strip("\"'") if one.annotation else "") for one in given]
    by_name = any(re.search(r"(^|_)trainer$", name) and "type[" not in kind for name, kind in kinds)
    return by_name or any(re.fullmatch(r"(\w+\.)*\w*Trainer( \| None)?", kind) for _, kind in kinds)


def branches(tree: ast.AST, word: str) -> int:
    """Count comparisons of a name, or of an attribute of this name, with None."""
    found = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return sum(bool(re.fullmatch(rf"(.*\.)?{word} is (not )?None", text)) for text in found)


def own_options(trees: list[ast.Module]) -> set[str]:
    """Return the fields of our configurations that TRL's ``GRPOConfig`` does not have."""
    from trl import GRPOConfig

    given = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    described = (one for one in given if isinstance(one.value, ast.Call) and ast.unparse(one.value.func) == "option")
    return {ast.unparse(one.target) for one in described} - {one.name for one in fields(GRPOConfig)}


def count(folder: Path) -> dict[str, Any]:
    """Count all that is in the files."""
    package = folder / "agile_trainers"
    texts = {str(path.relative_to(package)): path.read_text("utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: code_and_comments(text, trees[name]) for name, text in texts.items()}
    room = {name: name.partition("/")[0].removesuffix(".py") for name in texts}
    arrows: dict[str, set[tuple[str, str]]] = {"import": set(), "typing": set(), "string": set()}
    for name, tree in trees.items():
        for imported, kind in imports(tree):
            if (file := file_of(imported, texts)) not in (None, name):
                arrows[kind].add((name, str(file)))
    every = set.union(*arrows.values())
    rules = (folder / "AGENTS.md").read_text("utf-8")
    (order,) = re.findall(r"^ *`((?:[\w, ]+ <- )+[\w, ]+)`", rules, flags=re.M)
    level = {part: n for n, parts in enumerate(order.split(" <- ")) for part in parts.split(", ")}
    # The package's own `__init__` is the front door, above everything.
    up = [(a, b) for a, b in every if level.get(room[a], 99) < level.get(room[b], 99)]
    size, largest = max(
        (sum(Path(n).parent == parent for n in texts), str(parent)) for parent in map(Path, room.values())
    )
    takers = {name: sum(map(takes_trainer, ast.walk(tree))) for name, tree in trees.items()}
    by_room = Counter[str]()
    for name, (code, _) in lines.items():
        by_room[f"{room[name]}/" if "/" in name else "files beside them"] += code
    training = [tree for name, tree in trees.items() if room[name] in TRAINING]
    return {
        "lines of code": sum(code for code, _ in lines.values()),
        "rooms": by_room,
        "comment lines": sum(comments for _, comments in lines.values()),
        "files": len(texts),
        "files in the largest folder": f"{size} ({largest}/)",
        "arrows between files": len(every),
        "arrows between folders": len({(room[a], room[b]) for a, b in every if room[a] != room[b]}),
        "arrows up, by AGENTS.md's order": len(up),
        "circles of files": circles([*texts], arrows["import"]),
        "circles, imports for type checkers too": circles([*texts], arrows["import"] | arrows["typing"]),
        "functions that take a trainer": sum(takers.values()),
        "files with such functions": sum(map(bool, takers.values())),
        "branches on `engine` in training": sum(branches(tree, "engine") for tree in training),
        "branches on `critic` in training": sum(branches(tree, "critic") for tree in training),
        "options of our own": len(own_options([*trees.values()])),
        "up": [f"{a} -> {b}" for a, b in sorted(up)],
    }


def trace() -> dict[str, Any]:
    """Count the stops and returns of the options up to the first token, and the callbacks of one step."""
    import same_weights
    from transformers import TrainingArguments

    home = str(Path(sys.modules["agile_trainers"].__file__ or "").parent) + "/"
    found: dict[str, set[str]] = {"stops": set(), "row stops": set(), "callbacks": set()}
    returns: dict[str, set[object]] = {"options": set(), "rows": set()}
    sampled, stack = False, list[str]()

    def is_options(value: Any) -> bool:
        holder = is_dataclass(value) and not isinstance(value, TrainingArguments)
        return isinstance(getattr(value, "args", None) if holder else value, TrainingArguments)

    def is_row(value: Any) -> bool:
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        value = getattr(value, "options", None) if is_dataclass(value) else value
        return isinstance(value, dict) and "number" in value  # the data set's column

    def watch(frame: FrameType, event: str, value: Any) -> None:
        nonlocal sampled
        if event == "call":
            code, back = frame.f_code, frame.f_back
            file = code.co_filename.removeprefix(home) if code.co_filename.startswith(home) else ""
            name = f"{file}: {code.co_qualname}"
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if file else ()
            given = [frame.f_locals.get(one) for one in names if one not in ("self", "cls")]
            if not sampled and any(isinstance(one, TrainingArguments) for one in given):
                found["stops"].add(name)
            if any(map(is_row, given)):
                found["row stops"].add(name)
            ours = back is not None and back.f_code.co_filename.startswith(home)
            if file in stack and ours and file and stack[-1] != file:
                found["callbacks"].add(name)
            sampled |= code.co_name == "forward" and any("rollout/generators" in one for one in stack)
            stack.append(file)
        elif event == "return" and stack and stack.pop():
            if not sampled and is_options(value):
                returns["options"].add(frame.f_code)
            if is_row(value):
                returns["rows"].add(frame.f_code)

    with tempfile.TemporaryDirectory() as folder:
        model = same_weights.make_embedded_model(Path(folder) / "model")
        sys.setprofile(watch)
        same_weights.make("replaced groups", model, Path(folder) / "run", max_steps=1).train()
        sys.setprofile(None)
    assert sampled, "no token was sampled"
    return {
        "stops of the options up to the first token": len(found["stops"]),
        "files of these stops": len({stop.partition(":")[0] for stop in found["stops"]}),
        "functions that return them": len(returns["options"]),
        "stops of a row in one step": len(found["row stops"]),
        "files of these stops of a row": len({stop.partition(":")[0] for stop in found["row stops"]}),
        "functions that return it": len(returns["rows"]),
        "callbacks of one step": len(found["callbacks"]),
        **{kind: sorted(names) for kind, names in found.items()},
    }


def column(revision: str, folder: Path) -> dict[str, Any]:
    """Count one commit, in a copy of its tree."""
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--trace"]
    traced = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, check=True, text=True).stdout
    return count(folder) | json.loads(traced.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=["HEAD"], help="commits to count, a column each")
    parser.add_argument("--names", action="store_true", help="also list each commit's arrows up, stops and callbacks")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        return print(json.dumps(trace()))
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        columns = {name: column(name, Path(folder) / str(n)) for n, name in enumerate(options.revisions)}
    print("| | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    first, *_ = columns.values()
    for row in (row for row, value in first.items() if not isinstance(value, list)):
        shown = [row] if row != "rooms" else sorted({room for one in columns.values() for room in one["rooms"]})
        for name in shown:
            found = (one[row] if row != "rooms" else one["rooms"].get(name, "") for one in columns.values())
            print(f"| {'&nbsp;&nbsp;' * (row == 'rooms')}{name} |", " | ".join(map(str, found)), "|")
    for name, one in columns.items() if options.names else ():
        print(f"\n{name}:", *(f"- {kind}: {it}" for kind in NAMED for it in one[kind]), sep="\n")


if __name__ == "__main__":
    main()
