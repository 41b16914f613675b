"""Contexts that are rewritten, through the engine: what the model sees, which path it continues, what a turn then is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from elsewhere import Broken, Colour, Elsewhere, Forgetful, Other, Unready, Wrong
from episodes import CHAT, TOKENIZER, Scripted, ScriptedSampler, end, go_on, ids, make_engine, specs

from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.checker import EnvironmentProtocolError, check_environment
from agile_trainers.envs.context import (
    Context,
    LastExchanges,
    LastObservations,
    Question,
    Summary,
    as_history,
    full,
    is_ready_history,
    name_of_history,
)
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.environment_pool import EnvironmentPool, InlineTimeoutError
from agile_trainers.rollout.environment_probe import probe_environment
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.rollout.forest import Fork
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.metrics import episode_metrics, summarize
from agile_trainers.rollout.process_environment import ProcessEnvironment
from agile_trainers.types import Message, StopReason, Trajectory

GAME = {"answers": [go_on("up", 1.0), go_on("down", 2.0), go_on("a", 3.0), end(4.0, success=True)]}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def play(
    history: Any, answers: tuple[str, ...] = ("a ]", "b ]", "c ]", "a ]"), **options: Any
) -> tuple[Trajectory, ScriptedSampler]:
    policy = ScriptedSampler(answers)
    engine = make_engine(histories={None: history}, **options)
    (episode,) = engine.run(specs(GAME), policy)
    return episode, policy


def test_full_history_is_an_ordinary_episode() -> None:
    episode, policy = play(full)
    other = ScriptedSampler(("a ]", "b ]", "c ]", "a ]"))
    (plain,) = make_engine().run(specs(GAME), other)
    assert episode == plain and episode.paths is None and episode.read_again == plain.read_again
    assert [request.token_ids for request in policy.requests] == [request.token_ids for request in other.requests]
    assert all(request.extends for request in policy.requests)


def test_a_sliding_window_begins_a_new_path_with_every_turn_after_it_is_full() -> None:
    """Every prompt is what the template writes for the prompt and the last exchange; nothing else is a turn's prompt."""
    episode, policy = play(LastExchanges(1))
    prompts = [
        [user("go")],
        [user("go"), assistant("a"), user("up")],
        [user("go"), assistant("b"), user("down")],
        [user("go"), assistant("c"), user("a")],
    ]
    asked = [request.token_ids for request in policy.requests]
    assert asked == [CHAT.first(prompt) for prompt in prompts]
    assert [request.extends for request in policy.requests] == [True, True, False, False]
    assert [episode.prompt_of(k) for k in range(4)] == asked
    assert [episode.action_of(k) for k in range(4)] == [ids(answer) for answer in ("a ]", "b ]", "c ]", "a ]")]
    assert [turn.fork for turn in episode.turns] == [None, None, Fork.CONTEXT, Fork.CONTEXT]
    assert [turn.messages for turn in episode.turns] == [None, None, *prompts[2:]]
    assert episode.rewards == [1.0, 2.0, 3.0, 4.0] and episode.success and episode.linear
    assert episode.sampling_logprobs == [-1.0, -2.0] * 4
    assert episode.prompt == prompts[0]
    assert episode.prompt + episode.messages == [*prompts[3], assistant("a"), user("end")]


def test_dropped_observations_keep_all_answers() -> None:
    episode, policy = play(LastObservations(2, note="system"))
    assert policy.requests[3].token_ids == CHAT.first(
        [user("go"), assistant("a"), user("system"), assistant("b"), user("down"), assistant("c"), user("a")]
    )
    assert [turn.fork for turn in episode.turns] == [None, None, None, Fork.CONTEXT]
    # Two conversations, the second of which is read from the first difference on.
    assert episode.paths is not None and len(episode.paths) == 2
    assert episode.turns[1].path == episode.turns[2].path != episode.turns[3].path


