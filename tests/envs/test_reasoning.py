"""Environments over rows of question and answer: prompts, rewards, splits, and data for the earlier stages."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from agile_trainers.envs import check_environment
from agile_trainers.envs.questions.environment import ReasoningEnvironment
from agile_trainers.envs.questions.rows import GeneratedRows, Row, load_rows, split_of

CAPITALS = [
    {"question": f"Capital of country {n}?", "answer": f"city {n}", "hint": f"it is near {n}"} for n in range(40)
]


def make(data: Any = CAPITALS, **kwargs: Any) -> ReasoningEnvironment:
    return ReasoningEnvironment(data, **kwargs)


def questions(environment: ReasoningEnvironment, split: str) -> list[str]:
    assert environment.rows is not None
    return [environment.row(split, i)["question"] for i in range(environment.rows.count(split) or 0)]


# ------------------------------------------------------------------------------------------------------------ prompts


def test_one_episode_by_hand() -> None:
    environment = make([{"question": "2 + 2?", "answer": 4}], test_fraction=1e-9)
    assert environment.reset(seed=5) == ("2 + 2?", {"split": "train", "row": 0})
    assert environment.step("4") == ("correct", 1.0, True, False, {"success": True, "answer": 4})
    assert environment.step("<answer>4.0</answer>")[1] == 1.0
    assert environment.step("5") == ("wrong, the answer is 4", 0.0, True, False, {"success": False, "answer": 4})


def test_template_system_prompt_and_worked_examples() -> None:
    environment = make(
        template="Q: {question} ({hint}) {{braces}}",
        system_prompt="Be {brief}.",
        few_shot=[CAPITALS[7], CAPITALS[0]],
        demonstration="<answer>{answer}</answer>",
    )
    messages, _ = environment.reset(options=CAPITALS[7])
    assert messages == [
        {"role": "system", "content": "Be {brief}."},
        {"role": "user", "content": "Q: Capital of country 0? (it is near 0) {braces}"},
        {"role": "assistant", "content": "<answer>city 0</answer>"},
        {"role": "user", "content": "Q: Capital of country 7? (it is near 7) {braces}"},
    ], "the question itself must not be among the examples"


def test_a_conversation_template_and_examples_counted_from_the_training_split() -> None:
    template = [{"role": "system", "content": "Near: {hint}"}, {"role": "user", "content": "{question}"}]
    environment = make(template=template, few_shot=2, split="test")
    shots = [environment.row("train", index) for index in range(2)]
    messages, info = environment.reset(seed=0)
    assert [m["content"] for m in messages[1:5]] == [t for s in shots for t in (s["question"], s["answer"])]
    row = environment.row("test", info["row"])
    assert messages[0]["content"] == f"Near: {row['hint']}" and messages[-1]["content"] == row["question"]


# ------------------------------------------------------------------------------------------------------------- rewards


CONVERSATION = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello {name}."}, {"role": "user", "content": "Capital of country 7?"},
]  # fmt: skip


def test_a_question_in_another_column_needs_no_template() -> None:
    environment = ReasoningEnvironment(question="prompt", answer="solution")
    assert environment.reset(options={"prompt": "2 + 2?", "solution": "4"})[0] == "2 + 2?"


def test_messages_of_parts_and_of_calls_stay_messages() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]
    environment = ReasoningEnvironment(question="prompt", answer="solution")
    assert environment.reset(options={"prompt": parts, "solution": "4"})[0] == parts
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = environment.reset(options={"prompt": [*CONVERSATION[:2], called, CONVERSATION[3]], "solution": "4"})[0]
    assert messages[2] == {**called, "content": ""}


def test_a_question_of_messages_is_shown_as_messages() -> None:
    """A system message stays the first one, examples come after it, and the reward function gets the last user's text."""
    asked: list[str] = []
    shot = {"prompt": [CONVERSATION[0], {"role": "user", "content": "Capital of country 0?"}], "solution": "city 0"}
    environment = ReasoningEnvironment(
        question="prompt", answer="solution", few_shot=[shot],
        reward_fn=lambda completion, answer, question: asked.append(question) or 1.0,  # type: ignore[func-returns-value]
    )  # fmt: skip
    row = Dataset.from_list([{"prompt": CONVERSATION, "solution": "city 7"}])[0]
    messages, _ = environment.reset(options=row)
    example = [shot["prompt"][1], {"role": "assistant", "content": "city 0"}]  # type: ignore[index]
    assert messages == [CONVERSATION[0], *example, *CONVERSATION[1:]]
    environment.step("city 7")
    assert asked == ["Capital of country 7?"]
    single = ReasoningEnvironment(question="prompt", answer="solution", template="{prompt}")
    assert single.reset(options={"prompt": CONVERSATION[3:], "solution": "city 7"})[0] == "Capital of country 7?"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"system_prompt": "Be long."}, ["'prompt' has a system message", "keep one of the two"]),
        ({"template": "Q: {prompt}"}, ["'prompt' holds messages", "'Q: {prompt}'"]),
    ],
)
def test_messages_that_fit_nowhere_are_refused(kwargs: dict[str, Any], words: list[str]) -> None:
    environment = ReasoningEnvironment(question="prompt", answer="solution", **kwargs)
    with pytest.raises(ValueError) as error:
        environment.reset(options={"prompt": CONVERSATION, "solution": "city 7"})
    assert all(word in str(error.value) for word in words), error.value


