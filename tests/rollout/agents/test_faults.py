"""Agents and clients that fail: the episodes beside them have the same tokens, and nothing of them is left afterwards."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import faulty
import pytest
from leftovers import nothing_is_left

from agile_trainers.embedded import make_tokenizer
from agile_trainers.envs.agent import Agent, Model, Task
from agile_trainers.rollout import environment_pool, process_environment
from agile_trainers.rollout.chat.renderer import ChatRenderer
from agile_trainers.rollout.engine import RolloutEngine
from agile_trainers.rollout.environment_pool import EnvironmentPool
from agile_trainers.rollout.generators.base import GenerationRequest
from agile_trainers.rollout.generators.scripted import ScriptedGenerator
from agile_trainers.rollout.spec import EpisodeSpec, Limits
from agile_trainers.types import StopReason, Trajectory

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def chat() -> ChatRenderer:
    return ChatRenderer(TOKENIZER, on_rewrite="fork")


class Rollouts:
    """Plays rollouts of agents, each with its own number as the seed, and keeps what was sampled."""

    def __init__(self, chat: ChatRenderer, pool: EnvironmentPool, latency: int = 1) -> None:
        self.engine = RolloutEngine(pool, chat, Limits(max_turns=20, max_new_tokens=20, max_model_length=1000))
        self.sampled: Counter[Any] = Counter()
        """Episode, prompt and answer."""
        self.latency = latency

    def say(self, request: GenerationRequest) -> list[int]:
        text = "".join("abcdefgh"[int(draw * 8)] for draw in request.uniforms(6))
        ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        self.sampled[request.episode, tuple(request.token_ids), tuple(ids)] += 1
        return ids

    def play(self, *whats: str, on_finish: Callable[[Trajectory], None] | None = None) -> list[Trajectory]:
        self.sampled.clear()
        specs = [EpisodeSpec(place, (9, place), {"what": what}) for place, what in enumerate(whats)]
        generator = ScriptedGenerator(self.say, latency=self.latency)
        episodes = self.engine.run(specs, generator, on_finish)
        assert generator.pending == 0
        assert not trained(episodes) - self.sampled, "a sample is trained twice, or in another episode"
        return episodes


def trained(episodes: Sequence[Trajectory]) -> Counter[Any]:
    return Counter(
        (number, tuple(one.prompt_of(turn)), tuple(one.action_of(turn)))
        for number, one in enumerate(episodes)
        for turn in range(len(one.turns))
    )


def content(episode: Trajectory) -> Any:
    return episode.error, episode.prompt_ids, episode.completion_ids, episode.rewards, episode.sampling_logprobs


@contextmanager
def rollouts(chat: ChatRenderer, solve: Any = faulty.solve, latency: int = 1, **options: Any) -> Iterator[Rollouts]:
    with nothing_is_left():
        pool = EnvironmentPool(Agent(solve), **options)
        try:
            yield Rollouts(chat, pool, latency)
        finally:
            pool.close()


async def in_the_loop(model: Model, task: Task) -> float:
    """The same agents as coroutines: what they await runs in threads."""
    what = (task.row or {})["what"]
    if what not in faulty.CRASHES:
        return await asyncio.to_thread(faulty.solve, model, task)
    await asyncio.to_thread(faulty.ask, model, "before")
    try:
        faulty.crash(what)
    finally:
        await asyncio.sleep(0)


@pytest.mark.parametrize("solve", [faulty.solve, in_the_loop])
def test_faults_of_some_do_not_change_the_others(chat: ChatRenderer, solve: Any, capfd: Any) -> None:
    whats = ["sound", *faulty.FAULTS, "sound", *faulty.CRASHES, "sound"]
    with rollouts(chat, solve) as played:
        expected = played.play(*["sound"] * len(whats))
        episodes = played.play(*whats)
        for number, what in enumerate(whats):
            if what == "sound":
                assert content(episodes[number]) == content(expected[number])
                assert {one for one in played.sampled if one[0] == number} == set(trained(episodes)) & {
                    one for one in played.sampled if one[0] == number
                }
            elif what in faulty.CRASHES:
                assert episodes[number].stop_reason is StopReason.ENVIRONMENT_ERROR, what
                assert faulty.CRASHES[what] in str(episodes[number].error)
                assert len(episodes[number].turns) == 1
            else:
                assert episodes[number].error is None, what
                assert len(episodes[number].turns) >= len(expected[number].turns), what
        again = played.play(*["sound"] * len(whats))
        assert list(map(content, again)) == list(map(content, expected))
    assert "Traceback" not in capfd.readouterr().err


def test_a_program_does_not_set_its_own_reward(chat: ChatRenderer) -> None:
    """What a program has, the code has too that its model writes; here it tries all of that as the key of a reward."""
    program = """if True:
        import json, os, urllib.error, urllib.request

        def post(path, body, key):
            request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode())
            request.add_header("Authorization", "Bearer " + key)
            return urllib.request.urlopen(request).read()

        said = {"role": "user", "content": "hi"}
        post("/chat/completions", {"model": "policy", "messages": [said]}, os.environ["OPENAI_API_KEY"])
        for value in {value for value in os.environ.values() if value.isascii()}:
            try:
                print("rewarded", post("/reward", {"value": 1000.0}, value))
            except urllib.error.HTTPError as error:
                said = json.load(error)["error"]["message"]
        print(said)
        """
    solve = Agent.command([sys.executable, "-c", program], score=lambda task, finished: 0.0).solve
    with rollouts(chat, solve) as played:
        (episode,) = played.play("program")
    assert (episode.error, episode.rewards) == (None, [0.0])
    info = episode.turns[-1].info
    assert "rewarded" not in info["stdout"] and "expected model." in info["stdout"], info


# ------------------------------------------------------------------------------------------------------- after the end


@pytest.fixture(autouse=True)
def waiting() -> Iterator[None]:
    yield
    faulty.go_on.set()  # nobody waits after a test
    faulty.late.clear()


@pytest.fixture
def nobody_went_on() -> None:
    faulty.go_on.clear()
    faulty.told.clear()


def test_requests_after_the_end_of_an_episode_are_refused(chat: ChatRenderer, nobody_went_on: None) -> None:
    """The agent's thread goes on when its episode is over and others of the rollout are not."""
    with rollouts(chat) as played:
        expected = played.play("sound", "sound")

        def over(episode: Trajectory) -> None:
            if episode.options == {"what": "outlives"}:
                faulty.go_on.set()

        episodes = played.play("outlives", "waits for the late one", on_finish=over)
        assert list(map(content, episodes)) == list(map(content, expected))
        assert faulty.late[0] == "400: episode_over" and "The episode is over" in faulty.late[1]
        assert len(played.sampled) == 4


