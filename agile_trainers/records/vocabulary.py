"""Lists the bytes that each token of a tokenizer stands for, so that a character split over tokens can be shown."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def pieces(tokenizer: Any) -> list[tuple[int, bytes, bool]]:
    """Return the id, the bytes and whether it is special of every token.

    Byte-level tokenizers (GPT-2, Qwen, Llama 3) and those with byte tokens (``<0xE3>``, SentencePiece) give the bytes
    themselves; of others, the decoded text of each token is encoded.

    Args:
        tokenizer: A tokenizer of transformers.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # late, so that reading records is quick

    ids = sorted(set(tokenizer.get_vocab().values()))
    added = {index: str(token.content) for index, token in tokenizer.added_tokens_decoder.items()}
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"])
    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
    found = []
    for index, token in zip(ids, tokenizer.convert_ids_to_tokens(ids)):
        if index in added:
            piece = added[index].encode("utf-8", "replace")
        elif '"ByteLevel"' in decoder and set(token) <= alphabet.keys():
            piece = bytes(alphabet[letter] for letter in token)
        elif (byte := _BYTE.fullmatch(token)) is not None:
            piece = bytes([int(byte[1], 16)])
        elif "▁" in decoder:
            piece = token.replace("▁", " ").encode("utf-8", "replace")
        else:
            piece = tokenizer.decode([index]).encode("utf-8", "replace")
        found.append((index, piece, index in special))
    return found