def test_a_reward_function_gets_completion_answer_and_question() -> None:
    seen: list[Any] = []

    def reward(completion: str, answer: Any, question: str) -> float:
        seen.append((completion, answer, question))
        return 0.7

    environment = make(reward_fn=reward, success_reward=0.7)
    environment.reset(options=CAPITALS[3])
    assert environment.step("hm")[1:] == (0.7, True, False, {"success": True, "answer": "city 3"})
    assert seen == [("hm", "city 3", "Capital of country 3?")]


def test_a_reward_that_is_no_finite_number_is_found_before_a_run() -> None:
    assert "expected a finite number" in check_environment(lambda: make(reward_fn=lambda *_: float("nan"))).errors[0]


# -------------------------------------------------------------------------------------------------------------- splits


def test_the_split_of_a_question_is_its_own_and_shares_are_kept() -> None:
    texts = [f"question {n}" for n in range(20_000)]
    share = sum(split_of(text, 0.1) == "test" for text in texts) / len(texts)
    assert share == pytest.approx(0.1, abs=0.01)
    assert split_of("what  is\n1?", 0.5) == split_of("what is 1?", 0.5), "spacing is no other question"
    # A larger test split only takes from training: what was held out stays so.
    assert all(split_of(text, 0.3) == "test" for text in texts if split_of(text, 0.1) == "test")


def test_a_single_table_is_split_by_question_whatever_is_repeated() -> None:
    rows = [CAPITALS[n] for n in (*range(40), *range(40))]
    random.Random(0).shuffle(rows)
    environment = make(rows, test_fraction=0.3)
    train, test = questions(environment, "train"), questions(environment, "test")
    assert len(train) + len(test) == 80 and test and not set(train) & set(test)


def test_named_splits_are_kept_and_their_questions_taken_out_of_training() -> None:
    tables = DatasetDict(
        train=Dataset.from_list(CAPITALS[:20]),
        validation=Dataset.from_list([{**row, "question": row["question"] + "\n"} for row in CAPITALS[15:25]]),
        test=Dataset.from_list(CAPITALS[30:]),
    )
    environment = make(tables)
    assert questions(environment, "train") == [row["question"] for row in CAPITALS[:15]]
    assert questions(environment, "validation") == [row["question"] + "\n" for row in CAPITALS[15:25]]
    assert questions(environment, "test") == [row["question"] for row in CAPITALS[30:]]


def test_seeds_stay_inside_their_split_and_options_choose_another() -> None:
    train, test = make(), make(split="test")
    expected = {split: set(questions(train, split)) for split in ("train", "test")}
    for split, environment in (("train", train), ("test", test)):
        count = len(expected[split])
        asked = [environment.reset(seed=seed)[0] for seed in range(1000, 1000 + count)]
        assert set(asked) == expected[split], "as many seeds in a row as there are rows hold every row once"
        assert environment.reset(seed=2**31 - 1) == environment.reset(seed=2**31 - 1)
        assert environment.reset()[0] in expected[split]
    assert train.reset(seed=1, options={"split": "test", "row": None})[0] in expected["test"]
    pointers = train.dataset("test")
    assert {train.reset(seed=9, options=row)[0] for row in pointers} == expected["test"]
    assert len(train.dataset("train", 5)) == 5


