"""GPUs of a machine are divided among its nodes: no two workers of a job see the same one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol import launcher_protocol as h
from holdfast.orchestrator.protocol import messages as m

from .agent_rig import Rig, receive_from_launcher, send_to_launcher

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, time
from holdfast.workers import worker_protocol as wire, worker_transport as transport
print("sees", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), flush=True)
link = transport.attached.link
link.setblocking(True)
transport.send(link, wire.Progress(step=1000))
while True:
    time.sleep(1000)
"""
DEVICES = ("0", "1", "GPU-2", "3", "4")


@pytest.fixture
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    (tmp_path / "train.py").write_text(SCRIPT)
    rig = Rig(tmp_path, {"script": "train.py"}, resources={"gpu": request.param})
    rig.start_launcher()
    yield rig
    rig.end()


def seen(rig: Rig, node: str, generation: int) -> str:
    """CUDA_VISIBLE_DEVICES of both workers of a node."""
    assert rig.launch(node, generation).ok
    rig.controller.wait(
        m.Heartbeat,
        node,
        lambda beat: beat.generation == generation and all(w.step == 1000 for w in beat.workers),
    )
    logs = {rig.log(generation, rank).partition("sees ")[2].strip() for rank in range(2)}
    assert len(logs) == 1
    return logs.pop()


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_each_node_gets_its_own_gpus_and_a_new_node_waits_for_those_of_an_ended_one(
    machine: Rig,
) -> None:
    with machine.connect_launcher() as launcher:
        machine.start_node(launcher, "a", devices=DEVICES)
        machine.start_node(launcher, "b", devices=DEVICES)
        assert seen(machine, "a", 1) == repr("0,1")
        assert seen(machine, "b", 2) == repr("GPU-2,3")
        machine.request_node(launcher, "c", devices=DEVICES)
        machine.request_node(launcher, "never", devices=DEVICES)
        send_to_launcher(launcher, h.StopNode(node="never"))
        send_to_launcher(launcher, h.StopNode(node="b"))
        nodes: dict[str, int] = {}
        while "c" not in nodes:
            message = receive_from_launcher(launcher)
            if isinstance(message, h.NodeList):
                nodes = message.nodes
                assert "c" not in nodes or "b" not in nodes
        machine.nodes = nodes
        assert set(nodes) == {"a", "c"}
        machine.controller.wait(m.Hello, "c")
        assert seen(machine, "c", 3) == repr("GPU-2,3")


@pytest.mark.parametrize("machine", [0], indirect=True)
def test_a_job_without_gpus_sees_none(machine: Rig) -> None:
    with machine.connect_launcher() as launcher:
        machine.start_node(launcher, "a")
        assert seen(machine, "a", 1) == repr("")
