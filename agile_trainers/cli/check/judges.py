"""Tries the judges of a run on one question each, and says what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agile_trainers.cli.check.report import Report, Run
from agile_trainers.judges.questions import GROUP
from agile_trainers.types import Trajectory

_SHOWN = 1000
"""Episodes whose price is told."""
_LABEL = f"{_SHOWN:,} episodes"


def try_judges(report: Report, run: Run, played: Sequence[Trajectory]) -> None:
    """Ask each judge about one of the episodes, or about two as a group; no answer, or a bad one, is a problem."""
    sound = [one for one in played if one.turns and not one.stop_reason.failed]
    for judge in run.judges:
        report.section(f"Judge: {judge.__name__}, one score for each {judge.per}")
        asked = [
            replace(one, seed=0, turns=[replace(turn, judgements={}) for turn in one.turns])
            for one in sound[: 2 if judge.per == GROUP else 1]
        ]
        if len(asked) < 1 + (judge.per == GROUP):
            report.warning("too few episodes had an answer to be judged.")
            continue
        metrics: dict[str, float] = {}
        try:
            scores = judge(asked, metrics.__setitem__)
        except Exception as error:  # the rubric's own
            report.problem(f"{judge.__name__} cannot be asked: {type(error).__name__}: {error}")
            continue
        finally:
            judge.close()
        said = asked[0].turns[-1].judgements.get(judge.__name__, {})
        if None in scores:
            report.problem(f"{judge.__name__} gave no score: {said.get('failed', 'the conversations are equal.')}")
            continue
        cost = {name.rpartition("/")[2]: value for name, value in metrics.items()}
        report.line(", ".join(f"{score:.3g}" for score in scores if score is not None), "score")
        report.line(str(said.get("reason", "")), "reason")
        sent, answered, seconds = (cost.get(name, 0.0) for name in ("tokens_asked", "tokens_answered", "seconds"))
        report.line(f"{sent:,.0f} tokens asked and {answered:,.0f} answered in {seconds:.1f} s", "a question")
        questions = _SHOWN / run.args.num_generations * judge.orders if judge.per == GROUP else _SHOWN
        # A question about a whole group is longer than this one about two of its members.
        times = questions * (run.args.num_generations / 2 if judge.per == GROUP else 1) / max(cost["questions"], 1)
        price = (
            f", which cost {cost['cost'] * times:,.2f} by prices" if cost["cost"] else "; set prices to know their cost"
        )
        report.line(f"about {questions:,.0f} questions and {(sent + answered) * times:,.0f} tokens{price}", _LABEL)
