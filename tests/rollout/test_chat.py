"""Chat renderer: exact ids over three turns, agreement with the whole rendering, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from chat_templates import CHATML, FAMILIES, LLAMA, Family, byte_tokenizer, trl_template, word_tokenizer
from transformers import PreTrainedTokenizerFast

from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.types import Message

PROMPT = [{"role": "user", "content": "guess"}]
OBSERVATIONS: list[str] = ["higher", "lower", "done"]


def ids(tokenizer: PreTrainedTokenizerFast, layout: str) -> list[int]:
    """The ids of a drawn layout: tokens between spaces, ↵ for a newline."""
    vocab = tokenizer.get_vocab()
    return [vocab["\n" if token == "↵" else token] for token in layout.split()]


def play(
    renderer: ChatRenderer, prompt: Any, answers: list[list[int]], observations: list[Any] = OBSERVATIONS
) -> list[list[int]]:
    """The pieces of a conversation: prompt, answer, observation, answer, observation, ..."""
    pieces = [renderer.first(prompt)]
    for answer, observation in zip(answers, observations, strict=True):
        pieces += [answer, renderer.delimited(observation, answer[-1])]
    return pieces


def test_chatml_ids_over_three_turns() -> None:
    """Terminated, cut by length, ended by another EOS token: what each leaves to its turn delimiters.

    | prompt ... assistant ↵ | 1 <|im_end|>  |            ↵ <|im_start|> user ↵ higher <|im_end|> ↵ <|im_start|> ...
                             | 2             | <|im_end|> ↵ <|im_start|> user ↵ lower ...
                             | 3 <|endoftext|> | <|im_end|> ↵ <|im_start|> user ↵ done ...
    """
    tokenizer = word_tokenizer(
        trl_template("qwen3_instruct_2507"), ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], eos_token="<|im_end|>"
    )
    answers = [ids(tokenizer, layout) for layout in ("1 <|im_end|>", "2", "3 <|endoftext|>")]
    expected = [
        "<|im_start|> user ↵ guess <|im_end|> ↵ <|im_start|> assistant ↵",
        "1 <|im_end|>",
        "↵ <|im_start|> user ↵ higher <|im_end|> ↵ <|im_start|> assistant ↵",
        "2",
        "<|im_end|> ↵ <|im_start|> user ↵ lower <|im_end|> ↵ <|im_start|> assistant ↵",
        "3 <|endoftext|>",
        "<|im_end|> ↵ <|im_start|> user ↵ done <|im_end|> ↵ <|im_start|> assistant ↵",
    ]
    assert play(ChatRenderer(tokenizer), PROMPT, answers) == [ids(tokenizer, layout) for layout in expected]


def test_llama3_ids_over_three_turns() -> None:
    """BOS once; no newline after the terminator; the template trims the observation.

    | <|begin_of_text|> <|start_header_id|> user ... | 1 <|eot_id|> |            <|start_header_id|> user ... higher ...
                                                     | 2            | <|eot_id|> <|start_header_id|> user ... lower ...
    """
    tokenizer = word_tokenizer(
        trl_template("llama3"), [*LLAMA, "<|eot_id|>"], bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    )
    answers = [ids(tokenizer, layout) for layout in ("1 <|eot_id|>", "2", "3 <|eot_id|>")]
    header = "<|start_header_id|> {} <|end_header_id|> ↵ ↵"
    user, assistant = header.format("user"), header.format("assistant")
    expected = [
        f"<|begin_of_text|> {user} guess <|eot_id|> {assistant}",
        "1 <|eot_id|>",
        f"{user} higher <|eot_id|> {assistant}",
        "2",
        f"<|eot_id|> {user} lower <|eot_id|> {assistant}",
        "3 <|eot_id|>",
        f"{user} done <|eot_id|> {assistant}",
    ]
    pieces = play(ChatRenderer(tokenizer), PROMPT, answers, ["\n higher\n\n", "lower\n", " done"])
    assert pieces == [ids(tokenizer, layout) for layout in expected]


def test_gemma_ids_over_three_turns() -> None:
    """The model's role is called ``model``; the end-of-turn token is not the tokenizer's EOS.

    | <bos> <start_of_turn> user ... | 1 <end_of_turn> | ↵ <start_of_turn> user ↵ higher <end_of_turn> ↵ ... model ↵
                                     | 2 <eos>         | <end_of_turn> ↵ <start_of_turn> user ↵ lower ...
    """
    specials = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = word_tokenizer(trl_template("gemma"), specials, bos_token="<bos>", eos_token="<eos>")
    answers = [ids(tokenizer, layout) for layout in ("1 <end_of_turn>", "2 <eos>", "3")]
    rest = "<end_of_turn> ↵ <start_of_turn> model ↵"
    expected = [
        f"<bos> <start_of_turn> user ↵ guess {rest}",
        "1 <end_of_turn>",
        f"↵ <start_of_turn> user ↵ higher {rest}",
        "2 <eos>",
        f"<end_of_turn> ↵ <start_of_turn> user ↵ lower {rest}",
        "3",
        f"<end_of_turn> ↵ <start_of_turn> user ↵ done {rest}",
    ]
    renderer = ChatRenderer(tokenizer)
    assert play(renderer, PROMPT, answers) == [ids(tokenizer, layout) for layout in expected]
    assert renderer.eos_token_ids == sorted(ids(tokenizer, "<eos> <end_of_turn>"))


def test_plain_ids_over_three_turns() -> None:
    """| guess | 1 | ↵ higher ↵ | 2 <eos> | ↵ lower ↵ | 3 | ↵ done ↵ |"""
    tokenizer = word_tokenizer(None, ["<eos>"], eos_token="<eos>")
    answers = [ids(tokenizer, layout) for layout in ("1", "2 <eos>", "3")]
    expected = ["guess", "1", "↵ higher ↵", "2 <eos>", "↵ lower ↵", "3", "↵ done ↵"]
    renderer = ChatRenderer(tokenizer)
    assert play(renderer, PROMPT, answers) == [ids(tokenizer, layout) for layout in expected]
    assert renderer.chat_template is None
    assert renderer.eos_token_ids == ids(tokenizer, "<eos>")
    messages: list[Message] = [{"role": "system", "content": "word"}, {"role": "user", "content": "guess"}]
    assert renderer.first(messages) == ids(tokenizer, "word ↵ guess")
    assert renderer.delimited(messages, 0) == ids(tokenizer, "↵ word ↵ guess ↵")


def test_plain_prompt_has_the_bos_that_the_tokenizer_adds() -> None:
    tokenizer = byte_tokenizer(None, ["<bos>"], bos_token="<bos>")
    renderer = ChatRenderer(tokenizer)
    assert renderer.first("guess") == tokenizer("guess")["input_ids"]
    assert renderer.first("guess")[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in renderer.delimited("higher", 0)
    assert renderer.eos_token_ids == []


@pytest.mark.parametrize("ending", ["stop", "length", "other eos"])
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_are_the_ids_of_the_whole_rendering(name: str, ending: str) -> None:
    """first + answers + delimited observations == the tokenized rendering of the conversation, however the answers ended."""
    family: Family = FAMILIES[name]
    tokenizer = family.tokenizer()
    renderer = ChatRenderer(tokenizer, chat_template_kwargs=family.kwargs)
    sampled = {"stop": family.end_of_turn, "length": "", "other eos": "<|endoftext|>"}[ending]
    answers = [
        tokenizer.encode(text.removeprefix(family.opened) + sampled, add_special_tokens=False)
        for text in family.answers
    ]
    observations = ["higher, b", "lower:\nlook:\n\nbelow", "done (ünï)"]

    conversation: list[Message] = list(PROMPT)
    for text, observation in zip(family.answers, observations, strict=True):
        kept = sampled if ending == "other eos" else ""
        conversation.append({"role": "assistant", "content": text + kept})
        conversation.append({"role": "user", "content": observation})
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **family.kwargs)
    whole = tokenizer.encode(rendered, add_special_tokens=False)

    pieces = play(renderer, PROMPT, answers, observations)
    assert [i for piece in pieces for i in piece] == whole
    bos = tokenizer.bos_token_id
    assert [piece.count(bos) for piece in pieces] == [1 if family.bos else 0] + [0] * 6


def test_a_token_that_swallows_whitespace_is_cut_with_it() -> None:
    """Phi-3's <|end|> takes the newline after it along, also when it was sampled."""
    family = FAMILIES["phi3"]
    tokenizer = family.tokenizer()
    end = ids(tokenizer, "<|end|>")[0]
    assert ChatRenderer(tokenizer).delimited("higher", end)[0] == ids(tokenizer, "<|user|>")[0]


