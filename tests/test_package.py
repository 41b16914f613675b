"""The package as a whole: what may import what, who overrides what, and how heavy the core is. The wheel: test_wheel.py."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import requires
from pathlib import Path

import pytest
import trl
from mutations import MUTATIONS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sources import forget, nodes, tree
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

import agile_trainers
from agile_trainers import MultiTurnTrainer, trainers
from agile_trainers.cli.chain import command as chain
from agile_trainers.trainers.registry import ALGORITHMS, find_algorithm

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "agile_trainers"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULE = re.compile(r"agile_(trainers|environments)(\.\w+)*\.?(:\w+)?")
"""A module of ours in a string: its name, the beginning of one, or ``module:Name``."""
IMPORTING = ("import_module", "__import__", "resolve_name")
"""Functions that import by a name."""
IMPORTS_WHAT_IT_IS_TOLD = {
    "imports.py", "cli/environments.py", "envs/context.py", "envs/libraries/gem.py",
    "envs/libraries/gymnasium.py", "envs/libraries/textarena.py",
    "envs/libraries/__init__.py",
}  # fmt: skip
"""Files that import by a name from elsewhere: of the user, of a ready task, or of the library that the file adapts."""


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    yield
    forget()


# ------------------------------------------------------------------------------------------------------- import order


def order_of_imports() -> list[set[str]]:
    """The parts of the package that AGENTS.md names, from the lowest level to the highest."""
    rules = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ *`((?:[\w, ]+ <- )+[\w, ]+)`", rules, flags=re.M)
    return [set(level.split(", ")) for level in line.split(" <- ")]


LEVELS = order_of_imports()


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


PARTS = {part_of(path) for path in FILES} - {"__init__"}


def level_of(part: str) -> int:
    return next(number for number, level in enumerate(LEVELS) if part in level)


def for_types(path: Path) -> set[ast.AST]:
    """The nodes of a file that only type checkers read."""
    blocks = (node for node in nodes(path) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


@cache
def imported(path: Path, *, at_run_time: bool = False) -> frozenset[str]:
    """Modules that a file imports anywhere in it, also inside functions, or names in full in a string."""
    names = set[str]()
    package = (path.relative_to(ROOT) if path.is_relative_to(PACKAGE) else path).with_suffix("").parts[:-1]
    left_out = for_types(path) if at_run_time else set()
    for node in nodes(path):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((*package[: len(package) - node.level + 1], node.module or "") if node.level else ())
            module = (base.rstrip(".") or node.module or "") if node.level else node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            names.add(str(node.value).rstrip(".").partition(":")[0])
    return frozenset(names)


def parts_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imported(path))
    return {name[1] for name in names if name[0] == "agile_trainers" and len(name) > 1 and name[1] in PARTS}


def test_the_order_of_imports_names_every_part_once() -> None:
    named = [part for level in LEVELS for part in level]
    assert sorted(named) == sorted(PARTS)


def test_imports_go_the_way_that_the_rules_state() -> None:
    """Lazy imports and names in strings included. Parts of one level do not import each other."""
    lower = {part: {part}.union(*LEVELS[: level_of(part)]) for level in LEVELS for part in level}
    files = [path for path in FILES if path != PACKAGE / "__init__.py"]
    wrong = {str(path.relative_to(PACKAGE)): parts_imported(path) - lower[part_of(path)] for path in files}
    assert {file: parts for file, parts in wrong.items() if parts} == {}


FOR_TYPES = {
    ("agile_trainers.rollout.generators.vllm.servers", "agile_trainers.rollout.generators.vllm.server"),
    ("agile_trainers.trainers.manual_loop", "agile_trainers.trainers.trainer"),
}
"""Files that import a file above them, for annotations alone; it may only shrink."""


def files_imported(path: Path, *, at_run_time: bool) -> set[str]:
    """The files of the package that a file imports, each as its module."""
    found = set[str]()
    for name in imported(path, at_run_time=at_run_time):
        while name not in MODULES and name:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", "agile_trainers"}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in turn; none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other() -> None:
    """Inside a part too. Imports in functions, names in strings and imports for annotations count."""
    at_run_time = {module_of(path): files_imported(path, at_run_time=True) for path in FILES}
    assert circle(at_run_time) == []
    every = {module_of(path): files_imported(path, at_run_time=False) for path in FILES}
    downward = {name: others - {there for here, there in FOR_TYPES if here == name} for name, others in every.items()}
    assert circle(downward) == []
    for name, upward in FOR_TYPES:  # each is needed
        assert circle({**downward, name: downward[name] | (every[name] & {upward})})


@pytest.mark.parametrize("planted", [
    "from agile_trainers.envs.agent import Agent",
    "def late() -> None:\n    from agile_trainers.envs import agent",
    "import agile_trainers.envs.agent as agents",
    "NAME = 'agile_trainers.envs.agent:Agent'",
])  # fmt: skip
def test_a_planted_circle_is_found(planted: str, tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(f"{planted}\n", encoding="utf-8")
    imports = {module_of(path): files_imported(path, at_run_time=True) for path in FILES}
    imports["agile_trainers.envs.agent"] |= files_imported(file, at_run_time=True)
    assert set(circle(imports)) == {"agile_trainers.envs.agent"}


def test_objectives_import_nothing_of_the_package() -> None:
    assert not any(parts_imported(path) - {"objectives"} for path in FILES if part_of(path) == "objectives")


def test_a_module_is_imported_by_name_only_where_the_name_is_given() -> None:
    """Everywhere else the name is written out, at least its beginning, so that the order above sees it."""
    found = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTING):
                (name,) = node.args
                if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.FormattedValue):
                    assert ast.unparse(name.values[0].value) == "__name__", path
                elif not isinstance(name, (ast.Constant, ast.JoinedStr)):
                    found.add(str(path.relative_to(PACKAGE)))
    assert found == IMPORTS_WHAT_IT_IS_TOLD


def test_ready_tasks_are_above_environments_and_asked_for_in_one_place() -> None:
    """The one way up: the registry looks the ready tasks up when an id begins with ``agile:``."""
    users = {str(path.relative_to(PACKAGE)) for path in FILES if any("agile_environments" in n for n in imported(path))}
    assert {user for user in users if not user.startswith("cli/")} == {"envs/registry.py"}
    registry = tree(PACKAGE / "envs/registry.py")
    assert not any("agile_environments" in (getattr(node, "module", "") or "") for node in registry.body)
    below = {part for level in LEVELS[: level_of("envs") + 1] for part in level}
    for path in (ROOT / "environments").rglob("*.py"):
        assert parts_imported(path) <= below, path


def test_vllm_is_imported_by_two_files() -> None:
    users = {path for path in FILES if any(name.split(".")[0] == "vllm" for name in imported(path))}
    assert {str(path.relative_to(PACKAGE)) for path in users} == {
        "rollout/generators/vllm/engine.py", "sampling/vllm_colocated.py",
    }  # fmt: skip


def test_aiohttp_is_imported_by_one_file() -> None:
    users = [path for path in FILES if any(name.split(".")[0] == "aiohttp" for name in imported(path))]
    assert [str(path.relative_to(PACKAGE)) for path in users] == ["rollout/agents/server.py"]
    for path in (PACKAGE / "rollout/agents/dialects").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"asyncio", "socket", "threading", "os", "time"}


def test_every_rule_names_a_test_that_exists_or_is_taste() -> None:
    rules = (ROOT / "AGENTS.md").read_text(encoding="utf-8").split("## Rules")[1].split("\n## ")[0]
    bullets = re.split(r"^- ", rules, flags=re.M)[1:]
    assert len(bullets) > 10
    for bullet in bullets:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", bullet)
        assert tests or "(taste)" in bullet, bullet
        for file, name in tests:
            assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_functions_are_short() -> None:
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or 0) - node.lineno < 100, f"{path.relative_to(ROOT)}: {node.name}"


SAME_INTERFACE = {
    "cli/**/*.py": {"main", "make_parser"},
    "envs/libraries/*.py": {"knows", "listed", "make_factory"},
    "rollout/agents/dialects/*.py": {"read", "write", "events"},
}
"""Functions that every file of a kind defines, by which others call it: commands, adapters of libraries, dialects."""
ELSEWHERE = {
    "main": {"envs/isolation/process_tree.py"},  # a program of its own
    "prepare": {"envs/libraries/scorers.py", "envs/libraries/gem_grader.py", "envs/questions/mathematics.py"},
}
"""Other names defined in several files, and these: a worker calls ``prepare`` of the file whose functions it runs."""


def test_a_public_name_is_defined_once() -> None:
    """Classes and functions outside classes: a name that is found is the one that was meant."""
    allowed = {(str(path.relative_to(PACKAGE)), name)
               for pattern, names in SAME_INTERFACE.items() for path in PACKAGE.glob(pattern) for name in names}  # fmt: skip
    allowed |= {(file, name) for name, files in ELSEWHERE.items() for file in files}
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: set(files) for name, files in homes.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if not all((file, name) in allowed for file in files)} == {}
    assert ELSEWHERE.keys() <= twice.keys()


# -------------------------------------------------------------------------------------------------- the seam to TRL

OURS = [*map(find_algorithm, ALGORITHMS), chain._SFT, chain._DPO]


OVERRIDDEN = {
    "trainers/trainer.py": {
        "_get_train_sampler", "_run_epoch", "_prepare_inputs", "_generate_and_score_completions", "_compute_loss",
        "_get_per_token_logps_and_entropies", "_get_grad_norm", "_maybe_log_save_evaluate", "_save_checkpoint",
        "_get_output_dir", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model",
        "_push_from_checkpoint", "_finish_current_push",
    },
    "sampling/vllm_colocated.py": {"_init_vllm"},
}  # fmt: skip
"""Private methods of TRL and transformers that our classes override, by file."""
READ = {
    "algorithms/grpo.py": {"_paper": 1},
    "cli/check/memory_plan.py": {"_CHUNKED_LOGPROB_CHUNK_SIZE": 1},
    "sampling/vllm_server.py": {"_weight_metadata": 1},
    "trainers/manual_loop.py": {
        "_step": 4, "_metrics": 2, "_load_rng_state": 2, "_finalize_training": 1, "_run_epoch": 1,
    },
}  # fmt: skip
"""Private names of TRL's and transformers' classes that a file reads of other objects, and how often; it may only shrink."""
Class = tuple[str, str]
"""Module and name of a class."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


