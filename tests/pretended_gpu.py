"""A GPU that is pretended on the CPU: tensors that keep apart from the CPU's, and a count of the host's waits.

Its tensors are CPU tensors whose storage is marked. Python sees them on ``cuda:0``; their kernels, autograd included, are
the CPU's. A kernel that gets tensors of both devices raises CUDA's error, with CUDA's exceptions: numbers (tensors without
dimensions) and indices may be the CPU's, and copies go across. What makes the host wait for a GPU is counted by the line
that asked for it: reading a number, copying to the CPU, and kernels whose output's size depends on values.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # the first dispatch would import it, under the changes that are made here
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = str(Path(__file__).resolve().parents[1] / "agile_trainers")
_device_constructors()  # remembers torch's functions, which `torch.device` as a context looks for
_ANY = "any"
"""Mark of a tensor that C++ made from nothing, on the device of whatever it meets."""
_FACTORIES = (
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")
_WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "unique_consecutive", "unique_dim", "_unique2"}
"""Kernels after which the host reads a result, or needs the size of the output."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "index_fill_"}
"""`index_fill_` is what `x[i] = 1.0` runs on the CPU since torch 2.15; a GPU runs `index_put_`."""
_CROSSING = {"copy_", "set_", *_INDEXING}
"""Kernels that take tensors of both devices: copies, and indices of the CPU."""
_NO_NUMBERS = {"cat", "stack"}
_CUDA: dict[str, Any] = {
    "current_device": 0, "set_device": None, "empty_cache": None, "mem_get_info": (60 * 2**30, 80 * 2**30),
    "get_device_name": "a pretended GPU", "memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 0,
    "reset_peak_memory_stats": None,
}  # fmt: skip
"""What functions of ``torch.cuda`` return. ``is_available`` stays False: libraries remember its answer for ever."""


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor itself, or that below torch.func's wrappers; None for one without a storage."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor if tensor.layout == torch.strided else None


def _mark(made: Any, where: Any) -> Any:
    tensor = _plain(made) if isinstance(made, torch.Tensor) else None
    if tensor is not None:
        tensor.untyped_storage().pretended = where
    return made


def _where(tensor: torch.Tensor) -> Any:
    """GPU, CPU or ``_ANY``."""
    plain = _plain(tensor)
    return CPU if plain is None else getattr(plain.untyped_storage(), "pretended", CPU)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments of a kernel, or its outputs."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def on_gpu(tensor: torch.Tensor) -> bool:
    """True for a tensor of the pretended GPU."""
    return _where(tensor) is not CPU


class _Kernels(TorchDispatchMode):
    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]
        places = [_where(tensor) for tensor in given]
        if GPU in places:
            self._check(func, name, list(zip(given, places)), args)
        out = func(*args, **kwargs)
        if GPU in places:
            place = GPU
        elif all(one is _ANY for one in places) and not (self._gpu.making and not given):
            place = _ANY
        else:
            return out
        for made in _tensors([out]):
            if not any(made is one or made._is_view() or _shares(made, one) for one in given if _plain(one) is one):
                _mark(made, place)
        return out

    def _check(self, func: Any, name: str, given: list[tuple[torch.Tensor, Any]], args: Any) -> None:
        """Raise for tensors of both devices; count a kernel that makes the host wait."""
        indices = [*_tensors(args[1:3] if name == "index_fill_" else args[1])] if name in _INDEXING else []
        strangers = any(place is CPU and (t.dim() or name in _NO_NUMBERS) for t, place in given)
        outside = bool(indices) and given[0][1] is CPU  # indices of the GPU into a tensor of the CPU
        if outside or (strangers and name not in _CROSSING):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
            )
        if name in _WAITS or any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            self._gpu.wait(name)


