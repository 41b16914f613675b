"""Makes the generator of each rollout: transformers on the trainer's own model, or a vLLM engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from transformers.utils import logging
from trl.models.utils import unwrap_model_for_generation

from agile_trainers.adapters.fused import cast_once
from agile_trainers.adapters.roles import base_model
from agile_trainers.adapters.sharding import gathered_once
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.episode_options import UNLIMITED
from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator, SamplingSettings
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.rollout.generators.transformers.kv_cache import bytes_per_row, fitting_rows
from agile_trainers.sampling.mismatch import Conditions
from agile_trainers.sampling.served_policy import SavedAdapter, ServedPolicy
from agile_trainers.sampling.vllm_checks import compute_dtype

logger = logging.get_logger(__name__)

_ALL = 1 << 62
"""Rows of a process that decodes all of its episodes at the same time."""
_CASTS_SHARE = 3
"""Part of a GPU's free memory that cast weights may take, so that the cache of the episodes keeps most of it."""


def sampling_settings(args: Any, do_sample: bool = True) -> SamplingSettings:
    """Make the sampling settings from a configuration.

    Args:
        args: A ``MultiTurnConfig``.
        do_sample: False takes the likeliest token.
    """
    settings = {one.name: getattr(args, one.name) for one in fields(SamplingSettings) if one.name != "do_sample"}
    return SamplingSettings(**settings | {"stop_strings": tuple(args.stop_strings or ()), "do_sample": do_sample})


