"""Programs around a policy, small enough to list all their episodes, and a policy that is a table of logits.

A program asks the policy with prompts, which are texts, and gets answers of the symbols a, b and c. It is part of the
environment: it may drop the history, throw an answer away, or ask twice at once. There are logits for every text that a
symbol was sampled after. Rewards are arbitrary numbers that depend on everything that happened until then, whether or not a
later prompt shows it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

SYMBOLS = "abc"


class _Unwritten(Exception):
    """The script of a play ends before a choice between so many options."""

    def __init__(self, options: int):
        self.options = options


@dataclass
class Call:
    """A call of the policy."""

    prompt: str
    answer: str
    rewarded: int
    """Number of calls whose rewards had been given when it was submitted."""
    kind: str = ""
    reward: float = 0.0
    given: frozenset[int] = frozenset()
    """Calls whose rewards had been given when its answer arrived."""

    def continued_by(self, other: Call) -> bool:
        return other.prompt.startswith(self.prompt + self.answer)


class World:
    """One play of a program, along a script of choices. What a program may do are its public methods."""

    def __init__(self, script: tuple[int, ...], seed: int):
        self._script, self._seed, self._at = script, seed, 0
        self._given: set[int] = set()
        self._seen = ""
        self.calls: list[Call] = []
        self.flips = 0

    def ask(self, prompt: str, kind: str = "", symbols: int = 1) -> str:
        """Submit a call, wait for its answer, and give its reward."""
        return self.arrive(self.submit(prompt, kind, symbols))

    def flip(self) -> bool:
        """A coin of the world's."""
        self.flips += 1
        return bool(self._choose(2))

    def submit(self, prompt: str, kind: str = "", symbols: int = 1) -> int:
        """Submit a call without waiting for its answer, and return its number."""
        rewarded = next(k for k in range(len(self.calls) + 1) if k not in self._given)
        answer = "".join(SYMBOLS[self._choose(len(SYMBOLS))] for _ in range(symbols))
        self.calls.append(Call(prompt, answer, rewarded, kind))
        return len(self.calls) - 1

    def arrive(self, number: int) -> str:
        """Give the reward of a call when its answer is there, and return the answer."""
        call = self.calls[number]
        self._seen += f"{number}{call.answer}"
        call.given = frozenset(self._given)
        call.reward = random.Random(f"{self._seed} {self._seen} {self.flips}").randrange(3) / 2
        self._given.add(number)
        return call.answer

    def _choose(self, options: int) -> int:
        if self._at == len(self._script):
            raise _Unwritten(options)
        self._at += 1
        return self._script[self._at - 1]


Program = Callable[[World], None]


def summary(world: World) -> None:
    """A summary replaces the history, unless the first answer ends the episode; two calls come after it."""
    first = world.ask("P")
    if first != "a":
        text = world.ask(f"P{first} sum up:", kind="summary")
        second = world.ask(f"S{text}")
        world.ask(f"S{text}{second} on:", symbols=2)


def asked_again(world: World) -> None:
    """A bad answer, c, is thrown away and asked for again, once; what then stands is continued."""
    answer = world.ask("Q")
    if answer == "c":
        world.calls[-1].kind = "discarded"
        answer = world.ask("Q")
    world.ask(f"Q{answer} on:")


def helper(world: World) -> None:
    """An answer may start a helper with a prompt of its own, which works for one or two calls; a bit of it comes back."""
    first = world.ask("M")
    if first != "a":
        found = world.ask(f"H{first}")
        if found == "c":
            found = world.ask(f"H{first}{found} more:")
        world.ask(f"M{first} found {'much' if found == 'a' else 'little'}:")


def at_once(world: World) -> None:
    """Two calls at once; the one that answers first goes on before the other has answered. A later symbol takes longer."""
    first = world.ask("T")
    if first != "a":
        both = [world.submit(f"T{first} {name}:") for name in ("one", "two")]
        quick, slow = sorted(both, key=lambda call: world.calls[call].answer)
        answer = world.arrive(quick)
        more = world.submit(f"{world.calls[quick].prompt}{answer} more:")
        world.arrive(slow)
        world.arrive(more)


def loop(world: World) -> None:
    """Up to three rounds; the prompt is the state alone, so that it comes back. A round is one call, or two on one path."""
    state = 0
    for _ in range(3):
        answer = world.ask(f"L{state}")
        if answer == "b":
            answer = world.ask(f"L{state}b sure?")
            state = 1 - state
        if answer == "c":
            break


PROGRAMS = [summary, asked_again, helper, at_once, loop]


def rejected(world: World) -> None:
    """A coin throws the answer b away, which is no worse than one that stands; its sibling may be the same text."""
    answer = world.ask("Q")
    if answer == "b" and world.flip():
        answer = world.ask("Q")
    world.ask(f"Q{answer} on:")


def rejected_beginning(world: World) -> None:
    """A coin throws an answer away; the one that stands may begin with it."""
    answer = world.ask("Q")
    if world.flip():
        answer = world.ask("Q", symbols=2)
    world.ask(f"Q{answer}")


def asked_again_inside(world: World) -> None:
    """The same prompt is asked again inside a path, where the call before it bootstraps from its value."""
    first = world.ask("Q")
    answer = world.ask(f"Q{first} now:")
    if answer == "c":
        answer = world.ask(f"Q{first} now:", kind="asked again")
    world.ask(f"Q{first} now:{answer} on:")