@cache
def classes() -> dict[Class, tuple[Path, ast.ClassDef, list[Class]]]:
    """The package's classes and their bases, read from the source: not every file can be imported without vLLM."""
    found = {}
    for path in FILES:
        home = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                bases = [home.get(name, (module_of(path), name)) for name in map(ast.unparse, node.bases)]
                found[module_of(path), node.name] = path, node, bases
    return found


def their_bases(one: Class) -> Iterator[type]:
    for base in classes()[one][2]:
        if base in classes():
            yield from their_bases(base)
        elif base[0].partition(".")[0] in ("trl", "transformers"):
            yield pkgutil.resolve_name(":".join(base))


def test_which_files_override_private_methods_of_trl_and_transformers() -> None:
    found: dict[str, set[str]] = {}
    for one, (path, node, _) in classes().items():
        private = {
            item.name for item in node.body if isinstance(item, ast.FunctionDef) and re.match("_[^_]", item.name)
        }
        if names := {name for name in private if any(hasattr(base, name) for base in their_bases(one))}:
            found.setdefault(str(path.relative_to(PACKAGE)), set()).update(names)
    assert found == OVERRIDDEN


def test_public_methods_of_trainer_are_overridden_there_and_in_chains() -> None:
    """A chain's SFT and DPO take the pickled arguments out of what is saved, and push named files alone."""
    overridden = {}
    for trainer in OURS:
        theirs = [kind for kind in trainer.__mro__ if not kind.__module__.startswith("agile_trainers")]
        for kind in set(trainer.__mro__) - set(theirs):
            public = {name for name, value in vars(kind).items() if callable(value) and name[0] != "_"}
            if names := {name for name in public if any(name in vars(one) for one in theirs)}:
                overridden[kind.__name__] = names
    assert set(overridden) == {"MultiTurnTrainer", "_WithoutPickle"}
    assert overridden["_WithoutPickle"] == {"save_model", "init_hf_repo", "push_to_hub"}


