"""The rollout loop: token layout, every way an episode ends, limits, order of events, and noise."""

from __future__ import annotations

import random
import re
import threading
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes import CHAT, TOKENIZER, Factory, Scripted, ScriptedSampler, end, go_on, ids, make_engine, specs
from transformers import AutoModelForCausalLM, AutoTokenizer

from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.collate import collate
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationRequest, SamplingSettings
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.generators.transformers.generator import TransformersGenerator
from agile_trainers.rollout.metrics import episode_metrics, summarize
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.rollout.stepped import first_messages
from agile_trainers.types import StopReason, Trajectory

PROMPT = "[ user ↵ go ] ↵ [ assistant ↵"
"""Nine tokens."""
UP = "↵ [ user ↵ up ] ↵ [ assistant ↵"
"""The observation in its turn delimiters, after a sampled terminator: ten tokens."""


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def play_one(options: dict[str, Any], policy: ScriptedSampler | None = None, **settings: Any) -> Trajectory:
    (trajectory,) = make_engine(**settings).run(specs(options), policy or ScriptedSampler())
    return trajectory


def spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(turn.start, turn.end) for turn in trajectory.turns]


# ------------------------------------------------------------------------------------------------------------- layout


def test_token_layout_of_three_turns() -> None:
    """Ids are appended, never made again; the terminator is the action's if sampled and the turn delimiters' if not.

    prompt       [ user ↵ go ] ↵ [ assistant ↵
    turn 0       a b ]                                   0..3    sampled terminator
    observation  ↵ [ user ↵ up ] ↵ [ assistant ↵         3..13
    turn 1       b b b                                   13..16  cut by length
    observation  ] ↵ [ user ↵ down ] ↵ [ assistant ↵     16..27
    turn 2       c ]                                     27..29  ends the episode: nothing follows
    """
    policy = ScriptedSampler(["a b ]", "b b b b b ]", "c ]"])
    answers = [go_on("up", 0.25, n=1), go_on("down", 0.5, n=2), end(1.0, success=True)]
    trajectory = play_one({"start": ("go", {"level": 7}), "answers": answers}, policy, max_new_tokens=3)

    down = "] ↵ [ user ↵ down ] ↵ [ assistant ↵"
    assert trajectory.prompt_ids == ids(PROMPT)
    assert trajectory.completion_ids == ids(f"a b ] {UP} b b b {down} c ]")
    assert spans(trajectory) == [(0, 3), (13, 16), (27, 29)]
    assert trajectory.sampling_logprobs == [-1.0, -2.0, -3.0] + [0.0] * 10 + [-1.0, -2.0, -3.0] + [0.0] * 11 + [
        -1.0,
        -2.0,
    ]
    assert [turn.text for turn in trajectory.turns] == ["a b", "b b b", "c"]
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "length", "stop"]
    assert trajectory.rewards == [0.25, 0.5, 1.0] and trajectory.episode_return == 1.75
    assert [turn.observation for turn in trajectory.turns] == ["up", "down", "end"]
    assert [turn.info for turn in trajectory.turns] == [{"n": 1}, {"n": 2}, {"success": True}]
    assert trajectory.success is True and trajectory.stop_reason is StopReason.TERMINATED and trajectory.error is None
    assert trajectory.reset_info == {"level": 7}

    tokens = trajectory.prompt_ids + trajectory.completion_ids
    assert [request.token_ids for request in policy.requests] == [tokens[: 9 + start] for start, _ in spans(trajectory)]
    assert [request.max_new_tokens for request in policy.requests] == [3, 3, 3]


def test_messages_of_a_trajectory() -> None:
    """``prompt`` is what was rendered, ``messages`` what came after it."""
    several = [{"role": "system", "content": "down"}, {"role": "user", "content": "up"}]
    trajectory = play_one({"answers": [go_on(several), end()]})
    assert trajectory.prompt == [{"role": "user", "content": "go"}]
    answer = {"role": "assistant", "content": "a"}
    assert trajectory.messages == [answer, *several, answer, {"role": "user", "content": "end"}]
    delimited = "↵ [ system ↵ down ] ↵ [ user ↵ up ] ↵ [ assistant ↵"
    assert trajectory.completion_ids == ids(f"a ] {delimited} a ]")


