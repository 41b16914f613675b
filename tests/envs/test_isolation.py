"""Programs that attack from inside, once for every level of isolation that this machine offers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agile_trainers.envs.isolation import levels as isolation
from agile_trainers.envs.isolation.launcher import seal
from agile_trainers.envs.isolation.levels import BUBBLEWRAP, LANDLOCK, LEVELS, NONE, OPTION, IsolationError
from agile_trainers.envs.tools.python_sandbox import run_python


def run(program: str, *arguments: str, seconds: float = 60, memory: int = 1024) -> subprocess.CompletedProcess[str]:
    """A program in an isolated interpreter, with nothing but the kernel to hold it."""
    limits = {"RLIMIT_AS": memory << 20, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    return subprocess.run(
        isolation.command(["-c", program, *arguments], limits=limits),
        env={},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def attempts(*programs: str) -> list[str]:
    """What each attack brought, one after the other in one process: ``got ...``, or the error that stopped it."""
    attack = (
        "import json, os, sys\n"
        "for program in json.loads(sys.argv[1]):\n"
        "    try:\n        exec(program)\n"
        "    except BaseException as error:\n        print(type(error).__name__, flush=True)"
    )
    ran = run(attack, json.dumps(programs))
    return ran.stdout.splitlines() or [f"died with {ran.returncode}"]


def stopped(*programs: str) -> None:
    """Every attack is stopped by the kernel."""
    for program, brought in zip(programs, attempts(*programs), strict=True):
        assert brought in REFUSED, f"{program} brought {brought}"


REFUSED = ("PermissionError", "FileNotFoundError", "OSError", "NotADirectoryError", "ProcessLookupError")


def test_ordinary_programs_run(level: str) -> None:
    assert run("import decimal, json, math; print(json.dumps(math.comb(5, 2)))").stdout == "10\n"
    ran = run("import os, signal; signal.alarm(1); print(6 * 7, flush=True)\nwhile True: pass")
    assert ran.stdout == "42\n" and ran.returncode in (-14, 128 + 14)
    assert run_python("print(6 * 7)") == "42"


def test_no_secret_of_the_environment(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through the program's own environment, nor through that of another process of the same user."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"HF_TOKEN": "hf_secret"})
    try:
        while b"hf_secret" not in Path(f"/proc/{child.pid}/environ").read_bytes():
            time.sleep(0.01)
        assert "hf_secret" not in attempts("print('got', dict(os.environ))")[0]
        stopped(
            *(f"print('got', open('/proc/{pid}/environ', 'rb').read())" for pid in ("self", child.pid, os.getpid()))
        )
    finally:
        child.kill()
        child.wait()


def test_no_file_is_read_or_written(level: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    secret, new = tmp_path / "secret.txt", tmp_path / "new.txt"
    secret.write_text("the secret")
    secret.chmod(0o666)
    places = (str(secret), str(new), "/tmp/new.txt", "/dev/shm/new", os.path.join(sys.base_prefix, "new"), os.__file__)
    changes = ("os.unlink(p)", "os.rename(p, p + 'x')", "os.chmod(p, 0o777)", "os.truncate(p, 0)", "os.utime(p)",
               "os.mkdir(p + 'x')", "os.mkfifo(p + 'x')", "os.link(p, p + 'x')", "os.symlink('/', p + 'x')",
               "open(p, 'w')", "open(p, 'a')", "open(p, 'r+')", "os.open(p, os.O_CREAT)")  # fmt: skip
    stopped(
        *(f"print('got', open({path!r}).read())" for path in (str(secret), "/etc/passwd", "/proc/mounts")),
        f"print('got', os.listdir({str(tmp_path)!r}))",
        *(f"p = {place!r}; {change}; print('got')" for place in places for change in changes),
    )
    assert secret.read_text() == "the secret" and sorted(tmp_path.iterdir()) == [secret]


def test_no_network(level: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        families = ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK")
        stopped(
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5); print('got')",
            *(f"import socket; socket.socket(socket.{family}); print('got')" for family in families),
            "import socket; socket.socketpair(); print('got')",
        )


def test_whether_a_path_exists_is_hidden_by_namespaces_alone(level: str) -> None:
    """As docs/tools.md says; what is in it, neither level tells."""
    assert attempts("print(os.path.exists('/proc/self'))") == [str(level == LANDLOCK)]
    stopped("print('got', os.listdir('/proc/self'))", "print('got', open('/proc/self/status').read())")


def test_no_process_without_end(level: str) -> None:
    stopped(
        "while True: os.fork()",
        "import subprocess; subprocess.run(['/bin/true']); print('got')",
        "os.posix_spawn('/bin/true', ['true'], {}); print('got')",
    )
    assert attempts("import threading\nwhile True: threading.Thread(target=print).start()") == ["RuntimeError"]


def test_no_process_at_the_weakest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter refuses it; where none can be made, a limit does, which binds every user but root."""
    monkeypatch.setenv(OPTION, NONE)
    if isolation._filter_if_any():
        stopped("os.fork(); print('got')")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setresuid(54321, 54321, 54321)
            seal({"level": NONE, "limits": {}, "paths": [], "parent": os.getppid(), "filter": ""})
            os.fork()
        except BlockingIOError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_no_memory_without_end(level: str) -> None:
    assert attempts(
        "held = []\nwhile True: held.append(bytearray(1 << 24))",
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); print('got')",
    ) == ["MemoryError", "ValueError"]
    stopped("import mmap\nheld = []\nwhile True: held.append(mmap.mmap(-1, 1 << 26))", "os.memfd_create('x')")


