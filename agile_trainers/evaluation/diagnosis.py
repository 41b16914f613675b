"""Names the reasons why a run does not learn, from its metrics: the table of health checks, and what reports their findings.

Every condition is a pure function of a :class:`MetricHistory` and the run's options. ``docs/troubleshooting.md`` has a
section for each finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import atanh, inf, isnan, log, tanh
from statistics import fmean
from typing import Any

from agile_trainers.evaluation.statistics import Course, Shift, wilson_interval

BATCHES = 5
"""Values over which a condition on the episodes must hold."""
UPDATES = 10
"""Values over which a condition on the updates must hold."""
KEPT = 40
"""Latest values that are kept of each metric, but ``LONG`` of success."""
LONG = 100
"""Batches that may decide whether a task is solved or too hard, at most."""
CHANCE = 0.002
"""Probability up to which chance explains that a task looks solved, or too hard. Tasks are drawn group by group, and the
members of a group may be all won or all lost: a few batches of few groups show little."""
QUIET = 100
"""Steps for which a finding must have been absent before it is reported again. Until then it explains others."""

SOLVED = 0.95
"""Share of successful episodes from which a task is solved."""
NEARLY_SOLVED = 0.9
"""Share of successful episodes from which few tasks are left; that no group differs for a while is then no fault. A solved
task must be shown to have more."""
UNSOLVED = 0.02
"""Share of successful episodes up to which a task is too hard."""
SOME = 0.2
"""Share of successful episodes that must be shown to be more than a task that is too hard has."""
EASY = 0.8
"""Share of successful episodes from which a task is too easy for the policy that training starts with."""
MOST = 0.95
"""Share of episodes without advantage from which a batch counts as having no informative group."""
STILL = 1e-3
"""Change of a token's log-probability, in nats, up to which a policy has not moved."""
ERRORS = 4.0
"""Standard errors by which the latest values of a metric must differ from the first where that alone is no finding."""
PARTED = 5.0
"""Standard errors by which a judge that is held out must fall below its best latest mean, of which there are many."""
FALL = 0.2
"""Share of the first success that must be lost, or standard deviations of an episode's reward."""
DESTROYED = 0.5
"""Share of the first success that a destroyed policy has lost, at least."""
MOVED = 1.0
"""Change of a token's log-probability, in nats, from which a policy is far from its start."""
CUT_MORE = 0.25
"""Rise of the share of cut answers, from the start, that a destroyed policy shows."""
FORGOTTEN = 0.2
"""Share of an earlier ``prompt_information`` up to which it is lost."""
KNOWN_FOR = 3
"""Measurements of which the mean is compared: a single one, of few prompts, may be off by .2."""
RULES = 0.5
"""Gain of the entropy bonus from which it rules the updates, in standard deviations of an episode's reward."""
KNEW = 0.25
"""``prompt_information`` that a policy must have had for its loss to be a collapse."""
UNREAD = 0.02
"""``prompt_information`` up to which answers do not depend on their prompts."""
UNREAD_FOR = 4
"""Measurements in a row in which they do not."""
UNREAD_AFTER = 100
"""Batches before which a policy may still learn what all prompts have in common, before it reads them."""
CUT_IN_PART = 0.6
"""Share of episodes cut short from which a run that does not improve may need longer ones."""
UNPAID = 0.3
"""Correlation of reward and success below which the reward does not pay for success."""
UNPAID_ERRORS = 3.0
"""Standard errors by which it must lie below."""
LOST = 0.95
"""Share of the failures that lie in groups without a success from which starts are lost."""
FAILING = 0.1
"""Share of failed episodes from which the other episodes say nothing of the run."""
REPEATED = 10
"""Steps after which a failing environment is reported again."""
PINNED = 1.0
"""Smallest ``beta`` that can hold the policy at its reference. Normalized advantages A allow a divergence of about
Var(A) / (2 beta^2) nats."""
STIFF = 0.05
"""Entropy of the first batch, in nats a token, up to which the members of a group give the same answers."""
SUMMED = 1e-12
"""Spread of equal rewards that were summed in other orders, over the same."""
ROUNDING = 1e-6
"""Spread of rewards, over the larger of 1 and their mean, up to which advantages are 0 (``objectives/advantages.py``)."""
EMPTY = 0.95
"""Share of the observations between two answers that say nothing from which a policy learns nothing of what it did."""
EARLY = 0.2
"""Spread of what is earned before the last turn, in that of an episode's return, up to which the reward comes at the end."""
CREDITED = 0.01
"""Share of the last reward up to which discounting leaves a first answer without credit."""
EVERY = 0.9
"""Share of the turns that could begin a new path from which a history rewrites at every turn."""
TOO_FEW = 0.4
"""Effective share of the episodes from which their policy is too old, and ``TOO_FAR``: every uncorrected run of
``benchmarks/ahead_learning.py`` with four batches ahead crosses both bounds."""
TOO_FAR = 0.1
"""Divergence of the policy that trains from the one that played, in nats a token. In long episodes few count even where the
two are close."""
ALONE = 0.5
"""Share of the groups in which only an expert succeeds, from which the policy does not learn from it."""
NEAR = 0.01
"""Divergence from the reference, in nats a token, up to which a policy plays as its reference."""


@dataclass(frozen=True)
class Finding:
    """A reason why a run does not learn, or the report that it has learned."""

    name: str
    step: int
    """Optimizer steps before."""
    evidence: str
    advice: str

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step else ""
        return f"[{self.name}] {self.evidence} {self.advice} ({step}docs/troubleshooting.md#{self.name})"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as a line of ``findings.jsonl``."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """The measurement behind a finding."""

    text: str
    """One sentence."""
    size: float = 1.0
    """Severity, larger is worse. A finding is reported again when this has doubled."""
    advice: str = ""
    """Takes the place of the health check's advice, where the numbers tell more."""
    certain: bool = True
    """False: it explains other findings while it holds, but is not reported."""