def _multiplies_in_tf32() -> bool:
    """Return True if a GPU rounds the factors of fp32 matrix products to TF32."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # since torch 2.9
    return precision == "tf32" if precision is not None else torch.get_float32_matmul_precision() != "highest"


def _policy_class(mode: str) -> type[ServedPolicy]:
    # Importing vLLM takes seconds and changes the process, so it is imported with use_vllm=True only.
    if mode == "server":
        from agile_trainers.sampling.vllm_server import ServerPolicy

        return ServerPolicy
    from agile_trainers.sampling.vllm_colocated import VllmPolicy

    return VllmPolicy


def shared_engine(
    args: Any, max_adapters: int = 1, lender: RolloutSampler | None = None
) -> AbstractContextManager[None]:
    """Let the trainers that are made in a block use one vLLM engine of this process in turn, if they use one.

    A trainer whose options need another engine starts its own.

    Args:
        args: Configuration of the trainers.
        max_adapters: Adapters that the engine serves at the same time.
        lender: Of the trainer whose engine they use. Default: that of the first of them, which is shut down in the end.
    """
    if not args.use_vllm or args.vllm_mode != "colocate":
        return nullcontext()
    from agile_trainers.sampling import vllm_colocated

    policy = None if lender is None else lender.vllm
    assert policy is None or isinstance(policy, vllm_colocated.VllmPolicy)
    return vllm_colocated.lend_engine(max_adapters, policy)


class RolloutSampler:
    """Makes the generator of each rollout, with the current policy.

    Args:
        args: A ``MultiTurnConfig``.
        accelerator: The trainer's.
        policy: The policy, unwrapped.
        wrapped: Returns the policy as distributed training has wrapped it by now.
        engine: The rollout engine that uses the generators.
        tokenizer: The policy's.
        distribution: TRL's ``DistributedBackend``, which gathers sharded weights.

    Raises:
        ValueError: For sampling settings that the generator cannot take, or a policy that vLLM cannot serve.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        policy: Any,
        wrapped: Callable[[], Any],
        engine: RolloutEngine,
        tokenizer: Any,
        distribution: Any,
    ) -> None:
        self._args, self._accelerator = args, accelerator
        self._policy, self._wrapped = policy, wrapped
        self._engine, self._tokenizer = engine, tokenizer
        # TRL's trainer keeps the temperature that it was made with, whatever becomes of the option.
        self._scored_at = args.temperature
        self._synced = 0, 0.0
        self.rows: int | None = args.generation_chunk_size
        """Episodes that are decoded at the same time by the transformers generator; None for all of them."""
        self._room: Callable[[], int] | None = None
        self._tokens = 0
        self.vllm: ServedPolicy | None = None
        """The policy in a vLLM engine; None without ``use_vllm``."""
        settings = sampling_settings(args)
        if args.use_vllm:
            limit = engine.limits.max_model_length
            self.vllm = _policy_class(args.vllm_mode)(
                args, policy, accelerator, distribution, limit if limit < UNLIMITED else None
            )
            if self.vllm.max_model_length < limit < UNLIMITED:
                logger.warning(
                    "Conversations end at %d tokens, the longest that fit into vLLM's share of the GPU, instead of the %d "
                    "that the model can read. For longer ones raise vllm_gpu_memory_utilization=%s.",
                    self.vllm.max_model_length, limit, args.vllm_gpu_memory_utilization,
                )  # fmt: skip
                engine.shorten(self.vllm.max_model_length)
        # Make a generator once for its checks of the sampling settings; the first rollout moves the policy.
        if self.vllm is None:
            with self._on_transformers(settings) as make:
                make(self.rows)
            return
        try:
            with self._on_engine(settings):
                pass
        except BaseException:
            self.close()
            raise

    def bound_by(self, room: Callable[[], int], tokens: int) -> None:
        """Let the first rollout bound its rows by the memory of a GPU, if ``generation_chunk_size`` does not set them.

        Args:
            room: Returns the bytes that are free for a rollout, now and later.
            tokens: Of the longest conversation that is to be expected.
        """
        self._room, self._tokens = room, tokens

    def close(self) -> None:
        """End what runs for the policy beside the trainer's model; see ``ServedPolicy.close``."""
        if self.vllm is not None:
            self.vllm.close()

    def restore(self, rows: int | None) -> None:
        """Take the rows of a checkpoint: those that fitted, or those that were left when memory had run out."""
        self.rows = min(rows or _ALL, self.rows or _ALL)
        self.rows = None if self.rows == _ALL else self.rows

    @contextmanager
    def generator(self, do_sample: bool = True, settings: SamplingSettings | None = None) -> Iterator[Generator]:
        """Make the generator of one rollout.

        Args:
            do_sample: False takes the likeliest token.
            settings: Sampling settings. Default: those of the trainer, with ``do_sample``.
        """
        with self.generators(do_sample, settings) as make:
            yield make()

    @contextmanager
    def generators(
        self, do_sample: bool = True, settings: SamplingSettings | None = None, versions: Versions | None = None
    ) -> Iterator[Callable[[], Generator]]:
        """Give a function that makes a generator of the current policy, for each attempt at a rollout.

        All processes enter and leave together, since they gather sharded weights here: one that plays again must not gather
        alone. Afterwards all have the fewest rows of any of them.

        Args:
            do_sample: False takes the likeliest token.
            settings: Sampling settings. Default: those of the trainer, with ``do_sample``.
            versions: The version of the policy that each episode is sampled with. Default: the current one for all.
        """
        settings = settings or sampling_settings(self._args, do_sample)
        if self.vllm is not None:
            with self._on_vllm(self.vllm, settings, versions) as made:
                yield lambda: made
            return
        with self._on_transformers(settings) as make:
            if self.rows is None and self._room is not None and self._accelerator.device.type == "cuda":
                self.rows = self._fewest(fitting_rows(self._room(), self._bytes_per_row()))
            if versions is None:
                yield lambda: make(self.rows)
            else:
                yield lambda: self._versioned(make, versions)
        self.rows = self._fewest(self.rows)

    def _versioned(self, make: Callable[[int | None], Generator], versions: Versions) -> Generator:
        """Make a generator whose versions share the rows."""
        rows = None if self.rows is None else max(1, self.rows // len(versions.wanted()))
        return VersionedGenerator(lambda: make(rows), versions, self.rows)

    def _bytes_per_row(self) -> int:
        config = base_model(self._policy).config.get_text_config()
        dtype = compute_dtype(self._args, self._policy)
        return bytes_per_row(config, self._tokens, self._args.max_new_tokens, dtype)

    def _fewest(self, rows: int | None) -> int | None:
        """Return the fewest rows of all processes."""
        accelerator = self._accelerator
        if accelerator.num_processes == 1:
            return rows
        fewest = int(accelerator.gather(torch.tensor([rows or _ALL], device=accelerator.device)).min())
        return None if fewest == _ALL else fewest

    @contextmanager
    def _on_transformers(self, settings: SamplingSettings) -> Iterator[Callable[[int | None], Generator]]:
        """Make generators of so many rows on the unwrapped policy, in eval mode, as TRL does for its own generation."""
        args, training = self._args, self._policy.training
        with (
            unwrap_model_for_generation(
                self._wrapped(),
                self._accelerator,
                gather_deepspeed3_params=args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            gathered_once(model),
            self._cast(model),
        ):
            # A compiled model would be compiled again for every length of the KV cache.
            model = extract_model_from_parallel(model, keep_torch_compile=False)
            model.eval()
            try:
                yield lambda rows: TransformersGenerator(
                    model,
                    eos_token_ids=self._engine.chat.eos_token_ids,
                    pad_token_id=self._tokenizer.pad_token_id,
                    settings=settings,
                    tokenizer=self._tokenizer,
                    max_batch_size=rows,
                )
            finally:
                model.train(training)

    @contextmanager
    def _cast(self, model: torch.nn.Module) -> Iterator[None]:
        """Cast weights once for the rollout, if autocast would cast them for every token.

        A model whose training has not begun is not wrapped in autocast yet.
        """
        accelerator = self._accelerator
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        if dtype is None:
            yield
            return
        on_gpu = accelerator.device.type == "cuda"
        room = torch.cuda.mem_get_info()[0] // _CASTS_SHARE if on_gpu else None
        with accelerator.autocast(), cast_once(model, dtype, room):
            yield

    @contextmanager
    def _on_vllm(
        self, policy: ServedPolicy, settings: SamplingSettings, versions: Versions | None
    ) -> Iterator[Generator]:
        started = time.perf_counter()
        if versions is None:
            with policy.serving() as moved:
                self._count_sync(moved, started)
                with self._on_engine(settings) as made:
                    yield made
            return
        self.serve(versions)
        with self.generator_of_versions(versions, settings) as made:
            yield made

    def serve(self, versions: Versions) -> None:
        """Let vLLM serve the versions of the policy that play, and no other. All processes call it together."""
        assert self.vllm is not None
        started = time.perf_counter()
        self._count_sync(self.vllm.serve_versions(versions.wanted(), versions.holding), started)

    def generator_of_versions(
        self, versions: Versions, settings: SamplingSettings | None = None
    ) -> AbstractContextManager[Generator]:
        """Make a generator that samples each episode with its version, of those that :meth:`serve` has named by then."""
        assert self.vllm is not None
        served, of = self.vllm.served, versions.of
        return self._on_engine(settings or sampling_settings(self._args), lambda key: served[of(key)])

    @property
    def overlaps(self) -> bool:
        """True if episodes can be played while the trainer computes."""
        return self.vllm is not None and self.vllm.overlaps

    def _count_sync(self, moved: int, started: float) -> None:
        bytes_before, seconds = self._synced
        self._synced = bytes_before + moved, seconds + time.perf_counter() - started

    @contextmanager
    def generator_of_several(
        self, adapters: Sequence[SavedAdapter], adapter_of: Callable[[int], int], settings: SamplingSettings
    ) -> Iterator[Generator]:
        """Make a generator that samples each episode with one of several adapters, all of them in one batch on vLLM.

        Args:
            adapters: Weights and configuration of each, at most ``vllm.max_adapters``.
            adapter_of: Index of an episode to that of its adapter.
            settings: Sampling settings.
        """
        assert self.vllm is not None
        with (
            self.vllm.serving_several(adapters) as served,
            self._on_engine(settings, lambda episode: served[adapter_of(episode)]) as made,
        ):
            yield made

    def _on_engine(
        self, settings: SamplingSettings, adapter_of: Callable[[int], Any] = lambda episode: None
    ) -> AbstractContextManager[Generator]:
        assert self.vllm is not None
        return self.vllm.generator(settings, self._engine.chat.eos_token_ids, self._tokenizer, adapter_of)

    def halve(self, episodes: int) -> None:
        """Let the next generators decode half as many episodes at the same time, after memory ran out.

        Args:
            episodes: How many there were.

        Raises:
            RuntimeError: If one at a time was too many, or vLLM decodes, whose memory is set aside at the start.
        """
        if self.vllm is not None:
            raise RuntimeError(
                "Memory ran out in a rollout with vLLM. Lower vllm_gpu_memory_utilization, which leaves more to the rest."
            )
        rows = min(episodes, self.rows or episodes)
        if rows <= 1:
            raise RuntimeError(
                "A single episode does not fit into memory in a rollout. Lower max_model_length, or load the model in 4 bit."
            )
        self.rows = rows // 2
        logger.warning(
            "A rollout did not fit into memory, and its episodes are played again. From now on %d are decoded at the same "
            "time; set generation_chunk_size=%d to start with that.",
            self.rows, self.rows,
        )  # fmt: skip

    def sync_metrics(self) -> dict[str, float]:
        """Return bytes and seconds of moving the policy to vLLM since the last call; empty without vLLM."""
        if self.vllm is None:
            return {}
        (moved, seconds), self._synced = self._synced, (0, 0.0)
        return {"vllm/sync_bytes": float(moved), "time/sync": seconds}

    def conditions(self) -> Conditions:
        """Describe how sampler and trainer compute, to explain a mismatch between them."""
        args, policy = self._args, self._policy
        base, on_gpu = base_model(policy), args.device.type == "cuda"
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
        ours = autocast.get(self._accelerator.mixed_precision) or compute_dtype(args, policy)
        return Conditions(
            settings=sampling_settings(args),
            scored_at=self._scored_at,
            sampler=ours if self.vllm is None else self.vllm.dtype,
            trainer=ours,
            quantized=getattr(base.config, "quantization_config", None) is not None,
            # Triton's matrix products, which vLLM's attention uses, round to TF32 whatever the setting of torch.
            tf32=on_gpu and (self.vllm is not None or _multiplies_in_tf32()),
            dropout=not args.disable_dropout,
            vllm=self.vllm is not None,
            corrected=bool(args.vllm_importance_sampling_correction),
            model_type=base.config.model_type,
        )


# ----------------------------------------------------------------------------------------------- versions of the policy


@dataclass(frozen=True)
class Versions:
    """The versions of a policy that play at the same time."""

    of: Callable[[int], int]
    """Maps an episode to its version."""
    wanted: Callable[[], Collection[int]]
    """Returns all of them."""
    holding: Callable[[int], AbstractContextManager[None]]
    """Lets the trainer's model compute with a version in a block."""


class VersionedGenerator:
    """A generator for each version of a policy, of which one computes at a time.

    Args:
        make: Makes the generator of a version.
        versions: The versions, the same ones as long as this generator is used.
        most: Number of versions that have a generator, the oldest ones. Requests of the others are left to the next
            versioned generator. Default: no limit.
    """

    def __init__(self, make: Callable[[], Generator], versions: Versions, most: int | None = None) -> None:
        self._make, self._versions = make, versions
        self._computed = frozenset(sorted(versions.wanted())[:most])
        self._generators: dict[int, Generator] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :class:`Generator`."""
        version = self._versions.of(request.episode)
        if version not in self._computed:
            return
        if version not in self._generators:
            self._generators[version] = self._make()
        self._generators[version].submit(request)

    def step(self) -> list[GenerationOutput]:
        """Make progress with the requests of every version, the oldest first."""
        outputs: list[GenerationOutput] = []
        for version, generator in sorted(self._generators.items()):
            if generator.pending:
                with self._versions.holding(version):
                    outputs += generator.step()
        return outputs

    @property
    def pending(self) -> int:
        """Number of requests submitted and not yet returned, without those that are left to the next generator."""
        return sum(generator.pending for generator in self._generators.values())

    def release(self, episode: int) -> None:
        """Forget an episode; see :class:`Generator`."""
        for generator in self._generators.values():
            generator.release(episode)
