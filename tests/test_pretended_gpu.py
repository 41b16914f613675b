"""The pretended GPU itself: what CUDA refuses is refused, what makes the host wait is counted, and nothing stays behind."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from pretended_gpu import GPU, PretendedGPU, on_gpu

REFUSED = "Expected all tensors to be on the same device"


@pytest.fixture
def gpu() -> Iterator[PretendedGPU]:
    with PretendedGPU() as made:
        yield made


def test_tensors_of_two_devices_do_not_meet(gpu):
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    for meeting in (
        lambda: there + here,
        lambda: torch.where(there > 0, there, here),
        lambda: torch.cat([there, torch.ones(2)]),
        lambda: torch.stack([there[0], torch.tensor(1.0)]),
        lambda: there.index_select(0, torch.tensor([0])),
        lambda: here[torch.tensor([0], device="cuda")],
        lambda: operator.setitem(here, torch.tensor([0], device="cuda"), 5.0),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), there[:, None]),
        lambda: torch.nn.functional.linear(there, torch.nn.Linear(3, 2).weight),
        lambda: there.add_(here),
    ):
        with pytest.raises(RuntimeError, match=REFUSED):
            meeting()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        there.numpy()


def test_what_cuda_allows_is_allowed(gpu):
    """Numbers and indices of the CPU, and copies."""
    there = torch.arange(3.0, device=GPU)
    assert on_gpu(there * torch.tensor(2.0)) and on_gpu(there[torch.tensor([0, 2])]) and on_gpu(there[[0, 2]])
    there[torch.tensor([1])] = 5.0
    there.copy_(torch.zeros(3))
    here = torch.ones(3)
    here.copy_(there)
    assert not on_gpu(here) and not here.any() and not on_gpu(here + 1)


def test_everything_made_from_a_tensor_is_where_it_is(gpu):
    there = torch.rand(4, 6).to("cuda")
    made = [
        there[1:], there.T, there.view(-1), there.detach(), there.sum(), there > 0.5, there.new_zeros(2),
        torch.empty_like(there), there.topk(2).indices, there.double(), there.to(torch.float64), there.unbind()[0],
        there.clone(), there.cuda(), there.new_tensor([1.0]), torch.as_tensor(there),
        torch.zeros(2).to(there), torch.nn.Parameter(there),
        torch.tensor([1], device=there.device), torch.as_tensor([1.0], device="cuda:0"),
    ]  # fmt: skip
    assert all(on_gpu(x) and x.device == GPU and x.is_cuda and x.get_device() == 0 for x in made)
    here = [
        there.cpu(), there.to("cpu", torch.float64), torch.zeros(2), there.new_zeros(2, device="cpu"),
        torch.zeros_like(there.cpu()),
        torch.empty_like(there, device="cpu"), torch.tensor(1.0), torch.from_numpy(there.cpu().numpy()),
    ]  # fmt: skip
    assert not any(on_gpu(x) or x.is_cuda for x in here)
    assert torch.equal(there.cpu(), torch.as_tensor(there.tolist()))


def test_gradients_are_where_their_tensors_are(gpu):
    layer = torch.nn.Linear(3, 2).to("cuda")
    assert all(on_gpu(weight) for weight in layer.parameters())
    there = torch.rand(5, 3, device="cuda", requires_grad=True)
    (layer(there).relu().softmax(-1).cumsum(0)[2:].pow(2).sum() + there[:, 0].max()).backward()
    assert on_gpu(there.grad) and all(on_gpu(weight.grad) for weight in layer.parameters())
    torch.optim.AdamW(layer.parameters()).step()


def test_waits_are_counted(gpu):
    there, count = torch.rand(5, device="cuda"), []
    for wait in (
        lambda: there[0].item(),
        lambda: float(there.sum()),
        lambda: bool(there.any()),
        lambda: there.tolist(),
        lambda: there.cpu(),
        lambda: there.nonzero(),
        lambda: there[there > 0.5],
        lambda: there.masked_fill_(there > 2, 0.0)[there > 2],
        lambda: torch.equal(there, there),
        lambda: there.unique(),
        lambda: torch.cuda.synchronize(),
    ):
        gpu.waits.clear()
        wait()
        count.append(sum(gpu.waits.values()))
    assert count == [1] * len(count)
    gpu.waits.clear()
    there.sum().add(1).clamp(max=2).to(torch.float64).to("cpu", non_blocking=True)
    torch.rand(3).tolist(), torch.rand(3)[torch.tensor([True, False, True])], bool(torch.tensor(True))
    assert not gpu.waits and not gpu.uploads
    torch.zeros(3).to(there)
    assert sum(gpu.uploads.values()) == 1


def test_nothing_stays_behind():
    before = torch.zeros, torch.Tensor.device, torch.Tensor.to, torch.cuda.empty_cache, torch.Generator
    with PretendedGPU():
        there = torch.zeros(2, device="cuda")
    after = torch.zeros, torch.Tensor.device, torch.Tensor.to, torch.cuda.empty_cache, torch.Generator
    assert before == after and there.device.type == "cpu"
    assert (there + torch.ones(2)).sum() == 2


def test_models_that_are_made_without_memory_get_real_values(gpu):
    """As transformers loads: on meta first, buffers from nothing afterwards."""
    with torch.device("meta"):
        empty = torch.zeros(3)
        assert torch.zeros(3, device="cpu").device.type == "cpu" and not torch.zeros(3, device="cpu").is_meta
    assert empty.is_meta and empty.to("meta").is_meta and torch.zeros_like(empty).is_meta
    for device in ("cpu", "cuda"):
        made = torch.zeros_like(empty, device=device)
        assert not made.is_meta and made.device.type == device and made.tolist() == [0.0] * 3
