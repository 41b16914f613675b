"""The checks that every reset and step goes through, and the check a trainer runs at construction."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from agile_environments.probes import PROBES
from agile_trainers.envs import EnvironmentProtocolError, check_environment, validate_reset, validate_step
from agile_trainers.envs.checker import validate_context, validate_result
from agile_trainers.envs.scripted_policies import play
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.environment_probe import probe_environment

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]


class Echo:
    """A correct environment of three turns; subclasses break it in one way each."""

    turn = 0
    clock: Any = None
    """What it is timed by."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.turn = 0
        return f"say {(seed or 0) % 5}", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        return action, 0.5, self.turn == 3, False, {}


def test_valid_results_pass_and_are_normalized() -> None:
    assert validate_reset(("hello", {"a": 1})) == ("hello", {"a": 1})
    assert validate_reset((MESSAGES, {})) == (MESSAGES, {})
    step = validate_step(("", np.float32(0.5), np.bool_(True), False, {"success": np.bool_(False)}))
    assert step == ("", 0.5, True, False, {"success": False})
    assert [type(value) for value in step[1:4]] == [float, bool, bool]
    assert validate_step(("", 1, False, False, {}))[1] == 1.0
    assert validate_step(("", np.int64(-2), False, False, {}))[1] == -2.0


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("hello", ["'hello' (str)", "(observation, info)", "Return an info dict"]),
        (("a", {}, {}), ["tuple of 3 items", "(observation, info)"]),
        ((5, {}), ["5 (int)", "text or a list of chat messages"]),
        (("a", None), ["info=None", "expected a dict"]),
        (([], {}), ["empty list of messages"]),
        ((["hi"], {}), ["message 0", "'hi' (str)", '"role"']),
        (([{"role": "user", "content": "a"}, {"role": "user"}], {}), ["message 1"]),
        (([{"content": "a"}], {}), ["message 0"]),
    ],
)
def test_bad_resets_are_named(result: Any, words: list[str]) -> None:
    with pytest.raises(EnvironmentProtocolError) as error:
        validate_reset(result)
    assert all(word in str(error.value) for word in ["reset()", *words]), error.value


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (("a", 1.0, True, {}), ["tuple of 4 items", "terminated", "truncated", "old Gym"]),
        (None, ["None", "(observation, reward, terminated, truncated, info)"]),
        (("a", True, False, False, {}), ["reward=True (bool)", "finite number"]),
        (("a", "1", False, False, {}), ["reward='1' (str)"]),
        (("a", None, False, False, {}), ["reward=None"]),
        (("a", torch.tensor(1.0), False, False, {}), ["reward=", "Tensor", ".item()"]),
        (("a", np.ones(1), False, False, {}), ["reward=", "ndarray", ".item()"]),
        (("a", 1j, False, False, {}), ["reward=1j"]),
        (("a", float("nan"), False, False, {}), ["reward=nan", "finite"]),
        (("a", np.float64("inf"), False, False, {}), ["reward=inf", "finite"]),
        (("a", 1.0, 1, False, {}), ["terminated=1 (int)", "bool"]),
        (("a", 1.0, False, None, {}), ["truncated=None", "bool"]),
        (("a", 1.0, False, False, []), ["info=[]", "dict"]),
        (("a", 1.0, True, False, {"success": "no"}), ["info['success']='no'", "True or False"]),
        (("a", 1.0, True, False, {"success": 0.5}), ["info['success']=0.5", "True or False"]),
        (("a", 1.0, True, False, {"success": None}), ["info['success']=None", "True or False"]),
        ((b"a", 1.0, True, False, {}), ["b'a' (bytes)", "text or a list"]),
        (
            ([*MESSAGES, {"role": "assistant", "content": "1"}], 1.0, False, False, {}),
            ["'assistant'", "only what is new"],
        ),
    ],
)
def test_bad_steps_are_named(result: Any, words: list[str]) -> None:
    with pytest.raises(EnvironmentProtocolError) as error:
        validate_step(result)
    assert all(word in str(error.value) for word in ["step()", *words]), error.value


@pytest.mark.parametrize("reported", [True, np.True_, 1, 1.0, np.float32(1), np.int64(1)])
def test_a_success_is_read_from_all_that_libraries_report(reported: Any) -> None:
    """Meta-World's info holds 1.0."""
    for success in (reported, type(reported)(0)):
        read = validate_step(("a", 1.0, True, False, {"success": success}))[4]["success"]
        assert read is bool(success) and read is validate_result({"reward": 1.0, "success": success})[1]["success"]


