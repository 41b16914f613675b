"""From ids to factories, and from wrong ids to helpful errors."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import agents_by_name
import pytest
from installed import needs, skip_without_libraries

from agile_environments import TASKS
from agile_environments.guess_number import GuessNumber
from agile_environments.probes import PROBES, TwoInputs
from agile_trainers.envs import list_environments, make_environment_factory, register_environment, registry
from agile_trainers.envs.agent import Agent, Model, Task, agent_of, is_agent
from agile_trainers.envs.libraries import gem
from agile_trainers.envs.registry import describe_environment


class NeedsSize:
    """An environment that cannot be made without an argument."""

    def __init__(self, size: int):
        self.size = size

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "a", {}

    def step(self, action: str) -> Any:
        return "b", 0.0, True, False, {}


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def test_ids_make_what_they_name() -> None:
    game = make_environment_factory("agile:guess_number", level="hard", max_turns=7)()
    assert isinstance(game, GuessNumber) and (game.high, game.max_turns) == (24, 7)
    assert isinstance(make_environment_factory("agile:probe/two_inputs")(), TwoInputs)
    dotted = make_environment_factory("agile_environments.probes:TwoInputs")
    assert dotted.func is TwoInputs


def test_an_id_of_gem_makes_its_game() -> None:
    needs("gem")
    real = make_environment_factory("gem:game:GuessTheNumber-v0-easy", max_number=99)()
    assert isinstance(real, gem.GemEnvironment) and (real.game.max_number, real.game.max_turns) == (99, 4)


def test_every_probe_and_task_has_an_id_that_works() -> None:
    ids = [name for name in list_environments() if name.startswith("agile:")]
    assert ids == sorted([*(f"agile:{name}" for name in TASKS), *(f"agile:probe/{name}" for name in PROBES)])
    for name in ids:
        factory = make_environment_factory(name)
        assert is_agent(factory) or isinstance(factory().reset(seed=0), tuple)


def test_factories_pass_through_and_take_arguments() -> None:
    def make() -> Any:
        return NeedsSize(3)

    assert make_environment_factory(make) is make
    assert make_environment_factory(GuessNumber) is GuessNumber
    made: Any = make_environment_factory(NeedsSize, size=5)()
    assert made.size == 5


class OfBooleans(NeedsSize):
    def __init__(self, old: bool = False, other: bool | None = None, shown: bool | str = "auto"):
        super().__init__(3)


@pytest.mark.parametrize("name", ["old", "other"])
def test_a_text_for_a_boolean_argument_is_refused(name: str) -> None:
    for make in (OfBooleans, f"{__name__}:OfBooleans"):
        with pytest.raises(ValueError, match=f"the arguments {name}: {name} must be true or false, got a text"):
            make_environment_factory(make, **{name: "false"})
        make_environment_factory(make, **{name: False, "shown": "no"})
    with pytest.raises(ValueError, match="streaming must be true or false"):
        make_environment_factory("agile:math", dataset="rows.jsonl", streaming="no")


def test_a_text_for_a_boolean_of_a_library_is_refused() -> None:
    needs("gymnasium")
    with pytest.raises(ValueError, match=r"gymnasium:FrozenLake-v1: is_slippery='false'.*Write false without"):
        make_environment_factory("gymnasium:FrozenLake-v1", is_slippery="false")


def test_each_call_makes_a_new_instance() -> None:
    factory = make_environment_factory("agile:guess_number", high=3)
    assert factory() is not factory()


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("gem:game:GuessTheNumber-v0-eazy", "gem:game:GuessTheNumber-v0-easy"),
        ("GuessTheNumber-v0-easy", "gem:game:GuessTheNumber-v0-easy"),
        ("gme:game:Mastermind-v0-easy", "gem:game:Mastermind-v0-easy"),
        ("agile:guess_nmber", "agile:guess_number"),
        ("guess_number", "agile:guess_number"),
        ("agile:probe/conditonal", "agile:probe/conditional"),
    ],
)
def test_unknown_ids_name_the_nearest(wrong: str, nearest: str) -> None:
    skip_without_libraries(nearest)
    with pytest.raises(ValueError) as error:
        make_environment_factory(wrong)
    message = str(error.value)
    assert f"Unknown environment {wrong!r}" in message and nearest in message and "`agile-trainers envs`" in message


@pytest.mark.parametrize("code", ["def broken(:\n", "1 / 0\n", "raise SystemExit(3)\n"])
def test_a_module_that_fails_to_import_says_where(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_at_import.py").write_text(f"\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'fails_at_import'.*fails_at_import.py, line 2"):
        make_environment_factory("fails_at_import:Environment")


def test_a_missing_attribute_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"agile_environments.probes.*'TwoInput'.*TwoInputs"):
        make_environment_factory("agile_environments.probes:TwoInput")


def test_a_module_whose_own_import_fails_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_something.py").write_text("import a_library_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_nobody_has"):
        make_environment_factory("needs_something:Environment")


@pytest.mark.parametrize(
    ("environment", "kwargs", "words"),
    [
        (NeedsSize, {}, ["no arguments", "'size'", "(size: 'int')"]),
        (NeedsSize(1), {}, ["instance", "Pass the class"]),
        (5, {}, ["5 (int)", "neither an environment id nor a callable"]),
        ("agile:guess_number", {"hihg": 3}, ["agile:guess_number", "'hihg'", "high: "]),
        ("gem:game:Mastermind-v0-easy", {"colours": 3}, ["colours", "code_length"]),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(environment: Any, kwargs: dict[str, Any], words: list[str]) -> None:
    skip_without_libraries(str(environment))
    with pytest.raises(ValueError) as error:
        make_environment_factory(environment, **kwargs)
    assert all(word in str(error.value) for word in words), error.value


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gem" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'agile-trainers\[envs\]'"):
        make_environment_factory("gem:game:GuessTheNumber-v0-easy")
    with pytest.raises(ValueError, match="agile:guess_number"):
        make_environment_factory("agile:guess_nmber")


@pytest.mark.usefixtures("clean_registry")
def test_registered_names() -> None:
    register_environment("sized", NeedsSize)
    register_environment("sized", NeedsSize)
    made: Any = make_environment_factory("sized", size=2)()
    assert made.size == 2 and "sized" in list_environments()
    with pytest.raises(ValueError, match="'sized' is registered already"):
        register_environment("sized", GuessNumber)
    with pytest.raises(ValueError, match="no colon"):
        register_environment("my:game", GuessNumber)
    with pytest.raises(ValueError, match="did you mean sized"):
        make_environment_factory("sizd")


def test_importing_the_package_does_not_import_the_libraries() -> None:
    program = "import agile_trainers.envs, sys; sys.exit('gem' in sys.modules or 'agile_environments' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def play(environment: Any, **arguments: Any) -> Any:
    """What the agent of an id returns for the seed 7."""
    factory = make_environment_factory(environment, **arguments)
    assert is_agent(factory)
    result = asyncio.run(factory().play(Model("http://127.0.0.1:9/v1", "key"), Task({"question": "why"}, 7)))  # type: ignore[attr-defined]
    return result["info"]["stdout"] if isinstance(result, dict) else result


def test_ids_of_agents() -> None:
    """A function, an agent, or what makes one; arguments are keyword arguments."""
    assert play("agent:agents_by_name:solve") == 7
    assert play("agent:agents_by_name:solve", bonus=0.25) == 7.25
    assert play("agent:agents_by_name:plain") == 7
    assert play("agent:agents_by_name:wrapped", bonus=1) == 8
    assert play("agents_by_name:wrapped", bonus=1) == 8
    assert play("agent:agents_by_name:make", bonus=2) == 9
    assert play("agent:agents_by_name:make_function") == 7
    assert play("agent:agents_by_name:Solver") == 7.5
    assert play("agent:agents_by_name:Solver", bonus=1.5) == 8.5
    assert play("agent:agents_by_name:command") == play("agents_by_name:command") == "why\n"
    assert play(agents_by_name.wrapped, bonus=1) == 8


def test_an_agents_options_come_through_ids_and_arguments() -> None:
    for factory in (
        make_environment_factory("agents_by_name:wrapped", bonus=1),
        make_environment_factory("agent:agents_by_name:make", bonus=1),
        make_environment_factory(agents_by_name.wrapped),
    ):
        found = agent_of(factory)
        assert found is not None and found.not_enforced == {"response_format"} and found.__name__ == "solve"
    assert agent_of(make_environment_factory("agile:guess_number")) is None


def test_agents_are_registered_and_mixed(clean_registry: None) -> None:
    register_environment("mine", agents_by_name.wrapped)
    assert play("mine", bonus=1) == 8
    both = registry.environment_factories(
        {"a": "agent:agents_by_name:solve", "b": "agile:guess_number"}, {"a": {"bonus": 1}, "b": {"high": 3}}
    )
    assert isinstance(both, dict) and [is_agent(one) for one in both.values()] == [True, False]


@pytest.mark.parametrize(
    ("wrong", "arguments", "said"),
    [
        ("agent:agents_by_name", {}, "'agent:agents_by_name' names no agent; expected agent:module.path:function"),
        ("agent:agents_by_nam:solve", {}, "Unknown environment 'agent:agents_by_nam:solve'.*there is no module"),
        ("agent:agents_by_name:slove", {}, r"agents_by_name has no 'slove'.*solve"),
        ("agent:agents_by_name.py:solve", {}, "without .py: 'agent:agents_by_name:solve'"),
        ("agent:agents_by_name:number", {}, "given no arguments: it is a int. An agent is a function of"),
        (
            "agent:agents_by_name:one_parameter",
            {},
            r"given no arguments: its signature is \(task",
        ),
        ("agent:agents_by_name:solve", {"bonsu": 1}, "given the arguments bonsu: its signature is .*bonus"),
        ("agent:agents_by_name:make", {}, r"its signature is \(bonus"),
        ("agent:agents_by_name:make_number", {}, "make_number is no agent"),
        ("agent:agents_by_name:wrapped", {"bonsu": 1}, "unexpected keyword argument 'bonsu'"),
        ("agent:agents_by_name:command", {"bonus": 1}, "unexpected keyword argument 'bonus'"),
        ("agent:agents_by_name:yields", {}, "returns its reward, but .*yields.* yields"),
        ("agent:agents_by_name:yields_later", {}, "returns its reward, but .* yields"),
        ("agents_by_name:solve", {}, r"as Agent\(function\), or by the id agent:module.path:function"),
    ],
)
def test_what_is_no_agent(wrong: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_environment_factory(wrong, **arguments)


def test_descriptions_of_agents_tell_them_apart_and_hold_no_secret() -> None:
    described = [
        describe_environment(it)
        for it in (
            "agent:agents_by_name:solve",
            agents_by_name.wrapped,
            agents_by_name.wrapped.with_arguments(bonus=1),
            Agent(agents_by_name.plain),
            agents_by_name.command,
            Agent.command(["echo", "hi"], score=lambda task, finished: 1.0, env=["TOKEN=abc"]),
        )
    ]
    assert [it["environment"] for it in described] == [
        "agent:agents_by_name:solve", "solve", "solve", "plain", "echo", "echo"
    ]  # fmt: skip
    texts = [str(it) for it in described]
    assert len(set(texts)) == len(texts) and "abc" not in "".join(texts)
    assert describe_environment(make_environment_factory("agent:agents_by_name:make", bonus=2)) == {
        "environment": "agent:agents_by_name:make", "environment_arguments": {"bonus": 2}
    }  # fmt: skip