@dataclass
class MetricHistory:
    """The metrics that the conditions read.

    Args:
        patience: False evaluates every condition on the latest value alone, for episodes that are played before training.
    """

    patience: bool = True
    groups: int = 0
    """Groups of a generation batch, for the freedom of ``success_sem``; 0 if unknown."""
    latest: dict[str, list[float]] = field(default_factory=dict)
    """The last ``KEPT`` values of each metric."""
    earliest: dict[str, list[float]] = field(default_factory=dict)
    """The first ``BATCHES`` values of each metric."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of values that each metric has had."""
    courses: dict[str, Course] = field(default_factory=dict)
    """Comparisons with the first value, of the metrics in ``COURSES``."""
    notes: dict[str, str] = field(default_factory=dict)
    """Evidence that is established elsewhere, by the name of its finding."""

    def add(self, metrics: Mapping[str, float]) -> None:
        """Append a value of each metric; values that are not a number, and metrics that nothing reads, are left out."""
        if "success" in metrics:
            metrics = {"success/unreported": 0.0, **metrics}  # logged only where there are such episodes
        if "turns/mean" in metrics:
            metrics = {"rewrites/context": 0.0, "rewrites/questions": 0.0, **metrics}  # only where there are such turns
        for name in METRICS & metrics.keys():
            value = metrics[name]
            if isnan(value):
                continue
            self.latest[name] = [*self.latest.get(name, []), value][-(LONG if name == "success" else KEPT) :]
            if len(self.earliest.setdefault(name, [])) < BATCHES:
                self.earliest[name].append(value)
            self.counts[name] = self.counts.get(name, 0) + 1
            if name in COURSES:
                error = metrics.get("success_sem") if name == "success" else None
                if name in self.courses:
                    self.courses[name].add(value, error, self.groups)
                else:
                    errors = [] if error is None else [error**2] * 2
                    self.courses[name] = Course(self.earliest[name][0], errors=errors)

    def last(self, name: str, count: int) -> list[float]:
        """Return the last ``count`` values; an empty list if there are fewer."""
        values = self.latest.get(name, [])
        count = count if self.patience else 1
        return values[-count:] if len(values) >= count else []

    def mean(self, name: str, count: int = BATCHES) -> float | None:
        """Return the mean of the last ``count`` values; None if there are fewer."""
        values = self.last(name, count)
        return fmean(values) if values else None

    def shown(self, least: float, beyond: float) -> float | None:
        """Return the mean success of latest batches that is at least a share, and shown to be beyond a lower one.

        Without patience the latest value is enough.

        Args:
            least: The share; one below a half is an upper bound, and ``beyond`` then a higher one.
            beyond: Were the true share this one, ``BATCHES`` batches or more of such groups would have their mean with a
                probability of at most ``CHANCE``.

        Source: Hoeffding (1963), theorem 1, which holds for independent groups whatever happens within each.
        """
        values, total = self.latest.get("success", []), 0.0
        if not self.patience:
            values = values[-1:]
        for number, value in enumerate(reversed(values), 1):
            total += value
            mean = total / number
            beaten = mean >= least if least > 0.5 else mean <= least
            enough = number >= BATCHES and number * max(self.groups, 1) * _divergence(mean, beyond) >= -log(CHANCE)
            if beaten and (enough or not self.patience):
                return mean
        return None

    def means(self, name: str, count: int) -> list[float]:
        """Return the means of each ``count`` values in a row, of the latest; an empty list if there are fewer."""
        values, count = self.latest.get(name, []), count if self.patience else 1
        return [fmean(values[end - count : end]) for end in range(count, len(values) + 1)]

    def first(self, name: str) -> float | None:
        """Return the mean of the first ``BATCHES`` values; None if there are fewer."""
        values = self.earliest.get(name, [])[:BATCHES]
        return fmean(values) if len(values) == BATCHES or (values and not self.patience) else None

    def start(self, name: str) -> float | None:
        """Return the first value: that of the policy before any update; None if there is none."""
        values = self.earliest.get(name, [])
        return values[0] if values else None

    def shift(self, name: str) -> Shift | None:
        """Compare a metric of ``COURSES`` with its first value; None before enough values, or without patience."""
        return self.courses[name].shift() if self.patience and name in self.courses else None

    def errors(self, name: str) -> float:
        """Return the difference of the latest ``BATCHES`` values from the first in standard errors; 0 before enough.

        It is up to date where :meth:`shift` is sure, and judges what only goes with another finding. The variance is half
        the mean square of successive differences.
        """
        values, first, now = self.latest.get(name, []), self.first(name), self.mean(name)
        if not self.patience or first is None or now is None or self.counts[name] < 2 * BATCHES:
            return 0.0
        return (now - first) / max((fmean((b - a) ** 2 for a, b in pairwise(values)) / BATCHES) ** 0.5, 1e-9)

    def rose(self, name: str) -> bool:
        """Return True if the latest values of a metric seem to be higher than the first."""
        return self.errors(name) > ERRORS

    def rises(self, name: str) -> bool:
        """Return True if the last ``UPDATES`` values exceed as many before by more than two standard errors."""
        values = self.last(name, 2 * UPDATES)
        if len(values) < 2 * UPDATES:
            return False
        before, after = values[:UPDATES], values[UPDATES:]
        return fmean(after) - fmean(before) > 2 * ((_variance(before) + _variance(after)) / UPDATES) ** 0.5


def _variance(values: list[float]) -> float:
    mean = fmean(values)  # a hundred times faster than `statistics.variance`, which computes with fractions
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _divergence(share: float, other: float) -> float:
    """Return the Kullback-Leibler divergence of two probabilities of success, in nats."""
    return sum(p * log(p / q) for p, q in ((share, other), (1 - share, 1 - other)) if p > 0)


# ------------------------------------------------------------------------------------------------------- conditions


def _without_advantage(history: MetricHistory, options: Any) -> float | None:
    """Return the share of episodes without advantage if that is most; with a critic, 1 if all returns are equal."""
    if not options.rewarded:
        return None
    none = None if options.has_critic else history.mean("advantage/zero")
    if none is not None:
        return none if none >= MOST else None
    spreads, lowest, highest = (history.last(f"return/{name}", BATCHES) for name in ("std", "min", "max"))
    equal = spreads and max(spreads) == 0.0 and min(lowest) == max(highest)
    return 1.0 if equal else None


def _incomplete(history: MetricHistory) -> bool:
    """Return True if success is not known of all of the latest episodes, or the reward not of all."""
    return any(any(history.last(name, BATCHES)) for name in _MISSING)


def _solved(history: MetricHistory, options: Any) -> Evidence | None:
    success = history.mean("success")
    if success is None or success < SOLVED or _incomplete(history):
        return None
    first = history.first("success") or 0.0
    since = " from the first batches on" if history.patience and first >= SOLVED else ""
    alike = history.last("seeds_alike", 1) == [1.0]
    where = ", in the same task: seeds make no difference" if alike else ""
    advice = "What was learned holds for this task alone: derive the task from the seed of reset, unless one is meant."
    shown = history.shown(SOLVED, NEARLY_SOLVED)
    lost = [text for name, text in history.notes.items() if name.startswith(_EVALUATED)]
    if shown is not None and lost:
        # Twice as severe, so that it is told where the task was called solved before.
        return Evidence(
            f"Solved in training alone: {shown:.0%} of the latest episodes succeeded, but {lost[0]}.", 2.0,
            advice="What was learned does not hold for the episodes of the evaluation: train on more or other tasks.",
        )  # fmt: skip
    return Evidence(
        f"Solved: {shown or success:.0%} of the latest episodes succeeded{since}{where}.",
        advice=advice if alike else "", certain=shown is not None,
    )  # fmt: skip


