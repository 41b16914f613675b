"""One tensor-parallel engine answers what its processes ask; the transformers generator stands for it, in a group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from generated import GREEDY, make, qwen2
from programs import play_program

from agile_trainers.rollout.generators.vllm.tensor_parallel import TogetherGenerator


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_are_answered_as_without_the_group(seed: int, group: dist.ProcessGroup) -> None:
    """Several requests of an episode at once, those that do not extend the last one, and releases."""
    model = qwen2().double()
    expected = play_program(make(model, GREEDY), seed, 40)
    with TogetherGenerator(make(model, GREEDY), group) as together:
        found = play_program(together, seed, 40)
    assert {request.call for _, request, _ in expected} == {0, 1, 2}
    assert [(number, answer) for number, _, answer in found] == [(number, answer) for number, _, answer in expected]
