"""Launch configurations and examples: everything in them parses, and has an effect."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from launching import run
from processes import runs
from time_limits import at_the_first_limit

from agile_trainers.imports import matplotlib_apart

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "accelerate_configs").rglob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GPU = {"single", "ddp", "zero1", "zero2", "zero3", "fsdp2"}


def launched(path: Path) -> dict[str, Any]:
    """What ``accelerate launch`` would start: its options and what it tells the processes."""
    args, defaults, precision_from_file = _validate_launch_command(
        launch_command_parser().parse_args(["--main_process_port", "1", "--config_file", str(path), "script.py"])
    )
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = prepare_deepspeed_cmd_env(args)[1]
    elif args.multi_gpu or args.use_fsdp:
        environment = prepare_multi_gpu_env(args)
    else:
        environment = prepare_simple_launcher_cmd_env(args)[1]
    return {"environment": environment, **{name: value for name, value in vars(args).items() if name != "config_file"}}


def leaves(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def test_each_engine_has_a_file():
    assert {path.stem for path in CONFIGS if path.parent.name == "accelerate_configs"} == GPU
    # accelerate runs DDP where a configuration names FSDP without GPUs.
    assert {path.stem for path in CONFIGS if path.parent.name == "cpu"} == GPU - {"fsdp2"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_configuration_parses_and_every_field_counts(path, tmp_path):
    load_config_from_file(str(path))
    config, whole, options = yaml.safe_load(path.read_text()), launched(path), launch_command_parser().parse_args(["x"])
    for field in leaves(config):
        if len(field) > 1:
            assert hasattr(options, field[-1]), f"accelerate launch has no option {field[-1]}: it would be ignored"
        without: dict[str, Any] = copy.deepcopy(config)
        parent = without
        for name in field[:-1]:
            parent = parent[name]
        del parent[field[-1]]
        changed = tmp_path / "changed.yaml"
        changed.write_text(yaml.safe_dump(without))
        with contextlib.suppress(ValueError):  # or it cannot be left out
            assert launched(changed) != whole, f"{'.'.join(field)} changes nothing"
    assert launched(path) == whole


def test_the_deepspeed_file_is_deepspeed_s():
    """DeepSpeed refuses an unknown field of ``zero_optimization``; what stands beside it is for ``Trainer`` to fill in."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config", reason="needs agile-trainers[deepspeed]")
    config = json.loads((ROOT / "accelerate_configs/cpu/zero3.json").read_text())
    assert zero.DeepSpeedZeroConfig(**config.pop("zero_optimization")).param_persistence_threshold == 0
    assert set(config.values()) == {"auto"}


def example(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with matplotlib_apart():  # an example draws
        spec.loader.exec_module(module)
    return module


def given(keyword: ast.keyword, module: Any) -> set[str]:
    """The names a keyword argument, or ``**mapping``, passes."""
    if keyword.arg is not None:
        return {keyword.arg}
    values = [keyword.value.body, keyword.value.orelse] if isinstance(keyword.value, ast.IfExp) else [keyword.value]
    names: set[str] = set()
    for value in values:
        used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if used <= vars(module).keys():  # else it is known when the example runs
            names |= set(eval(compile(ast.Expression(value), "**", "eval"), vars(module)))
    return names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_passes_arguments_that_exist_and_reads_its_options(path):
    if path.stem in ("archivist", "agent_pydantic_ai"):
        pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed; tests/on_agents runs these two")
    module, tree = example(path), ast.parse(path.read_text())
    checked = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not isinstance(call.func, ast.Name) or not hasattr(module, call.func.id):
            continue
        called = getattr(module, call.func.id)
        parameters = inspect.signature(called).parameters
        passed = set().union(*(given(keyword, module) for keyword in call.keywords))
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            assert passed <= set(parameters), f"line {call.lineno}: {call.func.id} has no {passed - set(parameters)}"
            checked.add(call.func.id)
    source = path.read_text()
    assert checked or "Trainer" not in source
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            name = ast.literal_eval(call.args[0]).lstrip("-")
            assert f"options.{name}" in source, f"--{name} is never read"


def test_a_test_that_times_out_ends_what_it_launched(tmp_path):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"

    def printed(limit: float) -> str | None:
        with pytest.raises(subprocess.TimeoutExpired) as stop:
            run([sys.executable, "-c", launcher], timeout=limit)
        return stop.value.output or None

    assert not runs(int(at_the_first_limit(printed)))
