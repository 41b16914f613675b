"""Samples with one tensor-parallel engine from several processes, each of which plays its own episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator


class TogetherGenerator:
    """Gives all processes of a tensor-parallel group the same requests in the same order, and steps them together.

    An episode requests its next turn as soon as its environment has answered, as with an engine of one process. A process
    that waits for an environment without a pending request of its own blocks the others.

    Use it in a ``with`` statement: a process without episodes keeps stepping until all processes are done. After an
    exception it stops, and the others fail or reach the group's timeout, as with every collective operation.

    Args:
        generator: Generator of this process. It must be deterministic in its sequence of requests.
        group: The processes that step together.
    """

    def __init__(self, generator: Generator, group: dist.ProcessGroup):
        self._generator, self._group = generator, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._pending: set[tuple[int, int]] = set()
        self._news: list[GenerationRequest | int] = []
        """This process's events since the last step: requests, and the numbers of released episodes."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request, which all processes receive in the next step."""
        self._pending.add((request.episode, request.call))
        # With sampling, a request takes one uniform of its stream.
        noise = {1: request.uniforms(1)}
        self._news.append(replace(request, uniforms=noise.__getitem__))

    def step(self) -> list[GenerationOutput]:
        """Sample a token of every request of the group, and return the finished answers of this process."""
        return self._step(done=False)[0]

    @property
    def pending(self) -> int:
        """Number of this process's requests submitted and not yet returned."""
        return len(self._pending)

    def release(self, episode: int) -> None:
        """Forget an episode of this process."""
        self._pending = {key for key in self._pending if key[0] != episode}
        self._news.append(episode)

    def __enter__(self) -> TogetherGenerator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        while kind is None and not self._step(done=True)[1]:
            pass

    def _step(self, done: bool) -> tuple[list[GenerationOutput], bool]:
        """Step the group; return this process's finished answers, and True if every process is done."""
        everywhere: list[Any] = [None] * self._size
        dist.all_gather_object(everywhere, (self._news, done), group=self._group)
        self._news = []
        for rank, (news, _) in enumerate(everywhere):
            for what in news:
                if isinstance(what, int):
                    self._generator.release(what * self._size + rank)
                else:
                    self._generator.submit(replace(what, episode=what.episode * self._size + rank))
        answers = [
            replace(output, episode=output.episode // self._size)
            for output in self._generator.step()
            if output.episode % self._size == self._rank
        ]
        self._pending -= {(answer.episode, answer.call) for answer in answers}
        return answers, all(over for _, over in everywhere)
