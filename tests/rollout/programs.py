"""Random programs of requests to a generator: turns, rewritten contexts, questions on the side, at once, and releases."""

from __future__ import annotations

import random
from collections.abc import Callable

from generated import VOCAB, uniforms

from agile_trainers.rollout.generators import GenerationOutput, GenerationRequest, Generator

Asked = tuple[int, GenerationRequest, GenerationOutput]


def ids_of(draw: random.Random, low: int, high: int) -> list[int]:
    return [draw.randrange(2, VOCAB) for _ in range(draw.randint(low, high))]


def noise_of(number: int) -> Callable[[int], list[float]]:
    """The noise of a program's request, from its beginning."""
    return uniforms(1000 + number)


def play_program(
    generator: Generator, seed: int, requests: int, releases: float = 0.05, watch: Callable[[], None] = lambda: None
) -> list[Asked]:
    """Play a program on three episodes with up to three requests at once.

    Args:
        generator: Answers the requests, whose ``uniforms`` are ``noise_of(i)`` for the i-th one.
        seed: Of the program. The requests depend on the answers.
        requests: Number of requests.
        releases: Probability that an episode is released after a request.
        watch: Called after every step.

    Returns:
        The number of each request that was answered, the request and the answer; the others were released.
    """
    draw = random.Random(seed)
    asked: list[Asked] = []
    pending: dict[tuple[int, int], tuple[int, GenerationRequest]] = {}
    said: dict[int, list[list[int]]] = {episode: [] for episode in range(3)}  # each request, and it with its answer

    def step() -> None:
        for output in generator.step():
            number, request = pending.pop((output.episode, output.call))
            asked.append((number, request, output))
            said[output.episode].append([*request.token_ids, *output.token_ids])
        watch()

    for number in range(requests):
        episode = draw.randrange(3)
        while not (free := [call for call in range(3) if (episode, call) not in pending]):
            step()
        ids = ids_of(draw, 1, 25)
        if said[episode] and draw.random() < 0.9:
            base = draw.choice(said[episode][-5:])
            kept = len(base) if draw.random() < 0.6 else draw.randint(1, len(base))
            ids = [*base[:kept], *ids_of(draw, 0, 6)][:150]
        call, limit = draw.choice(free), draw.randint(1, 9)
        request = GenerationRequest(episode, ids, limit, noise_of(number), call=call, extends=False)
        generator.submit(request)
        pending[episode, call] = number, request
        said[episode].append(ids)
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            step()
        if draw.random() < releases:
            generator.release(episode)
            said[episode] = []
            pending = {key: value for key, value in pending.items() if key[0] != episode}
    while generator.pending:
        step()
    assert not pending
    return asked
