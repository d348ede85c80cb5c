"""What a command that watches a job does while the cluster's head is lost, and when it is back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Self

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray import cluster
from holdfast.orchestrator.backends.ray.jobs_page import submission_id
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.host import checkpoint_path

MODULE = "holdfast.orchestrator.cli.main"
CHECK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class WatchAgain:
    """The command that watches a job again."""

    job: str
    address: str
    as_json: bool

    @property
    def command(self) -> str:
        """As a user types it."""
        return f"holdfast run --attach {self.job} --ray {self.address}"

    def possible(self) -> bool:
        """Whether a new process finds the job. A head answers before it knows its actors again."""
        words = ["-m", MODULE, "status", self.job, "--ray", self.address]
        try:
            done = subprocess.run(
                [sys.executable, *words], timeout=CHECK_TIMEOUT_S, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def replace_process(self) -> None:
        """This process becomes that command."""
        words = ["-m", MODULE, "run", "--attach", self.job, "--ray", self.address]
        os.execv(sys.executable, [sys.executable, *words, *(["--json"] if self.as_json else [])])


class HeadMonitor:
    """Notes in the display that the cluster's head is lost, from a thread. When it is back, the
    process is replaced by one that watches the job again: Ray counts the drivers of a lost Ray node
    as ended, and their calls may never be answered. When it stays away, the command ends.

    Ray's own threads end the process then, after RAY_gcs_rpc_server_reconnect_timeout_s and with a
    line for Ray's developers. The monitor ends it shortly before, with what is left of the job.
    """

    RAY_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
    RAY_DEFAULT_S = 60.0
    MARGIN_S = 3.0

    def __init__(
        self,
        display: Display,
        order: ControllerOrder,
        watch_again: WatchAgain,
        period_s: float = 1.0,
    ) -> None:
        """`period_s`: between two checks of the head; a check may take as long."""
        self._display, self._watch_again, self._period_s = display, watch_again, period_s
        job = job_from_mapping(order.document, f"job {order.job}")
        self._checkpoints = checkpoint_path(order, job.spec.checkpoint.path)
        self._address = cluster.head_address()
        limit_s = float(os.environ.get(self.RAY_TIMEOUT, self.RAY_DEFAULT_S)) - self.MARGIN_S
        self._limit_s = max(self._period_s, limit_s)
        self._closed = threading.Event()
        self._ending = threading.Lock()
        """Held while the process is replaced or the command ends by itself."""

    def __enter__(self) -> Self:
        if self._address:
            threading.Thread(target=self._run, name="head monitor", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed.set()
        with self._ending:
            pass

    def _run(self) -> None:
        lost_at: float | None = None
        while not self._closed.wait(self._period_s):
            if self._answers():
                if lost_at is not None and self._back():
                    lost_at = None
            elif lost_at is None:
                lost_at = time.monotonic()
                self._note(
                    f"does not answer. Training goes on as long as the other Ray nodes wait for "
                    f"it; this command waits {self._limit_s:.0f} s"
                )
            elif time.monotonic() - lost_at > self._limit_s:
                self._end()

    def _back(self) -> bool:
        """Returns whether this process goes on; False: the head is not ready yet."""
        if submission_id():
            # The Ray job's process, and what `ray job stop` ends.
            self._note("answers again")
            return True
        if not self._watch_again.possible():
            return False
        with self._ending:
            if self._closed.is_set():
                return True
            self._note("answers again; watching the job again")
            self._display.__exit__(None, None, None)  # a live display restores the terminal
            sys.stdout.flush()
            sys.stderr.flush()
            self._watch_again.replace_process()
        return True

    def _end(self) -> None:
        self._note(
            f"did not come back, so this command ends. Where the cluster keeps its store in Redis, "
            f"`{self._watch_again.command}` watches the job again once there is a head. Elsewhere "
            f"the job is gone with the cluster; what it has committed stays in "
            f"{self._checkpoints}, and a job with that spec.checkpoint.path goes on from it"
        )
        self._display.__exit__(None, None, None)  # a live display restores the terminal
        sys.stdout.flush()
        os._exit(1)  # Ray's shutdown would wait for the head

    def _note(self, text: str) -> None:
        self._display.note(f"The head of the Ray cluster ({self._address}) {text}")

    def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), self._period_s).close()
        except OSError:
            return False
        return True
