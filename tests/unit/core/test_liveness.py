"""One silent node is lost; when all are silent, we doubt ourselves first."""

from __future__ import annotations

from holdfast.orchestrator.api.v1alpha1 import Recovery
from holdfast.orchestrator.core.events import (
    AdjustRequested,
    HeartbeatsLost,
    HeartbeatsRestored,
    NodeLost,
    Tick,
)

from .harness import SECOND
from .test_progress_monitor import Watch


def wait(watch: Watch, seconds: float, *, beats: str = "") -> None:
    """Time passes: every deadline on the way is looked at; the nodes named in `beats` beat on."""
    until = watch.story.now + round(seconds * SECOND)
    beat_at = watch.story.now + SECOND // 2
    looks = 0
    while watch.story.now < until:
        looks += 1
        assert looks < 1000, "the monitor keeps its loop busy"
        due = watch.monitor.next_deadline_ns()
        if due is not None and due <= (min(beat_at, until) if beats else until):
            assert due >= watch.story.now
            watch.story.now = due
            watch.give(Tick())
        elif beats and beat_at <= until:
            watch.story.now, beat_at = beat_at, beat_at + SECOND // 2
            for node in beats:
                watch.beat(9, node=node)
        else:
            watch.story.now = until


def lost(watch: Watch) -> dict[str, str]:
    return {v.node: v.detail for v in watch.verdicts if isinstance(v, NodeLost)}


def trained() -> Watch:
    watch = Watch()
    watch.train(8)
    return watch


def test_a_silence_of_all_is_put_down_to_ourselves_and_costs_nothing_when_it_ends() -> None:
    watch = trained()
    wait(watch, 9.0)
    assert lost(watch) == {}
    (doubt,) = [v for v in watch.verdicts if isinstance(v, HeartbeatsLost)]
    assert (doubt.nodes, doubt.seconds, doubt.patience_s) == (2, 3.0, 12.0)
    assert "no heartbeat from any of 2 nodes for 3.0 s" in watch.story.state.reason.text
    assert watch.story.state.phase == "running"
    watch.beat(8)
    wait(watch, 20.0, beats="ab")
    assert lost(watch) == {} and not watch.hangs
    (again,) = [v for v in watch.verdicts if isinstance(v, HeartbeatsRestored)]
    assert again.seconds == 9.0
    assert "heartbeats arrive again, after 9.0 s" in watch.story.state.reason.text


def test_when_truly_all_are_lost_it_is_believed_after_four_timeouts() -> None:
    watch = trained()
    began = watch.story.now
    wait(watch, 11.9)
    assert lost(watch) == {}
    wait(watch, 0.2)
    assert list(lost(watch)) == ["a", "b"]
    assert "no heartbeat for 12.0 s; the limit is 3 s, 12 s when no node" in lost(watch)["a"]
    assert watch.story.now - began < 12.2 * SECOND
    assert watch.story.state.incidents[-1].title == "a and 1 more were lost (silent)"
    wait(watch, 60.0)
    assert len([v for v in watch.verdicts if isinstance(v, HeartbeatsLost)]) == 1


def test_who_stays_silent_when_the_others_are_heard_again_is_lost_half_a_timeout_later() -> None:
    watch = trained()
    wait(watch, 5.0)
    watch.beat(8, node="a")
    wait(watch, 1.4, beats="a")
    assert lost(watch) == {}
    wait(watch, 0.2, beats="a")
    assert list(lost(watch)) == ["b"]
    assert "no heartbeat for 6.5 s" in lost(watch)["b"]


def test_a_pause_of_all_shortly_before_does_not_put_a_verdict_off_for_ever() -> None:
    """The survivor of two is starved and speaks every other second only."""
    watch = trained()
    for _ in range(5):
        wait(watch, 2.0)
        watch.beat(8, node="a")
    assert lost(watch) == {}
    wait(watch, 2.0)
    assert "b" in lost(watch) and "a" not in lost(watch)


def test_one_that_is_silent_alone_is_lost_without_any_doubt() -> None:
    watch = trained()
    wait(watch, 3.1, beats="a")
    assert list(lost(watch)) == ["b"]
    assert not [v for v in watch.verdicts if isinstance(v, HeartbeatsLost)]


def test_news_that_wait_to_be_observed_end_the_silence_too() -> None:
    watch = trained()
    wait(watch, 5.0)
    watch.monitor.arrived(watch.story.now, "a")
    wait(watch, 1.0)
    assert [type(v) for v in watch.verdicts if isinstance(v, HeartbeatsRestored | NodeLost)] == []
    watch.give(Tick())
    assert [v.seconds for v in watch.verdicts if isinstance(v, HeartbeatsRestored)] == [5.0]
    assert lost(watch) == {}


def test_workers_that_stood_still_while_all_were_silent_are_not_called_hung() -> None:
    watch = trained()
    wait(watch, 8.0)
    watch.beat(7, quiet_s=8.0)
    wait(watch, 1.0, beats="")
    watch.beat(8, quiet_s=0.0)
    wait(watch, 2.0, beats="ab")
    assert not watch.hangs


def test_a_worker_that_does_not_go_on_after_it_is_hung() -> None:
    watch = trained()
    wait(watch, 6.0)
    watch.quiet(10.0, step=7, stopped=(2,))
    (hang,) = watch.hangs
    assert hang.ranks[0] == 2


def test_a_replay_says_the_same() -> None:
    watch = trained()
    wait(watch, 5.0)
    assert watch.story.replayed().state == watch.story.state


def test_nobody_is_late_by_an_interval_that_was_not_asked_for_when_it_beat_last() -> None:
    """From a beat in five seconds and a patience of twenty to the defaults."""
    slow = {"heartbeatIntervalSeconds": 5, "heartbeatTimeoutSeconds": 20}
    watch = Watch(recovery=slow)
    watch.beat(0, node="a")
    watch.story.now += 4 * SECOND
    watch.beat(0, node="b")
    quick = AdjustRequested(min_nodes=1, spares=0, recovery=Recovery().model_dump(by_alias=True))
    watch.story.tell(quick)
    watch.give(quick)
    wait(watch, 2.9)
    assert lost(watch) == {}
    watch.beat(1)  # as they have just been asked for
    wait(watch, 10.0, beats="b")
    assert set(lost(watch)) == {"a"}, "from now on three seconds count"
