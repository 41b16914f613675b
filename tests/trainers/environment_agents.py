"""Environments played by an agent, whose episodes must be those that the rollout loop plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from chatter import Chatter

from agile_trainers.envs.agent import Model, Task
from agile_trainers.envs.base import as_messages

if TYPE_CHECKING:  # processes of environments import this file, and importing PyTorch takes them seconds
    from agile_trainers.rollout.generators.base import GenerationOutput, GenerationRequest, Generator


class Plays:
    """Plays an environment's episodes with a client, step by step, and rewards each call as the environment does.

    Args:
        make: Makes the environment.
        delay: Seconds to wait before each request, of the task and the number of the request.
    """

    def __init__(self, make: Callable[[], Any], delay: Callable[[Task, int], float] | None = None) -> None:
        self.make, self.delay = make, delay
        self.__name__ = getattr(make, "__name__", "agent")

    async def __call__(self, model: Model, task: Task) -> dict[str, Any]:
        environment = self.make()
        observation, _ = environment.reset(seed=task.seed, options=task.row)
        messages, done, number = as_messages(observation), False, 0
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as client:
            while not done:
                await asyncio.sleep(self.delay(task, number) if self.delay else 0)
                answer = await post(client, model, {"messages": messages})
                text = answer["choices"][0]["message"]["content"]
                observation, reward, terminated, truncated, info = environment.step(text)
                async with client.post(
                    f"{model.base_url}/reward",
                    json={"value": reward, "call": answer["id"]},
                    headers={"Authorization": f"Bearer {model.reward_key}"},
                ) as sent:
                    assert sent.status == 200
                messages += [{"role": "assistant", "content": text}, *as_messages(observation)]
                done, number = terminated or truncated, number + 1
        return {"reward": 0.0, "info": info}


async def post(
    client: aiohttp.ClientSession, model: Model, body: dict[str, Any], headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Send a request in the dialect of Chat Completions; return the answer."""
    body = {"model": model.name, **body}
    async with client.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as sent:
        answer: dict[str, Any] = json.loads(await sent.read())
        if sent.status != 200:
            raise RuntimeError(answer["error"]["message"])
        return answer


class NoiseByPrompt:
    """A generator whose noise is that of an episode's number and the prompt alone, so that two rollouts can be compared."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.step, self.release = generator.step, generator.release

    @property
    def pending(self) -> int:
        return self._generator.pending

    def submit(self, request: GenerationRequest) -> None:
        noise = np.random.default_rng([request.episode, *request.token_ids])
        request.uniforms = lambda n: noise.random(n).tolist()
        self._generator.submit(request)


def scripted(eos: int, of: Sequence[int]) -> Callable[[GenerationRequest], GenerationOutput]:
    """Return a script whose answers are one to four of some ids and an end, drawn from the request's noise."""
    from agile_trainers.rollout.generators.base import GenerationOutput

    def say(request: GenerationRequest) -> GenerationOutput:
        draws = request.uniforms(6)
        ids = [of[int(draw * len(of))] for draw in draws[: 1 + int(draws[5] * 4)]] + [eos]
        return GenerationOutput(request.episode, ids, [-1.0 - draw for draw in draws[: len(ids)]], "stop")

    return say


class Gathers:
    """Asks eight things at once, waiting before each as long as ``delays`` says, and then about all answers.

    Two of the eight are equal. With ``labels`` a header tells them apart; without, their answers are sorted.
    """

    def __init__(self, delays: Callable[[int], float] = lambda number: 0.0, *, labels: bool = True) -> None:
        self.delays, self.labels = delays, labels

    async def __call__(self, model: Model, task: Task) -> float:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as client:

            async def ask(number: int) -> str:
                await asyncio.sleep(self.delays(number))
                label = {"x-occurrence": f"part {number}"} if self.labels else {}
                said = {"role": "user", "content": f"start {task.seed % 7} " + "again " * min(number, 6)}
                answer = await post(client, model, {"messages": [said]}, label)
                return str(answer["choices"][0]["message"]["content"])

            parts = await asyncio.gather(*map(ask, range(8)))
            parts = parts if self.labels else sorted(parts)
            whole = await post(client, model, {"messages": [{"role": "user", "content": " ".join(parts)}]})
        return sum(map(ord, whole["choices"][0]["message"]["content"])) % 5 / 4


chats = Plays(Chatter)
gathers = Gathers()
