"""Builds a tiny chat model and its tokenizer in a second, the default of the demo and the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from trl import SFTTrainer

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
HEAD_DIM = 32
"""The smallest head dimension that vLLM serves on CPU."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools' }}{% for tool in tools %}"
    "{{ '\n' + tool['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% for call in message.get('tool_calls') or () %}"
    "{{ '<tool_call>\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson"
    " + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with tools. The generation markers enclose what a rollout samples: the answer and its end-of-turn token."""

SAMPLE_TEXTS = (
    "Guess the number between 1 and 12. You have 4 guesses. Answer with one number.",
    "higher lower correct invalid too high too low yes no left right up down wall goal",
    "You won. You lost. The secret was 7. Try again. Remember this number. What was it?",
)
_ROLES = "system\nuser\nassistant\n" * 1000  # often enough to become single tokens with any texts
_SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
_LONG_NUMBERS = tuple(str(number) for number in range(10, 100))  # the digits are bytes

# A newline and a number of one or two digits are always separate pieces, so that an answer is tokenized the same way in
# every position; other words keep the space before them.
_PIECES = r" ?\p{L}+|\d{1,2}| ?[^\s\p{L}\d]+|\n|[^\S\n]+(?!\S)|[^\S\n]"


def make_tokenizer(texts: Iterable[str] | None = None, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer with ChatML special tokens and a chat template.

    Any text survives ``decode(encode(text))``. Each of the numbers 0 to 99 is one token in every position. The padding
    token (``<|endoftext|>``) differs from the end-of-turn token (``<|im_end|>``), which is the EOS token.

    Args:
        texts: Text to learn words from; words seen here become single tokens, most frequent first, as far as
            ``vocab_size`` allows. Default: ``SAMPLE_TEXTS``.
        vocab_size: Upper limit on the number of tokens, special tokens and the 256 bytes included. Small texts give
            fewer.

    Raises:
        ValueError: If ``vocab_size`` is too small for the bytes, the numbers and the special tokens.
    """
    required = 256 + len(_LONG_NUMBERS) + len(_SPECIAL_TOKENS)
    if vocab_size < required:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes, the numbers 10 to 99 and "
            f"{len(_SPECIAL_TOKENS)} special tokens need {required}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_LONG_NUMBERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(_SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*(SAMPLE_TEXTS if texts is None else texts), _ROLES], trainer)
    tokenizer.model = _with_numbers(tokenizer)
    return _with_chat(tokenizer)


def _with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _with_numbers(tokenizer: Tokenizer) -> models.BPE:
    """Return the tokenizer's model with a token added for each number."""
    model = json.loads(tokenizer.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    for number in _LONG_NUMBERS:
        if number not in vocab:
            vocab[number] = len(vocab)
            merges.append((number[0], number[1]))
    return models.BPE(vocab=vocab, merges=merges)


def make_word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the given words, for very small tasks.

    Words are separated by single spaces, in ``decode`` too. Special tokens and chat template are those of
    :func:`make_tokenizer`; a newline and the roles ``user`` and ``assistant`` are tokens, so that ChatML can be written.
    Text with any other word cannot be encoded: the tokenizers library raises "Missing [UNK] token".

    Args:
        words: Words without spaces or newlines; duplicates count once.
    """
    vocab = {token: i for i, token in enumerate(dict.fromkeys((*_SPECIAL_TOKENS, "\n", "user", "assistant", *words)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior="removed"), pre_tokenizers.Split("\n", behavior="isolated")]
    )
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return _with_chat(tokenizer)


def make_embedded_model(
    path: str | Path,
    *,
    texts: Iterable[str] | None = None,
    words: Iterable[str] | None = None,
    vocab_size: int = 1024,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 128,
    max_position_embeddings: int = 4096,
    seed: int = 0,
) -> Path:
    """Make an untrained Qwen3 of about 200 thousand parameters and save it as a Hugging Face folder.

    ``AutoModelForCausalLM``, ``AutoTokenizer`` and vLLM (on CPU too) load the folder. The untrained model answers at
    random.

    Args:
        path: Folder to write; created if missing.
        texts: Text that the tokenizer learns words from, see :func:`make_tokenizer`.
        words: Use :func:`make_word_tokenizer` with these words instead; ``texts`` and ``vocab_size`` are then ignored.
        vocab_size: Upper limit on the number of tokens.
        hidden_size: Width of the residual stream.
        num_layers: Number of decoder layers.
        num_heads: Number of attention heads (and of key-value heads), each ``HEAD_DIM`` wide.
        intermediate_size: Width of the feed-forward layers.
        max_position_embeddings: Longest conversation, in tokens.
        seed: Seed of the weights. The process's random state does not change.

    Returns:
        ``path``.
    """
    path = Path(path)
    tokenizer = make_tokenizer(texts, vocab_size) if words is None else make_word_tokenizer(words)
    tokenizer.model_max_length = max_position_embeddings
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=HEAD_DIM,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False,
        initializer_range=0.1,  # the usual 0.02 suits wide models; this model would start too flat to learn quickly
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def words_of(rows: Iterable[dict[str, Any]], *more: str) -> list[str]:
    """Collect the words of conversations, ``more`` words, and ``[UNK]`` for others, for :func:`make_embedded_model`."""
    said = {word for row in rows for message in row["messages"] for word in message["content"].split()}
    return sorted({*said, *more, "[UNK]"})


def texts_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Write conversations as an embedded model sees them, tools included, for :func:`make_embedded_model`.

    Args:
        rows: ``{"messages": [...]}``, with ``tools`` (a list, its JSON, or None) or without.
    """
    template = make_tokenizer()

    def written(row: dict[str, Any]) -> str:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        text: str = template.apply_chat_template(row["messages"], tools=tools, tokenize=False)
        return text

    return list(map(written, rows))


def sft_trainer(
    model: str | Path, rows: list[dict[str, Any]], output_dir: str | Path, *, seed: int = 0, **options: Any
) -> SFTTrainer:
    """Build TRL's ``SFTTrainer`` that teaches an embedded model a format before reinforcement learning, on CPU.

    Args:
        model: Folder of the model.
        rows: Conversations, ``{"messages": [...]}``; the loss is on the answers.
        output_dir: Folder that ``trainer.save_model()`` writes to.
        seed: Seed of the order of the rows.
        options: Further options of ``SFTConfig``, at least the length of training.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # takes seconds to import; making the model does not need it

    defaults = {
        "per_device_train_batch_size": 32, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "logging_steps": 10,
    }  # fmt: skip
    on_cpu = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    args = SFTConfig(
        output_dir=str(output_dir), assistant_only_loss=True, seed=seed, **{**defaults, **on_cpu, **options}
    )
    return SFTTrainer(model=str(model), args=args, train_dataset=Dataset.from_list(rows))
