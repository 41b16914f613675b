"""Serves LoRA adapters by name, and writes them for servers. This file does not import vLLM."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

import torch
from peft import LoraConfig
from safetensors.torch import save_file

Handle = TypeVar("Handle")


class AdapterHost(ABC, Generic[Handle]):
    """Serves one adapter to all requests that name none, and others to those that name them."""

    adapter: Handle | None = None
    """The adapter of requests that name none; None for the base model."""

    @abstractmethod
    def add_adapter(self, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[Handle, int]:
        """Serve a further adapter, to requests that name it.

        It gets a name of its own, so that cache entries of other adapters are not reused.

        Args:
            weights: Parameter name to tensor, as ``get_peft_model_state_dict`` returns them.
            config: Configuration of the adapter.

        Returns:
            What a request names it by, and the number of bytes transferred.

        Raises:
            ValueError: If it cannot be served.
        """

    @abstractmethod
    def drop_adapter(self, adapter: Handle) -> None:
        """Serve an adapter no longer."""

    def load_adapter(self, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> int:
        """Replace the adapter of requests that name none, and return the bytes transferred; see :meth:`add_adapter`."""
        adapter, moved = self.add_adapter(weights, config)
        self.remove_adapter()
        self.adapter = adapter
        return moved

    def remove_adapter(self) -> None:
        """Serve the base model alone to requests that name no adapter."""
        if self.adapter is not None:
            self.drop_adapter(self.adapter)
        self.adapter = None


_PREFIXES = "vllm-policy-"
_PREFIX = f"{_PREFIXES}{socket.gethostname()}-"


class AdapterFolder:
    """A folder from which servers read adapters. Each adapter has a name of its own, and a folder of that name.

    It is locked as long as this process lives, so that the next one can tell what a killed one has left.

    Args:
        place: Where the folder is made, with the first adapter. Default: the system's folder for temporary files.
    """

    def __init__(self, place: str | Path | None = None) -> None:
        self._place = place
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._unlock: Callable[[], object] = lambda: None

    @contextmanager
    def written(self, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> Iterator[tuple[str, Path, int]]:
        """Write an adapter; yield its name, its folder and the bytes of its weights. It is deleted if the block fails."""
        if self._made is None:
            if self._place is not None:
                Path(self._place).mkdir(parents=True, exist_ok=True)
            self._made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self._place)
            Path(self._made.name).chmod(0o755)  # the server may run as another user
            with suppress(OSError):  # some file systems have no locks
                self._unlock = weakref.finalize(self, os.close, _locked(Path(self._made.name), fcntl.LOCK_SH))
        name = f"policy-{uuid.uuid4().hex}"
        folder = Path(self._made.name).resolve() / name
        try:
            moved = write_adapter(folder, weights, config)
            for path in (folder, *folder.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            yield name, folder, moved
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def left(self) -> list[Path]:
        """List the folders in the same place that processes of this machine left when they were killed.

        Empty where files cannot be locked. Of another machine's folders one cannot tell: some shared file systems keep
        locks on each machine alone.
        """
        places = [] if self._place is None else sorted(Path(self._place).glob(f"{_PREFIX}*"))
        left = []
        for folder in places:
            with suppress(OSError):  # somebody holds it, or has just removed it
                if any(folder.iterdir()):  # an empty one may not be locked yet
                    os.close(_locked(folder, fcntl.LOCK_EX))
                    left.append(folder)
        return left

    def names(self) -> list[str]:
        """List the adapters that are there."""
        return [] if self._made is None else [path.name for path in Path(self._made.name).iterdir()]

    def find(self, name: str) -> Path | None:
        """Return the folder of an adapter, which any process of the run has written; None if it is not there."""
        place = Path(self._place or tempfile.gettempdir()).resolve()
        return next(place.glob(f"{_PREFIXES}*/{name}"), None)

    def delete(self, name: str) -> None:
        """Delete an adapter."""
        assert self._made is not None
        shutil.rmtree(Path(self._made.name) / name)

    def close(self) -> None:
        """Delete the folder and all adapters in it. The next adapter makes another."""
        if self._made is not None:
            self._made.cleanup()
            self._unlock()
            self._made = None


def _locked(folder: Path, how: int) -> int:
    """Lock a folder and return its descriptor, which holds the lock."""
    # filelock, with which an output folder is locked, locks a file that it makes. Here the folder itself is locked: a file
    # inside would be taken for an adapter, one beside would stay when the folder is gone.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_adapter(folder: Path, weights: Mapping[str, torch.Tensor], config: LoraConfig) -> int:
    """Write an adapter in PEFT's format for vLLM. Return the bytes of its weights."""
    config.save_pretrained(str(folder))
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())
