"""Sides that run a script: Holdfast, torchrun with the settings that recover fastest, its defaults.

All have 2 nodes on this machine, may go on with one, and get the same script, arguments and
environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.contestants.base import kill_trees
from bench.contestants.torchrun import TUNED
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.e2e.local.local_rig import Job, holdfast
from tests.e2e.ports import free_port
from tests.frameworks.catalogue import LOG, SCRIPTS, Framework, document, environment
from tests.frameworks.step_log import StepLog

STEPS = 100_000
"""More than there is time for."""
ANSWER_S = 30.0
PATIENT = {"budgets": {"infrastructure": {"restarts": 1000}}, "badNodeStrikes": 1000}
"""The same as --max-restarts: many faults follow each other in one job."""
HOLD_S = 30.0
"""Seconds that a lost node of Holdfast is not replaced in the case of shrink and grow."""


class Side(ABC):
    """One run of one script below `place`."""

    name = ""

    def __init__(
        self, framework: Framework, place: Path, *, workers: int, save_every: int, pace_s: float
    ) -> None:
        """`workers`: per node. `save_every`: steps. `pace_s`: seconds that each step waits."""
        self.framework, self.place, self.workers_per_node = framework, place, workers
        self.save_every, self.pace_s = save_every, pace_s
        self.log = StepLog(place / LOG)
        place.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.place / "out" / self.framework.checkpoints

    @property
    def marks(self) -> list[str]:
        """Marks in the command lines of its processes, see conditions.OtherWork."""
        return [str(self.place)]

    @abstractmethod
    def start(self) -> None:
        """Launch all nodes; returns before they train."""

    @abstractmethod
    def over(self) -> str:
        """Reason why the job has ended; empty: it runs."""

    @abstractmethod
    def workers(self) -> dict[int, int]:
        """Rank -> pid."""

    @abstractmethod
    def lose_node(self, *, replaced: bool) -> float:
        """SIGKILL the last node; when it was gone, seconds since the epoch. Not replaced: there is
        one node until `grow`."""

    @abstractmethod
    def grow(self) -> None:
        """Have two nodes again; returns before they train."""

    @abstractmethod
    def suspend(self) -> None:
        """Stop everything; returns when it has stopped."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after `suspend`; returns before it trains."""

    @abstractmethod
    def stop(self) -> None:
        """End every process of this run."""


def wait_for(condition: Callable[[], bool], bound_s: float, what: str) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {bound_s:g} s")
        time.sleep(0.1)


class UnderHoldfast(Side):
    name = "Holdfast"
    preload = False
    memory = False
    """The script's state is in memory, by the integration of its framework."""

    def start(self) -> None:
        framework, changes = self.framework, dict[str, Any]()
        if self.memory:
            framework = replace(framework, script=framework.memory)
            changes = {
                "checkpoint": {"memory": {"everySteps": 1}},
                "parallelism": {"shard": framework.shard},
            }
        self.job = Job(
            self.place,
            document(framework, self.place, steps=STEPS, save_every=self.save_every,
                     pace_s=self.pace_s, preload=self.preload, recovery=PATIENT,
                     workersPerNode=self.workers_per_node, **changes),
        )  # fmt: skip
        self.job.run()

    @property
    def marks(self) -> list[str]:
        return [str(self.place), str(self.job.home)]

    def view(self) -> JobView:
        return self.job.until(lambda view: True)

    def named_ns(self, rank: int, since_ns: int) -> int | None:
        """Time of the first event that said that this rank does nothing that its peers wait for."""
        printed = holdfast(self.job, "debug", "events", self.job.name, "--json").stdout
        for line in printed.splitlines():
            one = msgspec.json.decode(line)
            stacks = one["event"].get("stacks", [])
            idle = [s["rank"] for s in stacks if s.get("activity") == "nothing"]
            suspects = one["event"].get("ranks", [])[:1]
            if one["at_ns"] >= since_ns and rank in (*idle, *suspects):
                return int(one["at_ns"])
        return None

    def over(self) -> str:
        if self.job.command.poll() is None:
            return ""
        return f"the job ended: {self.job.output().strip()[-300:]}"

    def workers(self) -> dict[int, int]:
        return self.job.worker_pids()

    def lose_node(self, *, replaced: bool) -> float:
        node = [one.name for one in self.view().nodes if one.state == "member"][-1]
        if replaced:
            self.job.kill(self.job.agent_pid(node))
            return time.time()
        agent = psutil.Process(self.job.agent_pid(node))
        reply = self.job.request("chaos", kind="kill-node", node=node, hold_s=HOLD_S)
        assert reply.ok, reply
        agent.wait(ANSWER_S)
        return time.time()

    def grow(self) -> None:
        """The side grows by itself, after HOLD_S."""

    def suspend(self) -> None:
        self._ask("suspend")
        wait_for(lambda: self.view().state == "suspended", ANSWER_S * 2, "suspended")

    def resume(self) -> None:
        self._ask("resume")

    def _ask(self, verb: str, **arguments: Any) -> None:
        reply = self.job.request(verb, **arguments)
        assert reply.ok, reply

    def stop(self) -> None:
        self.job.end()


