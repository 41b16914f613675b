"""The judge: a reward function that asks about episodes while others are still being played."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers.utils import logging

from agile_trainers.imports import exits_reported
from agile_trainers.judges.asking import UNFIT, Asker, JudgeEndpoint, JudgeFunction, Reply
from agile_trainers.judges.questions import (
    EPISODE,
    GROUP,
    TURN,
    UNITS,
    JudgeQuestion,
    addressed,
    ask_of_episode,
    ask_of_group,
    canonical,
    orders_of,
    read_judgement,
    scores_of_ranking,
    transcript,
)
from agile_trainers.types import Message, Trajectory

logger = logging.get_logger(__name__)

ANSWERS = "judged-{rank}.sqlite"
"""File in ``output_dir`` with the answers of all judges to a process of a run."""
FAILED, SCORE, HELD_OUT = "judges/failed", "judges/score", "judges/held_out"
"""Metrics that health checks read: share of episodes without an answer, mean score of judges that train, of the others."""


@dataclass
class _Asked:
    """Questions about an episode, or about the members of a group."""

    episodes: list[int]
    """Indices among the episodes of the call."""
    questions: list[JudgeQuestion]
    """One, or one for each order in which the members of a group are shown."""
    shown: list[list[int]]
    """The conversations of a group in the order in which each question shows them."""
    conversation: list[int]
    """The conversation of each member of a group. Members with equal ones share it."""


class Judge:
    """Rewards episodes by what a judge says of them. Pass it as a reward function: ``reward_funcs=Judge(...)``.

    An episode is judged as soon as it ends, while others are being played. An answer that does not fit its schema, or none
    after all tries, is no reward: the episode is left out of training and of the statistics of its group.

    Args:
        judge: Base address of an endpoint that speaks OpenAI's protocol, as ``https://api.openai.com/v1``; or a function,
            also an asynchronous one, from the messages of a question to the answer: JSON text or a dictionary.
        rubric: What is good, as text; or a function from an episode to it, for rubrics that depend on the row
            (``episode.options``). A group has the rubric of one of its members.
        per: ``"episode"``: one score, which is added to the reward of the last turn. ``"turn"``: a score for each turn,
            added to that turn's reward. ``"group"``: one question ranks the members of a group.
        model: Name of the endpoint's model.
        scale: Lowest and highest score. Ranks are spread over it evenly.
        key_env: Name of the environment variable with the endpoint's key. None sends none.
        options: Further fields of a request to the endpoint, as ``{"max_tokens": 500}``; None as a value leaves a field out.
        prices: Price of a million tokens of questions and of answers, for the metric ``cost``.
        concurrency: Questions at once, of this process.
        timeout: Seconds of a try.
        attempts: Tries of a question, with growing random waits between them.
        cache: File with the answers, which several runs may share. Default: one in ``output_dir``.
        orders: 2 asks about each group twice, with the members in the opposite order, and takes the mean.
        held_out: True only logs the scores: nothing is trained on them.
        name: Name in metrics and records. Default: ``judge``, or ``held_out_judge``.

    Raises:
        ValueError: For values that do not fit.
    """

    def __init__(
        self,
        judge: str | Callable[[list[Message]], Any],
        rubric: str | Callable[[Trajectory], str],
        *,
        per: str = EPISODE,
        model: str | None = None,
        scale: tuple[float, float] = (0.0, 1.0),
        key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
        prices: tuple[float, float] = (0.0, 0.0),
        concurrency: int = 32,
        timeout: float = 60.0,
        attempts: int = 5,
        cache: str | Path | None = None,
        orders: int = 1,
        held_out: bool = False,
        name: str | None = None,
    ) -> None:
        if not callable(rubric) and (not isinstance(rubric, str) or not rubric.strip()):
            raise ValueError(
                f"rubric must say what is good, as text or as a function of an episode, got {rubric!r:.100}."
            )
        if per not in UNITS:
            raise ValueError(f"per must be one of {', '.join(map(repr, UNITS))}, got {per!r}.")
        if len(scale) != 2 or not all(map(isfinite, scale)) or not scale[0] < scale[1]:
            raise ValueError(f"scale must be the lowest and the highest score, as (0.0, 1.0), got {scale!r}.")
        if len(prices) != 2 or not all(isfinite(price) and price >= 0 for price in prices):
            raise ValueError(
                f"prices must be two prices of a million tokens, of questions and of answers, got {prices!r}."
            )
        if orders not in (1, 2) or (orders == 2 and per != GROUP):
            raise ValueError(f"orders must be 1, or 2 with per='group', got {orders!r} with per={per!r}.")
        for limit, value in {"concurrency": concurrency, "timeout": timeout, "attempts": attempts}.items():
            if not value >= (0 if limit == "timeout" else 1) or not value:
                raise ValueError(f"{limit} must be positive, got {value!r}.")
        if isinstance(judge, str):
            source: JudgeEndpoint | JudgeFunction = JudgeEndpoint(judge, model, key_env, options or {})
        elif callable(judge):
            given = {"model": model, "key_env": key_env, "options": options}
            if useless := next((name for name, value in given.items() if value), None):
                raise ValueError(f"{useless} has no effect on a judge that is a function. Leave it unset.")
            source = JudgeFunction(judge)
        else:
            raise ValueError(f"judge must be an address or a function, got a {type(judge).__name__}.")
        self._rubric, self.per, self._scale, self.orders = rubric, per, scale, orders
        self._prices, self.held_out, self._cache = prices, held_out, cache
        self.__name__ = name or ("held_out_judge" if held_out else "judge")
        self._asker = Asker(source, concurrency, timeout, attempts)
        if cache is not None:
            self._asker.stored.path = Path(cache)
        self._members, self._processes = 0, 1
        self._groups: dict[tuple[str | None, int], list[Trajectory]] = {}
        """Episodes of groups whose other members are being played, by environment and seed."""
        self._warned = False

    def __repr__(self) -> str:
        return f"Judge({self.__name__}, per={self.per!r})"

    def begin_run(self, members: int, folder: Path, run_id: Callable[[], str], rank: int, processes: int) -> None:
        """Take what a run knows; trainers call it.

        Args:
            members: Episodes of a group.
            folder: ``output_dir``.
            run_id: Returns the id of the run.
            rank: Index of this process.
            processes: Number of processes.
        """
        self._members, self._processes, self._asker.run_id = members, processes, run_id
        if self._cache is None:
            self._asker.stored.path = folder / ANSWERS.format(rank=rank)

    def close(self) -> None:
        """Give up what is being asked. The judge can be used again."""
        self._asker.close()
        self._groups.clear()

    # ------------------------------------------------------------------------------------------------------- asking

    def begin(self, episode: Trajectory) -> None:
        """Ask about an episode that has ended, and about its group when it is the last. From the thread that plays."""
        episodes = [episode]
        if self.per == GROUP:
            key = episode.environment_name, episode.seed
            episodes = self._groups.setdefault(key, [])
            episodes.append(episode)
            if len(episodes) < self._members:
                return
            del self._groups[key]
        for asked in self._questions(episodes):
            self._send(asked, episodes)

    def _questions(self, episodes: Sequence[Trajectory]) -> list[_Asked]:
        """Write the questions about the episodes that can be judged."""
        places = [place for place, one in enumerate(episodes) if one.turns and not one.stop_reason.failed]
        if self.per != GROUP:
            return [
                _Asked([i], [ask_of_episode(episodes[i], self._text(episodes[i]), self.per, self._scale)], [[]], [0])
                for i in places
            ]
        groups: dict[tuple[str | None, int], list[int]] = {}
        for place in places:
            groups.setdefault((episodes[place].environment_name, episodes[place].seed), []).append(place)
        return [self._question_of_group(members, episodes) for members in groups.values()]

    def _question_of_group(self, members: list[int], episodes: Sequence[Trajectory]) -> _Asked:
        transcripts = {place: transcript(episodes[place]) for place in members}
        different = {canonical(one): one for one in transcripts.values()}
        contents = sorted(different)
        conversation = [contents.index(canonical(transcripts[place])) for place in members]
        shown = orders_of(contents, self.orders) if len(contents) > 1 else []
        # Not of the first, which may be any: members come in the order in which they end.
        rubric = self._text(episodes[members[conversation.index(0)]])
        questions = [ask_of_group([different[contents[i]] for i in order], rubric, self._scale) for order in shown]
        return _Asked(members, questions, shown, conversation)

    def _text(self, episode: Trajectory) -> str:
        if isinstance(self._rubric, str):
            return self._rubric
        with exits_reported("The function `rubric` of a judge"):
            return self._rubric(episode)

    def _send(self, asked: _Asked, episodes: Sequence[Trajectory]) -> list[tuple[str, int]]:
        seed = episodes[asked.episodes[0]].seed
        return [self._asker.ask(question, seed) for question in asked.questions]

    # ------------------------------------------------------------------------------------------------------- rewards

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Return the score of each episode, the sum of its turns' for ``per="turn"``; None without one.

        What was said of an episode is in the ``judgements`` of its turns.
        """
        started = time.perf_counter()
        for episode in trajectories:
            self._groups.pop((episode.environment_name, episode.seed), None)
        asked = self._questions(trajectories)
        keys = [self._send(one, trajectories) for one in asked]
        replies = self._asker.replies([key for some in keys for key in some])
        waited = time.perf_counter() - started
        scores: list[float | None] = [None] * len(trajectories)
        left, problems, bad = iter(replies), list[str](), 0
        for one in asked:
            own = [next(left) for _ in one.questions]
            answers = [None if r.answer is None else read_judgement(r.answer, q) for r, q in zip(own, one.questions)]
            problem = next((reply.failed for reply in own if reply.failed is not None), None)
            if problem is not None:
                problems += [problem] * len(one.episodes)
                bad += len(one.episodes) * problem.startswith(UNFIT)
            self._note(one, answers, problem, trajectories, scores)
        if problems and not self._warned:
            self._warned = True
            logger.warning(
                f"{self.__name__} gave no score to {len(problems)} of {len(trajectories)} episodes, which are not trained "
                f"on. The first: {problems[0]}"
            )
        said = [self._said(episode) for episode in trajectories]
        if log_metric is not None:
            calling = sum(any("addressed" in one for one in of_episode) for of_episode in said)
            counts = {"failed": len(problems), "bad": bad, "addressed": calling}
            self._log(log_metric, replies, {name: n / len(trajectories) for name, n in counts.items()}, waited)
            known = [one["score"] for of_episode in said for one in of_episode if "score" in one]
            if known:
                log_metric(HELD_OUT if self.held_out else SCORE, fmean(known))
        if log_extra is not None:
            log_extra(self.__name__, [canonical(of_episode[-1]) if of_episode else None for of_episode in said])
        return scores

    def _note(
        self,
        asked: _Asked,
        answers: Sequence[dict[str, Any] | None],
        problem: str | None,
        episodes: Sequence[Trajectory],
        scores: list[float | None],
    ) -> None:
        """Write what was said into the turns, and the scores into their list."""
        reason = " / ".join(answer["reason"] for answer in answers if answer is not None)
        values = None if problem else self._values(asked, [answer for answer in answers if answer is not None])
        for number, place in enumerate(asked.episodes):
            turns = episodes[place].turns
            judged = turns if self.per == TURN else turns[-1:]
            own = None if values is None else values[asked.conversation[number]]
            for k, turn in enumerate(judged):
                said: dict[str, Any] = {"failed": problem} if problem else {}
                if own is not None:
                    said["score"] = own[k]
                if reason:
                    said["reason"] = reason
                if quotes := addressed([turn] if self.per == TURN else turns):
                    said["addressed"] = quotes
                if self.held_out:
                    said["held_out"] = True
                turn.judgements[self.__name__] = said
            scores[place] = None if own is None else sum(own)

    def _values(self, asked: _Asked, answers: Sequence[dict[str, Any]]) -> list[list[float]] | None:
        """Return the scores of each conversation; None of an episode that is alone in its group."""
        if self.per == TURN:
            return [[float(score) for score in answers[0]["scores"]]]
        if self.per == EPISODE:
            return [[float(answers[0]["score"])]]
        if len(asked.episodes) < 2:
            return None
        sizes = [asked.conversation.count(i) for i in range(max(asked.conversation) + 1)]
        if not answers:  # all are equal
            return [scores_of_ranking([[1]], sizes, self._scale)]
        totals = [0.0] * len(sizes)
        for order, answer in zip(asked.shown, answers, strict=True):
            ranked = scores_of_ranking(answer["ranking"], [sizes[i] for i in order], self._scale)
            for i, score in zip(order, ranked, strict=True):
                totals[i] += score / len(answers)
        return [[total] for total in totals]

    def _said(self, episode: Trajectory) -> list[dict[str, Any]]:
        return [turn.judgements[self.__name__] for turn in episode.turns if self.__name__ in turn.judgements]

    def _log(
        self,
        log_metric: Callable[[str, float], None],
        replies: Sequence[Reply],
        shares: dict[str, float],
        waited: float,
    ) -> None:
        """Log shares of episodes, sums over all processes, and seconds."""
        tokens = [sum(reply.tokens[i] for reply in replies) * self._processes for i in (0, 1)]
        fresh = [reply.seconds for reply in replies if not reply.stored]
        values = {
            **shares,
            "tokens_asked": tokens[0],
            "tokens_answered": tokens[1],
            "cost": self.cost((tokens[0], tokens[1])),
            "questions": len(fresh) * self._processes,
            "waited": waited,
            **({"seconds": fmean(fresh)} if fresh else {}),
        }
        for name, value in values.items():
            log_metric(f"judges/{self.__name__}/{name}", float(value))
        if not self.held_out:
            log_metric(FAILED, shares["failed"])

    def cost(self, tokens: tuple[int, int]) -> float:
        """Return the price of tokens of questions and of answers."""
        return sum(price * count for price, count in zip(self._prices, tokens)) / 1e6
