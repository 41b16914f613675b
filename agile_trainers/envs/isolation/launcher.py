"""Isolates its own process, then replaces itself by the program to run; see ``levels.py``.

It is started as ``python -I -S launcher.py <specification as JSON> program arguments...`` and imports only the standard
library. Before the program starts, it sets limits, user, namespaces and mounts or a Landlock domain, capabilities,
``no_new_privs``, and a seccomp filter that the caller compiled.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import platform
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

NOBODY = 65534
_NEW = {"mount": 0x00020000, "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000,
        "pid": 0x20000000, "net": 0x40000000}  # fmt: skip
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_READ_ONLY, _NO_SUID = 0x1, 0x2
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
"""Numbers of system calls, equal on every architecture."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
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
    if spec["level"] == "namespaces":
        _die_with(spec["parent"])
        _enter_namespaces(spec)
    elif spec["level"] != "bubblewrap":  # which has done this already
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


def _enter_namespaces(spec: dict[str, Any]) -> None:
    """Continue as process 2 of new namespaces, with a root that contains only some read-only folders.

    Process 1 waits for it, since the kernel does not deliver most signals, timers included, to a process 1.
    """
    user, group = os.getuid(), os.getgid()
    if user == 0:
        os.setgroups([])
    _check(_libc.unshare(sum(_NEW.values())), "unshare")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    _wait_for_child()
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    _new_root(spec["paths"], spec["links"])
    _drop_capabilities()
    _wait_for_child()
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")


def _wait_for_child() -> None:
    """Fork; the parent waits and exits with the child's code, or with 128 plus the number of its signal."""
    child = os.fork()
    if child == 0:
        return
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _new_root(paths: list[str], links: dict[str, str]) -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = next(path for path in ("/tmp", "/mnt", "/var", "/proc") if os.path.isdir(path))
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    old = "/.old"
    os.mkdir(root + old, 0o700)
    number = _PIVOT_ROOT[platform.machine()]
    _check(_libc.syscall(number, root.encode(), (root + old).encode()), "pivot_root")
    os.chdir("/")
    for path in paths:
        os.umask(0o022)
        if os.path.isdir(old + path):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "x"):
                pass
        _mount(old + path, path, None, _MS_BIND | _MS_REC)
    for link, target in links.items():
        os.symlink(target, link)
    os.umask(0o077)
    _check(_libc.umount2(old.encode(), _MNT_DETACH), "umount2")
    os.rmdir(old)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SUID, 0, 0, 0)
    done = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _check(done, "mount_setattr")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


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
