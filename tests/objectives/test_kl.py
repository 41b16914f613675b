"""The penalty outside the loss: what it is for tokens, turns and episodes, by hand."""

import pytest
import torch

from agile_trainers.objectives.ratios import token_kl_penalty, turn_log_ratio

# Two turns of two and one tokens with an observation between; the second episode has one turn and padding.
TURN_IDS = torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1]])
LOG_PROBS = torch.tensor([[-1.0, -2.0, -9.0, -0.5], [-3.0, 7.0, 7.0, 7.0]], requires_grad=True)
REFERENCE = torch.tensor([[-1.5, -1.0, -4.0, -1.5], [-3.25, 0.0, 0.0, 0.0]])


def test_a_turns_log_ratio_is_the_sum_over_its_tokens():
    assert turn_log_ratio(LOG_PROBS, REFERENCE, TURN_IDS, 2).tolist() == [[-0.5, 1.0], [0.25, 0.0]]


@pytest.mark.parametrize(
    "unit, expected",
    [
        ("token", [[0.5, -1.0, 0.0, 1.0], [0.25, 0.0, 0.0, 0.0]]),
        ("turn", [[-0.5, -0.5, 0.0, 1.0], [0.25, 0.0, 0.0, 0.0]]),
        ("sequence", [[0.5, 0.5, 0.0, 0.5], [0.25, 0.0, 0.0, 0.0]]),
    ],
)
def test_shaping_is_the_log_ratio_of_what_the_ratio_spans(unit, expected):
    shaped = token_kl_penalty(LOG_PROBS, REFERENCE, TURN_IDS, unit)
    assert shaped.tolist() == expected and not shaped.requires_grad


@pytest.mark.parametrize("unit", ["token", "turn", "sequence"])
def test_an_episode_without_an_action_has_no_penalty(unit):
    nothing = torch.full((1, 2), -1)
    assert not token_kl_penalty(torch.ones(1, 2), torch.zeros(1, 2), nothing, unit).any()
