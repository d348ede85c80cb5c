"""A temporary directory for one command; SIGTERM removes it too (`timeout 60 holdfast logs`)."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.orchestrator.backends.ray import actor_calls


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Yields the path; only this user may read it."""
    with tempfile.TemporaryDirectory(prefix=prefix) as path:

        def end() -> None:
            shutil.rmtree(path, ignore_errors=True)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        with actor_calls.on_sigterm(end):
            yield Path(path)
