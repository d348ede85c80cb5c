"""FSDP over two nodes without a replica: the state of a lost node comes from its buddy's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from tests.contract.crowd import Crowd, reconnecting, slow

from .local_rig import ENDLESS, Job, spec

pytestmark = pytest.mark.e2e

FSDP = {
    "nodes": {"min": 2, "max": 2},
    "parallelism": {"shard": 4},
    # No checkpoint in storage, so only the buddy has the shards of a lost node.
    "checkpoint": {"storage": {"everySteps": ENDLESS}, "memory": {"everySteps": "auto"}},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("buddies"), spec("buddies", ENDLESS, **FSDP))
    job.run()
    try:
        yield job
    finally:
        job.end()


def test_a_lost_node_without_a_replica_is_restored_from_its_buddy(job: Job) -> None:
    first = job.until(lambda view: view.copied_step >= 1 and bool(view.staging))
    assert "the slowest push takes" in first.copies
    # Rounds follow each other: a newer step is confirmed.
    copied = job.until(lambda view: view.copied_step > first.copied_step)
    for number in (1, 2):
        node = copied.nodes[-1].name
        job.kill(job.agent_pid(node))
        copied = job.running(incidents=number)
        incident = copied.incidents[-1]
        assert incident.culprit_node == node and incident.restored_from == "memory"
        assert incident.resumed_after_step >= first.copied_step
        resumed = incident.resumed_after_step
        copied = job.until(lambda view, resumed=resumed: view.copied_step > resumed)


def test_copies_go_on_while_strangers_hold_the_data_ports(job: Job) -> None:
    view = job.running(incidents=2)
    pids = [job.agent_pid(node.name) for node in view.nodes]
    ports = [
        link.laddr.port
        for pid in pids
        for link in psutil.Process(pid).net_connections("tcp")
        if link.status == psutil.CONN_LISTEN
    ]
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(Crowd(port, slow, 40))
            stack.enter_context(Crowd(port, reconnecting, 40))
        for _ in range(3):
            view = job.until(lambda now, before=view: now.copied_step > before.copied_step)
        job.kill(job.agent_pid(view.nodes[0].name))
        incident = job.running(incidents=3).incidents[-1]
    assert incident.restored_from == "memory"
    assert incident.resumed_after_step >= view.copied_step
