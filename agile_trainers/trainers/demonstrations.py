"""Finds an expert's episodes, and puts them into the groups of a run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from transformers.utils import logging

from agile_trainers.envs.base import EnvironmentFactory
from agile_trainers.envs.checker import describe_error
from agile_trainers.envs.scripted_policies import known_policies, play
from agile_trainers.evaluation.scripted_policies import answer_ids
from agile_trainers.imports import NotThereError, load_named
from agile_trainers.records.plain import from_json
from agile_trainers.records.reader import read_records
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.spec import Demonstration, EpisodeSpec, GivenAnswer

logger = logging.get_logger(__name__)

Start = tuple[str | None, int, str]
"""Environment, seed and row (as text) of an episode."""
_STREAM = 7
"""Key of the random stream that draws where groups start."""
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "if": {"properties": {"role": {"const": "assistant"}}},
    "then": {"properties": {"content": {"type": "string"}}},
}
_LINE = Draft202012Validator(
    {
        "type": "object",
        "required": ["messages", "rewards", "seed"],
        "properties": {
            "messages": {"type": "array", "items": _MESSAGE},
            "rewards": {"type": "array", "items": {"type": "number"}, "minItems": 1},
            "seed": {"type": "integer"},
            "row": {"type": ["object", "null"]},
            "environment": {"type": ["string", "null"]},
        },
    }
)
"""A recorded conversation."""


class Demonstrations:
    """The expert's places: the last ones of each group, or of the generation batch of an algorithm without groups.

    Scripted policies play where the group starts. Episodes that were recorded decide it: the group starts where one of them
    did.

    Args:
        args: A ``MultiTurnConfig`` with ``demonstrations``.
        engine: Plays the episodes of the run.
        factories: Environment name to what makes it.
        tokenizer: The policy's.
        rows_are_options: True if ``reset`` gets the rows of a data set.

    Raises:
        ValueError: If ``demonstrations`` names nothing that can demonstrate.
    """

    def __init__(
        self,
        args: Any,
        engine: RolloutEngine,
        factories: Mapping[str | None, EnvironmentFactory],
        tokenizer: Any,
        *,
        rows_are_options: bool,
    ) -> None:
        self._name, self._count, self._engine = args.demonstrations, args.demonstrations_per_group, engine
        self._factories, self._encode = factories, partial(answer_ids, engine=engine, tokenizer=tokenizer)
        self._members = args.generation_batch_size if args.groupless else args.num_generations
        self._groupless = args.groupless
        self._instances: dict[str | None, Any] = {}
        if agents := [engine.pool.titles[name] for name in factories if engine.pool.agent(name) is not None]:
            raise ValueError(
                f"demonstrations={self._name!r} are answers to an environment, and {agents[0]} is an agent, which may ask "
                "in any order. Leave demonstrations unset."
            )
        path = Path(self._name)
        self._recorded = self._grouped(path) if path.exists() else {}
        self._starts = list(self._recorded)
        if self._recorded and rows_are_options:
            raise ValueError(
                f"demonstrations={self._name!r} are recorded episodes, which say where groups start, and so does "
                "train_dataset. Leave that out; rows that the recorded episodes had are passed to reset."
            )
        for name in factories if not self._recorded else ():
            self._policy(name)

    def _grouped(self, path: Path) -> dict[Start, list[Demonstration]]:
        found: dict[Start, list[Demonstration]] = {}
        for start, one in (_told if path.suffix == ".jsonl" else _logged)(path, self._encode):
            if start[0] not in self._factories:
                known = ", ".join(map(repr, self._factories))
                raise ValueError(
                    f"A demonstration ({one.source}) is of the environment {start[0]!r}; the run has {known}."
                )
            found.setdefault(start, []).append(one)
        if not found:
            raise ValueError(f"demonstrations={self._name!r} has no episode that succeeded.")
        return found

    def _policy(self, name: str | None) -> Any:
        """Return the scripted policy for an environment, and the instance that it plays."""
        if name not in self._instances:
            self._instances[name] = self._factories[name]()
        environment = self._instances[name]
        if inspect.iscoroutinefunction(environment.step):
            raise ValueError(
                f"demonstrations={self._name!r} is a function that plays an instance beforehand, and the environment's step "
                "is async. Record its episodes, with `agile-trainers play --record` for example."
            )
        known = known_policies(environment)
        if self._name in known:
            return environment, known[self._name]
        if ":" in self._name:
            try:
                return environment, load_named(self._name)
            except NotThereError as error:
                raise ValueError(f"demonstrations={self._name!r} names no function: {error}.") from error
        raise ValueError(
            f"demonstrations={self._name!r} is no file or folder, no function 'module.path:name', and none of the "
            f"environment's scripted policies ({', '.join(map(repr, known)) or 'it has none'})."
        )

    def close(self) -> None:
        """Close the instances that scripted policies play."""
        while self._instances:
            self._drop(self._instances.popitem()[1])

    @staticmethod
    def _drop(environment: Any) -> None:
        try:
            getattr(environment, "close", lambda: None)()
        except Exception as error:
            logger.warning_once(
                f"{type(environment).__name__}: close() of the instance that demonstrations were played in raised "
                f"{describe_error(error)}. What it holds, such as processes or files, may be left."
            )

    def placed(self, specs: Sequence[EpisodeSpec], places: Sequence[int]) -> list[EpisodeSpec]:
        """Let the expert take its places.

        Args:
            specs: Episodes of a generation batch.
            places: Place of each in the batch of all processes.
        """
        found = []
        for spec, place in zip(specs, places, strict=True):
            member = place % self._members - (self._members - self._count)
            if self._recorded and (member >= 0 or not self._groupless):
                found.append(self._replayed(spec, member))
            else:
                found.append(self._scripted(spec, member) if member >= 0 else spec)
        return found

    def _replayed(self, spec: EpisodeSpec, member: int) -> EpisodeSpec:
        """Start where a recorded episode did, which members of a group draw alike."""
        drawn = np.random.default_rng((_STREAM, *spec.stream[:-1])).integers(len(self._starts))
        name, seed, row = start = self._starts[drawn]
        options = from_json(row) if row else None
        one = self._recorded[start][member % len(self._recorded[start])] if member >= 0 else None
        return replace(spec, environment=name, seed=seed, options=options, demonstration=one)

    def _scripted(self, spec: EpisodeSpec, member: int) -> EpisodeSpec:
        environment, policy = self._policy(spec.environment)
        turns = self._engine.limits_of(spec.environment).max_turns
        player, asking = f"{spec.seed} {member}", False

        def answer(*conversation: Any) -> str:
            nonlocal asking
            asking = True
            text = policy(*conversation)
            if not isinstance(text, str):
                raise TypeError(f"it returned {type(text).__name__}")
            asking = False
            return text

        try:
            episode = play(
                environment, answer, spec.seed, options=deepcopy(spec.options), max_turns=turns, player=player
            )
        except Exception as error:
            if not asking:
                self._drop(self._instances.pop(spec.environment))
                logger.warning_once(
                    f"demonstrations={self._name!r}: the environment failed while it played ({describe_error(error)}). The "
                    "policy plays such episodes."
                )
                return spec
            raise ValueError(
                f"demonstrations={self._name!r} failed to play the episode of seed {spec.seed}: {describe_error(error)}. "
                "A function gets the conversation and a random generator, and returns the next answer, a text."
            ) from error
        texts = [message["content"] for message in episode.messages if message["role"] == "assistant"]
        given = [GivenAnswer(self._encode(text)) for text in texts[-len(episode.rewards) :]]
        return replace(spec, demonstration=Demonstration(f"{self._name}, seed {spec.seed}", given, episode.rewards))


def _told(path: Path, encode: Callable[[str], list[int]]) -> list[tuple[Start, Demonstration]]:
    """Read a file of conversations, one JSON object a line.

    Each has ``messages``, the ``rewards`` of its last answers, ``seed``, and maybe the ``row`` that ``reset`` got and the
    ``environment`` in a run of several.

    Args:
        path: The file.
        encode: Tokenizes an answer.

    Raises:
        ValueError: For a line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines(): JSON may hold U+2028
    except UnicodeDecodeError as error:
        raise ValueError(f"demonstrations: {path.name} is no text in UTF-8: {error}.") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        source = f"{path.name}, line {number}"
        try:
            row = from_json(line)
        except ValueError as error:
            raise ValueError(f"demonstrations: {source} is no JSON: {error}.") from error
        if wrong := best_match(_LINE.iter_errors(row)):
            raise ValueError(
                f"demonstrations: {source}, {wrong.json_path}: {wrong.message[-200:]}. A line is an object with messages, "
                "rewards of its last answers and the seed that it began from, as `agile-trainers play --record` writes it."
            )
        texts = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        if len(row["rewards"]) > len(texts):
            raise ValueError(f"demonstrations: {source} has {len(texts)} answers and {len(row['rewards'])} rewards.")
        answers = [GivenAnswer(encode(text)) for text in texts[-len(row["rewards"]) :]]
        found.append((_start(row), Demonstration(source, answers, row["rewards"])))
    return found


