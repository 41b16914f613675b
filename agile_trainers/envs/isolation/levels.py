"""Isolates programs that run on a model's text from secrets, files, network and processes.

A level is a set of mechanisms that a machine supports. At every level but :data:`NONE`, the program can read only the
Python installation and the system's libraries; at :data:`LANDLOCK` it can look up whether other paths exist, with size and
times. It has no network, no environment variables and no capabilities, cannot start or signal processes, and ends with the
process that started it. ``AGILE_TRAINERS_ISOLATION`` names the level to use; default: the best one.
"""

from __future__ import annotations

import base64
import errno
import functools
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from agile_trainers.envs.isolation.process_tree import CHANNEL, FOLDER

BUBBLEWRAP, LANDLOCK, NONE = "bubblewrap", "landlock", "none"
LEVELS = {
    BUBBLEWRAP: "bubblewrap's namespaces and empty root, and a seccomp filter",
    LANDLOCK: "a Landlock domain, an unprivileged user, and a seccomp filter",
    NONE: "a separate process with limits and without environment variables; it can read files, and use the network "
    "unless a seccomp filter can be made",
}
"""Description of each level, from the strongest to the weakest."""
OPTION = "AGILE_TRAINERS_ISOLATION"
LEAK = "it starts, but "
"""First words of the reason why a level that can be set up is not sealed."""

_LAUNCHER = Path(__file__).with_name("launcher.py")
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/nix/store")
_SITES = ("site-packages", "dist-packages")
_NAMESPACES = (
    "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--die-with-parent",
)  # fmt: skip
"""Options of bubblewrap, for code and for programs."""
_PROBE_SECONDS = 60.0
_importing = threading.Lock()

# All other calls fail with "operation not permitted": sockets, processes, signals, mounts, limits of others, ...
_ALLOWED = (
    "access", "alarm", "arch_prctl", "brk", "clock_getres", "clock_gettime", "clock_nanosleep", "close", "dup", "dup2",
    "dup3", "execve", "exit", "exit_group", "faccessat", "faccessat2", "fstat", "fstatfs", "futex", "getcwd", "getdents64",
    "getegid", "geteuid", "getgid", "getitimer", "getpgrp", "getpid", "getppid", "getrandom", "getrlimit", "getrusage",
    "gettid", "gettimeofday", "getuid", "lseek", "lstat", "madvise", "membarrier", "mmap", "mprotect", "mremap", "munmap",
    "nanosleep", "newfstatat", "poll", "ppoll", "pread64", "preadv", "pselect6", "read", "readlink", "readlinkat", "readv",
    "restart_syscall", "rseq", "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend",
    "sched_getaffinity", "sched_yield", "select", "set_robust_list", "set_tid_address", "setitimer", "sigaltstack", "stat",
    "statfs", "statx", "sysinfo", "time", "times", "uname", "write", "writev",
)  # fmt: skip
_FCNTL = (0, 1, 2, 3, 4, 1030)
"""``F_DUPFD``, ``F_GETFD``, ``F_SETFD``, ``F_GETFL``, ``F_SETFL``, ``F_DUPFD_CLOEXEC``; none of them sends signals."""
_IOCTL = (0x5401, 0x5450, 0x5451, 0x541B)
"""``TCGETS``, ``FIONCLEX``, ``FIOCLEX``, ``FIONREAD``."""
_WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | (getattr(os, "O_TMPFILE", 0) & ~getattr(os, "O_DIRECTORY", 0))


class IsolationError(OSError):
    """Raised when this machine cannot isolate a program; the message says what to install or to set."""


def command(
    arguments: Sequence[str], *, limits: dict[str, int], sites: bool = False, extra: Sequence[Path | str] = ()
) -> list[str]:
    """Return the command that runs Python with these arguments at the best level of isolation.

    Start it from a thread that outlives it (the kernel ends it with that thread), without this process's environment
    variables, and with the streams it needs.

    Args:
        arguments: Arguments after ``python -s -P -S -B``, which reads ``PYTHONHASHSEED``, unlike ``-I``.
        limits: Resource limits by the names of the module ``resource``.
        sites: True to make installed packages readable.
        extra: Further readable files and folders.
    """
    return _command(level(), arguments, limits, sites, extra)


