"""Compares sampled, scored and trained log-probabilities on architectures of transformers (``make architectures``).

Each model is tiny, has random weights and trains in fp32 on CPU. ``MultiTurnGRPOTrainer`` plays ragged episodes of several
turns with the transformers generator, scores them as the old policy, and makes one update in micro-batches that hold other
episodes together. A row's mismatch is the largest difference between the three over all action tokens. The exit code is 1
if a mismatch is above ``BOUND`` or a run fails after construction. Models that the trainer refuses are listed with the
error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from image_models import IMAGE_ARCHITECTURES, Gallery, make_image_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from agile_trainers.embedded import make_tokenizer
from agile_trainers.rollout.generators.architecture import reading
from agile_trainers.train_batch import TrainBatch
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

BOUND = 1e-3
"""Largest mismatch of an accepted row, in nats."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
_WINDOW = 8
"""Width of a local attention window in tokens, a fraction of a turn."""

_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_MODERN = {**_SIZE, "num_key_value_heads": 2, "max_position_embeddings": 512}
_HEAD = {**_MODERN, "head_dim": 8}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": _WINDOW}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

_NO_AUXILIARY_LOSS = {"router_aux_loss_coef": 0.0}
"""Options of models whose auxiliary loss TRL cannot compute; the trainer refuses it."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {
        **_HEAD,
        **_EXPERTS,
        "num_dense_layers": 1,
        "sliding_window": _WINDOW,
        "layer_types": _SLIDING["layer_types"],
    },
    "apertus": _MODERN,
    "arcee": _HEAD,
    "bamba": {**_MODERN, **_MAMBA2, "attn_layer_indices": [1]},
    "biogpt": {**_SIZE, "max_position_embeddings": 512},
    "bitnet": _MODERN,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": {**_GPT2, "rotary_dim": 4, "n_ctx": 512},
    "cohere": _MODERN,
    "cohere2": {**_HEAD, **_SLIDING},
    "ctrl": {**_GPT2, "dff": 48},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_MODERN, **_ROUTED, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "deepseek_v3": {**_MODERN, **_ROUTED, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "diffllama": _MODERN,
    "dots1": {**_HEAD, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5": _HEAD,
    "ernie4_5_moe": {
        **_MODERN,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
    "exaone4": {**_MODERN, **_SLIDING},
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "alibi": False,
        "max_position_embeddings": 512,
    },
    "falcon alibi": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "falcon_h1": {**_HEAD, **_MAMBA2, "mamba_d_ssm": 64},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "flex_olmo": {**_MODERN, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma": _HEAD,
    "gemma2": {**_HEAD, **_SLIDING},
    "gemma3_text": {**_HEAD, **_SLIDING},
    "glm": _HEAD,
    "glm4": _HEAD,
    "glm4_moe": {**_HEAD, **_ROUTED, "first_k_dense_replace": 1},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 512,
        "window_size": _WINDOW,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {**_SIZE, "max_position_embeddings": 512},
    "gpt_oss": {**_HEAD, **_LOCAL, **_SLIDING},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granite": _MODERN,
    "granitemoe": {**_MODERN, **_LOCAL, **_NO_AUXILIARY_LOSS},
    "granitemoehybrid": {
        **_MODERN,
        **_LOCAL,
        **_MAMBA2,
        **_NO_AUXILIARY_LOSS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 24,
    },
    "granitemoeshared": {**_MODERN, **_LOCAL, **_NO_AUXILIARY_LOSS, "shared_intermediate_size": 24},
    "helium": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "jais2": _MODERN,
    "jamba": {
        **_MODERN,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "jetmoe": {**_MODERN, "kv_channels": 8, "num_local_experts": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "lfm2": {**_MODERN, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "lfm2_moe": {
        **_MODERN,
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "num_dense_layers": 1,
    },
    "llama": _MODERN,
    "llama dynamic": {**_MODERN, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "llama4_text": {
        **_HEAD,
        **_LOCAL,
        **_NO_AUXILIARY_LOSS,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": _WINDOW,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
    },
    "longcat_flash": {
        **_HEAD,
        **_LATENT,
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "num_key_value_heads": 4,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "minimax": {**_HEAD, **_LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "minimax_m2": {**_HEAD, **_LOCAL},
    "ministral": {**_HEAD, **_SLIDING},
    "mistral": {**_HEAD, "sliding_window": _WINDOW},
    "mixtral": {**_MODERN, **_LOCAL},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    "nanochat": _MODERN,
    "nemotron": _MODERN,
    "nemotron_h": {
        **_HEAD,
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "olmo": _MODERN,
    "olmo2": _MODERN,
    "olmo3": {**_MODERN, **_SLIDING},
    "olmoe": {**_MODERN, **_LOCAL, "num_experts": 4},
    "openai-gpt": _GPT2,
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 512,
    },
    "persimmon": {**_SIZE, "max_position_embeddings": 512},
    "phi": _MODERN,
    "phi3": _MODERN,
    "phi3 longrope": {
        **_MODERN,
        "original_max_position_embeddings": 48,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 48,
        },
    },
    "phimoe": {**_MODERN, **_LOCAL, **_NO_AUXILIARY_LOSS},
    "qwen2": _MODERN,
    "qwen2 sliding": {**_MODERN, **_SLIDING, "use_sliding_window": True},
    "qwen2_moe": {**_MODERN, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": _HEAD,
    "qwen3_5_text": {**_HEAD, **_LINEAR},
    "qwen3_moe": {**_HEAD, **_EXPERTS},
    "qwen3_next": {**_HEAD, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 24},
    "recurrent_gemma": {
        **_SIZE,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": _WINDOW,
        "num_hidden_layers": 3,
    },
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 512},
    "seed_oss": _HEAD,
    "smollm3": {**_MODERN, "no_rope_layers": [1, 0]},
    "stablelm": _MODERN,
    "starcoder2": {**_MODERN, "sliding_window": _WINDOW},
    "vaultgemma": {**_HEAD, **_SLIDING},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 512},
    "zamba2": {
        **_MODERN,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"],
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
}


def make_model(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny causal language model with random weights that react to every token and position.

    Args:
        name: Key of ``ARCHITECTURES``: a model type, and a word for what is unusual about it.
        seed: Seed of the weights.
        changes: Further options of the model's configuration.
    """
    tokenizer = make_tokenizer()
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(
        name.split()[0], vocab_size=len(tokenizer), **{**ids, **ARCHITECTURES[name], **changes}
    )
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            # Matrices get unit gain, since transformers initializes them so small that no position matters. Biases, norms
            # and state-space decays differ from element to element, since transformers initializes them equal.
            if parameter.ndim >= 2 and "A_log" not in parameter_name and "conv" not in parameter_name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            else:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model.float()