def _zero_advantage(history: MetricHistory, options: Any) -> Evidence | None:
    none, success = _without_advantage(history, options), history.mean("success")
    if none is None or (success is not None and not UNSOLVED < success < NEARLY_SOLVED):
        return None
    known = "" if success is None else f" (success {success:.0%})"
    text = f"{none:.0%} of the latest episodes had no advantage{known}."
    spread, mean = (history.mean(f"return/{name}") or 0.0 for name in ("std", "mean"))
    large = max(1.0, abs(mean))
    if SUMMED * large < spread <= ROUNDING * large:
        return Evidence(
            f"{text} Returns have a standard deviation of {spread:.2g} around {mean:.6g}, which counts as rounding.",
            advice="Multiply the reward, or leave out what all episodes get.",
        )
    return _of_sampling(history, options, text)


def _of_sampling(history: MetricHistory, options: Any, text: str) -> Evidence:
    """Return evidence that answers do not differ; if they hardly varied from the start, with what makes them."""
    first = history.start("entropy")
    if first is None or first > STIFF:
        return Evidence(text)
    return Evidence(
        f"{text} The entropy was {first:.2g} nats a token from the start, so that the members of a group give the same "
        f"answers (temperature={options.temperature:g}).",
        advice="Raise temperature (1.0 samples the policy as it is); top_k, top_p and min_p narrow it too.",
    )


def _success_doubtful(history: MetricHistory, options: Any) -> Evidence | None:
    first, now = history.earliest.get("success", [])[:BATCHES], history.last("success", BATCHES)
    lowest, highest = (history.last(f"return/{name}", BATCHES) for name in ("min", "max"))
    if not (history.patience and now and lowest and highest) or min(*first, *now) < 1.0 or _incomplete(history):
        return None
    low, high = min(lowest), max(highest)
    # Where all succeed, returns may differ a little, as by the number of turns.
    if _without_advantage(history, options) is not None or not returns_differ(low, high):
        return None
    return Evidence(
        f"Every episode of the first batches and of the latest counts as a success, but returns go from {low:.3g} to "
        f"{high:.3g}."
    )


def returns_differ(low: float, high: float) -> bool:
    """Return True if returns differ by at least half of the larger of the lowest and the highest, without sign."""
    return high - low >= 0.5 * max(abs(low), abs(high)) > 0


def _too_hard(history: MetricHistory, options: Any) -> Evidence | None:
    none, success = _without_advantage(history, options), history.mean("success")
    if none is None or success is None or success > UNSOLVED or history.mean("demonstrations/alone"):
        return None  # what experts can do is not too hard
    text = f"{success:.0%} of the latest episodes succeeded, and {none:.0%} of them had no advantage."
    return replace(_of_sampling(history, options, text), certain=history.shown(UNSOLVED, SOME) is not None)


def _too_easy(history: MetricHistory, options: Any) -> Evidence | None:
    first, start = history.first("success"), history.start("success")
    if first is None or start is None or start < EASY or not EASY <= first < SOLVED:
        return None
    return Evidence(
        f"{start:.0%} of the episodes of the first batch succeeded, before any update, and {first:.0%} of the first "
        f"{BATCHES if history.patience else 1}."
    )


def _starts_lost(history: MetricHistory, options: Any) -> Evidence | None:
    success, unsolved = (history.mean(name, 2 * UPDATES) for name in ("success", "groups_without_success"))
    if not history.patience or options.num_generations < 2 or success is None or unsolved is None:
        return None
    if not UNSOLVED < success < SOLVED or unsolved < LOST * (1 - success) or _incomplete(history):
        return None
    if history.rises("success"):
        return None  # the policy may still be learning one start after the other
    first, before = history.first("success"), history.first("groups_without_success")
    still = abs(history.errors("success")) <= ERRORS
    if still and first is not None and before is not None and before >= LOST * (1 - first):
        return None  # each start is as it was: none is lost, the answers may not matter
    return Evidence(
        f"{unsolved:.0%} of the latest groups had no success, and hold nearly all failures; the other starts are solved, "
        f"and success, {success:.0%}, does not rise."
    )


def _entropy_collapse(history: MetricHistory, options: Any) -> Evidence | None:
    first, now = history.start("entropy"), history.mean("entropy", UPDATES)
    if first is None or now is None or now > max(min(0.1 * first, 0.1), 0.005) or history.rises("return/mean"):
        return None
    if (history.mean("success") or 0.0) >= EASY:
        return None  # a task that is almost solved may be played without exploring
    return _of_sampling(history, options, f"The entropy is {now:.2g} nats a token; it began at {first:.2g}.")


def _template_collapse(history: MetricHistory, options: Any) -> Evidence | None:
    known, entropy, first = (
        history.means("prompt_information", KNOWN_FOR),
        history.mean("entropy"),
        history.start("entropy"),
    )
    if not known or entropy is None or first is None:
        return None
    now, best = known[-1], max(known)
    if best < KNEW or now > FORGOTTEN * best or entropy < 0.3 * first or _falling(history):
        return None
    return Evidence(
        f"Answers tell {max(now, 0):.0%} of what they could about their prompt, once {best:.0%}, at an entropy of "
        f"{entropy:.2g} nats a token: they vary, but not with the prompt."
    )


def _prompts_unread(history: MetricHistory, options: Any) -> Evidence | None:
    values = history.last("prompt_information", UNREAD_FOR)
    success, empty = history.mean("success"), history.mean("observations_empty", 2 * BATCHES)
    if empty is not None and empty >= EMPTY and (success or 0.0) < EASY and not history.rose("success"):
        return Evidence(
            f"{empty:.0%} of the observations between two answers are empty: the model does not see what its answers did.",
            advice="Return what happened from step, and all that the next answer needs.",
        )
    if not history.patience or not values or max(values) > UNREAD or (success or 0.0) >= EASY:
        return None
    if len(history.last("reward", 2 * UPDATES)) < 2 * UPDATES or history.rises("reward"):
        return None  # what all prompts have in common may still be learned
    if history.counts["reward"] < UNREAD_AFTER or history.rose("success") or _falling(history):
        return None  # a policy first learns what all prompts have in common; one that was harmed has another cause
    known = "" if success is None else f" (success {success:.0%})"
    return Evidence(
        f"Answers do not depend on their prompt: prompt_information was at most {max(*values, 0):.2g} in each of the latest "
        f"{len(values)} measurements{known}."
    )


def _cut_answers(history: MetricHistory, options: Any) -> Evidence | None:
    share, first = history.mean("answers_cut"), history.start("answers_cut")
    if share is None or first is None or share < 0.25:
        return None
    if first < 0.25 and (history.counts["answers_cut"] <= BATCHES or _falling(history)):
        return None  # of a policy that updates may have destroyed, which is known a few batches later
    cut, everyone, spread = (history.mean(f"return/{name}") for name in ("answers_cut", "mean", "std"))
    worse = None not in (cut, everyone, spread) and cut < everyone - 0.1 * spread  # type: ignore[operator]
    # A limit of a few tokens may be the design of a task; there, only the returns tell whether it hurts.
    masked = share >= MOST and options.mask_truncated_completions
    if not (worse or spread == 0.0 or masked or (share >= MOST and options.max_new_tokens >= 16)):
        return None
    paid = f" and the episodes with one returned {cut:.3g} (mean of all: {everyone:.3g})" if worse else ""
    paid += ", and mask_truncated_completions=True leaves out episodes whose last one was" if masked else ""
    return Evidence(f"{share:.0%} of the answers were cut at max_new_tokens={options.max_new_tokens}{paid}.", share)