def calling(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    return [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, *MESSAGES]


def chain(levels: int) -> Any:
    nested: Any = 1
    for _ in range(levels):
        nested = {"in": nested}
    return nested


@pytest.mark.parametrize(
    "arguments",
    [
        {"at": [*range(30_000)]},
        chain(100),
        {"k" * 20_000: 1},
        {"large": 10**4000},
        {"none": None, "flag": True, "x": 0.5},
    ],
    ids=["many", "deep", "long key", "large number", "others"],
)
def test_a_message_is_copied_whole(arguments: Any) -> None:
    messages = calling(arguments)
    found = validate_context(messages, "context()")
    assert found == messages and found[0]["tool_calls"] is not messages[0]["tool_calls"]


def test_an_object_in_a_message_is_its_whole_text() -> None:
    (call,) = validate_context(calling({"screen": b"x" * 20_000}), "context()")[0]["tool_calls"]
    assert call["function"]["arguments"]["screen"] == str(b"x" * 20_000)


def test_no_half_of_a_surrogate_pair_is_in_a_message() -> None:
    """A model can write one into the arguments of a call; no tokenizer encodes it, which ended the run."""
    (call,) = validate_context(calling({"a\ud800": ["\udfff", "\ud83d\ude00é"]}), "context()")[0]["tool_calls"]
    assert call["function"]["arguments"] == {"a\ufffd": ["\ufffd", "\U0001f600é"]}


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([0] * 1_000_000, "more than 1,000,000 items"),
        (chain(120), "more than 120 levels"),
        (LOOP, "hold themselves"),
        ({"large": 10**5000}, "cannot be written: Exceeds the limit"),
        ({"object": type("Long", (), {"__str__": lambda _: "x" * 1_000_001})()}, "more than 1,000,000 characters"),
        ({1: "a", "1": "b"}, "two keys of an object with one text"),
        (dict.fromkeys(["\ud800", "\ud801"]), "two keys of an object with one text"),
    ],
)
def test_a_message_that_would_be_shortened_is_refused(arguments: Any, words: str) -> None:
    """A chat template writes it into the prompt, which would differ from what was sent."""
    with pytest.raises(
        EnvironmentProtocolError, match=rf"context\(\) returned message 0 .*'tool_calls'.*{words}.*send less"
    ):
        validate_context(calling(arguments), "context()")


def test_the_last_message_of_an_episode_may_have_any_role() -> None:
    """No model reads it."""
    said = [{"role": "assistant", "content": "1"}]
    assert validate_step((said, 1.0, True, False, {}))[0] == said


def test_a_row_that_an_environment_changes_is_as_it_was_for_the_next_one() -> None:
    class Taking(Echo):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.turn = 0
            return options["words"].pop(), {}  # type: ignore[index]

    row = {"words": ["one", "two"]}
    assert not check_environment(Taking, options=row).findings
    assert play(Taking(), lambda messages, rng: "a", seed=0, options=row).messages[0]["content"] == "two"
    assert row == {"words": ["one", "two"]}


def test_an_unawaited_result_is_named() -> None:
    async def reset() -> Any:
        return "a", {}

    coroutine = reset()
    with pytest.raises(EnvironmentProtocolError, match=r"not awaited.*async def"):
        validate_reset(coroutine)
    coroutine.close()


def test_protocol_errors_are_value_errors() -> None:
    assert issubclass(EnvironmentProtocolError, ValueError)


@pytest.mark.parametrize("name", PROBES)
def test_our_own_environments_give_no_findings(name: str) -> None:
    factory = PROBES[name].factory
    report = check_environment(factory, seed=3, episodes=4, max_turns=9, actions=factory.vocabulary)
    assert not report.findings, str(report)
    report.raise_for_errors()


def test_async_environments_are_awaited_in_and_outside_an_event_loop() -> None:
    class Async(Echo):
        closed = 0

        async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            await asyncio.sleep(0)
            return Echo.reset(self, seed)

        async def step(self, action: str) -> Any:
            await asyncio.sleep(0)
            return ("", "bad", True, False, {}) if action == "bad" else Echo.step(self, action)

        async def close(self) -> None:
            Async.closed += 1

    async def inside() -> Any:
        return check_environment(Async)

    assert not check_environment(Async, episodes=2, max_turns=3).findings
    assert not asyncio.run(inside()).findings
    assert Async.closed == 4
    assert "reward='bad'" in check_environment(Async, actions=["bad"]).errors[0]


def test_different_starts_for_one_seed_are_found() -> None:
    class Unseeded(Echo):
        count = 0

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            Unseeded.count += 1
            return f"say {Unseeded.count}", {}

    report = check_environment(Unseeded, seed=7)
    assert not report.errors
    assert "reset(seed=7)" in report.warnings[0] and "'say 1'" in report.warnings[0] and "'say 2'" in report.warnings[0]


