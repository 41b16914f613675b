"""Single-turn environments of question and answer rows."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agile_trainers.envs.base import Observation, ResetResult, StepResult, read_options
from agile_trainers.envs.questions.answers import exact_match
from agile_trainers.envs.questions.rows import TRAIN, Row, Rows, check_column, load_rows
from agile_trainers.envs.scripted_policies import ScriptedPolicy
from agile_trainers.types import Message, text_of

if TYPE_CHECKING:
    from datasets import Dataset

RewardFunction = Callable[[str, Any, str], float]
"""``reward_fn(completion, answer, question)``."""
_WRONG_TRIES = 100


class ReasoningEnvironment:
    """Asks the question of a row and rewards the answer, in one turn.

    The seed chooses a row of the environment's split, ``seed % number of rows``. The dataset row of a trainer may choose
    another one, see :meth:`reset`.

    Args:
        data: Any source of :func:`~agile_trainers.envs.questions.rows.load_rows`, or its result, which many instances can
            share for a large data set. None: all rows come from the trainer's data sets.
        question: Name of the question column. It holds texts, or lists of messages as TRL's ``prompt``.
        answer: Name of the answer column, or a function from a row to the answer.
        template: The user message, or several messages, with ``{question}`` and other columns in braces. Write other
            braces twice: ``\\boxed{{}}``. A column of messages takes the place of the message that is nothing else.
            Default: the question.
        system_prompt: System message at the beginning.
        few_shot: Worked examples before the question: rows, or a number of rows from the beginning of ``train``. They
            never include the question itself.
        demonstration: An ideal answer, for examples and demonstrations: a template with ``{answer}``, or a function of the
            row.
        reward_fn: ``reward_fn(completion, answer, question)``. Default:
            :func:`~agile_trainers.envs.questions.answers.exact_match`.
        success_reward: Smallest reward that counts as a success.
        split: Split to play.
        test_fraction: Share of the questions in ``test``, if the data has only one split.

    Raises:
        ValueError: If a column, split or template is wrong, or there is no row.
    """

    name = "ReasoningEnvironment"

    def __init__(
        self,
        data: Any = None,
        *,
        question: str = "question",
        answer: str | Callable[[Row], Any] = "answer",
        template: str | Sequence[Message] | None = None,
        system_prompt: str | None = None,
        few_shot: int | Sequence[Row] = 0,
        demonstration: str | Callable[[Row], str] = "{answer}",
        reward_fn: RewardFunction = exact_match,
        success_reward: float = 1.0,
        split: str = TRAIN,
        test_fraction: float = 0.1,
    ):
        self.question, self.answer, self.demonstration = question, answer, demonstration
        self.template = _messages(f"{{{question}}}" if template is None else template, system_prompt)
        self.reward_fn, self.success_reward, self.split = reward_fn, success_reward, split
        self.rows: Rows | None = None
        if data is not None:
            is_rows = hasattr(data, "row") and hasattr(data, "count")
            self.rows = data if is_rows else load_rows(data, question=question, test_fraction=test_fraction)
            self._check_columns(self.rows.columns)
            self._check_split(split)
        self.shots = (
            [self.row(TRAIN, index) for index in range(few_shot)] if isinstance(few_shot, int) else list(few_shot)
        )
        for shot in self.shots:
            self._check_columns(shot)

    # -------------------------------------------------------------------------------------------------- an episode

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Return a question.

        Args:
            seed: Chooses the row in the split. None draws one.
            options: A row with a question column is used itself. Otherwise ``{"split": ..., "row": ...}``, both optional,
                replaces the environment's split and the seed; see :meth:`dataset`.

        Returns:
            The messages (as text, if it is a single user message), and ``{"split", "row"}`` in the info.

        Raises:
            ValueError: If an option, a split or a row's number is wrong, or a column is missing.
        """
        given = {name: value for name, value in (options or {}).items() if value is not None}
        info: dict[str, Any] = {}
        if self.question in given:
            self._check_columns(given, empty=set(options or {}) - set(given))
            self._current = given
        else:
            if options and self.rows is None:
                raise ValueError(self._no_question(options))
            given = read_options(given, ("split", "row"), self.name)
            drawn = random.SystemRandom().randrange(2**31) if seed is None else seed
            info = {"split": given.get("split", self.split), "row": self._index(drawn, **given)}
            self._current = self.row(**info)
        return _as_observation(self.prompt(self._current)), info

    def step(self, action: str) -> StepResult:
        """Reward the answer; the episode is over. The info has ``success`` and the right ``answer``."""
        reward, answer = self.score(action, self._current), self.answer_to(self._current)
        success = reward >= self.success_reward - 1e-9
        verdict = "correct" if success else f"wrong, the answer is {answer}"
        return verdict, reward, True, False, {"success": success, "answer": answer}

    def prompt(self, row: Row) -> list[Message]:
        """Return the messages of a row's question, with the examples.

        Raises:
            ValueError: If the row brings a second system message, or messages for the middle of a text.
        """
        system = [message for message in self.template if message["role"] == "system"]
        asked = [message for message in self.template if message["role"] != "system"]
        shots = [shot for shot in self.shots if shot[self.question] != row[self.question]]
        messages, question = _filled(system, row), _filled(asked, row)
        own = [message for message in question if message["role"] == "system"]
        if own and messages:
            raise ValueError(
                f"The column {self.question!r} has a system message and there is one of system_prompt or the template as "
                "well: keep one of the two (system_prompt=None)."
            )
        messages += own
        for shot in shots:
            example = [message for message in _filled(asked, shot) if message["role"] != "system"]
            messages += [*example, {"role": "assistant", "content": self.ideal(shot)}]
        return messages + [message for message in question if message["role"] != "system"]

    def score(self, completion: str, row: Row) -> float:
        """Return the reward of a completion."""
        asked = row[self.question]
        if _are_messages(asked):
            asked = next((text_of(message) for message in reversed(asked) if message["role"] == "user"), "")
        return float(self.reward_fn(completion, self.answer_to(row), str(asked)))

    # --------------------------------------------------------------------------------------------------------- rows

    def row(self, split: str, row: int) -> Row:
        """Return one row of a split.

        Raises:
            ValueError: If there is no such split or row.
        """
        self._check_split(split)
        assert self.rows is not None
        count = self.rows.count(split)
        if not isinstance(row, int) or row < 0 or (count is not None and row >= count):
            last = "" if count is None else f" to {count - 1}"
            raise ValueError(f"{self.name} has no row {row!r} in the split {split!r}: its rows are numbered 0{last}.")
        return self.rows.row(split, row)

    def dataset(self, split: str, count: int | None = None) -> Dataset:
        """Make a data set of references to the rows of a split, for a trainer's ``train_dataset`` or ``eval_dataset``.

        Args:
            split: The split.
            count: Number of rows. Default: all; generated rows, which are infinite, need a number.

        Returns:
            Rows ``{"split": ..., "row": ...}``, the options of :meth:`reset`.

        Raises:
            ValueError: If there is no such split, it has fewer rows, or it is infinite and ``count`` is not set.
        """
        from datasets import Dataset

        self._check_split(split)
        assert self.rows is not None
        available = self.rows.count(split)
        count = available if count is None else count
        if count is None or (available is not None and count > available):
            there = "rows without end" if available is None else f"{available} rows"
            raise ValueError(f"The split {split!r} of {self.name} has {there}: pass a count of them, got {count}.")
        return Dataset.from_dict({"split": [split] * count, "row": list(range(count))})

    def demonstrations(self, count: int, seed: int = 0) -> list[dict[str, list[Message]]]:
        """Make rows ``{"messages": [...]}`` of questions and ideal answers for TRL's ``SFTTrainer``.

        Args:
            count: Number of rows.
            seed: First seed; the rows are those of the seeds ``seed`` to ``seed + count - 1``.
        """
        rows = [self._of_seed(index) for index in range(seed, seed + count)]
        return [{"messages": [*self.prompt(row), _said(self.ideal(row))]} for row in rows]

    def preferences(self, count: int, seed: int = 0) -> list[dict[str, list[Message]]]:
        """Make rows ``{"prompt", "chosen", "rejected"}`` with an ideal and a worse answer for TRL's ``DPOTrainer``."""
        pairs = []
        for index in range(seed, seed + count):
            row = self._of_seed(index)
            wrong = self.wrong(row, random.Random(f"wrong {index}"))
            pairs.append({"prompt": self.prompt(row), "chosen": [_said(self.ideal(row))], "rejected": [_said(wrong)]})
        return pairs

    def answer_to(self, row: Row) -> Any:
        """Return the answer of a row."""
        return self.answer(row) if callable(self.answer) else row[self.answer]

    def ideal(self, row: Row) -> str:
        """Return an ideal completion for a row."""
        if callable(self.demonstration):
            return self.demonstration(row)
        return _COLUMNS.vformat(self.demonstration, (), {**row, "answer": self.answer_to(row)})

    def scripted_policies(self) -> dict[str, ScriptedPolicy]:
        """Return a policy of the ideal answer and, if there are rows, one of a random question's ideal answer."""
        policies: dict[str, ScriptedPolicy] = {"expert": lambda messages, rng: self.ideal(self._current)}
        if self.rows is not None:
            policies["random"] = lambda messages, rng: self.ideal(self._of_seed(rng.randrange(2**31)))
        return policies

    def wrong(self, row: Row, rng: random.Random) -> str:
        """Return a completion with a lower reward than the ideal one: the ideal answer to another question.

        Raises:
            ValueError: If none is found.
        """
        best = self.score(self.ideal(row), row)
        for _ in range(_WRONG_TRIES):
            other = self.ideal(self._of_seed(rng.randrange(2**31)))
            if self.score(other, row) < best:
                return other
        raise ValueError(
            f"No answer to another question earns less than {best} for {row[self.question]!r}: override wrong()."
        )

    # ------------------------------------------------------------------------------------------------------- checks

    def _of_seed(self, seed: int) -> Row:
        return self.row(self.split, self._index(seed))

    def _index(self, seed: int, split: str | None = None, row: int | None = None) -> int:
        if row is not None:
            return row
        self._check_split(split or self.split)
        assert self.rows is not None
        count = self.rows.count(split or self.split)
        return seed if count is None else seed % count

    def _no_question(self, row: Row) -> str:
        if self.question in row:
            return (
                f"The column {self.question!r} of the question is empty in this row: {row!r:.200}. Leave the row out."
            )
        return (
            f"The row has no column {self.question!r}; its columns are: {', '.join(map(str, row))}. Name those of the "
            f"question and of the answer: {self.name}(question='...', answer='...')."
        )

    def _check_split(self, split: str) -> None:
        if self.rows is None:
            raise ValueError(
                f"{self.name} was made without data, and reset got no row with a column {self.question!r}. Pass "
                "`data`, or a train_dataset (and eval_dataset) of such rows to the trainer."
            )
        if split not in self.rows.splits:
            raise ValueError(f"There is no split {split!r}; the splits are: {', '.join(self.rows.splits)}.")
        if self.rows.count(split) == 0:
            raise ValueError(f"The split {split!r} has no rows. Choose another split or change test_fraction.")

    def _check_columns(self, columns: Mapping[str, Any] | Sequence[str], empty: Collection[str] = ()) -> None:
        check_column(self.question, columns, "question")
        if not callable(self.answer):
            check_column(self.answer, columns, "answer", empty)
        for name in (name for message in self.template for name in _fields(message["content"])):
            if name in {"answer", self.answer}:
                raise ValueError(f"The template contains {{{name}}}, which would show the model the answer. Remove it.")
            check_column(name, columns, "template", empty)
        if not callable(self.demonstration):
            for name in _fields(self.demonstration):
                check_column(name, [*columns, "answer"], "demonstration", empty)


