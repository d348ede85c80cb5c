"""Linux calls that Python does not wrap, and process states from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61

STACK_SIGNAL = signal.SIGRTMAX - 5
"""faulthandler answers it with the main thread's stack. SIGUSR1 belongs to scripts: Slurm sends it
before a job's end."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exits if the parent has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(137)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended (subreaper), to end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that ps and pkill show: `hf-` and at most 12 more characters."""
    _prctl(_PR_SET_NAME, f"hf-{name}".encode())


def allow_reading_by(pid: int) -> None:
    """Let this process and its descendants read our memory where the kernel allows that to
    ancestors only (kernel.yama.ptrace_scope 1, as on Ubuntu). Without Yama it is allowed anyway."""
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_PTRACER, pid)


PF_EXITING = 0x4
"""linux/sched.h: the process gives back what it holds."""


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def _stat(pid: int) -> list[bytes]:
    """State, ppid and so on, as proc(5) lists them; empty when the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name in parentheses may itself contain parentheses.
    return stat[stat.rindex(b")") + 2 :].split()


def state_of(pid: int) -> str:
    """State letter of a process (R, S, D, T, Z ...); empty when it does not exist."""
    return (_stat(pid) or [b""])[0].decode()


def is_ending(pid: int) -> bool:
    """True if a process ends or has ended. Its connections close first; a GPU's context can take
    seconds until it is a zombie."""
    stat = _stat(pid)
    return not stat or stat[0] in b"ZX" or bool(int(stat[6]) & PF_EXITING)


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for this signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def children() -> list[int]:
    """Children of this process, zombies included; empty if the kernel does not list them."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return pids


def reap_strays(seen: set[int]) -> set[int]:
    """Reap zombies that are also in `seen`; returns the other ones, for the next call.

    Process 1 of a container gets all orphans of it, such as those of `kubectl exec`. Code that
    waits for its own child does so at once, so an old zombie has no other waiter."""
    zombies = {pid for pid in children() if state_of(pid) == "Z"}
    for pid in zombies & seen:
        os.waitpid(pid, os.WNOHANG)
    return zombies - seen


def describe_end(code: int) -> str:
    """`killed by SIGKILL`, `exited with code 1`; `code` is negative for a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
