"""Defaults and public methods of AgileRL, read from the source of its installed wheel without importing it.

``python tests/agilerl_wheel.py`` writes them to ``tests/agilerl_2_58.json``, which the tests of docs/agilerl.md read;
``tests/test_agilerl_wheel.py`` compares that file with the wheel where `make test-agilerl` installed it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests/agilerl_2_58.json"
CLASSES = {"GRPO": "grpo", "REINFORCE": "reinforce_llm", "PPO": "ppo_llm"}


def wheel() -> Path | None:
    """Return the folder of the installed package, if it is installed."""
    return next(ROOT.glob(".venv-agilerl/lib/python3*/site-packages/agilerl"), None)


def read(package: Path) -> dict[str, Any]:
    """Return ``{"defaults": {algorithm or loop: {argument: default}}, "methods": [...], "optimizer": ...}``."""
    defaults = {
        name: _defaults(_method(_class(package / f"algorithms/{file}.py", name), "__init__"))
        for name, file in CLASSES.items()
    }
    loop = _tree(package / "training/llm/rollout.py")
    defaults["train_llm_rollout"] = _defaults(_function(loop.body, "train_llm_rollout"))
    defaults["CosineLRScheduleConfig"] = {
        node.target.id: ast.literal_eval(node.value)
        for node in _class(package / "utils/algo_utils.py", "CosineLRScheduleConfig").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    methods = {
        node.name
        for file, name in [("core/base", "LLMAlgorithm"), *((f, n) for n, f in CLASSES.items())]
        for node in _class(package / f"algorithms/{file}.py", name).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    made = ast.unparse(_function(_tree(package / "utils/llm_utils.py").body, "make_llm_optimizer"))
    # No option sets weight decay, betas or epsilon: they are those of torch.optim.AdamW.
    return {
        "defaults": defaults,
        "methods": sorted(methods),
        "optimizer": "AdamW" if "optimizer_cls=AdamW" in made and "weight_decay" not in made else made,
    }


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class(path: Path, name: str) -> ast.ClassDef:
    return next(node for node in _tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)


def _function(body: list[ast.stmt], name: str) -> ast.FunctionDef:
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)


def _method(of: ast.ClassDef, name: str) -> ast.FunctionDef:
    return _function(of.body, name)


def _defaults(function: ast.FunctionDef) -> dict[str, Any]:
    """Return the defaults of a function's arguments; those without one are ``"required"``."""
    names = [one.arg for one in function.args.args if one.arg != "self"]
    values = [ast.literal_eval(one) for one in function.args.defaults]
    return dict(zip(names, ["required"] * (len(names) - len(values)) + values, strict=True))


if __name__ == "__main__":
    package = wheel()
    assert package is not None, "AgileRL is not installed; run `make test-agilerl`"
    RECORDED.write_text(json.dumps(read(package), indent=1) + "\n", encoding="utf-8")
