"""Hangs and suspicions as they unfold: when each is reported, once, and when it is over."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import (
    AnyEvent,
    CollectivesBegun,
    ControllerStarted,
    FromNode,
    HangDetected,
    HangSuspected,
    HangSuspicionEnded,
    NodeLost,
    ResizeRequested,
    Tick,
)
from holdfast.orchestrator.core.hang.facts import MIN_COLLECTIVES
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.core.provisioning import rejoin_s
from holdfast.orchestrator.protocol.facts import WorkerBeat
from holdfast.orchestrator.protocol.messages import Heartbeat, NodeJoined

from ..harness import SECOND, facts
from ..watch import Script, Watch


def test_a_stopped_process_is_a_hang_within_three_seconds() -> None:
    watch = Watch().train(10)
    began = watch.job.now_ns
    watch.quiet(20, step=9, stopped=(3,))
    (hang,) = watch.hangs
    assert (watch.job.now_ns - began) / SECOND <= 3
    assert hang.ranks[0] == 3
    assert "rank 3 is stopped" in hang.evidence
    assert "the stopped-process limit is 3.0 s" in hang.evidence


def test_a_stopped_process_that_goes_on_is_no_hang_and_start_up_has_the_same_limit() -> None:
    watch = Watch().train(10)
    watch.quiet(2, step=9, stopped=(3,))
    watch.quiet(2, step=9)
    watch.quiet(2, step=9, stopped=(3,))
    assert not watch.hangs
    start = Watch()
    start.beat(-1, phase="start")
    began = start.job.now_ns
    start.quiet(10, step=-1, phase="start", stopped=(1,))
    assert start.hangs and start.hangs[0].basis == "stopped"
    assert start.hangs[0].quiet_s == pytest.approx((start.job.now_ns - began) / SECOND)


@pytest.mark.parametrize("kept", [(0, 1), ()])
def test_the_first_step_of_kept_processes_has_the_limit_of_any_step(kept: tuple[int, ...]) -> None:
    watch = Watch().train(10)
    watch.job.apply(ResizeRequested(nodes=1))
    watch.job.wait(5)
    watch.job.stopped("a", 9, kept=kept)
    watch.job.stopped("b", 9, kept=tuple(rank + 2 for rank in kept))
    watch.job.succeed(LaunchGroup)
    watch.generation = 2
    watch.quiet(100, step=9, activities={}, phase="restore")
    assert not watch.hangs
    watch.quiet(100, step=9, activities={})
    assert len(watch.hangs) == len(kept[:1])
    assert all("hang limit (3 s" in one.evidence and one.quiet_s < 10 for one in watch.hangs)


def test_a_suspicion_comes_before_the_limit_and_ends_with_the_next_progress() -> None:
    watch = Watch().train(10)
    began = watch.job.now_ns
    watch.quiet(8, step=9, busy=(0, 1, 2, 3), activities={"rank2": "nothing"})
    kinds = [type(v) for v in watch.verdicts if isinstance(v, HangSuspected)]
    assert len(kinds) == 1 and not watch.hangs
    assert "rank 2 is in no collective at File" in watch.job.state.reason.text
    assert ", on b" in watch.job.state.reason.text
    watch.job.now_ns += SECOND // 2
    (ended,) = [v for v in watch.beat(10) if isinstance(v, HangSuspicionEnded)]
    assert ended.seconds == pytest.approx((watch.job.now_ns - began) / SECOND)
    assert "progress after" in watch.job.state.notes[-1][1]
    assert watch.job.state.incidents == [] and watch.job.state.ledger.restarts == {}


def test_the_end_of_a_suspicion_is_reported_once_and_its_stacks_are_forgotten() -> None:
    watch = Watch().train(10)
    watch.quiet(3.9, step=9)
    watch.inspect()
    assert len(watch.of(HangSuspected)) == 1
    watch.train(3, first=10)
    assert len(watch.of(HangSuspicionEnded)) == 1
    watch.train(3, first=13)
    assert len(watch.of(HangSuspicionEnded)) == 1
    assert watch.monitor._current.inspected == {}


def test_a_suspicion_ends_only_with_progress_beyond_what_rounding_explains() -> None:
    watch = Watch().train(10)
    began = watch.job.now_ns
    watch.quiet(3.9, step=9)
    assert watch.of(HangSuspected)
    watch.job.now_ns = began + 4 * SECOND
    watch.beat(9, quiet_s=3.0)
    assert not watch.of(HangSuspicionEnded), "one second may be rounding"
    watch.beat(9, quiet_s=2.9)
    (ended,) = watch.of(HangSuspicionEnded)
    assert ended.seconds == pytest.approx(1.1)


def test_a_second_suspicion_of_the_same_hang_keeps_its_beginning() -> None:
    watch = Watch().train(10)
    began = watch.job.now_ns
    quiet_s = 0.0
    for half in range(1, 19):
        watch.job.now_ns = began + half * SECOND // 2
        quiet_s = half / 2 - (0.6 if half >= 16 else 0.0)
        watch.beat(9, quiet_s=quiet_s, idle_s=0.0)
    assert len(watch.of(HangSuspected)) == 2
    watch.beat(9, quiet_s=quiet_s - 0.6)
    (ended,) = watch.of(HangSuspicionEnded)
    assert ended.seconds == pytest.approx(1.2)


def test_no_suspicion_before_the_limit_is_learned_or_while_workers_are_stopped() -> None:
    watch = Watch(recovery={"startupTimeoutSeconds": 20}).train(3)
    watch.quiet(19.7, step=2)
    assert not watch.of(HangSuspected)
    other = Watch().train(10)
    other.job.exits(0, signal=9)
    other.quiet(8, step=9)
    assert not other.of(HangSuspected) and not other.hangs


def test_a_hang_counts_from_the_last_time_that_a_rank_worked() -> None:
    watch = Watch().train(10)
    began = watch.job.now_ns
    for half in range(1, 40):
        if not watch.hangs:
            watch.job.now_ns = began + half * SECOND // 2
            watch.beat(9, quiet_s=half / 2, idle_s=1.0)
            watch.inspect(rank2="reads" if half <= 11 else "nothing")
    (hang,) = watch.hangs
    assert (watch.job.now_ns - began) / SECOND == pytest.approx(6.0 + 4.5)
    assert hang.ranks[0] == 2 and "; the hang limit (3 s + 3 x 0.50 s) is 4.5 s" in hang.evidence


def test_the_evidence_explains_the_limit() -> None:
    watch = Watch(recovery={"hangTimeoutSeconds": 12}).train(12)
    watch.quiet(14, step=11)
    assert watch.hangs[0].evidence.endswith(
        "; the configured limit is 12.0 s; all ranks had finished 12 steps"
    )
    start = Watch(recovery={"startupTimeoutSeconds": 20})
    start.quiet(30, step=-1, phase="start")
    assert "; the start-up limit is 20.0 s; no step was reported" in start.hangs[0].evidence


def test_a_hang_that_is_not_applied_yet_is_not_reported_again() -> None:
    watch = Watch(recovery={"hangTimeoutSeconds": 12}).train(10)
    found: list[AnyEvent] = []
    for half in range(1, 30):
        watch.job.now_ns += SECOND // 2
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            beats = tuple(
                WorkerBeat(rank=rank, phase="train", step=9, ticks=20, quiet_s=half / 2)
                for rank in ranks
            )
            event = FromNode(node, Heartbeat(generation=1, workers=beats))
            found += watch.monitor.observe(watch.job.now_ns, event)
    assert len([one for one in found if isinstance(one, HangDetected)]) == 1


def test_the_deadline_is_that_of_a_stopped_process() -> None:
    watch = Watch().train(10)
    ran_ns = watch.job.now_ns
    for _ in range(5):
        watch.job.now_ns += SECOND // 2
        watch.beat(9, stopped=(3,), quiet_s=(watch.job.now_ns - ran_ns) / SECOND)
    assert watch.monitor.next_deadline_ns() == ran_ns + 3 * SECOND


@pytest.mark.parametrize("stopped", [(), (3,)])
def test_a_rank_without_current_heartbeats_is_not_hung(stopped: tuple[int, ...]) -> None:
    watch = Watch(recovery={"heartbeatTimeoutSeconds": 60}).train(10)
    watch.job.now_ns += SECOND // 2
    watch.beat(9, node="b", stopped=stopped, quiet_s=0.5)
    for _ in range(90):
        watch.job.now_ns += SECOND // 2
        watch.beat(9, node="a", quiet_s=0.0)
        watch.give(Tick())
    assert not watch.hangs


def test_a_hang_that_began_without_a_controller_is_detected() -> None:
    watch = Watch().train(10)
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
        joined = FromNode(node, NodeJoined(
            facts=facts(node), generation=1,
            ranks=tuple(seat.rank for seat in job.state.group.launches[node].seats),
        ))  # fmt: skip
        job.apply(joined)
        watch.give(joined)
    watch.quiet(10, step=9, stopped=(2,))
    assert watch.hangs[0].ranks[0] == 2


def test_a_node_that_a_new_controller_does_not_reach_is_lost_and_does_not_hang() -> None:
    watch = Watch().train(10)
    job = watch.job
    started = ControllerStarted(incarnation=2)
    job.apply(started)
    watch.give(started)
    joined = FromNode("b", NodeJoined(facts=facts("b"), generation=1, ranks=(2, 3)))
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


def test_a_starved_machine_gets_time_for_steps_and_heartbeats() -> None:
    watch = Watch().train(10)
    beats = tuple(WorkerBeat(rank=r, phase="train", step=9, ticks=20) for r in (0, 1))
    watch.give(FromNode("a", Heartbeat(generation=1, workers=beats, cpu_pressure=0.9)))
    facts = watch.monitor._facts
    assert facts is not None and facts.starved
    began = watch.job.now_ns
    for _ in range(20):
        watch.job.now_ns += SECOND // 2
        watch.beat(9, node="b")
    assert not [v for v in watch.verdicts if isinstance(v, NodeLost)]
    watch.job.now_ns = began + 12 * SECOND
    (lost,) = [v for v in watch.beat(9, node="b") if isinstance(v, NodeLost)]
    assert lost.node == "a" and "short of CPU time" in lost.detail


def test_another_heartbeat_of_a_starved_machine_counts_only_for_nodes_on_it() -> None:
    watch = Watch().train(3)
    watch.give(FromNode("a", Heartbeat(generation=1, cpu_pressure=0.9)))
    began = watch.job.now_ns
    while watch.job.now_ns < began + 4 * SECOND:
        watch.job.now_ns += SECOND // 2
        watch.beat(2, node="a")
    assert [v.node for v in watch.verdicts if isinstance(v, NodeLost)] == ["b"]


def test_only_gaps_of_training_that_ended_extend_the_limit() -> None:
    watch = Watch()
    watch.beat(-1)
    watch.job.now_ns += 5 * SECOND
    watch.beat(-1, quiet_s=5.0)
    watch.job.now_ns += SECOND // 2
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
    watch.beat(11, quiet_s=3.0)
    assert watch.monitor._worst_gap_s == before, "no progress ended it"


def _quiet(
    watch: Script,
    seconds: float,
    activities: dict[str, str],
    *,
    since_s: float = 0.0,
    **of_rank: Any,
) -> None:
    """`since_s`: for how long the ranks have been quiet."""
    since = watch.job.now_ns - round(since_s * SECOND)
    until = watch.job.now_ns + seconds * SECOND
    while watch.job.now_ns < until and not watch.hangs:
        watch.job.now_ns += SECOND // 2
        quiet_s = (watch.job.now_ns - since) / SECOND
        usual = {"collectives": MIN_COLLECTIVES, "quiet_s": quiet_s}
        idle = {"idle_s": max(0.0, quiet_s - 1.0)}
        found = watch.beats(*[{**usual, **idle, **of_rank.get(f"rank{r}", {})} for r in range(4)])
        found += watch.give(Tick())
        if any(isinstance(event, HangSuspected) for event in found):
            watch.inspect(**activities)


def test_a_silent_script_hangs_if_a_rank_does_nothing_that_its_peers_wait_for() -> None:
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    began = watch.job.now_ns
    _quiet(watch, 200, {"rank2": "nothing"})
    (hang,) = watch.hangs
    assert 60 <= (watch.job.now_ns - began) / SECOND < 63
    assert hang.ranks[0] == 2
    assert hang.quiet_s == pytest.approx((watch.job.now_ns - began) / SECOND)
    assert "rank 2 has begun no collective for 60.0 s" in hang.evidence
    assert "no step was reported" in hang.evidence
    suspected = watch.of(HangSuspected)[0]
    assert "has begun no collective for" in suspected.evidence


@pytest.mark.parametrize("phase", ["start", "save", "evaluate", "train"])
def test_a_script_that_uses_phases_and_reports_no_step_is_watched_by_its_collectives(
    phase: str,
) -> None:
    """Rank 0 has ticks: it has been in a phase, or is in one. Startup has no part in it."""
    watch = Script(recovery={"startupTimeoutSeconds": 15})
    rank0 = {"phase": phase, "ticks": 6}
    for second in range(60):
        watch.job.now_ns += SECOND
        one = {"collectives": MIN_COLLECTIVES + 10 * second, "quiet_s": 0.5}
        watch.beats(one | rank0, one, one, one)
        watch.give(Tick())
    assert not watch.verdicts[1:] and isinstance(watch.verdicts[0], CollectivesBegun)
    assert watch.job.state.phase == "running" and watch.job.state.counted_by == "collectives"


def test_a_pause_that_ended_by_itself_makes_the_next_one_longer() -> None:
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    _quiet(watch, 50, {"rank2": "nothing"})
    watch.job.now_ns += SECOND
    watch.beats(*[{"collectives": MIN_COLLECTIVES + 1}] * 4)
    assert watch.monitor._worst_gap_s == 51
    _quiet(watch, 152, {"rank2": "nothing"})
    assert not watch.hangs
