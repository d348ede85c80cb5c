"""Runs the rest of a command in a child process, and in another one when that is killed: the
controller of a job of this machine, the driver of a job that was submitted to Ray.

The parent only waits. It is small, so the kernel's OOM killer takes the child. Ray sets a Ray job
to FAILED for good when its process ends by a signal, and KubeRay may then delete the cluster.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PAUSE_S = 0.5
"""Seconds before the next child."""
EARLY_S = 60.0
"""A child that is killed sooner after its start counts as one that cannot run here."""
MAX_EARLY = 5
"""Early ends in succession that end the command."""
_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80
"""si_code of a signal that a terminal has sent, to parent and child."""
_STOPS = {signal.SIGINT, signal.SIGTERM}


def supervise(what: str, *, pause_s: float = PAUSE_S, max_early: int = MAX_EARLY) -> int:
    """Returns in the child, which is `what`: how many were killed before it. The calling process
    never returns: it ends with the child's exit code. The child ends with it."""
    parent, num_killed, num_early, stop = os.getpid(), 0, 0, None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOPS, signal.SIGCHLD})
    while True:
        started = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)
            # The job exists for a second child: a stop waits until this one can cancel the job.
            after = {*before, *_STOPS} if num_killed else before
            signal.pthread_sigmask(signal.SIG_SETMASK, after)
            return num_killed
        if stop:
            os.kill(pid, stop.si_signo)
        code, stopped = _wait(pid)
        if code >= 0 or stopped or stop:
            os._exit(code if code >= 0 else 128 - code)
        num_killed += 1
        num_early = num_early + 1 if time.monotonic() - started < EARLY_S else 0
        name = signal.Signals(-code).name
        if num_early >= max_early:
            _print(f"{num_early} processes were killed ({name}) within {EARLY_S:.0f} s of their "
                   f"start, each the {what}; this command ends, the job continues")  # fmt: skip
            os._exit(128 - code)
        _print(f"the {what} was killed ({name}); training continues, and another one starts")
        stop = signal.sigtimedwait(_STOPS, pause_s)


def _wait(pid: int) -> tuple[int, bool]:
    """(Exit code of the child, whether it was asked to stop). A request is passed on, unless the
    terminal has sent it to the child too, and kept for the next child if this one has ended."""
    stopped = False
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        request = signal.sigwaitinfo({*_STOPS, signal.SIGCHLD})
        if request.si_signo == signal.SIGCHLD:
            continue
        stopped = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        if request.si_code != _SI_KERNEL or not stopped:
            os.kill(pid if stopped else os.getpid(), request.si_signo)
    return os.waitstatus_to_exitcode(done[1]), stopped


def accept_stop() -> None:
    """This child handles SIGTERM and Ctrl-C now, also those from before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
