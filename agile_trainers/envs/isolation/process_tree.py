"""Runs a program and ends everything that it has started; also a script that keeps one program.

The script imports the standard library and psutil. It reads a specification from its standard input and makes a folder,
whose name it reports as a line of JSON. After a byte it runs the program there. It reports the program's end, another line,
once every process below it is dead. When its input is closed, on SIGTERM, or when its parent has ended, it kills what still
runs, removes the folder and exits.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

FOLDER, CHANNEL = "{folder}", "{channel}"
"""Stand for a program's folder and for a descriptor in the command that isolates it."""
PREFIX = "agile-agent-"
"""The beginning of the names of programs' folders."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING_SECONDS = 60.0
"""Seconds after which killed processes that the kernel does not end are left to it."""
_PAUSE = 0.005
_GRACE_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL at a program's time limit."""
_KEPT_GRACE_SECONDS = 10.0
"""The same for a command that is kept beside its parent: a vLLM server first ends its engines."""
_PARENT_SECONDS = 2.0
"""Seconds between two looks at whether the parent lives."""
_ABANDONED_SECONDS = 60.0
"""Age from which a folder that nobody holds is removed."""
_REAL_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PART = 1 << 16
_CONNECTIONS = 64
"""Connections of an isolated program to the endpoint at once; each takes a file of the training process."""
_WORK = "work"
"""Name of the working folder."""


def adopt_descendants() -> None:
    """Make processes that leave their parent or session stay below this one (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reap(child: int) -> int | None:
    """Collect the processes that have ended. Return the exit code of ``child``; None if it runs."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def kill_descendants(child: int = 0) -> int | None:
    """Kill all processes below this one, and those that they start meanwhile.

    Parents die before their children: a shell whose child is killed first goes on with its next command.

    Returns:
        The exit code of ``child`` if it ended meanwhile, else None.
    """
    import psutil

    deadline, code = time.monotonic() + _ENDING_SECONDS, None
    refused: set[psutil.Process] = set()
    while time.monotonic() < deadline:
        below = [one for one in _below() if one not in refused]
        if not below:
            break
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
            except psutil.AccessDenied:  # another user's
                refused.add(process)
        ended = reap(child)
        code = ended if code is None else code
        time.sleep(_PAUSE)
    return code


def _below() -> list[psutil.Process]:
    """Return all processes below this one, parents first, by the numbers of their parents.

    psutil's ``children`` leaves out those that seem older than this one, and their age moves with the system's clock.
    """
    import psutil

    children: dict[int, list[psutil.Process]] = {}
    psutil.process_iter.cache_clear()  # a number may be another process's by now
    for one in psutil.process_iter(["ppid"]):
        children.setdefault(one.info["ppid"], []).append(one)
    found, parents = list[psutil.Process](), [os.getpid()]
    for parent in parents:
        own = children.pop(parent, [])
        found += own
        parents += [one.pid for one in own]
    return found


class Excerpt:
    """The beginning and the end of a stream, without secrets.

    Args:
        limit: Bytes that are kept.
        secrets: Texts that are replaced by ``[secret]`` wherever they stand as they are, also across two parts.
    """

    def __init__(self, limit: int, secrets: list[str] | None = None) -> None:
        self._secrets = [secret.encode() for secret in secrets or [] if secret]
        self._longest = max(map(len, self._secrets), default=1)
        self._room = limit - limit // 2
        self._most = limit // 2
        self._head, self._tail, self._held = b"", b"", b""
        self._left_out = 0

    def add(self, part: bytes) -> None:
        """Take the next part of the stream."""
        held = self._held + part
        for secret in self._secrets:
            held = held.replace(secret, b"[secret]")
        sure = len(held) - (self._longest - 1)  # a secret may have begun in the rest
        if sure > 0:
            self._keep(held[:sure])
            held = held[sure:]
        self._held = held

    def text(self) -> str:
        """End the stream, and return what is kept of it."""
        self._keep(self._held)
        self._held = b""
        between = f"\n[... {self._left_out} bytes left out ...]\n".encode() if self._left_out else b""
        return (self._head + between + self._tail).decode("utf-8", "replace")

    def _keep(self, part: bytes) -> None:
        self._head, part = self._head + part[: self._room - len(self._head)], part[self._room - len(self._head) :]
        tail = self._tail + part
        left = max(len(tail) - self._most, 0)
        self._tail, self._left_out = tail[left:], self._left_out + left


