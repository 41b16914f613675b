"""Every import of the package is a declared dependency, and private names of other libraries are read for a reason only."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sources import forget, nodes

from agile_trainers.cli.machine import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("agile_trainers", "environments") for path in (ROOT / folder).rglob("*.py"))
IMPORTS = (ast.Import, ast.ImportFrom, ast.Call)
OURS = {"agile_trainers", "agile_environments"}
DISTRIBUTIONS = {"gem": ["gem-llm"]} | packages_distributions()
"""Module to the distributions that hold it. One that is not installed here is taken for a distribution of its name."""
LOADED_WITH_AN_EXTRA = {
    "agile_trainers/evaluation/metrics/answer_match/answer_match.py": "eval",
    "agile_trainers/evaluation/metrics/episode_return/episode_return.py": "eval",
    "agile_trainers/evaluation/metrics/pass_at_k/pass_at_k.py": "eval",
    "agile_trainers/evaluation/metrics/success/success.py": "eval",
    "agile_trainers/rollout/generators/vllm/engine.py": "vllm",
    "agile_trainers/rollout/generators/vllm/server.py": "vllm",
    "agile_trainers/rollout/generators/vllm/servers.py": "vllm",
    "agile_trainers/sampling/vllm_colocated.py": "vllm",
}
"""Files that are imported only where the packages of an extra are installed; all others import these in functions."""
PRIVATE = {
    "adapters/roles.py": {
        "_active_adapter": "PEFT's setter changes requires_grad",
        "_adapters": "PEFT has no public names of the adapters of a wrapper that is no tuner layer",
    },
    "adapters/sharding.py": {
        "_fsdp_param_groups": "torch has no public reader of where FSDP2 reshards",
        "_get_fsdp_state": "the same",
    },
    "checkpoints/resuming.py": {"_last_lr": "torch has a reader (get_last_lr) and no setter"},
    "cli/check/tracing.py": {
        "_subclasses": "FakeTensorMode has no public module",
        "_python_dispatch": "TorchDispatchMode has no public module",
        "_pytree": "torch.utils.pytree is younger than the oldest torch",
        "_cdata": "tells storages without data apart, whose data_ptr is 0",
    },
    "cli/eval/command.py": {"_actions": "argparse has no public list of options"},
    "cli/train.py": {
        "_actions": "argparse has no public list of options",
        "_run_exitfuncs": "nothing public runs what atexit holds before another program takes the place",
    },
    "envs/libraries/gem_grader.py": {"_sympy_parse": "evaluates a model's text, which is checked first"},
    "envs/libraries/gem.py": {"_local_step": "runs a model's program, which is isolated"},
    "evaluation/modules.py": {"_feature_names": "evaluate has no public form for modules of several signatures"},
    "monitor/nonfinite.py": {"_is_overflow": "accelerate's step_was_skipped has no setter"},
    "packing/attention.py": {
        "_dynamo": "the error of too many compilations has no public module",
        "_scaled_dot_product_flash_attention_for_cpu": "returns the logsumexp, which the public function drops",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "the same",
    },
    "populations/members.py": {"_shared_state": "accelerate has no public reader of whether it has begun"},
    "rollout/generators/vllm/engine.py": {
        "_finalizer": "vLLM's would destroy the process groups of others, and has no switch"
    },
    "rollout/process_environment.py": {"_run_exitfuncs": "multiprocessing's processes do not run them"},
    "rollout/server_socket.py": {
        "_forkserver": "multiprocessing does not tell the socket of its server",
        "_forkserver_address": "the same",
    },
    "step/dropout.py": {"_DropoutNd": "the base class of torch's dropout modules"},
    "step/token_batches.py": {"_set_sync_gradients": "accelerate's sync_gradients has no setter that DDP's hooks see"},
}
"""Private names of libraries other than TRL and transformers that a file reads, each with the reason."""
THEIRS = r"_(n_gpu|name_or_path|commit_hash|attn_implementation|from_config|set_gradient_checkpointing|is_stateful|" \
    r"supports_attention_backend|supports_sdpa|VALID_DICT_FIELDS|name|paper)"  # fmt: skip
"""Private names of transformers' models, configurations and arguments, and of TRL's; test_package.py holds the trainers'."""


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    yield
    forget()


