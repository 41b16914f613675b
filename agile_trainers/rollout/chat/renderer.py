"""Converts a conversation to token ids that only grow at the end.

    first(messages) | answer 0 | delimited(observation 0) | answer 1 | delimited(observation 1) | ...

Answers are the sampled ids. Between the end of one answer and the start of the next stands the observation in the template's
*turn delimiters*: the rest of the answer's end-of-turn marker before it, the next generation prompt after it. Nothing is
rendered twice.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema, parse_response

from agile_trainers.adapters.untrusted import check_template
from agile_trainers.envs.base import as_messages
from agile_trainers.rollout.chat.pictures import Pictures
from agile_trainers.rollout.chat.template_check import (
    ANSWER,
    Render,
    Rewrite,
    SpecialTokenEscaper,
    answers_as_sampled,
    find_rewrite,
    opening_of,
    original_of,
    sampled_call,
    training_templates,
    trl_name,
)
from agile_trainers.types import Message, Picture, images_of, parts_of

_ANSWER = "agileAnswer"
_EXACT: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
_PARTING = "\n"
"""Text between messages, and around an observation, of a model without a chat template. Roles are not written."""
_TAG = re.compile(r"<[^<>\s]+>")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_WORD = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\w+")
_VARIABLES: tuple[dict[str, Any], ...] = (
    {"preserve_thinking": True},
    {"truncate_history_thinking": False},
    {"clear_thinking": False},
    {"enable_thinking": False},
)
"""Template variables that make some templates keep earlier turns."""
_TOOL_SETS = 64
"""Renderers kept, one for each set of tools."""


@dataclass(frozen=True)
class _TurnDelimiters:
    """The template's own tokens between an answer and the next one."""

    end_of_turn: int | None
    """The first special or EOS token between an answer and the observation; None if there is none."""
    specials: Counter[int]
    """Number of occurrences of each special token."""


