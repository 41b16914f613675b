"""The memory plan of ``agile-trainers check`` against bytes counted in real training steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    TrainerCallback,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import ModelConfig, get_peft_config

from agile_trainers.cli.check.memory_plan import estimate_memory, plan_memory, readable
from agile_trainers.cli.check.tracing import MemoryPlan
from agile_trainers.embedded import make_tokenizer
from agile_trainers.rollout.generators.transformers import generator as generator_module
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig, MultiTurnPPOTrainer

VOCABULARY = 512


@dataclass(frozen=True)
class Case:
    config: PretrainedConfig
    options: dict[str, Any] = field(default_factory=dict)


def _sizes(
    hidden: int, layers: int, heads: int, intermediate: int, keys: int, vocabulary: int = VOCABULARY
) -> dict[str, int]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys,
        "intermediate_size": intermediate, "vocab_size": vocabulary, "max_position_embeddings": 512,
    }  # fmt: skip


CASES = {
    "qwen2": Case(Qwen2Config(**_sizes(64, 2, 4, 160, 2))),
    "llama, long": Case(LlamaConfig(**_sizes(96, 3, 6, 128, 3)), {"max_turns": 4, "max_new_tokens": 16}),
    "gpt2": Case(GPT2Config(n_embd=80, n_layer=4, n_head=4, n_positions=512, vocab_size=VOCABULARY)),
    "qwen3, checkpointing": Case(
        Qwen3Config(**_sizes(48, 4, 3, 192, 1), head_dim=32), {"gradient_checkpointing": True}
    ),
    "qwen2, bfloat16": Case(Qwen2Config(**_sizes(128, 2, 2, 96, 2, 2000)), {"bf16": True, "max_turns": 3}),
}


# Weights that are trained whole are gpt2's and those of bfloat16; the rest differs in what its layers keep, and with it.
WITHOUT_OTHER_CODE = (("qwen2", False), ("llama, long", False), ("gpt2", True), ("qwen3, checkpointing", False))
READ_ALL = {"skip_zero_advantage": False}


class Talks:
    """Goes on and on, from prompts of three lengths, so that rows are padded."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return "Try again. " * (1 + (seed or 0) % 3), {}

    def step(self, action: str) -> Any:
        return "Another one? You have two left.", len(action) % 3 / 2, False, False, {}


def _storages(tensors: Any) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


class Counting:
    """Counts distinct storages that the backward pass is to need, parameters apart."""

    def __init__(self, model: Any, *others: torch.Tensor):
        self.own = {*_storages(model.parameters()), *_storages(model.buffers()), *_storages(others)}
        self.kept: dict[int, torch.Tensor] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self.own:
            self.kept.setdefault(storage, tensor.detach())  # kept: its address must not be given to another
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())


