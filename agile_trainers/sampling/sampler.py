"""What a rollout samples with: the transformers generator on the trainer's own model, or a vLLM engine beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers.utils import logging
from trl import GRPOTrainer
from trl.models.utils import unwrap_model_for_generation

from agile_trainers.adapters import gathered_once
from agile_trainers.objectives.mismatch import gap_metrics, importance_weights
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.sampling.gap import EXACT, ROUNDED, Conditions, GapMeter, SamplerMismatchError, explain
from agile_trainers.sampling.vllm_checks import base_model, compute_dtype
from agile_trainers.train_batch import Batch
from agile_trainers.types import TurnBatch

if TYPE_CHECKING:
    from agile_trainers.sampling.vllm_colocated import VllmPolicy

logger = logging.get_logger(__name__)


def sampling_settings(args: Any, do_sample: bool = True) -> SamplingSettings:
    """How answers are sampled.

    Args:
        args: A ``MultiTurnConfig``.
        do_sample: False: greedily.
    """
    return SamplingSettings(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        min_new_tokens=args.min_new_tokens,
        stop_strings=tuple(args.stop_strings or ()),
        do_sample=do_sample,
    )


def _multiplies_in_tf32() -> bool:
    """Whether a GPU rounds the factors of fp32 matrix products to TF32."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # since torch 2.9
    return precision == "tf32" if precision is not None else torch.get_float32_matmul_precision() != "highest"


def _policy_class(mode: str) -> type[VllmPolicy]:
    # Importing vLLM takes seconds and changes the process: only whoever asks for it.
    if mode == "server":
        from agile_trainers.sampling.vllm_server import ServerPolicy

        return ServerPolicy
    from agile_trainers.sampling.vllm_colocated import VllmPolicy as ColocatedPolicy

    return ColocatedPolicy