def test_a_summary_is_a_turn_that_the_environment_does_not_get() -> None:
    """Asked for on the same path, after the observation. Prompt, summary and observation begin a new one."""
    limit = len(CHAT.first([user("go"), assistant("a"), user("up")]))
    seen: list[str] = []

    class Heard(Scripted):
        def step(self, action: str) -> Any:
            seen.append(action)
            return super().step(action)

    history = Summary(limit, instruction="system", heading="up")
    policy = ScriptedSampler(("a ]", "b ]", "c c ]", "a ]"))
    (episode,) = make_engine(Heard, histories={None: history}, max_turns=9).run(specs(GAME), policy)
    assert seen[:3] == ["a", "b", "a"]
    asked = [user("go"), assistant("a"), user("up"), assistant("b"), user("down\n\nsystem")]
    assert policy.requests[2].token_ids == CHAT.first(asked) and policy.requests[2].extends
    after = [user("go\n\nup\nc c\n\ndown")]
    assert policy.requests[3].token_ids == CHAT.first(after) and not policy.requests[3].extends
    assert [turn.question for turn in episode.turns[:4]] == [False, False, True, False]
    assert [turn.fork for turn in episode.turns[:4]] == [None, None, None, Fork.CONTEXT]
    assert [turn.reward for turn in episode.turns[:4]] == [1.0, 2.0, 0.0, 3.0]
    assert episode.turns[2].messages == asked and episode.turns[3].messages == after
    assert not episode.linear and episode.success
    assert episode.parents[:4] == [None, 0, 1, None]
    metrics = summarize([episode_metrics(episode)])
    turns = len(episode.turns)
    assert metrics["rewrites/questions"] == sum(turn.question for turn in episode.turns) / turns
    assert metrics["rewrites/context"] == sum(turn.fork is not None for turn in episode.turns) / turns


def test_a_question_that_is_dropped_again_is_an_aside() -> None:
    """The conversation after it extends what the model saw before it was asked, so it begins a path that shares that."""

    def ask_once(messages: Context) -> list[Message]:
        if messages[-1]["role"] == "assistant":
            return messages[:-2]
        return Question([*messages, user("c")]) if len(messages) == 3 else messages

    episode, policy = play(ask_once, ("a ]", "c ]", "b ]", "a ]", "b ]"), max_turns=9)
    before = [user("go"), assistant("a"), user("up")]
    assert [request.token_ids for request in policy.requests[1:3]] == [
        CHAT.first([*before, user("c")]),
        CHAT.first(before),
    ]
    assert episode.parents == [None, 0, 0, 2, 3]
    assert episode.asides == [[assistant("c")]]
    assert [turn.question for turn in episode.turns] == [False, True, False, False, False]


@pytest.mark.parametrize("where", [{}, {"processes": 1}, {"workers": 2, "timeout": 60.0}])
def test_the_environment_rewrites_its_own_context_and_the_run_may_replace_that(where: dict[str, Any]) -> None:
    policy = ScriptedSampler()
    engine = make_engine(Forgetful, **where)
    (episode,) = engine.run(specs({}), policy)
    assert [request.token_ids for request in policy.requests] == [
        CHAT.first("go"),
        CHAT.first([user("go"), user("up")]),
    ]
    assert episode.rewards == [1.0, 2.0] and episode.turns[1].fork is Fork.CONTEXT
    engine.histories = {None: full}
    (episode,) = engine.run(specs({}), ScriptedSampler())
    assert episode.paths is None
    engine.pool.close()


def test_an_environment_in_a_process_without_context_is_asked_once() -> None:
    engine = make_engine(Elsewhere, processes=1)
    first, second = engine.run(specs({}, {}), ScriptedSampler())
    assert first.paths is None and second.rewards == [1.0, 2.0]
    environment = engine.pool.environment(0)
    assert isinstance(environment, ProcessEnvironment) and environment.context is None
    engine.pool.close()


def test_what_the_function_gets() -> None:
    """Copies of the messages, the prompt, and the tokens that the model would read."""
    got: list[tuple[list[Message], list[Message], int, int]] = []

    def history(messages: Context) -> list[Message]:
        got.append(
            ([dict(message) for message in messages], list(messages.prompt), messages.tokens, messages.max_tokens)
        )
        for message in messages:
            message["content"] = "b"
        messages.prompt.clear()
        return messages[-1:]

    _, policy = play(history)
    assert [request.token_ids for request in policy.requests] == [CHAT.first([user("b")])] * 4
    assert got[0] == ([user("go")], [user("go")], len(CHAT.first("go")), 1000)
    assert got[1][0] == [user("b"), assistant("a"), user("up")] and got[1][1] == [user("go")]
    assert got[1][2] == len(CHAT.first([user("b"), assistant("a"), user("up")]))


def test_room_is_that_of_the_path() -> None:
    """Where a window makes room, an episode goes on that would have filled its context."""
    window = len(CHAT.first([user("go"), assistant("a"), user("up")])) + 2
    episode, _ = play(full, max_model_length=window)
    assert episode.stop_reason is StopReason.CONTEXT_FULL and len(episode.turns) == 2
    episode, _ = play(LastExchanges(1), max_model_length=window)
    assert episode.stop_reason is StopReason.TERMINATED and len(episode.turns) == 4


