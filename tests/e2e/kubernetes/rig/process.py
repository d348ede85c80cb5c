"""One server process of a run.

A process is recorded as soon as it exists, so that it can be removed when the tests are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import Waited, until


class Server:
    """A named process of a run with a log that survives restarts."""

    def __init__(
        self,
        run: Run,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        inherits: bool = True,
    ) -> None:
        self.name = name
        self.log = run.directory / f"{name}.log"
        self._run = run
        self._command = [str(word) for word in command]
        self._environment = {**(os.environ if inherits else {}), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._run.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._run.record(self.name, self._process.pid)

    def wait_ready(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for the server to answer; raise at once if it has ended."""

        def check() -> bool:
            if not self.running:
                raise Waited(f"{self.name} ended while starting:\n{self.tail()}")
            return ready()

        until(check, f"{self.name} to be ready", timeout_s=timeout_s, last=self.tail)

    def kill(self) -> None:
        """SIGKILL, and wait for the end of the process."""
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.signal(number)
        assert self._process is not None
        self._process.wait(timeout=20)
        self._run.forget(self.name)

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)

    def tail(self, num_lines: int = 15) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-num_lines:])
