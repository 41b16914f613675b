"""State scores as rewards (``examples/state_scores.py``): by enumeration, the gradient is that of the unshaped return."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

StateScores = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples/state_scores.py"))["StateScores"]
ACTIONS = "abs"
"""Two moves, and one that stops."""
SCORES: dict[str, float | None] = {"": 0.3, "a": 0.9, "b": None, "aa": -0.4, "ab": 0.2, "ba": 1.5, "bb": None}


class Walk:
    """At most three turns; a reward of each, which depends on all moves so far."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.moves = ""
        return "", self.scored({})

    def step(self, action: str) -> Any:
        self.moves += action
        reward = {"a": 0.1, "b": 0.5, "s": 0.7}[action] * (-1) ** self.moves.count("b") + len(self.moves) / 10
        return "", reward, action == "s" or len(self.moves) == 3, False, self.scored({})

    def scored(self, info: dict[str, Any]) -> dict[str, Any]:
        score = SCORES.get(self.moves, 0.25 * len(self.moves))
        return info if score is None else {"score": score}


def episodes() -> list[str]:
    every = ["".join(moves) for n in (1, 2, 3) for moves in product(ACTIONS, repeat=n)]
    return [one for one in every if "s" not in one[:-1] and (len(one) == 3 or one[-1] == "s")]


def played(environment: Any, moves: str) -> list[float]:
    environment.reset(seed=0)
    steps = [environment.step(move) for move in moves]
    assert [step[2] for step in steps] == [False] * (len(moves) - 1) + [True]
    return [step[1] for step in steps]


def gradient(environment: Any, gamma: float, last: Any = lambda moves: 0.0) -> torch.Tensor:
    """The exact policy gradient: each turn with its discounted return from there on, over all episodes."""
    torch.manual_seed(0)
    states = sorted({moves[:k] for moves in episodes() for k in range(len(moves))})
    logits = torch.randn(len(states), 3, dtype=torch.float64, requires_grad=True)
    table, total = logits.log_softmax(1), torch.zeros((), dtype=torch.float64)
    for moves in episodes():
        chosen = torch.stack([table[states.index(moves[:k]), ACTIONS.index(move)] for k, move in enumerate(moves)])
        rewards = played(environment, moves)
        rewards[-1] += gamma * last(moves)
        returns = [sum(gamma**j * reward for j, reward in enumerate(rewards[k:])) for k in range(len(moves))]
        total = total + chosen.sum().exp().detach() * (chosen * torch.tensor(returns, dtype=torch.float64)).sum()
    return torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_shaping_leaves_the_gradient_as_it_is(gamma: float) -> None:
    plain = gradient(Walk(), gamma)
    shaped = gradient(StateScores(Walk, gamma), gamma)
    assert torch.allclose(shaped, plain, atol=1e-12) and plain.abs().max() > 0.01
    other = gradient(StateScores(Walk, 1.5 - gamma), gamma)
    assert not torch.allclose(other, plain, atol=1e-3), "another discount is another task"


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_last_score_that_is_kept_is_part_of_the_return(gamma: float) -> None:
    kept = gradient(StateScores(Walk, gamma, keep_last=True), gamma)
    assert torch.allclose(kept, gradient(Walk(), gamma, last=lambda moves: 0.25 * len(moves)), atol=1e-12)
    assert not torch.allclose(kept, gradient(Walk(), gamma), atol=1e-3)


def test_rewards_by_hand() -> None:
    """A state without a score passes its change on; a limit of the trainer ends at 0."""
    environment, plain = StateScores(Walk), Walk()
    shaped, given = played(environment, "bas"), played(plain, "bas")
    assert [a - b for a, b in zip(shaped, given)] == pytest.approx([0.0, 1.2, -1.5])
    environment.reset(seed=0)
    environment.step("a")
    assert environment.end("max_turns") == pytest.approx(-0.9)
