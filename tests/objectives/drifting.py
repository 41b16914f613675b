"""Episodes that one policy has sampled and another is trained on, all of them listed.

Both policies are tables of logits of the same program (:mod:`forests`): the snapshot, which plays, and prox, which an update
starts from.
"""

from __future__ import annotations

import random
from functools import cached_property

import torch
from forests import Forest, Program, World


def two_turns(world: World) -> None:
    """An answer of two symbols; if the first is not c, an answer of one."""
    first = world.ask("S", symbols=2)
    if first[0] != "c":
        world.ask(f"S{first} on:")


def three_turns(world: World) -> None:
    """Up to three answers, which c ends; the last has two symbols."""
    text = world.ask("S")
    if text != "c":
        text += "." + world.ask(f"S{text} on:")
        if text[-1] != "c":
            world.ask(f"S{text} on:", symbols=2)


def moved(program: Program, seed: int, by: torch.Tensor) -> Forest:
    """The program with a policy whose logits, of the shape of ``by``, differ by ``by`` from those that are drawn."""
    forest = Forest(program, seed)
    with torch.no_grad():
        forest.logits += by
    return forest


class Drift:
    """All episodes of a program under two policies. N episodes of at most K turns and T columns; D logits.

    The columns of an episode are the symbols of its answers, with an observation after each turn.
    """

    def __init__(self, snapshot: Forest, prox: Forest):
        self.snapshot, self.prox = snapshot, prox
        self.turns = prox.shape[1]

    @classmethod
    def drawn(cls, program: Program, seed: int, deviation: float = 0.7) -> Drift:
        """Policies whose logits differ by normal noise."""
        snapshot, noise = Forest(program, seed), random.Random(seed)
        differences = [noise.gauss(0.0, deviation) for _ in range(snapshot.logits.numel())]
        return cls(snapshot, moved(program, seed, torch.tensor(differences).double().view(snapshot.logits.shape)))

    @cached_property
    def turn_ids(self) -> torch.Tensor:
        """(N, T)."""
        rows = [[t for k, call in enumerate(calls) for t in (*[k] * len(call.answer), -1)] for calls in self.prox.calls]
        width = max(map(len, rows))
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows])

    @property
    def mask(self) -> torch.Tensor:
        """(N, T) bool."""
        return self.turn_ids >= 0

    @cached_property
    def log_probs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, T) each, under prox and under the snapshot."""
        ours, theirs = (one.token_log_probabilities(self.mask).detach() for one in (self.prox, self.snapshot))
        return ours, theirs

    @property
    def log_ratio(self) -> torch.Tensor:
        """(N, T)."""
        ours, theirs = self.log_probs
        return ours - theirs

    def estimates(self, advantages: torch.Tensor) -> torch.Tensor:
        """(N, D), the sum over an episode's tokens of advantage (N, T) times the gradient of prox's log-probability."""
        found = torch.zeros(len(self.mask), self.prox.logits.numel()).double()
        weighted = advantages.double()[self.mask][:, None] * self.prox.symbol_scores
        return found.index_add(0, self.mask.nonzero()[:, 0], weighted)

    def expected(self, advantages: torch.Tensor) -> torch.Tensor:
        """(D,), the expected gradient over what the snapshot samples."""
        return self.snapshot.probabilities @ self.estimates(advantages)
