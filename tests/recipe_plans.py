"""Plans the recipes of ``examples/recipes/`` from the public shapes of their models, as the pages launch them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml
from transformers import Qwen2Config
from trl import ModelConfig

from agile_trainers.cli.check.memory_plan import estimate_memory, plan_memory, planned_server
from agile_trainers.cli.check.tracing import trace
from agile_trainers.cli.launch_configs import SINGLE, Launch
from agile_trainers.cli.train import MultiTurnScriptArguments
from agile_trainers.embedded import make_tokenizer
from agile_trainers.trainers import MultiTurnGRPOConfig

SIX = {
    "8x80gb_7b_lora_server": Launch("ddp", 6, "bf16"), "8x80gb_7b_whole_server": Launch("zero3", 6, "bf16"),
    "8x80gb_14b_lora": Launch("ddp", 8, "bf16"), "8x80gb_7b_ahead": Launch("ddp", 6, "bf16"),
}  # fmt: skip
"""How the pages launch the recipes of several GPUs."""
PROMPT, OBSERVATION = 512, 256
"""Tokens that the page assumes."""
_ENDS: dict[str, Any] = {"tie_word_embeddings": False, "vocab_size": 152064, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "7B": {
        **_ENDS, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "14B": {
        **_ENDS, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
    },
}  # fmt: skip
"""Shapes of Qwen2.5's public configurations."""
TINY = {**SHAPES["7B"], "hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 600}


def folder_of(shape: dict[str, Any], folder: Path) -> Path:
    """A model's folder as the planner needs it: configuration and tokenizer, no weights."""
    Qwen2Config(**shape, max_position_embeddings=32768, dtype="bfloat16").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def planned(path: Path) -> float:
    """Planned peak of one GPU, in GiB, on the machine that the file is named after."""
    ((several, memory),) = re.findall(r"^(?:(\d+)x)?(\d+)gb_", path.name)
    options = yaml.safe_load(path.read_text(encoding="utf-8"))
    return peak_of(options, SIX.get(path.stem, SINGLE), gpus=int(several or 1), memory=int(memory))


def peak_of(options: dict[str, Any], launch: Launch = SINGLE, *, gpus: int = 1, memory: int | None = None) -> float:
    unknown = options.keys() - fields(ModelConfig) - fields(MultiTurnGRPOConfig) - fields(MultiTurnScriptArguments)
    assert not unknown
    model = ModelConfig(**{name: value for name, value in options.items() if name in fields(ModelConfig)})
    own = {name: value for name, value in options.items() if name in fields(MultiTurnGRPOConfig)}
    taught = own.pop("teacher", None) is not None
    for name in [name for name in own if name.startswith("teacher_")] if taught else ():
        del own[name]
    args = MultiTurnGRPOConfig(**{**own, "trust_remote_code": False}, use_cpu=True, bf16=False)
    args.bf16 = True  # as on a GPU, which is not here
    size = re.findall(r"-([\d.]+B)-", options["model_name_or_path"])[0]
    config = Qwen2Config(**SHAPES[size], max_position_embeddings=32768, dtype="bfloat16")
    config._name_or_path = options["model_name_or_path"]
    server = planned_server(args, model, config, launch, gpus)
    plan = plan_memory(
        config, args, model, critic=False, prompt=PROMPT, observation=OBSERVATION, launch=launch,
        gpu=None if memory is None else memory * 2**30, shares=server is not None and server.shares,
    )  # fmt: skip
    step = trace(config, plan)
    if taught:  # by an adapter like the policy's, which is not here
        plan = dataclasses.replace(plan, teachers=4 * step.trained)
    return estimate_memory(config, plan, step)[-1].size / 2**30
