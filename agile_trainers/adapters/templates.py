"""Renders the chat templates of a folder once in a process with limits, before they are rendered in this one.

A template is a program. The sandbox of Jinja keeps it from files and from Python's own objects, and limits a ``range`` to
100,000 numbers, but neither nested loops nor ``'x' * 10**10``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from agile_trainers.adapters.folders import read_json
from agile_trainers.adapters.limited import why_it_fails

FILE, MORE = "chat_template.jinja", "additional_chat_templates/*.jinja"
"""Files that hold a template, besides ``tokenizer_config.json``."""
_LONGEST = 1_000_000
"""Characters of the rendering of a short conversation, beyond which a template is none. Long ones write 30,000."""
_CHILD = """
from datetime import datetime
import jinja2, jinja2.ext, jinja2.sandbox

class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()

def stop(message):
    raise jinja2.TemplateError(message)

def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

# As transformers makes it.
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
environment.filters["tojson"] = tojson
environment.globals.update(raise_exception=stop, strftime_now=lambda form: datetime.now().strftime(form))
for conversation in given["conversations"]:
    try:
        text = environment.from_string(given["template"]).render(**conversation)
    except MemoryError:
        sys.exit("it takes more than %d MB of memory" % (given["bytes"] >> 20))
    except Exception:
        continue  # an error costs nothing, and comes again where the template is used
    if len(text) > given["longest"]:
        sys.exit("it writes %d characters around a short conversation" % len(text))
"""


def check_template(template: str, where: str) -> None:
    """Reject a chat template that takes too long, too much memory, or writes too much, on short conversations.

    A template that does so in other conversations passes. Each template is tried once in a process.

    Args:
        template: The template.
        where: Its file, or the name of its tokenizer, for the error.

    Raises:
        ValueError: If 10 seconds of processor time or a gigabyte do not suffice.
    """
    if why := _why_not(template):
        raise ValueError(
            f"The chat template of {where} is not used: rendering a short conversation fails, since {why}. Replace the "
            "template, or remove it."
        )


def check_templates(settings: Path, files: Iterable[Path]) -> None:
    """Reject a tokenizer with a chat template that :func:`check_template` rejects.

    Args:
        settings: Its ``tokenizer_config.json``, which may hold one template or several with names.
        files: Files that hold one template each.

    Raises:
        ValueError: If there is such a template, or a file cannot be read.
    """
    value = read_json(settings).get("chat_template") if settings.is_file() else None
    several = value if isinstance(value, list) else [value]
    for text in (one.get("template") if isinstance(one, dict) else one for one in several):
        if isinstance(text, str):
            check_template(text, str(settings))
    for path in files:
        if path.is_file():
            check_template(path.read_text(encoding="utf-8", errors="replace"), str(path))


@lru_cache(maxsize=256)
def _why_not(template: str) -> str | None:
    path = [str(Path(package.__file__).parent.parent) for package in (jinja2, markupsafe) if package.__file__]
    return why_it_fails(_CHILD, path, template=template, conversations=list(_conversations()), longest=_LONGEST)


def _conversations() -> Iterator[dict[str, Any]]:
    """Yield arguments of a rendering: conversations that grow, with and without tools, thinking and parts."""
    system, user = ({"role": role, "content": "Hello"} for role in ("system", "user"))
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Hm")
    answer = {"role": "assistant", "content": "Hi", **thought}
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "It"},
    ]
    tokens = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    for messages, tools in (
        ([user], None),
        ([system, user], None),
        ([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], None),
        ([user, answer], None),
        ([user, answer] * 8 + [user], None),
        ([system, user, *called, answer, user], [{"type": "function", "function": function}]),
    ):
        yield {
            "messages": messages, "tools": tools, "documents": None, "add_generation_prompt": messages[-1] == user, **tokens
        }  # fmt: skip
