"""Times the update beside AgileRL's ``learn()`` on the same episodes (``make bench-agilerl``).

AgileRL lives in a virtual environment of its own, so its side is a process of its own, ``agilerl_side.py``. Both sides start
from the same weights and adapter and train on the five batches of ``update_vs_trl.py``, without playing them. They take
turns, with one thread each, and a ratio is taken within each pair, of the CPU seconds of each process around its update. The
first update of each side warms up; in it, bytes of saved tensors are counted, and the gradients are compared: advantages and
weights of the tokens are the same on both sides. The results are kept in
``results/update_vs_agilerl.json``, a workload at a time, and the table of ``results/agilerl.md`` is written from them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from counting import SavedBytes, reading_gradients
from other_side import OtherSide, OtherSideError
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from rollout_vs_trl import make_lora, make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from update_vs_trl import GROUP, ROOT, WORKLOADS, Episode, OurSide, distinct_tokens, ratios, seconds, with_tables

RESULTS = ROOT / "benchmarks/results/update_vs_agilerl.json"
PAGE = ROOT / "benchmarks/results/agilerl.md"
AGILERL = ROOT / ".venv-agilerl/bin/python"
SCRIPT = ROOT / "benchmarks/agilerl_side.py"
CLIP = 0.1
"""``max_grad_norm`` of both sides, AgileRL's default."""
OTHER_PAIRS = 3
"""Most pairs of REINFORCE and PPO."""


@dataclass(frozen=True)
class Part:
    """One row of the table."""

    title: str
    workload: str
    algorithm: str = "GRPO"
    options: dict[str, Any] = field(default_factory=dict)
    """Ours."""
    theirs: dict[str, Any] = field(default_factory=dict)
    """Arguments of AgileRL's constructor."""
    same_gradient: bool = True
    """Both sides compute the same gradient, up to rounding."""


GRPO_OURS = {"scale_rewards": "none", "advantage_granularity": "trajectory"}
"""One optimizer step, the mean over all action tokens of a centred return: AgileRL's ``adv_norm="mean_only"``."""
PARTS = {
    **{name: Part(w.name, name, options=GRPO_OURS) for name, w in WORKLOADS.items()},
    "filtered": Part(
        "half zero-advantage, filter_zero_adv=True",
        "zero_advantage",
        options=GRPO_OURS,
        theirs={"filter_zero_adv": True},
        same_gradient=False,
    ),
    "reinforce": Part("whole, REINFORCE", "whole", "REINFORCE", same_gradient=False),
    "ppo": Part("whole, PPO", "whole", "PPO", same_gradient=False),
}


def make_adapter(model: Path, path: Path) -> None:
    """Write the weights of a LoRA whose product is not zero, so that all of its weights have a gradient."""
    torch.manual_seed(0)
    lora = make_lora()
    lora.init_lora_weights = False
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lora)
    save_file(get_peft_model_state_dict(adapter), path)


def compare_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compare two gradients of the same adapter.

    Returns:
        ``difference``, the norm of the difference over that of ours; ``cosine``; ``norms``, theirs over ours.

    Raises:
        ValueError: If the weights have different names.
    """
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"The sides train different weights; {len(odd)} are on one side only, such as {odd[:2]}.")
    a, b = (torch.cat([side[name].double().flatten() for name in sorted(ours)]) for side in (ours, theirs))
    return {
        "difference": ((a - b).norm() / a.norm()).item(),
        "cosine": (a @ b / a.norm() / b.norm()).item(),
        "norms": (b.norm() / a.norm()).item(),
    }


def plain_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the LoRA matrices by name, without the adapter's own."""
    return {
        name.replace(f".{adapter}.weight", ".weight"): weight
        for name, weight in weights.items()
        for adapter in ("default", "actor")
        if f".{adapter}.weight" in name and "lora_" in name
    }


def measure_ours(side: OurSide, adapter: Path, episodes: Sequence[Episode]) -> tuple[int, dict[str, torch.Tensor]]:
    """Warm up, start from the adapter and train once; return the bytes kept and the gradient."""
    model = side.trainer.model
    side.update(episodes)  # compares packed with padded rows, once
    set_peft_model_state_dict(model, load_file(adapter))
    saved = SavedBytes([*model.parameters(), *model.buffers()])
    with saved.counting(), reading_gradients(model) as gradients:
        side.update(episodes)
    return saved.peak, plain_names(gradients)