def test_turns_without_an_end_stop_at_the_next_header() -> None:
    """GLM-like: what the model samples to stop is the header of the next turn, which is not repeated."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer = word_tokenizer(template, ["<|user|>", "<|assistant|>", "<eos>"], eos_token="<eos>")
    renderer = ChatRenderer(tokenizer)
    [user] = ids(tokenizer, "<|user|>")
    assert renderer.delimited("higher", user) == ids(tokenizer, "↵ higher <|assistant|> ↵")
    assert renderer.delimited("higher", ids(tokenizer, "1")[0]) == ids(tokenizer, "<|user|> ↵ higher <|assistant|> ↵")
    assert user in renderer.eos_token_ids


def test_a_terminator_may_be_an_ordinary_token_or_missing() -> None:
    """An EOS token that is not flagged special ends turns; a special token after the observation does not."""
    template = "{% for m in messages %}{{ m.content }} a {% if m.role == 'user' %}<gen>{% endif %}{% endfor %}"
    tokenizer = word_tokenizer(template, ["<gen>"])
    [ordinary, gen] = ids(tokenizer, "a <gen>")
    plain_end = ChatRenderer(tokenizer, eos_token_ids=[ordinary])
    assert plain_end.delimited("higher", ordinary) == ids(tokenizer, "higher a <gen>")
    no_end = ChatRenderer(tokenizer)
    assert no_end.eos_token_ids == []
    assert no_end.delimited("higher", gen) == ids(tokenizer, "a higher a <gen>")


def test_text_before_the_terminator_and_bos_before_each_turn() -> None:
    """Llama-2-like: something of the template before </s>, and a BOS of the template's own before every user turn."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>a {{ m.content }} b{% else %}{{ m.content }} \n</s>"
        "{% endif %}{% endfor %}"
    )
    tokenizer = word_tokenizer(template, ["<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    renderer = ChatRenderer(tokenizer)
    assert renderer.delimited("higher", ids(tokenizer, "</s>")[0]) == ids(tokenizer, "<s> a higher b")
    assert renderer.delimited("higher", ids(tokenizer, "1")[0]) == ids(tokenizer, "↵ </s> <s> a higher b")


def test_default_system_prompt_stays_in_the_prompt() -> None:
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    renderer = ChatRenderer(tokenizer)
    assert "You are Qwen" in tokenizer.decode(renderer.first("guess"))
    assert "You are Qwen" not in tokenizer.decode(renderer.delimited("higher", 0))


def test_tool_messages_use_the_templates_tool_format() -> None:
    family = FAMILIES["qwen3_instruct_2507"]
    tokenizer = family.tokenizer()
    end = ids(tokenizer, family.end_of_turn)[0]
    tools: list[Message] = [{"role": "tool", "name": "f", "content": text} for text in ("4", "5")]
    assert tokenizer.decode(ChatRenderer(tokenizer).delimited(tools, end)) == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_system_message_between_turns_where_the_template_has_one() -> None:
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    delimited = ChatRenderer(tokenizer).delimited([{"role": "system", "content": "be brief"}, *PROMPT], 0)
    assert tokenizer.decode(delimited) == (
        "<|im_end|>\n<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("name", "roles", "error"),
    [
        ("phi3", ["tool"], "does not write a message of role 'tool' after an answer"),
        ("deepseek_r1_distill_training", ["system", "user"], "does not write a message of role 'system'"),
        ("gemma", ["tool"], r"rejects a conversation with the roles \['user', 'assistant', 'tool'\]: .*alternate"),
        ("gemma", ["user", "user"], "rejects a conversation .*alternate"),
        ("qwen2_5", ["user", "assistant"], "'assistant' is the model's own role"),
    ],
)
def test_observations_that_a_template_cannot_write(name: str, roles: list[str], error: str) -> None:
    renderer = ChatRenderer(FAMILIES[name].tokenizer())
    with pytest.raises(ValueError, match=error):
        renderer.delimited([{"role": role, "content": "higher"} for role in roles], 0)


def test_prompt_must_not_end_with_the_model() -> None:
    renderer = ChatRenderer(FAMILIES["qwen2_5"].tokenizer())
    with pytest.raises(ValueError, match="ends with an assistant message"):
        renderer.first([*PROMPT, {"role": "assistant", "content": "1"}])


def test_a_gemma_prompt_with_a_system_message_is_a_clear_error() -> None:
    renderer = ChatRenderer(FAMILIES["gemma"].tokenizer())
    with pytest.raises(ValueError, match=r"rejects a conversation.*System role not supported"):
        renderer.first([{"role": "system", "content": "word"}, *PROMPT])


def test_decode_drops_the_terminator_and_special_tokens() -> None:
    tokenizer = byte_tokenizer(trl_template("qwen3_instruct_2507"), [*CHATML, "<|im_end|>"])
    tokenizer.add_tokens(["<stop>", "<think>"])  # Not special.
    renderer = ChatRenderer(tokenizer, eos_token_ids=[ids(tokenizer, "<stop>")[0]])
    for terminator in ("", "<stop>", "<|im_end|>"):
        encoded = tokenizer.encode(f" <think> guess , 1\n{terminator}", add_special_tokens=False)
        assert renderer.decode(encoded) == " <think> guess , 1\n"
    assert renderer.decode([]) == ""
    inside = tokenizer.encode("1<stop>2<|im_start|>3<stop>", add_special_tokens=False)
    assert renderer.decode(inside) == "1<stop>23"


def test_channels_are_part_of_an_answer() -> None:
    """gpt-oss: what tells the analysis from the final answer reaches the environment; other special tokens do not."""
    specials = "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|> <|endoftext|>".split()  # noqa: SIM905
    tokenizer = byte_tokenizer(trl_template("gptoss"), specials, eos_token="<|return|>")
    renderer = ChatRenderer(tokenizer, training_chat_template=True)
    text = "<|channel|>analysis<|message|>the lower half<|end|><|start|>assistant<|channel|>final<|message|>guess 2"
    answer = tokenizer.encode(text + "<|return|>", add_special_tokens=False)
    assert renderer.decode(answer) == text
    assert renderer.decode(tokenizer.encode("<|call|>a<|endoftext|>b", add_special_tokens=False)) == "ab"
    assert tokenizer.decode(renderer.delimited("higher", answer[-1])) == (
        "<|start|>user<|message|>higher<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_qwen3_is_refused_until_trls_training_template_is_used(kwargs: dict[str, Any]) -> None:
    """Qwen3 drops earlier thinking; without thinking, the empty block of its generation prompt is not in its history."""
    tokenizer = byte_tokenizer(trl_template("qwen3"), [*CHATML, "<|im_end|>"], eos_token="<|im_end|>")
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    with pytest.raises(ValueError) as caught:
        ChatRenderer(tokenizer, chat_template_kwargs=kwargs)
    text = str(caught.value)
    assert "'Qwen/Qwen3-0.6B' (in TRL: 'qwen3') rewrites earlier turns" in text
    assert "as it was" in text and r"assistant\n<think>\n" in text
    assert "rendered later" in text and r"assistant\n(answer)<|im_end|>" in text
    assert "Pass training_chat_template=True" in text and "chat_template_kwargs" not in text

    renderer = ChatRenderer(tokenizer, chat_template_kwargs=kwargs, training_chat_template=True)
    assert renderer.chat_template == trl_template("qwen3_training")
    assert tokenizer.chat_template == trl_template("qwen3")
    generation_prompt = "assistant\n<think>\n\n</think>\n\n" if kwargs else "assistant\n"
    assert str(tokenizer.decode(renderer.delimited("higher", tokenizer.eos_token_id))).endswith(generation_prompt)


@pytest.mark.parametrize("training_chat_template", [False, True])
def test_a_template_that_no_option_repairs(training_chat_template: bool) -> None:
    template = CHATML_TEMPLATE.replace("BODY", "m.content if loop.last else '...'")
    tokenizer = byte_tokenizer(template, [*CHATML, "<|im_end|>"])
    with pytest.raises(ValueError, match=r"(?s)rewrites earlier turns.*No option keeps them"):
        ChatRenderer(tokenizer, training_chat_template=training_chat_template)


def test_thinking_that_is_dropped_matters_only_to_a_model_that_thinks() -> None:
    """Gemma 4 drops its own kind of thinking (a channel) from earlier answers."""
    tokenizer = byte_tokenizer(trl_template("gemma4"), ["<bos>", "<|turn>", "<turn|>"], bos_token="<bos>")
    for thinks in ({}, {"enable_thinking": True}):
        with pytest.raises(ValueError, match=r"<\|channel>thought"):
            ChatRenderer(tokenizer, chat_template_kwargs=thinks)
        ChatRenderer(tokenizer, chat_template_kwargs=thinks, training_chat_template=True)
    renderer = ChatRenderer(tokenizer, chat_template_kwargs={"enable_thinking": False})
    end = ids(tokenizer, "<turn|>")[0]
    assert tokenizer.decode(renderer.delimited("higher", end)) == "\n<|turn>user\nhigher<turn|>\n<|turn>model\n"


def test_thinking_that_the_history_reads_from_a_field_alone_is_refused() -> None:
    """Qwen3.8 writes an empty block before an answer whose content holds its thinking; our version reads it there."""
    tokenizer = byte_tokenizer(trl_template("qwen3_8"), [*CHATML, "<|im_end|>"])
    with pytest.raises(ValueError, match=r"'qwen3_8'(?s:.*)<think>\\n\\n</think>\\n\\n<think>\\n\(thinking\)"):
        ChatRenderer(tokenizer)
    kept = ChatRenderer(tokenizer, training_chat_template=True).chat_template
    answer = {"content": "<think>\nthe lower half\n</think>\n\nguess 2"}
    parsed = {"reasoning_content": "the lower half", "content": "guess 2"}
    as_text, as_fields = (
        tokenizer.apply_chat_template([*PROMPT, {"role": "assistant", **m}], chat_template=kept, tokenize=False)
        for m in (answer, parsed)
    )
    assert as_text == as_fields and as_text.endswith(answer["content"] + "<|im_end|>\n")


CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ BODY }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("m.content", False),
        (
            "m.content if loop.index0 > messages|length - 4 else m.content|upper",
            True,
        ),  # Only long conversations change.
        ("m.content if loop.last else '...'", True),
        ("m.content ~ (' /hint' if loop.last else '')", True),
        ("(messages|length ~ '|' if loop.first else '') ~ m.content", True),
        ("m.content.split('</think>')[-1]", True),
        ("m.content if loop.index0 > messages|length - 4 else m.content.split('</think>')[-1]", True),
        ("(m.content if m.role == 'user' else '> ' ~ m.content)", True),
        ("('[Round ' ~ loop.index ~ '] ' if m.role == 'user' else '') ~ m.content", True),  # As ChatGLM's.
    ],
)
def test_rewriting_is_found_wherever_it_happens(body: str, refused: bool) -> None:
    tokenizer = byte_tokenizer(CHATML_TEMPLATE.replace("BODY", body), [*CHATML, "<|im_end|>"])
    if not refused:
        ChatRenderer(tokenizer)
        return
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        ChatRenderer(tokenizer)


