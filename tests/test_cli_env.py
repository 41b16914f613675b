"""``agile-trainers env``: what it says of this machine is true, and of others what their parts allow."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from rich.console import Console

from agile_trainers.cli.machine import EXTRAS, SHOWN, Machine, features, inspect_machine
from agile_trainers.cli.main import main
from agile_trainers.envs.isolation import levels as isolation

CONFIGS = Path(__file__).resolve().parents[1] / "accelerate_configs"
GOOD = {"vllm": "0.31.0", "deepspeed": "0.19.8", "bitsandbytes": "0.50.2", "liger-kernel": "0.8.5"}
VERSIONS = {**dict.fromkeys(SHOWN, "1"), **GOOD}
TWO_GPUS = Machine(VERSIONS, ("H200", "H200"), "13.0", bf16=True, compiler=True, isolation={"landlock": "", "none": ""})


def works(machine: Machine) -> dict[str, bool]:
    return {feature.name: feature.works for feature in features(machine)}


def note(machine: Machine, name: str) -> str:
    return next(feature.note for feature in features(machine) if feature.name == name)


def test_it_speaks_of_every_launch_configuration():
    named = {name for name in works(TWO_GPUS) if name.endswith(".yaml")}
    assert named == {str(path.relative_to(CONFIGS.parent)) for path in CONFIGS.rglob("*.yaml")}


def test_with_two_gpus_and_everything_installed_only_dividing_episodes_does_not_work():
    assert [name for name, works_here in works(TWO_GPUS).items() if not works_here] == ["parallelism_config"]
    said = ("parallelism_config", "isolation")
    assert all(note(TWO_GPUS, name) in ("", "for tests") for name in works(TWO_GPUS) if name not in said)


def test_the_best_level_of_isolation_is_named_or_why_there_is_none():
    assert note(TWO_GPUS, "isolation") == f"landlock: {isolation.LEVELS['landlock']}"
    bare = replace(TWO_GPUS, isolation={"bubblewrap": "not installed", "landlock": "Linux 5.4", "none": ""})
    assert not works(bare)["isolation"] and note(bare, "isolation") == "bubblewrap: not installed; landlock: Linux 5.4"
    assert inspect_machine().isolation == {name: isolation.why_not(name) for name in isolation.LEVELS}


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_what_is_missing_is_named_with_what_to_install(package, extra):
    bare = replace(TWO_GPUS, versions={**TWO_GPUS.versions, package: None})
    lost = {name for name, works_here in works(bare).items() if works(TWO_GPUS)[name] and not works_here}
    expected = {
        "vllm": {"use_vllm"},
        "deepspeed": {f"accelerate_configs/{kind}zero{stage}.yaml" for kind in ("", "cpu/") for stage in (1, 2, 3)},
        "bitsandbytes": {"4 bit base", "8 bit base"},
        "liger-kernel": {"use_liger_kernel"},
    }
    assert lost == expected[package]
    assert all(note(bare, name) == f"pip install 'agile-trainers[{extra}]'" for name in lost)


def test_a_version_that_does_not_fit_does_not_work():
    old = replace(TWO_GPUS, versions={**TWO_GPUS.versions, "vllm": "0.9.1"})
    assert not works(old)["use_vllm"]
    assert note(old, "use_vllm") == "needs vllm<=0.31,>=0.22, found 0.9.1: pip install 'agile-trainers[vllm]'"


def test_fewer_gpus():
    one = replace(TWO_GPUS, gpus=("T4",), bf16=False)
    assert works(one)["accelerate_configs/zero3.yaml"] and not works(one)["bf16"]
    assert note(one, "accelerate_configs/zero3.yaml") == "with --num_processes 1"
    assert note(one, "accelerate_configs/single.yaml") == ""
    none = replace(TWO_GPUS, gpus=())
    assert not works(none)["accelerate_configs/ddp.yaml"] and works(none)["accelerate_configs/cpu/ddp.yaml"]
    assert note(none, "accelerate_configs/ddp.yaml") == "needs a GPU; without, use cpu/ddp.yaml"
    assert not works(none)["use_liger_kernel"] and works(none)["4 bit base"]
    assert note(none, "GPU") == "none is there" and "built for CPU" in note(replace(none, cuda=None), "GPU")


def test_this_machine(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["trl"] == version("trl") and set(found["versions"]) == {*SHOWN, *EXTRAS}
    assert (Path(found["accelerate_configs"]) / "zero2.yaml").is_file()
    assert len(found["gpus"]) == torch.cuda.device_count()
    names = [feature["name"] for feature in found["features"]]
    assert names == list(works(inspect_machine()))


def test_the_table_says_the_same():
    from agile_trainers.cli import machine as env

    output = io.StringIO()
    assert env.main([], Console(file=output, width=120)) == 0
    lines = output.getvalue().splitlines()
    for feature in features(inspect_machine()):
        assert any(
            line.split("  ")[0] == feature.name and f" {'yes' if feature.works else 'no'} " in f"{line} "
            for line in lines
        ), feature.name
