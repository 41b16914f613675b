"""Populations on vLLM: one engine for all members, and one batch for their evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import requests
from populated import Talk, different, population, quiet
from serving import serving

from agile_trainers.adapters.folders import read_json
from agile_trainers.evaluation import EpisodeOptions, evaluate_policy, policy
from agile_trainers.populations import Population
from agile_trainers.rollout.generators.vllm.engine import VllmEngine
from agile_trainers.rollout.generators.vllm.servers import VllmServers
from agile_trainers.rollout.seeds import SELECTION

EPISODES = 6
GREEDY: dict[str, Any] = {
    "use_vllm": True, "members": 3, "eval_greedy": True, "num_eval_episodes": EPISODES, "max_model_length": 256,
    "environment_timeout": None,
}  # fmt: skip


def alone(folder: Path) -> list[float | None]:
    """The returns of the episodes by which a population selects, played by a saved policy on transformers."""
    options = EpisodeOptions(max_turns=2, max_new_tokens=4, max_model_length=256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "HELD_OUT", SELECTION)
        played = evaluate_policy(str(folder), None, Talk, EPISODES, seed=3, options=options, greedy=True, device="cpu")
    return [row["return"] for row in played.rows]


def values(made: Population, number: int, member: int) -> list[float | None]:
    found = read_json(made.output_dir / "rounds" / f"{number:04d}" / f"{made.folder(member).name}.json")
    assert not found["failed"]
    return list(found["values"])


def check_rounds(made: Population) -> None:
    """Each member's folder holds the policy of its last evaluation: three in the first round, two in the second."""
    assert [event.event for event in made.lineage.events].count("trained") == 5
    (stopped,) = (event.member for event in made.lineage.events if event.event == "stopped")
    for member in range(3):
        assert values(made, 1 if member == stopped else 2, member) == alone(made.folder(member))
    # Learning rates of a factor of a hundred: not all policies play alike.
    assert len({tuple(values(made, 1, member)) for member in range(3)}) > 1


class Watched:
    """What an engine was asked: the adapters of the requests under way at each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: list[VllmEngine] = []
        self.together: list[int] = []
        start, submit = VllmEngine.__init__, VllmEngine.submit

        def starting(engine: VllmEngine, *args: Any, **options: Any) -> None:
            start(engine, *args, **options)
            self.engines.append(engine)
            self.watch(engine)

        def submitting(engine: VllmEngine, ids: list[int], params: Any, adapter: Any = None) -> str:
            key = submit(engine, ids, params, adapter)
            self.under_way[key] = (adapter or engine.adapter).lora_name
            return key

        monkeypatch.setattr(VllmEngine, "__init__", starting)
        monkeypatch.setattr(VllmEngine, "submit", submitting)
        self.under_way: dict[str, str] = {}

    def watch(self, engine: VllmEngine) -> None:
        step = engine.engine.step

        def stepping() -> Any:
            self.together.append(len(set(self.under_way.values())))
            outputs = step()
            for output in outputs:
                if output.finished:
                    del self.under_way[output.request_id]
            return outputs

        engine.engine.step = stepping  # type: ignore[method-assign]


def test_members_share_an_engine_and_are_evaluated_in_one_batch(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Watched(monkeypatch)
    made = population(embedded_model, tmp_path / "whole", **GREEDY)
    digest = made.base.digest()
    made.run()
    assert len(seen.engines) == 1 and seen.engines[0].max_adapters == 3
    # The evaluation of the first round steps three adapters together, that of the second two.
    assert set(seen.together) == {1, 2, 3}
    check_rounds(made)
    assert made.base.digest() == digest


def test_a_killed_population_is_the_same(embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the evaluation of the first round, when all members are trained."""
    from agile_trainers.populations import members

    whole = population(embedded_model, tmp_path / "whole", **GREEDY)
    whole.run()
    evaluate = members.Rounds._evaluate_adapters

    def killed(*given: Any, **named: Any) -> Any:
        evaluate(*given, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(members.Rounds, "_evaluate_adapters", killed)
        population(embedded_model, tmp_path / "killed", **GREEDY).run()
    assert not list((tmp_path / "killed").glob("rounds/*/*.json"))
    made = population(embedded_model, tmp_path / "killed", **GREEDY)
    made.run()
    assert made.best == whole.best
    for number, member in [(1, 0), (1, 1), (1, 2), (2, whole.best)]:
        assert values(made, number, member) == values(whole, number, member)
    assert different(made.checkpoint(made.best), whole.checkpoint(whole.best)) == []


def test_a_member_that_crashes_loses_only_itself(embedded_model: Path, tmp_path: Path) -> None:
    def harm(trainer: Any, member: int) -> None:
        quiet(trainer, member)
        if member == 1:
            raise RuntimeError("the simulator is gone")

    made = population(embedded_model, tmp_path, on_trainer=harm, **GREEDY)
    made.run()
    events = {event.member: event for event in made.lineage.events if event.round == 1}
    assert events[1].reason == "RuntimeError: the simulator is gone" and made.best != 1
    assert values(made, 1, made.best) and made.lineage.finished


def test_members_are_served_by_a_server(embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    generate = VllmServers.generate

    def watched(self: VllmServers, ids: Any, fields: Any, adapter: str | None = None, episode: int = 0) -> Any:
        asked.append(str(adapter))
        return generate(self, ids, fields, adapter, episode)

    monkeypatch.setattr(VllmServers, "generate", watched)
    with serving(embedded_model, 256) as served:
        made = population(embedded_model, tmp_path, vllm_mode="server", vllm_server_base_url=served.url, **GREEDY)
        made.run()
        listed = [entry["id"] for entry in requests.get(f"{served.url}/v1/models").json()["data"]]
    check_rounds(made)
    # Three adapters in the first round, two in the second, and the best one on held-out episodes; training names none.
    assert len(set(asked)) == 7 and "None" in asked
    assert not [name for name in listed if name.startswith("policy-")]
