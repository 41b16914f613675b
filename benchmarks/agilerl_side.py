"""AgileRL's side of ``update_vs_agilerl.py``: a process in ``.venv-agilerl`` that ``other_side.OtherSide`` calls.

One switch of AgileRL is set. It puts Liger's Triton kernels into every model, and without a GPU they raise "0 active
drivers". ``HAS_LIGER_KERNEL = False`` is its own value where Liger is not installed; its extra ``cpu-llm`` requires Liger on
Linux.
"""

# ruff: noqa: E402

from __future__ import annotations

import gc
import json
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import agilerl
import torch

agilerl.HAS_LIGER_KERNEL = False

from agilerl.algorithms import GRPO, LLMPPO, LLMREINFORCE
from counting import SavedBytes, reading_gradients
from other_side import serve
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

PACKAGES = ("agilerl", "torch", "transformers", "peft")
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
"""``make_lora`` of the other side."""
MICRO_BATCH = 4
"""Episodes of a forward pass of ``learn()``: the fastest of 1, 2, 4 and 16 on the ragged batch."""
COMMON = {
    "model_config": {"dtype": torch.float32},
    "beta": 0.0,
    "temperature": 1.0,
    "gradient_checkpointing": False,  # off on the other side too
    "use_liger_loss": False,  # a GPU's kernel
    "use_separate_reference_adapter": False,
    "wrap": False,
}
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO": (
        GRPO,
        {
            "lr": 1e-4,
            "advantage_granularity": "trajectory",
            # The cheapest source: without it, every update has another forward pass, for the same numbers.
            "old_logprobs_source": "trainer",
            # On one on-policy step these masks change nothing.
            "off_policy_token_mask_bounds": None,
            "off_policy_sequence_mask_threshold": None,
        },
    ),
    "REINFORCE": (LLMREINFORCE, {"lr": 1e-4}),
    "PPO": (LLMPPO, {"lr_actor": 1e-4, "lr_critic": 1e-4}),
}


def make_agent(algorithm: str, model: str, **options: Any) -> Any:
    """Make one of AgileRL's algorithms on a model's folder, on CPU, in fp32, with the benchmark's LoRA."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    kind, own = ALGORITHMS[algorithm]
    return kind(
        model_name=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        device="cpu",
        **{**COMMON, **own, "lora_config": LoraConfig(**LORA, task_type="CAUSAL_LM"), **options},
    )


class Side:
    """The agent of one part and its batch."""

    def make(self, algorithm: str, model: str, batch: str, group: int, options: dict[str, Any]) -> None:
        """Make an agent and read its batch, as ``train_llm_rollout`` would pass it to ``learn()``."""
        episodes = json.loads(Path(batch).read_text())
        size = len(episodes)
        if algorithm == "GRPO":
            options = {"group_size": group, "batch_size": size // group, **options}
        else:
            options = {"batch_size": size, **options}
        self.agent = make_agent(
            algorithm,
            model,
            max_model_len=4096,
            micro_batch_size_per_gpu=MICRO_BATCH,
            mini_batch_size=size,  # one optimizer step
            **options,
        )
        self.batch = _experiences(episodes, self.agent.pad_token_id)

    def measure(self, adapter: str, gradient: str) -> int:
        """Start from an adapter and train once, to warm up; write the gradient and return the bytes kept."""
        model = self.agent.actor
        adapted = next(module for module in model.modules() if hasattr(module, "peft_config"))  # PPO's is inside
        set_peft_model_state_dict(adapted, load_file(adapter), adapter_name="actor")
        saved = SavedBytes([*model.parameters(), *model.buffers()])
        with saved.counting(), reading_gradients(model) as gradients:
            self.update()
        save_file({name: value.contiguous() for name, value in gradients.items()}, gradient)
        return saved.peak

    def update(self) -> float:
        """Train once; return the CPU seconds."""
        experiences, turn_ids = self.batch
        gc.collect()
        started = time.process_time()
        self.agent.learn(experiences, turn_ids=turn_ids)
        return time.process_time() - started

    def try_packing(self, model: str, batch: str, group: int) -> str:
        """Train once on packed rows, with the attention that AgileRL packs on; return its warnings."""
        said = []
        for attention in ("sdpa", "flex_attention"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config = {"dtype": torch.float32, "attn_implementation": attention}
                try:
                    self.make("GRPO", model, batch, group, {"use_sequence_packing": True, "model_config": config})
                    took = f"trained in {self.update():.1f} s"
                except Exception as error:
                    took = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            about = [str(w.message) for w in caught if "use_sequence_packing" in str(w.message)]
            said.append(f"{attention}: {took}" + "".join(f" ({text})" for text in about))
        return "; ".join(said)


def _experiences(
    episodes: list[dict[str, Any]], pad: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Token ids (B, T), action masks (B, T-1), rewards (B, turns); and turn indices (B, T-1), -1 outside of actions."""
    longest = max(len(e["prompt"]) + len(e["completion"]) for e in episodes)
    turns = max(len(e["turns"]) for e in episodes)
    ids = torch.full((len(episodes), longest), pad)
    indices = torch.full((len(episodes), longest - 1), -1)
    rewards = torch.zeros(len(episodes), turns)
    for row, e in enumerate(episodes):
        tokens = e["prompt"] + e["completion"]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        for turn, (start, end) in enumerate(e["turns"]):
            indices[row, len(e["prompt"]) + start - 1 : len(e["prompt"]) + end - 1] = turn
            rewards[row, turn] = e["rewards"][turn]
    return (ids, indices >= 0, rewards), indices


def versions() -> dict[str, str]:
    """Versions of AgileRL and of the libraries below it."""
    return {name: version(name) for name in PACKAGES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    side = Side()
    serve(
        {
            "versions": versions,
            "make": side.make,
            "measure": side.measure,
            "update": side.update,
            "try_packing": side.try_packing,
        }
    )