def keep_program(spec: dict[str, Any], control: IO[bytes], report: IO[bytes]) -> None:
    """Run a program in a folder of its own, and end all that it has started; see the module's docstring.

    Args:
        spec: ``command``, ``env``, ``folders`` (variable to the name of a further folder), ``stdin``, ``timeout``
            (seconds, or None), ``limit`` (bytes of each output), ``secrets``, ``parent`` (a process id), ``place`` (where
            folders are made), ``isolated`` (the beginning of a command that isolates the program, see ``levels.py``;
            empty: none), ``port`` (of the endpoint, for an isolated program).
        control: Closed by whoever no longer needs the folder.
        report: Gets the folder's name, then the end: ``status``, ``timed_out``, ``stdout``, ``stderr``, or ``error``.
    """
    adopt_descendants()
    remove_abandoned(spec["place"])
    with _Wakes(control, spec["parent"]) as wakes:
        folder = tempfile.mkdtemp(prefix=f"{PREFIX}{spec['parent']}-", dir=spec["place"])
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            for name in (_WORK, *spec["folders"].values()):
                os.mkdir(os.path.join(folder, name))
            _say(report, {"folder": os.path.join(folder, _WORK)})
            if wakes.prepared() and (ended := _run(spec, folder, wakes)) is not None:
                _say(report, ended)
                while not wakes.asked:
                    wakes.wait()
        finally:
            kill_descendants()
            _remove(folder)
            os.close(held)


class _Wakes:
    """Waits for the control, signals, the death of the parent, and the outputs of a program."""

    def __init__(self, control: IO[bytes], parent: int) -> None:
        self.asked = False
        """True if the program is to end now."""
        self._is_prepared = False
        self._control, self._parent = control, parent
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Wakes:
        self._woken, wake = os.pipe()
        for descriptor in (self._woken, wake):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._ask)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()

    def _ask(self, *signal_and_frame: object) -> None:
        self.asked = True

    def prepared(self) -> bool:
        """Wait until a byte says that the folder is prepared. False if it is given up instead."""
        while not self.asked and not self._is_prepared:
            self.wait()
        return not self.asked

    def watch(self, stream: IO[bytes], excerpt: Excerpt) -> None:
        """Read a stream into an excerpt while waiting."""
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, excerpt)

    def wait(self, seconds: float = _PARENT_SECONDS) -> None:
        """Wait until something happens, at most some seconds."""
        for key, _ in self._selector.select(max(0.0, min(seconds, _PARENT_SECONDS))):
            stream: Any = key.fileobj
            if key.data is not None:
                self._read(stream, key.data)
            elif stream is self._control:
                if os.read(stream.fileno(), 1):
                    self._is_prepared = True
                else:
                    self.asked = True
                    self._selector.unregister(stream)
            else:
                with suppress(BlockingIOError):
                    os.read(self._woken, _PART)
        self.asked = self.asked or os.getppid() != self._parent

    def drain(self) -> None:
        """Read what is left in the streams, whose writers are dead."""
        for key in [key for key in self._selector.get_map().values() if key.data is not None]:
            while self._read(key.fileobj, key.data):
                pass

    def _read(self, stream: Any, excerpt: Excerpt) -> bool:
        try:
            part = os.read(stream.fileno(), _PART)
        except BlockingIOError:
            return False
        excerpt.add(part)
        if not part:
            self._selector.unregister(stream)
        return bool(part)


