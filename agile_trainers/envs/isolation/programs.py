"""Isolates a whole program, with processes and files of its own, that may talk to one address alone.

Other than the code that :mod:`~agile_trainers.envs.isolation.levels` isolates, an agent's program starts processes, writes
files and opens sockets. In bubblewrap's namespaces it has these: its processes see each other alone, it writes to its own
folder, and its loopback has one server, which forwards to the endpoint. Landlock and a seccomp filter cannot give it that.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from agile_trainers.envs.isolation.levels import BUBBLEWRAP, LEVELS, NONE, IsolationError, level, require, why_not
from agile_trainers.envs.isolation.process_tree import CHANNEL, FOLDER

_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/alternatives", "/etc/ssl", "/etc/pki",
    "/etc/ca-certificates", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/hosts",
    "/etc/nsswitch.conf",
)  # fmt: skip
"""Files and folders that every program may read. They hold no secrets, unlike the rest of ``/etc``."""

# Makes a server on the loopback of the program's own network, and hands it to the process outside that answers there.
_LAUNCHER = """
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
    options = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL",
               "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # fmt: skip
    wanted = [*_SYSTEM, sys.prefix, sys.base_prefix, sys.executable, program, *map(str, readable)]
    bound: list[str] = []
    for path in (os.path.abspath(one) for one in wanted):
        if os.path.islink(path) and path in _SYSTEM:
            options += ["--symlink", os.readlink(path), path]
            bound.append(path)
            continue
        for one in (path, os.path.realpath(path)):
            if os.path.exists(one) and not any(one == above or one.startswith(f"{above}/") for above in bound):
                options += ["--ro-bind", one, one]
                bound.append(one)
    options += ["--bind", FOLDER, FOLDER, "--chdir", f"{FOLDER}/work", "--remount-ro", "/", "--"]
    interpreter = os.path.realpath(sys.executable)
    return [
        shutil.which("bwrap") or "bwrap",
        *options,
        interpreter,
        "-I",
        "-S",
        "-B",
        "-c",
        _LAUNCHER,
        CHANNEL,
        str(port),
    ]
