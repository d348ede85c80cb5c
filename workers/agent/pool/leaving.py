"""The end of an interpreter in CPython's order (Py_RunMain, Py_FinalizeEx): sys.excepthook, then
threads, then atexit. What one of them raises is printed, and the next one runs.

Standard library only and Python 3.8 or later: other_python.py loads this file in the interpreter of
a user.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINGER_S = 60.0
"""A process that has not ended so long after its script is named."""


def silence_signals() -> None:
    """Take away the script's signal handlers: the program is over, and a handler that raises would
    end the report of why. They run in the main thread, whichever thread the kernel chooses."""
    while True:
        # A handler may raise just now: then the rest is taken away in another turn.
        with contextlib.suppress(BaseException):
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    usual = number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
                    signal.signal(number, signal.SIG_DFL if usual else signal.SIG_IGN)
            return


def call_excepthook(error: BaseException) -> None:
    """Call the hook that the script has put in the place of Python's, which prints the traceback:
    that was done. torch.distributed wraps the hook, to print the rank before each line."""
    hook: Any = sys.excepthook
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        names, cells = hook.__code__.co_freevars, hook.__closure__
        is_old = "old_hook" in names
        hook = cells[names.index("old_hook")].cell_contents if is_old else sys.__excepthook__
    if hook is not sys.__excepthook__:
        _attempt(lambda: sys.excepthook(type(error), error, error.__traceback__))


def leave() -> None:
    """Wait for threads and run the exit functions."""
    for act in (_end_threads, atexit._run_exitfuncs):
        _attempt(act)


def _attempt(act: Callable[[], object]) -> None:
    try:
        act()
    except BaseException:
        traceback.print_exc()


def _end_threads() -> None:
    # It first calls what threading._register_atexit was given: there concurrent.futures ends the
    # idle threads of its pools. Private, but the interpreter calls it by this name.
    threading._shutdown()  # type: ignore[attr-defined]


def tell_if_it_lingers(tell: Callable[[str], None]) -> None:
    """Call `tell` after LINGER_S with what the process waits for."""
    timer = threading.Timer(LINGER_S, lambda: tell(waits_for()))
    timer.name, timer.daemon = "holdfast-leaving", True
    try:
        timer.start()
    except RuntimeError:  # no thread can be started
        return


def waits_for() -> str:
    """Threads that keep this process from ending, or else the exit function that does."""
    frames, main = sys._current_frames(), threading.main_thread()
    others = (thread for thread in threading.enumerate() if thread is not main)
    threads = [thread for thread in others if not thread.daemon and thread.is_alive()]
    if not threads:
        return f"an exit function, {_place(frames.get(main.ident or 0))}"
    names = [f"{thread.name} {_place(frames.get(thread.ident or 0))}" for thread in threads[:3]]
    more = f" and {len(threads) - 3} more" if len(threads) > 3 else ""
    return f"the thread{'s' if len(threads) > 1 else ''} {', '.join(names)}{more}"


def _place(frame: Any) -> str:
    """The innermost function outside the standard library, or the innermost one."""
    if frame is None:
        return "in native code"
    ours, shown = (str(Path(threading.__file__).parent), "<", __file__), frame
    while frame is not None:
        file = frame.f_code.co_filename
        if "-packages" in file or not file.startswith(ours):
            shown = frame
            break
        frame = frame.f_back
    code = shown.f_code
    return f"in {code.co_name} ({Path(code.co_filename).name}:{shown.f_lineno})"
