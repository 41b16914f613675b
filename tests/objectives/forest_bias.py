"""How wrong are common ways to train on episodes of several paths: tables of benchmarks/results/paths.md, enumerated.

``python tests/objectives/forest_bias.py`` writes it into the page; a test compares.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from forests import (
    PROGRAMS,
    Call,
    Forest,
    Program,
    asked_again,
    asked_again_inside,
    at_once,
    error,
    helper,
    loop,
    summary,
)

from agile_trainers.objectives.advantages import group_advantages
from agile_trainers.objectives.returns import discounted_returns, gae

PAGE = Path(__file__).resolve().parents[2] / "benchmarks/results/paths.md"
BEGIN, END = "<!-- begin: written by tests/objectives/forest_bias.py -->", "<!-- end -->"
SEEDS = range(11)

Weight = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the first member of M groups, (M,), given the rows and the returns of all members, (M, members) each."""


def returns(forest: Forest, gamma: float = 1.0) -> torch.Tensor:
    """(N, K), the return of each call."""
    return discounted_returns(forest.rewards, forest.mask, gamma, forest.rewarded)


@cache
def values(forest: Forest, gamma: float = 1.0, *, first_asks: bool = False) -> torch.Tensor:
    """(N, K), the exact value of each call's prompt: the expected return of the calls that have it.

    ``first_asks`` leaves those out that ask again inside a path.
    """
    counted = forest.table(lambda call, *_: not (first_asks and call.kind == "asked again"))
    worth, weight = dict[str, float](), dict[str, float]()
    chances, earned = forest.probabilities[:, None] * counted, returns(forest, gamma)
    for calls, chance, row in zip(forest.calls, chances.tolist(), (chances * earned).tolist()):
        for call, share, value in zip(calls, chance, row):
            worth[call.prompt] = worth.get(call.prompt, 0.0) + value
            weight[call.prompt] = weight.get(call.prompt, 0.0) + share
    return forest.table(lambda call, *_: worth[call.prompt] / weight[call.prompt])


def estimates(
    forest: Forest, gae_lambda: float, gamma: float = 1.0, value: torch.Tensor | None = None, **changes: torch.Tensor
) -> torch.Tensor:
    """(N, K), generalized advantage estimates from exact values, or given ones."""
    value = values(forest, gamma) if value is None else value
    calls = {"following": forest.following, "rewarded": forest.rewarded, **changes}
    final = value.new_zeros(len(value))
    return gae(forest.rewards, value, final, forest.mask, gamma=gamma, gae_lambda=gae_lambda, **calls)


def of_first_asks(gae_lambda: float) -> Callable[[Forest], torch.Tensor]:
    """GAE from the values of prompts that are asked for the first time."""
    return lambda forest: forest.expected(estimates(forest, gae_lambda, value=values(forest, first_asks=True)))


def cut_short(gae_lambda: float) -> Callable[[Forest], torch.Tensor]:
    """The last call of a longest episode does not happen; its value is that of the final state."""

    def estimate(forest: Forest) -> torch.Tensor:
        value, mask = values(forest), forest.mask.clone()
        final = value[:, -1].clone()
        mask[:, -1] = False
        options = {"gamma": 1.0, "gae_lambda": gae_lambda, "following": forest.following, "rewarded": forest.rewarded}
        return forest.expected(gae(forest.rewards, value, final, mask, **options))

    return estimate


def in_groups(forest: Forest, size: int, weight: Weight, counted: torch.Tensor | float = 1.0) -> torch.Tensor:
    """(D,), the expectation over all groups of the mean over members of weight times the sum of their scores.

    Members of equal rows and returns are one class, so that there are few groups. ``counted`` (N, K) leaves calls out.
    """
    pairs = torch.stack([forest.rows, forest.rewards.sum(1)], dim=1)
    kinds, kind = pairs.unique(dim=0, return_inverse=True)
    chances = torch.zeros(len(kinds)).double().index_add(0, kind, forest.probabilities)
    others, orders = _others(len(kinds), size - 1)
    groups = torch.cat(
        [torch.arange(len(kinds)).repeat_interleave(len(others))[:, None], others.repeat(len(kinds), 1)], 1
    )
    weights = weight(kinds[groups][..., 0], kinds[groups][..., 1]).view(len(kinds), -1)
    of_kind = (weights * chances[others].prod(dim=1) * orders).sum(dim=1)
    return forest.expected(of_kind[kind][:, None] * counted)


