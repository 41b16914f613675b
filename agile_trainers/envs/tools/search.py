"""Searches: an index in memory, and an environment that asks and answers with any search."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from agile_trainers.envs.base import ResetResult, StepResult
from agile_trainers.envs.questions.answers import normalized, read_answer, read_number, tagged
from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import Row

Search = Callable[[str], list[str]]
"""Function from a query to passages, best first."""


class BM25Index:
    """Ranks passages by BM25 (Robertson and Zaragoza 2009, with Lucene's non-negative idf).

    Words are sequences of letters and digits, in lower case. Ties are broken by position. All instances of an
    environment can share one index, which is read-only.

    Args:
        passages: The passages to search.
        top_k: Maximum number of results; passages without a word of the query are never returned.
        k1: Saturation of repeated words. Default 1.5.
        b: Penalty on long passages, in [0, 1]. Default 0.75.

    Raises:
        ValueError: If there is no passage.
    """

    def __init__(self, passages: Sequence[str], top_k: int = 3, k1: float = 1.5, b: float = 0.75):
        if not passages:
            raise ValueError("BM25Index needs at least one passage.")
        self.passages, self.top_k = list(passages), top_k
        counts = [Counter(_words(passage)) for passage in self.passages]
        mean = sum(count.total() for count in counts) / len(counts) or 1.0
        self._weights: dict[str, dict[int, float]] = {}
        """Word to passage index to weight, for the passages that contain the word."""
        for index, count in enumerate(counts):
            norm = k1 * (1 - b + b * count.total() / mean)
            for word, n in count.items():
                self._weights.setdefault(word, {})[index] = n * (k1 + 1) / (n + norm)
        for held in self._weights.values():
            idf = math.log(1 + (len(counts) - len(held) + 0.5) / (len(held) + 0.5))
            held.update({index: idf * weight for index, weight in held.items()})

    def __call__(self, query: str) -> list[str]:
        """Return the best passages, at most ``top_k``."""
        scores = self.scores(query)
        return [
            self.passages[index] for index in sorted(scores, key=lambda index: (-scores[index], index))[: self.top_k]
        ]

    def scores(self, query: str) -> dict[int, float]:
        """Return the scores of all passages that share a word with the query, by position."""
        scores: dict[int, float] = {}
        for word in _words(query):
            for index, weight in self._weights.get(word, {}).items():
                scores[index] = scores.get(index, 0.0) + weight
        return scores


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


INSTRUCTIONS = (
    "Answer the question. To look something up, write <search>what to look for</search> and nothing after it; what is "
    "found comes back in <information> tags. You may search {searches}. When you know the answer, write "
    "<answer>the answer</answer>, as short as possible."
)
_TAGS = ("search", "answer")
_PUNCTUATION = set(string.punctuation) - set("+#")  # C, C++ and C# are different answers


class SearchEnvironment(ReasoningEnvironment):
    """Asks the question of a row, answers ``<search>`` queries, and rewards the ``<answer>``.

    An answer of the model contains exactly one of the two tags, after any amount of thinking. For other answers, the
    observation describes the expected form, and the turn is lost. With ``stop_strings=["</search>", "</answer>"]`` the
    model cannot continue and invent search results.

    The reward of the ``<answer>`` is that of ``reward_fn``, plus ``format_reward`` if all answers had the right format.
    ``info["success"]`` depends on ``reward_fn`` alone; ``info`` counts ``searches`` and ``invalid`` answers. An episode that
    reaches its limit without an ``<answer>`` is truncated.

    Args:
        search: Finds passages: a :class:`~agile_trainers.envs.tools.search.BM25Index`, or any function from a query to
            texts, best first. Shared by all instances. An episode in which it raises is not trained on.
        data: Rows of question and answer, as for :class:`~agile_trainers.envs.questions.environment.ReasoningEnvironment`.
            An answer may be a list of accepted ones.
        max_searches: Searches per episode; further ones are rejected.
        max_turns: Answers per episode. Default: ``max_searches`` plus two.
        format_reward: See above. Default 0.1.
        max_passage_length: Characters of each passage that the model sees.
        options: Further arguments of ``ReasoningEnvironment``. ``reward_fn`` defaults to :func:`answer_match`,
            ``system_prompt`` to ``INSTRUCTIONS``.

    Raises:
        ValueError: If an option is wrong.
    """

    name = "SearchEnvironment"

    def __init__(
        self,
        search: Search,
        data: Any = None,
        *,
        max_searches: int = 3,
        max_turns: int | None = None,
        format_reward: float = 0.1,
        max_passage_length: int = 2000,
        **options: Any,
    ):
        self.search, self.max_searches, self.format_reward = search, max_searches, format_reward
        self.max_turns = max_searches + 2 if max_turns is None else max_turns
        self.max_passage_length = max_passage_length
        searches = "once" if max_searches == 1 else f"up to {max_searches} times"
        defaults = {"reward_fn": answer_match, "system_prompt": INSTRUCTIONS.format(searches=searches)}
        super().__init__(data, **{**defaults, **options})

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Return a question; see :meth:`ReasoningEnvironment.reset`."""
        self.turns = self.searches = self.invalid = 0
        return super().reset(seed, options)

    def step(self, action: str) -> StepResult:
        """Run the search, or reward the answer."""
        self.turns += 1
        tags = tagged(action, *_TAGS)
        if len(tags) == 1 and tags[0][0] == "answer":
            observation, reward, _, _, info = super().step(tags[0][1].strip())
            reward += 0.0 if self.invalid else self.format_reward
            return observation, reward, True, False, {**info, **self._counts()}
        if len(tags) == 1:
            observation = self._look_up(tags[0][1].strip())
        else:
            self.invalid += 1
            observation = (
                f"Your answer holds {len(tags)} complete <search> or <answer> tags, but must hold exactly one. Write "
                "<search>what to look for</search> or <answer>the answer</answer>."
            )
        return observation, 0.0, False, self.turns >= self.max_turns, {"success": False, **self._counts()}

    def score(self, completion: str, row: Row) -> float:
        """Return the reward of an answer, without its tags."""
        tags = tagged(completion, *_TAGS)
        return super().score(tags[-1][1].strip() if tags else completion, row)

    def ideal(self, row: Row) -> str:
        """Return the right answer in its tags."""
        right = self.answer_to(row)
        return f"<answer>{right[0] if isinstance(right, (list, tuple)) else super().ideal(row)}</answer>"

    def _look_up(self, query: str) -> str:
        if self.searches == self.max_searches:
            return "You have used all your searches. Write <answer>the answer</answer>."
        self.searches += 1
        # A passage must not close its tag and open another one.
        found = [
            text[: self.max_passage_length].replace("information>", "information >") for text in self.search(query)
        ]
        listed = "\n".join(f"{number}. {passage}" for number, passage in enumerate(found, start=1))
        return f"<information>\n{listed or 'Nothing was found.'}\n</information>"

    def _counts(self) -> dict[str, Any]:
        return {"searches": self.searches, "invalid": self.invalid}


def answer_match(completion: str, answer: Any, question: str = "") -> float:
    """Return 1 if the completion is one of the right answers, else 0.

    The final answer is read as everywhere (:func:`read_answer`). Numbers are compared by value. In other answers, case,
    punctuation, articles and spacing are ignored, as in SQuAD's exact match (Rajpurkar et al. 2016), unless nothing else is
    left ("The The").

    Args:
        completion: The model's answer.
        answer: The right answer, or a list of them.
        question: Unused.
    """
    right = answer if isinstance(answer, (list, tuple)) else [answer]
    given = _comparable(read_answer(completion))
    return float(given != "" and given in {_comparable(str(text)) for text in right})


def _comparable(text: str) -> str | Fraction:
    text = normalized(text)
    number = read_number(text)
    if number is not None:
        return number
    kept = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the")) or " ".join(text.lower().split())
