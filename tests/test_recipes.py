"""The recipes of ``examples/recipes/`` are read whole, and the memory plan says what ``docs/recipes.md`` says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from recipe_plans import SHAPES, peak_of, planned

from agile_trainers.cli.evolve.plan import read_population

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "examples/recipes").glob("*gb_*.yaml"))
POPULATION = ROOT / "examples/recipes/population_24gb.yaml"
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")


def test_every_recipe_is_on_the_page() -> None:
    everything = {path.name for path in (ROOT / "examples/recipes").iterdir()}
    assert everything == {path.name for path in (*RECIPES, POPULATION)} and POPULATION.name in PAGE
    assert len(RECIPES) == 10 and all(f"examples/recipes/{path.name}" in PAGE for path in RECIPES)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if "1.5b" in path.name else pytest.mark.slow) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_the_plan_fits_and_is_the_one_on_the_page(path: Path) -> None:
    (said,) = re.findall(rf"{re.escape(path.name)}`?\S* \|.*\| ([\d.]+) GiB \|", PAGE)
    memory = int(re.findall(r"(\d+)gb", path.name)[0])
    peak = planned(path)
    assert peak == pytest.approx(float(said), abs=0.06)
    assert peak < 0.9 * memory, "a tenth is left for fragmentation and the libraries"


def test_a_population_needs_the_memory_of_one_run_and_its_file_is_read(tmp_path: Path) -> None:
    content = yaml.safe_load(POPULATION.read_text(encoding="utf-8"))
    options, lora = dict(content["options"]), content["lora"]
    dtype = options.pop("model_init_kwargs")["dtype"]
    single = {
        **options, "model_name_or_path": content["model"], "dtype": dtype, "use_peft": True, "lora_r": lora["r"],
        "lora_target_modules": lora["target_modules"], "lora_alpha": lora["lora_alpha"], "output_dir": "unused",
    }  # fmt: skip
    (said,) = re.findall(rf"{POPULATION.name}` \|.*\| ([\d.]+) GiB \|", PAGE)
    assert peak_of(single) == pytest.approx(float(said), abs=0.06) and float(said) < 0.9 * 24
    shape = SHAPES["1.5B"]
    narrow = shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    wide, hidden = shape["intermediate_size"], shape["hidden_size"]
    weights = lora["r"] * shape["num_hidden_layers"] * (2 * 2 * hidden + 2 * (hidden + narrow) + 3 * (hidden + wide))
    assert f"{weights / 1e6:.1f} million" in PAGE and f"{12 * weights / 2**30:.2f} GiB" in PAGE
    content["options"] |= {"use_cpu": True, "bf16": False}
    (tmp_path / "population.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    file = read_population(tmp_path / "population.yaml")
    settings = file.plan.make(file.model, file.environment, file.plan.lora, load=False).lineage.settings
    ends, living = settings["rounds"], [8, 4, 2, 1]
    assert ends == [15, 30, 60, 200]
    updates = sum(n * (end - begin) for n, begin, end in zip(living, [0, *ends], ends))
    assert f"make {updates}\nupdates together" in PAGE or f"make {updates} updates together" in PAGE


@pytest.mark.parametrize(("recipe", "more"), [("lora", {}), ("taught", {"teacher": "policy", "teacher_hint": "hint"})])
def test_the_commands_of_the_page_run(
    embedded_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    more: dict[str, str],
) -> None:
    """``check`` with the first recipe and the taught one, with a model that is here; others differ in numbers only."""
    from agile_trainers.cli import main

    options = yaml.safe_load((ROOT / f"examples/recipes/24gb_1.5b_{recipe}.yaml").read_text(encoding="utf-8"))
    here = {"model_name_or_path": str(embedded_model), "max_new_tokens": 8, "use_cpu": True, "bf16": False}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**options, **here, **more}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = [
        "check",
        "grpo",
        "--config",
        "recipe.yaml",
        "--gpu_memory",
        "24",
        "--episodes",
        "2",
        "--scripted_policy",
        "expert",
    ]
    assert main.main(command) == 0
    told = capsys.readouterr().out
    assert "24" in told and ("Demonstrations: expert" in told) == ("demonstrations" in options)