def test_specs_reach_the_environment_and_come_back_in_order() -> None:
    given = [EpisodeSpec(seed, (seed,), {"answers": [end(seed)]}) for seed in (5, 3, 4)]
    slow_first = ScriptedSampler(latency=lambda request: 3 - request.episode)
    trajectories = make_engine().run(given, slow_first)
    assert [trajectory.seed for trajectory in trajectories] == [5, 3, 4]
    assert [trajectory.reset_info for trajectory in trajectories] == [{"seed": 5}, {"seed": 3}, {"seed": 4}]
    assert [trajectory.rewards for trajectory in trajectories] == [[5.0], [3.0], [4.0]]
    assert make_engine().run([], slow_first) == []


def test_system_prompt_is_added_only_where_there_is_none() -> None:
    engine = make_engine(system_prompt="up")
    system, user = {"role": "system", "content": "up"}, {"role": "user", "content": "go"}
    own = [{"role": "system", "content": "down"}, user]
    assert first_messages("go", "up") == [system, user]
    assert first_messages([user], "up") == [system, user]
    assert first_messages(own, "up") == own
    assert first_messages("go", None) == [user]
    (trajectory,) = engine.run(specs({}), ScriptedSampler())
    assert trajectory.prompt == [system, user]
    assert trajectory.prompt_ids == ids(f"[ system ↵ up ] ↵ {PROMPT}")


def test_on_finish_is_called_in_order_of_ending() -> None:
    ended: list[Trajectory] = []
    policy = ScriptedSampler(latency=lambda request: 4 - request.episode)
    trajectories = make_engine().run(specs({}, {}, {}), policy, ended.append)
    assert [trajectory.seed for trajectory in ended] == [2, 1, 0]
    assert ended[0] is trajectories[2]


# ------------------------------------------------------------------------------------------------------- stop reasons


def shares(trajectory: Trajectory) -> dict[str, float]:
    metrics = summarize([episode_metrics(trajectory)])
    return {name: value for name, value in metrics.items() if name.startswith("stop/") and value}


@pytest.mark.parametrize(
    ("answers", "settings", "reason", "rewards"),
    [
        ([go_on("up", 1.0), end(2.0)], {}, StopReason.TERMINATED, [1.0, 2.0]),
        ([go_on("up", 1.0), ("up", 2.0, False, True, {})], {}, StopReason.TRUNCATED, [1.0, 2.0]),
        ([("up", 1.0, True, True, {})], {}, StopReason.TERMINATED, [1.0]),
        ([go_on("up", 1.0)], {"max_turns": 2}, StopReason.MAX_TURNS, [1.0, 1.0]),
        ([go_on("up", 1.0), end(2.0)], {"max_turns": 2}, StopReason.TERMINATED, [1.0, 2.0]),
        ([go_on("up", 1.0), ("up", 2.0, False, True, {})], {"max_turns": 2}, StopReason.TRUNCATED, [1.0, 2.0]),
        # The prompt takes 9, the answer 2, the observation 10: no room is left for another answer.
        ([go_on("up", 1.0)], {"max_model_length": 21}, StopReason.CONTEXT_FULL, [1.0]),
        ([go_on("up", 1.0)], {"max_model_length": 21, "max_turns": 1}, StopReason.MAX_TURNS, [1.0]),
        ([go_on("up", 1.0), RuntimeError("broken")], {}, StopReason.ENVIRONMENT_ERROR, [1.0, 0.0]),
    ],
)
def test_stop_reasons(answers: list[Any], settings: dict[str, Any], reason: StopReason, rewards: list[float]) -> None:
    trajectory = play_one({"answers": answers}, **settings)
    assert (trajectory.stop_reason, trajectory.rewards) == (reason, rewards)
    assert shares(trajectory) == {f"stop/{reason.value}": 1.0}
    assert trajectory.completion_ids == ids(f" {UP} ".join(["a ]"] * len(rewards)))


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (("up", 0.0, False, {}), "EnvironmentProtocolError: step\\(\\) returned .* expected the tuple"),
        (("up", float("nan"), False, False, {}), "EnvironmentProtocolError: step\\(\\) returned reward=nan"),
        ((17, 0.0, False, False, {}), "EnvironmentProtocolError: step\\(\\) returned the observation 17"),
        (([], 0.0, False, False, {}), "EnvironmentProtocolError: step\\(\\) returned an empty list"),
        (
            ([{"role": "assistant", "content": "a"}], 1.0, False, True, {}),
            "EnvironmentProtocolError: .* role 'assistant'",
        ),
        (KeyError("lost"), "KeyError: 'lost'"),
    ],
)
def test_a_failed_step_keeps_tokens_and_earlier_rewards(broken: Any, error: str) -> None:
    trajectory = play_one({"answers": [go_on("up", 0.5, n=1), broken]})
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and trajectory.stop_reason.failed
    assert trajectory.error is not None
    assert re.match(error, trajectory.error), trajectory.error
    assert trajectory.completion_ids == ids(f"a ] {UP} a ]") and spans(trajectory) == [(0, 2), (12, 14)]
    assert trajectory.rewards == [0.5, 0.0]
    assert trajectory.turns[1].observation is None and trajectory.turns[1].info == {}
    assert shares(trajectory) == {"stop/environment_error": 1.0}