class Counts(TrainerCallback):
    """Bytes of one real training run, by the names of the plan's items."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {"activations": 0, "KV cache": 0}
        self.longest = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def counted(trainer_class: Any, counts: Counts) -> Any:
    class Counted(trainer_class):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            inputs: list[tuple[Any, Any, Any]] = []

            def note(module: Any, positional: Any, named: Any) -> None:
                if torch.is_grad_enabled() and self.model.training:
                    inputs.append((module, positional, named))

            layers = [layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
            handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
            counting = Counting(self.model)
            with counting.hooks:
                loss = super().training_step(model, *args, **kwargs)
            for handle in handles:
                handle.remove()
            found = counting.bytes
            if self.args.gradient_checkpointing:
                # The backward pass computes one layer again at a time: what that keeps, counted on the real layer.
                layer, (hidden, *rest), named = inputs[-1]
                again, layer.gradient_checkpointing = Counting(self.model, hidden), False
                with again.hooks, self.accelerator.autocast():
                    layer(hidden.detach().requires_grad_(), *rest, **named)
                layer.gradient_checkpointing = True
                found += again.bytes
            counts.found["activations"] = max(counts.found["activations"], found)
            return loss

    return Counted


def run(
    case: Case, lora: bool, folder: Path, monkeypatch: Any, kind: str = "grpo", **more: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """What was counted, and what was planned."""
    case.config.eos_token_id = None
    tokenizer = make_tokenizer(vocab_size=VOCABULARY)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(case.config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    options = ModelConfig(
        model_name_or_path=str(folder / "model"), use_peft=lora, lora_r=4, lora_target_modules=["all-linear"]
    )
    config, trainer_class = {
        "grpo": (MultiTurnGRPOConfig, MultiTurnGRPOTrainer), "ppo": (MultiTurnPPOConfig, MultiTurnPPOTrainer)
    }[kind]  # fmt: skip
    settings: dict[str, Any] = {
        "max_turns": 2, "max_new_tokens": 12, "per_device_train_batch_size": 4, "gradient_checkpointing": False,
        "bf16": False, "use_cpu": True, "max_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "output_dir": str(folder / "run"), "log_rollouts": False, "learning_rate": 1e-3,
        # The plan is of padded rows in one pass, none left out for its advantage.
        "sequence_packing": "none", "max_tokens_per_micro_batch": 100_000, **({} if kind == "ppo" else READ_ALL),
    } | case.options | more  # fmt: skip
    # PPO's plan is of a pass that trains both: the critic is read a second time where a batch is several updates.
    settings |= {"num_generations": 2} if kind == "grpo" else {"steps_per_generation": 2}
    settings["min_new_tokens"] = settings["max_new_tokens"]
    counts = Counts()
    trainer = counted(trainer_class, counts)(
        model=str(folder / "model"),
        environment=Talks,
        args=config(**settings, model_init_kwargs={"dtype": "float32"}),
        peft_config=get_peft_config(options),
        callbacks=[counts],
    )
    seen: list[tuple[int, int]] = []
    engine_run = trainer.engine.run

    def play(*args: Any) -> Any:
        played = engine_run(*args)
        for episode in played:
            gaps = [later.start - sooner.end for sooner, later in zip(episode.turns, episode.turns[1:])]
            seen.append((len(episode.prompt_ids), max(gaps)))
        return played

    forward = generator_module.TransformersGenerator._forward

    def decode(self: Any, batch: Any) -> Any:
        logits = forward(self, batch)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in batch.kv.layers)
        counts.found["KV cache"] = max(counts.found["KV cache"], held)
        return logits

    monkeypatch.setattr(trainer.engine, "run", play)
    monkeypatch.setattr(generator_module.TransformersGenerator, "_forward", decode)
    trainer.train()
    counts.found["weights"] = sum(_storages(trainer.model.parameters()).values())
    optimizer = trainer.optimizer.optimizer
    counts.found["optimizer"] = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim
    )
    prompt, observation = (max(column) for column in zip(*seen))
    plan = plan_memory(case.config, trainer.args, options, critic=kind == "ppo", prompt=prompt, observation=observation)
    return counts.found, {item.name: item.size for item in estimate_memory(case.config, plan)}


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        pytest.param(name, lora, id=f"{name}-{'lora' if lora else 'whole'}")
        for name in CASES
        for lora in (False, True)
        if (name, lora) not in WITHOUT_OTHER_CODE
    ],
)
def test_the_plan_is_what_a_real_step_needs(
    name: str, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, planned = run(CASES[name], lora, tmp_path, monkeypatch)
    assert {*found} == {"weights", "gradients", "optimizer", "activations", "KV cache"} and min(found.values()) > 0
    for item in found:
        assert planned[item] == pytest.approx(found[item], rel=0.2), item


def test_policy_and_critic_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the longest episodes that they read, which end with an observation."""
    found, planned = run(CASES["qwen2"], True, tmp_path, monkeypatch, kind="ppo", bootstrap_at_limits=True)
    for item in found:
        assert planned[item] == pytest.approx(found[item], rel=0.2), item


