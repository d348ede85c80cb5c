"""Rest for the main thread of an actor's process, which Ray wakes a hundred times a second.

Owns: one signal handler and its timer. Must not: know what the actor does.

That thread hands calls on to the actor's event loop and looks for signals every 10 ms, whether any
come or not (CoreWorker::RunTaskExecutionLoop in Ray's C++). It costs half a percent of a core for
each actor, taken from training. The look runs handlers of Python, and while one of them sleeps
there is no next look. So a timer's signal is due soon after each rest, and its handler is the rest.

The price: a call to the actor waits for as long as the rest still takes. Nothing else does: other
threads take the answers to what the actor itself called, and end it when Ray kills it; handlers of
other signals run within the sleep.
"""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType

REST_S = 0.5
"""A person who typed the call does not notice."""
AWAKE_S = 0.02
"""Two looks of Ray, for the calls that have come meanwhile."""


def prepare() -> None:
    """For `begin`. Ray makes an actor's object, before its __init__, in the main thread."""
    with contextlib.suppress(ValueError):  # some other Ray: another thread, so no rest
        signal.signal(signal.SIGALRM, _rest)


def begin() -> None:
    """From now on, until the process ends; from any thread. To begin again changes nothing."""
    if signal.getsignal(signal.SIGALRM) is _rest:  # else the signal would end the process
        signal.setitimer(signal.ITIMER_REAL, AWAKE_S)


def _rest(_number: int, _frame: FrameType | None) -> None:
    time.sleep(REST_S)
    signal.setitimer(signal.ITIMER_REAL, AWAKE_S)
