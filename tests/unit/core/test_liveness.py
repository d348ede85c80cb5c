"""A silent node is lost; when all are silent, the controller suspects itself first."""

from __future__ import annotations

from holdfast.orchestrator.api.v1alpha1 import Recovery
from holdfast.orchestrator.core.events import (
    AdjustRequested,
    HeartbeatsLost,
    HeartbeatsRestored,
    NodeLost,
    Tick,
)
from holdfast.orchestrator.core.liveness import FailureDetector

from .harness import SECOND, Transcript, spec
from .watch import Watch


def wait(watch: Watch, seconds: float, *, beats: str = "") -> None:
    """Time passes: the monitor sees every deadline; the nodes in `beats` send heartbeats."""
    until = watch.job.now_ns + round(seconds * SECOND)
    beat_at = watch.job.now_ns + SECOND // 2
    looks = 0
    while watch.job.now_ns < until:
        looks += 1
        assert looks < 1000, "the monitor keeps its loop busy"
        due = watch.monitor.next_deadline_ns()
        if due is not None and due <= (min(beat_at, until) if beats else until):
            assert due >= watch.job.now_ns
            watch.job.now_ns = due
            watch.give(Tick())
        elif beats and beat_at <= until:
            watch.job.now_ns, beat_at = beat_at, beat_at + SECOND // 2
            for node in beats:
                watch.beat(9, node=node)
        else:
            watch.job.now_ns = until


def lost(watch: Watch) -> dict[str, str]:
    return {v.node: v.detail for v in watch.verdicts if isinstance(v, NodeLost)}


def trained() -> Watch:
    return Watch().train(8)


def test_no_node_is_lost_when_all_heartbeats_stop_for_a_while() -> None:
    watch = trained()
    wait(watch, 9.0)
    assert lost(watch) == {}
    (doubt,) = [v for v in watch.verdicts if isinstance(v, HeartbeatsLost)]
    assert (doubt.nodes, doubt.seconds, doubt.patience_s) == (2, 3.0, 12.0)
    assert "no heartbeat from any of 2 nodes for 3.0 s" in watch.job.state.reason.text
    assert watch.job.state.phase == "running"
    watch.beat(8)
    wait(watch, 20.0, beats="ab")
    assert lost(watch) == {} and not watch.hangs
    (again,) = [v for v in watch.verdicts if isinstance(v, HeartbeatsRestored)]
    assert again.seconds == 9.0
    assert "heartbeats arrive again, after 9.0 s" in watch.job.state.notes[-1][1]
    assert watch.job.state.reason.text == "all 4 ranks train"


def test_all_nodes_are_lost_after_four_timeouts_without_any_heartbeat() -> None:
    watch = trained()
    began = watch.job.now_ns
    wait(watch, 11.9)
    assert lost(watch) == {}
    wait(watch, 0.2)
    assert list(lost(watch)) == ["a", "b"]
    assert "no heartbeat for 12.0 s; the limit is 3 s, 12 s when no node sends" in lost(watch)["a"]
    assert watch.job.now_ns - began < 12.2 * SECOND
    assert watch.job.state.incidents[-1].title == "a and 1 more were lost (silent)"
    wait(watch, 60.0)
    assert len([v for v in watch.verdicts if isinstance(v, HeartbeatsLost)]) == 1


def test_nodes_still_silent_half_a_timeout_after_heartbeats_resume_are_lost() -> None:
    watch = trained()
    wait(watch, 5.0)
    watch.beat(8, node="a")
    wait(watch, 1.4, beats="a")
    assert lost(watch) == {}
    wait(watch, 0.2, beats="a")
    assert list(lost(watch)) == ["b"]
    assert "no heartbeat for 6.5 s" in lost(watch)["b"]


def test_repeated_pauses_of_all_heartbeats_do_not_delay_a_loss_without_end() -> None:
    """The survivor of two nodes is overloaded and sends a heartbeat every other second only."""
    watch = trained()
    for _ in range(5):
        wait(watch, 2.0)
        watch.beat(8, node="a")
    assert lost(watch) == {}
    wait(watch, 2.0)
    assert "b" in lost(watch) and "a" not in lost(watch)


def test_a_node_that_is_silent_alone_is_lost_after_one_timeout() -> None:
    watch = trained()
    wait(watch, 3.1, beats="a")
    assert list(lost(watch)) == ["b"]
    assert not [v for v in watch.verdicts if isinstance(v, HeartbeatsLost)]


