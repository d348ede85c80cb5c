"""The journal of a very large job, in a ConfigMap of a real API server. The test plays agents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import AnyAction, LaunchGroup, RequestNodes
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    AnyEvent,
    ControllerStarted,
    FromNode,
    JobSubmitted,
    StepCompleted,
)
from holdfast.orchestrator.core.journal import encode_record
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.hosts.kubernetes.spec import owner_of
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
from holdfast.orchestrator.journal.configmap_store import MAX_BYTES, ConfigMapStore
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.kube.names import Owner, journal_name
from holdfast.orchestrator.protocol.facts import NodeFacts, ShardFile
from holdfast.orchestrator.protocol.manifest import shard_file_name
from holdfast.orchestrator.protocol.messages import NodeJoined
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.driver import Driver
from holdfast.orchestrator.runtime.job_loop import JobLoop
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.unschedulable import Plane, install, job

pytestmark = pytest.mark.e2e

NUM_NODES, WORKERS = 1000, 8
NAMES = tuple(f"large-{index:04x}" for index in range(NUM_NODES))
GIB = 2**30


def document() -> dict[str, Any]:
    """All ranks in one shard group: the most files for this size."""
    nodes = {"min": NUM_NODES, "max": NUM_NODES}
    shard = {"shard": NUM_NODES * WORKERS}
    return job("large", nodes=nodes, workersPerNode=WORKERS, parallelism=shard, suspend=True)


def facts(index: int) -> NodeFacts:
    address = f"10.{index // 256}.{index % 256}.7"
    return NodeFacts(hostname=NAMES[index], address=address, data_port=40000, slots=WORKERS)


def files(step: int) -> list[ShardFile]:
    """Files of a committed checkpoint, with incompressible checksums."""
    count = NUM_NODES * WORKERS
    return [
        ShardFile(
            step, 1, shard, count, shard_file_name(shard, count), 16 * GIB + shard * step,
            f"{pow(3, shard + step, 2**127 - 1):032x}",
        )
        for shard in range(count)
    ]  # fmt: skip


class AgentsAnswerAtOnce(Clock):
    """No timeout of the controller passes, however long the API server takes for a record."""

    def __init__(self) -> None:
        super().__init__()
        self._now_ns = super().now_ns()

    def now_ns(self) -> int:
        self._now_ns += 1_000
        return self._now_ns

    def not_before(self, earliest_ns: int) -> None:
        self._now_ns = max(self._now_ns, earliest_ns)


class Controller:
    """A driver with its journal, as a JobRuntime has it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._job = job_from_mapping(spec)
        self.actions: list[AnyAction] = []
        self.driver: Driver

    @property
    def state(self) -> JobState:
        return self.driver.state

    async def open(self, cluster: KubeClient, owner: Owner) -> None:
        journal = await ChunkJournal.open(ConfigMapStore(cluster, owner))
        loop = JobLoop.restore(self._job, journal.snapshot, journal.records)
        self.driver = Driver(loop, journal, AgentsAnswerAtOnce())

    async def tell(self, *events: AnyEvent) -> None:
        for event in events:
            self.driver.submit(event)
        await self.driver.turn(self.actions.append)

    async def succeed(self, kind: type[AnyAction], nodes: tuple[str, ...] = ()) -> None:
        done = [one for one in self.actions if isinstance(one, kind)]
        self.actions.clear()
        await self.tell(*(ActionSucceeded(action_id=one.action_id, nodes=nodes) for one in done))


def running(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "spec": {**spec["spec"], "suspend": False}}


async def train(cluster: KubeClient, owner: Owner, spec: dict[str, Any]) -> None:
    """Train until the first step of all 8,000 ranks."""
    first = Controller(spec)
    await first.open(cluster, owner)
    await first.tell(
        JobSubmitted(job_id=owner.uid, spec=spec, spec_directory=""),
        ControllerStarted(incarnation=1),
    )
    await first.succeed(RequestNodes, NAMES)
    joined = [FromNode(name, NodeJoined(facts=facts(index))) for index, name in enumerate(NAMES)]
    await first.tell(*joined)
    await first.succeed(LaunchGroup)
    await first.tell(StepCompleted(generation=1, step=0, step_s=0.5))
    assert first.state.phase == "running"
    assert len(first.state.group.members) == NUM_NODES


def test_a_controller_takes_over_a_job_of_a_thousand_pods_whose_checkpoints_outgrow_a_journal(
    control_plane: Plane, namespace: Kubectl
) -> None:
    install(control_plane)
    document_there = namespace.create(document())  # suspended: no operator acts on it
    owner, spec = owner_of(document_there), running(document())
    committed = tuple(files(100) + files(200))
    took_over = ControllerStarted(incarnation=2, committed=committed, nodes=NAMES)
    assert len(encode_record(1, took_over)) > 2 * MAX_BYTES, "no ConfigMap could hold this event"

    async def story() -> None:
        async with await KubeClient.connect(kubeconfig=control_plane.kubeconfig) as cluster:
            assert await cluster.find(JOBS, owner.namespace, owner.name)
            await train(cluster, owner, spec)
            second, third = Controller(spec), Controller(spec)
            await second.open(cluster, owner)
            await second.tell(took_over)
            await third.open(cluster, owner)
            for state in (second.state, third.state):
                assert state.incarnation == 2
                assert [one.step for one in state.catalog.committed] == [100, 200]
                assert state.group.members == NAMES and set(state.nodes) == set(NAMES)
            assert third.state == second.state, "nothing was lost on the way"
            with pytest.raises(Exception, match="another controller"):
                await second.tell(StepCompleted(generation=1, step=1), took_over)

    asyncio.run(story())
    kept = namespace.json("get", "configmap", journal_name(owner.name))["binaryData"]
    assert sum(len(text) * 3 // 4 for text in kept.values()) < MAX_BYTES // 2
    namespace.run("delete", "trainingjob", owner.name)
