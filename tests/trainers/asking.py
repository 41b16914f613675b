"""An agent with a client of the standard library, which blocks and knows nothing of this library."""

from __future__ import annotations

import itertools
import json
import os
import urllib.request
from typing import Any

from agile_trainers.envs.agent import Agent, Model, Task

PROGRAM = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
"""A program that asks for one answer to its argument."""


def ask(model: Model, messages: list[dict[str, Any]], **body: Any) -> str:
    """Ask for an answer."""
    request = urllib.request.Request(
        f"{model.base_url}/chat/completions",
        json.dumps({"model": model.name, "messages": messages, **body}).encode(),
        {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json", "User-Agent": "asking/1"},
    )
    with urllib.request.urlopen(request) as answered:
        return str(json.load(answered)["choices"][0]["message"]["content"])


def talks(model: Model, task: Task, turns: int = 2) -> dict[str, Any]:
    """Say the task, then ``more``; reward answers of an even length."""
    messages = [{"role": "user", "content": f"start {task.seed % 7} {(task.row or {}).get('question', '')}"}]
    for _ in range(turns):
        answer = ask(model, messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    right = float(len(answer) % 2 == 0)
    return {"reward": right, "success": right > 0, "info": {"process": os.getpid()}}


def reads_rows(model: Model, task: Task) -> float:
    """Ask the row's question."""
    assert task.row is not None
    return float(len(ask(model, [{"role": "user", "content": task.row["question"]}])) % 2)


agent = Agent(talks)
"""An agent as ids name it."""


_clock = itertools.count()


def looks_at_the_clock(model: Model, task: Task) -> float:
    """Tell the time before each of three answers, and ask for a summary on the side; the first time is a retry."""
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": f"start {task.seed % 7}"}]
    for _ in range(3):
        messages[0]["content"] = f"It is {10 + next(_clock) % 90} o'clock."
        answer = ask(model, messages, temperature=0.3)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    ask(model, [{"role": "user", "content": f"sum up {answer}"}])
    return float(len(answer) % 2)
