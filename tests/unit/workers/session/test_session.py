"""The session without an agent, its errors, and its messages to the agent."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from holdfast import session
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.api.v1alpha1.resilience import Checkpoint, MemoryTier, StorageTier
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.checkpoint.shard_sources import UnreadableCheckpoint
from holdfast.workers.session.agent_channel import AgentChannel, AgentGone
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import (
    DeviceMissing,
    RankEnv,
    expect_on,
    pick_device,
    rank_env,
)
from holdfast.workers.session.loss import LossReport
from tests.unit.workers.members import assigned


@pytest.fixture
def alone() -> Iterator[Session]:
    """A session of a single process without an agent."""
    yield session.init()
    session.leave()
    assert not dist.is_initialized()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_loop_runs_without_an_agent(alone: Session) -> None:
    model, optimizer = build()
    assert alone.restore(model, optimizer) == 0
    for step in range(3):
        with alone.phase("evaluate"):
            loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        alone.step(step, loss=loss)
    alone.save()
    alone.tick()
    alone.finish()
    assert (alone.rank, alone.world_size, alone.data_parallel_size) == (0, 1, 1)
    assert alone.device.type in ("cpu", "cuda")
    assert alone.mesh.mesh_dim_names == ("replicate", "shard")


def test_a_script_that_has_read_another_checkpoint_begins_after_it(alone: Session) -> None:
    model, optimizer = build()
    assert alone.next_step == 0
    assert alone.restore(model, optimizer, start=5) == alone.next_step == 5
    alone.step(5, total_steps=10)
    assert alone.next_step == 6


def test_random_numbers_depend_on_seed_step_and_rank_only(alone: Session) -> None:
    alone.seed(1, 2)
    first = torch.rand(3)
    torch.rand(100)
    alone.seed(1, 2)
    assert torch.equal(torch.rand(3), first)
    alone.seed(1, 3)
    assert not torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("misuse", "fix"),
    [
        pytest.param(lambda s, m, o: s.step(0), r"s.restore\(model, optimizer\)", id="no-restore"),
        pytest.param(lambda s, m, o: s.save(), "expected restore and step before", id="early-save"),
        pytest.param(
            lambda s, m, o: (s.restore(m, o), s.step(4)), "got 4; expected 0", id="wrong-step"
        ),
        pytest.param(
            lambda s, m, o: (s.restore(m, o), s.restore(m, o)), "got a second call", id="twice"
        ),
        pytest.param(lambda s, m, o: s.restore(m.to("meta"), o), "to_empty", id="no-memory"),
        pytest.param(
            lambda s, m, o: s.phase("lunch").__enter__(), "expected one of build", id="no-phase"
        ),
    ],
)
def test_a_wrong_call_is_refused_with_the_fix(alone: Session, misuse, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        misuse(alone, *build())


def test_a_parameter_that_is_a_partial_sum_is_refused(alone: Session) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Partial()]))
    with pytest.raises(UserError, match=r"shards: got a parameter of shape \(2, 3\) placed as"):
        alone.shards(model)


def test_a_shard_count_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="got shard=2; expected a divisor of 1 ranks"):
        session.init(shard=2)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let torch see so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def eight_workers(gpu: int, *, script: bool = False, **env: str) -> TrainingJob:
    spec = {
        "entrypoint": {"script": "a.py"} if script else {"recipe": {"name": "pretrain"}},
        "env": env,
        "workersPerNode": 8, "resources": {"gpu": gpu},
    }  # fmt: skip
    head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}}
    return job_from_mapping({**head, "spec": spec})


@pytest.mark.parametrize("gpus", [0, 7], indirect=True)
def test_a_missing_requested_gpu_is_an_error_and_the_cpu_is_not_used(gpus: None) -> None:
    message = (
        r"resources.gpu: got [07] GPUs that torch can use on this node; expected 8, one for each"
    )
    for job in (eight_workers(1), eight_workers(1, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")):
        with pytest.raises(DeviceMissing, match=message):
            pick_device(7, job)


@pytest.mark.parametrize("gpus", [7], indirect=True)
def test_more_workers_than_gpus_in_visible_devices_is_a_user_error(gpus: None) -> None:
    assert pick_device(6) == torch.device("cuda", 6)
    with pytest.raises(UserError, match=r"workersPerNode: got .* rank 7; expected at most 7"):
        pick_device(7)
    for gpu in (0, 1):
        with pytest.raises(UserError, match=r"env.CUDA_VISIBLE_DEVICES: got '0,1,2,3,4,5,6' for"):
            pick_device(7, eight_workers(gpu, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6"))


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_worker_with_several_gpus_begins_at_its_first(gpus: None) -> None:
    job = eight_workers(2, script=True)
    assert pick_device(7, job) == torch.device("cuda", 0)
    with pytest.raises(DeviceMissing, match=r"got 2 GPUs .* local rank 7; expected 4"):
        pick_device(7, eight_workers(4, script=True))


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_each_worker_has_its_own_part_of_a_gpu(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f")
    assert pick_device(7, eight_workers(1)) == torch.device("cuda", 0)


def test_a_model_on_several_gpus_is_refused_by_the_name_of_a_parameter() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    expect_on(first, [("a", first), ("offloaded", torch.device("cpu"))])
    with pytest.raises(UserError, match=r"got head.weight on cuda:1; expected all .* on cuda:0"):
        expect_on(first, [("a", first), ("head.weight", second)])


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_a_job_without_gpus_uses_the_cpu(gpus: None) -> None:
    assert pick_device(7) == pick_device(7, eight_workers(0)) == torch.device("cpu")


def test_the_session_knows_from_the_job_whether_a_gpu_is_required(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, AgentChannel]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attached = worker_transport.Attached(link=ends[0], assign=assigned(), job=eight_workers(1))
    monkeypatch.setattr(worker_transport, "attached", attached)
    with pytest.raises(DeviceMissing):
        session.init()
    assert not dist.is_initialized()


def test_an_invalid_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UserError, match="RANK: got 'first'; expected a number"):
        rank_env()


@pytest.mark.parametrize(
    ("checkpoint", "every"),
    [
        pytest.param({}, 1, id="default"),
        pytest.param({"memory": {"everySteps": 5}}, 5, id="memory"),
        pytest.param({"memory": {"everySteps": 0}}, 100, id="storage-default"),
        pytest.param(
            {"memory": {"everySteps": 0}, "storage": {"everySteps": 7}}, 7, id="storage-steps"
        ),
        pytest.param(
            {"memory": {"everySteps": 0}, "storage": {"everySeconds": 60}}, 1, id="storage-time"
        ),
    ],
)
def test_staging_follows_the_spec(checkpoint: dict[str, object], every: int) -> None:
    spec = {"entrypoint": {"recipe": {"name": "pretrain"}}, "checkpoint": checkpoint}
    document = {
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": "a"}, "spec": spec,
    }  # fmt: skip
    assert job_from_mapping(document).spec.checkpoint.staging_interval == every


def test_the_pulse_has_its_own_thread(ends: tuple[socket.socket, AgentChannel]) -> None:
    agent, link = ends
    link.start_pulse()
    agent.settimeout(10)
    assert worker_transport.receive(agent)[0] == worker_protocol.Pulse()
    link.enter("build")  # any thread may send: a message is one packet
    while (message := worker_transport.receive(agent)[0]) == worker_protocol.Pulse():
        pass
    assert message == worker_protocol.PhaseChanged(phase="build")
    link.stop_pulse()


def test_a_shard_that_no_node_has_is_unreadable_with_the_reason(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends
    worker_transport.send(agent, worker_protocol.NoShard(shard=3, detail="node-1 was lost"))
    with pytest.raises(UnreadableCheckpoint, match="shard 3 is in no memory: node-1 was lost"):
        link.fetch(3)


@pytest.fixture
def attached(ends: tuple[socket.socket, AgentChannel]) -> tuple[socket.socket, Session]:
    """A session that stages every 100th step, and the agent's end of its connection."""
    agent, link = ends
    agent.settimeout(10)
    found = Session(RankEnv(), torch.device("cpu"), Mesh())
    found._channel, found._checkpoint = link, Checkpoint(memory=MemoryTier(every_steps=100))
    found.restore(*build())
    give_buffers(agent, range(3))
    return agent, found


