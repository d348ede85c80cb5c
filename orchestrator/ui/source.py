"""Sources of the page: the target's own views, requests, and commands.

However many people look, a job is read once a second at most, and never for more than an eighth of
the time: a slow cluster is asked less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shlex
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol import python_command
from holdfast.orchestrator.runtime.observe.view import JobView

from . import pages

if TYPE_CHECKING:
    from holdfast.orchestrator.cli.targets.base import Target
    from holdfast.orchestrator.protocol.messages import Reply

T = TypeVar("T")
PROGRAM = "holdfast.orchestrator.cli.main"
READ_S, REST, ENDED_S = 1.0, 8.0, 15.0
"""Pause between two reads: least seconds, in units of a read, and seconds after a job's end."""
RIGHTS_S = 60.0
"""Interval at which a user's rights are asked."""
OF_A_JOB = re.compile(r"[-a-z0-9/]+: \S")
"""A line about a job that cannot be read; libraries print other ones."""
MAX_LINES = 2000
BATCH_S = 0.2
COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""A terminal's control sequence."""


@dataclass
class Reading:
    """Content of one page, as it was read last."""

    sections: dict[str, str] = field(default_factory=dict)
    view: JobView | None = None
    problem: str = ""
    """Reason why the view is old; empty: it is not."""
    fresh_until: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Source:
    """The jobs of one target."""

    def __init__(self, target: Target, where: str) -> None:
        self._target, self.where = target, where
        self.closed = False
        """The page ends: its streams end too."""
        self._rejections: dict[str, str] = {}
        self._rights_fresh_until = 0.0
        self._readings: dict[str, Reading] = {}
        # A target is used by one thread; what asks ranks takes seconds, and gets another one.
        self._reader = ThreadPoolExecutor(1, "read")
        self._asker = ThreadPoolExecutor(1, "ask")

    async def read(self, name: str = "") -> Reading:
        """The page of a job, or of all jobs (empty)."""
        reading = self._readings.setdefault(name, Reading())
        async with reading.lock:
            if time.monotonic() < reading.fresh_until:
                return reading
            began = time.monotonic()
            try:
                await self._run(self._reader, lambda: self._fill(reading, name))
                reading.problem = ""
            except HoldfastError as error:
                reading.problem = str(error)
            took = time.monotonic() - began
            ended = reading.view is not None and reading.view.state in TERMINAL
            rest_s = max(ENDED_S if ended else READ_S, REST * took)
            reading.fresh_until = time.monotonic() + rest_s
        return reading

    def _fill(self, reading: Reading, name: str) -> None:
        if name:
            job = self._target.find(name)
            view = job.view()
            if time.monotonic() >= self._rights_fresh_until:
                self._rejections = self._target.rejections()
                self._rights_fresh_until = time.monotonic() + RIGHTS_S
            reading.sections = pages.job_sections(view, job.remarks(view), self._rejections)
            reading.view = view
            return
        with contextlib.redirect_stderr(io.StringIO()) as remarks:  # jobs that cannot be read
            views = self._target.views()
        problems = [line for line in remarks.getvalue().splitlines() if OF_A_JOB.match(line)]
        empty = self._target.empty_message().replace("`", "")
        jobs = pages.jobs_section(views, problems, empty, self.where)
        reading.sections = {"jobs": jobs}

    async def request(self, name: str, verb: str, **arguments: Any) -> Reply:
        """Raises HoldfastError."""
        reply = await self._run(
            self._asker, lambda: self._target.find(name).request(verb, **arguments)
        )
        if name in self._readings:
            self._readings[name].fresh_until = 0.0
        return reply

    async def _run(self, thread: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        def guarded() -> T:
            with self._target.guard():
                return call()

        return await asyncio.get_running_loop().run_in_executor(thread, guarded)

    async def lines(self, *words: str, follow: bool = False) -> AsyncIterator[list[str]]:
        """Output of a command, in batches; without `follow` the last lines, when it has ended."""
        line = shlex.split(self._target.command(*words))
        rest = line[line.index("holdfast") + 1 :] + ["--kubernetes"] * (line[0] == "kubectl")
        environment = dict(os.environ)
        if home := getattr(self._target, "home", None):
            environment["HOLDFAST_HOME"] = str(home.path)
        child = await asyncio.create_subprocess_exec(
            *python_command.start(PROGRAM), *rest, env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, limit=2**20,
        )  # fmt: skip
        assert child.stdout is not None
        kept: deque[str] = deque(maxlen=MAX_LINES)
        sent = time.monotonic()
        try:
            while not self.closed:
                try:
                    async with asyncio.timeout(BATCH_S):
                        text = await child.stdout.readline()
                    if not text:
                        break
                    kept.append(COLOUR.sub("", text.decode(errors="replace").rstrip("\n")))
                except TimeoutError:
                    pass
                except ValueError:
                    kept.append("(a line of over 1 MiB)")
                if follow and kept and time.monotonic() - sent > BATCH_S:
                    yield list(kept)
                    kept.clear()
                    sent = time.monotonic()
            yield list(kept)
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
                await child.wait()