@dataclass(frozen=True)
class ProgramResult:
    """Result of an isolated program."""

    printed: str
    """Standard output, up to the limit."""
    errors: str
    """Standard error, up to the limit."""
    status: int
    """Exit code, or minus the number of the signal that ended the program."""
    timed_out: bool
    cut: bool
    """True if the program was ended because it printed more than the limit."""

    @property
    def death(self) -> str:
        """Description of the program's end, with the last line of its errors; empty if it ended without an error."""
        if self.status == 0:
            return ""
        last = self.errors.strip().rpartition("\n")[2]
        return describe_status(self.status) + (f": {last}" if last else "")


def run_program(
    code: str, *, stdin: str = "", timeout: float, memory: int, max_output: int, sites: bool = False, prologue: str = ""
) -> ProgramResult:
    """Run a Python program at the best level of isolation.

    Args:
        code: The program.
        stdin: Standard input.
        timeout: Seconds of wall time, once the interpreter has started, and of CPU time.
        memory: Megabytes of address space; the interpreter itself takes about 30.
        max_output: Bytes of standard output, and of standard error.
        sites: True to make installed packages importable.
        prologue: Trusted code that runs before the clock starts. It may define ``run(code)`` to run the program.
    """
    limits = {"RLIMIT_AS": memory << 20, "RLIMIT_CPU": math.ceil(timeout) + 1, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    program = code.encode("utf-8", "replace")
    path = [os.path.realpath(entry) for entry in sys.path if os.path.basename(entry) in _SITES] if sites else []
    with tempfile.TemporaryFile() as given:
        given.write(program + stdin.encode("utf-8", "replace"))
        given.seek(0)
        arguments = ["-u", "-X", "utf8", "-c", _RUNNER, prologue, str(len(program)), json.dumps(path)]
        process = subprocess.Popen(
            command(arguments, limits=limits, sites=sites),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        streams = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
        output, errors = streams
        try:
            # The first byte marks the start of the program.
            ended = _read(streams, output, 1, _PROBE_SECONDS) or _read(streams, None, max_output + 2, timeout)
            if ended:
                process.wait(timeout)
        except subprocess.TimeoutExpired:  # it closed its streams and goes on
            ended = False
        finally:
            process.kill()
            process.wait()
    printed = streams[output][1:]
    cut = max(len(printed), len(streams[errors])) > max_output
    status = exit_code(process.returncode)
    return ProgramResult(
        printed=printed[:max_output].decode("utf-8", "replace"),
        errors=streams[errors][:max_output].decode("utf-8", "replace"),
        status=status,
        timed_out=not cut and (not ended or status == -signal.SIGXCPU),
        cut=cut,
    )


_RUNNER = """
import json, os, sys
prologue, left, path = sys.argv[1:]
sys.argv[1:] = []
sys.path += json.loads(path)
left, code = int(left), b""
while left > len(code):
    code += os.read(0, left - len(code))
code = code.decode()
def run(code):
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
write = os.write
exec(prologue)
write(1, b"0")
run(code)
"""


def _read(streams: dict[int, bytes], stream: int | None, size: int, seconds: float) -> bool:
    """Read until ``stream``, or any stream, has ``size`` bytes or time is up. Return whether all streams ended."""
    deadline, open_streams, poll = time.monotonic() + seconds, set(streams), select.poll()
    for one in streams:
        poll.register(one, select.POLLIN)
    while all(len(streams[one]) < size for one in (streams if stream is None else [stream])):
        ready = poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
        if not ready:
            return False
        for one, _ in ready:
            part = os.read(one, 1 << 16 if stream is None else 1)
            streams[one] += part
            if not part:
                poll.unregister(one)
                open_streams.discard(one)
        if not open_streams:
            return True
    return False


def level() -> str:
    """Return the level of isolation to use: the best of this machine, or the one in ``AGILE_TRAINERS_ISOLATION``.

    Raises:
        IsolationError: If this machine does not support the named level.
        ValueError: If there is no such level.
    """
    chosen = os.environ.get(OPTION) or None
    if chosen is None:
        return next(name for name in LEVELS if name == NONE or not why_not(name))
    if chosen not in LEVELS:
        raise ValueError(f"{OPTION}={chosen!r} is not a level of isolation; expected one of {', '.join(LEVELS)}.")
    if reason := why_not(chosen):
        raise IsolationError(
            f"{OPTION}={chosen} is not supported on this machine: {reason}. Unset it to use the best level."
        )
    return chosen


def require(what: str) -> None:
    """Raise ``IsolationError`` if ``what`` would run without isolation and that is not allowed explicitly."""
    if level() == NONE and os.environ.get(OPTION) != NONE:
        reasons = "; ".join(f"{name}: {why_not(name)}" for name in LEVELS if name != NONE)
        raise IsolationError(
            f"{what} executes code that a model writes, and this machine cannot isolate it from files and network "
            f"({reasons}). Install bubblewrap, or use a machine whose kernel supports one of these levels. If the model's "
            f"code may read your files and use your network, set {OPTION}={NONE}."
        )


@functools.cache
def why_not(name: str) -> str:
    """Try a level and return the reason why this machine does not support it; empty if it does."""
    if name == NONE:
        return ""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    if name == BUBBLEWRAP and not shutil.which("bwrap"):
        return "bubblewrap is not installed (apt install bubblewrap)"
    try:
        _filter()
    except ImportError:
        return "pyseccomp is not installed (pip install pyseccomp)"
    except (OSError, RuntimeError) as error:
        return f"no seccomp filter can be made (apt install libseccomp2): {error}"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as secret:
        secret.write("secret")
        secret.flush()
        os.chmod(secret.name, 0o644)
        try:
            probe = subprocess.run(
                _command(name, ["-c", _PROBE, secret.name], {"RLIMIT_CORE": 0}, False, ()),
                capture_output=True,
                text=True,
                env={},
                cwd="/",
                timeout=_PROBE_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if probe.stdout.strip() == "sealed":
        return ""
    if probe.stdout:
        return f"{LEAK}{probe.stdout.strip()}"
    return probe.stderr.strip().rpartition("\n")[2] or f"exit code {probe.returncode}"


_PROBE = """
import os, socket, sys
for what, attempt in {
    "files can be read": lambda: open(sys.argv[1]),
    "other processes can be looked at": lambda: open("/proc/self/environ"),
    "files can be written": lambda: open("/tmp/probe", "w"),
    "sockets can be opened": lambda: socket.socket(),
    "processes can be started": lambda: os.fork() or os._exit(0),
    "processes can be signalled": lambda: os.kill(os.getppid(), 0),
}.items():
    try:
        attempt()
    except OSError:
        continue
    print(what)
    break
else:
    print("sealed")
"""


def _command(
    name: str, arguments: Sequence[str], limits: dict[str, int], sites: bool, extra: Sequence[Path | str]
) -> list[str]:
    interpreter = os.path.realpath(sys.executable)
    paths = _readable(sites, extra)
    spec = {
        "level": name,
        "limits": limits,
        "paths": paths,
        "parent": os.getpid(),
        "filter": base64.b64encode(_filter() if name != NONE else _filter_if_any()).decode(),
    }
    launch = [interpreter, "-I", "-S", "-B", "-c", _LAUNCHER.read_text(encoding="utf-8"), json.dumps(spec)]
    return [*(_bubblewrap(paths) if name == BUBBLEWRAP else []), *launch,
            interpreter, "-s", "-P", "-S", "-B", "-W", "ignore", *arguments]  # fmt: skip


def _bubblewrap(paths: list[str]) -> list[str]:
    options = [*_NAMESPACES, "--new-session"]
    for path in paths:
        options += ["--ro-bind", path, path]
    for link in filter(os.path.islink, ("/lib", "/lib64")):
        options += ["--symlink", os.readlink(link), link]
    return [shutil.which("bwrap") or "bwrap", *options, "--remount-ro", "/", "--chdir", "/", "--"]


def _readable(sites: bool, extra: Sequence[Path | str]) -> list[str]:
    """Return the files and folders that an isolated program may read, none inside another."""
    wanted = [
        sys.base_prefix,
        sys.base_exec_prefix,
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *_SYSTEM,
    ]
    if sites:
        wanted += [entry for entry in sys.path if os.path.basename(entry) in _SITES]
    real = sorted({os.path.realpath(path) for path in [*wanted, *map(str, extra)] if os.path.exists(path)})
    paths: list[str] = []
    for path in real:
        if not any(path.startswith(f"{above}/") for above in paths):
            paths.append(path)
    return paths


def exit_code(status: int) -> int:
    """Return the exit status of an isolated program; negative for a signal, at every level."""
    return 128 - status if status > 128 else status


_MEANINGS = {
    "SIGKILL": "as the kernel does when the machine's memory is used up",
    "SIGSEGV": "as for recursion that is too deep, or a stack that would exceed the memory limit",
    "SIGXCPU": "at the limit of CPU time",
    "SIGXFSZ": "at the limit of file size",
}


def describe_status(status: int) -> str:
    """Return how a program with this status ended: its exit code, or the name of the signal and what it usually means."""
    if -status not in set(signal.Signals):
        return f"exit code {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (f", {_MEANINGS[name]}" if name in _MEANINGS else "")


def _filter_if_any() -> bytes:
    try:
        return _filter()
    except (ImportError, OSError, RuntimeError):
        return b""


@functools.cache
def _filter() -> bytes:
    """Compile the seccomp filter in the kernel's format."""
    with _importing:  # a thread would get the module that fails to be imported in another
        import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))

    def allow(name: str, *conditions: seccomp.Arg) -> None:
        try:
            rules.add_rule(seccomp.ALLOW, name, *conditions)
        except OSError as error:  # some architectures lack some calls
            if error.errno not in (errno.EINVAL, errno.EDOM, errno.EFAULT):
                raise

    for name in _ALLOWED:
        allow(name)
    allow("open", seccomp.Arg(1, seccomp.MASKED_EQ, _WRITING, 0))
    allow("openat", seccomp.Arg(2, seccomp.MASKED_EQ, _WRITING, 0))
    allow("prlimit64", seccomp.Arg(0, seccomp.EQ, 0))
    for request in _IOCTL:
        allow("ioctl", seccomp.Arg(1, seccomp.EQ, request))
    for operation in _FCNTL:
        allow("fcntl", seccomp.Arg(1, seccomp.EQ, operation))
    for name in ("clone3", "openat2"):  # for which the C library has a fallback
        rules.add_rule(seccomp.ERRNO(errno.ENOSYS), name)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


_PROGRAMS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/alternatives", "/etc/ssl", "/etc/pki",
    "/etc/ca-certificates", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/hosts",
    "/etc/nsswitch.conf",
)  # fmt: skip
"""Files and folders that every program may read. They hold no secrets, unlike the rest of ``/etc``."""