@pytest.mark.parametrize("start", [ValueError("no level"), "go", ("go", {}, 0.0), (None, {}), ("go", None)])
def test_a_failed_reset_leaves_an_empty_episode(start: Any) -> None:
    policy = ScriptedSampler()
    trajectory = play_one({"start": start}, policy)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and trajectory.error
    assert trajectory.prompt_ids == trajectory.completion_ids == [] and trajectory.turns == []
    assert policy.requests == []


def test_a_first_observation_without_a_token_is_an_error() -> None:
    bare = deepcopy(TOKENIZER)
    bare.chat_template = None
    chat = ChatRenderer(bare)
    engine = RolloutEngine(EnvironmentPool(Scripted), chat, Limits(1, 1, 10))
    empty, sound = engine.run(specs({"start": ("", {})}, {}), ScriptedSampler())
    assert empty.stop_reason is StopReason.ENVIRONMENT_ERROR and "tokenizes to nothing" in str(empty.error)
    assert sound.stop_reason is StopReason.TERMINATED


def test_what_an_environment_does_to_its_row_is_no_concern_of_the_next_one() -> None:
    class Emptying(Scripted):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            assert options is not None
            start = super().reset(seed, options)
            options["answers"].clear()
            options.clear()
            return start

    row = {"answers": [go_on("up"), end(1.0)]}
    shared = [EpisodeSpec(seed, (seed,), row) for seed in range(3)]
    trajectories = make_engine(Emptying, max_environments=1).run(shared, ScriptedSampler())
    assert [trajectory.rewards for trajectory in trajectories] == [[0.0, 1.0]] * 3
    assert row == {"answers": [go_on("up"), end(1.0)]}


