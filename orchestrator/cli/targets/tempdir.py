"""A temporary directory for one command; SIGTERM removes it too (`timeout 60 holdfast logs`)."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def on_sigterm(act: Callable[[], object]) -> Iterator[None]:
    """Calls `act` on the first SIGTERM: systemd, `timeout` and `uv run` may deliver two. `ray job
    stop` sends it, and SIGKILL three seconds later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        act()

    before = signal.signal(signal.SIGTERM, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Yields the path; only this user may read it."""
    with tempfile.TemporaryDirectory(prefix=prefix) as path:

        def end() -> None:
            shutil.rmtree(path, ignore_errors=True)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        with on_sigterm(end):
            yield Path(path)
