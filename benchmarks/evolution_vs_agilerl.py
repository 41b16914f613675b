"""Compares a population with AgileRL's evolution on the constant-target probe (second part of ``make bench-agilerl``).

Both sides train members with GRPO and LoRA from the same tiny model, on as many episodes, from the same first learning rates
(those that our side draws), with tournaments of two, elitism and mutation of the learning rate. Each run is a process of its
own with one thread, ours in ``population_side.py``, AgileRL's in ``agilerl_evolution.py``. After each round, the exact
probability that a member answers right is computed, outside the measured time. A last part mutates AgileRL's learning rates
and reads those of its optimizers. Results go to ``results/evolution_vs_agilerl.json``, a line per seed, and tables to
``results/agilerl.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from other_side import OtherSide
from transformers.utils import logging
from update_vs_agilerl import AGILERL, PAGE, compact
from update_vs_trl import ROOT, with_tables

from agile_environments.probes import PROBE_WORDS
from agile_trainers.embedded import make_embedded_model

RESULTS = ROOT / "benchmarks/results/evolution_vs_agilerl.json"
OURS, THEIRS = ROOT / "benchmarks/population_side.py", ROOT / "benchmarks/agilerl_evolution.py"
SEEDS = (0, 1, 2)
MEMBERS = 4
SETTINGS: dict[str, Any] = {
    "range": [1e-4, 1e-2],  # of the learning rate
    "factors": [0.8, 1.25],
    "group": 8,
    "episodes": 128,  # of an update of a member
    "updates": 8,  # of a member
    "rounds": 4,
    "evaluation": 64,  # episodes after a round, of each member
    "lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
}


def run(seed: int) -> dict[str, Any]:
    """Run both sides with one seed."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_embedded_model(f"{folder}/model", words=PROBE_WORDS, max_position_embeddings=512, seed=seed))
        with OtherSide(Path(sys.executable), OURS) as side:
            ours = side("evolve", model=model, folder=f"{folder}/ours", members=MEMBERS, seed=seed, **SETTINGS)
        with OtherSide(AGILERL, THEIRS) as side:
            theirs = side("evolve", model=model, rates=ours["first"], seed=seed, **SETTINGS)
    return {"ours": ours, "AgileRL": theirs}


def mutate() -> dict[str, Any]:
    """Mutate AgileRL's learning rates and read those of its optimizers."""
    with tempfile.TemporaryDirectory() as folder, OtherSide(AGILERL, THEIRS) as side:
        make_embedded_model(folder, words=PROBE_WORDS, max_position_embeddings=512)
        return {**side("mutate", model=folder), "versions": side("versions")}


# ------------------------------------------------------------------------------------------------------ the report


def episodes_of(round_: int) -> int:
    """Training episodes of all members until the end of a round."""
    return MEMBERS * SETTINGS["episodes"] * SETTINGS["updates"] * round_ // SETTINGS["rounds"]


Measure = Callable[[dict[str, Any]], float]


def _reached(round_: int, pick: Callable[[list[float]], float]) -> Measure:
    return lambda result: pick(result["rounds"][round_]["chance"])


def measures() -> list[tuple[str, Measure, str]]:
    """The rows of the table: a name, the value of a side's run, and its format."""
    count = SETTINGS["rounds"]
    rows: list[tuple[str, Measure, str]] = [
        (f"right answers of the best member after {episodes_of(number + 1)} episodes", _reached(number, max), ".3f")
        for number in range(count)
    ]
    return [
        *rows,
        ("the same of the worst member at the end", _reached(count - 1, min), ".3f"),
        ("CPU seconds", lambda result: result["rounds"][-1]["seconds"], ".0f"),
        (
            "most memory, MiB above that before",
            lambda r: (r["resident"]["peak"] - r["resident"]["before"]) / 2**20,
            ".0f",
        ),
        ("KiB of frozen weights, all members", lambda result: result["bytes"]["base"] / 2**10, ".0f"),
        ("KiB of adapter and optimizer, a member", lambda result: result["bytes"]["member"] / 2**10, ".0f"),
    ]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Results and costs of both sides as a Markdown table; means over seeds (lowest to highest)."""
    lines = ["| | ours | AgileRL |", "|---|---|---|"]
    for name, measure, form in measures():
        cells = [name]
        for side in ("ours", "AgileRL"):
            values = [measure(result[side]) for result in results]
            cells.append(f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mutation_table(found: dict[str, Any]) -> str:
    """AgileRL's learning rates after a mutation as a Markdown table."""
    lines = ["| AgileRL | mutated from | to | the optimizer's |", "|---|---|---|---|"]
    for name, rates in found.items():
        if "after" in rates:
            optimizer = ", ".join(f"{rate:g}" for rate in rates["after"]["optimizer"])
            lines.append(f"| `{name}` | {rates['before']['lr']:g} | {rates['after']['lr']:g} | {optimizer} |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables of the page by the name in their markers."""
    found = {}
    if runs := [results[part] for part in map(str, SEEDS) if part in results]:
        found["evolution"] = table(runs)
    if "mutation" in results:
        found["mutation"] = mutation_table(results["mutation"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ("mutation", *map(str, SEEDS))
    parser.add_argument("--parts", nargs="+", choices=choices, default=choices, help="seeds; the rest is kept")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that have results")
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() and not options.dry else {}
    for part in [part for part in options.parts if not (options.resume and part in results)]:
        print(part, flush=True)
        results[part] = mutate() if part == "mutation" else run(int(part))
        if not options.dry:
            RESULTS.write_text(compact({part: results[part] for part in choices if part in results}))
            PAGE.write_text(with_tables(PAGE.read_text(), tables(results)))
    for one in tables(results).values():
        print(f"\n{one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