def test_what_an_environment_keeps_of_its_info_is_no_concern_of_an_episode() -> None:
    """Of two turns and of ``reset``, with an instance that clears and goes on filling what it returned."""

    class Guarded(list[Any]):
        def __iter__(self) -> Any:
            raise RuntimeError("read item by item")

    class Logging(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[Any] = []
            self.guarded = Guarded()
            self.seen, self.board = {"n": [0]}, np.zeros(3)
            self.lock = threading.Lock()  # of which there is no copy

        def held(self) -> dict[str, Any]:
            return {
                "log": self.log,
                "seen": (self.seen, {1}),
                "board": self.board,
                "beside": [self.lock, self.log, self],
                "guarded": self.guarded,
                "ordered": OrderedDict(log=self.log, env=self),
            }

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.log.clear()
            self.guarded.clear()
            self.board[:] = seed
            self.seen["n"][0] = seed
            observation, _ = super().reset(seed, options)
            return observation, self.held()

        def step(self, action: str) -> Any:
            self.log.append(len(self.log))
            self.guarded.append(self.log)
            self.board += 1
            self.seen["n"][0] += 1
            return (*super().step(action)[:4], self.held())

    shared = [EpisodeSpec(seed, (seed,), {"answers": [go_on("up"), end(1.0)]}) for seed in range(3)]
    trajectories = make_engine(Logging, max_environments=1).run(shared, ScriptedSampler())
    for seed, trajectory in enumerate(trajectories):
        for turn, info in enumerate([trajectory.reset_info, *(turn.info for turn in trajectory.turns)]):
            assert info["log"] == list(range(turn)) and info["beside"][1] is info["log"]
            assert type(info["guarded"]) is list and info["guarded"] == [info["log"]] * turn
            assert isinstance(info["beside"][2], Logging) and info["beside"][2].lock is info["beside"][0]
            assert info["ordered"]["log"] == info["log"] and info["ordered"]["env"] is info["beside"][2]
            assert info["seen"] == ({"n": [seed + turn]}, {1}) and info["board"].tolist() == [seed + turn] * 3


def test_failures_cost_only_their_own_episode() -> None:
    good: dict[str, Any] = {"answers": [go_on("up"), end(1.0)]}
    bad: dict[str, Any] = {"answers": [RuntimeError("broken")]}
    alone = make_engine().run(specs(good), ScriptedSampler())[0]
    trajectories = make_engine().run(specs(good, bad, good), ScriptedSampler())
    assert [trajectory.stop_reason.failed for trajectory in trajectories] == [False, True, False]
    assert trajectories[0] == alone


@pytest.mark.parametrize("length", [3, 9])
def test_a_prompt_that_fills_the_context_gets_no_answer(length: int) -> None:
    policy = ScriptedSampler()
    trajectory = play_one({}, policy, max_model_length=length)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL and trajectory.turns == [] and policy.requests == []
    assert trajectory.prompt_ids == ids(PROMPT)
    assert play_one({}, max_model_length=10).completion_ids == ids("a")


# -------------------------------------------------------------------------------------------------------- token limits


def test_the_limit_of_a_turn_shrinks_near_the_end_of_the_context() -> None:
    """Prompt 9, answer 3 (of at most 5), observation 10: of 25 tokens, 3 are left.

    [ user ↵ go ] ↵ [ assistant ↵ | a b ] | ↵ [ user ↵ up ] ↵ [ assistant ↵ | b b b
    """
    policy = ScriptedSampler(["a b ]", "b b b b ]"])
    trajectory = play_one({"answers": [go_on("up")]}, policy, max_new_tokens=5, max_model_length=25)
    assert [request.max_new_tokens for request in policy.requests] == [5, 3]
    assert trajectory.completion_ids == ids(f"a b ] {UP} b b b")
    assert trajectory.turns[1].finish_reason == "length"
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL


def test_the_context_limit_holds_for_any_lengths() -> None:
    """Random prompts, answers, observations and limits: never a token too many, never an end too early."""
    rng = random.Random(0)
    reasons = set()
    for _ in range(150):
        words = lambda low, high: " ".join(["up"] * rng.randint(low, high))  # noqa: E731
        options: dict[str, Any] = {"start": (words(1, 12), {}), "answers": [go_on(words(0, 12)) for _ in range(6)]}
        policy = ScriptedSampler([" ".join(["a"] * rng.randint(1, 8) + ["]"]) for _ in range(6)])
        limit, longest = rng.randint(1, 8), rng.randint(8, 120)
        append = rng.random() < 0.5
        trajectory = play_one(
            options,
            policy,
            max_turns=5,
            max_new_tokens=limit,
            max_model_length=longest,
            append_final_observation=append,
        )
        prompt, kept = trajectory.prompt_ids, trajectory.completion_ids
        reasons.add(trajectory.stop_reason)
        assert len(policy.requests) == len(trajectory.turns)
        for request in policy.requests:
            assert request.max_new_tokens == min(limit, longest - len(request.token_ids)) >= 1
        assert len(trajectory.sampling_logprobs) == len(kept)
        if not trajectory.turns:
            assert trajectory.stop_reason is StopReason.CONTEXT_FULL and len(prompt) >= longest
            continue
        assert len(prompt) + len(kept) <= longest
        last = trajectory.turns[-1]
        delimited = CHAT.delimited(last.observation or "", kept[last.end - 1])
        free = longest - len(prompt) - last.end - len(delimited)
        assert trajectory.stop_reason is (
            StopReason.MAX_TURNS if len(trajectory.turns) == 5 else StopReason.CONTEXT_FULL
        )
        if trajectory.stop_reason is StopReason.CONTEXT_FULL:
            assert free < 1
        assert kept[last.end :] == (delimited if append and free >= 0 else [])
    assert reasons == {StopReason.CONTEXT_FULL, StopReason.MAX_TURNS}


@pytest.mark.parametrize(
    ("answer", "settings", "reason", "final"),
    [
        (("up", 0.0, False, True, {}), {}, StopReason.TRUNCATED, UP),
        (go_on("up"), {"max_turns": 1}, StopReason.MAX_TURNS, UP),
        (end(), {}, StopReason.TERMINATED, ""),
        (("up", 0.0, True, True, {}), {}, StopReason.TERMINATED, ""),
        # 9 + 2 + 10 = 21: the observation fits exactly, an answer after it would not.
        (go_on("up"), {"max_model_length": 21}, StopReason.CONTEXT_FULL, UP),
        (go_on("up"), {"max_model_length": 20}, StopReason.CONTEXT_FULL, ""),
        (go_on("up"), {"max_model_length": 21, "max_turns": 1}, StopReason.MAX_TURNS, UP),
        (go_on("up"), {"max_model_length": 20, "max_turns": 1}, StopReason.MAX_TURNS, ""),
        (RuntimeError(), {}, StopReason.ENVIRONMENT_ERROR, ""),
    ],
)
def test_the_final_observation_is_appended_where_a_critic_needs_it(
    answer: Any, settings: dict[str, Any], reason: StopReason, final: str
) -> None:
    """After ``a ]`` of a truncated episode stands the observation, if it fits; the last state is the last token kept."""
    trajectory = play_one({"answers": [answer]}, append_final_observation=True, **settings)
    assert trajectory.stop_reason is reason
    assert trajectory.completion_ids == ids(f"a ] {final}")
    assert trajectory.sampling_logprobs == [-1.0, -2.0] + [0.0] * len(ids(final))
    assert spans(trajectory) == [(0, 2)]
    batch = collate([trajectory], pad_token_id=0, end_token_id=2)
    assert batch.state_positions.tolist() == [[8, 9 + len(trajectory.completion_ids) - 1]]

    without = play_one({"answers": [answer]}, **settings)
    assert without.completion_ids == ids("a ]")


def test_the_final_observation_of_an_answer_cut_by_length_starts_with_the_terminator() -> None:
    trajectory = play_one(
        {"answers": [("up", 0.0, False, True, {})]}, ScriptedSampler(["a b c ]"]), append_final_observation=True
    )
    assert trajectory.completion_ids == ids(f"a b c ] {UP}")
    assert spans(trajectory) == [(0, 3)]


# ----------------------------------------------------------------------------------------------------- order of events


def test_inline_steps_come_in_a_fixed_order() -> None:
    """Resets in order of the specs; then every step as soon as its answer is there."""
    log: list[str] = []

    class Logged(Scripted):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.seed = seed
            log.append(f"reset {seed}")
            return super().reset(seed, options)

        def step(self, action: str) -> Any:
            log.append(f"step {self.seed}")
            return super().step(action)

    two: dict[str, Any] = {"answers": [go_on("up"), end()]}
    policy = ScriptedSampler(latency=lambda request: 3 if request.episode == 0 else 1)
    make_engine(Logged).run(specs(two, two, two), policy)
    assert log == ["reset 0", "reset 1", "reset 2", "step 1", "step 2", "step 1", "step 2", "step 0", "step 0"]


def test_a_fast_sampler_does_not_wait_for_a_slow_one() -> None:
    """Episode 1 asks for its four turns while episode 0's first answer is still being sampled."""
    answered: list[int] = []

    class Watched(ScriptedSampler):
        def step(self) -> Any:
            outputs = super().step()
            answered.extend(output.episode for output in outputs)
            return outputs

    policy = Watched(latency=lambda request: 50 if request.episode == 0 else 1)
    four: dict[str, Any] = {"answers": [go_on("up"), go_on("up"), go_on("up"), end()]}
    make_engine().run(specs(four, four), policy)
    assert answered == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("workers", [2, 8])
def test_a_fast_environment_does_not_wait_for_a_slow_one(workers: int) -> None:
    """Episode 0's first step returns only once episode 1 has ended: in lockstep it would never."""
    fast_is_over = threading.Event()
    ended: list[int] = []

    def slow(action: str) -> Any:
        assert fast_is_over.wait(timeout=20)
        return end()

    def on_finish(trajectory: Trajectory) -> None:
        ended.append(trajectory.seed)
        fast_is_over.set()

    fast: dict[str, Any] = {"answers": [go_on("up"), go_on("up"), end()]}
    trajectories = make_engine(workers=workers).run(specs({"answers": [slow]}, fast), ScriptedSampler(), on_finish)
    assert [trajectory.stop_reason for trajectory in trajectories] == [StopReason.TERMINATED] * 2
    assert [len(trajectory.turns) for trajectory in trajectories] == [1, 3]
    assert ended == [1, 0]


def test_the_sampler_does_not_wait_for_a_slow_environment() -> None:
    """Episode 0's step returns only once the sampler has answered episode 1, which takes it five more steps."""
    sampled = threading.Event()

    class Watched(ScriptedSampler):
        def step(self) -> Any:
            outputs = super().step()
            if any(output.episode == 1 for output in outputs):
                sampled.set()
            return outputs

    def slow(action: str) -> Any:
        assert sampled.wait(timeout=20)
        return end()

    policy = Watched(latency=lambda request: 1 if request.episode == 0 else 6)
    trajectories = make_engine(workers=1).run(specs({"answers": [slow]}, {}), policy)
    assert [trajectory.error for trajectory in trajectories] == [None, None]


def test_the_sampler_is_told_of_the_end_of_every_episode() -> None:
    """It refuses a key that it still knows under another prompt."""
    policy = ScriptedSampler()
    for start in ("go", "up"):
        engine = make_engine()
        engine.run(specs({"start": (start, {})}, {"answers": [RuntimeError()]}), policy)


# ------------------------------------------------------------------------------------------- what is not an episode's


class BrokenGenerator(ScriptedSampler):
    """Fails at its second step."""

    steps = 0

    def step(self) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise MemoryError("out of memory")
        return super().step()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_generator_raises_propagates_and_leaves_nothing_behind(workers: int) -> None:
    factory = Factory()
    engine = make_engine(factory, workers=workers)
    four: dict[str, Any] = {"answers": [go_on("up"), go_on("up"), go_on("up"), end()]}
    with pytest.raises(MemoryError, match="out of memory"):
        engine.run(specs(four, four), BrokenGenerator())
    first = list(factory.made)
    trajectories = engine.run(specs(four, four), ScriptedSampler())
    assert trajectories == make_engine().run(specs(four, four), ScriptedSampler())
    assert [environment.resets for environment in first] == [1, 1]


def test_what_submit_and_on_finish_raise_propagates() -> None:
    def no_answer(request: GenerationRequest) -> list[int]:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        make_engine().run(specs({}), ScriptedGenerator(no_answer))

    def interrupt(trajectory: Trajectory) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_engine().run(specs({}), ScriptedSampler(), interrupt)


def test_a_lost_request_is_an_error_and_no_endless_wait() -> None:
    class Forgetful(ScriptedSampler):
        def step(self) -> Any:
            super().step()
            return []

    with pytest.raises(RuntimeError, match="Forgetful lost a request"):
        make_engine().run(specs({}), Forgetful())


# ---------------------------------------------------------------------------------------------------------------- noise


@pytest.fixture(scope="module")
def model(embedded_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_model).eval()


class Echo(Scripted):
    """Talks for ``options["turns"]`` turns, at a length that depends on what it heard."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.left = (options or {}).get("turns", 1)
        return f"number {seed}", {}

    def step(self, action: str) -> Any:
        self.left -= 1
        return "again " * (1 + len(action) % 4), 0.0, self.left == 0, False, {}


def sample(model: Any, folder: Path, given: list[EpisodeSpec]) -> list[Trajectory]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = ChatRenderer(tokenizer)
    generator = TransformersGenerator(
        model,
        eos_token_ids=[*chat.eos_token_ids, *tokenizer.encode(" e a")],
        pad_token_id=tokenizer.pad_token_id,
        settings=SamplingSettings(),
    )
    return RolloutEngine(EnvironmentPool(Echo), chat, Limits(4, 12, 512)).run(given, generator)


def test_an_episode_depends_neither_on_its_neighbours_nor_on_their_order(model: Any, embedded_model: Path) -> None:
    given = [EpisodeSpec(seed, (7, seed), {"turns": 1 + seed % 3}) for seed in range(6)]
    together = sample(model, embedded_model, given)
    assert len({len(trajectory.completion_ids) for trajectory in together}) > 3
    backwards = sample(model, embedded_model, given[::-1])[::-1]
    alone = [sample(model, embedded_model, [spec])[0] for spec in given]
    for other in (backwards, alone):
        assert [t.completion_ids for t in other] == [t.completion_ids for t in together]
        assert [spans(t) for t in other] == [spans(t) for t in together]


def test_members_of_a_group_start_alike_and_sample_apart(model: Any, embedded_model: Path) -> None:
    first, second, third = sample(
        model,
        embedded_model,
        [EpisodeSpec(1, (7, 0)), EpisodeSpec(1, (7, 1)), EpisodeSpec(1, (7, 0))],
    )
    assert first.prompt_ids == second.prompt_ids
    assert first.completion_ids != second.completion_ids
    assert first.completion_ids == third.completion_ids


def test_uniforms_go_on_over_the_turns_of_an_episode() -> None:
    """One stream per episode: drawn in turns it gives what it gives at once; streams of other episodes are others."""
    draws: dict[int, list[float]] = {0: [], 1: []}

    def draw(request: GenerationRequest) -> list[int]:
        draws[request.episode] += request.uniforms(2)
        return ids("a ]")

    three: dict[str, Any] = {"answers": [go_on("up"), go_on("up"), end()]}
    make_engine().run(specs(three, three), ScriptedGenerator(draw))
    assert len(draws[0]) == 6 and len({*draws[0], *draws[1]}) == 12
    assert all(0.0 <= uniform < 1.0 for uniform in draws[0])

    at_once: list[float] = []

    def draw_at_once(request: GenerationRequest) -> list[int]:
        at_once.extend(request.uniforms(6))
        return ids("a ]")

    make_engine().run(specs({}), ScriptedGenerator(draw_at_once))
    assert at_once == draws[0]


def test_shortened_conversations_end_at_the_lower_limit() -> None:
    limits = {"a": Limits(4, 8, 30), "b": Limits(4, 8, 100)}
    engine = RolloutEngine(
        EnvironmentPool({"a": Scripted, "b": Scripted}), CHAT, Limits(4, 8, 50), environment_limits=limits
    )
    engine.shorten(40)
    assert engine.limits == Limits(4, 8, 40)
    assert [engine.limits_of(name).max_model_length for name in ("a", "b")] == [30, 40]