def compare(part: Part, model: Path, pairs: int) -> dict[str, Any]:
    """Measure one part on both sides."""
    vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    workload = WORKLOADS[part.workload]
    episodes = workload.make(random.Random(0), vocabulary)
    result: dict[str, Any] = {
        "tokens": sum(len(e.ids) for e in episodes),
        "distinct_tokens": distinct_tokens(episodes[: len(episodes) - workload.zero_advantage_groups * GROUP]),
        "seconds": {"ours": [], "AgileRL": []},
    }
    with tempfile.TemporaryDirectory() as name, OtherSide(AGILERL, SCRIPT) as other:
        folder = Path(name)
        adapter, batch, gradient = folder / "adapter.safetensors", folder / "episodes.json", folder / "gradient"
        make_adapter(model, adapter)
        batch.write_text(json.dumps([asdict(e) for e in episodes]))
        ours = OurSide(model, f"{folder}/ours", pairs + 2, part.algorithm, max_grad_norm=CLIP, **part.options)
        result["versions"] = other("versions")
        other(
            "make",
            algorithm=part.algorithm,
            model=str(model),
            batch=str(batch),
            group=GROUP,
            options={"max_grad_norm": CLIP, **part.theirs},
        )
        kept, mine = measure_ours(ours, adapter, episodes)
        kept_there = other("measure", adapter=str(adapter), gradient=str(gradient))
        result["saved_bytes"] = {"ours": kept, "AgileRL": kept_there}
        if part.same_gradient:
            result["gradient"] = compare_gradients(mine, plain_names(load_file(gradient)))
        for pair in range(pairs):
            took = {"ours": seconds(ours.update, episodes), "AgileRL": other("update")}
            for side, value in took.items():
                result["seconds"][side].append(round(value, 3))
            print(f"  {pair + 1}/{pairs}  ours {took['ours']:.2f} s, AgileRL {took['AgileRL']:.2f} s", flush=True)
    return result


def try_packing(model: Path) -> str:
    """Train AgileRL once with ``use_sequence_packing``; return the error, or how it went."""
    vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    with tempfile.TemporaryDirectory() as folder, OtherSide(AGILERL, SCRIPT) as other:
        batch = Path(folder) / "episodes.json"
        batch.write_text(json.dumps([asdict(e) for e in WORKLOADS["ragged"].make(random.Random(0), vocabulary)]))
        try:
            return str(other("try_packing", model=str(model), batch=str(batch), group=GROUP))
        except OtherSideError as error:
            return str(error)


# ------------------------------------------------------------------------------------------------------ the report


def table(results: dict[str, Any]) -> str:
    """All parts as a Markdown table."""
    lines = [
        "| workload | ours | AgileRL | ours / AgileRL | MiB kept, ours | AgileRL | gradients differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, part in PARTS.items():
        if name not in results:
            continue
        result = results[name]
        values = ratios(result["seconds"], "ours", "AgileRL")
        cells = [part.title, *(f"{median(result['seconds'][side]):.2f} s" for side in ("ours", "AgileRL"))]
        cells.append(f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        cells += [f"{result['saved_bytes'][side] / 2**20:.0f}" for side in ("ours", "AgileRL")]
        cells.append(f"{result['gradient']['difference']:.0e}" if result.get("gradient") else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compact(results: dict[str, Any]) -> str:
    """JSON with a line per part."""
    parts = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of each part")
    choices = (*PARTS, "packing")
    parser.add_argument(
        "--parts", nargs="+", choices=choices, default=choices, help="parts to measure; the rest is kept"
    )
    parser.add_argument("--resume", action="store_true", help="leave out the parts that have results")
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in ("trainers.trainer", "monitor.health_checks"):
        logging.get_logger(f"agile_trainers.{name}").setLevel("ERROR")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() and not options.dry else {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for name in [name for name in options.parts if not (options.resume and name in results)]:
            print(name, flush=True)
            if name == "packing":
                results[name] = try_packing(Path(folder))
                print(f"  {results[name]}")
            else:
                part = PARTS[name]
                pairs = options.pairs if part.algorithm == "GRPO" else min(options.pairs, OTHER_PAIRS)
                results[name] = compare(part, Path(folder), pairs)
            if not options.dry:
                RESULTS.write_text(compact({name: results[name] for name in choices if name in results}))
                PAGE.write_text(with_tables(PAGE.read_text(), {"agilerl": table(results)}))
    print(f"\n{table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
