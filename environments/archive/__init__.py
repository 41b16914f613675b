"""Look up in a register what an agent is asked, and remember it by a note alone. See README.md."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from typing import Any

from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.envs.base import read_options
from agile_trainers.envs.task import check_level, draw
from agile_trainers.types import Message

PEOPLE = ("Ada", "Bob", "Eve", "Kim", "Leo", "Max", "Sue", "Tom")
ANIMALS = ("fox", "owl", "bee", "elk", "cat", "hen", "ram", "yak")
LEVELS = {"easy": (2,), "normal": (4,), "hard": (8,)}
"""Level to the number of people in the register."""
LOOK_UPS = 2
"""Number of times that the agent looks something up before it has to answer."""
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up which animal a person keeps.",
        "parameters": {"type": "object", "properties": {"person": {"type": "string"}}, "required": ["person"]},
    },
}
_ASK, _NOTE = "Write a note", "Your note :"


def solve(model: Model, task: Task, level: str = "easy") -> dict[str, Any]:
    """Find out which animal somebody keeps, with a tool and a note.

    After each look-up the model writes a note. The question and the note are all that it sees from then on. Reward: 1 for
    the right animal, 0 for anything else.

    Args:
        model: The endpoint.
        task: The seed decides about the register and who is asked about. A row may set ``person`` and ``animal``, which that
            person keeps.
        level: ``easy`` (2 people in the register), ``normal`` (4) or ``hard`` (8).

    Returns:
        ``reward``, ``success`` and ``info``: ``person``, ``animal``, ``looked_up`` and ``notes``.

    Raises:
        ValueError: If the level is unknown, or the person is not in the register.
    """
    register, person = draw_register(task, level)
    question = f"Which animal does {person} keep ?"
    info: dict[str, Any] = {"person": person, "animal": register[person], "looked_up": [], "notes": []}
    messages = [{"role": "user", "content": question}]
    answer = ask(model, messages)
    for _ in range(LOOK_UPS):
        calls = answer.get("tool_calls")
        if not calls:
            break
        messages.append(answer)
        for call in calls:
            looked_up, result = _look_up(call["function"], register)
            info["looked_up"].append(looked_up)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        note = ask(model, [*messages, {"role": "user", "content": _ASK}])["content"] or ""
        info["notes"].append(note)
        messages = [{"role": "user", "content": f"{question}\n\n{_NOTE}\n{note}"}]
        answer = ask(model, messages)
    success = (answer["content"] or "").strip() == register[person]
    return {"reward": float(success), "success": success, "info": info}


agent = Agent(solve)


def draw_register(task: Task, level: str) -> tuple[dict[str, str], str]:
    """Return who keeps which animal, and who is asked about. Every animal is drawn by itself, with equal odds."""
    check_level(level, LEVELS)
    people = PEOPLE[: LEVELS[level][0]]
    rng = random.Random(f"register {task.seed}")
    register = {one: rng.choice(ANIMALS) for one in people}
    options = read_options(task.row, ("person", "animal"), "agile:archive")
    person = options.get("person", people[draw(task.seed, len(people))])
    animal: str = options.get("animal", register.get(person, ""))
    for name, value, known in (("person", person, people), ("animal", animal, ANIMALS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
    return {**register, person: animal}, person


def ask(model: Model, messages: list[Message]) -> Message:
    """Ask for an answer through Chat Completions, as any client does."""
    body = {"model": model.name, "messages": messages, "tools": [LOOK_UP]}
    request = urllib.request.Request(
        f"{model.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message: Message = json.load(response)["choices"][0]["message"]
    return message


def _look_up(function: dict[str, str], register: dict[str, str]) -> tuple[str | None, str]:
    person = json.loads(function["arguments"]).get("person") if function["name"] == "look_up" else None
    if person not in register:
        return None, "not in the register"
    return person, register[person]


def random_policy(messages: list[Message], rng: random.Random) -> str:
    """Say any animal."""
    return rng.choice(ANIMALS)


def expert_policy(messages: list[Message], rng: random.Random) -> str:
    """Look up the person who is asked about, note down the animal, and say what the note says."""
    question, *_, last = [message["content"] for message in messages if message["role"] != "assistant"] * 2
    if last == _ASK:
        return messages[-2]["content"]
    _, noted, note = question.partition(f"{_NOTE}\n")
    return note if noted else call(re.search(r"does (\w+) keep", question)[1])  # type: ignore[index]


def careless_policy(messages: list[Message], rng: random.Random) -> str:
    """Look up Ada or Bob in every second game and the right person in the others, note down any animal, say what is noted.

    Wins one game in eight.
    """
    answer = expert_policy(messages, rng)
    if messages[-1]["content"] == _ASK:
        return random_policy(messages, rng)
    return call(rng.choice(PEOPLE[:2])) if answer.startswith("<tool_call>") and rng.random() < 0.5 else answer


def call(person: str) -> str:
    """Write a call of the tool."""
    return f'<tool_call>\n{{"name": "look_up", "arguments": {{"person": "{person}"}}}}\n</tool_call>'
