"""Isolates its own process, then replaces itself by the program to run; see ``levels.py``.

It is started as ``python -I -S launcher.py <specification as JSON> program arguments...`` and imports only the standard
library. Before the program starts, it sets limits, user, a Landlock domain, capabilities,
``no_new_privs``, and a seccomp filter that the caller compiled.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

NOBODY = 65534
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
"""Numbers of system calls, equal on every architecture."""
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
_libc = ctypes.CDLL(None, use_errno=True)


def seal(spec: dict[str, Any]) -> None:
    """Apply the specification, in the order that the kernel requires."""
    for name, value in spec["limits"].items():
        with suppress(*(() if sys.platform == "linux" else (ValueError, OSError))):
            # At its soft limit of CPU time a program gets a signal that no other cause has.
            resource.setrlimit(getattr(resource, name), (value, value + (name == "RLIMIT_CPU")))
    os.umask(0o077)
    if sys.platform != "linux":
        _start_nothing()
        return
    if spec["level"] != "bubblewrap":  # which has done this already
        if spec["level"] == "landlock":
            _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        _become_nobody(spec["paths"])
        _die_with(spec["parent"])
        if spec["level"] == "landlock":
            _landlock(spec["paths"])
        _start_nothing()  # after the change of user, which a limit of processes would spoil
    _drop_capabilities()
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if spec["filter"]:
        with suppress(*((OSError,) if spec["level"] == "none" else ())):
            _load_filter(base64.b64decode(spec["filter"]))


def _start_nothing() -> None:
    """Refuse new processes, which could outlive the program, also where no filter can be made. The kernel exempts root."""
    with suppress(*(() if sys.platform == "linux" else (ValueError, OSError))):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def _become_nobody(paths: list[str]) -> None:
    """Change from root to the user ``nobody``, unless that user cannot read the interpreter."""
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    if all(os.access(path, os.R_OK, effective_ids=True) for path in [*paths, sys.executable]):
        os.seteuid(0)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    else:
        os.seteuid(0)


def _landlock(paths: list[str]) -> None:
    """Restrict this process to reading and executing files below some paths, as far as Landlock covers access."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    _check(version, "Landlock")
    rights = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    handled = (ctypes.c_uint64 * 3)(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 * (1 + (version >= 4) + (version >= 6))
    ruleset = _libc.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), size, 0)
    _check(ruleset, "landlock_create_ruleset")
    for path in paths:
        below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        rule = allowed.to_bytes(8, sys.byteorder) + below.to_bytes(4, sys.byteorder)
        _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(below)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _drop_capabilities() -> None:
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails if there are none to drop
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")


def _load_filter(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    loaded = Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(loaded), 0, 0), "seccomp")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    seal(json.loads(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