def _messages(template: str | Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Convert the template to messages, with the system prompt first; its braces are literal."""
    messages = [{"role": "user", "content": template}] if isinstance(template, str) else [dict(m) for m in template]
    if system_prompt is not None:
        if any(message["role"] == "system" for message in messages):
            raise ValueError("The template has a system message and system_prompt is set as well: keep one of the two.")
        messages.insert(0, {"role": "system", "content": system_prompt.replace("{", "{{").replace("}", "}}")})
    return messages


class _Columns(string.Formatter):
    """Fills in columns by their whole names, which may have a dot."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs[field_name], field_name


_COLUMNS = _Columns()


def _fields(template: str) -> list[str]:
    """Return the names of the columns in a template."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    if "" in names:
        raise ValueError(f"The template {template!r} contains an empty {{}}. Write a literal brace twice: {{{{}}}}.")
    return names


def _are_messages(value: Any) -> bool:
    """Return whether a row's value is a conversation, as TRL's ``prompt``."""
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def _filled(messages: Sequence[Message], row: Row) -> list[Message]:
    filled: list[Message] = []
    for message in messages:
        text = message["content"]
        column = next((name for name in _fields(text) if _are_messages(row.get(name))), None)
        if column is None:
            filled.append({**message, "content": _COLUMNS.vformat(text, (), row)})
        elif text == f"{{{column}}}":
            # A data set gives every message the keys of all.
            filled += [
                {"content": ""} | {key: value for key, value in one.items() if value is not None} for one in row[column]
            ]
        else:
            raise ValueError(
                f"The column {column!r} holds messages, which cannot stand inside the template's text {text!r}. Make "
                f"{{{column}}} a message of its own, or the column a text."
            )
    return filled


def _said(completion: str) -> Message:
    return {"role": "assistant", "content": completion}


def _as_observation(messages: list[Message]) -> Observation:
    alone = [message["role"] for message in messages] == ["user"] and isinstance(messages[0]["content"], str)
    return messages[0]["content"] if alone else messages