def _logged(path: Path, encode: Callable[[str], list[int]]) -> list[tuple[Start, Demonstration]]:
    """Read the rollout log of a run or an evaluation: its episodes that succeeded.

    Of an environment that does not report success, those count that have its highest return. The probabilities of answers
    are known where the run renders the prompt to the recorded ids.

    Args:
        path: See :func:`~agile_trainers.records.reader.read_records`.
        encode: Tokenizes an answer.
    """
    episodes = [one for one in read_records(path) if one["error"] is None and one["turns"]]
    best: dict[str | None, float] = {}
    for one in episodes:
        best[one["environment"]] = max(one["return"], best.get(one["environment"], one["return"]))
    found = []
    for one in episodes:
        if one["return"] < best[one["environment"]] if one["success"] is None else not one["success"]:
            continue
        answers = []
        for turn in one["turns"]:
            answer, span = GivenAnswer(encode(turn["text"])), slice(turn["start"], turn["end"])
            if one["paths"] is None and not one["demonstration"]:
                prompt = [*one["prompt_ids"], *one["completion_ids"][: turn["start"]]]
                answer = replace(
                    answer,
                    prompt_ids=prompt,
                    sampled_ids=one["completion_ids"][span],
                    logprobs=one["sampling_logprobs"][span],
                )
            answers.append(answer)
        source = f"{path.name}, step {one['step']}, episode {one['index']}"
        found.append((_start(one), Demonstration(source, answers, [turn["reward"] for turn in one["turns"]])))
    return found


def _start(row: Mapping[str, Any]) -> Start:
    options = row.get("row")
    return row.get("environment"), int(row["seed"]), "" if options is None else json.dumps(options)
