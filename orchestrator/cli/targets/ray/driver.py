"""The driver of a submitted job, as a child of the process that its Ray job started.

Ray sets a Ray job to FAILED for good when that process ends by a signal, and KubeRay may then
delete the cluster, although training does not need the driver. So that process imports no Ray,
stays small, and starts another driver when one is killed (the kernel's OOM killer takes the
largest).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

PAUSE_S = 1.0
"""Before the next driver."""
EARLY_S = 60.0
"""A driver that is killed sooner after its start counts as one that cannot run here."""
MAX_EARLY = 5
"""So many of them in succession end the Ray job."""
_PR_SET_PDEATHSIG = 1


def fork_driver(*, pause_s: float = PAUSE_S, max_early: int = MAX_EARLY) -> int:
    """Returns in the driver: how many drivers were killed before it. The calling process never
    returns: it ends with the driver's exit code."""
    stopped = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True  # `ray job stop` signals the driver, too

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    parent, num_killed, num_early = os.getpid(), 0, 0
    while True:
        started = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for number, handler in before.items():
                signal.signal(number, handler)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if stopped or os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)
            if num_killed:  # the job exists: a stop waits until this driver can cancel it
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            return num_killed
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code >= 0 or stopped:
            os._exit(code if code >= 0 else 128 - code)
        num_killed += 1
        num_early = num_early + 1 if time.monotonic() - started < EARLY_S else 0
        name = signal.Signals(-code).name
        if num_early >= max_early:
            _print(f"{num_early} drivers of this job were killed ({name}) within {EARLY_S:.0f} s "
                   f"of their start; this Ray job ends, the training job continues")  # fmt: skip
            os._exit(128 - code)
        _print(f"the driver of this job was killed ({name}); training continues, and another "
               f"driver attaches to the job")  # fmt: skip
        time.sleep(pause_s)


def accept_stop() -> None:
    """This driver handles SIGTERM now, also one from before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
