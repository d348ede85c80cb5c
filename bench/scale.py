"""CPU time of the controller's process for a job with thousands of nodes.

    python -m bench.scale                       # 64, 512, 4,096 and 16,384 nodes
    python -m bench.scale --nodes 400 --profile # one size, with a profile of each phase

Writes bench/results/scale.md. The controller is the real one: agent server with sockets on
loopback, JobRuntime, journal in a file with fsync. The agents are in a second process
(scale_agents.py), whose time does not count; they have no workers. Nodes have 8 ranks. Without
TLS, as on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import math
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.base import NodeGone, Starts
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
from holdfast.orchestrator.journal.file_store import FileStore
from holdfast.orchestrator.protocol.messages import Heartbeat
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.checkpoint_store.async_store import (
    SerialExecutor,
    ThreadedCheckpointStore,
)
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.job_runtime import JobRuntime

from . import conditions

RANKS = 8
SIZES = (64, 512, 4096, 16384)
DEATHS = 20
PHASES = ("join", "reconnect", "stop to launch")
BOUND_S = 900.0
RESULTS = Path(__file__).parent / "results" / "scale.md"


@dataclass
class Row:
    """Figures of one size."""

    nodes: int
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Phase -> CPU time."""
    wall_s: dict[str, float] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    """Phase -> heartbeats that came meanwhile."""
    stop_wall_s: list[float] = field(default_factory=list)
    """Wall time from a death to the last StopWorkers, of each death."""
    stop_cpu_s: list[float] = field(default_factory=list)
    shrink_cpu_s: list[float] = field(default_factory=list)
    """CPU time from a death until the kept processes of all other nodes are launched again."""
    share: float = 0.0
    """Share of a core while the job trains."""
    interval_s: float = 0.0
    kib_per_node: float = 0.0


class Nodes:
    """A backend whose nodes are the agents of the other process."""

    def __init__(self, num_nodes: int) -> None:
        self.names = [f"node-{number}" for number in range(num_nodes)]
        self.gone: Callable[[NodeGone], None] = lambda gone: None
        self._next = 0

    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self.gone = on_node_gone

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        first, self._next = self._next, self._next + count
        return tuple(f"node-{number}" for number in range(first, self._next))

    async def release_node(self, node: str) -> None:
        pass

    async def list_nodes(self) -> tuple[str, ...]:
        return tuple(self.names)

    def starts(self) -> Starts:
        return Starts()

    async def close(self, *, release: bool) -> None:
        pass


class Bench:
    def __init__(self, row: Row, directory: Path, *, profile: bool) -> None:
        self.row, self._profile = row, profile
        self.changed = asyncio.Event()
        self.num_beats = 0
        self.marks: dict[int, tuple[float, float]] = {}
        """Generation -> (wall, CPU time) at which its StopWorkers were written."""
        job = job_from_mapping(
            {
                "apiVersion": "holdfast.dev/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "big"},
                "spec": {
                    "entrypoint": {"script": "train.py"},
                    "nodes": {"min": max(1, row.nodes - 2 * DEATHS), "max": row.nodes},
                    "workersPerNode": RANKS,
                    "resources": {"gpu": 0},
                    "parallelism": {"shard": RANKS},
                    # The one process of all agents may wait for a CPU.
                    "recovery": {"replacementWaitSeconds": 0, "heartbeatTimeoutSeconds": 60},
                },
            }
        )
        self.server, self.backend = AgentServer(), Nodes(row.nodes)
        storage = CheckpointStore(str(directory / "checkpoints"), "big")
        self.runtime = JobRuntime(
            job,
            key="big",
            job_id="big",
            spec_directory="",
            checkpoint_path=str(directory / "checkpoints"),
            log_directory="",
            token="t",
            backend=self.backend,
            endpoint=self.server,
            storage=ThreadedCheckpointStore(lambda: storage, SerialExecutor()),
            on_change=self._on_change,
        )
        self.store = FileStore(directory / "journal")

    def _count(self, received: Callable[[str, Any], None], node: str, message: Any) -> None:
        self.num_beats += isinstance(message, Heartbeat)
        received(node, message)

    def _on_change(self) -> None:
        state = self.runtime.state
        if state.stop is not None and state.generation not in self.marks:
            self.marks[state.generation] = time.perf_counter(), time.process_time()
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s, profile = time.process_time(), cProfile.Profile()
        wall_s, num_beats = time.perf_counter(), self.num_beats
        if self._profile:
            profile.enable()
        yield
        if self._profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        self.row.cpu_s[name] = time.process_time() - began_s
        self.row.wall_s[name] = time.perf_counter() - wall_s
        self.row.beats[name] = self.num_beats - num_beats
        print(
            f"  {name}: {self.row.cpu_s[name]:.2f} s, {self.row.beats[name]} heartbeats", flush=True
        )

    def launched(self) -> bool:
        state = self.runtime.state
        return state.group.active and state.stop is None and not state.group.launching

    async def run(self, deaths: int) -> None:
        runtime, row = self.runtime, self.row
        await self.server.open()
        await runtime.prepare(fresh=True)
        await runtime.begin(await ChunkJournal.open(self.store))
        gateway = runtime._gateway
        assert gateway is not None
        gateway.received = partial(self._count, gateway.received)  # type: ignore[method-assign]
        running = asyncio.create_task(runtime.run())
        before_kib = _resident_kib()
        words = [self.server.port, row.nodes, RANKS]
        agents = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.scale_agents", *map(str, words),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert agents.stdin is not None and agents.stdout is not None
        try:
            with self.phase("join"):
                agents.stdin.write(b"join\n")
                await agents.stdout.readline()
                await self.until(self.launched)
            await self.until(lambda: runtime.state.group.first_step_ns)
            await self._steady()
            row.kib_per_node = (_resident_kib() - before_kib) / row.nodes
            with self.phase("reconnect"):
                agents.stdin.write(b"reconnect\n")
                await agents.stdout.readline()
            for death in range(deaths):
                await self._death(agents.stdin, f"node-{row.nodes // 2 + death}", death)
        finally:
            agents.kill()
            await agents.wait()
            runtime.stop()
            await running
            await runtime.close()
            await self.server.close()
            self.store.close()

    async def _steady(self) -> None:
        interval_s = self.runtime._welcome().heartbeat_interval_s
        duration_s = max(10.0, 4 * interval_s)
        with self.phase("steady"):
            began_s = time.perf_counter()
            await asyncio.sleep(duration_s)
            took_s = time.perf_counter() - began_s
        self.row.interval_s, self.row.share = interval_s, self.row.cpu_s["steady"] / took_s

    async def _death(self, commands: asyncio.StreamWriter, name: str, death: int) -> None:
        state, row = self.runtime.state, self.row
        generation = state.generation
        commands.write(f"lose {name}\n".encode())
        self.backend.names.remove(name)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        self.backend.gone(NodeGone(name, "killed"))
        await self.until(lambda: generation in self.marks)
        wall_s, cpu_s = self.marks[generation]
        row.stop_wall_s.append(wall_s - began_s)
        row.stop_cpu_s.append(cpu_s - began_cpu_s)
        if death:
            await self.until(lambda: state.generation > generation and self.launched())
        else:
            with self.phase("stop to launch"):
                await self.until(lambda: state.generation > generation and self.launched())
        row.shrink_cpu_s.append(time.process_time() - began_cpu_s)
        assert state.group.membership is not None and state.group.membership.kept_from == generation
        await self.until(lambda: state.group.first_step_ns)


