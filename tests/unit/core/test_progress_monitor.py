"""The progress monitor: steps, lost nodes, big jobs, new controllers."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import (
    AnyEvent,
    CancelRequested,
    ControllerStarted,
    FromNode,
    NodeLost,
    StepCompleted,
    Tick,
)
from holdfast.orchestrator.core.hang.facts import STARVED_MEMORY_S
from holdfast.orchestrator.core.progress_monitor import BIG_JOB_RANKS, ProgressMonitor
from holdfast.orchestrator.protocol.facts import Exit, ShardFile, WorkerBeat
from holdfast.orchestrator.protocol.messages import Heartbeat, NodeJoined, WorkerExited

from .harness import SECOND, Transcript, facts, spec
from .watch import NAMES, NODES, WORKERS, Watch, Watched

MS = 1_000_000


def test_the_first_step_of_all_ranks_is_reported_at_once() -> None:
    watch = Watch()
    assert not watch.beat(0, node="a"), "half of the ranks"
    (reported,) = watch.beat(0, node="b")
    assert isinstance(reported, StepCompleted)
    assert (reported.step, reported.generation, reported.loss) == (0, 1, 1.5)
    assert watch.job.state.phase == "running"


def test_later_steps_are_reported_about_once_a_second() -> None:
    watch = Watch().train(10)
    assert watch.steps == [0, 2, 4, 6, 8]


def test_a_step_is_reported_once_rank_0_has_said_that_it_keeps_its_process() -> None:
    watch = Watch()
    for step in range(4):
        watch.beat(step, keeps=True if step > 1 else "")
    assert watch.steps == [0, 2] and watch.job.state.keeping.reported


def test_an_unreported_step_is_reported_when_a_worker_exits() -> None:
    watch = Watch().train(4)
    watch.give(FromNode("a", WorkerExited(generation=1, exit=Exit(rank=0, signal=9))))
    assert watch.steps == [0, 2, 3]


def test_a_step_is_reported_that_no_rank_is_at() -> None:
    """The ranks of one node report alone, then others begin that are behind."""
    watch = Watch(script=True)
    for a, b in ((3, None), (4, 2), (5, 2)):
        for node, ranks, step in (("a", (0, 1), a), ("b", (2, 3), b)):
            by = "" if step is None else "script"
            beats = tuple(WorkerBeat(rank=r, step=step or -1, counted_by=by) for r in ranks)
            watch.give(FromNode(node, Heartbeat(generation=1, workers=beats)))
    watch.give(FromNode("a", WorkerExited(generation=1, exit=Exit(rank=0, signal=9))))
    reported = [one for one in watch.verdicts if isinstance(one, StepCompleted)]
    assert [(one.step, one.counted_by) for one in reported] == [(3, "script"), (4, "script")]


def test_a_silent_node_is_lost_after_the_timeout_and_not_before() -> None:
    watch = Watch().train(3)
    began = watch.job.now_ns
    for _ in range(5):
        watch.job.now_ns += SECOND // 2
        watch.beat(2, node="a")
    assert watch.monitor.next_deadline_ns() == began + 3 * SECOND
    watch.job.now_ns = began + 3 * SECOND
    (lost,) = [v for v in watch.give(Tick()) if isinstance(v, NodeLost)]
    assert (lost.node, lost.cause) == ("b", "silent")
    assert "no heartbeat for 3.0 s" in lost.detail


def test_a_step_is_reported_at_the_next_check_after_its_last_heartbeat() -> None:
    job = Watched()
    assert NODES * WORKERS >= BIG_JOB_RANKS
    for step in (0, 1):
        reported = [event for name in NAMES for event in job.beat(name, step)]
        last = job.now_ns
        if not reported:
            reported = list(job.wait_until_due())
        assert [one.step for one in reported if isinstance(one, StepCompleted)] == [step]
        assert job.now_ns - last <= 20 * MS
        job.now_ns += SECOND


def test_heartbeats_that_come_shortly_after_each_other_are_checked_together() -> None:
    job = Watched()
    for step in range(2):
        for name in NAMES:
            job.beat(name, step)
        job.wait_until_due()
        job.now_ns += SECOND
    looks: list[int] = []
    silence = job.monitor._detector
    real = silence.judge
    silence.judge = lambda now_ns, *more: (looks.append(now_ns), real(now_ns, *more))[1]  # type: ignore[method-assign]
    for name in NAMES:
        job.beat(name, 2)
        job.now_ns += MS // 10
    assert 1 <= len(looks) <= 3


def test_a_node_of_a_big_job_is_lost_after_the_heartbeat_timeout() -> None:
    job = Watched()
    for name in NAMES:
        job.beat(name, 0)
    quiet_since, lost = job.now_ns, dict[str, int]()
    for _quarter in range(16):
        reported = [event for name in NAMES[1:] for event in job.beat(name, 0)]
        reported += job.wait_until_due()
        lost.update({one.node: job.now_ns for one in reported if isinstance(one, NodeLost)})
        job.now_ns += SECOND // 4
    assert list(lost) == [NAMES[0]]
    assert 3 * SECOND <= lost[NAMES[0]] - quiet_since <= 3.5 * SECOND


def test_the_exit_of_a_worker_reports_steps_that_were_not_checked_yet() -> None:
    job = Watched()
    for step in (0, 1):
        for name in NAMES:
            job.beat(name, step)
    reported = job.transcript.exits(0, signal=9)
    job.monitor.observe(job.now_ns, job.transcript.journal[-1][1])
    seen = job.wait_until_due()
    assert [one.step for one in seen if isinstance(one, StepCompleted)] == [1]
    assert not any(isinstance(action, LaunchGroup) for action in reported)


def test_a_step_is_reported_before_the_next_generation_begins() -> None:
    job = Watched()
    for step in (0, 1):
        for name in NAMES:
            job.beat(name, step)
        job.wait_until_due()
    job.transcript.exits(0, signal=9)
    seen = list(job.monitor.observe(job.now_ns, job.transcript.journal[-1][1]))
    job.transcript.all_stopped(1)
    assert job.transcript.state.generation == 2
    seen += job.monitor.observe(job.now_ns, job.transcript.journal[-1][1])
    steps = [(e.generation, e.step) for e in seen if isinstance(e, StepCompleted)]
    assert steps == [(1, 1)]


def test_a_heartbeat_that_overtook_another_counts() -> None:
    watch = Watch().train(4)
    late = WorkerBeat(rank=0, phase="train", step=1, ticks=4)
    watch.give(FromNode("a", Heartbeat(generation=1, workers=(late,))))
    assert watch.monitor._current.ranks[0].beat.step == 3
    same = WorkerBeat(rank=0, phase="save", step=3, ticks=8)
    watch.give(FromNode("a", Heartbeat(generation=1, workers=(same,))))
    assert watch.monitor._current.ranks[0].beat.phase == "save"


def test_a_rank_is_reported_only_by_its_own_node() -> None:
    watch = Watch()
    foreign = WorkerBeat(rank=0, phase="train", step=3, ticks=8)
    watch.give(FromNode("b", Heartbeat(generation=1, workers=(foreign,))))
    assert watch.monitor._current.ranks == {}
    watch.give(FromNode("x", Heartbeat(generation=1, workers=(foreign,))))
    assert watch.monitor._detector.last_ns("x") == 0


def test_the_first_step_does_not_count_for_the_step_time() -> None:
    watch = Watch()
    watch.beat(0, step_s=60.0)
    assert list(watch.monitor._current.step_s) == []
    watch.job.now_ns += SECOND
    watch.beat(1, step_s=0.0)
    assert list(watch.monitor._current.step_s) == [], "not reported"
    watch.job.now_ns += SECOND
    watch.beat(2, step_s=0.5)
    assert list(watch.monitor._current.step_s) == [0.5]
    assert watch.monitor._current.num_steps == 3


def test_a_step_reports_the_largest_numbers_and_the_loss_of_a_rank_at_the_step() -> None:
    watch = Watch()
    ahead = tuple(
        WorkerBeat(rank=rank, phase="train", step=1, ticks=4, step_s=0.5, loss=0.25, tokens=64)
        for rank in (0, 1)
    )
    watch.give(FromNode("a", Heartbeat(generation=1, workers=ahead)))
    watch.beat(0, node="b", step_s=0.75)
    (event,) = [v for v in watch.verdicts if isinstance(v, StepCompleted)]
    assert (event.step, event.loss, event.tokens, event.step_s) == (0, 1.5, 64, 0.75)


def test_a_new_controller_knows_the_progress_from_its_state() -> None:
    watch = Watch().train(12)
    watch.job.step(11)
    monitor = ProgressMonitor(watch.job.state.job, watch.job.replayed())
    monitor.observe(watch.job.now_ns, Tick())
    current = monitor._current
    assert (current.done, current.first, current.reported) == (11, 11, 11)
    assert (current.num_steps, list(current.step_s)) == (12, [0.4])
    assert monitor.next_deadline_ns() is None, "no heartbeat yet"


def test_a_new_controller_drops_the_heartbeats_before_it() -> None:
    watch = Watch().train(12)
    started = ControllerStarted(incarnation=2)
    watch.job.apply(started)
    watch.monitor.observe(watch.job.now_ns, started)
    assert watch.monitor._current.ranks == {} and watch.monitor._current.number == 1
    assert watch.monitor.next_deadline_ns() is None


def test_a_job_that_has_ended_has_no_deadline_and_no_loss() -> None:
    watch = Watch().train(3)
    watch.job.apply(CancelRequested())
    watch.job.all_stopped(None)
    assert watch.job.state.terminal
    watch.job.now_ns += 60 * SECOND
    assert watch.monitor.observe(watch.job.now_ns, Tick()) == ()
    assert watch.monitor.next_deadline_ns() is None


def test_a_monitor_before_the_submission_has_nothing_to_watch() -> None:
    job = Transcript()
    monitor = ProgressMonitor(job_from_mapping(job.document), job.controller)
    monitor.arrived(job.now_ns, "a")
    assert monitor.next_deadline_ns() is None


def test_a_reported_step_is_not_reported_again() -> None:
    watch = Watch().train(2)
    assert watch.steps == [0]
    watch.give(StepCompleted(generation=1, step=1))
    watch.give(NodeLost(node="x", cause="gone"))
    assert watch.steps == [0]
    watch.give(StepCompleted(generation=7, step=99))
    assert watch.monitor._current.reported == 1


def test_before_the_first_launch_heartbeats_show_no_progress() -> None:
    job = Transcript()
    job.submit()
    monitor = ProgressMonitor(job.state.job, job.controller)
    earlier = tuple(ShardFile(9, 7, shard, 2, f"s{shard}", 1, "c") for shard in range(2))
    beat = FromNode("a", Heartbeat(generation=0, workers=(WorkerBeat(rank=0, step=3),)))
    events: list[AnyEvent] = [ControllerStarted(incarnation=1, committed=earlier)]
    events += [FromNode("a", NodeJoined(facts=facts("a"))), beat]
    for event in events:
        assert monitor.observe(job.now_ns, Tick()) == ()
        job.apply(event)
        assert monitor.observe(job.now_ns, event) == ()
    assert job.state.generation == 7, "of an earlier job at the same path"


def test_a_node_that_joins_and_sends_no_heartbeat_is_lost() -> None:
    watch = Watch(nodes={"min": 1, "max": 2, "spares": 1}).train(2)
    watch.job.join("c")
    watch.give(FromNode("c", NodeJoined(facts=facts("c"))))
    watch.train(8, first=2)
    assert [lost.node for lost in watch.of(NodeLost)] == ["c"]


def test_a_heartbeat_of_an_unknown_node_is_ignored() -> None:
    watch = Watch().train(2)
    assert watch.give(FromNode("x", Heartbeat(generation=1, cpu_pressure=0.9))) == []
    assert watch.monitor._contended == {}


def test_heartbeats_of_the_generation_before_are_no_progress_of_this_one() -> None:
    watch = Watch().train(3)
    watch.job.exits(0, signal=9)
    watch.job.all_stopped(2)
    watch.beat(50)
    assert watch.steps == [0, 2] and watch.monitor._current.ranks == {}


def test_a_new_controller_counts_the_steps_since_the_restored_one() -> None:
    job = Transcript(spec(recovery={"startupTimeoutSeconds": 100})).started(step=20)
    job.exits(0, signal=9)
    job.all_stopped(20)
    monitor = ProgressMonitor(job.state.job, job.replayed())
    monitor.observe(job.now_ns, Tick())
    assert monitor._current.num_steps == 0 and list(monitor._current.step_s) == []
    for step in (21, 20 + limits.HANG_SAMPLES - 1, 20 + limits.HANG_SAMPLES):
        job.step(step)
        monitor = ProgressMonitor(job.state.job, job.replayed())
        monitor.observe(job.now_ns, Tick())
        learned = step == 20 + limits.HANG_SAMPLES
        assert monitor._facts is not None and monitor._facts.learned == learned, step


def test_a_new_controller_learns_no_limit_from_steps_without_a_time() -> None:
    job = Transcript(spec(recovery={"startupTimeoutSeconds": 100})).started(step=None)
    job.apply(StepCompleted(generation=1, step=50))
    monitor = ProgressMonitor(job.state.job, job.replayed())
    monitor.observe(job.now_ns, Tick())
    assert monitor._facts is not None and not monitor._facts.learned


def test_a_report_has_the_usual_step_time() -> None:
    watch = Watch().train(11)
    watch.job.now_ns += 2 * SECOND
    watch.beat(11, step_s=9.0)
    assert watch.of(StepCompleted)[-1].step_s == 0.5


@pytest.mark.parametrize(
    ("pressure", "contended", "starved"),
    [
        (limits.STRAGGLER_MAX_PRESSURE - 0.01, False, False),
        (limits.STRAGGLER_MAX_PRESSURE, True, False),
        (limits.STARVED_PRESSURE - 0.01, True, False),
        (limits.STARVED_PRESSURE, True, True),
    ],
)
def test_a_machine_is_contended_before_it_is_starved(
    pressure: float, contended: bool, starved: bool
) -> None:
    watch = Watch().train(10)
    watch.give(FromNode("a", Heartbeat(generation=1, cpu_pressure=pressure)))
    assert list(watch.monitor._contended) == (["a"] if contended else [])
    assert watch.monitor._facts is not None and watch.monitor._facts.starved == starved


@pytest.mark.parametrize(("after_s", "named"), [(STARVED_MEMORY_S, []), (10.001, ["b"])])
def test_a_machine_counts_as_contended_for_ten_seconds(after_s: float, named: list[str]) -> None:
    watch = Watch()
    watch.give(FromNode("b", Heartbeat(generation=1, cpu_pressure=0.5)))
    began = watch.job.now_ns
    for step in range(6):
        watch.job.now_ns = began + round((after_s - 0.5 * (5 - step)) * SECOND)
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            beats = tuple(
                WorkerBeat(
                    rank=rank, phase="train", step=10 * step, ticks=step, step_s=0.05,
                    work_s=0.03 if node == "b" else 0.02,
                )
                for rank in ranks
            )  # fmt: skip
            watch.monitor._contended = {"b": began}
            watch.give(FromNode(node, Heartbeat(generation=1, workers=beats)))
    assert watch.monitor._current.stragglers.since.keys() == (set() if not named else {2, 3})


def test_a_message_that_waits_moves_the_deadline_of_a_small_job() -> None:
    watch = Watch().train(3)
    due_ns = watch.monitor.next_deadline_ns()
    assert due_ns == watch.job.now_ns + 3 * SECOND
    watch.job.now_ns += SECOND
    for node in ("a", "b"):
        watch.monitor.arrived(watch.job.now_ns, node)
    assert watch.monitor.next_deadline_ns() == due_ns + SECOND


def test_a_big_job_computes_its_deadline_once_a_check() -> None:
    job = Watched()
    for name in NAMES:
        job.beat(name, 0)
    job.wait_until_due()
    counted: list[int | None] = []
    real = job.monitor._first_due_ns
    job.monitor._first_due_ns = lambda: (counted.append(0), real())[1]  # type: ignore[method-assign]
    first = job.monitor.next_deadline_ns()
    assert job.monitor.next_deadline_ns() == first and len(counted) == 1
    job.beat(NAMES[0], 0)
    check_ns = job.monitor.next_deadline_ns()
    assert check_ns == job.monitor._checked_ns + job.monitor._pause_ns() < (first or 0)
    assert len(counted) == 1
    job.monitor._due = (job.now_ns,)
    # Without a check before, the loop would turn until then.
    assert job.monitor.next_deadline_ns() == check_ns, "what is due earlier waits for the check"


def test_a_job_is_big_from_256_ranks_on() -> None:
    watch = Watch().train(1)
    nodes = watch.job.state.nodes
    while 2 * len(nodes) < BIG_JOB_RANKS:
        assert watch.monitor._pause_ns() == 0
        nodes[f"c{len(nodes)}"] = nodes["a"]
    assert watch.monitor._pause_ns() > 0