@pytest.mark.parametrize("trainer", OURS, ids=lambda trainer: trainer.__name__)
def test_at_most_four_classes_of_ours_in_the_method_order(trainer: type) -> None:
    assert sum(kind.__module__.startswith("agile_trainers") for kind in trainer.__mro__) <= 4


@cache
def private_names(kind: type) -> set[str]:
    """Names with one underscore that a class's source defines, declares or sets on ``self``."""
    found = {*vars(kind), *inspect.get_annotations(kind)}
    for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return {name for name in found if re.match("_[^_]", name)}


def test_private_names_of_trl_that_other_files_read() -> None:
    """The seam's own file aside; a table entry that is read less often is to be lowered, one that is gone to be deleted."""
    kinds = [*trl.GRPOTrainer.__mro__[:-1], VLLMGeneration, VLLMClient]
    theirs = {name for kind in kinds for name in private_names(kind)}
    found: dict[str, Counter[str]] = {}
    for path in FILES:
        names = Counter[str]()
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in theirs:
                names[node.attr] += ast.unparse(node.value) not in ("self", "cls")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("trl", "transformers")):
                names.update(alias.name for alias in node.names if alias.name.startswith("_"))
        if names.total():
            found[str(path.relative_to(PACKAGE))] = +names
    del found["trainers/trainer.py"]
    assert found == {file: Counter(names) for file, names in READ.items()}


