"""Small tokenizers, made in code, for real and for hand-written chat templates."""

from __future__ import annotations

from dataclasses import dataclass, field
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
