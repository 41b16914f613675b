"""Every pushed byte of runs that hold secrets of 60 kinds, on a Hub in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forks
import pytest
from games import make_trainer
from hub_runs import environment
from hub_server import Hub, running_hub
from planted import SECRETS, Keeper, found_in
from transformers import AutoTokenizer

from agile_trainers.adapters.folders import CheckpointError
from agile_trainers.checkpoints.integrity import check_complete


def pushes(hub: Hub, model: Path, folder: Path, parts: str) -> str:
    script = Path(__file__).with_name("hub_secrets.py")
    done = forks.run([script, model, folder], env={**environment(hub, folder / "home"), "PARTS": parts}, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr + done.stdout


def pushed_files(hub: Hub, repository: str) -> list[tuple[str, bytes]]:
    """Each content of each file of all commits, once."""
    commits = hub.repositories[repository]
    return list(dict.fromkeys((name, content) for commit in commits for name, content in commit["files"].items()))


@pytest.mark.slow
def test_a_push_of_checkpoints_holds_no_secret(embedded_model: Path, tmp_path: Path) -> None:
    """Of a run that was saved inside a generation batch; all of its checkpoints are whole without their episodes."""
    with running_hub() as hub:
        pushes(hub, embedded_model, tmp_path, "plain")
        files = pushed_files(hub, "tester/plain")
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    assert len({name for name, _ in files}) > 30 and found_in(files, tokenizer) == set()
    found = {secret for _, _, secret in found_in([("x", json.dumps(SECRETS).encode())])}
    assert found == SECRETS.keys(), "the search finds each"
    by_name = dict(files)
    listed: dict[str, Any] = json.loads(by_name["checkpoint-1/complete.json"])["files"]
    assert {f"checkpoint-1/{name}" for name in listed} <= by_name.keys()
    assert "rollout/position.json" in listed and not any("rank-" in name for name in by_name)
    for name, content in files:
        path = tmp_path / "pushed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    inside, after = (check_complete(tmp_path / "pushed" / f"checkpoint-{step}") for step in (1, 2))
    elsewhere = make_trainer(embedded_model, tmp_path / "elsewhere", environment=Keeper)
    with pytest.raises(CheckpointError, match="pushed without the episodes"):
        elsewhere.train(resume_from_checkpoint=str(inside))
    with pytest.raises(CheckpointError, match="another run"):
        elsewhere.train(resume_from_checkpoint=str(after))


@pytest.mark.slow
def test_a_population_and_a_chain_push_no_secret(embedded_model: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        pushes(hub, embedded_model, tmp_path, "files")
        repositories = set(hub.repositories)
        found = {name: found_in(pushed_files(hub, name)) for name in repositories}
    assert repositories == {"tester/evolved", "tester/chain-sft", "tester/chain-grpo"}
    assert found == {name: set() for name in repositories}