def test_no_private_attribute_of_a_trainer_is_known_to_another_file() -> None:
    """Those of TRL and ``Trainer`` are theirs; parts read what is public, or get it handed over."""
    theirs = {name for kind in trl.GRPOTrainer.__mro__[:-1] for name in private_names(kind)}
    algorithms = [find_algorithm(name) for name in ALGORITHMS]
    homes: dict[str, set[str]] = {}
    for kind in {base for trainer in algorithms for base in trainer.__mro__ if issubclass(base, MultiTurnTrainer)}:
        for name in private_names(kind) - theirs:
            homes.setdefault(name, set()).add(inspect.getfile(kind))
    assert len(homes) > 10
    shared = set()
    for path in FILES:
        is_trainer = any(str(path) in files for files in homes.values()) or path.stem in ALGORITHMS
        for node in nodes(path):
            foreign = isinstance(node, ast.Attribute) and node.attr in homes and homes[node.attr] != {str(path)}
            if foreign and (is_trainer or ast.unparse(node.value) not in ("self", "cls")):
                shared.add(f"{path.name}: {ast.unparse(node)}")
    assert not shared


def test_every_import_of_ours_resolves() -> None:
    """mypy passes over a module that is missing. The Python blocks of pages are read too."""
    folders = [ROOT / name for name in ("agile_trainers", "tests", "benchmarks", "examples", "environments", "docs")]
    paths = {str(path): path for folder in folders for path in folder.rglob("*.py")}
    sources = {where: path.read_text("utf-8") for where, path in paths.items()}
    pages = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*.md"))]
    for path in pages:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), flags=re.M | re.S)
        sources |= {f"{path}, block {number}": block for number, block in enumerate(blocks, 1)}
    missing = []
    for where, text in sources.items():
        if not re.search(r"from\s+agile_trainers\b", text):
            continue
        for node in nodes(paths[where]) if paths.get(where) in FILES else ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and re.match(r"agile_trainers\b", node.module or ""):
                base = ROOT / str(node.module).replace(".", "/")
                known = defined_in(base / "__init__.py" if base.is_dir() else base.with_suffix(".py"))
                known = known | (set(agile_trainers.__all__) if base == PACKAGE else set())
                missing += [
                    f"{where}: {node.module}.{one.name}"
                    for one in node.names
                    if one.name not in known | {"*"}
                    and not (base / f"{one.name}.py").exists()
                    and not (base / one.name).is_dir()
                ]
    assert len(sources) > 500 and not missing


