"""Holdfast on this machine, with nodes that share no memory, as on separate machines.

    python -m bench.contestants.apart run JOB.yaml       # holdfast's command
    python -m bench.contestants.apart --socket SOCKET    # the node launcher that it starts

The local backend forks all nodes from one process that has imported torch. Here each node imports
torch after the fork.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import NoReturn

from holdfast.orchestrator.backends.local.backend import LocalBackend
from holdfast.orchestrator.protocol import launcher_protocol as protocol
from holdfast.workers.agent.linux import processes
from holdfast.workers.agent.pool import preload
from holdfast.workers.agent.process import node_launcher

from .base import python
from .holdfast import Holdfast


class HoldfastApart(Holdfast):
    name = "Holdfast, local, nodes apart"

    def _command(self, *words: str) -> list[str]:
        return [python(), "-m", __name__, *words, "--home", str(self.home)]


class Host(node_launcher.NodeLauncher):
    def _become(self, order: protocol.StartNode) -> NoReturn:
        preload.preload()
        super()._become(order)


def main() -> NoReturn:
    if sys.argv[1] == "--socket":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.adopt_orphans()
        processes.name_process("host")
        Host(Path(sys.argv[2])).serve()
    from holdfast.orchestrator.cli import main as cli

    LocalBackend.__init__.__kwdefaults__["launcher_module"] = __spec__.name
    cli.main()


if __name__ == "__main__":
    main()
