"""Escapes special tokens that are spelled out in a message, so that an environment cannot forge turns."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerBase

from agile_trainers.types import Message


class SpecialTokenEscaper:
    """Tokenizes a rendered conversation in which only the template's own special tokens are special.

    Before rendering, every special token spelled out in a message is replaced by a random mark. After rendering, the text
    is split at the marks. The text between them is tokenized normally, and the texts that the marks stand for are
    tokenized without parsing special tokens. Text without special tokens is tokenized whole, in one call.

    Args:
        tokenizer: The tokenizer. Its special tokens are the added tokens that are flagged special.
        eos_token_ids: Added tokens that count as special regardless of their flag.

    Attributes:
        ids: The special tokens.
        flagged: The tokens among them that are flagged special, which decoding skips.
        texts: Texts of the special tokens, longest first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> None:
        added = tokenizer.added_tokens_decoder
        self.flagged = frozenset(i for i, token in added.items() if token.special)
        self.ids = self.flagged | {i for i in added if i in eos_token_ids}
        # Longest first, since one token may begin with another.
        self._ids_by_text = {added[i].content: i for i in self.ids}
        self.texts = sorted(self._ids_by_text, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._index = {text: index for index, text in enumerate(self.texts)}
        self._mark = f"agile{secrets.token_hex(16)}n"
        self._marks = re.compile(self._mark + r"(\d+)n")
        self._spelled: dict[int, list[int]] = {}
        self._tokenizer = tokenizer

    def hide(self, messages: list[Message], of_answers: Collection[int] = ()) -> list[Message]:
        """Replace special tokens in messages by marks.

        Args:
            messages: The messages.
            of_answers: Those that are replaced in messages of the assistant; the others stay there.
        """
        return [
            self.hide_in(message, chosen)
            if (chosen := of_answers if message["role"] == "assistant" else self.ids)
            else message
            for message in messages
        ]

    def hide_in(self, value: Any, chosen: Collection[int] | None = None) -> Any:
        """Replace special tokens by marks in all texts of nested lists and dictionaries.

        Args:
            value: Text, or what holds texts.
            chosen: The tokens. Default: all.
        """
        if isinstance(value, str):
            return self._hide(value, self.ids if chosen is None else chosen)
        if isinstance(value, dict):
            return {self.hide_in(key, chosen): self.hide_in(one, chosen) for key, one in value.items()}
        return [self.hide_in(one, chosen) for one in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Tokenize a text that was rendered from hidden messages.

        Raises:
            ValueError: If the tokenizer has no way to write a special token as ordinary text, or no token for a word.
        """
        ids: list[int] = []
        for position, piece in enumerate(self._marks.split(text)):
            ids += self._spell(int(piece)) if position % 2 else self._encode(piece)
        return ids

    def check(self, ids: list[int], own: Counter[int]) -> list[int]:
        """Check that ``ids`` contain no special tokens beyond the template's own, and return them.

        Raises:
            ValueError: If they do, for example because the tokenizer normalizes similar characters to one.
        """
        forged = Counter(i for i in ids if i in self.ids) - own
        if forged:
            raise ValueError(self._refusal(next(iter(forged))))
        return ids

    def count(self, text: str) -> Counter[int]:
        """Count the occurrences of each special token in a text, by id."""
        return Counter(self._ids_by_text[found] for found in self._pattern.findall(text))

    def _hide(self, text: str, chosen: Collection[int]) -> str:
        def marked(found: re.Match[str]) -> str:
            hidden = self._ids_by_text[found[0]] in chosen
            return f"{self._mark}{self._index[found[0]]}n" if hidden else found[0]

        return self._pattern.sub(marked, text)

    def _spell(self, index: int) -> list[int]:
        if index not in self._spelled:
            ids = self._tokenizer.encode(self.texts[index], add_special_tokens=False, split_special_tokens=True)
            self._spelled[index] = self.check(ids, Counter())
        return self._spelled[index]

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises no other type
            if "[UNK]" not in str(error):
                raise
            known = self._tokenizer.get_vocab()
            unknown = [word for part in self._pattern.split(text) for word in part.split() if word not in known]
            raise ValueError(
                f"The tokenizer has no token for {unknown[0] if unknown else text!r:.100}, and none for unknown words. Add "
                "the word to make_embedded_model(words=...), add '[UNK]' to read every unknown word as that, or leave words "
                "unset for a tokenizer that writes any text."
            ) from error

    def _refusal(self, token_id: int) -> str:
        token = self._tokenizer.added_tokens_decoder[token_id].content
        return (
            f"A message of the environment contains the special token {token!r}, and the tokenizer cannot write it as "
            "ordinary text, so the environment could forge turns. Remove it from the text."
        )