def give_buffers(agent: socket.socket, numbers: range) -> None:
    for number in numbers:
        fd = os.memfd_create("buffer")
        os.truncate(fd, 1 << 20)
        worker_transport.send(agent, worker_protocol.Buffer(buffer=number, num_bytes=1 << 20), fd)
        os.close(fd)


def received(agent: socket.socket) -> list[worker_protocol.WorkerMessage]:
    """The messages that the worker has sent so far."""
    agent.setblocking(False)
    found: list[worker_protocol.WorkerMessage] = []
    with contextlib.suppress(BlockingIOError):
        while (message := worker_transport.receive(agent)[0]) is not None:
            found.append(message)
    return found


def test_a_requested_step_is_staged_and_the_worker_then_holds(
    attached: tuple[socket.socket, Session],
) -> None:
    agent, found = attached
    worker_transport.send(agent, worker_protocol.StageAt(step=1, hold=True))
    for step in range(3):
        found.step(step)
    words = [
        m
        for m in received(agent)
        if isinstance(
            m, worker_protocol.Staged | worker_protocol.Progress | worker_protocol.PhaseChanged
        )
    ]
    kinds = [
        m.phase if isinstance(m, worker_protocol.PhaseChanged) else (type(m).__name__, m.step)
        for m in words
    ]
    assert kinds[kinds.index("train") + 1 :] == [
        ("Progress", 0), ("Staged", 1), ("Progress", 1), "save", "train", ("Progress", 2),
    ]  # fmt: skip
    held, after = words[-4], words[-1]
    assert isinstance(held, worker_protocol.Progress) and isinstance(
        after, worker_protocol.Progress
    )
    assert held.step == 1 and after.step_s < 0.2, "the hold does not count as step time"