def _context_full(history: MetricHistory, options: Any) -> Evidence | None:
    share = history.mean("stop/context_full")
    if share is None or share < 0.1:
        return None
    limit = options.max_model_length
    named = "the model's context" if limit is None else f"max_model_length={limit}"
    return Evidence(f"{share:.0%} of the episodes ended because the conversation filled {named}.", share)


def _rewrite_full(history: MetricHistory, options: Any) -> Evidence | None:
    share = history.mean("stop/rewrite_full")
    if share is None or share < 0.1:
        return None
    return Evidence(f"{share:.0%} of the episodes ended because a rewritten context left no room for an answer.", share)


def _rewritten_every_turn(history: MetricHistory, options: Any) -> Evidence | None:
    turns, forks, asked = (history.mean(name) for name in ("turns/mean", "rewrites/context", "rewrites/questions"))
    if turns is None or forks is None or asked is None:
        return None
    later = turns * (1 - asked) - 1  # the answer to a question does not begin a path, nor does the first turn
    if later < 2 or turns * forks < EVERY * later:
        return None
    return Evidence(
        f"{min(turns * forks / later, 1):.0%} of the turns after the first begin a new path, in episodes of {turns:.3g} "
        "turns: the context is rewritten every time, and what follows the first difference is read and trained on again."
    )


def _episodes_cut(history: MetricHistory, options: Any) -> Evidence | None:
    own, turns, full, rewritten = (history.mean(f"stop/{name}") for name in _LIMITS)
    if own is None or turns is None or full is None:
        return None
    masked = options.mask_truncated_completions
    cut = turns + full + (rewritten or 0.0) + (own if masked else 0.0)
    success, spreads = history.mean("success"), history.last("return/std", BATCHES)
    # A run whose episodes earn on the way may be meant to be cut; before training, nothing tells.
    lost = masked or not history.patience or (not any(spreads) if success is None else success <= UNSOLVED)
    if cut < 0.999 or not lost:
        return _cut_in_part(history, options)
    fate = " and mask_truncated_completions=True leaves them out: nothing is trained on" if masked else ""
    return Evidence(f"A limit cut every episode short (max_turns={options.max_turns}){fate}.")


def _cut_in_part(history: MetricHistory, options: Any) -> Evidence | None:
    """Return evidence if limits have cut most episodes since the start, and neither success nor reward improves."""
    values = [history.last(f"stop/{name}", 4 * BATCHES) for name in ("max_turns", "context_full")]
    success = history.mean("success", 4 * BATCHES)
    if not history.patience or success is None or not all(values) or history.rose("success") or history.rose("reward"):
        return None
    start, now = (
        sum(history.earliest[f"stop/{name}"][0] for name in ("max_turns", "context_full")),
        sum(map(fmean, values)),
    )
    if min(start, now) < CUT_IN_PART or success > 1 - now + UNSOLVED:
        return None
    return Evidence(
        f"A limit cut {now:.0%} of the latest episodes short (max_turns={options.max_turns}), and {start:.0%} of the first "
        f"batch. {success:.0%} succeeded, which has not risen."
    )


def _ratio_clipped(history: MetricHistory, options: Any) -> Evidence | None:
    name = "cispo_clip_ratio" if options.loss_type == "cispo" else "clip_ratio/region_mean"
    share = history.mean(name, UPDATES)
    # One ratio per sequence leaves a narrow range at once; GSPO's paper clips 15 % of the tokens.
    if share is None or share < (0.5 if options.importance_sampling_level == "sequence" else 0.3):
        return None
    if not history.last("reward", 2 * BATCHES) or history.rose("success") or history.rose("reward"):
        return None  # it learns all the same, or nobody knows yet
    return Evidence(f"{share:.0%} of the tokens are clipped: the policy moves too far on one batch.", share)


def _sampler_too_old(history: MetricHistory, options: Any) -> Evidence | None:
    drift, share = history.mean("drift/kl", UPDATES), history.mean("drift/effective_sample_size", UPDATES)
    if drift is None or share is None or drift <= TOO_FAR or share >= TOO_FEW:
        return None
    reward, first = history.last("reward", 2 * UPDATES), history.first("reward")
    if not reward or first is None or history.rose("reward"):
        return None
    return Evidence(
        f"The policy that played is {drift:.2g} nats a token away from the one that trains: {share:.0%} of the episodes "
        f"count, and the reward has not risen, from {first:.3g} to {fmean(reward[-UPDATES:]):.3g}."
    )


def _sampler_mismatch(history: MetricHistory, options: Any) -> Evidence | None:
    text = history.notes.get("sampler_mismatch")
    difference = history.mean("sampling/sampling_logp_difference/mean", 1)
    return None if text is None else Evidence(text, difference or 1.0)


def _kl_runaway(history: MetricHistory, options: Any) -> Evidence | None:
    values = history.last("kl", 2 * UPDATES)
    if not values:
        return None
    before, now = fmean(values[:UPDATES]), fmean(values[-UPDATES:])
    if now < 1.0 or now < before:
        return None
    return Evidence(f"The policy is {now:.2g} nats a token away from its reference (beta={options.beta}).", now)


def _teacher_left(history: MetricHistory, options: Any) -> Evidence | None:
    fall, first, now = _fall(history, options), history.first("teacher/kl"), history.mean("teacher/kl", UPDATES)
    if fall is None or first is None or now is None or not history.rose("teacher/kl"):
        return None
    return Evidence(
        f"The divergence from the teacher rose from {first:.2g} to {now:.2g} nats a token, and {_fallen(*fall)}: the policy "
        "is in states that the teacher does not know."
    )


def _expert_alone(history: MetricHistory, options: Any) -> Evidence | None:
    alone, success = history.mean("demonstrations/alone", UPDATES), history.mean("success", UPDATES)
    known, learned = history.mean("demonstrations/log_prob", UPDATES), history.rose("demonstrations/log_prob")
    if alone is None or alone < ALONE or known is None or learned or (success or 0.0) > UNSOLVED:
        return None
    return Evidence(
        f"In {alone:.0%} of the latest groups only the expert succeeded, and the policy has not come nearer to its answers "
        f"({known:.2f} nats a token)."
    )


