"""Steps that a script reports by itself, and what is estimated where a framework reports less."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.protocol.facts import WorkerSeat
from holdfast.workers.agent.machine.generation import Worker
from holdfast.workers.agent.machine.script_progress import SECOND_NS, ScriptProgress
from holdfast.workers.worker_protocol import FromWorker, Progress, Pulse, Reported


def _posts(progress: ScriptProgress, *posts: tuple[float, int]) -> list[Reported | None]:
    """(second, last finished step; -1: it begins)."""
    return [
        progress.received(
            int(second * SECOND_NS), Reported(step=step, total_steps=400, source="posted")
        )
        for second, step in posts
    ]


def test_a_script_that_reports_each_step_began_before_its_first_one() -> None:
    progress = ScriptProgress()
    assert progress.source == ""
    first = Reported(step=60, step_s=0.0)
    assert progress.received(0, first) == first
    progress.received(SECOND_NS, Reported(step=61))
    assert (progress.source, progress.began_after) == ("script", 59)
    assert progress.began_s(SECOND_NS) is None


@pytest.mark.parametrize(
    ("steps", "after_one", "after_two"),
    [
        ((0, 1), (-1, False), (-1, False)),
        ((60, 61), (59, True), (59, False)),
        ((59, 69), (58, True), (49, True)),  # a checkpoint of step 50, a report of every tenth
        ((9, 19), (8, True), (-1, True)),
    ],
)
def test_the_second_report_shows_how_many_steps_come_before_the_first(
    steps: tuple[int, int], after_one: tuple[int, bool], after_two: tuple[int, bool]
) -> None:
    progress = ScriptProgress()
    progress.received(0, Reported(step=steps[0]))
    assert (progress.began_after, progress.began_estimated) == after_one
    progress.received(SECOND_NS, Reported(step=steps[1]))
    assert (progress.began_after, progress.began_estimated) == after_two
    progress.received(2 * SECOND_NS, Reported(step=steps[1] + 500))
    assert (progress.began_after, progress.began_estimated) == after_two


def test_a_worker_that_says_where_it_begins_is_believed_until_it_has_reported() -> None:
    progress = ScriptProgress()
    progress.begins(None)
    assert progress.began_after is None
    progress.begins(50)
    progress.received(0, Reported(step=59))
    progress.begins(-1)  # a second training in the same process
    progress.received(SECOND_NS, Reported(step=69))
    assert (progress.began_after, progress.began_estimated) == (50, False)
    progress.counted_by_session()
    progress.begins(7)
    assert progress.began_after is None


def test_a_second_training_in_the_same_process_goes_on_counting() -> None:
    progress = ScriptProgress()
    steps = [(0, 3), (1, 3), (2, 3), (0, 5), (1, 5)]
    found = [progress.received(0, Reported(step=s, total_steps=total)) for s, total in steps]
    assert [one.step for one in found if one] == [0, 1, 2, 3, 4]
    assert [one.total_steps for one in found if one] == [3, 3, 3, 8, 8]


def test_posts_every_few_seconds_give_the_step_time_and_an_estimate_of_the_beginning() -> None:
    progress = ScriptProgress()
    begun, first, second = _posts(progress, (10.0, -1), (15.0, 84), (20.0, 109))
    assert begun is None and first is not None and second is not None
    assert second.step_s == 5.0 / 25
    assert progress.began_after == 84 - 25, "5 s before the first post that has a step"
    assert progress.began_s(int(20.0 * SECOND_NS)) == 10.0


def test_a_post_that_goes_back_says_nothing() -> None:
    progress = ScriptProgress()
    posted = _posts(progress, (0.0, -1), (5.0, 10), (6.0, 10), (7.0, 3), (8.0, 16))
    assert [one.step for one in posted if one] == [10, 16]
    assert posted[-1] is not None and posted[-1].step_s == 0.5


def test_an_exact_source_takes_the_place_of_posts() -> None:
    progress = ScriptProgress()
    _posts(progress, (0.0, -1), (5.0, 10))
    progress.received(6 * SECOND_NS, Reported(step=12))
    assert progress.source == "script"
    assert _posts(progress, (10.0, 20)) == [None]
    progress.counted_by_session()
    assert progress.received(11 * SECOND_NS, Reported(step=21)) is None


def test_a_framework_that_posts_does_not_tell_where_a_session_began() -> None:
    """Holdfast has restored the state: an estimate would count steps as lost that were not."""
    progress = ScriptProgress()
    _posts(progress, (0.0, -1), (5.0, 10), (10.0, 20))
    progress.counted_by_session()
    assert (progress.source, progress.began_after) == ("session", None)
    assert progress.began_s(11 * SECOND_NS) is None
    assert _posts(progress, (15.0, -1), (20.0, 40)) == [None, None]
    assert progress.began_s(21 * SECOND_NS) is None


def test_the_end_of_a_training_is_its_last_step_if_the_time_was_enough_for_the_rest() -> None:
    last = Reported(step=-1, source="posted", finished=True, loss=0.5)
    progress = ScriptProgress()
    _posts(progress, (0.0, -1), (5.0, 289), (10.0, 389))
    found = progress.received(int(10.6 * SECOND_NS), last)
    assert found is not None and (found.step, found.total_steps, found.loss) == (399, 400, 0.5)
    early = ScriptProgress()
    _posts(early, (0.0, -1), (5.0, 100), (10.0, 200))
    assert early.received(int(10.6 * SECOND_NS), last) is None, "it stopped after an unknown step"


def test_a_framework_that_says_where_it_begins_is_believed_from_its_first_step_on() -> None:
    progress = ScriptProgress()
    _posts(progress, (9.0, -1))
    begins = Reported(step=-1, began_after=69, source="counted")
    assert progress.received(10 * SECOND_NS, begins) is None
    assert progress.began_after is None, "until a step it may be loading"
    assert _posts(progress, (11.0, -1), (16.0, 74)) == [None, None]
    assert progress.began_s(20 * SECOND_NS) is None, "no estimate is needed"
    step = Reported(step=70, step_s=0.2, source="counted")
    assert progress.received(20 * SECOND_NS, step) == step
    assert (progress.source, progress.began_after) == ("counted", 69)
    assert not progress.began_estimated
    report = Reported(step=70)
    assert progress.received(20 * SECOND_NS, report) == report, "of Holdfast's callback"
    assert (progress.began_after, progress.began_estimated) == (69, False)
    assert progress.received(22 * SECOND_NS, Reported(step=72, source="counted")) is None


def test_a_counted_step_before_the_beginning_shows_nothing_of_it() -> None:
    progress = ScriptProgress()
    progress.received(0, Reported(step=-1, began_after=69, source="counted"))
    progress.received(SECOND_NS, Reported(step=0, source="counted"))  # another training
    assert progress.began_after == -1


@pytest.mark.parametrize(
    ("before", "quiet_s"),
    [
        (Pulse(), 1.0),
        (Reported(step=3), 1.0),
        (Reported(step=3, source="posted"), 1.0),
        (Reported(step=3, source="counted"), 1.0),
        (Progress(step=3), 4.0),
    ],
)
def test_a_collective_is_progress_unless_the_session_counts_the_steps(
    before: FromWorker, quiet_s: float
) -> None:
    worker = Worker(WorkerSeat(0, 0, 0, True), since_ns=0, idle_s=2.0)
    worker.received(0, before)
    for second, count in ((1, 0), (3, 5), (4, 5)):
        worker.received(second * SECOND_NS, Pulse(collectives=count))
    beat = worker.beat(4 * SECOND_NS, stopped=False)
    assert (beat.collectives, beat.quiet_s) == (5, quiet_s)