class PretendedGPU:
    """Pretends a GPU inside a ``with`` block. Not for several threads.

    Attributes:
        waits: How often each line of the package, or of a library if none is on the stack, made the host wait.
        uploads: The same for copies to the GPU.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.making = 0

    def wait(self, what: str) -> None:
        self.waits[f"{_line()} {what}"] += 1

    def __enter__(self) -> PretendedGPU:
        self._stack = ExitStack()
        base = torch._C.TensorBase
        changes: dict[Any, dict[str, Any]] = {torch: {}, torch.Tensor: {}}
        for name in _FACTORIES:
            changes[torch][name] = self._factory(getattr(torch, name))
        changes[torch]["as_tensor"] = changes[torch]["asarray"] = self._as_tensor(torch.as_tensor)
        for name in _LIKE:
            changes[torch][name] = self._like(getattr(torch, name))
        for name in _NEW:
            changes[torch.Tensor][name] = self._like(getattr(torch.Tensor, name))
        changes[torch.Tensor] |= {
            "device": property(lambda tensor: GPU if on_gpu(tensor) else base.device.__get__(tensor)),
            "is_cuda": property(on_gpu),
            "is_cpu": property(lambda tensor: not on_gpu(tensor)),
            "get_device": lambda tensor: 0 if on_gpu(tensor) else -1,
            "to": lambda tensor, *args, **kwargs: self._to(tensor, *args, **kwargs),
            "cpu": lambda tensor, *_, **__: self._to(tensor, CPU),
            "cuda": lambda tensor, *_, **__: self._to(tensor, GPU),
            "numpy": self._of_the_cpu(torch.Tensor.numpy),
            "__array__": self._of_the_cpu(torch.Tensor.__array__),
            "tolist": self._waiting(torch.Tensor.tolist),
            "pin_memory": lambda tensor, *_: tensor,
        }
        for owner, attributes in changes.items():
            for name, value in attributes.items():
                self._stack.enter_context(patch.object(owner, name, value))
        for name, value in _CUDA.items():
            self._stack.enter_context(patch.object(torch.cuda, name, lambda *_, value=value, **__: value))
        self._stack.enter_context(patch.object(torch.cuda, "synchronize", lambda *_: self.wait("synchronize")))
        self._stack.enter_context(patch.object(torch, "Generator", _Generator))
        self._stack.enter_context(patch.dict("os.environ", {"ACCELERATE_TORCH_DEVICE": "cuda:0"}))
        self._stack.enter_context(_Kernels(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def _explicitly(self) -> Iterator[None]:
        self.making += 1
        try:
            yield
        finally:
            self.making -= 1

    def _factory(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            place, there = _place(device), {} if device is None else {"device": _real(device)}
            with self._explicitly():
                return _mark(make(*args, **there, **kwargs), place or CPU)

        return made

    def _like(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def made(tensor: torch.Tensor, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
            place, there = _place(device), {} if device is None else {"device": _real(device)}
            with self._explicitly():
                return _mark(make(tensor, *args, **there, **kwargs), place or _where(tensor))

        return made

    def _as_tensor(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            with self._explicitly():
                tensor = make(data, *args, **kwargs)
            return tensor if device is None else self._to(tensor, device)

        return made

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``Tensor.to`` in all its forms."""
        other = kwargs.get("other", next((a for a in args if isinstance(a, torch.Tensor)), None))
        devices = [a for a in args if isinstance(a, (str, torch.device)) or type(a) is int]
        dtypes = [a for a in args if isinstance(a, torch.dtype)]
        flags = [a for a in args if isinstance(a, bool)] + [False, False]
        device = kwargs.get("device") or (devices[0] if devices else other.device if other is not None else None)
        dtype = kwargs.get("dtype") or (dtypes[0] if dtypes else other.dtype if other is not None else tensor.dtype)
        copy, waits = kwargs.get("copy", flags[1]), not kwargs.get("non_blocking", flags[0])
        original = torch._C.TensorBase.to
        place, here, form = _place(device), _where(tensor), kwargs.get("memory_format", torch.preserve_format)
        if device is not None and place is None:
            return original(tensor, device, dtype, copy=copy)
        found = original(tensor, dtype, copy=copy, memory_format=form)
        if place is None or here is place or tensor.is_meta:
            return found
        if here is GPU and waits:
            self.wait("copy to the CPU")
        elif place is GPU:
            self.uploads[_line()] += 1
        if _shares(found, tensor):
            found = found.clone()
        return _mark(found, place)

    def _of_the_cpu(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _where(tensor) is GPU:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            return read(tensor, *args, **kwargs)

        return checked

    def _waiting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor) -> Any:
            if _where(tensor) is GPU and tensor.dim():  # one without dimensions is read by a kernel
                self.wait("tolist")
            return read(tensor)

        return counted


class _Generator(torch.Generator):
    """A generator of the pretended GPU is one of the CPU."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device="cpu")


def _place(device: Any) -> torch.device | None:
    """GPU, CPU, or None for no device and others."""
    if device is None:
        return None
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    return {"cuda": GPU, "cpu": CPU}.get(kind)


def _real(device: Any) -> Any:
    """The device where tensors of ``device`` are kept."""
    return device if _place(device) is None else "cpu"


def _line() -> str:
    """The innermost line of the package on the stack, and that of the library below it, if any."""
    frame, library = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE + '/')}:{frame.f_lineno}" + (f" ({library})" if library else "")
        if not library and "/site-packages/" in file and "/torch/" not in file:
            library = f"{file.rsplit('/site-packages/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return library
