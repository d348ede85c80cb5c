"""torchrun with the c10d rendezvous: one agent (process) per node, as its documentation has it.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is a workaround for torchrun's own restarts on gloo, without
which a killed worker was never recovered from on torch 2.13 (the ranks read the dead generation's
addresses from the kept store; pytorch issues 135712 and 167288).
"""

from __future__ import annotations

import psutil

from tests.e2e.ports import free_port

from .base import TRAIN, Contestant, Workload, kill_trees, python

TUNED = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1"


class Torchrun(Contestant):
    """`elastic` allows one node; otherwise all are required and a lost one must be replaced."""

    name = "torchrun"

    def __init__(
        self, workload: Workload, *, elastic: bool = False, tuned: bool = False, nodes: int = 2
    ) -> None:
        super().__init__(workload)
        self._size, self._nnodes = nodes, f"1:{nodes}" if elastic else str(nodes)
        self._conf = ["--rdzv-conf", TUNED] if tuned else []
        self._port = free_port()
        self._nodes = 0

    def start(self) -> None:
        for _ in range(self._size):
            self.replace_node()

    def replace_node(self) -> None:
        command = [
            python(), "-m", "torch.distributed.run", "--nnodes", self._nnodes,
            "--nproc-per-node", str(self.workload.num_ranks // self._size),
            "--max-restarts", "10", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "bench",
            "--local-addr", "127.0.0.1", *self._conf,
            str(TRAIN), "--engine", "dcp", *self.workload.arguments(),
        ]  # fmt: skip
        log = f"torchrun-{self._nodes}.log"
        self.spawn(command, log, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self._nodes += 1

    def kill_node(self, worker_pid: int) -> None:
        kill_trees([psutil.Process(worker_pid).ppid()])

    def store_host(self) -> int | None:
        """The agent that came first to the port; either may be it."""
        for process in self.processes:
            for one in psutil.Process(process.pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == self._port:
                    return process.pid
        return None


class Bare(Contestant):
    """Four plain processes with the torchrun environment without supervision."""

    name = "bare processes"

    def start(self) -> None:
        port = free_port()
        for rank in range(4):
            self.spawn(
                [python(), str(TRAIN), "--engine", "none", *self.workload.arguments()],
                f"bare-{rank}.log",
                RANK=str(rank), LOCAL_RANK=str(rank % 2), WORLD_SIZE="4", LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip

    def kill_node(self, worker_pid: int) -> None:
        kill_trees([worker_pid])
