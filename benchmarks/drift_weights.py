"""Computes bias and variance of the weights for batches that an earlier policy has sampled, by lag.

A program asks a policy of three symbols up to three times for an answer of two; an answer that begins with c ends the
episode. The policy is a table of logits, one row for each history. All 345 episodes are listed, so nothing is sampled. The
policy takes ``STEPS`` steps of ``RATE`` along the exact gradient of its expected return; where it then is, is prox. The
snapshot of lag n is where it was n steps before. The gradient is estimated from one episode of the snapshot, with returns
from each turn on, minus their mean under the snapshot; its expectation and its variance are exact. Both are relative to the
length of prox's gradient, and medians over trees with other rewards and logits. Seconds on one core.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "objectives"))

from drifting import Drift, moved
from forests import Forest, World, error

from agile_trainers.objectives.drift import (
    decision_weights,
    drift_weights,
)
from agile_trainers.objectives.returns import discounted_returns, gae
from agile_trainers.objectives.segments import spread_to_tokens

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "drift_weights.json"
PAGE = ROOT / "benchmarks" / "results" / "ahead.md"
BEGIN, END = "<!-- begin: written by benchmarks/drift_weights.py -->", "<!-- end -->"
RATE, STEPS, LAGS, TREES = 4.0, 8, (0, 1, 2, 4, 8), 11
CAP, THRESHOLD, BATCH = 2.0, 0.15, 256
WEIGHTINGS: dict[str, tuple[str | None, float | None]] = {
    "none": (None, None),
    "token": ("token_truncate", None),
    f"token, at most {CAP:g}": ("token_truncate", CAP),
    f"DPPO's mask, threshold {THRESHOLD:g}": ("dppo_mask", THRESHOLD),
    "turn": ("turn_truncate", None),
    f"turn, at most {CAP:g}": ("turn_truncate", CAP),
    "sequence": ("sequence_truncate", None),
    f"sequence, at most {CAP:g}": ("sequence_truncate", CAP),
    f"sequence, 0 above {CAP:g}": ("sequence_mask", CAP),
    "per decision": ("decision", None),
    "per decision, values": ("decision_values", None),
    f"per decision, at most {CAP:g}": ("decision", CAP),
    f"per decision, values, at most {CAP:g}": ("decision_values", CAP),
}
"""Mode and bound of each row of the tables."""
EXACT = ("sequence", "per decision", "per decision, values")

Results = dict[str, Any]


def tree(world: World) -> None:
    """Up to three turns of two symbols."""
    text = "S"
    for _ in range(3):
        answer = world.ask(text, symbols=2)
        if answer[0] == "c":
            break
        text += f"{answer}."


@cache
def policies(seed: int) -> list[Forest]:
    """Return a tree under the policy before the first step, and after each."""
    found = [Forest(tree, seed)]
    start = found[0].logits.detach()
    while len(found) <= STEPS:
        last = found[-1]
        step = RATE * last.exact.view(start.shape)
        found.append(moved(tree, seed, last.logits.detach() - start + step))
    return found


def weighted(drift: Drift, mode: str | None, bound: float | None) -> torch.Tensor:
    """Return what the gradient of each token's log-probability is multiplied by, (N, T)."""
    ratio, mask, turn_ids = drift.log_ratio, drift.mask, drift.turn_ids
    rewards, happened = drift.prox.rewards, drift.prox.mask
    chances = drift.snapshot.probabilities[:, None] * happened
    baselines = (chances * discounted_returns(rewards, happened, 1.0)).sum(0) / chances.sum(0)
    if mode in ("decision", "decision_values"):
        weights = decision_weights(ratio, mask, turn_ids, drift.turns, bound).double()
        if mode == "decision_values":
            values, none = baselines.expand_as(rewards), rewards.new_zeros(len(rewards))
            weighted = gae(rewards, values, none, happened, gamma=1.0, gae_lambda=1.0, weights=weights)
        else:
            weighted = discounted_returns(weights * rewards, happened, 1.0) - weights * baselines
        return spread_to_tokens(weighted, turn_ids)
    advantages = spread_to_tokens(discounted_returns(rewards, happened, 1.0) - baselines, turn_ids)
    if mode is None:
        return advantages
    if mode == "dppo_mask":  # https://huggingface.co/papers/2602.04879, equations 11 to 13; see docs/own_loss.md
        ours, theirs = drift.log_probs
        further = ours.float().exp() - theirs.float().exp()
        kept = mask & ~((further.abs() > (bound or 0.0)) & (further * advantages > 0))
        return advantages * kept * drift_weights(ratio, mask, turn_ids, "token_truncate")
    return advantages * drift_weights(ratio, mask, turn_ids, mode, bound)