def _value_not_learning(history: MetricHistory, options: Any) -> Evidence | None:
    if history.counts.get("value/error", 0) < 3 * UPDATES:
        return None
    errors, spreads = (history.last(f"value/{name}", 2 * UPDATES) for name in ("error", "spread"))
    if not errors or not spreads:
        return None
    error, spread = (fmean(value**2 for value in values) ** 0.5 for values in (errors, spreads))
    if error <= 1.25 * spread or error < 1e-2:
        return None
    return Evidence(
        f"The critic's error is {error:.2g}, and that of a critic that always says the mean would be {spread:.2g}.",
        error / max(spread, 1e-6),
    )


def _reward_discounted(history: MetricHistory, options: Any) -> Evidence | None:
    turns, early, spread = history.mean("turns/mean"), history.mean("return/early_std"), history.mean("return/std")
    if turns is None or early is None or spread is None or turns < 2 or not spread > 0 or early > EARLY * spread:
        return None
    own = getattr(options, "turn_credit", "return") == "reward"  # a turn is credited with its own reward alone
    left = 0.0 if own else options.gamma ** (turns - 1)
    if left > CREDITED:
        return None
    option = "turn_credit=reward" if own else f"gamma={options.gamma:g}"
    return Evidence(
        f"The reward comes with the last of {turns:.2g} turns, and {option} credits a first answer with {left:.0%} of it.",
        advice="Set turn_credit=return: only the last answer learns from the reward." if own else "",
    )


def _no_weight_change(history: MetricHistory, options: Any) -> Evidence | None:
    change = history.mean("policy_change", 1)
    if change is None or change > STILL or history.counts.get("advantage/zero", 0) < 3 * BATCHES:
        return None
    if history.counts["policy_change"] < 2:
        return None  # the first measurement is an early one, for policies that move far
    return Evidence(
        f"Since the first measurement the log-probabilities of the same answers moved by {change:.1g} nats a token: the "
        "updates change nothing."
    )


def _fall(history: MetricHistory, options: Any) -> tuple[str, Shift] | None:
    """Return what fell below the start, and how far: the success, or without one the reward.

    None where later batches have other tasks than the first by design.
    """
    if options.task_sampling == "adaptive" or not options.shuffle_dataset:
        return None
    name = "success" if "success" in history.counts else "reward"
    shift, start, spread = history.shift(name), history.start(name), history.start("reward_std")
    if shift is None or start is None or not shift.fell or shift.now >= start:
        return None
    enough = FALL * (shift.first if name == "success" else spread or inf)
    return (name, shift) if shift.first - shift.now >= enough else None


def _falling(history: MetricHistory) -> bool:
    """Return True if the success of the latest batches is lower than at the start, be it by chance."""
    now, start = history.mean("success"), history.start("success")
    return history.patience and now is not None and start is not None and now <= (1 - FALL) * start


def _paid_as_before(history: MetricHistory) -> bool:
    """Return True if the reward is as high as at the start: what lowers success is then what the reward pays for."""
    now, start = history.mean("reward"), history.start("reward")
    return now is not None and start is not None and now >= start


def _pays_for_less(history: MetricHistory, options: Any) -> tuple[Shift, Shift] | None:
    """Return how success fell and the reward rose, if both did."""
    fall, reward = _fall(history, options), history.shift("reward")
    if fall is None or fall[0] != "success" or reward is None or not history.rose("reward"):
        return None
    return fall[1], reward


def _giving_up_pays(history: MetricHistory, options: Any) -> Evidence | None:
    both, turns = _pays_for_less(history, options), history.shift("turns/mean")
    if both is None or turns is None or history.errors("turns/mean") > -ERRORS:
        return None
    success, reward = both
    return Evidence(
        f"Episodes that end early earn more: up to batch {success.batch} the reward rose from {reward.first:.3g} to "
        f"{reward.now:.3g} and turns fell from {turns.first:.3g} to {turns.now:.3g}, while success fell from "
        f"{success.first:.0%} to {success.now:.0%}."
    )


def _reward_misses_success(history: MetricHistory, options: Any) -> Evidence | None:
    values = history.latest.get("reward_success_correlation", [])[-2 * UPDATES :]
    if history.patience and len(values) >= BATCHES:
        mean, error = fmean(values), (_variance(values) / len(values)) ** 0.5
        if unpaid(mean, error):
            return Evidence(
                f"Episodes that succeed are not paid for it: reward and success correlate by {mean:.2f} in groups."
            )
    both = _pays_for_less(history, options)
    if both is None:
        return None
    success, reward = both
    return Evidence(
        f"The reward rises, from {reward.first:.3g} to {reward.now:.3g}, while success falls, from {success.first:.0%} to "
        f"{success.now:.0%} (batch {success.batch})."
    )


def unpaid(correlation: float, error: float, errors: float = UNPAID_ERRORS) -> bool:
    """Return True if reward and success correlate by clearly less than ``UNPAID``.

    Args:
        correlation: The estimate.
        error: Its standard error, on the scale of the inverse hyperbolic tangent (Fisher), which hardly differs near 0.
        errors: Number of errors by which it must lie below.
    """
    return tanh(atanh(max(-0.999, min(0.999, correlation))) + errors * error) < UNPAID


def _bonus_rules(history: MetricHistory, options: Any) -> bool:
    """Return True if the entropy rose, and its bonus or a temperature explains it."""
    entropy, spread = history.shift("entropy"), history.start("reward_std")
    if entropy is None or not entropy.rose or entropy.now < 1.25 * entropy.first:
        return False
    bonus = options.entropy_coef * (entropy.now - entropy.first)
    return options.temperature > 1 or options.use_adaptive_entropy or bonus >= RULES * (spread or inf)


def _policy_destroyed(history: MetricHistory, options: Any) -> Evidence | None:
    fall = _fall(history, options)
    if fall is None or _paid_as_before(history) or _bonus_rules(history, options):
        return None
    if fall[1].now > DESTROYED * fall[1].first or fall[1].first <= 0:
        return None
    signs = []
    cut, first = history.mean("answers_cut"), history.start("answers_cut")
    if cut is not None and first is not None and cut - first >= CUT_MORE:
        signs.append(f"cut answers rose from {first:.0%} to {cut:.0%}")
    known, knew = history.mean("prompt_information", 1), history.start("prompt_information")
    if known is not None and knew is not None and knew > UNREAD and known <= FORGOTTEN * knew:
        signs.append(f"prompt_information fell from {knew:.2g} to {max(known, 0):.2g}")
    moved = history.mean("policy_change", 1)
    if moved is not None and moved >= MOVED:
        signs.append(f"the log-probabilities of the same answers moved by {moved:.2g} nats a token")
    if not signs:
        return None
    return Evidence(f"Updates have destroyed the policy: {_fallen(*fall)}, {', '.join(signs)}.")


def _fallen(name: str, shift: Shift) -> str:
    text = "{:.0%}" if name == "success" else "{:.3g}"
    first, now = text.format(shift.first), text.format(shift.now)
    return f"{name} fell from {first} at the start to {now} by batch {shift.batch}"


def _worse_than_start(history: MetricHistory, options: Any) -> Evidence | None:
    fall = _fall(history, options)
    if fall is None or _paid_as_before(history):
        return None
    return Evidence(f"The policy is worse than at the start: {_fallen(*fall)}.")


