"""How long a job without progress waits, by what its workers do, and whom it suspects."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.events import (
    HangSuspected,
    HangSuspicionEnded,
    HeartbeatReceived,
    NodeLost,
)
from holdfast.orchestrator.core.hang_limits import (
    PULSE_STALE_S,
    InspectedStack,
    condition,
    describe,
)
from holdfast.orchestrator.core.hang_suspects import Suspects
from holdfast.orchestrator.protocol.facts import Stack, WorkerBeat

from .harness import SECOND
from .test_progress_monitor import Watch


def test_the_rank_that_came_last_is_suspected_before_the_quickest_and_its_lead_proves_nothing() -> (
    None
):
    watch = Watch()
    watch.train(10)
    for rank, late_s in ((0, 0.010), (1, 0.0), (2, 0.030), (3, 0.010)):
        known = watch.monitor._current.ranks[rank]
        known.moved_ns += round(late_s * SECOND)
    suspects = watch.monitor._suspects(watch.job.now_ns + 8 * SECOND)
    assert suspects.ranks == (2, 0, 3, 1)
    assert suspects.basis == "none"


def test_the_basis_of_a_suspicion_is_what_distinguishes_the_rank() -> None:
    watch = Watch()
    watch.train(10)
    watch.job.now_ns += SECOND
    watch.beat(10, node="b")

    def basis() -> str:
        return watch.monitor._suspects(watch.job.now_ns).basis

    assert basis() == "behind"
    watch.beat(10, node="a", stale=(1,))
    assert basis() == "no-pulse"
    watch.beat(10, stale=(0, 1, 2, 3))
    assert basis() == "none", "a starved machine"
    watch.beat(10, stopped=(3,))
    assert basis() == "stopped"
    assert Suspects.find(0, 0, (), {}, {}).basis == "none"
    assert Suspects.find(0, 1, (), {}, {}).basis == "unreported"


@pytest.mark.parametrize(
    ("activities", "busy", "limit_s", "name"),
    [
        ({"rank2": "nothing"}, (), 4.5, "hang"),
        ({}, (), 4.5, "hang"),
        ({"rank0": "engine", "rank1": "engine"}, (), 4.5, "hang"),
        ({"rank2": "nothing"}, (2,), 30.0, "busy-worker"),
        ({"rank2": "reads"}, (), 30.0, "busy-worker"),
        ({"rank2": "compiles"}, (), 30.0, "busy-worker"),
        ({"rank2": "staging"}, (), 30.0, "busy-worker"),
        ({"rank2": "engine"}, (2,), 30.0, "busy-worker"),
        ({"rank2": "device"}, (), 30.0, "busy-worker"),
        ({"rank2": "device", "rank1": "nothing"}, (2,), 4.5, "hang"),
        (None, (), 30.0, "busy-worker"),
    ],
)
def test_what_the_workers_do_decides_how_long_they_may_make_no_progress(
    activities: dict[str, str] | None, busy: tuple[int, ...], limit_s: float, name: str
) -> None:
    watch = Watch()
    watch.train(10)
    began = watch.job.now_ns
    watch.quiet(60, step=9, activities=activities, busy=busy)
    (hang,) = watch.hangs
    took_s = (watch.job.now_ns - began) / SECOND
    assert limit_s <= took_s <= limit_s + 1.0
    assert f"the {name} limit" in hang.evidence


def test_a_suspicion_comes_before_the_limit_and_ends_with_the_next_progress() -> None:
    watch = Watch()
    watch.train(10)
    began = watch.job.now_ns
    watch.quiet(8, step=9, busy=(0, 1, 2, 3), activities={"rank2": "nothing"})
    kinds = [type(v) for v in watch.verdicts if isinstance(v, HangSuspected)]
    assert len(kinds) == 1 and not watch.hangs
    assert "rank 2 is in no collective at File" in watch.job.state.reason.text
    assert ", on b" in watch.job.state.reason.text
    watch.job.now_ns += SECOND // 2
    (ended,) = [v for v in watch.beat(10) if isinstance(v, HangSuspicionEnded)]
    assert ended.seconds == pytest.approx((watch.job.now_ns - began) / SECOND)
    assert "progress again" in watch.job.state.notes[-1][1]
    assert watch.job.state.incidents == [] and watch.job.state.restarts == {}


def test_the_busy_limit_is_a_field_and_grows_with_the_worst_gap_that_ended() -> None:
    watch = Watch(recovery={"busyTimeoutSeconds": 8})
    watch.train(10)
    watch.quiet(6, step=9)
    watch.train(5, first=10)
    assert watch.monitor._worst_gap_s == pytest.approx(6.5)
    limit = watch.monitor._train_limit(watch.monitor._current.ranks)
    assert (limit.name, limit.limit_s) == ("busy-worker", pytest.approx(19.5))


def test_a_stopped_process_that_goes_on_is_no_hang_and_start_up_has_the_same_limit() -> None:
    watch = Watch()
    watch.train(10)
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


def test_a_starved_machine_gets_time_for_steps_and_heartbeats() -> None:
    watch = Watch()
    watch.train(10)
    beats = tuple(WorkerBeat(rank=r, phase="train", step=9, ticks=20) for r in (0, 1))
    watch.give(HeartbeatReceived(node="a", generation=1, workers=beats, cpu_pressure=0.9))
    limit = watch.monitor._train_limit(watch.monitor._current.ranks)
    assert (limit.name, limit.limit_s) == ("starved-machine", 120.0)
    began = watch.job.now_ns
    for _ in range(20):
        watch.job.now_ns += SECOND // 2
        watch.beat(9, node="b")
    assert not [v for v in watch.verdicts if isinstance(v, NodeLost)]
    watch.job.now_ns = began + 12 * SECOND
    (lost,) = [v for v in watch.beat(9, node="b") if isinstance(v, NodeLost)]
    assert lost.node == "a" and "short of CPU time" in lost.detail


def test_another_heartbeat_of_a_starved_machine_counts_only_for_nodes_on_it() -> None:
    watch = Watch()
    watch.train(3)
    watch.give(HeartbeatReceived(node="a", generation=1, cpu_pressure=0.9))
    began = watch.job.now_ns
    while watch.job.now_ns < began + 4 * SECOND:
        watch.job.now_ns += SECOND // 2
        watch.beat(2, node="a")
    assert [v.node for v in watch.verdicts if isinstance(v, NodeLost)] == ["b"]


def _beat(idle_s: float, **more: float) -> WorkerBeat:
    return WorkerBeat(rank=2, phase="train", step=9, ticks=20, idle_s=idle_s, **more)


def _inspected(activity: str, at_ns: int = 0, text: str = "") -> InspectedStack:
    return InspectedStack(Stack(2, text, activity == "peers", "S", activity), at_ns)


IDLE = round(limits.IDLE_S * SECOND)


@pytest.mark.parametrize(
    ("activity", "idle_s", "at_ns", "expected"),
    [
        ("peers", limits.IDLE_S, 0, "idle"),
        ("peers", limits.IDLE_S - 0.1, 0, "unknown"),
        ("peers", limits.IDLE_S, -SECOND, "idle"),
        ("nothing", limits.IDLE_S, 0, "idle"),
        ("nothing", limits.IDLE_S, -1, "unknown"),
        ("engine", limits.IDLE_S, 0, "idle"),
        ("engine", limits.IDLE_S, -1, "unknown"),
        ("nothing", 0.0, -SECOND, "busy"),
    ],
)
def test_a_stack_holds_for_as_long_as_the_process_has_been_idle_since(
    activity: str, idle_s: float, at_ns: int, expected: str
) -> None:
    beats, known = [_beat(idle_s)], {2: _inspected(activity, at_ns)}
    assert condition(IDLE, beats, known) == expected


@pytest.mark.parametrize(
    ("pulse_age_s", "expected"), [(PULSE_STALE_S, "unknown"), (PULSE_STALE_S + 0.1, "idle")]
)
def test_a_rank_that_did_not_answer_does_nothing_once_its_pulse_is_stale(
    pulse_age_s: float, expected: str
) -> None:
    beats = [_beat(limits.IDLE_S, pulse_age_s=pulse_age_s)]
    assert condition(IDLE, beats, {2: _inspected("")}) == expected


def test_a_rank_is_described_with_its_frame_and_its_idle_time_where_they_are_known() -> None:
    reads = _inspected("reads", text='Thread 1:\n  File "data.py", line 8 in load\n')
    text = 'rank 2 reads at File "data.py", line 8 in load'
    idle = f"; it has used no CPU and done no I/O for {limits.IDLE_S:.1f} s"
    assert describe(2, _beat(limits.IDLE_S - 0.1), reads) == text
    assert describe(2, _beat(limits.IDLE_S), reads) == text + idle
    assert describe(2, None, _inspected("reads")) == "rank 2 reads"
    assert describe(2, None, _inspected("")) == "" == describe(2, _beat(9.0), None)
