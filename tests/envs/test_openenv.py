"""The adapter against real OpenEnv servers, over websocket and HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from installed import needs
from openenv_server import bound, serve
from tenacity import AsyncRetrying

from agile_trainers.envs import check_environment, make_environment_factory
from agile_trainers.envs.libraries import openenv
from agile_trainers.envs.libraries.openenv import OpenEnvEnvironment, OpenEnvError, OpenEnvUnavailableError
from agile_trainers.rollout.environment_pool import EnvironmentPool

needs("openenv")


@pytest.fixture(scope="module")
def guess_url() -> Iterator[str]:
    from openenv_games import guess_app

    with serve(guess_app(16)) as url:
        yield url


@pytest.fixture(scope="module")
def board_url() -> Iterator[str]:
    from openenv_games import board_app

    with serve(board_app()) as url:
        yield url


def episode(environment: Any, seed: int | None, *answers: str, options: dict[str, Any] | None = None) -> list[Any]:
    """What reset and every step return."""

    async def play() -> list[Any]:
        results = [await environment.reset(seed=seed, options=options)]
        for answer in answers:
            results.append(await environment.step(answer))
        await environment.close()
        return results

    return asyncio.run(play())


def test_an_episode_over_websocket(guess_url: str) -> None:
    environment = make_environment_factory(f"openenv:{guess_url}", observation_field="hint")()
    assert environment.action_field == "text"  # type: ignore[attr-defined]
    (start, info), wrong, right = episode(environment, 4, "3", "5")
    assert start == "Guess a number from 1 to 9." and info["observation"]["success"] is False
    assert wrong[:4] == ("wrong", 0.0, False, False) and right[:4] == ("right", 1.0, True, False)
    assert [result[4]["success"] for result in (wrong, right)] == [False, True]
    assert right[4]["observation"]["hint"] == "right"


def test_eight_episodes_on_one_session(guess_url: str) -> None:
    environment = OpenEnvEnvironment(guess_url)

    async def play() -> list[bool]:
        solved = []
        for seed in range(8):
            await environment.reset(seed=seed)
            socket = environment._socket
            for guess in range(1, 10):
                _, _, terminated, _, info = await environment.step(str(guess))
                assert terminated == (guess == seed % 9 + 1)
                if terminated:
                    break
            solved.append(info["success"])
            assert environment._socket is socket
        await environment.close()
        return solved

    assert asyncio.run(play()) == [True] * 8


def test_the_rows_columns_go_to_reset(guess_url: str) -> None:
    environment = OpenEnvEnvironment(guess_url, observation_field="hint")
    (start, _), step = episode(environment, 1, "8", options={"low": 7, "seed": 7, "episode_id": None})
    assert start == "Guess a number from 7 to 9." and step[0] == "right"


def test_all_fields_of_an_observation_are_json(guess_url: str) -> None:
    ((start, _),) = episode(OpenEnvEnvironment(guess_url), 0)
    assert start == '{"hint": "Guess a number from 1 to 9.", "success": false}'


def test_actions_of_several_fields_are_json(board_url: str) -> None:
    environment = OpenEnvEnvironment(board_url)
    assert environment.action_field is None
    (start, _), prose, wrong, miss, hit = episode(
        environment,
        0,
        "the corner",
        'I aim at {"row": "top"}',
        '{"row": 0, "column": 0}',
        'So: {"row": 1, "column": 2}!',
    )
    assert start == "...\n..."
    assert prose[0].startswith("That is no action: it holds no JSON object. Expected a JSON object")
    assert '{"row": "integer", "column": "integer"}' in prose[0] and prose[1:] == (0.0, False, False, {})
    assert wrong[0].startswith("That is no action") and "row" in wrong[0] and "column" in wrong[0]
    assert (miss[0], hit[:3]) == ("miss", ("hit", 1.0, True))


def test_an_error_of_the_servers_is_raised_and_the_next_episode_works(guess_url: str) -> None:
    environment = OpenEnvEnvironment(guess_url, observation_field="hint")

    async def play() -> str:
        await environment.reset(seed=0)
        with pytest.raises(OpenEnvError, match="the server's own bug"):
            await environment.step("crash")
        await environment.reset(seed=1)
        observation, *_ = await environment.step("2")
        await environment.close()
        return str(observation)

    assert asyncio.run(play()) == "right"


def test_many_sessions_step_at_the_same_time(guess_url: str) -> None:
    """None of eight steps ends before all have begun."""
    pool = EnvironmentPool(make_environment_factory(f"openenv:{guess_url}"))
    outcomes: list[Any] = []
    for number in range(8):
        pool.reset(number, number, None)
    while len(outcomes) < 8:
        outcomes += pool.outcomes(block=True)
    for number in range(8):
        pool.step(number, "together")
    while len(outcomes) < 16:
        outcomes += pool.outcomes(block=True)
    assert not any(outcome.error for outcome in outcomes)
    for number in range(8):
        pool.release(number, reusable=True)
    pool.close()


def test_a_full_server_is_waited_for() -> None:
    from openenv_games import guess_app

    with serve(guess_app(1)) as url:
        first, patient = OpenEnvEnvironment(url), OpenEnvEnvironment(url, retries=12, backoff=0.05)
        hasty = OpenEnvEnvironment(url, retries=0)

        async def play() -> str:
            await first.reset(seed=0)
            with pytest.raises(OpenEnvUnavailableError, match=r"max_concurrent_envs.*max_environments"):
                await hasty.reset(seed=0)
            waiting = asyncio.create_task(patient.reset(seed=3))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await first.close()
            observation, _ = await waiting
            await patient.close()
            return str(observation)

        assert "Guess a number" in asyncio.run(play())


def test_a_lost_connection_costs_the_episode_and_the_next_one_reconnects() -> None:
    from openenv_games import guess_app

    async def play(environment: OpenEnvEnvironment, stop: Callable[[], None], start: Callable[[], None]) -> str:
        await environment.reset(seed=0)
        await asyncio.to_thread(stop)
        with pytest.raises(OpenEnvUnavailableError, match="did not answer"):
            await environment.step("3")
        again = asyncio.create_task(environment.reset(seed=1))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(start)
        await again
        observation, *_ = await environment.step("2")
        await environment.close()
        return str(observation)

    with bound() as holder:  # nobody else takes the port while no server has it
        port = holder.getsockname()[1]
        servers = [serve(guess_app(4), port)]
        environment = OpenEnvEnvironment(servers[0].__enter__(), observation_field="hint", retries=12, backoff=0.1)

        def start() -> None:
            servers.append(serve(guess_app(4), port))
            servers[-1].__enter__()

        try:
            assert asyncio.run(play(environment, lambda: servers[0].__exit__(None, None, None), start)) == "right"
        finally:
            servers[-1].__exit__(None, None, None)


def test_pauses_double_and_other_errors_are_not_repeated(guess_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    # Not asyncio's: servers of other tests, in threads of this process, sleep too.
    monkeypatch.setattr(openenv, "AsyncRetrying", partial(AsyncRetrying, sleep=sleep))
    down = OpenEnvUnavailableError
    errors: list[Exception | None] = [down(), down(), down(), None]
    environment = OpenEnvEnvironment(guess_url, retries=3, backoff=0.5)
    call = environment._call

    async def attempt(*given: Any) -> Any:
        if (error := errors.pop(0)) is not None:
            raise error
        return await call(*given)

    monkeypatch.setattr(environment, "_call", attempt)

    async def start() -> None:
        await environment.reset(seed=0)
        await environment.close()

    asyncio.run(start())
    assert pauses == [0.5, 1.0, 2.0]
    errors[:] = [down("1"), down("2"), down("3"), down("4")]
    with pytest.raises(down, match="4"):
        asyncio.run(start())
    errors[:] = [ValueError()]
    with pytest.raises(ValueError):
        asyncio.run(start())
    assert len(pauses) == 6


def test_the_checker_finds_nothing(guess_url: str) -> None:
    factory = make_environment_factory(f"openenv:{guess_url}")
    report = check_environment(factory, episodes=2, max_turns=3, actions=["1", "2", "3"])
    assert not report.findings, str(report)


@pytest.mark.parametrize(
    ("url", "kwargs", "words"),
    [
        ("localhost:8000", {}, ["http://localhost:8000", "'localhost:8000'"]),
        (None, {"action_field": "txt"}, ["no action field 'txt'", "text"]),
        (None, {"observation_field": "board"}, ["no observation field 'board'", "hint, success"]),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    guess_url: str, url: str, kwargs: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        make_environment_factory(f"openenv:{url or guess_url}", **kwargs)
    assert all(word in str(error.value) for word in words), error.value


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(OpenEnvUnavailableError, match="an OpenEnv server runs at this address"):
        make_environment_factory("openenv:http://127.0.0.1:9")


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "websockets" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'agile-trainers\[envs\]'"):
        make_environment_factory("openenv:http://localhost:8000")