def test_requests_after_the_rollout_find_nobody(chat: ChatRenderer, nobody_went_on: None) -> None:
    endpoints: list[Model] = []
    statuses: list[int] = []

    def solve(model: Model, task: Task) -> float:
        for one in endpoints:  # the keys of past rollouts, at the address of this one
            statuses.append(faulty.post(Model(model.base_url, one.api_key), faulty.body_of("late"))[0])
        endpoints.append(model)
        return faulty.sound(model, task)

    with rollouts(chat, solve) as played:
        for _ in range(3):
            played.play("sound")
            assert len(played.sampled) == 2
            with nothing_is_left(), pytest.raises(ConnectionRefusedError):
                faulty.ask(endpoints[-1], "late")
    assert statuses == [401] * 3


def test_agents_that_never_return_are_ended(
    chat: ChatRenderer, nobody_went_on: None, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their time is over once both wait; the sound ones have all that they need."""
    monkeypatch.setattr(faulty, "both_wait", threading.Barrier(2, clock.run_out, timeout=60))
    for solve in (faulty.solve, in_the_loop):
        with rollouts(chat, solve, timeout=0.05, max_environments=2) as played:
            expected = played.play(*["sound"] * 4)
            episodes = played.play("sound", "never returns", "never returns", "sound")
            assert [content(episodes[number]) for number in (0, 3)] == [content(expected[number]) for number in (0, 3)]
            for number in (1, 2):
                assert episodes[number].stop_reason is StopReason.ENVIRONMENT_TIMEOUT
                assert len(episodes[number].turns) == 1


def test_a_coroutine_that_blocks_the_others_costs_no_later_episode(
    chat: ChatRenderer, nobody_went_on: None, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_pool, "_BLOCKED_SECONDS", 0.05)
    monkeypatch.setattr(environment_pool, "_CANCEL_SECONDS", 0.05)  # it blocks on when the pool is closed
    went_on: list[bool] = []

    async def solve(model: Model, task: Task) -> float:
        if task.row == {"what": "blocks"}:
            clock.run_out()
            went_on.append(faulty.go_on.wait(60))
        return await asyncio.to_thread(faulty.sound, model, task)

    with rollouts(chat, solve, timeout=0.05, max_environments=1) as played:
        expected = played.play("sound", "sound")
        episodes = played.play("blocks", "sound")
        assert episodes[0].stop_reason is StopReason.ENVIRONMENT_TIMEOUT
        assert content(episodes[1]) == content(expected[1])
        assert list(map(content, played.play("sound", "sound"))) == list(map(content, expected))
        assert not went_on


def test_agents_in_processes_fail_alone(chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_environment, "_CLOSING_SECONDS", 0.5)  # one that has closed all never ends by itself
    whats = ["sound", "os._exit", "closes all", "forks", "SystemExit", "retries", "sound"]
    with rollouts(chat, processes=2) as played:
        episodes = played.play(*whats)
    with rollouts(chat) as inline:
        expected = inline.play(*["sound"] * len(whats))
    for number in (0, 3, 6):
        assert content(episodes[number]) == content(expected[number])
    assert [episodes[number].stop_reason for number in (1, 2, 4)] == [StopReason.ENVIRONMENT_ERROR] * 3
    assert "died in play" in str(episodes[1].error) and "SystemExit: 3" in str(episodes[4].error)
    assert episodes[5].error is None and len(episodes[5].turns) == 5


def test_two_hundred_episodes_at_once(chat: ChatRenderer) -> None:
    whats = ["sound", "hangs up", "sound", "retries", "duplicates"] * 40
    with rollouts(chat) as played:
        expected = played.play(*["sound"] * 200)
        episodes = played.play(*whats)
        assert not [one.error for one in episodes if one.error]
        for number, what in enumerate(whats):
            if what == "sound":
                assert content(episodes[number]) == content(expected[number])


# --------------------------------------------------------------------------------------------------------- interruptions


class Breaks(ScriptedGenerator):
    """Raises at the third step, when answers are under way."""

    error: type[BaseException] = KeyboardInterrupt
    steps = 0

    def step(self) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise self.error("in the middle")
        return super().step()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("solve", [faulty.solve, in_the_loop])
def test_an_interrupted_rollout_leaves_nothing_for_the_next_one(chat: ChatRenderer, solve: Any, error: Any) -> None:
    with rollouts(chat, solve) as played:
        expected = played.play(*["sound"] * 8)
        say, specs = played.say, [EpisodeSpec(place, (9, place), {"what": "sound"}) for place in range(8)]
        generator = Breaks(say, latency=2)
        generator.error = error
        with nothing_is_left(), pytest.raises(error, match="in the middle"):
            played.engine.run(specs, generator)
        for _ in range(2):
            assert list(map(content, played.play(*["sound"] * 8))) == list(map(content, expected))
            assert sum(played.sampled.values()) == 16


# ------------------------------------------------------------------------------------------- between the three threads


def test_an_answer_that_is_under_way_when_the_agent_returns_is_left_out(chat: ChatRenderer) -> None:
    submitted = threading.Event()

    def solve(model: Model, task: Task) -> float:
        reward = faulty.sound(model, task)
        faulty.raw(model, faulty.body_of("under way"))
        assert submitted.wait(60)
        return reward

    class Rollout(Rollouts):
        def say(self, request: GenerationRequest) -> list[int]:
            if "under way" in TOKENIZER.decode(request.token_ids):
                submitted.set()
            return super().say(request)

    with rollouts(chat) as played:
        (expected,) = played.play("sound")
    with rollouts(chat, solve) as played:
        never = Rollout(chat, played.engine.pool)
        never.latency = lambda request: 10**9 if submitted.is_set() else 1  # type: ignore[assignment]
        (episode,) = never.play("sound")
    assert content(episode) == content(expected) and sum(never.sampled.values()) == 3


class _LatePost(EnvironmentPool):
    """Lets the server's thread post a request only when the rollout has looked for the last ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.looks = True
        self.ends, self.arrived, self.looked = False, threading.Event(), threading.Event()

    def post(self, outcome: Any) -> None:
        if self.ends and outcome.method == "call":
            self.arrived.set()
            assert self.looked.wait(60)
        super().post(outcome)

    def outcomes(self, block: bool, **options: Any) -> list[Any]:
        taken = super().outcomes(block, **options)
        if self.looks and self.arrived.is_set():
            self.looked.set()
        return taken


def test_a_request_that_overtakes_the_end_of_its_episode_is_refused(chat: ChatRenderer) -> None:
    """The server's thread has found the episode, which then ends, and posts the request after that."""
    answers: list[bytes] = []

    def solve(model: Model, task: Task) -> float:
        if task.row == {"what": "late"}:
            reward = faulty.sound(model, task)
            pool.ends = True
            connection = faulty.raw(model, faulty.body_of("late"))
            threading.Thread(target=lambda: answers.append(connection.recv(1 << 16)), daemon=True).start()
            assert pool.arrived.wait(60)
            return reward
        assert pool.looked.wait(60)
        return faulty.sound(model, task)

    def over(episode: Trajectory) -> None:
        if episode.options == {"what": "late"}:
            pool.ends = False
            pool.looked.set()

    with nothing_is_left():
        pool = _LatePost(Agent(solve))
        pool.looks = False
        played = Rollouts(chat, pool)
        episodes = played.play("late", "sound", on_finish=over)
        pool.close()
    assert len(played.sampled) == 4 and not any(one.error for one in episodes)
    assert b" 400 " in answers[0] and b"episode_over" in answers[0]


def test_a_reward_that_was_taken_counts_though_its_agent_has_returned(chat: ChatRenderer) -> None:
    """A thread's: the endpoint takes it after the agent has returned, and before the rollout has heard of that."""
    models: list[Model] = []

    def solve(model: Model, task: Task) -> float:
        models.append(model)
        return faulty.sound(model, task)

    class Rewarding(EnvironmentPool):
        def outcomes(self, block: bool, **options: Any) -> list[Any]:
            taken = super().outcomes(block, **options)
            if any(outcome.method == "play" for outcome in taken):
                models[-1].reward(8.0)
            return taken

    with rollouts(chat) as played:
        (expected,) = played.play("sound")
    with nothing_is_left():
        pool = Rewarding(Agent(solve))
        (episode,) = Rollouts(chat, pool).play("sound")
        pool.close()
    with pytest.raises(Exception, match=r"over|refused"):
        models[-1].reward(8.0)
    assert episode.error is None and episode.episode_return == expected.episode_return + 8.0


def test_a_request_between_the_end_and_the_closing_reaches_no_other_rollout(chat: ChatRenderer) -> None:
    """The server's thread has found the episode when the rollout's thread ends it, and posts after the last look."""

    def solve(model: Model, task: Task) -> float:
        pool.ends = True
        return faulty.sound(model, task)

    class Ends(ScriptedGenerator):
        def step(self) -> Any:
            assert pool.arrived.wait(60)
            raise RuntimeError("in the middle")

    with nothing_is_left():
        pool = _LatePost(Agent(solve))
        played = Rollouts(chat, pool)
        with pytest.raises(RuntimeError, match="in the middle"):
            played.engine.run([EpisodeSpec(0, (9, 0), {"what": "sound"})], _pending(Ends(played.say)))
        posted = [pool._answers.get() for _ in range(pool._answers.qsize())]
        assert not [outcome for call, outcome in posted if call is None], (
            "the end of a call that was given up may be there"
        )
        pool.close()


def _pending(generator: ScriptedGenerator) -> ScriptedGenerator:
    """Give a generator something to do, so that the rollout steps it."""
    generator.submit(GenerationRequest(99, [1], 1, lambda n: [0.5] * n))
    return generator


def test_no_client_waits_for_a_server_that_has_ended(chat: ChatRenderer) -> None:
    """Connections that arrive while the server closes are closed: asyncio would keep those that it had just accepted."""
    before = set(threading.enumerate())  # those of other tests may still wait
    with rollouts(chat) as played:
        for place in range(20):
            generator = Breaks(played.say, latency=2)
            generator.error, generator.steps = RuntimeError, place % 3
            with pytest.raises(RuntimeError, match="in the middle"):
                played.engine.run([EpisodeSpec(one, (9, one), {"what": "sound"}) for one in range(8)], generator)
            deadline = time.monotonic() + 20
            while left := [one for one in threading.enumerate() if one.name == "agent" and one not in before]:
                assert time.monotonic() < deadline, f"{len(left)} clients wait"
                time.sleep(0.01)
