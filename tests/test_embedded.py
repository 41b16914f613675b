"""The embedded model and tokenizer: what the demo and every other test stand on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl.chat_template_utils import is_chat_template_prefix_preserving

from agile_trainers.embedded import (
    END_OF_TEXT,
    END_OF_TURN,
    SAMPLE_TEXTS,
    make_embedded_model,
    make_tokenizer,
    texts_of,
)

TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "a\n\n\tb \n",
    "héllo, wörld",
    "日本語 🙂",
    "0 7 12 100 123456",
    "x=-3.5e7;",
    "<b>&amp;</b>",
]
GAME = [
    {"role": "system", "content": "Guess."},
    {"role": "user", "content": "Guess the number between 1 and 12."},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "11"},
]


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path):
    return AutoTokenizer.from_pretrained(embedded_model)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_a_round_trip(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_number_is_one_token_wherever_it_stands(tokenizer) -> None:
    ids = [tokenizer.encode(str(number)) for number in range(100)]
    assert all(len(token) == 1 for token in ids) and len({token[0] for token in ids}) == 100
    for frame in ("{}", " {}", "x{}", "\n{}", "(12, {})"):
        assert all(tokenizer.encode(frame.format(n)).count(ids[n][0]) == 1 for n in range(100) if n != 12)


def test_numbers_stay_single_tokens_when_texts_fill_the_vocabulary() -> None:
    tokenizer = make_tokenizer([f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(400)], vocab_size=360)
    assert len(tokenizer) == 360
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(100))


def test_words_of_the_texts_become_single_tokens() -> None:
    tokenizer = make_tokenizer(["Minesweeper reveals flags"])
    assert len(tokenizer.encode("Minesweeper reveals flags")) == 3
    assert len(make_tokenizer().encode("Minesweeper reveals flags")) > 6


def test_observation_and_answer_are_tokenized_apart_whatever_the_texts_held() -> None:
    """An answer's ids must not depend on what stands before it, nor numbers on which numbers were seen."""
    tokenizer = make_tokenizer(["assistant\n\nassistant\n\n2048 2048\n\n7\n\n"] * 10)
    for answer in ("\n\n", "\nassistant", " 7", "2048", "7 2048"):
        assert tokenizer.encode(f"assistant\n{answer}") == tokenizer.encode("assistant\n") + tokenizer.encode(answer)
    assert tokenizer.encode("2048") == tokenizer.encode("20") + tokenizer.encode("48")


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=300 is too small.*349"):
        make_tokenizer(vocab_size=300)


def test_padding_is_not_the_terminator(tokenizer) -> None:
    assert (tokenizer.pad_token, tokenizer.eos_token) == (END_OF_TEXT, END_OF_TURN)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_template_is_chatml(tokenizer) -> None:
    assert tokenizer.apply_chat_template(GAME[:3], tokenize=False) == (
        "<|im_start|>system\nGuess.<|im_end|>\n<|im_start|>user\nGuess the number between 1 and 12.<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(GAME[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("12.<|im_end|>\n<|im_start|>assistant\n")


def test_supervised_tokens_are_what_a_rollout_samples(tokenizer) -> None:
    """Prompt, sampled answer, observation, sampled answer: pieced together, they are the ids and the mask SFT trains on."""
    rendered = tokenizer.apply_chat_template(GAME, return_dict=True, return_assistant_tokens_mask=True)
    newline = tokenizer.encode("\n")
    ids, mask = [], []
    for end in (2, 4):
        prompt = tokenizer.apply_chat_template(GAME[:end], add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer.encode(GAME[end]["content"]), tokenizer.eos_token_id]
        assert prompt[: len(ids)] == ids, "the template rewrites earlier turns"
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
        ids = prompt + answer
    assert rendered["input_ids"] == ids + newline
    assert rendered["assistant_masks"] == [*mask, 0]
    assert is_chat_template_prefix_preserving(tokenizer)


def test_folder_loads_as_any_other(embedded_model: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_model)
    config = model.config
    assert (config.model_type, config.head_dim, config.tie_word_embeddings) == ("qwen3", 32, False)
    assert config.vocab_size == len(tokenizer)
    generation = GenerationConfig.from_pretrained(embedded_model)
    assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    prompt = tokenizer.apply_chat_template(GAME[:2], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.generate(**prompt, max_new_tokens=3).shape[1] <= prompt["input_ids"].shape[1] + 3


def test_weights_depend_on_the_seed_alone(tmp_path: Path, two_layers: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    again = make_embedded_model(tmp_path / "again", texts=SAMPLE_TEXTS)
    other = make_embedded_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.rand(1), expected), "making a model moved the global random state"
    first, same, different = (
        AutoModelForCausalLM.from_pretrained(folder).lm_head.weight for folder in (two_layers, again, other)
    )
    assert torch.equal(first, same) and not torch.equal(first, different)
    assert abs(first.std().item() - 0.1) < 0.01


def test_texts_of_conversations_hold_their_tools_and_calls() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "fox"}}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    written = '<tool_call>\n{"name": "look", "arguments": {"at": "fox"}}\n</tool_call><|im_end|>'
    for tools in ([tool], json.dumps([tool])):
        (text,) = texts_of([{"messages": messages, "tools": tools}])
        assert (
            text.startswith(f"<|im_start|>system\nTools\n{json.dumps(tool['function'])}<|im_end|>") and written in text
        )
    assert not any(
        "Tools" in text for text in texts_of([{"messages": messages}, {"messages": messages, "tools": None}])
    )