@cache
def requirements() -> dict[str, set[str]]:
    """Distributions that pyproject.toml names: under ``""`` those of the package itself, else those of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {canonicalize_name(Requirement(one).name) for one in lines} for extra, lines in named.items()}


@cache
def foreign_imports(path: Path) -> list[tuple[str, bool]]:
    """Distributions of other libraries that a file imports, and whether it does so only inside functions."""
    found, functions = [], [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function) if isinstance(node, IMPORTS)}
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
        for module in {name.partition(".")[0] for name in names} - OURS - sys.stdlib_module_names:
            found.append((min(map(canonicalize_name, DISTRIBUTIONS.get(module, [module]))), node in inside))
    return found


def undeclared(path: Path) -> list[str]:
    """What a file imports and pyproject.toml does not name where it would have to."""
    declared, name = requirements(), path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    extra = LOADED_WITH_AN_EXTRA.get(name, "")
    needed = declared[""] | declared[extra]
    optional = set.union(*(names for other, names in declared.items() if other != "dev"))
    return [
        f"{name}: {found}"
        for found, in_function in foreign_imports(path)
        if found not in (optional if in_function else needed)
    ]


def test_every_import_is_a_declared_dependency() -> None:
    assert [one for path in FILES for one in undeclared(path)] == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("import httpx2", "httpx2"),
        ("from requests import ConnectionError", "requests"),  # of an extra, and needed without it
        ("def ask():\n    import pytest", "pytest"),  # of the extra for development
        ("def ask():\n    return __import__('importlib').import_module('flask.app')", "flask"),
        ("if TYPE_CHECKING:\n    import attr", "attrs"),
    ],
)
def test_a_planted_import_is_found(planted: str, found: str, tmp_path: Path) -> None:
    (file := tmp_path / "planted.py").write_text(f"import torch\nfrom pathlib import Path\n{planted}\n")
    assert undeclared(file) == [f"planted.py: {found}"]


def test_every_requirement_is_imported() -> None:
    imported = {found for path in FILES for found, _ in foreign_imports(path)}
    assert requirements()[""] <= imported


def test_errors_name_the_extras_that_imports_need() -> None:
    declared = dict(requirements())
    core, optional = declared.pop(""), {found for path in FILES for found, _ in foreign_imports(path)}
    texts = "".join(path.read_text(encoding="utf-8") for path in FILES)
    named = {*re.findall(r"agile-trainers\[(\w+)\]", texts), *EXTRAS.values()}
    assert named <= declared.keys()
    assert optional - core <= set.union(*(declared[extra] for extra in named))


# ------------------------------------------------------------------------------------------------------ private names


def private_names(path: Path, ours: set[str]) -> set[str]:
    """Private names that a file imports, or reads of other objects than its own."""
    found = set[str]()
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("trl", "transformers")):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            names = [node.attr]
        found |= {name for name in names if re.match("_[^_]", name)}
    return {name for name in found - ours - {"_exit"} if not re.fullmatch(THEIRS, name)}


def own_names() -> set[str]:
    """Private names that classes, functions and modules of the package define."""
    found = set[str]()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def test_private_names_of_other_libraries() -> None:
    """The trainers' own names of TRL and ``Trainer`` aside; an entry of the table that is read no more is to be deleted."""
    ours, found = own_names(), {}
    for path in FILES:
        names = private_names(path, ours)
        if names and path.name not in ("trainer.py", "manual_loop.py", "rollout_log.py", "vllm_server.py"):
            found[path.relative_to(ROOT / "agile_trainers").as_posix()] = names
    assert found == {file: set(names) for file, names in PRIVATE.items()}
