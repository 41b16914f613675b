"""Carry a word further than the context reaches: only the model's own notes bring it there. See README.md."""

from __future__ import annotations

import random
from typing import Any

from agile_trainers.envs.base import ResetResult
from agile_trainers.envs.context import Context, Question
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.envs.task import INVALID, WON, GameTask, TrainingRows, draw
from agile_trainers.types import Message

WORDS = ("fox", "owl", "bee", "elk", "cat", "hen", "ram", "yak")
LEVELS = {"easy": (2,), "normal": (3,), "hard": (6,)}
"""Level to the number of answers. Before each one except the first, the model writes a note and forgets everything else."""
_TASK, _ON, _THERE = (
    "You carry a word to the king :",
    "You walk on over hills and through woods",
    "The king asks you for it",
)
_ASK, _NOTE = "Write a note", "Your note :"


class Courier(GameTask):
    """A game of carrying a word to somebody who asks for it, while the conversation is forgotten on the way.

    Once the conversation has more than ``memory`` tokens, the model is asked for a note. The note and the last observation
    are all that it sees from then on. Reward: 1 for the right word at the end, -0.2 for anything that is no word of the
    game. Earlier answers and notes are not rewarded.

    Args:
        level: ``easy`` (asked after one note), ``normal`` (two) or ``hard`` (five).
        max_turns: Number of answers, at least 2; notes are not counted. Default: the level's.
        memory: Tokens that the model keeps. With more than a game has, nothing is forgotten.

    Raises:
        ValueError: If the level is unknown or a number is too small.
    """

    name, levels, options = "agile:courier", LEVELS, ("word",)

    def __init__(self, level: str = "normal", max_turns: int | None = None, memory: int = 32):
        super().__init__(level, max_turns)
        for name, value, least in (("max_turns", self.max_turns, 2), ("memory", memory, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        self.memory = memory
        self.return_range = INVALID, WON

    def start(self, seed: int | None, options: dict[str, Any]) -> ResetResult:
        """Choose the word.

        Args:
            seed: The word is number ``seed % 8``. None draws one.
            options: ``{"word": str}`` sets the word instead of the seed.

        Raises:
            ValueError: If it is no word of the game.
        """
        self.word = options.get("word", WORDS[draw(seed, len(WORDS))])
        if self.word not in WORDS:
            raise ValueError(f"word must be one of {', '.join(WORDS)}, got {self.word!r}.")
        self._seen = f"{_TASK} {self.word}"
        return self._seen, {"word": self.word}

    def answer(self, text: str) -> tuple[str, float, dict[str, Any]]:
        """Walk on, or take the word that the king asks for."""
        left = self.max_turns - self.turns
        if left:
            self._seen = _ON if left > 1 else _THERE
            return self._seen, 0.0, {"success": False}
        success = text == self.word
        return "over", WON if success else 0.0 if text in WORDS else INVALID, {"success": success}

    def context(self, messages: Context) -> list[Message]:
        """Ask for a note once there are too many tokens, and replace everything by the note and the last observation."""
        if messages[-1]["role"] == "assistant":
            return [{"role": "user", "content": f"{_NOTE}\n{messages[-1]['content']}\n\n{self._seen}"}]
        if messages.tokens <= self.memory:
            return messages
        *before, last = messages
        return Question([*before, {**last, "content": f"{last['content']}\n\n{_ASK}"}])


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Say any word."""
    return rng.choice(WORDS)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Say, and note down, the word that it sees."""
    seen = [word for message in messages if message["role"] == "user" for word in message["content"].split()]
    return next((word for word in seen if word in WORDS), random_policy(messages, rng))


def careless_policy(messages: list[Message], rng: random.Random) -> str:
    """Trust its notes, but not bother with the first one: it is any word. Wins one game in eight."""
    told = messages[0]["content"].startswith(_TASK)
    return (random_policy if told else expert_policy)(messages, rng)


def demonstrations(
    count: int, seed: int = 0, policy: ScriptedPolicy = careless_policy, level: str = "easy"
) -> TrainingRows:
    """Make conversations as training data for TRL's ``SFTTrainer``, each as the model sees it.

    Args:
        count: Number of games.
        seed: Seed of the first game; the last one has ``seed + count - 1``.
        policy: The policy. The default reads notes, but writes a useless first one.
        level: The game's.

    Returns:
        Rows ``{"messages": [...]}``: of each game what is seen before a note, with the note, and after the last.
    """
    return [{"messages": path} for one in range(seed, seed + count) for path in _paths(policy, one, level)]


def preferences(count: int, seed: int = 0) -> TrainingRows:
    """Make pairs of a useful and a useless first note for TRL's ``DPOTrainer``.

    Args:
        count: Number of pairs.
        seed: Seed of the first game.

    Returns:
        ``count`` rows ``{"prompt", "chosen", "rejected"}`` of messages.
    """
    rows = []
    for one in range(seed, seed + count):
        *prompt, chosen = _paths(expert_policy, one, "easy")[0]
        other = random.Random(one).choice([word for word in WORDS if word != chosen["content"]])
        rows.append({"prompt": prompt, "chosen": [chosen], "rejected": [{**chosen, "content": other}]})
    return rows


def _paths(policy: ScriptedPolicy, seed: int, level: str) -> list[list[Message]]:
    """Play a game in which every observation exceeds the memory, and return what the policy sees and says."""
    environment, rng = Courier(level), random.Random(f"player {seed}")
    observation, over = environment.reset(seed)[0], False
    seen: list[Message] = [{"role": "user", "content": observation}]
    paths: list[list[Message]] = []
    while True:
        seen = [*seen, {"role": "assistant", "content": policy(seen, rng)}]
        observation, _, over, _, _ = environment.step(seen[-1]["content"])
        if over:
            return [*paths, seen]
        asked = environment.context(
            Context([*seen, {"role": "user", "content": observation}], tokens=environment.memory + 1)
        )
        paths.append([*asked, {"role": "assistant", "content": policy(asked, rng)}])
        seen = environment.context(Context(paths[-1]))