def test_different_answers_to_the_same_actions_are_found() -> None:
    class Noisy(Echo):
        def step(self, action: str) -> Any:
            return action, random.SystemRandom().random(), False, False, {}

    (warning,) = check_environment(Noisy).warnings
    assert "different results" in warning


def test_the_global_random_state_is_watched() -> None:
    class Seeds(Echo):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            random.seed(seed)
            return f"say {random.randrange(5)}", {}

    class Draws(Echo):
        def step(self, action: str) -> Any:
            np.random.rand()
            return Echo.step(self, action)

    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        for broken in (Seeds, Draws):
            (warning,) = check_environment(broken).warnings
            assert "global random state" in warning
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def test_an_empty_first_observation_is_found() -> None:
    class Silent(Echo):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return "", {}

    assert "empty observation" in check_environment(Silent).warnings[0]


def test_an_instance_that_cannot_be_reused_is_found() -> None:
    class Once(Echo):
        used = False

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if self.used:
                raise RuntimeError("already played")
            self.used = True
            return Echo.reset(self, seed)

    assert not check_environment(Once).errors
    assert check_environment(Once, episodes=2).errors == ["reset(seed=1) raised RuntimeError: already played"]


def test_the_methods_must_be_callable_as_the_engine_calls_them() -> None:
    class NoStep:
        reset = Echo.reset

    class OldReset(Echo):
        def reset(self) -> Any:  # type: ignore[override]
            return "a", {}

    class NoText(Echo):
        def step(self) -> Any:  # type: ignore[override]
            return "a", 0.0, True, False, {}

    for factory, message in (
        (NoStep, "NoStep has no method step(action)"),
        (OldReset, "OldReset.reset() -> 'Any' cannot be called as reset(seed)"),
        (NoText, "NoText.step() -> 'Any' cannot be called as step(action)"),
    ):
        broken: Any = factory
        assert message in check_environment(broken).errors[0]


class Toy:
    """As other libraries write an environment: no ``options``, and a name of its own for the action."""

    def reset(self, seed: int | None = None) -> Any:
        return f"What is 2+2? ({seed})", {}

    def step(self, text: str) -> Any:
        return "Done.", float("4" in text), True, False, {}