class Forest:
    """All episodes of a program. N episodes of at most K calls; D logits."""

    def __init__(self, program: Program, seed: int = 0):
        self.worlds: list[World] = []
        scripts: list[tuple[int, ...]] = [()]
        while scripts:
            script = scripts.pop()
            world = World(script, seed)
            try:
                program(world)
                self.worlds.append(world)
            except _Unwritten as choice:
                scripts += [(*script, option) for option in range(choice.options)]
        self.calls = [world.calls for world in self.worlds]
        self.shape = len(self.calls), max(map(len, self.calls))
        contexts = [c.prompt + c.answer[:n] for calls in self.calls for c in calls for n in range(len(c.answer))]
        self._row = {context: row for row, context in enumerate(sorted(set(contexts)))}
        draw = [random.Random(f"{seed} {context}") for context in self._row]
        logits = [[generator.gauss(0.0, 1.0) for _ in SYMBOLS] for generator in draw]
        self.logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)

    def table(self, value: Callable[[Call, int, list[Call]], float]) -> torch.Tensor:
        """(N, K) float64 of a number of each call, given it, its index and its episode's calls; 0 where there is none."""
        missing = [[0.0] * (self.shape[1] - len(calls)) for calls in self.calls]
        rows = [[value(call, k, calls) for k, call in enumerate(calls)] for calls in self.calls]
        return torch.tensor([row + zeros for row, zeros in zip(rows, missing)], dtype=torch.float64)

    @cached_property
    def mask(self) -> torch.Tensor:
        return self.table(lambda *_: 1.0) > 0

    @cached_property
    def rewards(self) -> torch.Tensor:
        return self.table(lambda call, *_: call.reward)

    @cached_property
    def rewarded(self) -> torch.Tensor:
        return self.table(lambda call, *_: call.rewarded).long()

    @cached_property
    def following(self) -> torch.Tensor:
        return self.table(lambda call, k, calls: following(k, calls, self.shape[1])).long()

    @cached_property
    def rows(self) -> torch.Tensor:
        """(N,) float64, training rows of those who make one of each path: calls that no later prompt contains."""
        return ((self.following == self.shape[1]) & self.mask).sum(1).double()

    @cached_property
    def _sampled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every sampled symbol: the place of its call in a flat (N, K) table, its row of logits, and its own number."""
        found = [
            (e * self.shape[1] + k, self._row[call.prompt + call.answer[:n]], SYMBOLS.index(symbol))
            for e, calls in enumerate(self.calls)
            for k, call in enumerate(calls)
            for n, symbol in enumerate(call.answer)
        ]
        places, rows, symbols = torch.tensor(found).unbind(1)
        return places, rows, symbols

    def _chances(self) -> torch.Tensor:
        places, rows, symbols = self._sampled
        logs = self.logits.log_softmax(-1)[rows, symbols]
        flips = torch.tensor([0.5**world.flips for world in self.worlds])
        return flips * logs.new_zeros(self.shape[0]).index_add(0, places // self.shape[1], logs).exp()

    def token_log_probabilities(self, mask: torch.Tensor) -> torch.Tensor:
        """(N, T), of every sampled symbol, in the order of calls, at the places where the mask is True."""
        _, rows, symbols = self._sampled
        logs = self.logits.log_softmax(-1)[rows, symbols]
        return logs.new_zeros(mask.shape).masked_scatter(mask, logs)

    @cached_property
    def symbol_scores(self) -> torch.Tensor:
        """(M, D), the gradient of the log-probability of every sampled symbol, in the order of calls: the symbol minus its
        probabilities."""
        _, rows, symbols = self._sampled
        probabilities = self.logits.detach().softmax(-1)
        scores = torch.zeros(len(rows), *self.logits.shape).double()
        number = torch.arange(len(rows))
        scores[number, rows] = -probabilities[rows]
        scores[number, rows, symbols] += 1.0
        return scores.flatten(1)

    @cached_property
    def scores(self) -> torch.Tensor:
        """(N, K, D), the gradient of each call's log-probability."""
        scores = torch.zeros(self.mask.numel(), self.logits.numel()).double()
        return scores.index_add(0, self._sampled[0], self.symbol_scores).view(*self.shape, -1)

    @cached_property
    def probabilities(self) -> torch.Tensor:
        """(N,), of each episode."""
        return self._chances().detach()

    @cached_property
    def exact(self) -> torch.Tensor:
        """(D,), the gradient of the expected return."""
        objective = (self._chances() * self.rewards.sum(1)).sum()
        return torch.autograd.grad(objective, self.logits)[0].flatten()

    def expected(self, advantages: torch.Tensor) -> torch.Tensor:
        """(D,), the expectation of the sum over calls of advantage times score; advantages are (N, K) or (N, 1)."""
        return torch.einsum("nk,nkd->d", self.probabilities[:, None] * advantages * self.mask, self.scores)

    def of_prompt(self, gradient: torch.Tensor, prompt: str) -> torch.Tensor:
        """The part of a gradient that is of the first symbol after a prompt."""
        return gradient.view(self.logits.shape)[self._row[prompt]]


def following(k: int, calls: list[Call], none: int) -> int:
    """The first later call whose parent is k."""
    return next((j for j in range(k + 1, len(calls)) if _parent(j, calls) == k), none)


def _parent(j: int, calls: list[Call]) -> int | None:
    """The call whose prompt and answer are the longest beginning of the prompt; the last one of equals."""
    fitting = [i for i in range(j) if calls[i].continued_by(calls[j])]
    return max(fitting, key=lambda i: (len(calls[i].prompt + calls[i].answer), i), default=None)


def error(estimated: torch.Tensor, exact: torch.Tensor) -> float:
    return float((estimated - exact).norm() / exact.norm())