# Makes a server on the loopback of the program's own network, and hands it to the process outside that answers there.
_SERVE = """
import os, socket, sys
channel, port, *command = sys.argv[1:]
with socket.socket(fileno=int(channel)) as link, socket.create_server(("127.0.0.1", int(port)), backlog=512) as server:
    socket.send_fds(link, [b"1"], [server.fileno()])
os.execv(command[0], command)
"""


def require_programs(what: str) -> str:
    """Return the level of isolation for whole programs.

    Args:
        what: Name of the code that needs isolation, for the error.

    Raises:
        IsolationError: If this machine has no bubblewrap, and running without isolation is not allowed explicitly.
    """
    require(what)
    chosen = level()
    if chosen not in (BUBBLEWRAP, NONE):
        raise IsolationError(
            f"{what} starts processes and talks to the endpoint, which the level {chosen!r} ({LEVELS[chosen]}) does not let "
            f"any program do; only {BUBBLEWRAP!r} does ({why_not(BUBBLEWRAP) or 'it is supported here'}). Install "
            "bubblewrap, or leave `isolated` unset, if the program may read your files and use your network."
        )
    return chosen


def in_namespaces(program: str, readable: Collection[Path | str], *, port: int) -> list[str]:
    """Return the beginning of the command that runs a program in bubblewrap's namespaces.

    The program sees the system's programs and libraries, this Python installation and ``readable``, read-only, its own
    folder, and no process outside. ``127.0.0.1:port`` is the only address that it can connect to. :data:`FOLDER` stands for
    its folder, and :data:`CHANNEL` for the descriptor of a Unix socket, to which the server on that port is sent.

    Args:
        program: Its whole path.
        readable: Further files and folders.
        port: Of the endpoint.
    """
    options = [*_NAMESPACES, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    wanted = [*_PROGRAMS, sys.prefix, sys.base_prefix, sys.executable, program, *map(str, readable)]
    bound: list[str] = []
    for path in (os.path.abspath(one) for one in wanted):
        if os.path.islink(path) and path in _PROGRAMS:
            options += ["--symlink", os.readlink(path), path]
            bound.append(path)
            continue
        for one in (path, os.path.realpath(path)):
            if os.path.exists(one) and not any(one == above or one.startswith(f"{above}/") for above in bound):
                options += ["--ro-bind", one, one]
                bound.append(one)
    options += ["--bind", FOLDER, FOLDER, "--chdir", f"{FOLDER}/work", "--remount-ro", "/", "--"]
    interpreter = os.path.realpath(sys.executable)
    return [shutil.which("bwrap") or "bwrap", *options, interpreter, "-I", "-S", "-B", "-c", _SERVE, CHANNEL, str(port)]