def test_no_signal_for_the_parent(level: str) -> None:
    targets = ("os.getppid()", os.getpid(), f"-{os.getpgid(0)}", -1, 0)
    stopped(
        *(f"os.kill({target}, {number}); print('got')" for target in targets for number in (0, 9)),
        f"print('got', os.pidfd_open({os.getpid()}))",
    )


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the system calls are those of x86_64")
def test_no_way_out(level: str) -> None:
    """System calls by number: other namespaces, mounts, tracing, another filter, longer life than the parent."""
    calls = {"ptrace": 101, "unshare": 272, "mount": 165, "setns": 308, "bpf": 321, "io_uring_setup": 425, "prctl": 157,
             "process_vm_readv": 310, "userfaultfd": 323, "keyctl": 250, "chroot": 161, "setuid": 105}  # fmt: skip
    program = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        f"print([n for n, c in {calls}.items() if libc.syscall(c, 1, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38)])"
    )
    assert attempts(program) == ["[]"]


def test_what_the_kernel_says_of_it(level: str) -> None:
    """No capability is left, none can be gained, and a filter is in place; the user is root to nobody but itself."""
    command = isolation.command(["-c", "import os; print(os.getuid(), flush=True); input()"], limits={})
    with subprocess.Popen(
        command, env={}, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        user = int(process.stdout.readline())
        innermost = max(_descendants(process.pid))
        status = dict(line.split(":", 1) for line in Path(f"/proc/{innermost}/status").read_text().splitlines())
    assert {status[name].strip() for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2"
    assert user == os.getuid() if level == LANDLOCK and os.getuid() else user in (0, 65534)
    assert user == 65534 or level == LANDLOCK


def test_it_ends_with_whoever_started_it(level: str, tmp_path: Path) -> None:
    """Also when that is killed, while the program computes."""
    command = isolation._command(level, ["-c", "while True: pass"], {}, False, ())
    starter = (
        "import subprocess, sys, json, os, time\n"
        "command = json.loads(sys.stdin.readline())\n"
        "spec = json.loads(command[(at := command.index('-c') + 2)]); spec['parent'] = os.getpid()\n"
        "command[at] = json.dumps(spec)\n"
        "process = subprocess.Popen(command, env={}, cwd='/', stdin=subprocess.DEVNULL)\n"
        "print(process.pid, flush=True); time.sleep(60)"
    )
    outer = subprocess.Popen(
        [sys.executable, "-c", starter],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert outer.stdin is not None and outer.stdout is not None
    outer.stdin.write(json.dumps(command) + "\n")
    outer.stdin.flush()
    first = int(outer.stdout.readline())
    family: set[int] = set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # until the innermost one computes
        family = _descendants(first)
        if any(_cpu_ticks(pid) > 20 for pid in family):
            break
        time.sleep(0.05)
    outer.kill()
    outer.wait()
    outer.stdin.close()
    outer.stdout.close()
    while any(Path(f"/proc/{pid}").exists() and _cpu_ticks(pid) >= 0 for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in family if _cpu_ticks(pid) >= 0]


def _descendants(pid: int) -> set[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return {pid}
    return {pid}.union(*(_descendants(int(child)) for child in children))


def _cpu_ticks(pid: int) -> int:
    """-1 for a process that is gone, or has ended and waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[11]) + int(fields[12])


DEATHS = {
    "import os; os._exit(7)": (7, "exit code 7"),
    "import signal; signal.setitimer(signal.ITIMER_REAL, 0.05)\nwhile True: pass": (-14, "ended by SIGALRM"),
    "import ctypes; ctypes.string_at(0)": (-11, "ended by SIGSEGV, as for recursion"),
    "import os; os.write(0, b'x')": (1, "exit code 1: OSError: [Errno 27] File too large"),
    "x = [bytes(1 << 28) for _ in iter(int, 1)]": (1, "exit code 1: MemoryError"),
    "import resource as r; r.setrlimit(r.RLIMIT_CPU, (1, 2))\nwhile True: pass": (
        -24,
        "ended by SIGXCPU, at the limit of CPU",
    ),
}


def test_a_death_is_described_as_it_was(level: str) -> None:
    for program, (status, description) in DEATHS.items():
        ran = isolation.run_program(program, timeout=30, memory=256, max_output=1000)
        assert ran.status == status and ran.death.startswith(description), program
        assert ran.timed_out == (status == -24) and not ran.cut
    assert "SIGKILL, as the kernel does when the machine's memory" in isolation.describe_status(-9)
    assert isolation.describe_status(-72) == "exit code -72"
    assert isolation.run_program("print(1)", timeout=30, memory=256, max_output=9).death == ""


def test_a_program_that_closes_its_streams_and_goes_on_is_ended(level: str) -> None:
    ran = isolation.run_program("import os, time; os.close(1); os.close(2); time.sleep(1e6)", timeout=0.5, memory=256,
                                max_output=9)  # fmt: skip
    assert ran.timed_out and ran.printed == ""


def test_a_program_has_no_descriptor_but_its_three_streams(level: str) -> None:
    """What it prints is all that comes back: there is nothing else to write on."""
    code = "import os\nfor n in range(1000):\n    try: print(n, os.fstat(n).st_nlink)\n    except OSError: pass"
    ran = isolation.run_program(code, timeout=30, memory=256, max_output=1000)
    assert ran.printed.split("\n") == ["0 0", "1 1", "2 1", ""]


# ---------------------------------------------------------------------------------------------- which level, and none


def test_the_best_level_is_taken_and_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPTION, raising=False)
    held = [name for name in LEVELS if not isolation.why_not(name)]
    assert isolation.level() == held[0]
    for name in LEVELS:
        monkeypatch.setenv(OPTION, name)
        if name in held:
            assert isolation.level() == name
        else:
            with pytest.raises(IsolationError, match=name):
                isolation.level()
    monkeypatch.setenv(OPTION, "docker")
    with pytest.raises(ValueError, match=f"{OPTION}='docker'.*{BUBBLEWRAP}"):
        isolation.level()


@pytest.mark.usefixtures("nothing_isolates")
def test_without_isolation_the_sandbox_refuses_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsolationError, match=f"sandbox.*bubblewrap: not here.*{OPTION}=none"):
        run_python("print(1)")
    monkeypatch.setenv(OPTION, NONE)
    assert run_python("print(1)") == "1"
    assert "PermissionError" in run_python("open('/etc/passwd')")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in run("import os; print(os.environ)").stdout


def test_a_missing_program_or_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    assert "apt install bubblewrap" in isolation.why_not.__wrapped__(BUBBLEWRAP)
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    isolation._filter.cache_clear()
    try:
        assert "pip install pyseccomp" in isolation.why_not.__wrapped__(LANDLOCK)
    finally:
        isolation._filter.cache_clear()


def test_threads_share_the_probe() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(isolation.level())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def test_threads_that_import_a_broken_library_at_once_get_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of them tries, and fails; Python gives the others the module that was begun, which lacks everything."""
    (tmp_path / "pyseccomp.py").write_text(
        "import time; time.sleep(0.05); raise OSError('no libseccomp')", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyseccomp", raising=False)
    isolation._filter.cache_clear()
    try:
        with ThreadPoolExecutor(4) as pool:
            failed = [one.exception() for one in [pool.submit(isolation._filter) for _ in range(4)]]
    finally:
        isolation._filter.cache_clear()
    assert [str(error) for error in failed] == ["no libseccomp"] * 4