def measure(drift: Drift, mode: str | None, bound: float | None) -> tuple[float, float, float]:
    """Return the gradient's bias, the standard deviation from one episode, and the error of the mean of ``BATCH`` episodes.

    All are relative to the exact gradient.
    """
    estimates = drift.estimates(weighted(drift, mode, bound))
    chances, exact = drift.snapshot.probabilities, drift.prox.exact
    mean = chances @ estimates
    variance = (chances @ estimates.square().sum(1) - mean.square().sum()).clamp(min=0.0)
    bias, deviation = error(mean, exact), (variance.sqrt() / exact.norm()).item()
    return bias, deviation, math.hypot(bias, deviation / math.sqrt(BATCH))


def divergences(drift: Drift) -> tuple[float, float]:
    """Return the KL divergence of the snapshot from prox in nats a token, and the share of episodes that is effective."""
    chances, others = drift.snapshot.probabilities, drift.prox.probabilities
    kl = chances @ (chances / others).log() / (chances @ drift.mask.sum(1).double())
    return kl.item(), 1.0 / (chances @ (others / chances).square()).item()


def measured(seed: int, lag: int) -> Results:
    """Return all figures of a tree at a lag."""
    after = policies(seed)
    drift = Drift(after[STEPS - lag], after[STEPS])
    kl, share = divergences(drift)
    weightings = {name: measure(drift, mode, bound) for name, (mode, bound) in WEIGHTINGS.items()}
    return {"kl": kl, "effective": share, "weightings": weightings}


def tables(results: Results) -> str:
    """Write the drift, the biases and the deviations as tables of Markdown."""
    lags = results["lags"]

    def medians(lag: str, *keys: Any) -> float:
        values = []
        for one in lags[lag]:
            for key in keys:
                one = one[key]
            values.append(one)
        return statistics.median(values)

    def lines(title: str, rows: dict[str, list[str]]) -> list[str]:
        head = ["| " + " | ".join([title, *(f"lag {lag}" for lag in lags)]) + " |", "|---" * (len(lags) + 1) + "|"]
        return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""]

    drift = {
        "KL(snapshot, prox), nats a token": [f"{medians(lag, 'kl'):.4f}" for lag in lags],
        "effective share of the episodes": [f"{medians(lag, 'effective'):.2f}" for lag in lags],
    }
    written = lines("drift", drift)
    for place, title in enumerate(("bias", "standard deviation of one episode", f"error of {BATCH} episodes")):
        written += lines(
            title, {name: [_cell(medians(lag, "weightings", name, place)) for lag in lags] for name in WEIGHTINGS}
        )
    return "\n".join(written).rstrip()


def _cell(value: float) -> str:
    return "0" if value < 1e-6 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def with_tables(page: str, results: Results) -> str:
    """Return the page with the tables between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Compute, save, and write the tables of the page."""
    torch.set_num_threads(1)
    lags = {str(lag): [measured(seed, lag) for seed in range(TREES)] for lag in LAGS}
    results = {"rate": RATE, "steps": STEPS, "batch": BATCH, "lags": lags}
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(tables(results))


if __name__ == "__main__":
    main()