def _run(spec: dict[str, Any], folder: str, wakes: _Wakes) -> dict[str, Any] | None:
    """Run the program to its end. Return the report, None if nobody waits for it."""
    channel, theirs = socket.socketpair()
    fill = {FOLDER: folder, CHANNEL: str(theirs.fileno())}
    isolated = [fill.get(one, one.replace(FOLDER, folder)) for one in spec["isolated"]]
    environment = {**spec["env"], **{name: os.path.join(folder, one) for name, one in spec["folders"].items()}}
    with tempfile.TemporaryFile(dir=folder) as given:
        given.write(spec["stdin"].encode("utf-8", "replace"))
        given.seek(0)
        try:
            program = subprocess.Popen(
                [*isolated, *spec["command"]], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                cwd=os.path.join(folder, _WORK), start_new_session=True, preexec_fn=die_with_parent,
                pass_fds=[theirs.fileno()] if isolated else [],
            )  # fmt: skip
        except OSError as error:
            return {"error": str(error)}
        finally:
            theirs.close()
    if isolated:
        threading.Thread(target=_forward, args=(channel, spec["port"]), daemon=True).start()
    assert program.stdout is not None and program.stderr is not None
    outputs = [Excerpt(spec["limit"], spec["secrets"]) for _ in range(2)]
    for stream, excerpt in zip((program.stdout, program.stderr), outputs):
        wakes.watch(stream, excerpt)
    deadline = time.monotonic() + spec["timeout"] if spec["timeout"] is not None else float("inf")
    code, timed_out = None, False
    while (code := reap(program.pid)) is None and not wakes.asked:
        wakes.wait(deadline - time.monotonic())
        if time.monotonic() < deadline:
            continue
        if timed_out:
            break
        timed_out, deadline = True, time.monotonic() + _GRACE_SECONDS
        _terminate(program.pid, isolated=bool(isolated))
    killed = kill_descendants(program.pid)
    if wakes.asked:
        return None
    wakes.drain()
    status = code if code is not None else killed if killed is not None else -signal.SIGKILL
    if isolated and status > 128:  # as bubblewrap says by which signal a program ended
        status = 128 - status
    program.returncode = status  # collected above, so that Popen does not look for it
    stdout, stderr = (excerpt.text() for excerpt in outputs)
    return {"status": status, "timed_out": timed_out, "stdout": stdout, "stderr": stderr}


def _terminate(program: int, *, isolated: bool) -> None:
    """Send SIGTERM to a program and what it has started, but not to what isolates it, which would end all at once."""
    import psutil

    if not isolated:
        with suppress(ProcessLookupError):
            os.killpg(program, signal.SIGTERM)
        return
    for process in _below():
        with suppress(psutil.Error):
            if process.pid != program:
                process.terminate()


def _forward(channel: socket.socket, port: int) -> None:
    """Receive the server of an isolated program's loopback, and connect whoever connects to it with the endpoint."""
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:  # the program did not start
        return
    room = threading.Semaphore(_CONNECTIONS)
    with socket.socket(fileno=descriptors[0]) as server:
        while room.acquire():  # further connections wait to be accepted
            client, _ = server.accept()
            threading.Thread(target=_connect, args=(client, port, room), daemon=True).start()