def test_generated_rows_never_mix_and_are_the_same_each_time() -> None:
    def generate(rng: random.Random) -> Row:
        return {"question": f"{rng.randrange(30)} + 1?", "answer": "?"}

    first, second = GeneratedRows(generate, test_fraction=0.3), GeneratedRows(generate, test_fraction=0.3)
    asked = {split: [first.row(split, index)["question"] for index in range(300)] for split in first.splits}
    assert not set(asked["train"]) & set(asked["test"]) and len(set(asked["train"])) + len(set(asked["test"])) == 30
    assert all(asked[split] == [second.row(split, index)["question"] for index in range(300)] for split in first.splits)
    environment = make(generate)
    assert environment.rows is not None and environment.rows.count("train") is None
    assert environment.reset(seed=12)[1] == {"split": "train", "row": 12}
    with pytest.raises(ValueError, match="pass a count"):
        environment.dataset("test")
    with pytest.raises(ValueError, match="too few different questions"):
        GeneratedRows(lambda rng: {"question": "always this"}, test_fraction=1e-6).row("test", 0)


def test_rows_may_come_from_the_trainer_alone() -> None:
    environment = make(None)
    assert environment.reset(seed=1, options={**CAPITALS[4], "extra": None})[0] == "Capital of country 4?"
    assert environment.step("city 4")[1] == 1.0
    with pytest.raises(ValueError, match=r"without data.*'question'"):
        environment.reset(seed=1)
    with pytest.raises(ValueError, match="no column 'answer'"):
        environment.reset(options={"question": "who?"})
    for row, words in (
        (
            {"prompt": "a", "solution": "b"},
            r"columns are: prompt, solution\. .*Environment\(question='...', answer='...'\)",
        ),
        ({"question": "who?", "answer": None}, "column 'answer' for the answer is empty in this row"),
        ({"question": None, "answer": "me"}, "column 'question' of the question is empty in this row"),
    ):
        with pytest.raises(ValueError, match=words):
            environment.reset(seed=1, options=row)


def test_a_column_may_have_a_dot() -> None:
    environment = ReasoningEnvironment([{"q.text": "who?", "answer": "me"}], question="q.text", test_fraction=0)
    assert environment.reset(seed=0)[0] == "who?" and environment.step("me")[1] == 1.0


# ------------------------------------------------------------------------------------------------------------- loading


def test_every_source_gives_the_same_rows(tmp_path: Path) -> None:
    table = Dataset.from_list(CAPITALS)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, CAPITALS)), encoding="utf-8")
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder" / "train.parquet")
    files = [tmp_path / name for name in ("rows.jsonl", "rows.csv", "rows.parquet", "saved", "folder")]
    expected = [make().row("train", index) for index in range(20)]
    for source in (table, tuple(CAPITALS), {"anything": table}, *files, str(files[0])):
        assert [make(source).row("train", index) for index in range(20)] == expected, source
    assert load_rows(files[0]) is load_rows(str(files[0])), "a file is read once"


def test_streams_are_read_as_far_as_asked(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, CAPITALS)), encoding="utf-8")
    whole, stream = load_rows(CAPITALS[:30]), IterableDataset.from_generator(lambda: iter(CAPITALS))
    for rows in (load_rows(tmp_path / "rows.jsonl", streaming=True, max_rows=30), load_rows(stream, max_rows=30)):
        assert rows.count("train") == whole.count("train")
        assert rows.row("test", 1) == whole.row("test", 1)
    with pytest.raises(ValueError, match="set max_rows"):
        load_rows(stream)