def _entropy_runaway(history: MetricHistory, options: Any) -> Evidence | None:
    entropy = history.shift("entropy")
    if entropy is None or not _bonus_rules(history, options):
        return None
    cut = history.shift("answers_cut")
    longer = cut is not None and cut.rose and cut.now - cut.first >= 0.1
    if history.rose("reward") or not (longer or _fall(history, options)):
        return None
    answers = f", and {cut.now:.0%} of the answers are cut, first {cut.first:.0%}" if longer and cut is not None else ""
    return Evidence(f"The entropy rose from {entropy.first:.2g} to {entropy.now:.2g} nats a token{answers}.")


def _kl_pins_policy(history: MetricHistory, options: Any) -> Evidence | None:
    values = history.last("kl", 3 * BATCHES)
    if not values or options.beta < PINNED:
        return None
    now = fmean(values[-UPDATES:])
    # Where only small steps keep the policy near, the divergence grows: with the square of their number, if they agree.
    if now > NEAR or now > 1.5 * fmean(history.earliest["kl"][:BATCHES]) or history.rose("reward"):
        return None
    return Evidence(
        f"The penalty holds the policy at its reference: with beta={options.beta:g} the divergence stays at {now:.1g} nats "
        "a token, and the reward has not risen."
    )


def _one_task(history: MetricHistory, options: Any) -> Evidence | None:
    tasks = history.last("distinct_tasks", UPDATES)
    if not history.patience or not tasks or max(tasks) > 1:
        return None
    return Evidence(f"All groups of each of the latest {len(tasks)} batches played the same row of train_dataset.")


def _rewards_missing(history: MetricHistory, options: Any) -> Evidence | None:
    share = history.mean("rewards/nan", 1)
    if not share:
        return None
    return Evidence(
        f"A reward function returned NaN for {share:.0%} of the episodes, which then get nothing from it.", share
    )


def _judge_failing(history: MetricHistory, options: Any) -> Evidence | None:
    share = history.mean("judges/failed", 1)
    if not share or share < FAILING:
        return None
    return Evidence(f"A judge gave no valid answer for {share:.0%} of the episodes, which are not trained on.", share)


def _judge_overoptimized(history: MetricHistory, options: Any) -> Evidence | None:
    trained, held_out = (history.means(f"judges/{name}", UPDATES) for name in ("score", "held_out"))
    if not history.patience or len(trained) != len(held_out) or not held_out:
        return None
    best = max(range(len(held_out)), key=held_out.__getitem__)
    # Half the mean square of successive differences is the variance of one value, and a fall has two means of values.
    noise = [(b - a) ** 2 / UPDATES for a, b in pairwise(history.latest["judges/held_out"])]
    fall = held_out[best] - held_out[-1]
    if fall <= PARTED * fmean(noise) ** 0.5 or fall <= 0 or trained[-1] < trained[best]:
        return None
    return Evidence(
        f"The judges part: the score of the one that is held out fell from {held_out[best]:.3g} to {held_out[-1]:.3g}, and "
        f"that of the one that is trained on went from {trained[best]:.3g} to {trained[-1]:.3g}."
    )


def _environment_failing(history: MetricHistory, options: Any) -> Evidence | None:
    share = sum(history.mean(f"stop/environment_{kind}", 1) or 0.0 for kind in ("error", "timeout"))
    if not share:
        return None
    error = history.notes.get("environment_failing", "see the rollout log").rstrip(".")
    return Evidence(f"The environment failed in {share:.0%} of the episodes, which are not trained on: {error}.", share)


def _environment_ignores_seed(history: MetricHistory, options: Any) -> Evidence | None:
    share, text = history.mean("groups_with_different_starts", 1), history.notes.get("environment_ignores_seed")
    if text is None and not share:
        return None
    return Evidence(text or f"{share:.0%} of the groups did not start from the same observation.", share or 1.0)


# ------------------------------------------------------------------------------------------------------------ table


@dataclass(frozen=True)
class HealthCheck:
    """A health check, a row of the table: when its finding is made, and what to change."""

    name: str
    """Also the name of its section in ``docs/troubleshooting.md``."""
    reads: tuple[str, ...]
    """The metrics that its condition looks at."""
    shown_by: Callable[[MetricHistory, Any], Evidence | None]
    """Returns the evidence, or None if there is none."""
    advice: str
    """One or two sentences that name the options to change."""
    unless: tuple[str, ...] = ()
    """Findings that explain this one: with any of them it is not reported. Of two that explain each other, the one that was
    made first remains, or the first of the table."""
    silences_from: float = inf
    """Severity from which no other finding is reported, and this one again every ``REPEATED`` steps."""


_EPISODES = ("success", "advantage/zero", "return/mean", "return/std", "return/min", "return/max")
_MISSING = ("stop/environment_error", "stop/environment_timeout", "success/unreported", "rewards/nan")
_EVALUATED = "solved in training alone, by "
_LIMITS = ("truncated", "max_turns", "context_full", "rewrite_full")
COURSES = ("success", "reward", "entropy", "answers_cut", "turns/mean")
"""Metrics that are compared with their first value, batch by batch."""
_COURSE = ("success", "success_sem", "reward", "reward_std")
_ENTROPY = ("entropy", *_COURSE)
_DESTROYED = ("policy_destroyed", "giving_up_pays")
_CAUSES = (
    *_DESTROYED, "reward_misses_success", "entropy_runaway", "worse_than_start", "sampler_too_old", "teacher_left",
)  # fmt: skip
"""Findings that explain a task without success."""

