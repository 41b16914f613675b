"""Weights that make up for the training-inference mismatch, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agile_trainers.objectives.mismatch import MODES, importance_weights, mismatch_metrics

TURN_IDS = torch.tensor([[0, 0, -1, 1, 1], [0, 1, 1, -1, -1]])
MASK = TURN_IDS >= 0
RATIOS = torch.tensor([[2.0, 0.5, 99.0, 4.0, 2.0], [0.25, 1.0, 0.5, 99.0, 99.0]])
"""pi_trainer / pi_sampler. Products: turns 1 and 8, .25 and .5; episodes 8 and .125."""
SAMPLER = torch.tensor([[-1.0, -2.0, 0.0, -3.0, -4.0], [-0.5, -1.5, -2.5, 0.0, 0.0]])
TRAINER = SAMPLER + RATIOS.log()
BY_HAND = {
    "token_truncate": [[2.0, 0.5, 1, 3.0, 2.0], [0.4, 1.0, 0.5, 1, 1]],
    "token_mask": [[2.0, 0.5, 1, 0.0, 2.0], [0.0, 1.0, 0.5, 1, 1]],
    "turn_truncate": [[1.0, 1.0, 1, 3.0, 3.0], [0.4, 0.5, 0.5, 1, 1]],
    "turn_mask": [[1.0, 1.0, 1, 0.0, 0.0], [0.0, 0.5, 0.5, 1, 1]],
    "sequence_truncate": [[3.0, 3.0, 1, 3.0, 3.0], [0.4, 0.4, 0.4, 1, 1]],
    "sequence_mask": [[0.0, 0.0, 1, 0.0, 0.0], [0.0, 0.0, 0.0, 1, 1]],
}
"""Bounds .4 and 3; 1 outside actions."""


@pytest.mark.parametrize("mode", MODES)
def test_weights_by_hand(mode: str) -> None:
    correction = importance_weights(TRAINER, SAMPLER, TURN_IDS, MASK, mode=mode, lowest=0.4, highest=3.0)
    torch.testing.assert_close(correction.weights, torch.tensor(BY_HAND[mode]))
    unbounded = importance_weights(TRAINER, SAMPLER, TURN_IDS, MASK, mode=mode)
    assert torch.equal(correction.clipped, (unbounded.weights < 0.4) | (unbounded.weights > 3.0))
    assert not unbounded.clipped.any()


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("lowest", "highest"), [(None, 3.0), (0.4, None), (0.4, 3.0)])
def test_trls_modes_are_trls(mode: str, lowest: float | None, highest: float | None) -> None:
    """Written down from TRL's documentation of ``vllm_importance_sampling_mode``."""
    torch.manual_seed(0)
    theirs, ours = torch.randn(6, 5), torch.randn(6, 5)
    ids = TURN_IDS.repeat(3, 1)
    mask = ids >= 0
    ratio = ((ours - theirs) * mask).cumsum(1)[:, -1:].exp() if "sequence" in mode else ((ours - theirs) * mask).exp()
    low, high = lowest or -math.inf, highest or math.inf
    expected = ratio.clamp(low, high) if "truncate" in mode else ratio * ((ratio >= low) & (ratio <= high))
    weights = importance_weights(ours, theirs, ids, mask, mode=mode, lowest=lowest, highest=highest).weights
    torch.testing.assert_close(weights[mask], expected.expand_as(weights)[mask])


@pytest.mark.parametrize("mode", MODES)
def test_agreement_weighs_nothing(mode: str) -> None:
    correction = importance_weights(TRAINER, TRAINER, TURN_IDS, MASK, mode=mode, lowest=0.5, highest=2.0)
    assert torch.equal(correction.weights, torch.ones(2, 5)) and not correction.clipped.any()


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_do_not_count_have_no_influence(mode: str) -> None:
    mask = MASK.clone()
    mask[0, 3] = False
    noisy = torch.where(mask, TRAINER, torch.tensor(float("nan")))
    clean = torch.where(mask, TRAINER, SAMPLER)
    first, second = (
        importance_weights(x, SAMPLER, TURN_IDS, mask, mode=mode, highest=3.0).weights for x in (noisy, clean)
    )
    assert torch.equal(first, second) and (first[~mask] == 1).all()


def test_a_turn_per_token_is_the_token_mode_and_one_turn_the_sequence_mode() -> None:
    every = torch.arange(5).expand(2, 5)
    options = {"lowest": 0.4, "highest": 3.0}
    mask = torch.ones(2, 5, dtype=torch.bool)
    for bound in ("truncate", "mask"):
        for ids, unit in ((every, "token"), (torch.zeros_like(every), "sequence")):
            turns = importance_weights(TRAINER, SAMPLER, ids, mask, mode=f"turn_{bound}", **options)
            units = importance_weights(TRAINER, SAMPLER, ids, mask, mode=f"{unit}_{bound}", **options)
            assert torch.equal(turns.weights, units.weights)


def test_the_weight_of_a_temperature_by_hand() -> None:
    """Two tokens with logits 0 and ln 3: probabilities 1/4 and 3/4 at temperature 1; 1/10 and 9/10 at 1/2."""
    logits = torch.tensor([0.0, math.log(3.0)])
    trainer, sampler = logits.log_softmax(-1)[None], (logits / 0.5).log_softmax(-1)[None]
    ids = torch.tensor([[0, 0]])
    weights = importance_weights(trainer, sampler, ids, ids >= 0, mode="token_truncate", highest=10.0).weights
    torch.testing.assert_close(weights, torch.tensor([[2.5, 0.75 / 0.9]]))
    # Over the sampler's draws the weights average to one.
    assert (sampler.exp() * weights).sum().item() == pytest.approx(1.0)


def test_metrics_by_hand() -> None:
    mode = {"mode": "token_truncate", "highest": 3.0}
    correction = importance_weights(TRAINER, SAMPLER, TURN_IDS, MASK, **mode)
    metrics = mismatch_metrics(TRAINER, SAMPLER, correction.weights, correction.clipped, MASK)
    ln2 = math.log(2.0)
    ratios = [2.0, 0.5, 4.0, 2.0, 0.25, 1.0, 0.5]
    expected = {
        "sampling_logp_difference/p95": 2 * ln2,
        "kl": sum(r - 1 - math.log(r) for r in ratios) / 7,
        "importance_sampling_ratio/min": 0.25,
        "importance_sampling_ratio/mean": (sum(ratios) - 1.0) / 7,
        "importance_sampling_ratio/max": 3.0,
        "clipped": 1 / 7,
    }
    assert metrics == pytest.approx({f"sampling/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert mismatch_metrics(TRAINER, SAMPLER, correction.weights, correction.clipped, torch.zeros_like(MASK)) == {}


def test_p95_leaves_five_percent_above() -> None:
    mismatch, zeros = torch.arange(1.0, 101.0)[None], torch.zeros(1, 100)
    metrics = mismatch_metrics(zeros, mismatch, zeros, zeros.bool(), torch.ones(1, 100, dtype=torch.bool))
    assert metrics["sampling/sampling_logp_difference/p95"] == 95.0


def test_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"mode.*'token_truncate'.*'word_mask'"):
        importance_weights(TRAINER, SAMPLER, TURN_IDS, MASK, mode="word_mask")
