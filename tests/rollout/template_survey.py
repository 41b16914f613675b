"""Tries every chat template of TRL and writes ``docs/chat_templates.md`` (``make templates``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trl
from chat_templates import OTHERS, templates, tokenizer_for
from served import Play

from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.chat.template_check import ANSWER, THOUGHT
from agile_trainers.types import Message

PAGE = Path(__file__).resolve().parents[2] / "docs" / "chat_templates.md"

Options = dict[str, Any]
"""Arguments of ``ChatRenderer``."""
OPTIONS: tuple[Options, ...] = (
    {},
    {"training_chat_template": True},
    {"chat_template_kwargs": {"preserve_thinking": True}},
    {"chat_template_kwargs": {"truncate_history_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"training_chat_template": True, "chat_template_kwargs": {"enable_thinking": False}},
)
_PROMPT: list[Message] = [{"role": "user", "content": "guess"}]
_SYSTEM: list[Message] = [{"role": "system", "content": "be brief"}, *_PROMPT]
_RESULT: list[Message] = [{"role": "tool", "name": "look", "content": "seen"}]


@dataclass(frozen=True)
class Verdict:
    """What holds for one template."""

    name: str
    accepted: tuple[tuple[Options, ChatRenderer], ...]
    """Those of ``OPTIONS`` under which it is accepted, with the renderers they make."""
    refusal: str
    """Why it is refused without options; empty if it is not."""
    system: tuple[str, ...]
    """Why a system message is refused, per option; empty if it is not."""
    tools: tuple[str, ...]
    """Why observations of the role ``tool`` are refused, per option; empty if they are not."""
    served: tuple[int, float] | None
    """Turns of four that begin a new path where the conversation is trained as it is served, and the tokens of the episode
    over those with an option that keeps the thoughts. None if that is refused."""

    @property
    def options(self) -> list[Options]:
        """Under which it is accepted."""
        return [options for options, _ in self.accepted]


def survey(name: str) -> Verdict:
    """Try a template with every option that it may know."""
    accepted, refusal = [], ""
    for options in options_of(templates()[name]):
        try:
            accepted.append((options, ChatRenderer(tokenizer_for(name), **options)))
        except ValueError as error:
            refusal = refusal or ("" if options else str(error))
        if options == {} and accepted:
            break
    return Verdict(
        name,
        tuple(accepted),
        refusal,
        tuple(_tried(partial(renderer.first, _SYSTEM)) for _, renderer in accepted),
        tuple(_tried(partial(renderer.delimited, _RESULT, -1)) for _, renderer in accepted),
        _served(name, [options for options, _ in accepted]),
    )


def _served(name: str, accepted: list[Options]) -> tuple[int, float] | None:
    try:
        if {} not in accepted:
            ChatRenderer(tokenizer_for(name), on_rewrite="fork")
    except ValueError:
        return None
    said = {THOUGHT: "higher lower guess " * 30, ANSWER: "guess " * 10}
    keeping = next((one for one in accepted if one.get("chat_template_kwargs") != {"enable_thinking": False}), {})
    ours = Play(name, "user", True, said).episode
    theirs = Play(name, "user", True, said, **keeping).episode if keeping else ours
    return sum(turn.fork is not None for turn in ours.turns), ours.num_tokens / theirs.num_tokens


def options_of(template: str) -> Iterator[Options]:
    """``OPTIONS`` without those whose variable the template does not know."""
    for options in OPTIONS:
        if all(variable in template for variable in options.get("chat_template_kwargs", {})):
            yield options


def turns(refusal: str) -> tuple[str, ...]:
    """The turn that an error shows, as it was and as it is rendered later."""
    return tuple(re.findall(r"^  (?:as it was|rendered later) +(.*)$", refusal, re.MULTILINE))


def _tried(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _written(options: Options) -> str:
    variables = ", ".join(f"{name}={value}" for name, value in options.get("chat_template_kwargs", {}).items())
    return " and ".join(filter(None, ["training" if "training_chat_template" in options else "", variables]))


def page(verdicts: list[Verdict]) -> str:
    """The survey as Markdown."""
    trls = [verdict for verdict in verdicts if verdict.name not in OTHERS]
    kept = sum({} in verdict.options for verdict in trls)
    some = sum(bool(verdict.options) for verdict in trls)
    lines = [
        "# Chat templates",
        "",
        f"`make templates` tries every chat template that TRL {trl.__version__} ships, and those of Mistral v0.3 and",
        f"Llama 2. Of TRL's {len(trls)}, {kept} are accepted as they are, {some - kept} with an option, and "
        f"{len(trls) - some} are refused.",
        "",
        "A template is accepted if the rendered text of a longer conversation begins with that of the shorter one: the",
        "prompt, then the answer exactly as it was sampled, in the template's own form (plain, with thinking, with",
        "channels). The history holds the text of each answer as the message's `content`. A test plays several turns with",
        "every accepted row, and compares the rendered ids with those of the rendered and tokenized conversation.",
        "",
        "- *as it is*: the template is accepted without options.",
        "- *training*: `training_chat_template=True` uses a version of the template that keeps earlier turns: TRL's, or",
        "  ours where TRL's rewrites them too. It is saved with the model, so a server of the model renders what it was",
        "  trained on: the thinking of all turns and, for gpt-oss, `<|return|>` at the end of earlier answers. The thinking",
        "  of an answer may then be in its `content`, as sampled, or in the field that the template has for it.",
        "- A variable: set it with `chat_template_kwargs={...}`, and where the model is served too. `enable_thinking=False`",
        "  is for models that do not think, or should not.",
        "- *system*: whether the prompt may begin with a system message.",
        '- *tool*: whether observations may have the role `tool` (`result_role="tool"`), after calls as the template writes',
        "  them. Results that come as the role `user` (the default) always work.",
        "",
        "## As it is served",
        "",
        "Without an option, a conversation is trained as a server of the model renders it: a turn whose beginning the",
        'template rewrites begins a [new path](paths.md). `on_rewrite="refuse"` refuses such templates, and conversations',
        "that are *rewritten*, with an error that shows the turn. The column *served* is of an episode of four turns with a",
        "thought of 90 words, an answer of 10 and observations of 20: the turns that begin a new path, and the tokens that",
        "are computed, over those with a template that keeps the thoughts. A served turn reads the answers before it once",
        "more, without their thoughts, and its context is shorter. Templates that do not look for a thought in the content",
        "(Qwen3.8's, Muse Glimmer's) keep it there; a client that sends answers back without it is a",
        "[history](history.md) that removes it.",
        "",
        "| template | accepted | system | tool | served |",
        "|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        ways = ["as it is"] if {} in verdict.options else [_written(options) for options in _shortest(verdict.options)]
        lines.append(
            f"| {verdict.name} | {'; '.join(ways) or 'no'} | {_said(verdict.system)} | {_said(verdict.tools)} | "
            f"{_cost(verdict.served)} |"
        )
    lines += ["", "## Turns that are rewritten", "", "Without an option:", ""]
    lines += _shown({verdict.name: verdict.refusal for verdict in verdicts})
    lines += ["With a system message, with every option:", ""]
    lines += _shown({verdict.name: verdict.system[0] for verdict in verdicts if all(verdict.system)})
    lines += ["After results of the role `tool`, with every option:", ""]
    lines += _shown({verdict.name: verdict.tools[0] for verdict in verdicts if all(verdict.tools)})
    return "\n".join(lines).rstrip() + "\n"


def _cost(served: tuple[int, float] | None) -> str:
    if served is None:
        return "refused"
    forks, share = served
    return f"{forks} paths more, {share:.2f} times the tokens" if forks else "as it is"


def _shown(refusals: dict[str, str]) -> list[str]:
    """Each turn with the templates that rewrite it so."""
    shown = {name: turns(refusal) for name, refusal in refusals.items() if turns(refusal)}
    lines = []
    for turn in dict.fromkeys(shown.values()):
        names = ", ".join(name for name in shown if shown[name] == turn)
        lines += [f"{names}:", "", "```text", f"as it was       {turn[0]}", f"rendered later  {turn[1]}", "```", ""]
    return lines


def _said(answers: tuple[str, ...]) -> str:
    """One word if it holds with every option; the first option's and another's if not."""
    words = ["yes" if not answer else "rewritten" if turns(answer) else "no" for answer in answers]
    first, *others = dict.fromkeys(words)
    return first + "".join(f" ({other} without *training*)" for other in others)


def _shortest(options: list[Options]) -> list[Options]:
    """Without options that add to others which suffice."""
    return [o for o in options if not any(other != o and other.items() <= o.items() for other in options)]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page([survey(name) for name in templates()]), encoding="utf-8")
    print(f"Wrote {PAGE}.")


if __name__ == "__main__":
    main()