class Paid:
    """Rewards what was done when a limit ends an episode."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "Go.", {}

    def step(self, action: str) -> Any:
        return "", 0.5, action == "over", False, {}

    def end(self, reason: str) -> float:
        assert reason == "max_turns"
        return 2.0


class PaidLater(Paid):
    async def end(self, reason: str) -> float:  # type: ignore[override]
        return Paid.end(self, reason)


def test_options_may_be_left_out_where_there_are_no_rows() -> None:
    assert not check_environment(Toy).findings
    assert play(Toy(), lambda messages, rng: "4", 7).rewards == [1.0]
    assert play(Paid(), lambda messages, rng: "", 7, max_turns=3).rewards == [0.5, 0.5, 2.5]
    assert play(PaidLater(), lambda messages, rng: "", 7, max_turns=1).rewards == [2.5]
    assert play(Paid(), lambda messages, rng: "over", 7, max_turns=1).rewards == [0.5], "it had ended by itself"
    (error,) = check_environment(Toy, options={"question": "2+2"}).errors
    assert "Toy.reset(seed: 'int | None' = None) -> 'Any' cannot be called as reset(seed, options)" in error
    assert "options=None" in error
    pool = EnvironmentPool(Toy)
    assert probe_environment(pool, 0, None)[0].startswith("What is 2+2?")
    with pytest.raises(EnvironmentProtocolError, match="options=None"):
        probe_environment(pool, 0, None, with_rows=True)


def test_a_factory_that_fails_is_an_error_and_errors_raise() -> None:
    def factory() -> Any:
        raise OSError("no such board")

    report = check_environment(factory)
    assert report.errors == ["the factory raised OSError: no such board"]
    assert str(report) == "error in factory: the factory raised OSError: no such board"
    with pytest.raises(EnvironmentProtocolError, match="no such board"):
        report.raise_for_errors()


def test_options_and_the_latest_observation_reach_the_environment() -> None:
    seen: list[Any] = []

    class Records(Echo):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            seen.append((seed, options))
            return Echo.reset(self, seed)

        def step(self, action: str) -> Any:
            seen.append(action)
            return Echo.step(self, action + "!")

    def answer(observation: Any) -> str:
        return observation.upper()

    assert not check_environment(Records, seed=2, max_turns=2, actions=answer, options={"level": 1}).findings
    assert seen == [(2, {"level": 1}), "SAY 2", "SAY 2!"] * 2


def test_a_plain_method_that_returns_a_coroutine_is_refused() -> None:
    """A rollout would not await it either."""

    class Hidden:
        def reset(self, seed: int | None = None, options: dict | None = None):  # type: ignore[no-untyped-def]
            # An awaitable that, unlike a coroutine, does not warn when nobody awaits it.
            return awaitable

        def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            return "", 0.0, True, False, {}

    class Awaitable:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield

    awaitable = Awaitable()
    (message,) = check_environment(Hidden).errors
    assert "async def" in message


class ResetsToText(Echo):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "say hello"


class StepsLikeOldGym(Echo):
    def step(self, action: str) -> Any:
        return action, 1.0, True, {}


class CountsResets(Echo):
    started = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        CountsResets.started += 1
        return f"game {CountsResets.started}", {}


class DrawsItsPrompt(Echo):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        prompt = {"role": "user", "content": f"say {random.SystemRandom().random()}"}
        return [{"role": "system", "content": "Be brief."}, prompt], {}


class DividesByZero(Echo):
    def step(self, action: str) -> Any:
        return action, np.float64("nan"), True, False, {}


class LogarithmAtTheEnd(Echo):
    def step(self, action: str) -> Any:
        observation, _, over, *rest = Echo.step(self, action)
        return observation, float("-inf") if over else 0.0, over, *rest


class StreamsForever(Echo):
    def step(self, action: str) -> Any:
        return itertools.repeat("more "), 0.0, False, False, {}


class RepeatsEverything(Echo):
    def step(self, action: str) -> Any:
        _, *rest = Echo.step(self, action)
        return "You are in a long corridor. " * (self.turn + 1), *rest


class NeverRead(Echo):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "so it goes " * 1_000_000, {}


class ReturnsTheConversation(Echo):
    def step(self, action: str) -> Any:
        said = [{"role": "assistant", "content": action}, {"role": "user", "content": "go on"}]
        return [*MESSAGES, *said], *super().step(action)[1:]


class RaisesOnReset(Echo):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise ConnectionError("the server is away")


class RaisesOnUnknownWords(Echo):
    def step(self, action: str) -> Any:
        return {"left": "wall", "right": "door"}[action], 0.0, False, False, {}


class HangsOnStep(Echo):
    def step(self, action: str) -> Any:
        self.clock.run_out()
        threading.Event().wait()


class HangsOnReset(Echo):
    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.clock.run_out()
        await asyncio.Event().wait()


BROKEN = {
    ResetsToText: "'say hello' (str); expected the tuple (observation, info)",
    StepsLikeOldGym: "tuple of 4 items",
    CountsResets: "a group would not start from the same state",
    DrawsItsPrompt: "a group would not start from the same state",
    DividesByZero: "reward=nan; expected a finite number",
    LogarithmAtTheEnd: "reward=-inf; expected a finite number",
    StreamsForever: "the observation repeat('more ') (repeat); expected text",
    RepeatsEverything: "repeats the previous",
    NeverRead: "11,000,000 characters",
    ReturnsTheConversation: "step() returned a message of role 'assistant'",
    RaisesOnReset: "reset(seed=0) raised ConnectionError: the server is away",
    RaisesOnUnknownWords: "step() of turn 1 after reset(seed=0) raised KeyError: '0'",
    HangsOnStep: "step() of turn 1 after reset(seed=0) did not return within 0.2 s",
    HangsOnReset: "reset(seed=0) did not return within 0.2 s",
}
"""Environments broken in one way each, and what is said of them."""


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_broken_environments_are_reported_by_name(clock: Any, monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    monkeypatch.setattr(Echo, "clock", clock)
    (line,) = str(check_environment(broken, max_turns=4, timeout=0.2)).splitlines()
    assert f" in {broken.__name__}: " in line and BROKEN[broken] in line


def test_a_slow_environment_is_not_a_hanging_one(clock: Any) -> None:
    """The limit is for one call, not for the check."""

    class Slow(Echo):
        def step(self, action: str) -> Any:
            clock.now += 0.06
            time.sleep(0.03)  # the clock is looked at meanwhile
            return Echo.step(self, action)

    assert not check_environment(Slow, max_turns=3, episodes=2, timeout=0.2).findings


def test_a_factory_that_hangs_and_one_without_a_name_are_reported() -> None:
    report = check_environment(partial(threading.Event().wait), timeout=0.1)  # type: ignore[arg-type]
    assert report.errors == ["the factory did not return within 0.1 s"] and report.environment == "the environment"