def test_copies_quantization_optimizers_and_limits_count() -> None:
    config = CASES["qwen2"].config
    lora = get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["all-linear"]))

    def sizes(**changes: Any) -> dict[str, int]:
        settings: dict[str, Any] = {
            "dtype": torch.float32, "rows": 1, "episodes": 1, "tokens": 64, "decoded": 64, "new_tokens": 16,
            "gradient_checkpointing": True,
        }  # fmt: skip
        return {item.name: item.size for item in estimate_memory(config, MemoryPlan(**{**settings, **changes}))}

    whole, adapted, halved = sizes(), sizes(peft_config=lora), sizes(peft_config=lora, dtype=torch.bfloat16)
    assert whole["weights"] == whole["gradients"] == whole["optimizer"] // 2
    assert sizes(copies=2)["weights"] == 2 * whole["weights"]
    # Adapters are float32 on a base of either dtype.
    assert halved["gradients"] == adapted["gradients"]
    assert (
        (halved["weights"] - halved["gradients"]) * 2 == adapted["weights"] - adapted["gradients"] == whole["weights"]
    )
    assert (
        sizes(optimizer="sgd")["optimizer"] * 2
        == sizes(optimizer="adamw_bnb_8bit")["optimizer"] * 4 // 2 * 2
        == whole["optimizer"]
    )
    assert sizes(peft_config=lora, adapters=2)["gradients"] == 2 * adapted["gradients"]
    quarter = sizes(peft_config=lora, quantization="4 bit", dtype=torch.bfloat16)
    assert quarter["weights"] < halved["weights"] < adapted["weights"]
    assert quarter["gradients"] * 2 == adapted["gradients"], "TRL keeps them in bfloat16"
    assert sizes(rows=3)["activations"] == pytest.approx(3 * whole["activations"], rel=0.02)
    assert sizes(gradient_checkpointing=False)["activations"] > whole["activations"]
    fixed = whole["weights"] + whole["gradients"] + whole["optimizer"]
    plain = sizes(gradient_checkpointing=False)
    update = plain["activations"] + max(plain["temporaries"], plain["logits"])
    assert plain["peak"] == fixed + max(update, 2 * plain["KV cache"])
    long = sizes(episodes=1000)
    assert long["peak"] == fixed + 2 * long["KV cache"] and long["KV cache"] == 1000 * whole["KV cache"]
    # Six float32 copies of the logits of 64 tokens, or of a piece of 2**24.
    assert sizes(filters=True)["logits"] - whole["logits"] == 6 * 4 * 64 * config.vocab_size
    assert sizes(filters=True, rows=1024)["logits"] - sizes(rows=1024)["logits"] == 6 * 4 * 2**24
    shown = ["5 B", "2.0 KiB", "3.0 MiB", "0.50 GiB", "2.50 GiB", "40.0 GiB"]
    assert [readable(size) for size in (5, 2048, 3 * 2**20, 2**29, 5 * 2**29, 40 * 2**30)] == shown


def test_the_plan_goes_by_the_limits() -> None:
    config, model = CASES["qwen2"].config, ModelConfig(dtype="bfloat16")
    args = MultiTurnGRPOConfig(
        output_dir="out", use_cpu=True, bf16=False, max_turns=3, max_new_tokens=50, num_generations=2,
        per_device_train_batch_size=2,
    )  # fmt: skip
    plan = plan_memory(config, args, model, critic=False, prompt=20, observation=7)
    assert (plan.tokens, plan.dtype, plan.filters) == (20 + 3 * 50 + 2 * 7, torch.bfloat16, False)
    args.bootstrap_at_limits = True  # a critic reads the last observation too
    assert plan_memory(config, args, model, critic=True, prompt=20, observation=7).tokens == 20 + 3 * 50 + 3 * 7
    args.bootstrap_at_limits = False
    args.max_model_length, args.top_p = 100, 0.9
    assert plan_memory(config, args, model, critic=False, prompt=20, observation=7).filters
    assert plan_memory(config, args, model, critic=False, prompt=20, observation=7).tokens == 100
    args.max_model_length, args.max_turns = None, 50
    assert plan_memory(config, args, model, critic=False, prompt=20, observation=7).tokens == 512, (
        "what the model can read"
    )
