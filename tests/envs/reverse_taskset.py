"""A task set as verifiers' documentation writes one."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]


class ReverseConfig(vf.TasksetConfig):
    words: int = 3


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def exact(self, task: ReverseData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def length(self, task: ReverseData, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) == len(task.answer))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self) -> Iterable[ReverseTask]:
        for word in ("stone", "water", "light", "grass")[: self.config.words]:
            data = ReverseData(prompt=f"Reverse {word}.", system_prompt="Only the word.", answer=word[::-1])
            yield ReverseTask(data, self.config.task)