class ChatRenderer:
    """Tokenizes the prompts and observations around the answers of a conversation.

    A template is accepted if the rendering of a longer conversation *begins with* the shorter one: the earlier rendering
    with its generation prompt, then the answer in the template's own form (plain, and with thinking unless
    ``enable_thinking`` is False), stored as the message's ``content``. Templates are rejected if they drop the thinking
    of earlier answers, later write another end of turn, or omit parts of their generation prompt from the history: the
    model would be trained on contexts that its template never produces. ``docs/chat_templates.md`` lists every template
    of TRL.

    Each observation is tokenized separately, with its turn delimiters. Next to a special token, as in nearly every
    template, this gives the same ids as tokenizing the whole text. In plain text, characters across the border might
    have merged into one token; the conversation keeps the sampled ids. Special tokens spelled out in a message become
    ordinary text, so that only the template can begin or end a turn; see
    :class:`~agile_trainers.rollout.chat.template_check.SpecialTokenEscaper`.

    Args:
        tokenizer: The tokenizer, with its chat template. Without a template, the turn delimiters are newlines.
        eos_token_ids: Ids that end an answer, as in the model's ``generation_config``. Default: the tokenizer's. The
            template's own end-of-turn token is added, see the attribute of the same name.
        chat_template: Replaces the tokenizer's template (the template itself, or the name of one of several).
        chat_template_kwargs: Variables of the template, ``{"enable_thinking": False}`` for example.
        training_chat_template: If the template rewrites earlier turns, use a training version of it: TRL's if that
            keeps them, otherwise this library's.
        on_rewrite: What to do with another template that rewrites earlier turns: ``"refuse"`` it, or ``"fork"``: render the
            conversation again where it does, see :meth:`goes_on`.
        pictures: Makes what a model reads of images. None: messages with images are refused.

    Attributes:
        chat_template: The template in use (a training version if requested and needed), None for plain text.
        eos_token_ids: Every id that ends an answer, sorted: the given ones and the template's end-of-turn token.
        rewrite: How the template rewrites earlier turns, if that is not refused; None if it keeps them.
        forks: True if a conversation is rendered again where the template rewrites earlier turns.

    Raises:
        ValueError: If the template rewrites earlier turns and that is refused, or cannot render a conversation, or if the
            arguments conflict.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        training_chat_template: bool = False,
        on_rewrite: str = "refuse",
        pictures: Pictures | None = None,
    ) -> None:
        self._tokenizer, self._pictures = tokenizer, pictures
        images = () if pictures is None else pictures.special
        self.forks = on_rewrite == "fork"
        self.rewrite: Rewrite | None = None
        self._rewriting: set[tuple[str, ...]] = set()
        """Roles, of a prompt or of an observation, around which the template rewrites earlier turns."""
        # Games repeat the same few observations.
        self._said = lru_cache(maxsize=1024)(self._say)
        self._by_tools: dict[str, ChatRenderer] = {}
        self._kwargs = dict(chat_template_kwargs or {})
        if eos_token_ids is None:
            eos_token_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_token_ids = sorted(set(eos_token_ids))
        self.chat_template: str | None = None
        if not (chat_template or tokenizer.chat_template):
            if chat_template_kwargs or training_chat_template:
                raise ValueError(
                    "chat_template_kwargs and training_chat_template need a chat template, but the tokenizer of "
                    f"{_name(tokenizer)} has none. Leave them unset."
                )
            self._escaper = SpecialTokenEscaper(tokenizer, self.eos_token_ids)
            self._silent, self._foreign = self._escaper.flagged, self._escaper.ids
            return
        self._escaper = SpecialTokenEscaper(tokenizer, {*self.eos_token_ids, *images})
        template = tokenizer.get_chat_template(chat_template)
        if trl_name(template) is None:
            check_template(template, _name(tokenizer))
        self.chat_template = self._choose_template(template, training_chat_template)
        self._render = self._renderer(self.chat_template, self._kwargs)
        self._call = sampled_call(self._render, as_messages("prompt"), self._escaper.texts)
        marks = self._marks()
        self._silent, self._foreign = self._escaper.flagged - marks, self._escaper.ids - marks
        self._delimiters: dict[tuple[str, ...], _TurnDelimiters] = {}
        self._prompts: dict[tuple[str, ...], Counter[int]] = {}
        end_of_turn = self._turn_delimiters(as_messages("")).end_of_turn
        if end_of_turn is not None:
            self.eos_token_ids = sorted({*self.eos_token_ids, end_of_turn})

    @property
    def tokenizer_name(self) -> str:
        """Folder, Hub id or class of the tokenizer, in quotation marks."""
        return _name(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token. Only a rewritten context and the requests of agents ask for it."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of each token."""
        from agile_trainers.records.writer import pieces  # late: only log-probs of parts of characters need them

        return {token: piece for token, piece, _ in pieces(self._tokenizer)}

    def first(self, observation: str | list[Message], *, sampled: bool = False) -> list[int]:
        """Render the start of a conversation.

        Args:
            observation: The prompt's messages; text is one user message.
            sampled: True if messages of the assistant are answers of the model: special tokens that these spell out become
                ordinary text, except those of the template's own form of an answer, such as thinking. Those of the
                environment's examples stay.

        Returns:
            The prompt's ids, generation prompt included. Plain text starts with BOS if the tokenizer adds one.

        Raises:
            ValueError: If the messages are rejected by the template, or later rewritten by it.
        """
        messages = as_messages(observation)
        pictures = self.pictures(messages)
        if messages[-1]["role"] == "assistant":
            raise ValueError("The prompt ends with an assistant message; its last message must have another role.")
        if self.chat_template is None:
            return self._bos() + self._plain_ids(messages, of_answers=self._foreign if sampled else ())
        own = self._own_specials(self.chat_template, messages, sampled=sampled)
        hidden = self._escaper.hide(messages, self._foreign if sampled else ())
        # Messages of the assistant may contain special tokens, of thinking for example.
        examples = any(message["role"] == "assistant" for message in messages)
        return self._encode(self._render(hidden), pictures, None if examples else own)

    def pictures(self, messages: list[Message]) -> list[Picture]:
        """Return what a model reads of the images in messages, in order.

        Raises:
            ValueError: If there are images and nothing processes them, or they are rejected.
        """
        if not images_of(messages):
            return []
        if self._pictures is None or self.chat_template is None:
            raise ValueError(
                f"A message has an image, which {_name(self._tokenizer)} cannot read. Train a model that reads images, and "
                "pass its processor (AutoProcessor.from_pretrained) with a chat template as `processing_class`."
            )
        return self._pictures.of(messages)

    def _encode(self, text: str, pictures: Sequence[Picture], own: Counter[int] | None) -> list[int]:
        """Tokenize a rendered text, with the placeholders of its images; ``own`` are the special tokens that it may have."""
        if own is not None or not pictures:
            ids = self._escaper.encode(text)
            if own is not None:
                self._escaper.check(ids, own)
            if not pictures:
                return ids
        assert self._pictures is not None
        return self._escaper.encode(self._pictures.expanded(text, pictures))

    def before(self, text: str) -> list[int]:
        """Render a user message that stands before a whole conversation, whose ids stay as they are."""
        messages = as_messages(text)
        if self.chat_template is None:
            return self._bos() + self._escaper.encode(self._escaper.hide(messages)[0]["content"] + _PARTING)
        return self._escaper.encode(self._render(self._escaper.hide(messages), False))

    def with_tools(self, tools: list[dict[str, Any]]) -> ChatRenderer:
        """Return the renderer of conversations that begin with these tools.

        Args:
            tools: As chat templates take them: ``{"type": "function", "function": {"name", "description", "parameters"}}``.

        Raises:
            ValueError: If there is no template, it does not write the tools, or it rejects them or rewrites earlier turns.
        """
        if not tools:
            return self
        key = json.dumps(tools, sort_keys=True)
        if key not in self._by_tools:
            if len(self._by_tools) >= _TOOL_SETS:
                self._by_tools.pop(next(iter(self._by_tools)))
            self._by_tools[key] = self._made_with(tools)
        return self._by_tools[key]

    def _made_with(self, tools: list[dict[str, Any]]) -> ChatRenderer:
        if self.chat_template is None:
            raise ValueError(
                f"The tokenizer of {_name(self._tokenizer)} has no chat template, which would write the tools."
            )
        other = copy(self)
        other._kwargs = {**self._kwargs, "tools": self._escaper.hide_in(tools)}
        other._render = other._renderer(self.chat_template, other._kwargs)
        other._said = lru_cache(maxsize=1024)(other._say)
        other._rewriting, other._delimiters, other._prompts = set(), {}, {}
        written = other._render(as_messages("prompt"))
        missing = [name for tool in tools if (name := tool["function"]["name"]) not in written]
        if missing:
            raise ValueError(
                f"The chat template of {_name(self._tokenizer)} does not write the tool {missing[0]!r} into the prompt. Use "
                "one that writes `tools`, or describe them in the system prompt and send none."
            )
        other.rewrite = other._find_rewrite(self.chat_template, other._kwargs)
        if other.rewrite is not None and not self.forks:
            raise ValueError(self._refusal(other.rewrite, self.chat_template, "It does so with tools."))
        return other

    def parsed(self, prompt_ids: list[int], action_ids: Sequence[int]) -> Message | None:
        """Parse an answer as TRL's response parser does, or the tokenizer's own.

        Args:
            prompt_ids: The prompt, which may open the answer's thinking.
            action_ids: The answer.

        Returns:
            A message with ``content`` and ``tool_calls`` if there are any; None if nothing knows the template, or the calls
            are not all that the answer has between the template's tags of a call: one broke off or is malformed.
        """
        if self._parser is None:
            return None
        end = list(action_ids[-1:]) if action_ids[-1] in self.eos_token_ids else []
        try:
            message = self._read(prompt_ids, action_ids)
            if message.get("tool_calls") and self._call_tags is not None:
                given = json.dumps(
                    [call["function"] for call in message["tool_calls"]], ensure_ascii=False, default=str
                )
                if any(end in given for end in self._ends):
                    return None
                beside = _beside_calls(self.decode(action_ids), self._written(message["tool_calls"]), self._call_tags)
                if beside is None:
                    return None
                beside_ids = cast(list[int], self._tokenizer.encode(beside, add_special_tokens=False))
                message["content"] = self._read(prompt_ids, [*beside_ids, *end])["content"] if beside else ""
        except Exception:  # whatever a tokenizer's own description makes of what a model may sample
            return None
        return {**message, "content": message["content"].removesuffix(cast(str, self._tokenizer.decode(end, **_EXACT)))}

    def _read(self, prompt_ids: list[int], action_ids: Sequence[int]) -> Message:
        assert self._parser is not None
        tools = self._kwargs.get("tools")
        return cast(Message, parse_response(self._parser, list(action_ids), prefix=prompt_ids, tools=tools))

    @cached_property
    def _call_tags(self) -> tuple[str, str] | None:
        """The first and the last tag of a call as the template writes it; None if it writes none."""
        try:
            call = self._written([{"function": {"name": "agileTool", "arguments": {"agileKey": "agileValue"}}}])
            plain = self._written([])
        except Exception:  # a template may reject what it wants
            return None
        before, _, after = call.partition("agileValue")
        opening = [tag for tag in _TAG.findall(before.partition("agileTool")[0]) if tag not in plain]
        closing = [tag for tag in _TAG.findall(after) if tag not in self._ends]
        return (opening[0], closing[-1]) if opening and closing else None

    @cached_property
    def _ends(self) -> set[str]:
        """Texts of the tokens that may end an answer."""
        kinds = answers_as_sampled(self._render, as_messages("prompt"), self._escaper.texts, calls=True)
        ends = {cast(str, self._tokenizer.decode([token], **_EXACT)) for token in self.eos_token_ids}
        return {*ends, *(one.end for one in kinds)} - {""}

    def _written(self, calls: list[dict[str, Any]]) -> str:
        """Return how the template writes an answer of calls alone, or a plain one if there are none."""
        asked = as_messages("prompt")
        message: Message = {"role": "assistant", "content": "" if calls else "answer"}
        if calls:
            called = [{"id": f"agileCal{place % 10}", "type": "function", **call} for place, call in enumerate(calls)]
            message["tool_calls"] = called
        whole = self._render([*asked, message], False)
        return whole[len(commonprefix([whole, self._render(asked)])) :]  # noqa: RUF071 (of texts)

    @cached_property
    def _parser(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer with a description of its answers; None if there is none."""
        parser = copy(self._tokenizer)
        if self.chat_template is not None:
            parser.chat_template = original_of(self.chat_template)  # a training version is saved with a model
        if getattr(parser, "response_template", None) or getattr(parser, "response_schema", None):
            return parser
        try:
            return cast(PreTrainedTokenizerBase, add_response_schema(parser))
        except ValueError:  # a template that TRL does not know
            return None

    def spliced(self, messages: list[Message], answers: Mapping[int, Sequence[int]]) -> list[int] | None:
        """Render a conversation in which sampled answers keep their ids.

        An answer's ids stand after the text that it was sampled after, generation prompt included, in the place of whatever
        the template writes from there to the answer's end.

        Args:
            messages: The conversation. The content of a sampled answer is its :meth:`decode`.
            answers: The sampled ids by the index of their message.

        Returns:
            The ids; None where the template is known to rewrite earlier turns and writes another text for an answer than was
            sampled, or leaves out a tool's result after a call that is text. :meth:`first` renders such a conversation.

        Raises:
            ValueError: As :meth:`first`.
        """
        if not answers or messages[-1]["role"] == "assistant":
            return self.first(messages, sampled=True)  # which says what is wrong
        pieces, ids = self._around(messages, answers), list[int]()
        if pieces is None:
            return None
        if pictures := self.pictures(messages):
            assert self._pictures is not None
            parting = f"agileSampled{secrets.token_hex(16)}"
            pieces = self._pictures.expanded(parting.join(pieces), pictures).split(parting)
        if self.chat_template is None:
            ids = self._bos()
        ids += self._escaper.encode(pieces[0])
        for place, piece in zip(sorted(answers), pieces[1:], strict=True):
            ids += answers[place]
            ids += self._after(ids[-1], self._escaper.encode(piece))
        return ids

    def _around(self, messages: list[Message], answers: Mapping[int, Sequence[int]]) -> list[str] | None:
        """Return the texts around sampled answers, None if the template does not write these as they were sampled."""
        hidden = self._escaper.hide(messages, self._foreign)
        mark = f"agileSampled{secrets.token_hex(16)}n"
        alone = [{**one, "content": f"{mark}{k}n"} if k in answers else one for k, one in enumerate(hidden)]
        if self.chat_template is None:
            whole = _PARTING.join(one["content"] for one in alone) + _PARTING
            # Nothing parts a prompt from its answer.
            return re.split(f"{mark}[0-9]+n", re.sub(f"{_PARTING}({mark}[0-9]+n)", r"\1", whole, count=1))
        self._own_specials(self.chat_template, messages, sampled=True)
        rewrites = self.rewrite is not None or tuple(message["role"] for message in messages) in self._rewriting

        def after(opening: str) -> list[Message]:
            contents = {k: opening + hidden[k]["content"] + alone[k]["content"] for k in answers}
            return [{**one, "content": contents.get(k, one["content"])} for k, one in enumerate(alone)]

        # Templates read an answer's content, for its thinking, which a generation prompt may open; a few reject their own.
        openings = dict.fromkeys(("", opening_of(self._render(as_messages("prompt")))))
        for marked in (*map(after, openings), alone):
            pieces = self._pieces(marked, answers, mark, rewrites=rewrites)
            if pieces is not None and (not rewrites or self._writes(messages, answers, pieces)):
                return pieces if self._writes_results(marked) else None
        pieces = re.split(f"{mark}[0-9]+n", self._render(alone))
        return pieces if not rewrites and len(pieces) == len(answers) + 1 and self._writes_results(alone) else None

    def _pieces(
        self, marked: list[Message], answers: Mapping[int, Sequence[int]], mark: str, *, rewrites: bool
    ) -> list[str] | None:
        """Return the texts around answers that end with a mark, None if one does not begin where it was sampled."""
        pieces, start, openings = list[str](), 0, dict[str, str]()
        try:
            whole = self._render(marked)
            for place in sorted(answers):
                role, said = marked[place - 1]["role"], f"{mark}{place}n"
                opening = openings.get(role, "")
                # Rendering the conversation up to each answer takes quadratic time.
                if place < max(answers) and opening and whole.count(opening, start, whole.find(said, start)) == 1:
                    begin = whole.index(opening, start) + len(opening)
                else:
                    before = self._render(marked[:place])
                    begin = len(before)
                    if not whole.startswith(before) or begin < start:
                        return None
                    if not rewrites and role not in openings:
                        opening = before.removeprefix(self._render(marked[:place], False))
                        # No message has this token.
                        openings[role] = opening if self._foreign & self._escaper.count(opening).keys() else ""
                end = whole.find(said, begin)
                if end < 0:
                    return None
                pieces.append(whole[start:begin])
                start = end + len(said)
        except ValueError:
            return None
        return [*pieces, whole[start:]]

    def _writes_results(self, marked: list[Message]) -> bool:
        """Return whether the template writes the results of tools, also after answers whose calls are text."""
        probes = {place: f"agileResultProbe{place}x" for place, one in enumerate(marked) if one["role"] == "tool"}
        if not probes:
            return True
        probed = [{**one, "content": probes[place]} if place in probes else one for place, one in enumerate(marked)]
        text = self._render(probed)
        return all(probe in text for probe in probes.values())

    def _after(self, last_action_id: int, ids: list[int]) -> list[int]:
        """Cut the end-of-turn token, and what is before it, from the text after an answer that ends with it."""
        ends = self._escaper.ids.union(self.eos_token_ids)
        place = next((place for place, one in enumerate(ids) if one in ends), None)
        if place is None or ids[place] != last_action_id or self.chat_template is None:
            return ids
        return ids[place + 1 :]

    def _writes(self, messages: list[Message], answers: Mapping[int, Sequence[int]], pieces: list[str]) -> bool:
        """Return whether the template writes answers as they were sampled; ``pieces`` are the texts around them."""
        texts = [
            cast(str, self._tokenizer.decode(_without_end(answers[place], self.eos_token_ids), **_EXACT))
            for place in sorted(answers)
        ]
        text = pieces[0] + "".join(said + piece for said, piece in zip(texts, pieces[1:], strict=True))
        return text == self._render(self._escaper.hide(messages, self._foreign))

    def goes_on(
        self, messages: list[Message], prompt: Sequence[str], action_ids: Sequence[int], observation: list[Message]
    ) -> bool:
        """Return whether the template writes a longer conversation as it was read and sampled, and then the observation.

        It compares texts, and only where the template is known to rewrite earlier turns: it drops the thinking of an earlier
        answer, for example, or another white space. :meth:`first` then renders the longer conversation anew.

        Args:
            messages: What the answer was sampled after.
            prompt: Roles of the conversation's first messages.
            action_ids: The answer.
            observation: The messages after it.
        """
        if self.chat_template is None:
            return True
        roles = tuple(message["role"] for message in observation)
        end = self._turn_delimiters(observation).end_of_turn
        if self.rewrite is None and tuple(prompt) not in self._rewriting and roles not in self._rewriting:
            return True
        after = self._after_answer(observation)
        ids = _without_end(action_ids, [] if end is None else [end])
        answer = cast(str, self._tokenizer.decode(ids, **_EXACT))
        stored: Message = {"role": "assistant", "content": self.decode(action_ids)}
        return self._render([*messages, stored, *observation]) == self._render(messages) + answer + after

    def delimited(self, observation: str | list[Message], last_action_id: int) -> list[int]:
        """Render an observation with the turn delimiters around it: all that stands between two answers.

        If the answer ended with the template's end-of-turn token, they begin right after it (with the newline that
        follows it in ChatML, for example). Otherwise (a length limit, a stop string, or another EOS token, which
        stays in place) they begin with the end-of-turn token. Plain text has none.

        Args:
            observation: The environment's observation; text is one user message.
            last_action_id: The last id of the answer.

        Returns:
            The ids: end of the answer's turn, the observation, the next generation prompt.

        Raises:
            ValueError: If the template rejects or drops a message of such a role here.
        """
        whole, tail, end_of_turn = self._said(observation) if isinstance(observation, str) else self._say(observation)
        return list(tail if last_action_id == end_of_turn else whole)

    def _say(self, observation: str | list[Message]) -> tuple[list[int], list[int], int | None]:
        """Return a delimited observation with and without its leading end-of-turn token, and that token."""
        messages = as_messages(observation)
        pictures = self.pictures(messages)
        if self.chat_template is None:
            ids = self._plain_ids(messages, _PARTING)
            return ids, ids, None
        known = self._turn_delimiters(messages)
        ids = self._encode(self._after_answer(self._escaper.hide(messages)), pictures, known.specials)
        if known.end_of_turn is None:
            return ids, ids, None
        # Split after tokenizing: some tokens (Phi-3) absorb the whitespace after them.
        return ids, ids[ids.index(known.end_of_turn) + 1 :], known.end_of_turn

    def decode(self, action_ids: Sequence[int]) -> str:
        """Decode an answer to the text that the environment receives.

        The text has no end-of-turn token and no special tokens, except those of an answer in the template's own form: the
        channels of gpt-oss, the thinking of Gemma 4, the marks around a tool call.
        """
        shown = [i for i in _without_end(action_ids, self.eos_token_ids) if i not in self._silent]
        return cast(str, self._tokenizer.decode(shown, **_EXACT))

    def _choose_template(self, template: str, training_chat_template: bool) -> str:
        """Return ``template``, or a training version of it if one is needed and requested."""
        rewrite = self._find_rewrite(template, self._kwargs)
        if rewrite is None:
            return template
        if training_chat_template and (repaired := self._training_template(template, self._kwargs)):
            return repaired
        if self.forks and self._takes_answers(template):
            self.rewrite = rewrite
            return template
        raise ValueError(self._refusal(rewrite, template, self._ways_out(template)))

    def _takes_answers(self, template: str) -> bool:
        """Return whether a template takes answers as they are sampled, and keeps them: gpt-oss rejects channels."""
        render, prompt = self._renderer(template, self._kwargs), as_messages("prompt")
        thinking = self._kwargs.get("enable_thinking") is not False
        try:
            answers = answers_as_sampled(render, prompt, self._escaper.texts, thinking=thinking)
            stored: list[Message] = [{"role": "assistant", "content": sampled.text} for sampled in answers]
            return all(ANSWER in render([*prompt, answer, *prompt]) for answer in stored)
        except ValueError:
            return False

    def _find_rewrite(
        self,
        template: str,
        kwargs: dict[str, Any],
        prompt: list[Message] | None = None,
        observation: list[Message] | None = None,
    ) -> Rewrite | None:
        return find_rewrite(
            self._renderer(template, kwargs),
            prompt or as_messages("prompt"),
            self._escaper.texts,
            thinking=kwargs.get("enable_thinking") is not False,
            observation=observation,
        )

    def _training_template(self, template: str, kwargs: dict[str, Any]) -> str | None:
        """Return the first training version of a template that keeps earlier turns."""
        versions = training_templates(self._tokenizer, template)
        return next((version for version in versions if self._find_rewrite(version, kwargs) is None), None)

    def _ways_out(self, template: str) -> str:
        """Return advice on the options with which the template keeps earlier turns; each is tried."""
        ways = []
        if self._training_template(template, self._kwargs):
            ways.append("training_chat_template=True (a version of the template that keeps them; saved with the model)")
        for variables in _VARIABLES:
            kwargs = {**self._kwargs, **variables}
            if kwargs == self._kwargs or not any(name in template for name in variables):
                continue
            note = (
                " (only if the model does not think)" if "enable_thinking" in variables else " (also when serving it)"
            )
            if self._find_rewrite(template, kwargs) is None:
                ways.append(f"chat_template_kwargs={kwargs}{note}")
            elif not ways and self._training_template(template, kwargs):
                ways.append(f"training_chat_template=True and chat_template_kwargs={kwargs}{note}")
        if ways:
            return "Pass " + ", or ".join(ways) + "."
        return (
            "No option keeps them. Edit the template until it renders the turn above unchanged, and set it as "
            "the tokenizer's chat_template."
        )

    def _refusal(self, rewrite: Rewrite, template: str, fix: str) -> str:
        known = trl_name(template)
        return (
            f"The chat template of {_name(self._tokenizer)}{f' (in TRL: {known!r})' if known else ''} rewrites earlier "
            "turns as a conversation grows, so the model would be trained on contexts that the template never shows "
            f"it:\n{rewrite}\n{fix}"
        )

    def _marks(self) -> set[int]:
        """Return the special tokens inside answers in the template's own form."""
        return {
            token
            for calls in (False, True)
            for sampled in answers_as_sampled(self._render, as_messages("prompt"), self._escaper.texts, calls=calls)
            for token in self._escaper.count(sampled.text)
        }

    def _own_specials(self, template: str, messages: list[Message], *, sampled: bool = False) -> Counter[int]:
        """Count the template's own special tokens around a prompt, and check its roles for rewriting, once per roles.

        Of a conversation with ``sampled`` answers it checks fewer exchanges, and its count is of these.
        """
        if sampled and any(message["role"] == "assistant" for message in messages):
            short = _fewer(messages)
            own = self._own_specials(template, short)
            if tuple(message["role"] for message in short) in self._rewriting:
                self._rewriting.add(tuple(message["role"] for message in messages))
            return own
        roles, kinds = tuple(message["role"] for message in messages), _kinds(messages)
        if kinds not in self._prompts:
            # A prompt of one user message was checked when the template was chosen.
            if kinds != ("user",) and (rewrite := self._find_rewrite(template, self._kwargs, prompt=messages)):
                self._rewriting.add(roles)
                fix = (
                    f"It does so after a prompt of the roles {list(roles)}. Make the prompt one message of role 'user' "
                    "(a system prompt can be its first paragraph), or edit the template."
                )
                if not self.forks:
                    raise ValueError(self._refusal(rewrite, template, fix))
            probes = [_saying(message, "agileProbe") for message in messages]
            self._prompts[kinds] = self._escaper.count(self._render(probes))
        return self._prompts[kinds]

    def _turn_delimiters(self, messages: list[Message]) -> _TurnDelimiters:
        """Return what the turn delimiters of all messages with these roles share.

        In most templates the end-of-turn token closes the answer's turn. In templates without one (GLM), it opens the
        next turn, and the model samples it to stop.
        """
        roles, kinds = tuple(message["role"] for message in messages), _kinds(messages)
        if kinds not in self._delimiters:
            if "assistant" in roles:
                raise ValueError(f"The observation has roles {list(roles)}; 'assistant' is the model's own role.")
            probes = [f"agileObservationProbe{index}x" for index in range(len(messages))]
            probing = [_saying(message, probe) for message, probe in zip(messages, probes)]
            rendered = self._after_answer(probing)
            for role, message, probe in zip(roles, messages, probes):
                if probe not in rendered and any(part["type"] == "text" for part in parts_of(message)):
                    raise ValueError(
                        f"The chat template of {_name(self._tokenizer)} does not write a message of role {role!r} "
                        f"after an answer. Let the environment return text, or a role that the template writes."
                    )
            ends = self._escaper.ids.union(self.eos_token_ids)
            ids = self._escaper.encode(rendered.partition(probes[0])[0])
            end_of_turn = next((i for i in ids if i in ends), None)
            if kinds != ("user",):  # such a message is already checked
                self._check_observation(probing, roles)
            self._delimiters[kinds] = _TurnDelimiters(end_of_turn, self._escaper.count(rendered))
        return self._delimiters[kinds]

    def _check_observation(self, messages: list[Message], roles: tuple[str, ...]) -> None:
        """Reject roles that make the template rewrite earlier turns."""
        assert self.chat_template is not None
        if rewrite := self._find_rewrite(self.chat_template, self._kwargs, observation=messages):
            self._rewriting.add(roles)
            fix = (
                f"It does so with an observation of the roles {list(roles)}. Let the environment return text, which "
                "becomes a message of role 'user' (result_role='user' of a ToolEnvironment), or edit the template."
            )
            if not self.forks:
                raise ValueError(self._refusal(rewrite, self.chat_template, fix))

    def _after_answer(self, messages: list[Message]) -> str:
        """Render the text after an answer that these messages follow; tool messages follow an answer with a tool call."""
        answer = self._call if messages[0]["role"] == "tool" and self._call else _ANSWER
        dummy = [*as_messages("prompt"), {"role": "assistant", "content": answer}]
        return self._render([*dummy, *messages]).partition(answer)[2]

    def _renderer(self, template: str, kwargs: dict[str, Any]) -> Render:
        def render(messages: list[Message], generation_prompt: bool = True) -> str:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
                )
            except Exception as error:  # whatever the template's own operations raise
                raise ValueError(
                    f"The chat template of {_name(self._tokenizer)} rejects a conversation with the roles "
                    f"{[message['role'] for message in messages]}: {type(error).__name__}: {error}"
                ) from error
            return cast(str, text)

        def render_parts(messages: list[Message], generation_prompt: bool = True) -> str:
            return render([_in_parts(message) for message in messages], generation_prompt)

        return render_parts if _wants_parts(render) else render

    def _plain_ids(self, messages: list[Message], around: str = "", of_answers: Collection[int] = ()) -> list[int]:
        contents = (message["content"] for message in self._escaper.hide(messages, of_answers))
        return self._escaper.encode(around + _PARTING.join(contents) + around)

    def _bos(self) -> list[int]:
        """Return the BOS token if the tokenizer puts one in front of plain text."""
        added = self._tokenizer.encode("")[:1]
        return added if added == [self._tokenizer.bos_token_id] else []