def test_a_system_message_that_wanders_is_found_with_the_prompt_that_has_one() -> None:
    """Mistral-like: the system message is written into the *last* user message."""
    template = (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{% if loop.last and system %}{{ system }}\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template, ["[INST]", "[/INST]", "</s>"], eos_token="</s>")
    renderer = ChatRenderer(tokenizer)
    assert tokenizer.decode(renderer.first(PROMPT)) == "[INST]guess[/INST]"
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?s)rewrites earlier turns.*prompt of the roles \['system', 'user'\]"):
            renderer.first([{"role": "system", "content": "word"}, *PROMPT])


def test_a_template_given_by_hand_replaces_the_tokenizers() -> None:
    tokenizer = byte_tokenizer(trl_template("qwen3"), [*CHATML, "<|im_end|>"])
    template = trl_template("qwen3_instruct_2507")
    assert ChatRenderer(tokenizer, chat_template=template).chat_template == template
    bare = byte_tokenizer(None, [*CHATML, "<|im_end|>"])
    with pytest.raises(ValueError, match="training_chat_template=True"):
        ChatRenderer(bare, chat_template=trl_template("qwen3"))
    repaired = ChatRenderer(bare, chat_template=trl_template("qwen3"), training_chat_template=True)
    assert repaired.chat_template == trl_template("qwen3_training")
    assert bare.chat_template is None


def test_templates_that_want_content_parts_get_them() -> None:
    tokenizer = byte_tokenizer(trl_template("llava_next"), ["</s>"])
    renderer = ChatRenderer(tokenizer)
    assert tokenizer.decode(renderer.first("guess")) == "[INST] guess [/INST]"
    assert tokenizer.decode(renderer.delimited("higher", 0)) == "</s> [INST] higher [/INST]"


@pytest.mark.parametrize(
    "kwargs", [{"training_chat_template": True}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_template_arguments_need_a_template(kwargs: dict[str, Any]) -> None:
    bare = word_tokenizer(None, [])
    with pytest.raises(ValueError, match="has none"):
        ChatRenderer(bare, **kwargs)


def test_one_rendering_and_one_tokenizer_call_per_observation() -> None:
    """Observations are rendered B x K times a rollout; what is constant is made once."""
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    renderer = ChatRenderer(tokenizer)
    with (
        mock.patch.object(tokenizer, "encode", wraps=tokenizer.encode) as encode,
        mock.patch.object(tokenizer, "apply_chat_template", wraps=tokenizer.apply_chat_template) as render,
    ):
        renderer.delimited("higher", 0)
    assert (render.call_count, encode.call_count) == (1, 1)
