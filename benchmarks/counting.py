"""Counts the bytes that autograd keeps for the backward pass, and reads gradients before they are clipped.

Every side of a benchmark imports this file, so it imports PyTorch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class SavedBytes:
    """Counts the bytes that autograd keeps for the backward pass, weights aside: the largest amount at any moment.

    Args:
        skipped: Tensors that do not count, such as the weights.
    """

    def __init__(self, skipped: Sequence[torch.Tensor]):
        self.peak = 0
        self._now = 0
        self._skipped = {t.untyped_storage().data_ptr() for t in skipped}
        self._holders: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[SavedBytes]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield self

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._skipped or key == 0:
            return _Kept(tensor, lambda: None)
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self._now += size
            self.peak = max(self.peak, self._now)

        def release() -> None:
            self._holders[key] -= 1
            if self._holders[key] == 0:
                del self._holders[key]
                self._now -= size

        return _Kept(tensor, release)


class _Kept:
    """A tensor that autograd keeps; calls ``release`` when it lets go of it."""

    def __init__(self, tensor: torch.Tensor, release: Callable[[], None]):
        self.tensor, self._release = tensor, release

    def __del__(self) -> None:
        self._release()


@contextmanager
def reading_gradients(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Fill a dict with the accumulated gradient of each trained parameter, as it is when the last backward pass ends."""
    found: dict[str, torch.Tensor] = {}

    def reader(name: str) -> Callable[[torch.Tensor], None]:
        def read(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            found[name] = parameter.grad.detach().clone()

        return read

    handles = [p.register_post_accumulate_grad_hook(reader(n)) for n, p in model.named_parameters() if p.requires_grad]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