HEALTH_CHECKS: tuple[HealthCheck, ...] = (
    HealthCheck(
        "solved", ("success", "seeds_alike", *_MISSING), _solved,
        "Stop here, or go on with a harder task.", unless=("one_task", "success_doubtful"),
    ),
    HealthCheck(
        "success_doubtful", (*_EPISODES, *_MISSING), _success_doubtful,
        'Check info["success"], which may be True of lost episodes. If it is right, the task was solved before training, '
        "which then improves only what else the reward pays for.",
    ),
    HealthCheck(
        "too_hard", (*_EPISODES, "entropy"), _too_hard,
        "Read an episode: the prompt must tell the form in which an answer is understood. Then choose an easier level, "
        "reward partial progress, or train on demonstrations first (--model of an SFT stage). A larger num_generations "
        "finds rarer successes.",
        unless=("entropy_collapse", *_CAUSES),
    ),
    HealthCheck(
        "policy_destroyed", ("answers_cut", "prompt_information", "policy_change", *_ENTROPY), _policy_destroyed,
        "Lower learning_rate to a tenth, and begin again from the start or a checkpoint before the fall.",
        unless=("giving_up_pays", "reward_misses_success", "sampler_too_old"),
    ),
    HealthCheck(
        "giving_up_pays", ("turns/mean", *_COURSE), _giving_up_pays,
        "Pay more for success than an episode saves by ending early: lower the cost of a turn, or raise the final reward.",
    ),
    HealthCheck(
        "reward_misses_success", ("reward_success_correlation", *_COURSE), _reward_misses_success,
        "Check the sign of the reward and what it is paid for: training maximizes the reward, not success.",
        unless=_DESTROYED,
    ),
    HealthCheck(
        "worse_than_start", _COURSE, _worse_than_start,
        "Lower learning_rate, to a tenth first, and go on from a checkpoint before the fall. If it falls again, read the "
        "latest episodes: an environment that changed, or a reward for something else, looks the same.",
        unless=(*_DESTROYED, "reward_misses_success", "entropy_runaway", "sampler_too_old", "teacher_left"),
    ),
    HealthCheck(
        "entropy_runaway", ("answers_cut", *_ENTROPY), _entropy_runaway,
        "Lower entropy_coef or temperature, then learning_rate: the bonus for variety outweighs the reward.",
        unless=("giving_up_pays", "reward_misses_success"),
    ),
    HealthCheck(
        "kl_pins_policy", ("kl", *_COURSE), _kl_pins_policy,
        "Lower beta (0.1 and less): the policy cannot leave its reference.",
        unless=("solved", "zero_advantage_groups", "too_hard", *_CAUSES),
    ),
    HealthCheck(
        "one_task", ("distinct_tasks",), _one_task,
        "Let reset derive the task from its seed or row, give train_dataset more rows, or check task_column and "
        "task_sampling: what is learned holds for this task alone.",
    ),
    HealthCheck(
        "rewards_missing", ("rewards/nan",), _rewards_missing,
        "Mend the reward function: check divisions and logarithms. None says that a function does not score an episode.",
    ),
    HealthCheck(
        "judge_failing", ("judges/failed",), _judge_failing,
        "Read the first warning, or failed in the judgements of an episode: the endpoint, its key, its limits, or a rubric "
        "and a model that do not give the form that is asked for.",
    ),
    HealthCheck(
        "judge_overoptimized", ("judges/score", "judges/held_out"), _judge_overoptimized,
        "Go on from a checkpoint before the two parted, and read what the judge rewards now. Mend the rubric, set beta, or "
        "lower learning_rate.",
        unless=_DESTROYED,
    ),
    HealthCheck(
        "starts_lost", ("groups_without_success", "success", *_MISSING), _starts_lost,
        "The groups of these starts have no gradient. Set replay_successes where starts are rows, so that one success is "
        "enough, or begin again with entropy_coef (0.01 to 0.05) or a lower learning_rate.",
        unless=("solved", "too_hard", "entropy_collapse", *_CAUSES),
    ),
    HealthCheck(
        "zero_advantage_groups", (*_EPISODES, "entropy"), _zero_advantage,
        "Check that the reward depends on the answer, and mix tasks that the policy solves sometimes. A larger "
        "num_generations or temperature makes the members of a group differ.",
        unless=("solved", "entropy_collapse", "starts_lost", *_CAUSES),
    ),
    HealthCheck(
        "reward_discounted", ("turns/mean", "return/early_std", "return/std"), _reward_discounted,
        "Raise gamma to 1: only the last answer learns from the reward.",
        unless=("solved",),
    ),
    HealthCheck(
        "too_easy", _EPISODES, _too_easy,
        "Choose a harder level or harder rows: most episodes teach nothing.",
        unless=("solved",),
    ),
    HealthCheck(
        "entropy_collapse", ("entropy", "return/mean", "success"), _entropy_collapse,
        "Set entropy_coef (0.01 to 0.05), lower learning_rate, or raise temperature or epsilon_high.",
        unless=("solved", "too_hard", "zero_advantage_groups", *_CAUSES),
    ),
    HealthCheck(
        "template_collapse", ("prompt_information", "entropy"), _template_collapse,
        "Lower entropy_coef, set beta, and raise num_generations or leave out groups whose rewards hardly differ: noise "
        "drives the updates.",
        unless=("solved", *_CAUSES),
    ),
    HealthCheck(
        "prompts_unread", ("prompt_information", "success", "reward", "observations_empty"), _prompts_unread,
        "Read prompts in the rollout log: a chat template or history may leave out what an answer needs. If all is there, "
        "train on demonstrations first.",
        unless=("solved", *_CAUSES),
    ),
    HealthCheck(
        "cut_answers", ("answers_cut", "return/answers_cut", "return/mean", "return/std"), _cut_answers,
        "Raise max_new_tokens, ask for shorter answers in system_prompt, or set stop_strings.",
        unless=("solved", *_CAUSES),
    ),
    HealthCheck(
        "context_full", ("stop/context_full",), _context_full,
        "Raise max_model_length, or lower max_new_tokens, max_turns or max_observation_length.",
    ),
    HealthCheck(
        "rewrite_full", ("stop/rewrite_full",), _rewrite_full,
        "Let history return less (a lower N, a shorter instruction), or raise max_model_length.",
    ),
    HealthCheck(
        "rewritten_every_turn", ("rewrites/context", "rewrites/questions", "turns/mean"), _rewritten_every_turn,
        "Choose a history that rewrites seldom and much, such as summary:N. Leave it if each context is short by design.",
    ),
    HealthCheck(
        "episodes_cut", (*(f"stop/{name}" for name in _LIMITS), "success", "reward", "return/std"), _episodes_cut,
        "Raise max_turns or max_model_length, end episodes sooner, or set mask_truncated_completions=False.",
        unless=("solved", *_CAUSES),
    ),
    HealthCheck(
        "ratio_clipped", ("clip_ratio/region_mean", "cispo_clip_ratio", "success", "reward"), _ratio_clipped,
        "Lower learning_rate or num_iterations, make batches smaller in steps (steps_per_generation), or raise epsilon and "
        "epsilon_high.",
        unless=_DESTROYED,
    ),
    HealthCheck(
        "sampler_too_old", ("drift/kl", "drift/effective_sample_size", "reward"), _sampler_too_old,
        "Lower batches_ahead, then learning_rate: the policy moves too far while its batches wait. Without a weight, set "
        "drift_correction.",
        unless=("solved", "policy_destroyed", "reward_misses_success", "entropy_runaway"),
    ),
    HealthCheck(
        "sampler_mismatch", ("sampling/sampling_logp_difference/mean",), _sampler_mismatch,
        "Remove the cause, set vllm_importance_sampling_correction=True, or raise max_logprob_gap if the mismatch is "
        "expected.",
    ),
    HealthCheck(
        "kl_runaway", ("kl",), _kl_runaway,
        "Raise beta or lower learning_rate; sync_ref_model moves the reference along.",
        unless=_DESTROYED,
    ),
    HealthCheck(
        "teacher_left", ("teacher/kl", *_COURSE), _teacher_left,
        "Lower teacher_coef, or let it fall to 0 (teacher_steps); teacher_turn_decay below 1 leaves late turns to the "
        "reward.",
        unless=_DESTROYED,
    ),
    HealthCheck(
        "expert_alone", ("demonstrations/alone", "demonstrations/log_prob", "success"), _expert_alone,
        "Raise learning_rate or demonstration_coef; demonstration_loss='weighted' hardly moves what the policy finds "
        "unlikely. If the policy could never say the expert's answers, train on them first (--model of an SFT stage).",
        unless=_DESTROYED,
    ),
    HealthCheck(
        "value_not_learning", ("value/error", "value/spread"), _value_not_learning,
        "Raise critic_learning_rate or vf_coef, give the critic a head start with critic_warmup_steps, or lower "
        "learning_rate.",
        unless=("solved", *_DESTROYED),
    ),
    HealthCheck(
        "no_weight_change", ("policy_change", *_EPISODES), _no_weight_change,
        "If grad_norm is 0, the answers do not depend on the trained weights: check which parameters require gradients. If "
        "the logged learning_rate is still far below yours, shorten warmup_steps. If it is 1e-5 and more for an adapter "
        "(1e-6 for all weights), check that an optimizer of your own holds the model's parameters, and that the adapter is "
        "on layers that answers depend on; otherwise raise it. Train weights in float32 if they are bfloat16.",
        unless=("solved", "zero_advantage_groups", "too_hard", "episodes_cut", "kl_pins_policy"),
    ),
    HealthCheck(
        "environment_failing", ("stop/environment_error", "stop/environment_timeout"), _environment_failing,
        "Mend the environment; agile-trainers check plays it without a model. Raise environment_timeout if it is slow.",
        silences_from=FAILING,
    ),
    HealthCheck(
        "environment_ignores_seed", ("groups_with_different_starts",), _environment_ignores_seed,
        "A group's returns are compared as if only the answers differed: derive all randomness of reset from its seed.",
    ),
)  # fmt: skip
"""Every health check, in the order in which findings of the same step are reported."""