def test_a_message_that_waits_to_be_observed_counts_as_a_heartbeat() -> None:
    watch = trained()
    wait(watch, 5.0)
    watch.monitor.arrived(watch.job.now_ns, "a")
    wait(watch, 1.0)
    assert [type(v) for v in watch.verdicts if isinstance(v, HeartbeatsRestored | NodeLost)] == []
    watch.give(Tick())
    assert [v.seconds for v in watch.verdicts if isinstance(v, HeartbeatsRestored)] == [5.0]
    assert lost(watch) == {}


def test_workers_without_progress_while_all_heartbeats_stopped_are_not_hung() -> None:
    watch = trained()
    wait(watch, 8.0)
    watch.beat(7, quiet_s=8.0)
    wait(watch, 1.0, beats="")
    watch.beat(8, quiet_s=0.0)
    wait(watch, 2.0, beats="ab")
    assert not watch.hangs


def test_a_worker_without_progress_after_heartbeats_resume_is_hung() -> None:
    watch = trained()
    wait(watch, 6.0)
    watch.quiet(10.0, step=7, stopped=(2,))
    (hang,) = watch.hangs
    assert hang.ranks[0] == 2


def test_a_replay_without_heartbeats_gives_the_same_state() -> None:
    watch = trained()
    wait(watch, 5.0)
    assert watch.job.replayed().state == watch.job.state


def test_a_shorter_heartbeat_interval_makes_no_earlier_heartbeat_late() -> None:
    """The interval of 5 s and timeout of 20 s become the defaults."""
    slow = {"heartbeatIntervalSeconds": 5, "heartbeatTimeoutSeconds": 20}
    watch = Watch(recovery=slow)
    watch.beat(0, node="a")
    watch.job.now_ns += 4 * SECOND
    watch.beat(0, node="b")
    quick = AdjustRequested(min_nodes=1, spares=0, recovery=Recovery().model_dump(by_alias=True))
    watch.job.apply(quick)
    watch.give(quick)
    wait(watch, 2.9)
    assert lost(watch) == {}
    watch.beat(1)  # at the new interval
    wait(watch, 10.0, beats="b")
    assert set(lost(watch)) == {"a"}, "the new timeout is three seconds"


RECOVERY = Recovery()
"""A heartbeat every 0.5 s, a timeout of 3 s."""


def test_a_new_detector_has_seen_no_time_without_heartbeats() -> None:
    detector = FailureDetector()
    assert detector.ended_ns == 0
    detector.begin(100 * SECOND)
    detector.observed(100 * SECOND + 1, "a", RECOVERY)
    assert detector.ended_ns == 0
    assert detector.last_ns("a") == 100 * SECOND + 1 and detector.last_ns("b") == 0


def test_a_detector_that_begins_again_watches_no_node() -> None:
    detector = FailureDetector()
    detector.observed(100 * SECOND, "a", RECOVERY)
    assert detector.ended_ns == 100 * SECOND
    detector.begin(101 * SECOND)
    assert detector.ended_ns == 0 and detector.next_ns(["a"], RECOVERY) is None
    assert detector.judge(999 * SECOND, ["a"], RECOVERY) == []


def silent(*nodes: str) -> FailureDetector:
    """Every node has sent a heartbeat at 100 s."""
    detector = FailureDetector()
    detector.begin(100 * SECOND)
    for node in nodes:
        detector.observed(100 * SECOND, node, RECOVERY)
    return detector


def test_the_deadlines_of_a_time_without_heartbeats() -> None:
    detector = silent("a", "b")
    assert detector.next_ns(["a", "b"], RECOVERY) == 103 * SECOND
    assert detector.judge(103 * SECOND - 1, ["a", "b"], RECOVERY) == []
    (all_lost,) = detector.judge(103 * SECOND, ["a", "b"], RECOVERY)
    assert all_lost == HeartbeatsLost(nodes=2, seconds=3.0, patience_s=12.0)
    assert detector.judge(103 * SECOND, ["a", "b"], RECOVERY) == [], "once"
    assert detector.next_ns(["a", "b"], RECOVERY) == 112 * SECOND
    assert detector.judge(112 * SECOND - 1, ["a", "b"], RECOVERY) == []
    lost = detector.judge(112 * SECOND, ["a", "b"], RECOVERY)
    assert [(one.node, one.cause) for one in lost if isinstance(one, NodeLost)] == [
        ("a", "silent"),
        ("b", "silent"),
    ]
    assert detector.next_ns(["a", "b"], RECOVERY) is None


