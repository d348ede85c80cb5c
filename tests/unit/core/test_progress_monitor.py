"""The monitor: silence, hangs, progress."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.core.events import (
    AnyEvent,
    ControllerStarted,
    HangDetected,
    HeartbeatReceived,
    NodeJoined,
    NodeLost,
    StepCompleted,
    StragglerDetected,
    Tick,
    WorkerExited,
)
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.protocol.facts import Exit, WorkerBeat

from .harness import SECOND, Transcript, facts, spec


class Watch:
    """A job of four ranks on two nodes that trains, with beats as a test says."""

    def __init__(self, **document: Any) -> None:
        self.story = Transcript(spec(**document)).started(step=None)
        self.monitor = ProgressMonitor(self.story.state.job, self.story.controller)
        self.verdicts: list[AnyEvent] = []
        for node in ("a", "b"):
            self.give(NodeJoined(node=node, facts=facts(node), generation=1))

    def give(self, event: AnyEvent) -> list[AnyEvent]:
        found = list(self.monitor.observe(self.story.now, event))
        self.verdicts += found
        for verdict in found:
            self.story.tell(verdict)
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
                    )
                    for rank in ranks
                )  # fmt: skip
                found += self.give(HeartbeatReceived(node=name, generation=1, workers=beats))
        return found

    def train(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.story.now += SECOND // 2
            self.beat(step)

    def quiet(self, seconds: float, **more: Any) -> None:
        """Beats go on, steps do not. Stops at the first hang."""
        until = self.story.now + round(seconds * SECOND)
        last, since = more.pop("step"), self.story.now
        while self.story.now < until and not self.hangs:
            due = self.monitor.next_deadline_ns()
            beat_at = self.story.now + SECOND // 2
            if due is not None and due < beat_at:
                self.story.now = due
                self.give(Tick())
                continue
            self.story.now = beat_at
            self.beat(last, quiet_s=(self.story.now - since) / SECOND, **more)

    @property
    def hangs(self) -> list[HangDetected]:
        return [v for v in self.verdicts if isinstance(v, HangDetected)]

    @property
    def steps(self) -> list[int]:
        return [v.step for v in self.verdicts if isinstance(v, StepCompleted)]


def test_the_first_step_of_all_ranks_is_told_at_once() -> None:
    watch = Watch()
    assert not watch.beat(0, node="a"), "half of the ranks"
    (told,) = watch.beat(0, node="b")
    assert isinstance(told, StepCompleted)
    assert (told.step, told.generation, told.loss) == (0, 1, 1.5)
    assert watch.story.state.phase == "running"


def test_later_steps_are_told_about_once_a_second() -> None:
    watch = Watch()
    watch.train(10)
    assert watch.steps == [0, 2, 4, 6, 8]


def test_a_step_that_was_not_told_is_told_when_the_generation_breaks() -> None:
    watch = Watch()
    watch.train(4)
    watch.give(WorkerExited(node="a", generation=1, exit=Exit(rank=0, signal=9)))
    assert watch.steps == [0, 2, 3]


def test_a_silent_node_is_lost_after_the_timeout_and_not_before() -> None:
    watch = Watch()
    watch.train(3)
    began = watch.story.now
    for _ in range(5):
        watch.story.now += SECOND // 2
        watch.beat(2, node="a")
    assert watch.monitor.next_deadline_ns() == began + 3 * SECOND
    watch.story.now = began + 3 * SECOND
    (lost,) = [v for v in watch.give(Tick()) if isinstance(v, NodeLost)]
    assert (lost.node, lost.cause) == ("b", "silent")
    assert "no heartbeat for 3.0 s" in lost.detail


def test_a_hang_is_noticed_within_three_seconds_and_three_steps() -> None:
    watch = Watch()
    watch.train(10)
    began = watch.story.now
    watch.quiet(20, step=9, stopped=(3,))
    (hang,) = watch.hangs
    assert (watch.story.now - began) / SECOND <= 3 + 3 * 0.5
    assert hang.ranks[0] == 3
    assert "rank 3 is stopped" in hang.evidence
    assert "3 s + 3 x 0.50 s" in hang.evidence


def test_a_blocked_interpreter_is_the_next_suspect() -> None:
    watch = Watch()
    watch.train(10)
    watch.quiet(20, step=9, stale=(1,))
    assert watch.hangs[0].ranks[0] == 1


def test_who_is_behind_is_the_next_suspect() -> None:
    watch = Watch()
    watch.train(10)
    watch.story.now += SECOND // 2
    watch.beat(10, node="a")
    watch.quiet_from = watch.story.now  # type: ignore[attr-defined]
    while not watch.hangs:
        watch.story.now += SECOND // 2
        quiet = (watch.story.now - watch.quiet_from) / SECOND  # type: ignore[attr-defined]
        watch.beat(10, node="a", quiet_s=quiet)
        watch.beat(9, node="b", quiet_s=quiet + 0.5)
    assert watch.hangs[0].ranks[0] in (2, 3)


def test_no_hang_is_called_while_the_limit_is_not_learned() -> None:
    watch = Watch()
    watch.train(3)
    watch.quiet(60, step=2)
    assert not watch.hangs


def test_start_up_has_a_limit_of_its_own() -> None:
    watch = Watch(recovery={"startupTimeoutSeconds": 20})
    watch.story.now += SECOND
    watch.beat(-1, phase="start")
    watch.quiet(60, step=-1, phase="start")
    assert "start-up limit is 20.0 s" in watch.hangs[0].evidence


def test_a_phase_that_is_no_training_may_be_quiet() -> None:
    watch = Watch()
    watch.train(10)
    watch.quiet(100, step=9, phase="evaluate")
    assert not watch.hangs


def test_the_limit_can_be_fixed() -> None:
    watch = Watch(recovery={"hangTimeoutSeconds": 12})
    watch.train(3)
    watch.quiet(11, step=2)
    assert not watch.hangs
    watch = Watch(recovery={"hangTimeoutSeconds": 12})
    watch.train(3)
    watch.quiet(14, step=2)
    assert watch.hangs


def test_a_rank_whose_agent_is_not_heard_is_not_called_hung() -> None:
    watch = Watch(recovery={"heartbeatTimeoutSeconds": 60})
    watch.train(10)
    for _ in range(40):
        watch.story.now += SECOND // 2
        watch.beat(9, node="a", quiet_s=0.0)
        watch.give(Tick())
    assert not watch.hangs


def test_a_script_that_never_speaks_is_held_to_nothing() -> None:
    story = Transcript(spec(script=True)).started(step=None)
    monitor = ProgressMonitor(story.state.job, story.controller)
    monitor.observe(story.now, NodeJoined(node="a", facts=facts("a"), generation=1))
    for _ in range(2000):
        story.now += SECOND
        beats = tuple(WorkerBeat(rank=rank) for rank in (0, 1))
        assert not monitor.observe(
            story.now, HeartbeatReceived(node="a", generation=1, workers=beats)
        )


def test_a_hang_that_began_while_the_controller_was_away_is_noticed() -> None:
    watch = Watch()
    watch.train(10)
    story = watch.story
    story.controller = story.replayed()
    watch.monitor = ProgressMonitor(story.state.job, story.controller)
    for now_ns, event in story.journal:
        watch.monitor.observe(now_ns, event)
    story.now += 2 * SECOND
    started = ControllerStarted(incarnation=2)
    story.tell(started)
    watch.give(started)
    for node in ("a", "b"):
        joined = NodeJoined(
            node=node, facts=facts(node), generation=1,
            ranks=tuple(seat.rank for seat in story.state.launch_actions[node].seats),
        )  # fmt: skip
        story.tell(joined)
        watch.give(joined)
    watch.quiet(10, step=9, stopped=(2,))
    assert watch.hangs[0].ranks[0] == 2


def test_a_straggler_is_noted_once() -> None:
    watch = Watch()
    for step in range(40):
        watch.story.now += SECOND
        watch.beat(step, node="a", step_s=0.4)
        watch.beat(step, node="b", step_s=0.9)
    slow = [v for v in watch.verdicts if isinstance(v, StragglerDetected)]
    assert [v.node for v in slow] == ["b"]
    assert "0.90 s a step, 0.40 s on the others" in slow[0].evidence


def test_a_beat_of_an_old_generation_is_no_progress() -> None:
    watch = Watch()
    watch.train(3)
    late = WorkerBeat(rank=0, phase="train", step=99, ticks=999)
    assert not watch.give(HeartbeatReceived(node="a", generation=0, workers=(late,)))
    assert watch.steps[-1] == 2
