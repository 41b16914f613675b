"""Small tokenizers, made in code, for real and for hand-written chat templates."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["\n", *"user assistant system model ? a b c guess higher lower done word 1 2 3 4".split()]  # noqa: SIM905


def trl_template(name: str) -> str:
    """A template as its model ships it (TRL keeps copies)."""
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _finish(tokenizer: Tokenizer, template: str | None, specials: list[str], **kwargs: Any) -> PreTrainedTokenizerFast:
    # Phi-3's end token swallows the whitespace after it.
    tokenizer.add_special_tokens([AddedToken(text, special=True, rstrip=text == "<|end|>") for text in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kwargs)
    fast.chat_template = template
    return fast


def word_tokenizer(template: str | None, specials: list[str], **kwargs: Any) -> PreTrainedTokenizerFast:
    """One token per word of ``WORDS`` and per newline; single spaces are dropped."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(Regex(" +"), "removed")]
    )
    return _finish(tokenizer, template, specials, **kwargs)


def byte_tokenizer(template: str | None, specials: list[str], **kwargs: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, some of them of whitespace."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("u", "s"), ("e", "r"), ("us", "er"), ("l", "o"), ("Ġ", "b"), (":", "Ċ"), ("t", "h")]
    vocab = {text: i for i, text in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # Words, digits, punctuation, and newlines with the blanks before them, as Llama 3 and Qwen split.
    pieces = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = _finish(tokenizer, template, specials, **kwargs)
    if fast.bos_token:  # As Llama's and Gemma's tokenizers, put BOS in front of every text.
        bos = (fast.bos_token, fast.bos_token_id)
        fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=None, special_tokens=[bos]
        )
    return fast


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_SPECIAL = re.compile(
    r"<\|[\w ]+\|>|<\|\w+>|<\w+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_\w+>|<sop>|\[gMASK\]|"
    r"\[/?(?:INST|TOOL_\w+|AVAILABLE_TOOLS)\]|</s>"
)
_MARKERS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")

MISTRAL = (  # As Mistral-7B-Instruct-v0.3's, without tools.
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA_2 = (  # As Llama-2-7b-chat's.
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and system is defined %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}{{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
OTHERS = {"mistral_v0_3": MISTRAL, "llama_2": LLAMA_2}
"""Templates that TRL does not ship."""


@cache
def templates() -> dict[str, str]:
    """Every template that TRL ships, by name, and a few others. Read only."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(TEMPLATES.glob("*.jinja"))} | OTHERS


def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that has the markers of a template as tokens, as its models' tokenizers do."""
    template = templates()[name]
    specials = list(dict.fromkeys(["<s>", "</s>", *_SPECIAL.findall(template)]))
    make = metaspace_tokenizer if name in OTHERS else byte_tokenizer
    if name == "llama_2":
        specials = ["<s>", "</s>"]
    tokenizer = make(template, specials, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(sorted(set(_MARKERS.findall(template)) - set(specials)))
    return tokenizer


def metaspace_tokenizer(template: str | None, specials: list[str], **kwargs: Any) -> PreTrainedTokenizerFast:
    """Characters and a few words, a blank being part of the word after it, as Llama 2's and Mistral's tokenizers."""
    words = ["\u2581", "\u2581g", "\u2581gu", "\u2581l", "\u2581h"]
    merges = [("\u2581", "g"), ("\u2581g", "u"), ("\u2581", "l"), ("\u2581", "h")]
    vocab = {text: i for i, text in enumerate(["<unk>", *words, *map(chr, range(33, 127)), "\n", "\u00fc", "\u00ef"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return _finish(tokenizer, template, specials, **kwargs)


@dataclass(frozen=True)
class Family:
    """A model family's template with its special tokens."""

    template: str
    end_of_turn: str
    specials: list[str]
    bos: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    opened: str = ""
    """What the generation prompt has already written of an answer."""
    answers: tuple[str, ...] = ("guess 2", "guess 3", "guess 1")
    """In the form that the template itself writes."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        names = {"bos_token": self.bos, "eos_token": "<|endoftext|>"}
        specials = [*self.specials, self.end_of_turn, "<|endoftext|>"]
        return byte_tokenizer(trl_template(self.template), specials, **names)


CHATML = ["<|im_start|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
BAR = "\uff5c"  # DeepSeek's vertical line.
DEEPSEEK = ["<bos>", f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"]
THOUGHTS = tuple(f"<think>\nthe {name} half\n</think>\n\nguess {name}" for name in ("lower", "other", "last"))

FAMILIES = {
    "qwen2_5": Family("qwen2_5", "<|im_end|>", CHATML),
    "qwen3_instruct_2507": Family("qwen3_instruct_2507", "<|im_end|>", CHATML),
    "qwen3_training": Family("qwen3_training", "<|im_end|>", CHATML, answers=THOUGHTS),
    "qwen3_training, no thinking": Family("qwen3_training", "<|im_end|>", CHATML, kwargs={"enable_thinking": False}),
    "llama3": Family("llama3", "<|eot_id|>", LLAMA, "<|begin_of_text|>"),
    "llama3_2": Family("llama3_2", "<|eot_id|>", LLAMA, "<|begin_of_text|>"),
    "gemma": Family("gemma", "<end_of_turn>", ["<bos>", "<start_of_turn>"], "<bos>"),
    "gemma3": Family("gemma3", "<end_of_turn>", ["<bos>", "<start_of_turn>"], "<bos>"),
    "phi3": Family("phi3", "<|end|>", ["<|user|>", "<|assistant|>", "<|system|>"]),
    "cohere": Family("cohere", "<|END_OF_TURN_TOKEN|>", ["<bos>", "<|START_OF_TURN_TOKEN|>"], "<bos>"),
    "deepseek_r1_distill_training": Family(
        "deepseek_r1_distill_training",
        f"<{BAR}end▁of▁sentence{BAR}>",
        DEEPSEEK,
        "<bos>",
        opened="<think>\n",
        answers=THOUGHTS,
    ),
}
"""Templates that keep earlier turns."""