def _resident_kib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def page(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """`rows`: of Row, as JSON has them."""
    lines = [
        "# A job with thousands of nodes",
        "",
        "CPU time of the controller's process, made by `python -m bench.scale`. Sockets on loopback"
        " without TLS, as on one machine; the journal is a file, with fsync. The agents are another"
        " process and have no workers, so the start of workers is not in it. A death counts from"
        " the report of the lost node until StopWorkers is written for all nodes; in brackets the"
        " wall time, which other processes make longer. A shrink in place ends when all other nodes"
        " have their launch, in which kept processes go on. The share of a core is that of a job"
        " that trains, in steps of 1 s. Heartbeats go on while agents reconnect; `without"
        " heartbeats` subtracts their number times what one cost while the job trained.",
        "",
        "| nodes x ranks | join | reconnect (without heartbeats) | stop to launch"
        " | death to StopWorkers for all, P99 | shrink in place, median, most | heartbeats every"
        " | share of a core | memory per node |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = {name: f"{row['cpu_s'][name]:.2f} s" for name in PHASES}
        beat_s = row["cpu_s"]["steady"] / row["beats"]["steady"]
        rest_s = row["cpu_s"]["reconnect"] - beat_s * row["beats"]["reconnect"]
        times["reconnect"] += f" ({rest_s:.2f} s)"
        phases = " | ".join(times.values())
        death = f"{1e3 * _p99(row['stop_cpu_s']):.0f} ms ({1e3 * _p99(row['stop_wall_s']):.0f} ms)"
        shrinks = sorted(1e3 * seconds for seconds in row["shrink_cpu_s"])
        death += f" | {median(shrinks):.0f} ms, {shrinks[-1]:.0f} ms"
        beats = f"{row['interval_s']:.3g} s | {100 * row['share']:.0f} %"
        lines.append(
            f"| {row['nodes']:,} x {RANKS} | {phases} | {death} | {beats}"
            f" | {row['kib_per_node']:.0f} KiB |"
        )
    return "\n".join([*lines, "", *(f"* {name}: {value}" for name, value in about.items())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--deaths", type=int, default=DEATHS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.row is not None:
        row = Row(given.nodes[0])
        with tempfile.TemporaryDirectory(prefix="scale") as directory:
            asyncio.run(Bench(row, Path(directory), profile=given.profile).run(given.deaths))
        given.row.write_text(json.dumps(asdict(row)))
        return
    rows, about = [], conditions.describe()
    for nodes in given.nodes:
        # In a process of its own, so that no size has the memory of another.
        print(f"{nodes} nodes", flush=True)
        with tempfile.NamedTemporaryFile() as file:
            words = ["--nodes", str(nodes), "--deaths", str(given.deaths), "--row", file.name]
            words += ["--profile"] * given.profile
            subprocess.run([sys.executable, "-m", "bench.scale", *words], check=True)
            rows.append(json.load(file))
        given.out.write_text(page(rows, about))
    print(given.out.read_text())


if __name__ == "__main__":
    main()