BY_NAME = {check.name: check for check in HEALTH_CHECKS}
METRICS = frozenset(name for check in HEALTH_CHECKS for name in check.reads)
"""The metrics that the conditions read."""


def findings(
    history: MetricHistory, options: Any, step: int, lately: Collection[str] = ()
) -> dict[str, tuple[Finding, float]]:
    """Apply all health checks.

    Args:
        history: The run's metrics.
        options: The run's configuration, a ``MultiTurnConfig``.
        step: Optimizer steps before.
        lately: Findings that were made not long ago, and still explain others.

    Returns:
        What holds now, by name, with its severity.
    """
    held: dict[str, tuple[Finding, float]] = {}
    unsure = set[str]()
    for check in HEALTH_CHECKS:
        evidence = check.shown_by(history, options)
        if evidence is not None:
            advice = evidence.advice or check.advice
            held[check.name] = Finding(check.name, step, evidence.text, advice), evidence.size
            unsure |= set() if evidence.certain else {check.name}
    loud = {name for name, (_, size) in held.items() if history.patience and size >= BY_NAME[name].silences_from}
    return {
        name: found
        for name, found in held.items()
        if name in (loud or held)
        and name not in unsure
        and not any(_explains(cause, name, held, lately) for cause in BY_NAME[name].unless)
    }


def _explains(cause: str, name: str, held: Collection[str], lately: Collection[str]) -> bool:
    if cause in held and cause not in lately and name in BY_NAME[cause].unless:
        return [*BY_NAME].index(cause) < [*BY_NAME].index(name)
    return cause in held or cause in lately


def findings_before(
    metrics: Mapping[str, float], options: Any, notes: Mapping[str, str] | None = None
) -> list[Finding]:
    """Name what episodes that were played before training show, with the names and advice of a run.

    Args:
        metrics: The metrics of one batch of episodes.
        options: The run's configuration.
        notes: Evidence that is established elsewhere, by the name of its finding.
    """
    history = MetricHistory(patience=False, notes=dict(notes or {}))
    history.add(metrics)
    return [finding for finding, _ in findings(history, options, 0).values()]


# -------------------------------------------------------------------------------------------------------- a run's course


class Diagnosis:
    """Applies the health checks to a run: takes its metrics step by step, and returns each finding once.

    A finding is returned again if it was absent for ``QUIET`` steps, or its severity has doubled.

    Args:
        options: The run's configuration, a ``MultiTurnConfig``.
    """

    def __init__(self, options: Any) -> None:
        groups = options.generation_batch_size // options.num_generations
        self._options, self._history = options, MetricHistory(groups=groups)
        self._said: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._told_at: dict[str, int] = {}

    def note(self, name: str, text: str | None) -> None:
        """Take evidence that is established elsewhere.

        Args:
            name: The finding's.
            text: One sentence; None withdraws it.
        """
        if text is None:
            self._history.notes.pop(name, None)
        else:
            self._history.notes[name] = text

    def evaluated(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """Take an evaluation, which says whether what looks solved in training is.

        Args:
            prefix: Of its metrics.
            metrics: Its metrics, with ``success`` of ``episodes``; one with failed episodes says nothing.
        """
        success = metrics.get(f"{prefix}_success")
        if success is None or metrics.get(f"{prefix}_failed"):
            return
        number = round(metrics[f"{prefix}_episodes"])
        solved = self._history.shown(SOLVED, NEARLY_SOLVED) is not None
        lost = solved and wilson_interval(round(success * number), number).high < NEARLY_SOLVED
        text = f"{prefix}_success is {success:.0%} of {number} episodes"
        self.note(f"{_EVALUATED}{prefix}", text if lost else None)

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Take the metrics of an optimizer step and return the findings to report.

        Args:
            step: Optimizer steps taken.
            metrics: New values; those of a rollout come with one step of each generation batch only.
        """
        self._history.add(metrics)
        told, lately = [], [name for name, seen in self._seen.items() if step - seen <= QUIET]
        for name, (finding, size) in findings(self._history, self._options, step, lately).items():
            said, seen, told_at = self._said.get(name), self._seen.get(name, step), self._told_at.get(name, step)
            holds = size >= BY_NAME[name].silences_from and step - told_at >= REPEATED
            if said is None or size >= 2 * said or step - seen > QUIET or holds:
                told.append(finding)
                self._said[name], self._told_at[name] = size, step
            self._seen[name] = step
        return told

    def state(self) -> dict[str, Any]:
        """Return the state as JSON can hold it, for a checkpoint."""
        said = {"said": dict(self._said), "seen": dict(self._seen), "told_at": dict(self._told_at)}
        return {"history": asdict(self._history), **said}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the :meth:`state` of a checkpoint."""
        courses = {name: Course.of(course) for name, course in state["history"].get("courses", {}).items()}
        self._history = MetricHistory(**{**state["history"], "groups": self._history.groups, "courses": courses})
        self._said, self._seen, self._told_at = (dict(state.get(name, {})) for name in ("said", "seen", "told_at"))
