"""The progress monitor: steps, hangs, stragglers and lost nodes, also of big jobs."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import (
    AnyEvent,
    CancelRequested,
    ControllerStarted,
    GroupInspected,
    HangDetected,
    HangSuspected,
    HeartbeatReceived,
    NodeJoined,
    NodeLost,
    StepCompleted,
    StragglerDetected,
    Tick,
    WorkerExited,
)
from holdfast.orchestrator.core.progress_monitor import BIG_JOB_RANKS, ProgressMonitor
from holdfast.orchestrator.protocol.facts import Exit, Stack, WorkerBeat

from .harness import SECOND, Transcript, facts, spec


class Watch:
    """A job of four ranks on two nodes; a test sends the heartbeats."""

    def __init__(self, **document: Any) -> None:
        self.job = Transcript(spec(**document)).started(step=None)
        self.monitor = ProgressMonitor(self.job.state.job, self.job.controller)
        self.verdicts: list[AnyEvent] = []
        for node in ("a", "b"):
            self.give(NodeJoined(node=node, facts=facts(node), generation=1))

    def give(self, event: AnyEvent) -> list[AnyEvent]:
        found = list(self.monitor.observe(self.job.now_ns, event))
        self.verdicts += found
        for verdict in found:
            self.job.apply(verdict)
        return found

    def beat(self, step: int, *, node: str = "", **more: Any) -> list[AnyEvent]:
        """All ranks (of a node) are at `step`."""
        found: list[AnyEvent] = []
        for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
            if node in ("", name):
                beats = tuple(
                    WorkerBeat(
                        rank=rank, phase=more.get("phase", "train"), step=step, ticks=2 * step + 2,
                        step_s=more.get("step_s", 0.5), quiet_s=more.get("quiet_s", 0.0),
                        stopped=rank in more.get("stopped", ()),
                        pulse_age_s=9.0 if rank in more.get("stale", ()) else 0.1, loss=1.5,
                        idle_s=0.0 if rank in more.get("busy", ()) else more.get("idle_s", 0.0),
                    )
                    for rank in ranks
                )  # fmt: skip
                found += self.give(HeartbeatReceived(node=name, generation=1, workers=beats))
        return found

    def train(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.job.now_ns += SECOND // 2
            self.beat(step)

    def inspect(self, **activities: Any) -> None:
        """The answers of all ranks; those without a name here wait for their peers."""
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            kinds = {rank: activities.get(f"rank{rank}", "peers") for rank in ranks}
            stacks = tuple(
                Stack(rank, 'File "train.py", line 8 in load', kind == "peers", "S", kind)
                for rank, kind in kinds.items()
            )
            event = GroupInspected(node=node, generation=1, stacks=stacks)
            self.job.apply(event)
            self.give(event)

    def quiet(self, seconds: float, **more: Any) -> None:
        """Heartbeats without steps, until the first hang. `activities`: what ranks answer."""
        activities = more.pop("activities", None)
        until = self.job.now_ns + round(seconds * SECOND)
        last, since = more.pop("step"), self.job.now_ns
        while self.job.now_ns < until and not self.hangs:
            due = self.monitor.next_deadline_ns()
            beat_at = self.job.now_ns + SECOND // 2
            if due is not None and due < beat_at:
                self.job.now_ns = due
                suspected = any(isinstance(v, HangSuspected) for v in self.give(Tick()))
                if suspected and activities is not None:
                    self.inspect(**activities)
                continue
            self.job.now_ns = beat_at
            quiet_s = (self.job.now_ns - since) / SECOND
            idle = {"idle_s": max(0.0, quiet_s - 1.0)} if activities is not None else {}
            found = self.beat(last, quiet_s=quiet_s, **idle, **more)
            if activities is not None and any(isinstance(v, HangSuspected) for v in found):
                self.inspect(**activities)

    @property
    def hangs(self) -> list[HangDetected]:
        return [v for v in self.verdicts if isinstance(v, HangDetected)]

    @property
    def steps(self) -> list[int]:
        return [v.step for v in self.verdicts if isinstance(v, StepCompleted)]


def test_the_first_step_of_all_ranks_is_reported_at_once() -> None:
    watch = Watch()
    assert not watch.beat(0, node="a"), "half of the ranks"
    (reported,) = watch.beat(0, node="b")
    assert isinstance(reported, StepCompleted)
    assert (reported.step, reported.generation, reported.loss) == (0, 1, 1.5)
    assert watch.job.state.phase == "running"


def test_later_steps_are_reported_about_once_a_second() -> None:
    watch = Watch()
    watch.train(10)
    assert watch.steps == [0, 2, 4, 6, 8]


def test_an_unreported_step_is_reported_when_a_worker_exits() -> None:
    watch = Watch()
    watch.train(4)
    watch.give(WorkerExited(node="a", generation=1, exit=Exit(rank=0, signal=9)))
    assert watch.steps == [0, 2, 3]


def test_a_silent_node_is_lost_after_the_timeout_and_not_before() -> None:
    watch = Watch()
    watch.train(3)
    began = watch.job.now_ns
    for _ in range(5):
        watch.job.now_ns += SECOND // 2
        watch.beat(2, node="a")
    assert watch.monitor.next_deadline_ns() == began + 3 * SECOND
    watch.job.now_ns = began + 3 * SECOND
    (lost,) = [v for v in watch.give(Tick()) if isinstance(v, NodeLost)]
    assert (lost.node, lost.cause) == ("b", "silent")
    assert "no heartbeat for 3.0 s" in lost.detail


def test_a_stopped_process_is_a_hang_within_three_seconds() -> None:
    watch = Watch()
    watch.train(10)
    began = watch.job.now_ns
    watch.quiet(20, step=9, stopped=(3,))
    (hang,) = watch.hangs
    assert (watch.job.now_ns - began) / SECOND <= 3
    assert hang.ranks[0] == 3
    assert "rank 3 is stopped" in hang.evidence
    assert "the stopped-process limit is 3.0 s" in hang.evidence


def test_a_blocked_interpreter_is_the_next_suspect() -> None:
    watch = Watch()
    watch.train(10)
    watch.quiet(20, step=9, stale=(1,), activities={"rank1": ""})
    assert watch.hangs[0].ranks[0] == 1
    assert "3 s + 3 x 0.50 s" in watch.hangs[0].evidence


def test_the_rank_that_is_behind_is_the_next_suspect() -> None:
    watch = Watch()
    watch.train(10)
    watch.job.now_ns += SECOND // 2
    watch.beat(10, node="a")
    watch.quiet_from = watch.job.now_ns  # type: ignore[attr-defined]
    while not watch.hangs:
        watch.job.now_ns += SECOND // 2
        quiet = (watch.job.now_ns - watch.quiet_from) / SECOND  # type: ignore[attr-defined]
        watch.beat(10, node="a", quiet_s=quiet)
        watch.beat(9, node="b", quiet_s=quiet + 0.5)
    assert watch.hangs[0].ranks[0] in (2, 3)


def test_no_hang_is_detected_before_the_limit_is_learned() -> None:
    watch = Watch()
    watch.train(3)
    watch.quiet(60, step=2)
    assert not watch.hangs


def test_start_up_has_a_limit_of_its_own() -> None:
    watch = Watch(recovery={"startupTimeoutSeconds": 20})
    watch.job.now_ns += SECOND
    watch.beat(-1, phase="start")
    watch.quiet(60, step=-1, phase="start")
    assert "start-up limit is 20.0 s" in watch.hangs[0].evidence


def test_phases_other_than_training_may_have_no_progress() -> None:
    watch = Watch()
    watch.train(10)
    watch.quiet(100, step=9, phase="evaluate")
    assert not watch.hangs


def test_the_hang_limit_can_be_configured() -> None:
    watch = Watch(recovery={"hangTimeoutSeconds": 12})
    watch.train(3)
    watch.quiet(11, step=2)
    assert not watch.hangs
    watch = Watch(recovery={"hangTimeoutSeconds": 12})
    watch.train(3)
    watch.quiet(14, step=2)
    assert watch.hangs


def test_a_rank_without_heartbeats_of_its_agent_is_not_hung() -> None:
    watch = Watch(recovery={"heartbeatTimeoutSeconds": 60})
    watch.train(10)
    for _ in range(40):
        watch.job.now_ns += SECOND // 2
        watch.beat(9, node="a", quiet_s=0.0)
        watch.give(Tick())
    assert not watch.hangs


def test_a_script_that_reports_nothing_has_no_limit() -> None:
    job = Transcript(spec(script=True)).started(step=None)
    monitor = ProgressMonitor(job.state.job, job.controller)
    monitor.observe(job.now_ns, NodeJoined(node="a", facts=facts("a"), generation=1))
    for _ in range(2000):
        job.now_ns += SECOND
        beats = tuple(WorkerBeat(rank=rank) for rank in (0, 1))
        assert not monitor.observe(
            job.now_ns, HeartbeatReceived(node="a", generation=1, workers=beats)
        )


def test_a_hang_that_began_without_a_controller_is_detected() -> None:
    watch = Watch()
    watch.train(10)
    job = watch.job
    job.controller = job.replayed()
    watch.monitor = ProgressMonitor(job.state.job, job.controller)
    for now_ns, event in job.journal:
        watch.monitor.observe(now_ns, event)
    job.now_ns += 2 * SECOND
    started = ControllerStarted(incarnation=2)
    job.apply(started)
    watch.give(started)
    for node in ("a", "b"):
        joined = NodeJoined(
            node=node, facts=facts(node), generation=1,
            ranks=tuple(seat.rank for seat in job.state.launch_actions[node].seats),
        )  # fmt: skip
        job.apply(joined)
        watch.give(joined)
    watch.quiet(10, step=9, stopped=(2,))
    assert watch.hangs[0].ranks[0] == 2


def test_a_straggler_is_noted_once() -> None:
    watch = Watch()
    for step in range(40):
        watch.job.now_ns += SECOND
        watch.beat(step, node="a", step_s=0.4)
        watch.beat(step, node="b", step_s=0.9)
    slow = [v for v in watch.verdicts if isinstance(v, StragglerDetected)]
    assert [v.node for v in slow] == ["b"]
    assert "0.90 s a step, 0.40 s on the others" in slow[0].evidence


def test_a_heartbeat_of_an_old_generation_is_no_progress() -> None:
    watch = Watch()
    watch.train(3)
    late = WorkerBeat(rank=0, phase="train", step=99, ticks=999)
    assert not watch.give(HeartbeatReceived(node="a", generation=0, workers=(late,)))
    assert watch.steps[-1] == 2


NODES, WORKERS = 64, 8
NAMES = [f"n{number}" for number in range(NODES)]
MS = 1_000_000


class Watched:
    """A running job of many ranks, and its monitor."""

    def __init__(self) -> None:
        nodes = {"min": NODES, "max": NODES}
        self.transcript = Transcript(spec(nodes, workers=WORKERS, shard=WORKERS))
        self.monitor = ProgressMonitor(
            job_from_mapping(self.transcript.document), self.transcript.controller
        )
        self.transcript.started(*NAMES, step=None)
        for now_ns, event in self.transcript.journal:
            self.monitor.observe(now_ns, event)
        self.now_ns = self.transcript.now_ns

    def beat(self, name: str, step: int) -> tuple[AnyEvent, ...]:
        workers = tuple(
            WorkerBeat(rank=seat.rank, phase="train", step=step, ticks=step + 2, step_s=0.5)
            for seat in self.transcript.state.launch_actions[name].seats
        )
        return self.monitor.observe(
            self.now_ns, HeartbeatReceived(node=name, generation=1, workers=workers)
        )

    def wait_until_due(self) -> tuple[AnyEvent, ...]:
        due = self.monitor.next_deadline_ns()
        assert due is not None
        self.now_ns = max(self.now_ns, due)
        return self.monitor.observe(self.now_ns, Tick())


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


def test_a_hang_is_reported_once() -> None:
    watch = Watch()
    watch.train(10)
    watch.job.now_ns += 150 * SECOND
    for node in ("a", "b"):
        watch.monitor.arrived(watch.job.now_ns, node)
    watch.beat(9, quiet_s=150.0)
    assert len(watch.hangs) == 1
    hung = watch.monitor.observe(watch.job.now_ns, Tick())
    assert not hung and watch.monitor._hang_limit() is None


def test_a_heartbeat_that_overtook_another_counts() -> None:
    watch = Watch()
    watch.train(4)
    late = WorkerBeat(rank=0, phase="train", step=1, ticks=4)
    watch.give(HeartbeatReceived(node="a", generation=1, workers=(late,)))
    assert watch.monitor._current.ranks[0].beat.step == 3
    same = WorkerBeat(rank=0, phase="save", step=3, ticks=8)
    watch.give(HeartbeatReceived(node="a", generation=1, workers=(same,)))
    assert watch.monitor._current.ranks[0].beat.phase == "save"


def test_a_rank_is_reported_only_by_its_own_node() -> None:
    watch = Watch()
    foreign = WorkerBeat(rank=0, phase="train", step=3, ticks=8)
    watch.give(HeartbeatReceived(node="b", generation=1, workers=(foreign,)))
    assert watch.monitor._current.ranks == {}
    watch.give(HeartbeatReceived(node="x", generation=1, workers=(foreign,)))
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
    watch.give(HeartbeatReceived(node="a", generation=1, workers=ahead))
    watch.beat(0, node="b", step_s=0.75)
    (event,) = [v for v in watch.verdicts if isinstance(v, StepCompleted)]
    assert (event.step, event.loss, event.tokens, event.step_s) == (0, 1.5, 64, 0.75)


def test_the_hang_limit_is_learned_from_enough_steps() -> None:
    watch = Watch(recovery={"startupTimeoutSeconds": 100})
    assert watch.monitor.hang_limit_s() == 100
    watch.train(limits.HANG_SAMPLES - 1)
    assert watch.monitor.hang_limit_s() == 100
    watch.train(1, first=limits.HANG_SAMPLES - 1)
    assert watch.monitor.hang_limit_s() == limits.HANG_FLOOR_S + limits.HANG_STEP_FACTOR * 0.5


def test_the_start_up_limit_runs_from_the_end_of_the_start_phase() -> None:
    watch = Watch(recovery={"startupTimeoutSeconds": 20})
    launched_ns = watch.job.state.launched_ns
    watch.beat(-1, phase="start")
    limit = watch.monitor._hang_limit()
    assert limit is not None
    assert (limit.due_ns, limit.limit_s, limit.name) == (launched_ns + 20 * SECOND, 20, "start-up")
    watch.job.now_ns += 5 * SECOND
    watch.beat(-1, phase="build", node="a")
    limit = watch.monitor._hang_limit()
    assert limit is not None and limit.due_ns == launched_ns + 25 * SECOND
    watch.job.now_ns = limit.due_ns - 1
    assert not [v for v in watch.give(Tick()) if isinstance(v, HangDetected)]


@pytest.mark.parametrize("shown", [{"phase": "build"}, {"began_after": -1}, {"step": 0}])
def test_a_script_that_prepares_for_steps_has_a_start_up_limit(shown: dict[str, Any]) -> None:
    watch = Watch(script=True, recovery={"startupTimeoutSeconds": 20})
    assert watch.monitor._hang_limit() is None
    beats = (WorkerBeat(rank=0), WorkerBeat(rank=1, **shown))
    watch.give(HeartbeatReceived(node="a", generation=1, workers=beats))
    assert watch.monitor._hang_limit().name == "start-up"  # type: ignore[union-attr]


def test_a_phase_without_training_has_a_limit_from_its_newest_progress() -> None:
    watch = Watch()
    watch.train(10)
    watch.job.now_ns += SECOND
    watch.beat(9, node="a", phase="save", quiet_s=3.0)
    watch.beat(9, node="b", quiet_s=1.0)
    limit = watch.monitor._hang_limit()
    assert limit is not None and limit.name == "save"
    newest_ns = watch.job.now_ns - SECOND
    assert limit.due_ns == newest_ns + round(limits.SAVE_TIMEOUT_S * SECOND)


def test_ranks_that_have_ended_are_neither_awaited_nor_suspected() -> None:
    watch = Watch()
    watch.train(10)
    watch.job.exits(0, code=0, step=9)
    watch.quiet(4.0, step=9)
    limit = watch.monitor._train_limit(watch.monitor._current.ranks)
    assert limit.name == "busy-worker"
    suspects = watch.monitor._suspects(watch.job.now_ns)
    assert suspects.ranks == (1, 2, 3)
    for rank in (1, 2, 3):
        watch.job.state.exits[rank] = watch.job.state.exits[0]
    assert watch.monitor._hang_limit() is None


def test_the_evidence_names_what_the_first_suspect_shows() -> None:
    watch = Watch()
    watch.beat(0, node="a")
    suspects = watch.monitor._suspects(watch.job.now_ns + 2 * SECOND)
    assert suspects.ranks == (2, 3, 0, 1)
    assert suspects.why == "rank 2 has never reported"
    watch.job.now_ns += SECOND
    watch.beat(1, stopped=(1,), stale=(3,))
    suspects = watch.monitor._suspects(watch.job.now_ns)
    assert suspects.ranks == (1, 3, 0, 2)
    assert suspects.why == "rank 1 is stopped (state T), last progress 0.0 s ago"
    watch.beat(1, stale=(3,))
    suspects = watch.monitor._suspects(watch.job.now_ns + 2 * SECOND)
    assert suspects.why == "rank 3 has not shown a pulse for 9.0 s"


def test_the_evidence_explains_the_limit() -> None:
    watch = Watch(recovery={"hangTimeoutSeconds": 12})
    watch.train(12)
    watch.quiet(14, step=11)
    assert watch.hangs[0].evidence.endswith(
        "; the hang limit is 12.0 s; all ranks had finished step 11"
    )
    start = Watch(recovery={"startupTimeoutSeconds": 20})
    start.quiet(30, step=-1, phase="start")
    assert "; the start-up limit is 20.0 s; no step was reported" in start.hangs[0].evidence


@pytest.mark.parametrize(("samples", "found"), [(9, 0), (10, 1), (11, 1)])
def test_a_straggler_is_slow_in_ten_samples_in_a_row(samples: int, found: int) -> None:
    watch = Watch()
    for step in range(samples):
        watch.job.now_ns += SECOND
        watch.beat(step, node="a", step_s=0.4)
        watch.beat(step, node="b", step_s=0.7)
    slow = [v for v in watch.verdicts if isinstance(v, StragglerDetected)]
    assert len(slow) == found
    if slow:
        assert slow[0].evidence == "0.70 s a step, 0.40 s on the others, in 10 samples in a row"


def test_a_straggler_is_half_slower_than_the_others() -> None:
    watch = Watch()
    for step in range(30):
        watch.job.now_ns += SECOND
        watch.beat(step, node="a", step_s=0.5)
        watch.beat(step, node="b", step_s=0.75 if step % 10 else 0.1)
    assert not [v for v in watch.verdicts if isinstance(v, StragglerDetected)]


def test_a_single_node_has_no_straggler_and_no_report_no_step() -> None:
    job = Transcript(spec({"min": 1, "max": 1}, workers=1, shard=1)).started("a", step=None)
    monitor = ProgressMonitor(job.state.job, job.controller)
    found: list[AnyEvent] = []
    for step in range(30):
        job.now_ns += SECOND
        beat = WorkerBeat(rank=0, phase="train", step=step, ticks=step, step_s=0.5 + step)
        found += monitor.observe(
            job.now_ns, HeartbeatReceived(node="a", generation=1, workers=(beat,))
        )
    assert not [one for one in found if isinstance(one, StragglerDetected)]


def test_a_new_controller_knows_the_progress_from_its_state() -> None:
    watch = Watch()
    watch.train(12)
    watch.job.step(11)
    monitor = ProgressMonitor(watch.job.state.job, watch.job.replayed())
    monitor.observe(watch.job.now_ns, Tick())
    current = monitor._current
    assert (current.done, current.first, current.reported) == (11, 11, 11)
    assert (current.num_steps, list(current.step_s)) == (12, [0.4])
    assert monitor.next_deadline_ns() is None, "no heartbeat yet"


def test_a_new_controller_drops_the_heartbeats_before_it() -> None:
    watch = Watch()
    watch.train(12)
    started = ControllerStarted(incarnation=2)
    watch.job.apply(started)
    watch.monitor.observe(watch.job.now_ns, started)
    assert watch.monitor._current.ranks == {} and watch.monitor._current.number == 1
    assert watch.monitor.next_deadline_ns() is None


def test_a_job_that_has_ended_has_no_deadline_and_no_loss() -> None:
    watch = Watch()
    watch.train(3)
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
    watch = Watch()
    watch.train(2)
    assert watch.steps == [0]
    watch.give(StepCompleted(generation=1, step=1))
    watch.give(NodeLost(node="x", cause="gone"))
    assert watch.steps == [0]
    watch.give(StepCompleted(generation=7, step=99))
    assert watch.monitor._current.reported == 1