class Generation(GRPOTrainer):
    """The rollout generators of the multi-turn trainers, and what makes up for the gap between sampler and trainer."""

    args: Any
    model: Any
    engine: RolloutEngine | None
    _vllm: VllmPolicy | None = None
    _synced: tuple[int, float] = (0, 0.0)
    """Bytes moved to vLLM for the last rollout, and the seconds it took."""
    _gaps: tuple[float, float] | None = None
    """Mean gap between sampler and trainer of the first generation batch, and of the last."""
    _gap_meter: GapMeter

    def _set_up_generation(self) -> None:
        """Once, after the rollout engine was made."""
        assert self.engine is not None
        self._gap_meter = GapMeter(self.accelerator)
        if self.use_vllm:
            limit = self.engine.limits.max_model_length
            self._vllm = _policy_class(self.args.vllm_mode)(
                self.args,
                self.accelerator.unwrap_model(self.model),
                self.accelerator,
                self._dist,
                limit if limit < 1 << 30 else None,
            )
        with self._generator():
            # Made once for its checks of the sampling settings.
            pass

    @contextmanager
    def _generator(self, do_sample: bool = True) -> Iterator[Generator]:
        """The generator of one rollout, with the policy as it is now."""
        settings = sampling_settings(self.args, do_sample)
        generator = self._on_transformers(settings) if self._vllm is None else self._on_vllm(self._vllm, settings)
        with generator as made:
            yield made

    @contextmanager
    def _on_transformers(self, settings: SamplingSettings) -> Iterator[Generator]:
        """On the unwrapped policy, in eval mode, as TRL unwraps it for its own generation."""
        assert self.engine is not None
        args, training = self.args, self.model.training
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            gathered_once(model),
        ):
            # Compiled, it would be compiled again for every length of the KV cache.
            model = extract_model_from_parallel(model, keep_torch_compile=False)
            model.eval()
            try:
                yield TransformersGenerator(
                    model,
                    eos_token_ids=self.engine.chat.eos_token_ids,
                    pad_token_id=self._tokenizer.pad_token_id,
                    settings=settings,
                    tokenizer=self._tokenizer,
                    max_batch_size=args.generation_chunk_size,
                )
            finally:
                model.train(training)

    @contextmanager
    def _on_vllm(self, policy: VllmPolicy, settings: SamplingSettings) -> Iterator[Generator]:
        assert self.engine is not None
        started = time.perf_counter()
        with policy.serving() as moved:
            self._synced = moved, time.perf_counter() - started
            with policy.generator(settings, self.engine.chat.eos_token_ids, self._tokenizer) as made:
                yield made

    # -------------------------------------------------------------------------------------------------------- gap

    def _measure_gap(self, batch: TurnBatch, scores: Batch, trained: torch.Tensor) -> None:
        """Compare sampler and trainer where the old policy was scored; otherwise the first update's forward pass will.

        Args:
            batch: The episodes.
            scores: Of :meth:`Scoring._policy_scores`.
            trained: (B, T) bool, the tokens that are trained on.
        """
        self._gap_meter.open()
        if "old_per_token_logps" in scores:
            counted, padded = trained & scores["scored"][:, None], batch.prompt_mask[:, 0] == 0
            log_probs = scores["old_per_token_logps"]
            self._gap_meter.add(log_probs, batch.sampling_logprobs, counted, batch.turn_ids, padded)
            self._check_gap()

    def _check_gap(self) -> None:
        """Log the gap of a generation batch; all ranks agree on it.

        Raises:
            SamplerMismatchError: In the run's first batch, if it is too wide and rounding cannot be the reason.
        """
        gap = self._gap_meter.read()
        if gap is None:
            return
        for name, value in (("mean", gap.mean), ("max", gap.maximum)):
            self._metrics["train"][f"sampling/sampling_logp_difference/{name}"].append(value)
        # A run that is resumed has got past its first batch, and goes on.
        conditions, is_first = self._conditions(), self._gaps is None and self.state.global_step == 0
        bound = self.args.max_logprob_gap or (EXACT if conditions.exact else ROUNDED)
        first, last = self._gaps or (gap.mean, 0.0)
        self._gaps = first, gap.mean
        if gap.mean <= bound:
            return
        text = explain(gap, bound, conditions, first)
        if is_first and conditions.exact:
            raise SamplerMismatchError(text)
        if last <= bound:  # once, until it has been narrow again
            logger.warning(text)

    def _conditions(self) -> Conditions:
        args, policy = self.args, self.accelerator.unwrap_model(self.model)
        base, on_gpu = base_model(policy), args.device.type == "cuda"
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
        ours = autocast.get(self.accelerator.mixed_precision) or compute_dtype(args, policy)
        return Conditions(
            settings=sampling_settings(args),
            scored_at=self.temperature,
            sampler=ours if self._vllm is None else self._vllm.dtype,
            trainer=ours,
            quantized=getattr(base.config, "quantization_config", None) is not None,
            # Triton's matrix products, of which vLLM's attention is made, round to TF32 whatever torch is told.
            tf32=on_gpu and (self._vllm is not None or _multiplies_in_tf32()),
            dropout=not args.disable_dropout,
            vllm=self._vllm is not None,
            corrected=self._corrects_mismatch,
            model_type=base.config.model_type,
        )

    # ------------------------------------------------------------------------------------------------- correction

    @property
    def _corrects_mismatch(self) -> bool:
        return bool(self.vllm_importance_sampling_correction)

    def _correction(self, batch: TurnBatch, log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Weights (B, T) that make up for the gap between sampler and trainer in TRL's loss; logs what they are.

        Args:
            batch: The episodes.
            log_probs: (B, T), of the trainer's policy.
            mask: (B, T) bool, the tokens that were scored and are trained on.
        """
        args = self.args
        correction = importance_weights(
            log_probs,
            batch.sampling_logprobs,
            batch.turn_ids,
            mask,
            mode=args.vllm_importance_sampling_mode,
            lowest=args.vllm_importance_sampling_clip_min,
            highest=args.vllm_importance_sampling_clip_max,
        )
        columns = (log_probs, batch.sampling_logprobs, correction.weights, correction.clipped.long(), mask.long())
        ours, theirs, weights, clipped, counted = (
            self.accelerator.gather(self.accelerator.pad_across_processes(column, dim=1)) for column in columns
        )
        for name, value in gap_metrics(ours, theirs, weights, clipped.bool(), counted.bool()).items():
            self._metrics["train"][name].append(value)
        return correction.weights

    def _sync_metrics(self) -> dict[str, float]:
        """What the last rollout's sync cost; empty without vLLM."""
        if self._vllm is None:
            return {}
        moved, seconds = self._synced
        return {"vllm/sync_bytes": float(moved), "time/sync": seconds}
