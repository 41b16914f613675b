"""What this suite's plugins say at the end of a session: what tests have left, and which programs they wait for."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import left_files
import pytest

TESTS = Path(__file__).parent
CONFTEST = """
import left_files, missing_programs

def pytest_configure(config):
    for plugin in (left_files, missing_programs):
        config.pluginmanager.register(plugin)
"""
LEAVING = """
import os, socket, tempfile
from pathlib import Path

def test_home():
    (Path.home() / ".config/forgotten").mkdir(parents=True)

def test_temporary():
    (Path(tempfile.mkdtemp(prefix="forgotten-")) / "log").touch()

def test_socket():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(tempfile.gettempdir() + "/forgotten.socket")
    Path(tempfile.gettempdir(), "forgotten.lock").symlink_to("nowhere")

def test_shared():
    Path("SHARED").touch()
"""
CLEAN = """
import tempfile
from pathlib import Path

def test_clean(tmp_path):
    (tmp_path / "kept").touch()
    (Path.home() / ".cache/huggingface/datasets").mkdir(parents=True)
    with tempfile.NamedTemporaryFile() as file:
        assert not file.name.startswith("TEMPORARY/tmp") and Path.home() != Path("HOME")
"""
WAITING = """
import pytest

@pytest.mark.bubblewrap
@pytest.mark.parametrize("number", range(3))
def test_isolated(number): assert False

@pytest.mark.browser
def test_looked_at(): assert False

"""
Session = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """Runs pytest where no program is found; returns exit code, output, and what it leaves in the temporary folder."""
    temporary = Path(tempfile.mkdtemp())  # short enough for a socket in it
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntmp_path_retention_policy = failed\n", encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables |= {"PATH": "", "TMPDIR": str(temporary), "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}

    def run(text: str, *options: str) -> tuple[int, str, list[str]]:
        text = text.replace("TEMPORARY", str(temporary)).replace("HOME", os.environ["HOME"])
        (tmp_path / "test_some.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        return done.returncode, done.stdout, [str(path) for path in temporary.rglob("*")]

    yield run
    shutil.rmtree(temporary)


@pytest.fixture
def shared() -> Iterator[Path]:
    """The name of an object in shared memory."""
    path = Path(f"/dev/shm/forgotten-{os.getpid()}")
    if not path.parent.is_dir():
        path = Path("/nowhere")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_what_is_left_is_an_error_of_the_test_that_left_it(options: list[str], session: Session, shared: Path) -> None:
    code, output, left = session(LEAVING.replace("SHARED", str(shared)) + CLEAN, *options)
    said = re.sub(r"(?<=\n)(own|gw[01])/|-\w{8}(?=/)", "", output)
    for test, *paths in (
        ("home", "home/.config/forgotten"),
        ("temporary", "tmp/forgotten/log"),
        ("socket", "tmp/forgotten.lock", "tmp/forgotten.socket"),
        ("shared", str(shared)),
    ):
        assert re.search(
            rf"\n_+ ERROR at teardown of .*::test_{test}\b.*\n.*\n{re.escape(chr(10).join(paths))}\n[_=]", said
        ), said
    assert code == 1 and "5 passed, 4 errors" in output.splitlines()[-1]
    assert [Path(path).name for path in left] in ([], [f"pytest-of-{getpass.getuser()}"])


def test_shared_memory_that_a_process_uses_is_not_left(shared: Path) -> None:
    with shared.open("wb"):
        assert left_files._is_used(str(shared))
    assert not left_files._is_used(str(shared))


def test_the_last_lines_say_how_many_tests_wait_for_what(session: Session, tmp_path: Path) -> None:
    """The session is green, and leaves the folder in which pytest makes those of tests, which is empty."""
    (tmp_path / "test_absent.py").write_text("import pytest; pytest.importorskip('absent')", encoding="utf-8")
    code, output, left = session(CLEAN + WAITING)
    assert code == 0, output
    *_, one, two, last = output.splitlines()
    assert one == "Tests that wait for bubblewrap: 3 (bubblewrap is not installed (apt install bubblewrap))"
    assert two == "Tests that wait for browser: 1 (Chromium is not installed (apt install chromium))"
    assert "1 passed, 5 skipped" in last
    assert [Path(path).name for path in left] == [f"pytest-of-{getpass.getuser()}"]


DRAWING = """
import os, sys
from pathlib import Path
from agile_trainers.imports import matplotlib_apart

with matplotlib_apart():
    import matplotlib
if sys.argv[1] == "own":
    assert matplotlib.rcParams["lines.linewidth"] == 7
else:
    assert not os.listdir(Path.home()) and not os.listdir(os.environ["TMPDIR"]) and "MPLCONFIGDIR" not in os.environ
from matplotlib.figure import Figure
Figure().savefig(sys.argv[2])
sys.exit(len(os.listdir(Path.home())) != (sys.argv[1] == "own"))
"""


def test_matplotlib_makes_no_folder_in_the_home_folder_and_reads_one_that_is_there(tmp_path: Path) -> None:
    running = []
    for kind in ("none", "own"):
        home, temporary = tmp_path / kind / "home", tmp_path / kind / "tmp"
        home.mkdir(parents=True)
        temporary.mkdir()
        if kind == "own":
            (home / ".config/matplotlib").mkdir(parents=True)
            (home / ".config/matplotlib/matplotlibrc").write_text("lines.linewidth: 7", encoding="utf-8")
        folders = {"HOME": str(home), "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(home / ".config")}
        command = [sys.executable, "-c", DRAWING, kind, str(tmp_path / f"{kind}.png")]
        running.append(subprocess.Popen(command, env={**os.environ, **folders}, cwd=TESTS.parent))
    assert [process.wait() for process in running] == [0, 0]
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
