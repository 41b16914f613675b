"""The forms of the JSON files of a checkpoint, of which another person may be the author.

A form is a type (``NUMBER``, ``Count`` and ``Name`` too), None, ``Any``, a tuple of alternatives, a list with the form of
its entries, a dictionary ``{str: form}`` of values by any name, or :class:`Fields`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from transformers import TrainerState

WITHHELD = re.compile(r"<(\w+), withheld(?:: ([0-9a-f]{8})-([0-9a-f]{32}))?>")
"""Text in place of a value that does not leave the machine, whatever its form: type, name of the key, digest."""
_LONGEST, _MOST = 10_000, 2**53
"""Characters of a name, and the largest count, beyond which no run wrote it."""


class Count:
    """The form of an integer from 0 on."""


class Name:
    """The form of a text that is shown."""


@dataclass(frozen=True)
class Fields:
    """The form of a dictionary with known names."""

    of: dict[str, Any]
    """Forms by name."""
    required: tuple[str, ...] = ()
    only: bool = False
    """True if there may be no other names, as they become arguments."""


@dataclass(frozen=True)
class Misfit:
    """A value that has another form."""

    where: str
    """Its place, such as ``options.max_turns``."""
    value: Any
    expected: str


NUMBER = int | float
_TABLE = {str: Any}
STAGE = Fields(
    {"source": Name, **dict.fromkeys(("commit", "algorithm", "environment"), (Name, None)), "global_step": (int, None)},
    required=("source",),
)  # fmt: skip
"""A ``parent`` in a record, without its own."""
OPTIONS = Fields({
    **dict.fromkeys(("max_turns", "max_new_tokens", "num_iterations"), Count),
    **dict.fromkeys(("environment_workers", "environment_processes", "top_k", "min_new_tokens"), Count),
    **dict.fromkeys(("max_model_length", "max_environments"), (Count, None)),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("min_p", "environment_timeout"), (NUMBER, None)),
    "history": (str, {str: (str, None)}, None), "on_rewrite": str,
    "training_chat_template": bool, "do_sample": bool, "system_prompt": (str, None),
    "chat_template_kwargs": (_TABLE, None), "environment_limits": ({str: {str: Count}}, None), "stop_strings": ([str], None),
})  # fmt: skip
"""Options in a record that an evaluation of the policy takes from it, and the one that copied checkpoints go by."""
RECORD_FORM = Fields({
    "algorithm": Name, "environment": (Name, None), "environment_arguments": _TABLE, "base_model": (_TABLE, None),
    "lora": (_TABLE, None), "critic": bool, "global_step": Count, "run_id": Name, "versions": {str: str}, "options": OPTIONS,
})  # fmt: skip
_CALLBACK = Fields({"args": _TABLE, "attributes": _TABLE}, required=("args", "attributes"), only=True)
STATE_FORM = Fields(
    {
        **{one.name: Any for one in fields(TrainerState)},
        **dict.fromkeys(("global_step", "max_steps"), Count),
        **dict.fromkeys(("epoch", "logging_steps", "num_train_epochs", "total_flos", "num_input_tokens_seen"), NUMBER),
        **dict.fromkeys(("eval_steps", "save_steps", "best_metric"), (NUMBER, None)),
        **dict.fromkeys(("train_batch_size", "best_global_step"), (Count, None)),
        **dict.fromkeys(("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), bool),
        **dict.fromkeys(("best_model_checkpoint", "trial_name"), (str, None)),
        "trial_params": (_TABLE, None), "log_history": [Fields({"step": Count}, required=("step",))],
        "stateful_callbacks": ({str: (_CALLBACK, [_CALLBACK])}, None),
    },
    required=("epoch", "global_step"), only=True,
)  # fmt: skip
"""``trainer_state.json``."""
_SHIFT = dict.fromkeys(("first", "now", "p", "share"), NUMBER) | {"batch": Count}
_LEVEL = {"first": NUMBER, "waiting": NUMBER, "shift": Fields(_SHIFT, required=tuple(_SHIFT), only=True)}
_COURSE = {
    **dict.fromkeys(("start", "last", "total", "squares"), NUMBER), "count": Count, "errors": [NUMBER],
    "levels": [Fields(_LEVEL, required=tuple(_LEVEL), only=True)],
}  # fmt: skip
_HISTORY = Fields(
    {"patience": bool, "groups": Count, "latest": {str: [NUMBER]}, "earliest": {str: [NUMBER]},
     "counts": {str: Count}, "notes": {str: str}, "courses": {str: Fields(_COURSE, required=tuple(_COURSE), only=True)}},
    only=True,
)  # fmt: skip
_ANSWER = Fields({"prompt_ids": [Count], "answer_ids": [Count]}, required=("prompt_ids", "answer_ids"), only=True)
_HEALTH = Fields(
    {
        "diagnosis": Fields(
            {"history": _HISTORY, "said": {str: NUMBER}, "seen": {str: Count}, "told_at": {str: Count}},
            required=("history",),
        ),
        "measurements": Fields({"landmarks": [_ANSWER], "first": [[NUMBER]]}, required=("landmarks", "first")),
    },
    required=("diagnosis", "measurements"),
)
POSITION_FORM = Fields(
    {
        "generation": Count, "position": Count, "pass_tokens": (Count, None), "rows": (Count, None),
        "geometry": Fields({"processes": Count}, required=("processes",)),
        "watch": (Fields({}, only=True), _HEALTH),
        "skipped_steps": Fields({"skipped": Count, "in_a_row": Count}, only=True),
        "packing": Fields({"checked": bool, "refused": (str, None)}, only=True),
        "tasks": Fields({"counts": {str: [NUMBER]}, "discarded": Count}),
    },
    required=("generation", "position", "geometry"),
)  # fmt: skip
"""``rollout/position.json``."""


def misfits(value: Any, form: Any, where: str = "") -> Iterator[Misfit]:
    """Yield the parts of a JSON value that have another form, the first ones first.

    Args:
        value: The value. A text in place of a withheld one has any form.
        form: Its form.
        where: Its place.
    """
    if form is Any or (isinstance(value, str) and WITHHELD.fullmatch(value)):
        return
    if isinstance(form, tuple):
        found = [next(misfits(value, one, where), None) for one in form]
        if None not in found:
            inside = [one for one in found if one is not None and one.where != where]
            yield from inside[:1] or [Misfit(where, value, " or ".join(one.expected for one in found if one))]
    elif isinstance(form, (dict, Fields)) and isinstance(value, dict):
        forms = form.of if isinstance(form, Fields) else dict.fromkeys(value, next(iter(form.values())))
        if isinstance(form, Fields):
            for name in form.required:
                if name not in value:
                    yield Misfit(where, value, f"an object with {name}")
        for name, one in value.items():
            if name in forms:
                yield from misfits(one, forms[name], f"{where}.{name}" if where else name)
            elif isinstance(form, Fields) and form.only:
                yield Misfit(where, value, f"an object without {name!a:.80}")
    elif isinstance(form, list) and isinstance(value, list):
        for index, one in enumerate(value):
            yield from misfits(one, form[0], f"{where}[{index}]")
    elif not _is(value, form):
        yield Misfit(where, value, _named(form))


def _is(value: Any, form: Any) -> bool:
    if form is None:
        return value is None
    if form is Count:
        return type(value) is int and 0 <= value <= _MOST
    if form is Name:
        return isinstance(value, str) and len(value) <= _LONGEST
    if isinstance(form, (dict, list, Fields)):
        return False
    return isinstance(value, form) and isinstance(value, bool) == (form is bool)


def _named(form: Any) -> str:
    if isinstance(form, (dict, Fields)):
        return "an object"
    if isinstance(form, list):
        return "a list"
    known = {None: "null", Count: "an integer from 0 on", Name: "a short text", str: "a text", bool: "true or false"}
    return known.get(form, "a number")