@cache
def defined_in(path: Path) -> set[str]:
    """Names that a file defines or imports, those for type checkers too; none if there is no such file."""
    if not path.exists():
        return set()
    found = {one.asname or one.name for node in nodes(path) if isinstance(node, ast.ImportFrom) for one in node.names}
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


# ----------------------------------------------------------------------------------------------------- what is heavy


@pytest.mark.parametrize(
    ("files", "foreign"),
    [
        ("objectives/*.py", {"trl", "transformers", "peft", "datasets", "accelerate"}),
        ("rollout/**/*.py", {"datasets", "accelerate"}),
        ("rollout/engine.py", {"trl", "transformers"}),
        ("rollout/rollout.py", {"trl", "transformers"}),
        ("rollout/stepped.py", {"trl", "transformers"}),
        ("rollout/environment_pool.py", {"trl", "transformers", "torch"}),
        ("envs/**/*.py", {"trl", "transformers", "peft", "torch", "accelerate"}),
    ],
)
def test_lower_parts_know_nothing_of_the_training_libraries(files: str, foreign: set[str]) -> None:
    paths = list((ROOT / "agile_trainers").glob(files))
    assert paths
    for path in paths:
        known = {"transformers"} if path.parent.name == "tools" else set()  # makes the schemas of tools
        assert not (foreign - known) & {name.split(".")[0] for name in _top_level_imports(path)}, path


def _top_level_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def test_the_package_itself_is_light() -> None:
    heavy = "{'torch', 'trl', 'transformers', 'peft', 'datasets', 'accelerate', 'numpy'}"
    code = (
        f"import sys, agile_trainers; print(*{heavy} & set(sys.modules), 'MultiTurnPPOTrainer' in dir(agile_trainers))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr


def test_every_trainer_can_be_imported_from_the_package() -> None:
    assert set(agile_trainers.__all__) == set(trainers.__all__) <= set(dir(agile_trainers)) & set(dir(trainers))
    assert all(getattr(agile_trainers, name) is getattr(trainers, name) for name in trainers.__all__)
    found = [find_algorithm(name) for name in ALGORITHMS]
    ours = {kind.__name__ for trainer in found for kind in (trainer, trainer.config_class)}
    shared = {"MultiTurnTrainer", "MultiTurnConfig"}
    assert {name for name in trainers.__all__ if name.startswith("MultiTurn")} == ours | shared
    with pytest.raises(AttributeError, match="no attribute 'MultiTurnGRPO'"):
        agile_trainers.MultiTurnGRPO  # noqa: B018


def test_every_mutation_finds_its_line_and_its_tests() -> None:
    sources = {file: (PACKAGE / file).read_text(encoding="utf-8") for file in {one.file for one in MUTATIONS}}
    assert [one.name for one in MUTATIONS if sources[one.file].count(one.old) != 1 or one.new == one.old] == []
    named = {word.partition("::")[0] for one in MUTATIONS for word in one.tests.split() if word.startswith("tests/")}
    assert {file for file in named if not (ROOT / file).exists()} == set()


def test_constraints_pin_every_core_requirement_exactly() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, version in
            (line.split("==") for line in lines if line and not line.startswith("#"))}  # fmt: skip
    assert not any("+" in version for version in pins.values()), "a local version such as +cpu cannot be installed"
    core = [requirement for requirement in requires("agile-trainers") or [] if "extra ==" not in requirement]
    names = {canonicalize_name(Requirement(requirement).name) for requirement in core}
    assert {"torch", "trl", "transformers", "peft"} <= names <= set(pins)


def test_no_test_imports_another() -> None:
    """Helpers are in modules of their own, shared fixtures in conftest files."""
    importing = re.compile(r"^\s*(?:from|import)\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*test_\w+", flags=re.M)
    assert all(importing.search(f"import a as b, {line}") for line in ("test_c", "d.e, test_c"))
    found = {path.name: importing.findall(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_two_test_files_share_a_name() -> None:
    """Pytest imports a test file by its name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