def test_a_rough_deadline_walks_over_the_nodes_only_after_the_earliest_loss() -> None:
    detector = silent("a", "b")
    detector.judge(101 * SECOND, ["a", "b"], RECOVERY)
    nodes = iter(["a", "b"])
    assert detector.next_ns(nodes, RECOVERY, rough=True) == 103 * SECOND
    assert list(nodes) == ["a", "b"], "they were not read"
    detector.judge(103 * SECOND, ["a", "b"], RECOVERY)
    assert detector.next_ns(["a", "b"], RECOVERY, rough=True) == 112 * SECOND


def test_heartbeats_that_resume_are_reported_once_with_the_time() -> None:
    detector = silent("a", "b")
    detector.judge(103 * SECOND, ["a", "b"], RECOVERY)
    detector.observed(107 * SECOND, "a", RECOVERY)
    assert detector.judge(107 * SECOND, ["a", "b"], RECOVERY) == [HeartbeatsRestored(seconds=7.0)]
    assert detector.judge(107 * SECOND, ["a", "b"], RECOVERY) == []
    assert detector.ended_ns == 107 * SECOND
    assert detector.next_ns(["a", "b"], RECOVERY) == 108_500_000_000, "half a timeout more for b"
    detector.observed(108 * SECOND, "a", RECOVERY)
    assert detector.judge(108_499_999_999, ["a", "b"], RECOVERY) == []
    (lost,) = detector.judge(108_500_000_000, ["a", "b"], RECOVERY)
    assert isinstance(lost, NodeLost) and lost.node == "b"
    assert lost.detail == "no heartbeat for 8.5 s; the limit is 3 s"


def test_half_a_timeout_without_any_heartbeat_is_a_time_without_heartbeats() -> None:
    detector = silent("a", "b")
    detector.observed(101_499_999_999, "a", RECOVERY)
    assert detector.ended_ns == 0
    detector.observed(101_499_999_999 + 1_500_000_000, "a", RECOVERY)
    assert detector.ended_ns == 102_999_999_999


def test_a_node_that_is_gone_is_not_watched_any_more() -> None:
    detector = silent("a", "b")
    assert detector.judge(101 * SECOND, ["a"], RECOVERY) == []
    assert detector.last_ns("b") == 0
    assert detector.judge(103 * SECOND, ["a"], RECOVERY) == [
        HeartbeatsLost(nodes=1, seconds=3.0, patience_s=12.0)
    ]
    assert detector.judge(104 * SECOND, [], RECOVERY) == []
    detector.observed(105 * SECOND, "c", RECOVERY)
    assert detector.judge(105 * SECOND, ["c"], RECOVERY) == [], "no node was left to restore"


def test_a_message_that_waits_keeps_its_node_alive() -> None:
    detector = silent("a", "b")
    detector.arrived(102 * SECOND, "b", RECOVERY)
    detector.observed(102 * SECOND, "a", RECOVERY)
    assert detector.next_ns(["a", "b"], RECOVERY) == 105 * SECOND
    assert detector.last_ns("b") == 100 * SECOND, "it is not observed yet"
    assert detector.judge(102 * SECOND, ["a", "b"], RECOVERY) == []
    assert detector.next_ns(["a", "b"], RECOVERY) == 105 * SECOND


def test_nodes_are_current_for_one_and_a_half_heartbeat_intervals() -> None:
    detector, interval_s = silent("a", "b"), RECOVERY.heartbeat_interval_s
    until_ns = 100 * SECOND + round(1.5 * interval_s * SECOND)
    assert detector.current_at(until_ns, ["a", "b"], RECOVERY)
    detector.observed(until_ns, "a", RECOVERY)
    assert not detector.current_at(until_ns + 1, ["a", "b"], RECOVERY), "b is late"


def test_the_only_node_is_named_as_such() -> None:
    job = Transcript(spec({"min": 1, "max": 1})).started("a")
    job.apply(HeartbeatsLost(nodes=1, seconds=3.0, patience_s=12.0))
    text = (
        "no heartbeat from the only node for 3.0 s: this machine may be overloaded or "
        "disconnected; it is declared lost after 12 s"
    )
    assert job.state.reason.text == text and job.state.notes[-1][1] == text
    job.exits(0, signal=9)
    job.apply(HeartbeatsRestored(seconds=4.0))
    assert job.state.phase == "recovering"
    assert job.state.reason.text == "worker 0 on a ended with signal 9"
    assert job.state.notes[-1][1] == "heartbeats arrive again, after 4.0 s without any"