def test_a_request_without_hold_does_not_delay_the_worker(
    attached: tuple[socket.socket, Session],
) -> None:
    agent, found = attached
    for step in (2, 1):  # two requests, in any order
        worker_transport.send(agent, worker_protocol.StageAt(step=step))
    for step in range(4):
        found.step(step)
    words = received(agent)
    assert [m.step for m in words if isinstance(m, worker_protocol.Staged)] == [1, 2]
    assert "save" not in [m.phase for m in words if isinstance(m, worker_protocol.PhaseChanged)]


def test_a_request_for_a_past_step_is_ignored(attached: tuple[socket.socket, Session]) -> None:
    agent, found = attached
    found.step(0)
    worker_transport.send(agent, worker_protocol.StageAt(step=0))
    found.step(1)
    assert not [m for m in received(agent) if isinstance(m, worker_protocol.Staged)]


def staged_steps(agent: socket.socket) -> list[int]:
    return [m.step for m in received(agent) if isinstance(m, worker_protocol.Staged)]


def test_the_interval_changes_at_the_step_that_the_agent_names(
    attached: tuple[socket.socket, Session],
) -> None:
    agent, found = attached
    found._checkpoint = Checkpoint(storage=StorageTier(every_steps=10))
    found.step(0)
    worker_transport.send(agent, worker_protocol.SetStagingInterval(every_steps=4, from_step=2))
    give_buffers(agent, range(3, 5))
    for step in range(1, 11):
        found.step(step)
    # Every step before step 2; then every 4th, and step 9 because it goes to storage.
    assert staged_steps(agent) == [0, 1, 3, 7, 9]


@pytest.mark.parametrize(("number", "interval", "staged"), [(3, 1, [2, 5]), (1, 3, [0, 2, 5])])
def test_a_number_in_the_spec_follows_only_a_longer_interval_of_the_agent(
    attached: tuple[socket.socket, Session], number: int, interval: int, staged: list[int]
) -> None:
    agent, joined = attached
    joined._checkpoint = Checkpoint(memory=MemoryTier(every_steps=number))
    worker_transport.send(
        agent, worker_protocol.SetStagingInterval(every_steps=interval, from_step=number % 3)
    )
    for step in range(7):
        joined.step(step)
    assert staged_steps(agent) == staged


def test_without_memory_for_one_buffer_the_loop_ends_with_the_reason(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends
    worker_transport.send(agent, worker_protocol.NoBuffer(detail="host memory: 1 GiB"))
    with pytest.raises(UserError, match="host memory: 1 GiB"):
        link.take_buffer(0, 1, 0)


def test_a_step_report_says_how_long_a_staging_takes(
    attached: tuple[socket.socket, Session],
) -> None:
    agent, found = attached
    found._checkpoint = Checkpoint()
    found.step(0)
    (report,) = [m for m in received(agent) if isinstance(m, worker_protocol.Progress)]
    assert 0 < report.staging_s <= report.stall_s and report.copy_s == 0


class CountingScalars:
    """A device whose values the host can read when it waits for them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, scalar: torch.Tensor) -> torch.Tensor:
        self.calls.append("start")
        return scalar

    def value(self, pending: torch.Tensor) -> float:
        self.calls.append("value")
        return float(pending)


def test_a_loss_on_a_device_is_reported_one_step_later_and_the_last_one_at_the_end(
    attached: tuple[socket.socket, Session],
) -> None:
    agent, found = attached
    scalars = CountingScalars()
    found._loss = LossReport("cpu", scalars)
    for step in range(3):
        found.step(step, loss=torch.tensor(step + 0.5))
        assert scalars.calls[-1] == "start", "the value of this step is not waited for"
    found.finish()
    reports = [m for m in received(agent) if isinstance(m, worker_protocol.Progress)]
    assert [(m.step, m.loss) for m in reports] == [(0, None), (1, 0.5), (2, 1.5), (2, 2.5)]
    assert scalars.calls == ["start", "value", "start", "value", "start", "value"]


def test_a_loss_that_is_a_number_is_reported_with_its_step(
    attached: tuple[socket.socket, Session],
) -> None:
    agent, found = attached
    found._loss = LossReport("cuda", CountingScalars())
    for step, loss in enumerate([1.5, torch.tensor(2.5), None]):
        found.step(step, loss=loss)
    found.finish()
    reports = [m for m in received(agent) if isinstance(m, worker_protocol.Progress)]
    assert [(m.step, m.loss) for m in reports] == [(0, 1.5), (1, 2.5), (2, None)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait_for_a_loss_on_a_gpu() -> None:
    report = LossReport("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [torch.full((), float(n), device="cuda") for n in range(3)]
        assert [report.swap(loss) for loss in losses] == [None, 0.0, 1.0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.last() == 2.0


def test_a_closed_connection_raises_agent_gone(ends: tuple[socket.socket, AgentChannel]) -> None:
    agent, link = ends
    agent.close()
    with pytest.raises(AgentGone, match="the node's agent is gone"):
        link.send(worker_protocol.ProgressTick())
    with pytest.raises(AgentGone):
        link.take_buffer(0, 1, 0)
