"""Experts of the environment of most trainer tests."""

from __future__ import annotations

import random

from agile_trainers.types import Message


def hums(messages: list[Message], rng: random.Random) -> str:
    """The best that Chatter may hear: the number of its letter is 4 modulo 5."""
    return "h"


def mumbles(messages: list[Message], rng: random.Random) -> str:
    """The worst."""
    return "i"


def rambles(messages: list[Message], rng: random.Random) -> str:
    """Too long for the tests' limit."""
    return "h" * 5000


def drones(messages: list[Message], rng: random.Random) -> str:
    """Long, short or bad by chance."""
    return rng.choice(["h", "ch", "dch", "i"])


def forgets_the_generator(messages: list[Message]) -> str:
    """A scripted policy gets two arguments."""
    return "h"


def says_nothing(messages: list[Message], rng: random.Random) -> None:
    """An answer is a text."""