def test_a_rewrite_that_does_not_fit_ends_the_episode_with_a_reason_of_its_own() -> None:
    told: list[str] = []

    class Scored(Scripted):
        def end(self, reason: str) -> float:
            told.append(reason)
            return 8.0

    def grow(messages: Context) -> list[Message]:
        return messages if len(messages) == 1 else [user("go " * 30)]

    engine = make_engine(Scored, histories={None: grow}, max_model_length=20)
    (episode,) = engine.run(specs(GAME), ScriptedSampler())
    assert episode.stop_reason is StopReason.REWRITE_FULL and told == ["rewrite_full"]
    assert episode.rewards == [9.0] and episode.end_reward == 8.0 and episode.paths is None
    assert episode.prompt_ids == CHAT.first("go") and episode.completion_ids == ids("a ]")


def test_questions_without_end_reach_max_turns() -> None:
    def always(messages: Context) -> list[Message]:
        return Question([user("go")])

    episode, _ = play(always, max_turns=3)
    assert episode.stop_reason is StopReason.MAX_TURNS and [turn.question for turn in episode.turns] == [True] * 3
    assert episode.rewards == [0.0] * 3 and episode.success is None


def raises(messages: Context) -> list[Message]:
    raise KeyError("a bug")


HOSTILE: dict[str, tuple[Callable[[Context], Any], str]] = {
    "raises": (raises, "history 'history' raised KeyError: 'a bug'"),
    "nothing": (lambda messages: None, "returned None"),
    "empty": (lambda messages: [], "empty list of messages"),
    "text": (lambda messages: "go", "expected the list of chat messages"),
    "iterator": (lambda messages: iter(messages), "expected the list of chat messages"),
    "answer last": (lambda messages: [*messages, assistant("a")], "end with role 'assistant'"),
    "no content": (lambda messages: [{"role": "user"}], "expected a dict"),
    "parts": (lambda messages: [{"role": "user", "content": []}], "expected a dict"),
    "exits": (lambda messages: exit(3), "raised SystemExit: 3"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("at_turn", [0, 2])
def test_a_hostile_function_costs_its_episode(kind: str, at_turn: int) -> None:
    """Beside one that it leaves alone, which is the same as without it."""
    function, message = HOSTILE[kind]

    def history(messages: Context) -> Any:
        hostile = messages.prompt[0]["content"] == "up" and len(messages) == 1 + 2 * at_turn
        return function(messages) if hostile else messages

    good, bad = GAME, {**GAME, "start": ("up", {})}
    first, second = make_engine(histories={None: history}).run(specs(good, bad), ScriptedSampler())
    (alone,) = make_engine().run(specs(good), ScriptedSampler())
    assert first == alone
    assert second.stop_reason is StopReason.ENVIRONMENT_ERROR and message in str(second.error)
    assert len(second.turns) == at_turn


def test_ten_megabytes_end_the_episode() -> None:
    episode, _ = play(lambda messages: [user("go " * 3_500_000)] if len(messages) > 1 else messages)
    assert episode.stop_reason is StopReason.REWRITE_FULL and len(episode.turns) == 1


@pytest.mark.parametrize("value, function", [
    ("full", full), ("last:3", LastExchanges(3)), ("observations:1", LastObservations(1)), ("summary:512", Summary(512)),
    ("agile_trainers.envs.context:full", full), (None, None),
])  # fmt: skip
def test_names_of_functions(value: Any, function: Any) -> None:
    found = as_history(value)
    assert found == function
    if value is not None:
        assert as_history(name_of_history(found)) == function


@pytest.mark.parametrize("value, message", [
    ("last", "at least 1 after"), ("last:0", "at least 1 after 'last:'"), ("last:x", "at least 1"),
    ("first:2", "names no function"), ("window:3", "names no function"), ("os:nothing", "names no function"),
    ("os:sep", "expected a function"), (3, "is unknown"), ("", "is unknown"),
])  # fmt: skip
def test_names_of_no_function(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_history(value)


@pytest.mark.parametrize("made", [LastExchanges, LastObservations, Summary])
@pytest.mark.parametrize("number", [0, -1])
def test_a_ready_function_keeps_at_least_one(made: Callable[[int], Any], number: int) -> None:
    """The last 0 of a list would be all of it."""
    with pytest.raises(ValueError, match=rf"is {number}, expected at least 1"):
        made(number)


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        name_of_history(lambda messages: messages)
    with pytest.raises(ValueError, match="top level of a module"):
        name_of_history(Summary(3, instruction="Sum up."))
    assert name_of_history(raises) == f"{raises.__module__}:raises"


def test_ready_names() -> None:
    assert all(map(is_ready_history, (None, "full", "last:2", {"a": "summary:9"})))
    assert not any(map(is_ready_history, ("os:system", {"a": "full", "b": "os:system"}, ["full"], "lastly:2")))


def test_tokens_that_are_read_again_are_counted() -> None:
    """A scripted policy reads every prompt whole. What contexts share was read before, but for its last token."""

    answers = ("a ]", "b ]", "c ]", "a ]")
    (plain,) = make_engine(histories={None: full}).run(specs(GAME), ScriptedSampler(answers))
    prompts = [len(plain.prompt_of(k)) for k in range(4)]
    # Each prompt after the first begins with the one before it and its answer, whose last token is new.
    assert plain.read_again == sum(length + 1 for length in prompts[:3])
    (window,) = make_engine(histories={None: LastExchanges(1)}).run(specs(GAME), ScriptedSampler(answers))
    second, third, fourth = (CHAT.first([user("go"), assistant(said), user(seen)]) for said, seen in (
        ("a", "up"), ("b", "down"), ("c", "a")
    ))  # fmt: skip
    shared = next(place for place, (one, other) in enumerate(zip(second, third, strict=True)) if one != other)
    assert window.read_again == len(CHAT.first("go")) + 1 + 2 * shared and fourth[:shared] == second[:shared]
    plain.read_again = None
    assert "tokens_read_again" not in summarize([episode_metrics(plain)])


def test_a_question_at_the_first_prompt_leaves_the_environments_messages_as_they_were() -> None:
    """What a function added to the first prompt is not there when the episode goes on from its own first messages."""

    def plan_first(messages: Context) -> list[Message]:
        if len(messages) == len(messages.prompt):
            return Question([*messages[:-1], user(messages[-1]["content"] + " end")])
        if messages[-1]["role"] == "assistant":
            return [user(messages.prompt[-1]["content"] + " system " + messages[-1]["content"])]
        return messages

    episode, policy = play(plan_first, ("c ]", "a ]", "b ]", "c ]", "a ]"), max_turns=9)
    assert policy.requests[0].token_ids == CHAT.first("go end")
    assert policy.requests[1].token_ids == CHAT.first("go system c")
    assert policy.requests[2].token_ids == CHAT.first([user("go system c"), assistant("a"), user("up")])
    assert episode.prompt == [user("go end")] and episode.success and episode.rewards == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_first_prompt_that_is_rewritten_without_room() -> None:
    for words in (30, 3_000_000):
        episode, policy = play(lambda messages, words=words: [user("go " * words)], max_model_length=20)
        assert episode.stop_reason is StopReason.REWRITE_FULL and not episode.turns and not policy.requests


def test_many_empty_messages_are_no_work() -> None:
    """Each has a token at least, so that as many as the model reads tokens need not be rendered."""
    rendered: list[int] = []

    class Counting(ChatRenderer):
        def first(self, observation: Any) -> list[int]:
            rendered.append(len(observation))
            return super().first(observation)

    engine = make_engine(histories={None: lambda messages: [user("")] * 20_000 if len(messages) > 1 else messages})
    engine.chat = Counting(TOKENIZER)
    (episode,) = engine.run(specs(GAME), ScriptedSampler())
    assert episode.stop_reason is StopReason.REWRITE_FULL and max(rendered) == 1


@pytest.mark.parametrize("template", [True, False])
def test_special_tokens_that_an_answer_spells_out_begin_and_end_nothing(template: bool) -> None:
    """Also where they are rendered again: the beginning of another turn can be forged by neither side of the game."""
    tokenizer = make_tokenizer()
    if not template:
        tokenizer.chat_template = None
    engine = make_engine(histories={None: LastExchanges(1)}, max_new_tokens=40)
    chat = engine.chat = ChatRenderer(tokenizer)
    spelled = tokenizer.encode("<|im_end|>\n<|im_start|>user", split_special_tokens=True)
    policy = ScriptedGenerator(lambda request: [*spelled, tokenizer.eos_token_id])
    (episode,) = engine.run(specs(GAME), policy)
    assert [turn.fork for turn in episode.turns] == [None, None, Fork.CONTEXT, Fork.CONTEXT]
    special = set(tokenizer.all_special_ids)
    plain = [[user("go")], [user("go"), assistant("a"), user("up")]]
    for k, shape in zip((0, 1, 2, 3), (plain[0], plain[1], plain[1], plain[1])):
        found, expected = (
            [token for token in ids if token in special] for ids in (episode.prompt_of(k), chat.first(shape))
        )
        assert found == expected or (k == 1 and not template)  # plain text goes on with the sampled end


def test_nested_values_are_copies_both_ways() -> None:
    """What a message holds besides its text is neither the conversation's nor changed after it was returned."""
    held: list[Any] = []

    def history(messages: Context) -> list[Message]:
        for message in messages:
            message.get("extra", []).append("changed")
        for message in held:
            message["extra"].append("later")
        held.append({**user("go"), "extra": []})
        return [held[-1], *messages[1:]]

    steps = {"answers": [go_on([{**user("up"), "extra": [1]}]), end()]}
    policy = ScriptedSampler()
    (episode,) = make_engine(histories={None: history}).run(specs(steps), policy)
    assert episode.turns[0].observation == [{**user("up"), "extra": [1]}]
    assert episode.prompt == [{**user("go"), "extra": []}]
    assert episode.turns[1].messages is not None and episode.turns[1].messages[0]["extra"] == []


async def awaited(messages: Context) -> list[Message]:
    return messages


def generator(messages: Context) -> Any:
    yield messages


def no_messages() -> list[Message]:
    return []


@pytest.mark.parametrize("history, message", [
    (awaited, "awaits or yields"), (generator, "awaits or yields"), (no_messages, "signature is"), (Summary, "is <class"),
    ("agile_trainers.envs.context:Summary", "is <class"), (lambda messages, more: messages, "cannot be called"),
])  # fmt: skip
def test_functions_that_cannot_rewrite_are_refused_before_a_run(history: Any, message: str) -> None:
    for refuse in (as_history, name_of_history) if callable(history) else (as_history,):
        with pytest.raises(ValueError, match=message):
            refuse(history)


def test_a_summary_that_is_never_asked_for_is_refused() -> None:
    pool = EnvironmentPool(Scripted)
    with pytest.raises(ValueError, match=r"never asks for a summary.*max_model_length=64"):
        build_engine(EpisodeOptions(max_model_length=64, history="summary:64"), pool, TOKENIZER)
    assert build_engine(EpisodeOptions(max_model_length=64, history="summary:63"), pool, TOKENIZER).histories
    several = EnvironmentPool({"a": Scripted, "b": Scripted})
    options: dict[str, Any] = {"max_model_length": 64, "history": {"a": "summary:40"}}
    assert build_engine(EpisodeOptions(**options), several, TOKENIZER)
    with pytest.raises(ValueError, match="never asks"):
        limits = {"a": {"max_model_length": 40}}
        build_engine(EpisodeOptions(**options, environment_limits=limits), several, TOKENIZER)


class Mixed(Scripted):
    async def reset(self, **given: Any) -> Any:  # type: ignore[override]
        return super().reset(**given)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        return super().step(action)

    def context(self, messages: Any) -> Any:
        return messages


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("kind, message", [
    (Unready, "not yet"), (Other, "takes 1 positional argument but|cannot be called as context"),
    (Broken, r"context\(\) raised .*IndexError"), (Wrong, r"context\(\) returned 'go' \(str\)"),
])  # fmt: skip
def test_what_is_wrong_with_a_context_is_known_before_a_run(kind: Any, message: str, processes: int) -> None:
    pool = EnvironmentPool(kind, processes=processes)
    with pytest.raises(EnvironmentProtocolError, match=message):
        probe_environment(pool, 0, {})
    # A history leaves it alone.
    assert probe_environment(pool, 0, {}, with_context=False)[0] == "go"
    pool.close()


def test_other_attributes_named_context_are_nobodys_business() -> None:
    assert probe_environment(EnvironmentPool(Colour), 0, {})[0] == "go"
    assert "context raised KeyError" in str(check_environment(Unready))
    assert not check_environment(Unready, with_context=False).findings
    (episode,) = make_engine(Colour).run(specs(GAME), ScriptedSampler())
    assert episode.stop_reason is StopReason.TERMINATED


def test_a_context_that_a_timeout_cannot_interrupt_is_an_error_of_the_run() -> None:
    with pytest.raises(InlineTimeoutError):
        probe_environment(EnvironmentPool(Mixed, timeout=9.0), 0, {})
    pool = EnvironmentPool(Mixed, workers=1, timeout=9.0)
    assert probe_environment(pool, 0, {})[0] == "go"
    pool.close()


def test_success_is_that_of_the_last_turn_that_the_environment_got() -> None:
    def ask(messages: Context) -> list[Message]:
        return Question([*messages, user("c")]) if len(messages) == 3 else messages

    policy = ScriptedSampler(("a ]", "b ]"))
    answers = {"answers": [go_on("up", 1.0, success=True)]}
    (episode,) = make_engine(histories={None: ask}, max_turns=2).run(specs(answers), policy)
    assert [turn.question for turn in episode.turns] == [False, True] and episode.success is True
