"""Real workers under a real agent: launch, exits, stops, stacks."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest
from msgspec.structs import replace

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.launcher_protocol import StopNode

from .agent_rig import Rig, send_to_launcher, watched

pytestmark = pytest.mark.e2e
_names = (f"w-{number}" for number in itertools.count())


@pytest.fixture
def node(rig: Rig, launcher: socket.socket) -> Iterator[str]:
    rig.controller.forget()
    name = next(_names)
    rig.start_node(launcher, name)
    yield name
    send_to_launcher(launcher, StopNode(node=name))


def launch(rig: Rig, node: str, mode: str, generation: int = 1) -> None:
    (rig.directory / "mode").write_text(mode)
    assert rig.launch(node, generation).ok


def running(rig: Rig, node: str, step: int = 1000) -> m.Heartbeat:
    """The heartbeat with both workers at this step."""
    return rig.controller.wait(
        m.Heartbeat, node, lambda b: len(b.workers) == 2 and all(w.step == step for w in b.workers)
    )


def test_a_killed_worker_is_reported_with_its_signal_and_the_others_run_on(
    rig: Rig, node: str
) -> None:
    launch(rig, node, "")
    running(rig, node)
    rig.controller.send(node, m.Chaos(kind="kill-worker", rank=1))
    died = rig.controller.wait(m.WorkerExited, node)
    assert (died.exit.rank, died.exit.signal, died.exit.by_us) == (1, signal.SIGKILL, False)
    assert died.exit.step == 1000
    stopped = rig.stop(node, 1)
    assert {(e.rank, e.by_us) for e in stopped.exits} == {(0, True), (1, False)}
    assert stopped.offered_port > 0


def test_workers_train_without_logs_where_their_directory_cannot_be_made(
    rig: Rig, node: str
) -> None:
    (rig.directory / "mode").write_text("")
    blocked = rig.directory / "logs" / "gen-0007"
    blocked.write_text("not a directory")
    assert rig.launch(node, 7).ok
    event = rig.controller.wait(m.AgentEvent, node)
    assert str(blocked) in event.text and "train without logs" in event.text
    running(rig, node)
    rig.stop(node, 7)
    assert rig.launch(node, 8).ok
    running(rig, node)


def test_the_script_gets_its_environment_arguments_and_log(rig: Rig, node: str) -> None:
    launch(rig, node, "")
    running(rig, node)
    assert "here 0 2 ['--lr', '1']" in rig.log(1, 0)
    rig.stop(node, 1)


def test_an_exception_is_reported_with_its_traceback(rig: Rig, node: str) -> None:
    launch(rig, node, "raise")
    died = rig.controller.wait(m.WorkerExited, node)
    assert (died.exit.rank, died.exit.code, died.exit.error_type) == (1, 1, "ValueError")
    assert died.exit.step == 7
    assert "the seventh step is cursed" in died.exit.traceback
    assert not died.exit.secondary
    assert "ValueError" in rig.log(1, 1)
    rig.stop(node, 1)


def test_a_worker_stopped_by_sigstop_is_reported_and_killed_after_its_stack_is_taken(
    rig: Rig, node: str
) -> None:
    launch(rig, node, "")
    running(rig, node)
    rig.controller.send(node, m.Chaos(kind="hang-worker", rank=0))
    rig.controller.wait(
        m.Heartbeat, node, lambda b: any(w.rank == 0 and w.stopped for w in b.workers)
    )
    stopped = rig.stop(node, 1, stacks=True)
    stacks = {stack.rank: stack for stack in stopped.stacks}
    assert stacks[0].state == "T"
    assert "wait_for_the_end" in stacks[0].text, stacks[0].text
    assert "wait_for_the_end" in stacks[1].text, stacks[1].text
    assert not stacks[0].in_collective
    assert len(stopped.exits) == 2


def test_orphans_of_a_worker_are_killed_with_it(rig: Rig, node: str) -> None:
    launch(rig, node, "orphan")
    running(rig, node)
    orphans = [int(rig.log(1, rank).split("orphan ")[-1].split()[0]) for rank in range(2)]
    with watched(orphans) as gone:
        rig.stop(node, 1)
        gone()


def test_a_stale_generation_is_refused(rig: Rig, node: str) -> None:
    launch(rig, node, "", generation=5)
    running(rig, node)
    rig.stop(node, 5)
    refused = rig.launch(node, 4)
    assert not refused.ok
    assert "fence" in refused.detail


def test_training_continues_without_a_controller_and_the_next_one_is_informed(
    rig: Rig, node: str
) -> None:
    launch(rig, node, "", generation=3)
    running(rig, node)
    before = rig.pids(node)["workers"]
    rig.controller.close()
    rig.controller.open()
    hello = rig.controller.wait(m.Hello, node)
    assert (hello.joined.generation, sorted(hello.joined.ranks)) == (3, [0, 1])
    running(rig, node)
    assert rig.pids(node)["workers"][:2] == before[:2]
    rig.stop(node, 3)


def test_killing_the_forkserver_ends_its_workers_and_the_node_recovers(rig: Rig, node: str) -> None:
    launch(rig, node, "")
    running(rig, node)
    pids = rig.pids(node)
    with watched(pids["workers"]) as gone:
        os.kill(pids["server"][0], signal.SIGKILL)
        gone()
    for rank in range(2):
        died = rig.controller.wait(m.WorkerExited, node, lambda x, r=rank: x.exit.rank == r)
        assert died.exit.signal == signal.SIGKILL
    rig.stop(node, 1)
    launch(rig, node, "", generation=2)
    rig.controller.forget()
    running(rig, node)
    rig.stop(node, 2)


def test_killing_the_agent_leaves_no_process(rig: Rig, node: str, launcher: socket.socket) -> None:
    launch(rig, node, "orphan")
    running(rig, node)
    orphans = [int(rig.log(1, rank).split("orphan ")[-1].split()[0]) for rank in range(2)]
    pids = rig.pids(node)
    with watched([rig.nodes[node], *pids["server"], *pids["workers"], *orphans]) as gone:
        rig.controller.send(node, m.Chaos(kind="kill-node"))
        gone()


def test_shutdown_ends_the_node_with_all_its_processes(rig: Rig, node: str) -> None:
    launch(rig, node, "")
    running(rig, node)
    pids = rig.pids(node)
    with watched([rig.nodes[node], *pids["server"], *pids["workers"]]) as gone:
        rig.controller.send(node, m.Shutdown(detail="the test is over"))
        gone()


def test_standbys_of_a_new_node_import_what_the_script_imports_on_others(
    rig: Rig, launcher: socket.socket
) -> None:
    """One process of the node imports it, and the controller is notified when they have it."""
    controller, name = rig.controller, next(_names)
    known = controller.welcome
    controller.welcome = replace(known, imports=("hypothesis", "hypothesis.strategies"))
    try:
        agent = psutil.Process(rig.start_node(launcher, name))
    finally:
        controller.welcome = known
    assert controller.wait(m.StandbysReported, name).ready is False
    controller.wait(m.StandbysReported, name, lambda report: report.ready)
    (server,) = agent.children()
    names = sorted(process.name() for process in server.children())
    assert names == ["hf-imports", "hf-standby", "hf-standby"]
    send_to_launcher(launcher, StopNode(node=name))
