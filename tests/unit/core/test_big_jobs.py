"""The monitor of a big job looks at beats together, and misses nothing by it."""

from __future__ import annotations

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import (
    AnyEvent,
    HeartbeatReceived,
    NodeLost,
    StepCompleted,
    Tick,
)
from holdfast.orchestrator.core.progress_monitor import BIG_JOB_RANKS, ProgressMonitor
from holdfast.orchestrator.protocol.facts import WorkerBeat

from .harness import SECOND, Transcript, spec

NODES, WORKERS = 64, 8
NAMES = [f"n{number}" for number in range(NODES)]
MS = 1_000_000


class Watched:
    """A running job of many ranks, and its monitor."""

    def __init__(self) -> None:
        nodes = {"min": NODES, "max": NODES}
        self.story = Transcript(spec(nodes, workers=WORKERS, shard=WORKERS))
        self.monitor = ProgressMonitor(job_from_mapping(self.story.document), self.story.controller)
        self.story.started(*NAMES, step=None)
        for now_ns, event in self.story.journal:
            self.monitor.observe(now_ns, event)
        self.now = self.story.now

    def beat(self, name: str, step: int) -> tuple[AnyEvent, ...]:
        workers = tuple(
            WorkerBeat(rank=seat.rank, phase="train", step=step, ticks=step + 2, step_s=0.5)
            for seat in self.story.state.launch_actions[name].seats
        )
        return self.monitor.observe(
            self.now, HeartbeatReceived(node=name, generation=1, workers=workers)
        )

    def wait_until_due(self) -> tuple[AnyEvent, ...]:
        due = self.monitor.next_deadline_ns()
        assert due is not None
        self.now = max(self.now, due)
        return self.monitor.observe(self.now, Tick())


def test_a_step_is_told_at_the_next_look_after_its_last_beat() -> None:
    job = Watched()
    assert NODES * WORKERS >= BIG_JOB_RANKS
    for step in (0, 1):
        told = [event for name in NAMES for event in job.beat(name, step)]
        last = job.now
        if not told:
            told = list(job.wait_until_due())
        assert [one.step for one in told if isinstance(one, StepCompleted)] == [step]
        assert job.now - last <= 10 * MS
        job.now += SECOND


def test_beats_shortly_after_each_other_are_looked_at_once() -> None:
    job = Watched()
    for step in range(2):
        for name in NAMES:
            job.beat(name, step)
        job.wait_until_due()
        job.now += SECOND
    looks: list[int] = []
    silence = job.monitor._silence
    real = silence.judge
    silence.judge = lambda now_ns, *more: (looks.append(now_ns), real(now_ns, *more))[1]  # type: ignore[method-assign]
    for name in NAMES:
        job.beat(name, 2)
        job.now += MS // 10
    assert 1 <= len(looks) <= 3


def test_a_silent_node_of_a_big_job_is_lost_when_its_time_is_over() -> None:
    job = Watched()
    for name in NAMES:
        job.beat(name, 0)
    quiet_since, lost = job.now, dict[str, int]()
    for _quarter in range(16):
        told = [event for name in NAMES[1:] for event in job.beat(name, 0)]
        told += job.wait_until_due()
        lost.update({one.node: job.now for one in told if isinstance(one, NodeLost)})
        job.now += SECOND // 4
    assert list(lost) == [NAMES[0]]
    assert 3 * SECOND <= lost[NAMES[0]] - quiet_since <= 3.5 * SECOND


def test_the_exit_of_a_worker_tells_of_steps_that_were_not_looked_at_yet() -> None:
    job = Watched()
    for step in (0, 1):
        for name in NAMES:
            job.beat(name, step)
    told = job.story.exits(0, signal=9)
    assert any(told)
    seen = job.monitor.observe(job.now, job.story.journal[-1][1])
    assert [one.step for one in seen if isinstance(one, StepCompleted)] == [1]
    assert not any(isinstance(action, LaunchGroup) for action in told)
