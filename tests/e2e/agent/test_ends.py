"""No process is left after the end of the launcher or of a stand-alone agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol import messages as m

from .agent_rig import children_of, watched
from .conftest import make_rig

pytestmark = pytest.mark.e2e


def test_nodes_survive_their_launcher_and_end_with_their_workers(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    rig.start_launcher()
    try:
        with rig.connect_launcher() as sock:
            for node in ("a", "b"):
                rig.start_node(sock, node)
                assert rig.launch(node, 1).ok
                rig.finished(node, 1)
            assert rig.launcher is not None
            below = [p for node in ("a", "b") for pids in rig.pids(node).values() for p in pids]
            with watched([*rig.nodes.values(), *below]) as gone:
                os.kill(rig.launcher.pid, signal.SIGKILL)
                rig.launcher.wait()
                for node in ("a", "b"):
                    assert rig.stop(node, 1).generation == 1
                    assert rig.launch(node, 2).ok
                    rig.finished(node, 2)
                for pid in rig.nodes.values():
                    os.kill(pid, signal.SIGKILL)
                gone()
    finally:
        rig.end()


def test_a_stand_alone_agent_runs_and_ends_when_it_is_refused(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    command = [
        sys.executable, "-m", "holdfast.workers.agent",
        "--job", "test", "--node", "solo", "--slots", "2",
        "--token-file", str(tmp_path / "token"),
        "--endpoint-file", str(tmp_path / "controller.json"),
    ]  # fmt: skip
    agent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        rig.controller.wait(m.Hello, "solo")
        assert rig.launch("solo", 1).ok
        rig.finished("solo", 1)
        servers = children_of(agent.pid)
        below = [*servers, *(p for server in servers for p in children_of(server))]
        with watched(below) as gone:
            rig.controller.send("solo", m.Refused(detail="no longer needed", final=True))
            gone()
        assert agent.wait(60) == 1
    finally:
        agent.kill()
        agent.wait()
        rig.controller.close()
