"""What is checked of agents before a run, which options they refuse, and runs of agents beside environments."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import PROGRAM, talks
from datasets import Dataset
from games import Chatter, make_trainer

from agile_trainers.envs.agent import Agent
from agile_trainers.envs.checker import EnvironmentProtocolError
from agile_trainers.envs.isolation.process_tree import PREFIX
from agile_trainers.evaluation import evaluate_policy
from agile_trainers.rollout.environment_probe import UNLIMITED, planned_tokens, probe_environment
from agile_trainers.rollout.episode_options import EpisodeOptions, build_engine
from agile_trainers.types import StopReason

COMMAND = Agent.command(
    [sys.executable, "-c", PROGRAM, "{question}"], score=lambda task, finished: float(len(finished.stdout) % 2)
)
ROWS = Dataset.from_list([{"question": f"what is {n}"} for n in range(8)])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"history": "last:2"}, "history has no effect on an agent: it owns its context"),
        ({"system_prompt": "Be brief."}, "system_prompt has no effect on an agent: it owns its context"),
        ({"max_observation_length": 50}, "max_observation_length has no effect on an agent.*max_model_length"),
        ({"environment_workers": 2}, "environment_workers has no effect on an agent.*max_environments"),
    ],
)
def test_options_without_effect_on_an_agent(
    changed: dict[str, Any], said: str, embedded_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        EpisodeOptions(**changed).make_pool(Agent(talks))
    with pytest.raises(ValueError, match=said):
        make_trainer(embedded_model, tmp_path, environment=Agent(talks), **changed)
    EpisodeOptions(**changed).make_pool({"a": Agent(talks), "b": Chatter})  # b heeds it


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"history": {"a": "last:2"}}, r"history\['a'\] has no effect on an agent"),
        (
            {"environment_limits": {"a": {"max_turns": 2, "max_observation_length": 5}}},
            r"environment_limits\['a'\]\['max_observation_length'\] has no effect on an agent",
        ),
    ],
)
def test_options_of_one_of_several_environments(changed: dict[str, Any], said: str) -> None:
    both = {"a": Agent(talks), "b": Chatter}
    with pytest.raises(ValueError, match=said):
        EpisodeOptions(**changed).make_pool(both)
    renamed = {option: {"b": value["a"]} for option, value in changed.items()}
    EpisodeOptions(**renamed).make_pool(both)
    EpisodeOptions(environment_limits={"a": {"max_turns": 2, "max_model_length": 50}}).make_pool(both)


def test_an_agent_names_no_anchor(embedded_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which an agent does not name"):
        make_trainer(embedded_model, tmp_path, environment=Agent(talks), advantage_granularity="anchor")


def test_an_agents_rewards_are_not_weighted_by_turns(embedded_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weighs a reward by the turns up to it, but the agent talks"):
        make_trainer(
            embedded_model, tmp_path, environment=Agent(talks), batches_ahead=1, drift_correction="decision_truncate"
        )


def test_an_agent_has_no_discount_by_turns(embedded_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gamma=0\.9 discounts by the order of turns, but the agent talks"):
        make_trainer(
            embedded_model, tmp_path, environment=Agent(talks), algorithm="reinforce", gamma=0.9, num_generations=1
        )


def test_a_command_is_tried_on_the_first_row(embedded_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"names \{question\}, but the rows have the columns prompt"):
        make_trainer(
            embedded_model, tmp_path, environment=COMMAND, train_dataset=ROWS.rename_column("question", "prompt")
        )
    with pytest.raises(ValueError, match=r"names \{question\}, but there are no rows"):
        make_trainer(embedded_model, tmp_path, environment=COMMAND)
    with pytest.raises(ValueError, match=r"names \{question\}, but there are no rows"):
        evaluate_policy(str(embedded_model), None, COMMAND, 2)


def test_a_function_that_makes_an_agent_is_no_environment() -> None:
    pool = EpisodeOptions().make_pool(lambda: Agent(talks))  # type: ignore[arg-type, return-value]
    with pytest.raises(EnvironmentProtocolError, match="makes an agent, not the environment of an episode"):
        probe_environment(pool, 0, None)


def test_memory_is_planned_for_the_longest_conversation(embedded_model: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    config = AutoConfig.from_pretrained(embedded_model)

    def planned(config: Any, **options: Any) -> int:
        pool = EpisodeOptions(**options).make_pool(Agent(talks))
        engine = build_engine(EpisodeOptions(**options), pool, tokenizer, model_config=config)
        return planned_tokens(engine, {None: probe_environment(pool, 0, None)})

    assert planned(config, max_model_length=77) == 77
    assert planned(config) == config.max_position_embeddings < UNLIMITED
    with pytest.raises(ValueError, match="max_model_length is not set, the model names no limit"):
        planned(None)


def test_an_agent_and_an_environment_in_one_run(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, environment={"talks": Agent(talks), "chatter": Chatter}, max_steps=2,
        max_logprob_gap=1e-3, history={"chatter": "last:1"}, environment_limits={"talks": {"max_turns": 2}},
    )  # fmt: skip
    played = []
    for _ in range(2):
        episodes = trainer.rollout()
        trainer.update(episodes)
        played += episodes
    by_name = {name: [one for one in played if one.environment_name == name] for name in ("talks", "chatter")}
    assert all(by_name.values()) and not any(one.error for one in played)
    assert {len(one.turns) for one in by_name["talks"]} == {2}


def test_a_command_trains(embedded_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(
        embedded_model, tmp_path, environment=COMMAND, train_dataset=ROWS, max_logprob_gap=1e-3, max_environments=3
    )
    episodes = trainer.rollout()
    trainer.update(episodes)
    assert [one.error for one in episodes] == [None] * 8
    assert {len(one.turns) for one in episodes} == {1}
    for one in episodes:
        info = one.turns[-1].info
        assert info["exit_code"] == 0 and info["stdout"] == f"{one.turns[0].text}\n"
        assert one.prompt[-1]["content"] == one.options["question"]  # type: ignore[index]
        assert one.episode_return == len(info["stdout"]) % 2


@pytest.mark.slow
def test_a_program_that_takes_too_long_ends_with_its_episode(embedded_model: Path, tmp_path: Path) -> None:
    """Inside this process the episode is cancelled, in another one that process is killed; the next episodes are sound."""
    hangs = (
        "import os, subprocess, sys, time\n"
        "if sys.argv[1] == 'what is 0':\n    subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)\n"
        + PROGRAM
    )  # fmt: skip
    mark = f"agent-test-{os.getpid()}"
    agent = Agent.command(
        [sys.executable, "-c", hangs, "{question}"], score=lambda task, finished: 1.0, env=[f"MARK={mark}"]
    )
    before = folders()
    for options in ({}, {"environment_processes": 4}):
        trainer = make_trainer(
            embedded_model, tmp_path / str(len(options)), environment=agent, train_dataset=ROWS,
            shuffle_dataset=False, environment_timeout=15.0, **options,
        )  # fmt: skip
        episodes = trainer.rollout()
        reasons = {one.options["question"]: one.stop_reason for one in episodes}  # type: ignore[index]
        assert reasons == {"what is 0": StopReason.ENVIRONMENT_TIMEOUT, "what is 1": StopReason.TERMINATED}
        deadline = time.monotonic() + 60
        while (marked(mark) or folders() - before) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not marked(mark) and not folders() - before


def folders() -> set[Path]:
    """The folders of programs."""
    return set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def marked(mark: str) -> list[int]:
    """The processes whose environment has a mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == mark:
                found.append(process.pid)
    return found
