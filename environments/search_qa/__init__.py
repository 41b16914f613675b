"""Questions about an invented world, with search in a small encyclopedia. See README.md for results of good play."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

from agile_trainers.envs.questions.rows import Row, TableRows
from agile_trainers.envs.task import check_level, demonstrations_of, preferences_of
from agile_trainers.envs.tools.search import BM25Index, SearchEnvironment
from agile_trainers.types import Message

LEVELS = {
    "easy": "Where was {} born?",
    "normal": "In which country was {} born?",
    "hard": "Which language is spoken in the country where {} was born?",
}
"""Level to its question about a person. The answer needs one, two or three searches."""
PEOPLE, TOWNS, COUNTRIES = 200, 60, 12
_SYLLABLES = "ba be da do fe fi ga gu ka ke la li ma mo na ne pa po ra ri sa so ta tu va ve za zu".split()  # noqa: SIM905
_JOBS = ("baker", "doctor", "farmer", "miner", "painter", "pilot", "sailor", "singer", "tailor", "teacher")
_HOPS = (
    ("{}", r"{} was born in (\w+)\."),
    ("{} town", r"{} is a town in (\w+)\."),
    ("{} speak", r"In {} people speak (\w+)\."),
)
"""Query and pattern of each step: from a person to a town, to a country, to a language."""
_TEST_FRACTION = 0.2


class SearchQA(SearchEnvironment):
    """Asks a question about a person of an invented world, with search in its encyclopedia.

    Reward: 1 for the right ``<answer>``, plus 0.1 if all answers had the right format; see
    :class:`~agile_trainers.envs.tools.search.SearchEnvironment`. A fifth of the people belongs to the split
    ``test``.

    Args:
        level: ``easy`` (one search leads to the answer), ``normal`` (two) or ``hard`` (three).
        split: ``train`` or ``test``.
        options: Further arguments of ``SearchEnvironment``. ``max_searches`` defaults to one more than needed.

    Raises:
        ValueError: If the level is unknown or an option is wrong.
    """

    name = "agile:search_qa"

    def __init__(self, level: str = "easy", split: str = "train", **options: Any):
        check_level(level, LEVELS)
        self.level = level
        defaults = {"max_searches": list(LEVELS).index(level) + 2}
        super().__init__(_index(), _rows(level), split=split, **{**defaults, **options})


class _World:
    """The facts and passages of the invented world, always the same."""

    def __init__(self) -> None:
        rng = random.Random("agile:search_qa")
        words: dict[str, None] = {}
        while len(words) < 2 * PEOPLE + TOWNS + 2 * COUNTRIES:
            words["".join(rng.choices(_SYLLABLES, k=3)).capitalize()] = None
        names = iter(words)
        self.people = [f"{next(names)} {next(names)}" for _ in range(PEOPLE)]
        self.towns = [next(names) for _ in range(TOWNS)]
        self.countries = [next(names) for _ in range(COUNTRIES)]
        self.languages = [f"{next(names)}n" for _ in range(COUNTRIES)]
        self.birthplace = {person: rng.choice(self.towns) for person in self.people}
        self.country = {town: rng.choice(self.countries) for town in self.towns}
        self.language = dict(zip(self.countries, self.languages))
        jobs = {person: rng.choice(_JOBS) for person in self.people}
        self.passages = [f"{who} was born in {self.birthplace[who]}. {who} is a {jobs[who]}." for who in self.people]
        for town, mayor in zip(self.towns, rng.sample(self.people, TOWNS)):
            self.passages.append(f"{town} is a town in {self.country[town]}. Its mayor is {mayor}.")
        for country, language in self.language.items():
            self.passages.append(f"{country} is a country. In {country} people speak {language}.")

    def answers(self, person: str) -> tuple[str, str, str]:
        """Return a person's town and country of birth, and the language there."""
        town = self.birthplace[person]
        country = self.country[town]
        return town, country, self.language[country]


@cache
def _world() -> _World:
    return _World()


@cache
def _index() -> BM25Index:
    return BM25Index(_world().passages)


@cache
def _rows(level: str) -> TableRows:
    rows: list[Row] = [
        {"question": LEVELS[level].format(person), "answer": _world().answers(person)[list(LEVELS).index(level)]}
        for person in _world().people
    ]
    return TableRows({"train": rows}, test_fraction=_TEST_FRACTION)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Search for the person, then for each result, and answer with the last one."""
    hops, name = _question(messages)
    found = "\n".join(m["content"] for m in messages if m["content"].startswith("<information>"))
    for query, pattern in _HOPS[:hops]:
        fact = re.search(pattern.format(name), found)
        if fact is None:
            return f"<search>{query.format(name)}</search>"
        name = fact[1]
    return f"<answer>{name}</answer>"


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Answer with a random town, country or language, without a search."""
    hops, _ = _question(messages)
    world = _world()
    return f"<answer>{rng.choice((world.towns, world.countries, world.languages)[hops - 1])}</answer>"


def careless_policy(messages: list[Message], rng: random.Random) -> str:
    """Play as the expert in 70% of the turns; guess otherwise."""
    return (expert_policy if rng.random() < 0.7 else random_policy)(messages, rng)


demonstrations = demonstrations_of(SearchQA, careless_policy)
"""Careless play teaches the format; reinforcement learning can still improve on it."""
preferences = preferences_of(SearchQA, expert_policy, careless_policy)
"""Pairs of a search, or its result, and a wrong guess."""


def _question(messages: list[Message]) -> tuple[int, str]:
    """Read the number of searches that a question needs, and its person."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    for hops, question in enumerate(LEVELS.values(), start=1):
        found = re.search(re.escape(question).replace(r"\{\}", "(.+)") + "$", asked[0] if asked else "")
        if found:
            return hops, found[1]
    raise ValueError(f"Expected one of the questions of {', '.join(LEVELS)}, got {asked[:1]}.")
