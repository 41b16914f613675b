"""Settings and fixtures of the whole suite. The environment variables come before anything imports torch."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import signal
import sys
import sysconfig
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import left_files
import missing_programs
import pytest

gc.set_threshold(20_000)  # else Python looks for garbage a hundred times while a model is loaded

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread on tiny tensors costs ten times what it brings
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a script has put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Accelerate reads the metadata of DeepSpeed and PEFT in each forward pass: a tenth of the time of a run this small.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
importlib.metadata.version = functools.cache(importlib.metadata.version)
# Transformers and TRL each look through all installed packages when they are imported.
importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (left_files, missing_programs):
        config.pluginmanager.register(plugin)
    installed, found = Path(sysconfig.get_path("purelib"), "agile_trainers"), importlib.util.find_spec("agile_trainers")
    if installed.exists() and found and found.origin != str(installed / "__init__.py"):
        raise pytest.UsageError(
            f"The wheel in {installed} would not be tested, but {found.origin}. Run `pytest`, not `python -m pytest`, which "
            "looks in the current folder first."
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Some files of tests import what imports matplotlib."""
    from agile_trainers.imports import matplotlib_apart

    with matplotlib_apart():
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    _leave_out_of_garbage_collection()
    if "agile_trainers.checkpoints.model_card" in sys.modules:
        importlib.import_module("quick").make_quick()
    if stopping := sys.modules.get("agile_trainers.checkpoints.stopping"):
        stopping._SAME_SECONDS = 0.0  # what a test sends its own process arrives once


def _leave_out_of_garbage_collection() -> None:
    """Freeze what is there: each training run collects, a third of a second else."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Between files, where no fixture holds a run that a test looks for among all objects."""
    _leave_out_of_garbage_collection()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Restore what commands and scripts set for their whole process: the folders of imports, verbosity, progress bars."""
    path = list(sys.path)
    transformers, datasets = sys.modules.get("transformers"), sys.modules.get("datasets")
    loud = transformers and transformers.logging.get_verbosity()
    yield
    sys.path[:] = path
    if transformers and transformers.logging.get_verbosity() != loud:
        transformers.logging.set_verbosity(loud)
    if transformers and not transformers.logging.is_progress_bar_enabled():
        transformers.logging.enable_progress_bar()
    if datasets and datasets.are_progress_bars_disabled():
        datasets.enable_progress_bars()


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """SIGHUP ends this process, also if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Clock:
    """Stands still until something hangs: no machine is so slow that anything else takes longer than it may."""

    now, pace = 0.0, 0.0
    """The time, and by how much each look at the clock moves it."""

    def monotonic(self) -> float:
        self.now += self.pace
        return self.now

    def run_out(self) -> None:
        """All that is under way has taken too long."""
        self.now += 1e6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What environments are timed by. A limit is still the seconds after which the clock is looked at."""
    made = Clock()
    for module in ("rollout.environment_pool", "envs.checker"):
        monkeypatch.setattr(f"agile_trainers.{module}.time", made)
    return made


@pytest.fixture(scope="session")
def embedded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained embedded model of one layer and its tokenizer. Read only: all tests of a worker share it."""
    from agile_trainers.embedded import make_embedded_model

    return make_embedded_model(tmp_path_factory.mktemp("embedded") / "model", num_layers=1)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two layers, of which the second reads what the first has made of a prefix.

    A file takes it as its ``embedded_model`` where rows share prefixes, or layers are chosen.
    """
    from agile_trainers.embedded import make_embedded_model

    return make_embedded_model(tmp_path_factory.mktemp("two_layers") / "model")


@pytest.fixture
def one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check plans memory for one size of batches: to trace each takes half a second, and the test reads nothing of it."""
    from agile_trainers.cli.check import sections

    plan = sections.plan_memory
    size = {"rows": 1, "tokens": 64, "decoded": 64, "new_tokens": 16}
    monkeypatch.setattr(sections, "plan_memory", lambda *given, **named: replace(plan(*given, **named), **size))


@pytest.fixture
def pipeline(embedded_model: Path, tmp_path: Path) -> dict[str, Any]:
    """SFT on a file, DPO on a function's rows, and two multi-turn stages; two small steps each."""
    from chain_files import pipeline_in

    return pipeline_in(tmp_path, embedded_model)