class Talk:
    """An environment of one to four turns; the seed decides the number and the length of the first observation."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self.turn, self.turns = 0, 1 + (seed or 0) % 4
        return f"start {(seed or 0) % 7} " + "more " * ((seed or 0) % 5), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer an action."""
        self.turn += 1
        return "again " * (1 + len(action) % 4), sum(map(ord, action)) % 5 / 4, self.turn >= self.turns, False, {}


class Comparing(MultiTurnGRPOTrainer):
    """Trains, and records the largest differences of scored and of trained log-probabilities from the sampled ones."""

    scored, trained, tokens = 0.0, 0.0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        finish = self.batches.finish

        def noted(batch: Any, *given: Any) -> TrainBatch:
            output = finish(batch, *given)
            scored = self.log_prob_passes.compute(self._models, batch, old=True, reference=False).old
            assert scored is not None
            self.scored = self._mismatch(scored, output)
            self.tokens = int((batch.turn_ids >= 0).sum())
            return output

        self.batches.finish = noted  # type: ignore

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_pass is not None:
            self.trained = max(self.trained, self._mismatch(result[0].detach(), self._loss_pass.batch))
        return result

    @staticmethod
    def _mismatch(log_probs: torch.Tensor, batch: TrainBatch) -> float:
        differences = (log_probs - batch.sampling_per_token_logps)[batch.turn_ids >= 0].abs()
        return float(differences.nan_to_num(nan=torch.inf).max()) if len(differences) else 0.0


@dataclass
class Row:
    """The result for one architecture: its mismatches in nats, or the error that refused it."""

    name: str
    scored: float = 0.0
    trained: float = 0.0
    tokens: int = 0
    """Number of action tokens compared."""
    reads: str = ""
    """Name of the :class:`Reading`, which says what the sampler reads again."""
    refused: str = ""
    failed: str = ""
    """The error of a run that failed after construction."""

    @property
    def accepted(self) -> bool:
        """True if the trainer took the model."""
        return not self.refused

    @property
    def mismatch(self) -> float:
        """The larger mismatch."""
        return max(self.scored, self.trained)

    @property
    def right(self) -> bool:
        """True if the model was refused, or trained with a mismatch within the bound."""
        return not self.accepted or (not self.failed and self.mismatch <= BOUND)


