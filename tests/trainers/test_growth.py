"""What a run keeps does not grow with its steps, but for the history of its logs, which is the user's."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import pytest
from games import make_trainer
from ppo_games import make_ppo
from transformers import TrainerCallback

from agile_trainers.checkpoints.model_card import CURVE, Panel

FIRST, LAST = 4, 10
"""Steps at which objects are counted."""


def _may_leak(one: Any) -> bool:
    """Leave out dictionaries of plain values, as of logs and messages, and the answers that abstract classes note.

    Up to Python 3.13 such dictionaries are not among the objects. An ``isinstance`` may note a class in a hundred others.
    """
    if type(one) is dict:
        return any(map(gc.is_tracked, one.values()))
    if type(one) is weakref.ref:
        return not isinstance(one(), type)
    return type(one) is not BuiltinFunctionType or one.__name__ != "_destroy"


class Census(TrainerCallback):
    """Counts all objects with references, by type, at two steps."""

    def __init__(self) -> None:
        self.counts = {FIRST: Counter[str](), LAST: Counter[str]()}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.counts:
            gc.collect()
            types = map(type, filter(_may_leak, gc.get_objects()))
            self.counts[state.global_step].update(f"{each.__module__}.{each.__qualname__}" for each in types)


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def run(request: pytest.FixtureRequest, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that logs and plays evaluations often, and what was counted in it."""
    census = Census()
    settings: dict[str, Any] = {
        "max_steps": LAST + 1, "per_device_train_batch_size": 4, "learning_rate": 1e-4, "eval_strategy": "steps",
        "eval_steps": 2, "num_eval_episodes": 2, "save_strategy": "steps", "save_steps": 2, "callbacks": [census],
    }  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param)
    trainer = (make_ppo if request.param == "ppo" else make_trainer)(embedded_model, folder, **settings)
    trainer.train()
    return trainer, census


def test_objects_do_not_grow_with_steps(run: Any) -> None:
    _, census = run
    early, late = census.counts[FIRST], census.counts[LAST]
    # The batch that is kept at a step varies by a few objects.
    grown = {name: late[name] - early[name] for name in late if late[name] - early[name] >= LAST - FIRST}
    assert not grown, grown


def test_all_logs_share_one_string_for_a_name(run: Any) -> None:
    trainer, _ = run
    names = [name for entry in trainer.state.log_history for name in entry]
    assert len({id(name) for name in names}) == len(set(names))


def test_cards_do_not_keep_what_their_curve_showed(run: Any) -> None:
    trainer, _ = run
    assert Path(trainer.args.output_dir, f"checkpoint-{LAST}", CURVE).is_file()
    gc.collect()
    assert not any(type(each) is Panel for each in gc.get_objects())