# -------------------------------------------------------------------------------------------------------- broken input


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"question": "questoin"},
            ["no column 'questoin' for the question", "question, answer, hint", "did you mean question?"],
        ),
        ({"answer": "anwser"}, ["no column 'anwser' for the answer", "did you mean answer?"]),
        ({"template": "{question} {hnit}"}, ["no column 'hnit' for the template", "did you mean hint?"]),
        ({"template": "{question} {answer}"}, ["{answer}", "show the model the answer"]),
        ({"template": "{hint}", "answer": "hint"}, ["{hint}", "show the model the answer"]),
        ({"template": "{question} \\boxed{}"}, ["empty {}", "brace twice"]),
        ({"demonstration": "{solution}"}, ["no column 'solution' for the demonstration"]),
        ({"split": "dev"}, ["no split 'dev'", "train, test"]),
        ({"data": []}, ["empty"]),
        ({"data": DatasetDict()}, ["empty", "no split"]),
        ({"data": CAPITALS[:1], "split": "test", "test_fraction": 1e-9}, ["'test' has no rows"]),
        ({"test_fraction": 1.0}, ["'train' has no rows", "test_fraction"]),
        ({"few_shot": 99}, ["no row", "'train'"]),
        ({"few_shot": [{"question": "a"}]}, ["no column 'answer'"]),
        ({"system_prompt": "a", "template": [{"role": "system", "content": "b"}]}, ["keep one of the two"]),
    ],
    ids=lambda value: str(next(iter(value.values())))[:20] if isinstance(value, dict) else "",
)
def test_wrong_arguments_say_what_is_wrong(kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make(**kwargs)
    assert all(word in str(error.value) for word in words), error.value


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows"):
        make(str(tmp_path / "empty.jsonl"))


def test_wrong_sources_and_options_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="taken from int"):
        make(5)
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        make(str(tmp_path / "nothing.jsonl"))
    environment = make()
    for options, message in (
        ({"split": "dev"}, "no split 'dev'"),
        ({"row": 40}, "no row 40 in the split 'train'"),
        ({"row": -1}, "no row -1"),
        ({"row": "first"}, "no row 'first'"),
        ({"level": 3}, r"does not read the option\(s\) level"),
    ):
        with pytest.raises(ValueError, match=message):
            environment.reset(seed=0, options=options)
    with pytest.raises(ValueError, match="has 36 rows: pass a count of them, got 41"):
        environment.dataset("train", 41)


# --------------------------------------------------------------------------------------------- data for earlier stages


def test_demonstrations_and_preferences_come_from_the_environments_own_split() -> None:
    for split in ("train", "test"):
        environment = make(split=split, template="{question} Answer.", demonstration="<answer>{answer}</answer>")
        asked = {f"{text} Answer." for text in questions(environment, split)}
        for row in environment.demonstrations(12, seed=3):
            user, assistant = row["messages"]
            assert user["role"] == "user" and user["content"] in asked
            number = user["content"].split()[3].rstrip("?")
            assert assistant == {"role": "assistant", "content": f"<answer>city {number}</answer>"}
        for pair in environment.preferences(12, seed=3):
            (prompt,), (chosen,), (rejected,) = pair["prompt"], pair["chosen"], pair["rejected"]
            number = prompt["content"].split()[3].rstrip("?")
            assert prompt["content"] in asked and chosen["content"] == f"<answer>city {number}</answer>"
            assert rejected["role"] == "assistant" and rejected["content"] != chosen["content"]
        assert environment.preferences(5) == environment.preferences(5)
    with pytest.raises(ValueError, match="earns less than"):
        make([{"question": f"{n}?", "answer": "yes"} for n in range(9)]).preferences(1)


def test_answer_and_demonstration_may_be_functions_of_the_row() -> None:
    rows = [{"question": f"twice {n}?", "work": f"{n} + {n} #### {2 * n}"} for n in range(30)]
    environment = make(
        rows,
        answer=lambda row: row["work"].split("#### ")[1],
        demonstration=lambda row: row["work"].replace("####", "="),
    )
    environment.reset(options=rows[4])
    assert environment.step("8")[1] == 1.0 and environment.step("4 + 4 #### 8")[1] == 0.0
    assert environment.ideal(rows[4]) == "4 + 4 = 8"


def test_the_checker_finds_nothing() -> None:
    assert not check_environment(make, episodes=5, actions=["city 3"]).findings