def _connect(client: socket.socket, port: int, room: threading.Semaphore) -> None:
    """Connect a client with the endpoint, until both have ended."""
    with suppress(OSError), client, socket.create_connection(("127.0.0.1", port)) as endpoint:
        for one in (client, endpoint):  # else a body waits 40 ms until the other side confirms its headers
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = threading.Thread(target=_pump, args=(endpoint, client), daemon=True)
        answers.start()
        _pump(client, endpoint)
        answers.join()
    room.release()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Send on what a socket receives, until either ends."""
    with suppress(OSError):
        while part := source.recv(_PART):
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _say(report: IO[bytes], message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        report.write(json.dumps(message).encode() + b"\n")
        report.flush()


def remove_abandoned(place: str, parent: int | None = None) -> None:
    """Remove this user's folders of keepers that were killed; a keeper holds a lock on its folder.

    Args:
        place: Where folders are made.
        parent: Process whose keepers are all dead. None: any process; a folder that is younger than a minute stays, as its
            keeper may not hold it yet.
    """
    for folder in Path(place).glob(f"{PREFIX}*" if parent is None else f"{PREFIX}{parent}-*"):
        with suppress(OSError):
            found = folder.lstat()
            young = time.time() - found.st_mtime < _ABANDONED_SECONDS
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or (young and parent is None):
                continue
            os.chmod(folder, 0o700)  # else one that a program has taken all rights from could not be opened
            held = os.open(folder, _REAL_FOLDER)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(str(folder))
            finally:
                os.close(held)


def _remove(folder: str) -> None:
    """Remove a folder, also where the program has taken rights from parts of it.

    The folders in it are moved to its top, since their paths may be longer than the system takes.
    """
    with suppress(OSError):
        os.chmod(folder, 0o700)
        top = os.open(folder, _REAL_FOLDER)
        waiting = ["."]
        try:
            for name in waiting:  # which grows
                with suppress(OSError):
                    _empty(name, top, waiting)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(name: str, top: int, waiting: list[str]) -> None:
    """Remove a folder of the top and what is in it, except folders that are not empty: they move to the top, and wait."""
    within = os.open(name, _REAL_FOLDER, dir_fd=top)
    try:
        for one in list(os.scandir(within)):
            with suppress(OSError):
                if not one.is_dir(follow_symlinks=False):  # what a link points to is not ours
                    os.unlink(one.name, dir_fd=within)
                    continue
                with suppress(OSError):
                    os.chmod(one.name, 0o700, dir_fd=within)
                try:
                    os.rmdir(one.name, dir_fd=within)
                except OSError:
                    moved = str(uuid.uuid4())
                    os.rename(one.name, moved, src_dir_fd=within, dst_dir_fd=top)
                    waiting.append(moved)
    finally:
        os.close(within)
    if name != ".":
        os.rmdir(name, dir_fd=top)


def keep_command(parent: int, command: list[str]) -> int:
    """Run a command beside its parent, and return its exit code; whatever ends first takes everything below with it.

    The command first gets SIGTERM, so that it removes what it has made.

    Args:
        parent: The parent's process id.
        command: The command. Its outputs are those of this process, whose input the parent closes to end it.
    """
    adopt_descendants()
    with _Wakes(os.fdopen(0, "rb", buffering=0), parent) as wakes:
        if os.getppid() != parent:
            return -signal.SIGKILL
        kept = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        while (code := reap(kept.pid)) is None and not wakes.asked:
            wakes.wait()
    if code is None:  # what it shares with processes below it, shared memory too, it alone removes
        os.kill(kept.pid, signal.SIGTERM)
        deadline = time.monotonic() + _KEPT_GRACE_SECONDS
        while (code := reap(kept.pid)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    killed = kill_descendants(kept.pid)
    kept.returncode = code if code is not None else killed if killed is not None else -signal.SIGKILL
    return kept.returncode


def main() -> None:
    """Read a specification from the standard input, its length in eight bytes before it, and keep its program.

    With arguments, which are a process id and a command, keep the command beside that process.
    """
    if len(sys.argv) > 1:
        code = keep_command(int(sys.argv[1]), sys.argv[2:])
        sys.exit(code if code >= 0 else 128 - code)
    control, report = os.fdopen(0, "rb", buffering=0), os.fdopen(1, "wb")
    size, given = int.from_bytes(control.read(8), "big"), b""
    while len(given) < size:
        part = control.read(size - len(given))
        if not part:
            return
        given += part
    spec = json.loads(given)
    sys.path += spec["path"]
    try:
        keep_program(spec, control, report)
    except Exception as error:  # such as a full disk
        _say(report, {"error": str(error) or repr(error)})


if __name__ == "__main__":
    main()
