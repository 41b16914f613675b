"""Serves the trainer's policy from a vLLM engine, and moves it there before a rollout if it has changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from hashlib import blake2b
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from torch.distributed.tensor import DTensor

from agile_trainers.adapters.roles import POLICY, base_model, belongs_to
from agile_trainers.rollout.generators.base import Generator, SamplingSettings
from agile_trainers.rollout.generators.images import reader_of
from agile_trainers.sampling.vllm_checks import compute_dtype

SavedAdapter = tuple[Mapping[str, torch.Tensor], LoraConfig]
"""An adapter's weights, under PEFT's names, and its configuration."""


class ServedPolicy(ABC):
    """An engine that serves the trainer's policy.

    With LoRA only the policy's adapter is moved. The constructor moves it, so that an adapter that the engine cannot serve
    is an error at construction; the first rollout moves it again only if it has changed. A model that is trained whole is
    moved before every rollout; before the first one the engine has the weights that it loaded itself.

    Args:
        args: The trainer's.
        model: The policy, unwrapped.
        accelerator: The trainer's.
        distribution: TRL's ``DistributedBackend``, which gathers sharded weights.
        max_model_length: Tokens of a conversation; None if nothing but the model limits it.

    Raises:
        ValueError: If the engine cannot serve this policy.
    """

    overlaps: ClassVar[bool] = False
    """True if the engine computes while this process does something else."""
    _generator_class: ClassVar[Any]
    """The class of generators on the engine."""
    _keeps_adapter = True
    """True if the adapter that construction moved is certain to be there at the first rollout."""
    _group: dist.ProcessGroup | None = None
    """The processes that share an engine; None where each has its own."""
    engine: Any
    """The engine, an :class:`~agile_trainers.rollout.generators.vllm.adapter_host.AdapterHost`."""

    def __init__(
        self, args: Any, model: torch.nn.Module, accelerator: Any, distribution: Any, max_model_length: int | None
    ):
        self._model, self._accelerator, self._distribution = model, accelerator, distribution
        self._sleeps, self._offloads = args.vllm_enable_sleep_mode, args.offload_policy_during_rollout
        self._reader = reader_of(base_model(model))
        self._config = model.peft_config[POLICY] if isinstance(model, PeftModel) else None
        self.dtype = compute_dtype(args, model)
        rows = args.generation_chunk_size or args.per_device_train_batch_size * args.steps_per_generation
        self._moved_at_construction: tuple[int, bytes] | None = None
        self.served: dict[int, Any] = {}
        """Version of the policy to what requests name its adapter by."""
        try:
            self._connect(args, rows, max_model_length)
            if self._config is not None:
                moved = self.sync()
                if self._keeps_adapter and not self._sleeps:
                    with self._adapter() as weights:
                        self._moved_at_construction = moved, digest(weights)
            self._sleep()
        except BaseException:
            self.close()
            raise
        accelerator.wait_for_everyone()

    @abstractmethod
    def _connect(self, args: Any, rows: int, max_model_length: int | None) -> None:
        """Make :attr:`engine`, or connect to it."""

    def _move_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> int:
        """Move an adapter to the engine and return its bytes."""
        return int(self.engine.load_adapter(weights, config))

    def _add_adapter(self, weights: dict[str, torch.Tensor], config: LoraConfig) -> tuple[Any, int]:
        """Serve a further adapter; return what requests name it by, and its bytes."""
        added: tuple[Any, int] = self.engine.add_adapter(weights, config)
        return added

    @abstractmethod
    def _move_whole(self) -> int:
        """Move a model that is trained whole to the engine and return its bytes."""

    @property
    def max_adapters(self) -> int | None:
        """Number of adapters that :meth:`serving_several` takes; None without a limit."""
        most: int | None = self.engine.max_adapters
        return most

    @property
    def max_model_length(self) -> int:
        """Tokens of a conversation that the engine takes."""
        return int(self.engine.max_model_length)

    @contextmanager
    def generator(
        self,
        settings: SamplingSettings,
        eos_token_ids: list[int],
        tokenizer: Any,
        adapter_of: Callable[[int], Any] = lambda episode: None,
    ) -> Iterator[Generator]:
        """Make a generator of this process on the engine.

        Args:
            settings: Sampling options.
            eos_token_ids: Tokens that end an answer.
            tokenizer: The policy's.
            adapter_of: Returns the adapter of :meth:`serving_several` that an episode is sampled with. Default: the policy.
        """
        made = self._generator_class(
            self.engine, eos_token_ids=eos_token_ids, settings=settings, tokenizer=tokenizer, adapter_of=adapter_of,
            reader=self._reader,
        )  # fmt: skip
        with closing(made), self._sampling(made) as sampling:
            yield sampling

    @contextmanager
    def _sampling(self, made: Any) -> Iterator[Generator]:
        """Let a generator sample while the block runs."""
        yield made

    def _wake(self, *parts: str) -> None:
        """Give an engine that sleeps between rollouts the memory of its ``"weights"`` or its ``"kv_cache"``."""
        return

    def _sleep(self) -> None:
        """Free the engine's memory if it sleeps between rollouts."""
        return

    @contextmanager
    def _adapter(self) -> Iterator[dict[str, torch.Tensor]]:
        """Gather the policy's adapter on every process."""
        own = [weight for name, weight in self._model.named_parameters() if belongs_to(name, POLICY)]
        with self._distribution.gather_params(own):
            adapter = get_peft_model_state_dict(self._model, adapter_name=POLICY, save_embedding_layers=False)
            # FSDP2 keeps a share of each; every process asks for the whole in the same order.
            shares = ((name, weight) for name, weight in adapter.items() if isinstance(weight, DTensor))
            yield adapter | {name: weight.full_tensor() for name, weight in shares}

    def sync(self) -> int:
        """Move the current policy to the engine and return the bytes that were moved."""
        if self._config is None:
            return self._move_whole()
        with self._adapter() as weights:
            return self._move_adapter(weights, self._config)

    def _sync_if_changed(self) -> int:
        """Move the current policy if it has changed; return the bytes that were moved, here or at construction."""
        before, self._moved_at_construction = self._moved_at_construction, None
        if before is not None:
            with self._adapter() as weights:
                if digest(weights) == before[1]:
                    return before[0]
        return self.sync()

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Wake the engine with the current policy; yield the bytes that were moved."""
        self._wake("weights")
        moved = self._sync_if_changed()
        if self._group is not None:
            # As TRL does: the gradients' last messages must be through before vLLM sends its own.
            self._accelerator.wait_for_everyone()
        with offloaded(self._model, self._offloads):
            self._wake("kv_cache")
            try:
                yield moved
            finally:
                self._sleep()

    @contextmanager
    def serving_several(self, adapters: Sequence[SavedAdapter]) -> Iterator[list[Any]]:
        """Wake the engine with other adapters than the policy's, at the same time; yield what ``adapter_of`` returns.

        The policy's own adapter is taken away; the next :meth:`serving` moves it again.
        """
        self._wake("weights", "kv_cache")
        self.release()
        served: list[Any] = []
        try:
            served += (self.engine.add_adapter(weights, config)[0] for weights, config in adapters)
            yield served
        finally:
            for one in served:
                self.engine.drop_adapter(one)
            self._sleep()

    def serve_versions(self, wanted: Collection[int], holding: Callable[[int], AbstractContextManager[None]]) -> int:
        """Serve some versions of the policy at the same time, and no other; each is moved once.

        Args:
            wanted: The versions, the same on all processes.
            holding: Lets the model compute with a version in a block.

        Returns:
            The bytes that were moved.
        """
        assert self._config is not None
        for version in self.served.keys() - set(wanted):
            self._drop_adapter(self.served.pop(version))
        total = 0
        for version in sorted(set(wanted) - self.served.keys()):
            with holding(version), self._adapter() as weights:
                self.served[version], moved = self._add_adapter(weights, self._config)
            total += moved
        return total

    def _drop_adapter(self, adapter: Any) -> None:
        """Unload an adapter that :meth:`serve_versions` has loaded."""
        self.engine.drop_adapter(adapter)

    @abstractmethod
    def close(self) -> None:
        """End the trainer's own engine, or take the policy's adapters from another. Waits for no process."""

    def release(self) -> None:
        """Take the policy's adapter from the engine."""
        self._moved_at_construction = None
        self.engine.remove_adapter()


def digest(weights: Mapping[str, torch.Tensor]) -> bytes:
    """Compute a digest of names, types, shapes and values; equal weights have equal digests."""
    made = blake2b(digest_size=16)
    for name in sorted(weights):
        weight = weights[name].detach().cpu().contiguous()
        made.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        made.update(weight.flatten().view(torch.uint8).numpy().tobytes())
    return made.digest()


@contextmanager
def offloaded(model: torch.nn.Module, wanted: bool = True) -> Iterator[None]:
    """Keep a model's weights in the CPU's memory while the block runs, if ``wanted``."""
    places = [(weight, weight.device) for weight in model.parameters()] if wanted else []
    for weight, _ in places:
        weight.data = weight.data.to("cpu")
    try:
        yield
    finally:
        for weight, device in places:
            weight.data = weight.data.to(device)