def compare(name: str, folder: Path | str, **changes: Any) -> Row:
    """Train an architecture for one update.

    Args:
        name: Key of ``ARCHITECTURES`` or ``IMAGE_ARCHITECTURES``.
        folder: Output folder of the run.
        changes: Options of the model's configuration.
    """
    environment: Any = Talk
    if name in IMAGE_ARCHITECTURES:
        (model, processor), environment = make_image_model(name), Gallery
    else:
        model, processor = make_model(name, **changes), make_tokenizer()
    args = MultiTurnGRPOConfig(
        output_dir=str(folder), max_turns=4, max_new_tokens=8, stop_strings=list("aeiou "), num_generations=4,
        num_iterations=1,
        vllm_importance_sampling_correction=True,  # the policy is scored before its update
        per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, bf16=False, use_cpu=True,
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        log_rollouts=False, optim="sgd", learning_rate=1e-3, seed=3,
        skip_zero_advantage="false",  # every row is scored and trained, also one whose advantage happens to be 0
    )  # fmt: skip
    try:
        trainer = Comparing(model=model, args=args, environment=environment, processing_class=processor)
    except ValueError as error:
        return Row(name, refused=str(error))
    trainer.train()
    return Row(name, trainer.scored, trainer.trained, trainer.tokens, reading(model).name)


def page(rows: list[Row]) -> str:
    """The whole page as Markdown."""
    accepted = [row for row in rows if row.accepted]
    lines = [
        "# Architectures",
        "",
        "`make architectures` trains tiny random-weight models of many architectures for one update and compares the",
        "log-probabilities of every action token three times: as sampled by the transformers generator (ragged episodes",
        "of several turns, batches of different lengths), as scored before the update, and as computed by the update.",
        f"The table gives the largest mismatch in nats, in fp32 on CPU; more than {BOUND:g} fails. The mismatches show that",
        "sampler and trainer agree. They show nothing about real weights, other precisions or GPU kernels.",
        "",
        f"{len(accepted)} architectures are accepted, with a largest mismatch of "
        f"{max(row.mismatch for row in accepted):.1e}; {len(rows) - len(accepted)} are refused at construction. "
        f"Measured with transformers {transformers.__version__}.",
        "",
        "The last column says what the model reads to sample a turn: *new* tokens only; the whole conversation once a",
        "*turn* (windows, recurrent layers, positions counted in columns); or the whole conversation for every *token*",
        "(models without a cache, or whose decoding differs from reading), which is slow for long answers.",
        "",
        "| architecture | sampled - scored | sampled - trained | reads |",
        "|---|---|---|---|",
    ]
    for row in accepted:
        differences = f"{row.scored:.1e} | {row.trained:.1e}" if not row.failed else f"fails: {row.failed} | "
        lines.append(f"| {row.name} | {differences} | {row.reads.lower()} |")
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| {row.name} | {row.refused} |" for row in rows if not row.accepted]
    return "\n".join(lines) + "\n"


def attempt(name: str) -> Row:
    """Compare one architecture; a run that fails after construction becomes a row with its error."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            return compare(name, folder)
        except Exception as error:
            return Row(name, failed=f"{type(error).__name__}: {str(error)[:200]}")


def main() -> int:
    """Compare the architectures named on the command line, or all. Return 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"Architectures. Default: all, and write {PAGE.name}.")
    names = parser.parse_args().names
    known = [*ARCHITECTURES, *IMAGE_ARCHITECTURES]
    if unknown := set(names) - set(known):
        parser.error(f"unknown architectures {sorted(unknown)}: choose from {', '.join(known)}.")
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for name in names or known:
        rows.append(row := attempt(name))
        result = (
            row.refused
            or row.failed
            or f"{row.scored:.1e} {row.trained:.1e} over {row.tokens} tokens, reads {row.reads}"
        )
        print(f"{name:20} {'ok   ' if row.right else 'WRONG'} {result}", flush=True)
    if not names:
        PAGE.write_text(page(rows))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
