"""The progress monitor at its edges: before the first launch, after a new controller, at the exact
limits, and what it reports only once."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.events import (
    AnyEvent,
    ControllerStarted,
    HangDetected,
    HangSuspected,
    HangSuspicionEnded,
    HeartbeatReceived,
    NodeJoined,
    NodeLost,
    StepCompleted,
    StragglerDetected,
    Tick,
)
from holdfast.orchestrator.core.hang_limits import PULSE_STALE_S
from holdfast.orchestrator.core.hang_suspects import Suspects
from holdfast.orchestrator.core.progress_monitor import (
    BIG_JOB_RANKS,
    STARVED_MEMORY_S,
    ProgressMonitor,
)
from holdfast.orchestrator.core.provisioning import rejoin_s
from holdfast.orchestrator.protocol.facts import ShardFile, WorkerBeat

from .harness import SECOND, Transcript, facts, spec
from .test_progress_monitor import NAMES, Watch, Watched


def _of(watch: Watch, kind: type[Any]) -> list[Any]:
    return [verdict for verdict in watch.verdicts if isinstance(verdict, kind)]


def _pulses(watch: Watch, *ages_s: float) -> None:
    """All ranks are at step 10, with pulses of these ages."""
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        beats = tuple(
            WorkerBeat(rank=rank, phase="train", step=10, ticks=22, pulse_age_s=ages_s[rank])
            for rank in ranks
        )
        watch.give(HeartbeatReceived(node=node, generation=1, workers=beats))


def test_before_the_first_launch_heartbeats_show_no_progress() -> None:
    job = Transcript()
    job.submit()
    monitor = ProgressMonitor(job.state.job, job.controller)
    earlier = tuple(ShardFile(9, 7, shard, 2, f"s{shard}", 1, "c") for shard in range(2))
    beat = HeartbeatReceived(node="a", generation=0, workers=(WorkerBeat(rank=0, step=3),))
    events: list[AnyEvent] = [ControllerStarted(incarnation=1, committed=earlier)]
    events += [NodeJoined(node="a", facts=facts("a")), beat]
    for event in events:
        assert monitor.observe(job.now_ns, Tick()) == ()
        job.apply(event)
        assert monitor.observe(job.now_ns, event) == ()
    assert job.state.generation == 7, "of an earlier job at the same path"


def test_a_node_that_joins_and_sends_no_heartbeat_is_lost() -> None:
    watch = Watch(nodes={"min": 1, "max": 2, "spares": 1})
    watch.train(2)
    watch.job.join("c")
    watch.give(NodeJoined(node="c", facts=facts("c")))
    watch.train(8, first=2)
    assert [lost.node for lost in _of(watch, NodeLost)] == ["c"]


def test_a_heartbeat_of_an_unknown_node_is_ignored() -> None:
    watch = Watch()
    watch.train(2)
    assert watch.give(HeartbeatReceived(node="x", generation=1, cpu_pressure=0.9)) == []
    assert watch.monitor._contended == {}


def test_heartbeats_of_the_generation_before_are_no_progress_of_this_one() -> None:
    watch = Watch()
    watch.train(3)
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
        assert (monitor.hang_limit_s() < 100) == learned, step


def test_a_new_controller_learns_no_limit_from_steps_without_a_time() -> None:
    job = Transcript(spec(recovery={"startupTimeoutSeconds": 100})).started(step=None)
    job.apply(StepCompleted(generation=1, step=50))
    monitor = ProgressMonitor(job.state.job, job.replayed())
    monitor.observe(job.now_ns, Tick())
    assert monitor.hang_limit_s() == 100


def test_a_report_has_the_usual_step_time() -> None:
    watch = Watch()
    watch.train(11)
    watch.job.now_ns += 2 * SECOND
    watch.beat(11, step_s=9.0)
    assert _of(watch, StepCompleted)[-1].step_s == 0.5


def test_only_gaps_of_training_that_ended_extend_the_limit() -> None:
    watch = Watch()
    watch.beat(-1)
    watch.job.now_ns += 5 * SECOND
    watch.beat(0)
    watch.train(9, first=1)
    before = watch.monitor._worst_gap_s
    assert before <= 1.5, "the start-up has its own limit"
    watch.job.now_ns += SECOND
    watch.beat(9, phase="save", quiet_s=0.5)
    watch.job.now_ns += 8 * SECOND
    watch.beat(9, phase="save", quiet_s=8.5)
    watch.job.now_ns += SECOND // 2
    watch.beat(10)
    assert watch.monitor._worst_gap_s == before, "a save takes its time"
    watch.job.now_ns += SECOND // 2
    watch.beat(11)
    watch.job.now_ns += 3 * SECOND
    watch.beat(11)
    assert watch.monitor._worst_gap_s == before, "no progress ended it"


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
    watch = Watch()
    watch.train(10)
    watch.give(HeartbeatReceived(node="a", generation=1, cpu_pressure=pressure))
    assert list(watch.monitor._contended) == (["a"] if contended else [])
    limit = watch.monitor._train_limit(watch.monitor._current.ranks)
    assert (limit.name == "starved-machine") == starved
    if starved:
        at_ns = watch.job.now_ns + round(STARVED_MEMORY_S * SECOND)
        assert watch.monitor._starved(at_ns) and not watch.monitor._starved(at_ns + 1)


@pytest.mark.parametrize(("after_s", "named"), [(STARVED_MEMORY_S, []), (10.001, ["b"])])
def test_a_machine_counts_as_contended_for_ten_seconds(after_s: float, named: list[str]) -> None:
    watch = Watch()
    watch.give(HeartbeatReceived(node="b", generation=1, cpu_pressure=0.5))
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
            watch.give(HeartbeatReceived(node=node, generation=1, workers=beats))
    assert watch.monitor._current.stragglers.finder.since.keys() == (set() if not named else {2, 3})


def test_no_straggler_is_named_where_step_times_are_unknown_or_exactly_half_longer() -> None:
    for others_s, own_s in ((0.0, 0.5), (0.5, 0.75)):
        watch = Watch()
        for step in range(15):
            watch.job.now_ns += SECOND
            watch.beat(step, node="a", step_s=others_s)
            watch.beat(step, node="b", step_s=own_s)
        assert not _of(watch, StragglerDetected)


# -- deadlines --------------------------------------------------------------------------------
def test_the_deadline_is_that_of_a_stopped_process_with_a_current_heartbeat() -> None:
    watch = Watch()
    watch.train(10)
    ran_ns = watch.job.now_ns
    for _ in range(5):
        watch.job.now_ns += SECOND // 2
        watch.beat(9, stopped=(3,), quiet_s=(watch.job.now_ns - ran_ns) / SECOND)
    assert watch.monitor.next_deadline_ns() == ran_ns + 3 * SECOND
    other = Watch()
    other.train(10)
    other.job.now_ns += SECOND
    other.beat(9, node="a", quiet_s=1.0)
    other.job.now_ns += 5 * SECOND // 4
    other.beat(9, stopped=(3,), quiet_s=2.25)
    limit = other.monitor._hang_limit()
    assert limit is not None and limit.name == "stopped-process", "its heartbeat is just current"


@pytest.mark.parametrize("stopped", [(), (3,)])
def test_a_rank_without_current_heartbeats_is_not_hung(stopped: tuple[int, ...]) -> None:
    watch = Watch(recovery={"heartbeatTimeoutSeconds": 60})
    watch.train(10)
    watch.job.now_ns += SECOND // 2
    watch.beat(9, node="b", stopped=stopped, quiet_s=0.5)
    for _ in range(90):
        watch.job.now_ns += SECOND // 2
        watch.beat(9, node="a", quiet_s=0.0)
        watch.give(Tick())
    assert not watch.hangs


def test_a_message_that_waits_moves_the_deadline_of_a_small_job() -> None:
    watch = Watch()
    watch.train(3)
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
    watch = Watch()
    watch.train(1)
    nodes = watch.job.state.nodes
    while 2 * len(nodes) < BIG_JOB_RANKS:
        assert watch.monitor._pause_ns() == 0
        nodes[f"c{len(nodes)}"] = nodes["a"]
    assert watch.monitor._pause_ns() > 0


# -- suspicions -------------------------------------------------------------------------------
def test_no_suspicion_before_the_limit_is_learned_or_while_workers_are_stopped() -> None:
    watch = Watch(recovery={"startupTimeoutSeconds": 20})
    watch.train(3)
    watch.quiet(19.7, step=2)
    assert not _of(watch, HangSuspected)
    other = Watch()
    other.train(10)
    other.job.exits(0, signal=9)
    other.quiet(8, step=9)
    assert not _of(other, HangSuspected) and not other.hangs


def test_a_hang_counts_from_the_last_time_that_a_rank_worked() -> None:
    watch = Watch()
    watch.train(10)
    began = watch.job.now_ns
    for half in range(1, 12):
        quiet_s = half / 2
        watch.job.now_ns = began + round(quiet_s * SECOND)
        watch.beat(9, quiet_s=quiet_s, idle_s=max(0.0, quiet_s - 4.3))
        if half in (8, 11):
            watch.inspect(rank2="reads" if half == 8 else "nothing")
        assert not watch.hangs
    for _ in range(20):
        if watch.hangs:
            break
        watch.job.now_ns += SECOND // 2
        watch.beat(9, quiet_s=(watch.job.now_ns - began) / SECOND, idle_s=1.0)
        watch.inspect(rank2="nothing")
    (hang,) = watch.hangs
    assert watch.job.now_ns >= began + round((5.5 + 4.5) * SECOND)
    assert hang.evidence.startswith(
        f"rank 2 is at step 9 (phase train), {(watch.job.now_ns - began) / SECOND:.1f} s ago; rank "
        '2 is in no collective at File "train.py", line 8 in load; it has used no CPU and done no '
        "I/O for 1.0 s; the hang limit"
    )


@pytest.mark.parametrize("step", [-1, 9])
def test_ranks_that_have_run_to_their_end_may_take_their_time_to_leave(step: int) -> None:
    watch = Watch()
    watch.train(step + 1)
    for ranks, live in (((0, 1), {2, 3}), ((0, 1, 2, 3), set())):
        for node, here in (("a", (0, 1)), ("b", (2, 3))):
            beats = tuple(
                WorkerBeat(rank=rank, step=step, ticks=99, phase="train", leaves=rank in ranks)
                for rank in here
            )
            watch.give(HeartbeatReceived(node=node, generation=1, workers=beats))
        assert watch.monitor._live().keys() == live
    assert watch.monitor._hang_limit() is None
    assert watch.monitor._suspicion_ns() is None


def test_a_hang_without_any_answer_has_no_empty_part_in_its_evidence() -> None:
    watch = Watch()
    watch.train(10)
    watch.quiet(8, step=9)
    assert _of(watch, HangSuspected)[0].evidence == (
        "rank 0 is at step 9 (phase train), 3.5 s ago; all ranks had finished step 9"
    )
    assert Suspects.find(0, 0, (), {}, {}).why == "no rank has reported"
    assert Suspects.find(0, 10, range(9), {}, {}).why == "rank 9 has never reported"


def test_a_hang_that_is_not_applied_yet_is_not_reported_again() -> None:
    watch = Watch(recovery={"hangTimeoutSeconds": 12})
    watch.train(10)
    found: list[AnyEvent] = []
    for half in range(1, 30):
        watch.job.now_ns += SECOND // 2
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            beats = tuple(
                WorkerBeat(rank=rank, phase="train", step=9, ticks=20, quiet_s=half / 2)
                for rank in ranks
            )
            event = HeartbeatReceived(node=node, generation=1, workers=beats)
            found += watch.monitor.observe(watch.job.now_ns, event)
    assert len([one for one in found if isinstance(one, HangDetected)]) == 1


def test_the_end_of_a_suspicion_is_reported_once_and_its_stacks_are_forgotten() -> None:
    watch = Watch()
    watch.train(10)
    watch.quiet(3.9, step=9)
    watch.inspect()
    assert len(_of(watch, HangSuspected)) == 1
    assert watch.monitor._condition(watch.monitor._current.ranks) == "unknown", "peers use the CPU"
    watch.train(3, first=10)
    assert len(_of(watch, HangSuspicionEnded)) == 1
    watch.train(3, first=13)
    assert len(_of(watch, HangSuspicionEnded)) == 1
    assert watch.monitor._current.inspected == {}


def test_a_suspicion_ends_only_with_progress_beyond_what_rounding_explains() -> None:
    watch = Watch()
    watch.train(10)
    began = watch.job.now_ns
    watch.quiet(3.9, step=9)
    assert _of(watch, HangSuspected)
    watch.job.now_ns = began + 4 * SECOND
    watch.beat(9, quiet_s=3.0)
    assert not _of(watch, HangSuspicionEnded), "one second may be rounding"
    watch.beat(9, quiet_s=2.9)
    (ended,) = _of(watch, HangSuspicionEnded)
    assert ended.seconds == pytest.approx(1.1)


def test_a_second_suspicion_of_the_same_hang_keeps_its_beginning() -> None:
    watch = Watch()
    watch.train(10)
    began = watch.job.now_ns
    quiet_s = 0.0
    for half in range(1, 19):
        watch.job.now_ns = began + half * SECOND // 2
        quiet_s = half / 2 - (0.6 if half >= 16 else 0.0)
        watch.beat(9, quiet_s=quiet_s, idle_s=0.0)
    assert len(_of(watch, HangSuspected)) == 2
    watch.beat(9, quiet_s=quiet_s - 0.6)
    (ended,) = _of(watch, HangSuspicionEnded)
    assert ended.seconds == pytest.approx(1.2)


# -- suspects ---------------------------------------------------------------------------------
def test_a_pulse_is_stale_beyond_its_limit_only() -> None:
    watch = Watch()
    watch.train(10)
    watch.job.now_ns += SECOND
    _pulses(watch, PULSE_STALE_S, 0.1, PULSE_STALE_S + 0.1, 0.1)
    suspects = watch.monitor._suspects(watch.job.now_ns)
    assert suspects.ranks == (2, 0, 1, 3)
    assert suspects.basis == "no-pulse"
    _pulses(watch, PULSE_STALE_S, 0.1, PULSE_STALE_S, 0.1)
    suspects = watch.monitor._suspects(watch.job.now_ns)
    assert suspects.basis == "none", "its pulse is just in time"
    assert suspects.why == "rank 0 is at step 10 (phase train), 0.0 s ago"
    stale = PULSE_STALE_S + 0.1
    _pulses(watch, stale, stale, stale, PULSE_STALE_S)
    suspects = watch.monitor._suspects(watch.job.now_ns)
    assert suspects.basis == "no-pulse", "one of them has a pulse"


def test_ranks_that_do_nothing_are_suspected_before_those_that_wait_for_their_peers() -> None:
    watch = Watch()
    watch.train(10)
    watch.inspect(rank3="nothing", rank1="reads", rank2="")
    suspects = watch.monitor._suspects(watch.job.now_ns)
    assert suspects.ranks == (3, 1, 2, 0)


def test_a_node_that_a_new_controller_does_not_reach_is_lost_and_does_not_hang() -> None:
    watch = Watch()
    watch.train(10)
    job = watch.job
    started = ControllerStarted(incarnation=2)
    job.apply(started)
    watch.give(started)
    joined = NodeJoined(node="b", facts=facts("b"), generation=1, ranks=(2, 3))
    job.apply(joined)
    watch.give(joined)
    since_ns = job.now_ns
    while job.state.stop is None:
        job.wait(0.5)
        quiet_s = (job.now_ns - since_ns) / SECOND
        watch.beat(9, node="b", quiet_s=quiet_s, idle_s=max(0.0, quiet_s - 1.0))
        if any(isinstance(verdict, HangSuspected) for verdict in watch.verdicts):
            watch.inspect()
    assert not watch.hangs, "rank 0 has never reported to this controller"
    job.stopped("b", 9)
    assert (job.state.incidents[0].rule, job.state.incidents[0].culprit_node) == ("lost-first", "a")
    assert (job.now_ns - since_ns) / SECOND == pytest.approx(rejoin_s(job.state), abs=0.5)