@cache
def _others(kinds: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All choices of so many members by their kinds, (M, count), and in how many orders each can be drawn, (M,)."""
    chosen = torch.combinations(torch.arange(kinds), count, with_replacement=True)
    equal = (chosen[:, :, None] == chosen[:, None, :]).tril().sum(2)
    return chosen, math.factorial(count) / equal.prod(dim=1)


def leave_one_out(rows: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """The return minus the mean of the other members'."""
    return returns[:, 0] - returns[:, 1:].mean(dim=1)


def in_pairs(forest: Forest, rewards: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """(N, K), the expectation over the other member of a group of two of the library's leave-one-out advantage.

    ``rewards`` (N, K) take the place of the forest's.
    """
    rewards = forest.rewards if rewards is None else rewards
    pairs = torch.tensor(list(itertools.product(range(len(forest.calls)), repeat=2)))
    rows = pairs.flatten()
    advantages = group_advantages(
        rewards[rows], forest.mask[rows], torch.zeros(len(rows)) > 0, group_size=2, scale="none",
        baseline="leave_one_out", rewarded=forest.rewarded[rows],
        **{name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in options.items()},
    ).advantages  # fmt: skip
    assert advantages.dtype == torch.float64
    weighted = advantages * forest.probabilities[pairs.flip(1).flatten()][:, None]
    return torch.zeros_like(rewards).index_add(0, rows, weighted) / 2


# -------------------------------------------------------------------------------------------------- what others do


def mean_over_rows(size: int) -> Callable[[Forest], torch.Tensor]:
    def estimate(forest: Forest) -> torch.Tensor:
        usual = (forest.probabilities * forest.rows).sum()
        return in_groups(forest, size, lambda n, r: leave_one_out(n, r) * usual / n.mean(dim=1))

    return estimate


def baseline_over_rows(size: int) -> Callable[[Forest], torch.Tensor]:
    """Each row is compared with all other rows of its group, those of its own episode among them."""

    def weight(rows: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        others = ((rows * returns).sum(dim=1) - returns[:, 0]) / (rows.sum(dim=1) - 1)
        return returns[:, 0] - others

    return lambda forest: in_groups(forest, size, weight)


def without(kind: str, size: int | None = None) -> Callable[[Forest], torch.Tensor]:
    """Calls of a kind are not trained on; with raw returns, or leave-one-out in groups."""

    def estimate(forest: Forest) -> torch.Tensor:
        kept = forest.table(lambda call, *_: call.kind != kind)
        return forest.expected(returns(forest) * kept) if size is None else in_groups(forest, size, leave_one_out, kept)

    return estimate


def cut_at_delivery(forest: Forest) -> torch.Tensor:
    """A call's return leaves out rewards that were given before its answer arrived."""

    def later(call: Call, k: int, calls: list[Call]) -> float:
        return sum(other.reward for i, other in enumerate(calls) if i not in call.given)

    return forest.expected(forest.table(later))


def next_value(gae_lambda: float) -> Callable[[Forest], torch.Tensor]:
    """GAE in the order of calls, whatever their prompts contain."""

    def estimate(forest: Forest) -> torch.Tensor:
        order = forest.table(lambda call, k, calls: k + 1 if k + 1 < len(calls) else forest.shape[1]).long()
        return forest.expected(estimates(forest, gae_lambda, following=order))

    return estimate


def next_lambda_return(gae_lambda: float) -> Callable[[Forest], torch.Tensor]:
    """GAE along a path; at its end the lambda-return of the next call, which no value is needed for."""

    def estimate(forest: Forest) -> torch.Tensor:
        value, rewards, none = values(forest).tolist(), forest.rewards.tolist(), forest.shape[1]
        advantages = [[0.0] * none for _ in value]
        for e, calls in enumerate(forest.calls):
            for k in reversed(range(len(calls))):
                goes_on = forest.following[e, k] < none
                after = int(forest.following[e, k]) if goes_on else k + 1
                target = sum(rewards[e][k:after])
                if after < len(calls):
                    target += value[e][after] + advantages[e][after] * (gae_lambda if goes_on else 1.0)
                advantages[e][k] = target - value[e][k]
        return forest.expected(torch.tensor(advantages))

    return estimate


def anchored(prompt: str, *, own: bool) -> Callable[[Forest], torch.Tensor]:
    """Calls with the prompt, each minus the mean of the others' in a group of two episodes, with or without its own."""

    def estimate(forest: Forest) -> torch.Tensor:
        chosen = forest.table(lambda call, *_: call.prompt == prompt)
        value = returns(forest) * chosen
        total, count = value.sum(1), chosen.sum(1)
        sums = total + own * (total[:, None] - value)[..., None]  # (N, K, N): episode, call, the other member
        counts = count + own * (count[:, None, None] - 1)
        baseline = (forest.probabilities * sums / counts).sum(2)
        return forest.expected((value - baseline) * chosen)

    return estimate


def credited(gae_lambda: float | None, gamma: float = 1.0) -> Callable[[Forest], torch.Tensor]:
    """The library's returns, or its estimates from exact values."""
    return lambda forest: forest.expected(
        returns(forest, gamma) if gae_lambda is None else estimates(forest, gae_lambda, gamma)
    )


@dataclass
class Practice:
    """A way to train, on programs."""

    words: str
    estimate: Callable[[Forest], torch.Tensor]
    """(D,), its expected gradient."""
    programs: Sequence[Program] = tuple(PROGRAMS)
    prompt: str | None = None
    """Only the logits of this prompt's answer are compared."""
    gamma: float = 1.0

    def errors(self, program: Program) -> list[float]:
        """The relative error of every draw, after multiplication by the best constant."""
        found = []
        for seed in SEEDS:
            forest = drawn(program, seed)
            exact = forest.exact if self.gamma == 1.0 else forest.expected(returns(forest, self.gamma))
            estimated = self.estimate(forest)
            if self.prompt is not None:
                estimated, exact = forest.of_prompt(estimated, self.prompt), forest.of_prompt(exact, self.prompt)
            found.append(error((estimated @ exact) / (estimated @ estimated) * estimated, exact))
        return found


drawn = cache(Forest)

PRACTICES = [
    Practice("raw returns", credited(None)),
    Practice("leave-one-out over episodes, groups of 2", lambda forest: in_groups(forest, 2, leave_one_out)),
    *(Practice(f"GAE along paths, exact values, lambda {a:g}", credited(a)) for a in (0.0, 0.5, 1.0)),
    *(Practice(f"mean over rows, batches of {size} episodes", mean_over_rows(size)) for size in (2, 4)),
    *(Practice(f"baseline over rows, groups of {size}", baseline_over_rows(size)) for size in (2, 4)),
    Practice("the thrown-away answer left out, raw returns", without("discarded"), [asked_again]),
    Practice("the thrown-away answer left out, leave-one-out", without("discarded", 2), [asked_again]),
    Practice("the summary left out, raw returns", without("summary"), [summary]),
    Practice("the summary left out, leave-one-out", without("summary", 2), [summary]),
    Practice("rewards cut at delivery, raw returns", cut_at_delivery, [at_once]),
    *(Practice(f"the next call's value after a rewrite, lambda {a:g}", next_value(a), [summary]) for a in (0.0, 0.5)),
    *(Practice(f"the next path's lambda-return, lambda {a:g}", next_lambda_return(a), [summary]) for a in (0.0, 0.5)),
    Practice(
        "one prompt's calls compared, also within an episode, groups of 2", anchored("L0", own=True), [loop], "L0"
    ),
    Practice("one prompt's calls compared between episodes only", anchored("L0", own=False), [loop], "L0"),
]

LIMITS = [
    *(
        Practice(f"a prompt is asked twice inside a path, lambda {a:g}", credited(a), [asked_again_inside])
        for a in (0.0, 0.5, 1.0)
    ),
    *(
        Practice(f"the same with the value of first asks, lambda {a:g}", of_first_asks(a), [asked_again_inside])
        for a in (0.0, 0.5)
    ),
    *(
        Practice(f"a helper takes one or two calls, gamma .7, lambda {a:g}", credited(a, 0.7), [helper], gamma=0.7)
        for a in (0.0, 0.5, 1.0)
    ),
    Practice("a limit cuts the episode short: calls of an earlier path", cut_short(0.5), [summary], "P"),
    Practice("a limit cuts the episode short: calls of the last path", cut_short(0.5), [summary], "Sa"),
]


def limits() -> str:
    """The page's table of what GAE cannot do."""
    lines = ["| | error |", "|---|---|"]
    return "\n".join([*lines, *(f"| {one.words} | {_cell(one.errors(one.programs[0]))} |" for one in LIMITS)])


def table() -> str:
    """The table of the page."""
    names = [program.__name__.replace("_", " ") for program in PROGRAMS]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for practice in PRACTICES:
        cells = [_cell(practice.errors(program)) if program in practice.programs else "" for program in PROGRAMS]
        lines.append(f"| {practice.words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(errors: list[float]) -> str:
    return "0" if max(errors) < 1e-10 else f"{statistics.median(errors):.2f} ({max(errors):.2f})"


def with_tables(page: str) -> str:
    """Return the page with both tables in place of those between its marks."""
    parts = page.split(BEGIN)
    written = [f"{BEGIN}\n\n{made}\n\n{END}{part.split(END)[1]}" for made, part in zip((table(), limits()), parts[1:])]
    return "".join([parts[0], *written])


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
