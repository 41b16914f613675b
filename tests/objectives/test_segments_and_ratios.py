"""Tokens to turns and back, and turn ratios, against values worked out by hand."""

import pytest
import torch

from agile_trainers.objectives.ratios import pool_log_probs
from agile_trainers.objectives.segments import pool_to_turns, spread_to_tokens, turn_lengths

#            turn 0   | obs | turn 1      | obs        turn 0 | padding
TURN_IDS = torch.tensor([[0, 0, -1, 1, 1, 1, -1], [0, -1, -1, -1, -1, -1, -1]])
VALUES = torch.tensor([[1.0, 3.0, 100.0, 2.0, 4.0, 9.0, 100.0], [7.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0]])


def test_lengths_pool_and_spread():
    assert turn_lengths(TURN_IDS, 2).tolist() == [[2, 3], [1, 0]]
    assert pool_to_turns(VALUES, TURN_IDS, 2, "sum").tolist() == [[4.0, 15.0], [7.0, 0.0]]
    assert pool_to_turns(VALUES, TURN_IDS, 2, "mean").tolist() == [[2.0, 5.0], [7.0, 0.0]]
    spread = spread_to_tokens(torch.tensor([[10.0, 20.0], [30.0, 40.0]]), TURN_IDS)
    assert spread.tolist() == [[10, 10, 0, 20, 20, 20, 0], [30, 0, 0, 0, 0, 0, 0]]


def test_observation_values_have_no_influence_even_when_infinite():
    poisoned = torch.where(TURN_IDS < 0, torch.tensor(float("nan")), VALUES)
    assert torch.equal(pool_to_turns(poisoned, TURN_IDS, 2, "mean"), pool_to_turns(VALUES, TURN_IDS, 2, "mean"))


@pytest.mark.parametrize(
    ("pooling", "expected"), [("mean", [[0.2, 0.5], [0.3, 0.0]]), ("sum", [[0.4, 1.5], [0.3, 0.0]])]
)
def test_pooled_ratio_by_hand(pooling, expected):
    old = torch.full_like(VALUES, -1.0)
    difference = torch.tensor([[0.1, 0.3, 5.0, 0.2, 0.4, 0.9, 5.0], [0.3, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    pooled = pool_log_probs(old + difference, old, TURN_IDS, 2, pooling)
    torch.testing.assert_close((pooled - old)[0, [0, 1, 3, 4, 5]], torch.tensor(expected[0])[[0, 0, 1, 1, 1]])
    torch.testing.assert_close((pooled - old)[1, 0], torch.tensor(expected[1][0]))
    # Outside actions the log-probability stays what it was.
    torch.testing.assert_close((pooled - old)[0, [2, 6]], torch.tensor([5.0, 5.0]))


def test_pooling_keeps_the_gradient_of_the_turn_at_ratio_one():
    """Sum over a turn's tokens of d(pooled)/d(logp) is 1 per token for the mean, the turn's length for the sum."""
    for pooling, expected in (("mean", [1.0, 1.0, 1.0, 1.0, 1.0]), ("sum", [2.0, 2.0, 3.0, 3.0, 3.0])):
        log_probs = torch.randn(VALUES.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        pooled = pool_log_probs(log_probs, log_probs.detach(), TURN_IDS, 2, pooling)
        pooled[0][TURN_IDS[0] >= 0].sum().backward()
        torch.testing.assert_close(log_probs.grad[0, [0, 1, 3, 4, 5]], torch.tensor(expected))
        assert log_probs.grad[0, [2, 6]].tolist() == [0.0, 0.0]
