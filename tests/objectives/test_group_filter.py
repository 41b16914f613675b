"""The groups with the top share of variance, by hand."""

from __future__ import annotations

import pytest
import torch

from agile_trainers.objectives.group_filter import group_variances, top_share

NAN = float("nan")


def test_variances_by_hand():
    rewards = torch.tensor([[0.0, 1.0, NAN], [1.0, 1.0, 1.0], [NAN, NAN, 5.0], [0.0, 0.0, 3.0], [0.1, 0.1, 0.1 + 1e-9]])
    assert group_variances(rewards).tolist() == pytest.approx([0.5, 0.0, 0.0, 3.0, 0.0])


@pytest.mark.parametrize(
    ("variances", "share", "kept"),
    [
        ([1.0, 4.0, 2.0, 3.0], 0.7, [False, True, False, True]),  # 4 + 3 of 10
        ([1.0, 4.0, 2.0, 3.0], 0.71, [False, True, True, True]),
        ([1.0, 4.0, 2.0, 3.0], 0.4, [False, True, False, False]),
        ([1.0] * 10, 0.9, [True] * 9 + [False]),  # rounding needs no tenth
        ([0.1] * 10, 0.9, [True] * 9 + [False]),
        ([0.0, 2.0, 0.0], 1.0, [False, True, False]),
        ([0.0, 0.0], 0.9, [False, False]),
        ([0.3, 0.2], 1.0, [True, True]),
    ],
)
def test_the_top_share_by_hand(variances, share, kept):
    assert top_share(torch.tensor(variances), share).tolist() == kept