class Preloaded(UnderHoldfast):
    """`spec.preload` names what the script imports."""

    name = "Holdfast, preload"
    preload = True


class InMemory(UnderHoldfast):
    name = "Holdfast, in memory"
    memory = True


class UnderTorchrun(Side):
    """One elastic agent per node. TORCH_DISABLE_SHARE_RDZV_TCP_STORE: see bench.contestants."""

    name = "torchrun, best settings"
    configuration = ("--rdzv-conf", TUNED)
    variables: dict[str, str] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # noqa: RUF012

    def start(self) -> None:
        self._agents: list[subprocess.Popen[bytes]] = []
        self._port = free_port()
        self._num = 0
        for _ in range(2):
            self._start_agent()

    def _start_agent(self) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node",
            str(self.workers_per_node), "--max-restarts", "1000", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "bench",
            "--local-addr", "127.0.0.1", *self.configuration, self.framework.script,
            *self.framework.words(self.place / "out", STEPS, self.save_every),
        ]  # fmt: skip
        with (self.place / f"torchrun-{self._num}.log").open("ab") as out:
            self._agents.append(subprocess.Popen(
                command, cwd=SCRIPTS, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                     **environment(self.place, self.pace_s), **self.variables},
            ))  # fmt: skip
        self._num += 1

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [agent for agent in self._agents if agent.poll() is None]

    def over(self) -> str:
        if self._alive():
            return ""
        codes = [agent.returncode for agent in self._agents]
        return f"all agents ended, exit codes {codes}"

    def workers(self) -> dict[int, int]:
        found = {}
        for agent in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that ends meanwhile
                for child in psutil.Process(agent.pid).children():
                    variables = child.environ()
                    if "RANK" in variables:
                        found[int(variables["RANK"])] = child.pid
        return found

    def lose_node(self, *, replaced: bool) -> float:
        """One that does not host the rendezvous."""
        agent = next(one for one in reversed(self._alive()) if not self._hosts(one.pid))
        kill_trees([agent.pid])
        gone = time.time()
        agent.wait()
        if replaced:
            self._start_agent()
        return gone

    def _hosts(self, pid: int) -> bool:
        return any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == self._port
            for one in psutil.Process(pid).net_connections("tcp")
        )

    def grow(self) -> None:
        self._start_agent()

    def suspend(self) -> None:
        """torchrun has no such command: SIGTERM to its agents."""
        for agent in self._alive():
            agent.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + ANSWER_S
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.stop()

    def resume(self) -> None:
        self._port = free_port()
        for _ in range(2):
            self._start_agent()

    def stop(self) -> None:
        kill_trees([agent.pid for agent in self._agents])
        for agent in self._agents:
            agent.wait()


class TorchrunDefaults(UnderTorchrun):
    name = "torchrun, defaults"
    configuration = ()
    variables: dict[str, str] = {}  # noqa: RUF012


SIDES: list[type[Side]] = [UnderHoldfast, InMemory, Preloaded, UnderTorchrun, TorchrunDefaults]
