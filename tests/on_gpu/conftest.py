"""What the GPU cases share: their options, the device, their figures, and a result after each."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/trainers"), str(ROOT / "tests/rollout")]
from case_log import CaseLog  # noqa: E402

BROKEN = "CUDA error"
"""In the message of a failure after which the device answers no more calls of this process."""


@pytest.fixture(scope="session")
def embedded_model(two_layers: Path) -> Path:
    return two_layers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", action="store_true", help="run the GPU cases on CPU with tiny sizes")
    parser.addoption("--only", action="append", default=[], help="run the GPU cases whose names contain this")
    parser.addoption("--gpu-log", type=Path, help="file of the results of the GPU cases")
    parser.addoption("--gpu-since", type=float, default=0.0, help="results since this time are not tried again")
    parser.addoption("--gpu-until", type=float, default=float("inf"), help="start no GPU case after this time")


@dataclass(frozen=True)
class Machine:
    """Where the cases run."""

    device: torch.device
    tiny: bool
    """A rehearsal."""

    def pick(self, real: Any, tiny: Any) -> Any:
        """A size."""
        return tiny if self.tiny else real

    def peak(self) -> float:
        """Bytes that torch has allocated at most since the case began; 0 on CPU."""
        return float(torch.cuda.max_memory_allocated()) if self.device.type == "cuda" else 0.0


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    tiny = request.config.getoption("--rehearse", default=False)
    if not tiny and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield Machine(torch.device("cpu" if tiny else "cuda"), tiny)
    gc.collect()
    if not tiny:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a case measured; it is written with the result."""
    found: dict[str, Any] = {}
    request.node.user_properties.append(("figures", found))
    return found


def name_of(item: pytest.Item) -> str:
    return f"{item.path.stem.removeprefix('test_')}.{item.name.removeprefix('test_')}"


def _log(config: pytest.Config) -> CaseLog | None:
    file = config.getoption("--gpu-log", default=None)
    return CaseLog(file) if file else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (log := _log(config)) is None:
        return
    finished, only = log.finished(config.getoption("--gpu-since")), config.getoption("--only")
    items[:] = [
        item
        for item in items
        if name_of(item) not in finished and (not only or any(part in name_of(item) for part in only))
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    if (log := _log(item.config)) is None:
        return (yield)
    if time.time() > item.config.getoption("--gpu-until"):
        item.session.shouldstop = "the time of the run is over"
        return True
    under_way = log.file.parent / "under_way"
    under_way.write_text(f"{name_of(item)} {time.time()}")
    result = yield
    under_way.unlink()
    return result


_outcome: dict[str, tuple[str, float, str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if (log := _log(item.config)) is None:
        return report
    name = name_of(item)
    worst, seconds, reason = _outcome.get(name, ("passed", 0.0, ""))
    if report.outcome != "passed" and worst == "passed":
        worst, reason = report.outcome, _reason(report)
    _outcome[name] = worst, seconds + report.duration, reason
    if report.when == "teardown":
        worst, seconds, reason = _outcome[name]
        more = {"reason": reason} if reason else {}
        log.write(name, worst, seconds, figures=dict(item.user_properties).get("figures", {}), **more)
        if worst == "failed" and BROKEN in reason:
            (log.file.parent / "under_way").unlink()
            os._exit(70)  # the next process starts with a device that answers
    return report


def _reason(report: Any) -> str:
    if report.outcome == "skipped":
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:600].replace("\n", " ")
