"""The view of a job as a file among Ray's logs of the head. A command over http:// reads it through
the dashboard, as `ray logs` reads logs, and needs no Ray job of its own.

The file counts only while the actor of this process is alive: readers compare the pid.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from holdfast.orchestrator.backends.ray import names
from holdfast.orchestrator.runtime.control_api import view_body
from holdfast.orchestrator.runtime.observe.view import JobView

SHARE = 0.01
"""Share of the controller's processor time, at most, that goes into writing: the view of a large
job has megabytes."""
MAX_PERIOD_S = 20.0
"""Readers do not show a view that is older than a minute."""

log = logging.getLogger("holdfast")


class ViewFile:
    def __init__(self, logs: Path, job: str, period_s: float) -> None:
        """`logs`: Ray's log directory on this machine. `period_s`: between two writes."""
        self._path, self._period_s = logs / names.view_file(job), period_s
        self._problem = ""

    def write(self, view: JobView) -> float:
        """Returns how long to wait until the next write. Raises nothing: the file is a copy."""
        began = time.thread_time()  # a busy disk must not delay the next write
        part = self._path.with_suffix(".part")
        try:
            part.write_text(json.dumps({"pid": os.getpid(), "view": view_body(view)}))
            part.replace(self._path)
            self._problem = ""
        except OSError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("commands over http:// are slower: %s", error)
        wait_s = (time.thread_time() - began) / SHARE
        return min(max(self._period_s, wait_s), max(self._period_s, MAX_PERIOD_S))

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