def _without_end(action_ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    return list(action_ids[:-1] if action_ids and action_ids[-1] in ends else action_ids)


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(tokenizer.name_or_path or type(tokenizer).__name__)


def _wants_parts(render: Render) -> bool:
    """Return whether a template, of a vision model for example, requires a message's content as a list of parts."""

    def writes(message: Message) -> bool:
        try:
            return _ANSWER in render([message])
        except ValueError:
            return False

    (probe,) = as_messages(_ANSWER)
    return not writes(probe) and writes(_in_parts(probe))


def _in_parts(message: Message) -> Message:
    return {**message, "content": parts_of(message)}


def _kinds(messages: list[Message]) -> tuple[str, ...]:
    """Return the role of each message, and the kinds of its parts if it has any."""
    return tuple(
        one["role"]
        if isinstance(one["content"], str)
        else " ".join([one["role"], *(p["type"] for p in one["content"])])
        for one in messages
    )


def _fewer(messages: list[Message]) -> list[Message]:
    """Leave out what repeats the three exchanges before it: an answer and messages of the same kinds."""
    exchanges, shapes = list[list[Message]](), list[Any]()
    for message in messages:
        if message["role"] == "assistant" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    kept = list[Message]()
    for exchange in exchanges:
        shape = _kinds(exchange), bool(exchange[0].get("tool_calls"))
        if shapes[-3:] != [shape] * 3:
            shapes.append(shape)
            kept += exchange
    return kept


def _saying(message: Message, text: str) -> Message:
    """Replace the text of a message; its images stay."""
    if isinstance(message["content"], str):
        return {**message, "content": text}
    parts = [{"type": "text", "text": text} if part["type"] == "text" else part for part in message["content"]]
    return {**message, "content": parts}


def _beside_calls(text: str, written: str, tags: tuple[str, str]) -> str | None:
    """Return what an answer has besides its calls; None if the calls that were read of it are not all that it has of them.

    Args:
        text: The answer.
        written: The calls as the template writes them. Spaces, quotation marks and the order of arguments may differ.
        tags: The tags that a call begins and ends with.
    """
    call = re.compile(f"{re.escape(tags[0])}(.*?){re.escape(tags[1])}", re.DOTALL)
    pieces = call.split(text)
    if any(tag in piece for piece in pieces[::2] for tag in tags):
        return None
    if _words(pieces[1::2]) != _words(call.findall(written)):
        return None
    return "\n".join(filter(None, map(str.strip, pieces[::2])))


def _words(texts: Sequence[str]) -> Counter[str]:
    """Count words; 1.0 and 1, True and true, None and null, and a letter and its JSON escape are one."""
    words = _WORD.findall(_ESCAPED.sub(lambda escape: chr(int(escape[1], 16)), " ".join(texts)))
    folded = (f"{float(word):g}" if word[0].isdecimal() and word.isascii() else word.casefold() for word in words)
    return Counter("null" if word == "none" else word for word in folded)
