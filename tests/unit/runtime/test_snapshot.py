"""A snapshot and the records after it give what a replay of every event gives."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.events import ControllerStarted, FromNode
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.errors import Damaged
from holdfast.orchestrator.protocol.messages import Heartbeat
from holdfast.orchestrator.runtime import snapshot
from holdfast.orchestrator.runtime.observe.projection import JobProjection
from tests.sim.run_seed import play

from ..core import harness as core

SEEDS = range(0, 40, 3)
EVERY = 5
"""Records from one snapshot to the next; seeds begin at different records."""


class Replay:
    """The state after some records: controller, monitor and projection."""

    def __init__(self, job: TrainingJob, data: bytes | None = None) -> None:
        state, memory = snapshot.decode(data) if data is not None else (None, None)
        self.job, self.controller = job, Controller(state)
        self.monitor = ProgressMonitor(job, self.controller)
        self.projection = JobProjection(job, memory, state)

    def take(self, records: list[Record]) -> Replay:
        for now_ns, event in records:
            actions = self.controller.step(now_ns, event)
            self.projection.observe(now_ns, event, actions, self.controller.state)
            self.monitor.observe(now_ns, event)
        return self

    def restored(self) -> Replay:
        """Restored from a snapshot."""
        return Replay(self.job, snapshot.encode(self.controller.state, self.projection.memory))

    def known(self) -> Any:
        view = self.projection.view(self.projection.now_ns + 1_234_567, live=False)
        return (
            self.controller.state,
            self.projection.memory,
            view,
            self.controller.next_deadline_ns(),
        )


@functools.cache
def journal_of(seed: int) -> tuple[TrainingJob, list[Record]]:
    world = play(seed)
    return world.host.job, world.host.history()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_record_may_be_the_last_before_a_snapshot(seed: int) -> None:
    """A snapshot gives the same state after a record; some are continued to the end."""
    job, records = journal_of(seed)
    whole = Replay(job).take(records).known()
    straight, taken = Replay(job), 0
    for at in range(1 + seed % EVERY, len(records), EVERY):
        straight.take(records[taken:at])
        taken, restored = at, straight.restored()
        assert restored.known() == straight.known(), f"after record {at}"
        if at % 50 < EVERY:
            assert restored.take(records[at:]).known() == whole, f"from record {at} to the end"


@given(seed=st.sampled_from(list(SEEDS)), data=st.data())
@settings(max_examples=20)
def test_snapshots_of_snapshots_lose_nothing(seed: int, data: st.DataObject) -> None:
    job, records = journal_of(seed)
    cuts = data.draw(st.lists(st.integers(1, len(records)), min_size=1, max_size=6))
    replay, at = Replay(job), 0
    for cut in [*sorted(cuts), len(records)]:
        replay.take(records[at:cut])
        replay, at = replay.restored(), cut
    assert replay.known() == Replay(job).take(records).known()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_monitor_that_starts_from_a_snapshot_equals_one_that_starts_from_records(
    seed: int,
) -> None:
    job, records = journal_of(seed)
    for at in range(1, len(records), 47):
        straight = Replay(job).take(records[:at])
        restored = straight.restored()
        if straight.controller.state.terminal:
            continue
        now_ns = records[at - 1].now_ns + 1
        started = [Record(now_ns, ControllerStarted(incarnation=99, nodes=()))]
        for replay in (straight, restored):
            replay.take(started)
        assert restored.monitor._current == straight.monitor._current
        assert vars(restored.monitor._detector) == vars(straight.monitor._detector)
        assert restored.monitor.next_deadline_ns() == straight.monitor.next_deadline_ns()
        beat = FromNode("n0", Heartbeat(generation=restored.controller.state.generation))
        assert restored.monitor.observe(now_ns, beat) == straight.monitor.observe(now_ns, beat)


def transcripts() -> Iterator[core.Transcript]:
    """Rare in the simulation: hangs with stacks, tracebacks, scripts without steps."""
    hung = core.Transcript().started(step=5)
    hung.apply(core_hang(hung))
    yield hung
    for node in ("a", "b"):
        hung.stopped(node, 5, stacks=(core.stack(0), core.stack(1)))
    yield hung
    failed = core.Transcript().started(step=5)
    how = {"error_type": "ValueError", "error_message": "x", "traceback": "Traceback ..."}
    for _ in range(2):
        failed.exits(1, code=1, step=5, **how)
        failed.all_stopped(5)
        yield failed
        failed.succeed(core.LaunchGroup)
    yield core.Transcript(core.spec(script=True)).started(step=None)
    resized = core.Transcript(core.spec({"min": 1, "max": 4})).started("a", "b", "c", "d", step=3)
    resized.commit(3)
    yield resized


def core_hang(projection: core.Transcript) -> Any:
    from holdfast.orchestrator.core.events import HangDetected

    return HangDetected(generation=projection.state.generation, ranks=(2, 1), evidence="quiet")


def test_rare_states_survive_a_snapshot() -> None:
    for transcript in transcripts():
        job = job_from_mapping(transcript.document)
        replay = Replay(job).take([Record(*one) for one in transcript.journal])
        assert replay.restored().known() == replay.known()


def test_a_snapshot_of_another_version_is_refused_with_the_reason() -> None:
    transcript = core.Transcript().started(step=5)
    replay = Replay(job_from_mapping(transcript.document))
    replay.take([Record(*one) for one in transcript.journal])
    data = snapshot.encode(replay.controller.state, replay.projection.memory)
    older = data.replace(b"holdfast snapshot 2\n", b"holdfast snapshot 1\n", 1)
    text = "got version 1; expected 2; use the"
    with pytest.raises(snapshot.SnapshotUnreadable, match=text) as it:
        snapshot.decode(older)
    assert not isinstance(it.value, Damaged)
    for damaged in (b"", b"x" + data, data[:-9], data[:20] + b"\0" + data[21:]):
        with pytest.raises(snapshot.SnapshotDamaged, match="is damaged"):
            snapshot.decode(damaged)
    body = msgspec.msgpack.encode({"memberships": 3})
    with pytest.raises(snapshot.SnapshotUnreadable, match="is damaged, or of another ver") as it:
        snapshot.decode(snapshot.MAGIC + b"2\n" + zlib.compress(body))
    assert not isinstance(it.value, Damaged)


def test_all_nodes_of_a_launch_share_one_membership_in_a_snapshot() -> None:
    """Otherwise the snapshot would grow with the square of the number of nodes."""
    sizes = {}
    for nodes in (8, 64):
        names = [f"node-{number}" for number in range(nodes)]
        transcript = core.Transcript(core.spec({"min": nodes, "max": nodes})).started(*names)
        replay = Replay(job_from_mapping(transcript.document))
        replay.take([Record(*one) for one in transcript.journal])
        state = replay.restored().controller.state
        launched = state.group.launches.values()
        assert {id(one.membership) for one in launched} == {id(state.group.membership)}
        sizes[nodes] = len(snapshot.encode(state, replay.projection.memory))
    assert sizes[64] < 10 * sizes[8]
