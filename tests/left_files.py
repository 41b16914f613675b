"""Gives each test process a home and a temporary folder of its own, and makes an error of what is left in them at the end.

A plugin of pytest, to be imported before libraries that look for their caches. Each worker has its own folders, so an error
names the test during which a file appeared. Shared memory belongs to the whole machine: new objects in it count if they are
this user's and no process uses them. ``tmp_path`` is where it always is; pytest keeps those of failed tests alone.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ALLOWED = (
    "home/.cache/huggingface*",
    "home/.cache/dconf*",  # what Chromium makes beside its profile
    "home/.config/chromium*",
    "home/.cache/torch_extensions*",  # those that DeepSpeed builds
    "home/.config/agile_trainers/checkpoint.key",  # see docs/checkpoints.md
    "tmp/tmp*/*_remote_module_non_scriptable*",  # nor does PyTorch 2.9 remove what it writes then
    "tmp/torchinductor_*",  # PyTorch makes this folder when it is imported
    "tmp/torchelastic_*",  # logs that PyTorch's launcher leaves
)
"""What a run may leave outside of its ``output_dir``."""
if find_spec("verifiers"):
    ALLOWED += ("home/.cache/verifiers*", "home/.cache/uv*", "tmp/uv-*.lock")  # programs of its harnesses
if find_spec("minisweagent"):
    ALLOWED += ("home/.config/mini-swe-agent*",)  # it makes this folder when it is imported
if find_spec("vllm"):
    # Its cache, and the sockets of its servers; and what trainers leave that tests kill.
    ALLOWED += (
        "tmp/matplotlib-*",
        "home/.cache/vllm*",
        "tmp/vllm_dist_*",
        f"tmp/{'-'.join('?' * n for n in (8, 4, 4, 4, 12))}",
    )
_UNTIL_EXIT = (
    "tmp/pymp-*", "tmp/*wandb-media", "tmp/*wandb-artifacts", "tmp/wandb-*", "tmp/tmp*/*.table.json", "tmp/forks*",
)  # fmt: skip
"""What this process removes itself, after pytest has ended."""
_ELSEWHERE = re.compile(r"(XDG|WANDB|TRACKIO)_.*|HF_(HOME|.*_CACHE)|MPLCONFIGDIR|TORCHINDUCTOR_CACHE_DIR")
"""Variables by which libraries would write to other folders than these."""
_SHARED = Path("/dev/shm")
_PLACE, _STARTED_BY = "TESTS_PLACE", "TESTS_STARTED_BY"


def _begin() -> None:
    """Make the folders of this session, unless this is a worker, which has got its own from the process that started it."""
    if os.environ.get(_STARTED_BY) != str(os.getppid()):
        place, own, home = tempfile.mkdtemp(prefix="tests-"), os.getpid(), Path.home()
        atexit.register(lambda: os.getpid() == own and shutil.rmtree(place, ignore_errors=True))
        for name in filter(_ELSEWHERE.fullmatch, list(os.environ)):
            del os.environ[name]
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ.setdefault("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
        os.environ.setdefault("PIP_CONFIG_FILE", str(home / ".config/pip/pip.conf"))
        os.environ |= {_PLACE: place, "TESTS_FORKS": f"{place}/own/tmp/forks", **_folders(Path(place, "own"))}
    tempfile.tempdir = None  # read again


def _folders(process: Path) -> dict[str, str]:
    """Make a test process's folders; return the variables that name them."""
    folders = {"HOME": process / "home", "TMPDIR": process / "tmp"}
    for folder in folders.values():
        folder.mkdir(parents=True)
    return {name: str(folder) for name, folder in folders.items()}


_begin()
_place, _own = Path(os.environ[_PLACE]), Path(os.environ["HOME"]).parent
_shared_before = set(_SHARED.glob("*"))
_appeared = dict[str, str]()
"""The test during which a file was seen first; one of each worker for shared memory."""
_looks = True
"""False in a process whose workers look."""


def _files(process: Path, but: tuple[str, ...] = ALLOWED) -> Iterator[str]:
    """Yield the files, sockets, links and empty folders in a test process's folders, as paths below its place."""
    for folder, folders, files in os.walk(process):
        below = Path(folder).relative_to(process)
        if not folders and not files and len(below.parts) > 1:
            yield f"{process.name}/{below}"
        folders[:] = [name for name in folders if not _matches(below / name, but)]
        for name in [*files, *(name for name in folders if os.path.islink(f"{folder}/{name}"))]:
            if not _matches(below / name, but):
                yield f"{process.name}/{below}/{name}"


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(str(path), pattern) for pattern in patterns)


def _shared() -> Iterator[str]:
    """Yield this user's new objects in shared memory."""
    for path in set(_SHARED.glob("*")) - _shared_before:
        try:
            # Semaphores of multiprocessing do not say whose they are: a killed program beside the tests leaves the same.
            # Workers of a vLLM server leave theirs when it ends, and ranks of an engine on CPUs their exchange.
            if path.lstat().st_uid == os.getuid() and not path.name.startswith(("sem.mp-", "vllm_dist_", "-tp:")):
                yield str(path)
        except FileNotFoundError:
            continue


def _is_used(path: str) -> bool:
    """Whether a process has a file open or mapped."""
    for process in glob("/proc/[0-9]*"):  # those that end meanwhile, or are another user's, are left out
        with suppress(OSError):
            if path in Path(process, "maps").read_text(encoding="utf-8", errors="replace"):
                return True
        for opened in glob(f"{process}/fd/*"):
            with suppress(OSError):
                if os.readlink(opened) == path:
                    return True
    return False


def _note(during: str) -> None:
    for path in (*_files(_own), *_shared()) if _looks else ():
        _appeared.setdefault(path, during)


# ------------------------------------------------------------------------------------------------------------- hooks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    from xdist.workermanage import NodeManager

    global _looks
    _looks = False
    # A worker that is killed after ten seconds, on a busy machine, would not remove what it removes at its exit.
    NodeManager.EXIT_TIMEOUT = 300
    for spec in specs:
        spec.env.update(_folders(_place / spec.id), **{_STARTED_BY: str(os.getpid())})


def pytest_collection_finish(session: pytest.Session) -> None:
    _note("imports")


def pytest_runtest_logfinish(nodeid: str) -> None:
    _note(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for path, test in getattr(node, "workeroutput", {}).get("appeared", {}).items():
        _appeared[path] = f"{_appeared[path]} or {test}" if path in _appeared else test


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    """Report what is left, as an error of the test in which it appeared: when all workers have ended, before the summary."""
    is_worker = hasattr(session.config, "workeroutput")
    if is_worker:
        session.config.workeroutput["appeared"] = _appeared
    result = yield
    if is_worker or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return result
    for path in set(_SHARED.glob("-tp:*cpushm*")) - _shared_before:
        with suppress(OSError):  # gone, or another user's
            if not _is_used(str(path)):  # vLLM's engines on CPUs leave it, and the next could not make its own
                path.unlink()
    found = [path for path in _shared() if not _is_used(path)]
    for process in sorted(_place.iterdir()):
        found += sorted(_files(process, (*ALLOWED, *_UNTIL_EXIT) if process == _own else ALLOWED))
    for test in dict.fromkeys(_appeared.get(path, "after the tests") for path in found):
        here = [path for path in found if _appeared.get(path, "after the tests") == test]
        said = f"{len(here)} files were left outside of the folders of tests:\n" + "\n".join(here[:20])
        location = (test.partition("::")[0], None, test)
        report = pytest.TestReport(test, location, {}, "failed", said, "teardown")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result
