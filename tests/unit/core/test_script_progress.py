"""Scripts that keep their own checkpoints: steps that they report, posts of a framework for all
ranks, and what collectives show of a script that says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import (
    AnyEvent,
    CollectivesBegun,
    HangSuspected,
    HeartbeatReceived,
    StepCompleted,
    Tick,
)
from holdfast.orchestrator.core.script_progress import MIN_COLLECTIVES, SUSPECT_AFTER_S
from holdfast.orchestrator.limits import BEGUN_COLLECTIVES
from holdfast.orchestrator.protocol.facts import WorkerBeat
from holdfast.orchestrator.runtime.observe.incidents import IncidentCounter
from holdfast.orchestrator.runtime.observe.incidents import incident as observed
from holdfast.orchestrator.runtime.observe.view import JobView

from .harness import SECOND
from .test_progress_monitor import Watch


class Script(Watch):
    """A script of four ranks on two nodes."""

    def __init__(self, **document: Any) -> None:
        super().__init__(script=True, **document)

    def beats(self, *of_ranks: dict[str, Any], generation: int = 1) -> list[AnyEvent]:
        """What each rank's heartbeat says."""
        found = []
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            workers = tuple(
                WorkerBeat(rank=rank, **{"pulse_age_s": 0.1, **of_ranks[rank]}) for rank in ranks
            )
            event = HeartbeatReceived(node=node, generation=generation, workers=workers)
            found += self.give(event)
        return found

    def posted(self, step: int, generation: int = 1, **more: Any) -> list[AnyEvent]:
        """Rank 0 posts for all."""
        ticks = 1 if step < 0 else 2 + step
        reported = {
            "step": step,
            "ticks": ticks,
            "counted_by": "posted" if step >= 0 else "",
            **more,
        }
        return self.beats(reported, {}, {}, {}, generation=generation)

    def restart(self) -> None:
        self.job.exits(3, signal=9)
        self.job.all_stopped(None)
        self.job.wait(0.5)
        self.job.succeed(LaunchGroup)


def test_one_rank_that_posts_speaks_for_all() -> None:
    watch = Script()
    watch.posted(-1, began_s=0.0)
    assert watch.job.state.step == -1
    watch.posted(24, began_s=5.0, step_s=0.2)
    assert (watch.job.state.step, watch.job.state.counted_by) == (24, "posted")


@pytest.mark.parametrize("source", ["script", "counted"])
def test_a_script_that_reports_recovers_until_its_next_step_and_counts_what_was_lost(
    source: str,
) -> None:
    watch = Script()
    reported = {"counted_by": source, "ticks": 1}
    watch.beats(*[{"step": 83, "began_after": -1, **reported}] * 4)
    watch.restart()
    state = watch.job.state
    assert state.phase == "recovering", "it has reported before, so it is not over yet"
    incident = state.incidents[-1]
    assert incident.resumed_after_step is None and incident.restored_from == ""
    assert "no checkpoint of the script was seen" in incident.decision
    watch.job.wait(8)
    watch.beats(*[{"step": 60, "began_after": 59, **reported}] * 4, generation=2)
    assert state.phase == "running"
    assert (incident.step_before, incident.resumed_after_step) == (83, 59)
    assert incident.first_step_ns == watch.job.now_ns and not incident.at_least


def test_a_script_that_reports_every_tenth_step_has_lost_at_least_those_since_its_checkpoint() -> (
    None
):
    watch = Script()
    reported = {"counted_by": "script", "ticks": 1}
    watch.beats(*[{"step": 89, "began_after": -1, **reported}] * 4)
    watch.restart()
    incident = watch.job.state.incidents[-1]
    watch.beats(
        *[{"step": 59, "began_after": 58, "began_estimated": True, **reported}] * 4, generation=2
    )
    assert (incident.resumed_after_step, incident.resumed_estimated) == (58, True)
    watch.job.wait(1)
    watch.beats(
        *[{"step": 69, "began_after": 49, "began_estimated": True, **reported}] * 4, generation=2
    )
    assert (incident.resumed_after_step, incident.resumed_estimated) == (49, True)
    shown = observed(incident, no_steps=False)
    assert (shown.steps_lost, shown.steps_lost_at_least) == (40, True)
    view = JobView(name="job")
    IncidentCounter().fill(view, watch.job.state, no_steps=False)
    assert (view.steps_lost, view.steps_lost_at_least) == (40, True)
    watch.job.wait(1)
    watch.beats(*[{"step": 79, "began_after": 50, **reported}] * 4, generation=2)
    shown = observed(incident, no_steps=False)
    assert (shown.steps_lost, shown.steps_lost_at_least) == (39, False), "it says where it began"


def test_posts_tell_late_so_the_first_step_and_what_was_lost_are_estimated() -> None:
    watch = Script()
    watch.posted(40, began_s=10.0, step_s=0.0)
    for step in (65, 90):
        watch.job.wait(5)
        watch.posted(step, began_s=15.0, step_s=0.2)
    watch.restart()
    watch.job.wait(7)
    watch.posted(84, generation=2, began_s=5.0)
    incident = watch.job.state.incidents[-1]
    assert incident.first_step_ns == watch.job.now_ns - round(4.8 * SECOND)
    assert incident.resumed_after_step == 84 - 25 and incident.at_least


def test_the_first_post_of_a_launch_has_a_step_time_if_it_is_known_where_that_began() -> None:
    watch = Script()
    found = watch.posted(39, began_s=8.0, step_s=0.2, began_after=-1)
    (done,) = [event for event in found if isinstance(event, StepCompleted)]
    assert (done.step_s, done.began_after) == (0.2, -1)
    assert done.first_ago_s == pytest.approx(7.8), "the rest of its time was no step"


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
        usual = {"collectives": MIN_COLLECTIVES, "collectives_age_s": quiet_s, "quiet_s": quiet_s}
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
    assert "rank 2 has begun no collective for 59.5 s" in hang.evidence
    assert "no step was reported" in hang.evidence


@pytest.mark.parametrize("phase", ["start", "save", "evaluate", "train"])
def test_a_script_that_uses_phases_and_reports_no_step_is_watched_by_its_collectives(
    phase: str,
) -> None:
    """Rank 0 has ticks: it has been in a phase, or is in one. Startup has no part in it."""
    watch = Script(recovery={"startupTimeoutSeconds": 15})
    rank0 = {"phase": phase, "ticks": 6}
    for second in range(60):
        watch.job.now_ns += SECOND
        one = {"collectives": MIN_COLLECTIVES + 10 * second, "quiet_s": 1.0 + second}
        watch.beats(one | rank0, one, one, one)
        watch.give(Tick())
    assert not watch.verdicts[1:] and isinstance(watch.verdicts[0], CollectivesBegun)
    assert watch.job.state.phase == "running" and watch.job.state.counted_by == "collectives"


def test_a_rank_that_hangs_after_it_was_in_a_phase_is_named_by_its_collectives() -> None:
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    watch.job.now_ns += SECOND
    watch.beats({"collectives": MIN_COLLECTIVES + 9, "ticks": 6}, {}, {}, {})
    assert watch.monitor._worst_gap_s == 1, "of a rank that was in a phase too"
    _quiet(watch, 200, {"rank2": "nothing"}, rank0={"ticks": 6, "quiet_s": 300.0})
    (hang,) = watch.hangs
    assert hang.ranks[0] == 2
    assert "rank 2 has begun no collective for 59.5 s" in hang.evidence


@pytest.mark.parametrize("phase", ["evaluate", "save"])
def test_a_declared_phase_of_a_silent_script_may_do_nothing_for_ten_minutes(phase: str) -> None:
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    began = watch.job.now_ns
    # It waits for another machine: it uses no CPU and does no I/O.
    _quiet(watch, 900, {"rank0": "nothing"}, rank0={"phase": phase, "ticks": 5, "quiet_s": 1.0})
    assert not watch.hangs, "it is in a new phase all the time"
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    began = watch.job.now_ns
    _quiet(watch, 900, {"rank0": "nothing"}, rank0={"phase": phase})
    (hang,) = watch.hangs
    assert 600 <= (watch.job.now_ns - began) / SECOND < 603 and hang.ranks[0] == 0


@pytest.mark.parametrize("posted", [{"counted_by": "posted", "ticks": 9}, {"ticks": 1}])
def test_a_program_that_posts_no_step_has_no_start_up_limit(posted: dict[str, Any]) -> None:
    """It may post its percentage alone."""
    watch = Script(recovery={"startupTimeoutSeconds": 15})
    for _ in range(40):
        watch.job.now_ns += SECOND
        watch.beats(posted, {}, {}, {})
        watch.give(Tick())
    assert not watch.hangs


@pytest.mark.parametrize("outside", [True, False])
def test_a_starved_machine_is_an_excuse_only_for_ranks_that_are_all_in_collectives(
    outside: bool,
) -> None:
    """Standbys that import a library keep the machine busy for half a minute after each restart."""
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    began = watch.job.now_ns
    ranks = {"rank0": "peers", "rank1": "peers", "rank2": "peers", "rank3": "peers"}
    activities = ranks | ({"rank2": "nothing"} if outside else {})
    _quiet(watch, 20, activities)
    watch.give(HeartbeatReceived(node="a", generation=1, cpu_pressure=0.9))
    _quiet(watch, 200, activities, since_s=20.0)
    assert len(watch.hangs) == 1
    waited_s = (watch.job.now_ns - began) / SECOND
    assert 60 <= waited_s < 63 if outside else waited_s > 85


@pytest.mark.parametrize("first_s, limit_s", [(1.0, 60.0), (100.0, 300.0), (400.0, 600.0)])
def test_a_framework_that_has_posted_one_step_is_watched_by_its_collectives(
    first_s: float, limit_s: float
) -> None:
    """How long a step takes is not known yet: at most as long as the launch to the first one."""
    watch = Script()
    begins = watch.job.state.launched_ns + round(first_s * SECOND)
    while watch.job.now_ns < begins:
        watch.posted(-1, began_after=-1)
        watch.job.now_ns = min(watch.job.now_ns + SECOND, begins)
    watch.posted(3, began_s=1.0, step_s=0.2, collectives=MIN_COLLECTIVES)
    began = watch.job.now_ns
    reported = {"counted_by": "posted", "step": 3, "ticks": 5, "step_s": 0.2}
    _quiet(watch, 10, {"rank2": "nothing"}, rank0=reported)
    assert any(isinstance(event, HangSuspected) for event in watch.verdicts) and not watch.hangs
    _quiet(watch, 800, {"rank2": "nothing"}, since_s=10.0, rank0=reported)
    (hang,) = watch.hangs
    assert hang.ranks[0] == 2 and limit_s <= (watch.job.now_ns - began) / SECOND < limit_s + 3


def test_a_silent_script_that_computes_or_has_hardly_begun_does_not_hang() -> None:
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    _quiet(watch, 900, {"rank2": "nothing"}, rank2={"idle_s": 0.0})
    assert not watch.hangs, "it evaluates"
    fresh = Script()
    fresh.beats(*[{"collectives": MIN_COLLECTIVES - 1}] * 4)
    few = {f"rank{r}": {"collectives": 3} for r in range(4)}
    _quiet(fresh, 590, {"rank2": "nothing"}, **few)
    assert not fresh.hangs, "it may still be loading"
    _quiet(fresh, 900, {"rank2": "nothing"}, since_s=590, **few)
    (hang,) = fresh.hangs
    assert "start-up limit is 600.0 s" in hang.evidence, "no rank does anything: a stale lock"
    works = {**few, "rank1": {"collectives": 3, "idle_s": 0.0}}
    busy = Script()
    busy.beats(*[{"collectives": MIN_COLLECTIVES - 1}] * 4)
    _quiet(busy, 900, {"rank2": "nothing"}, **works)
    assert not busy.hangs, "a rank computes or reads"
    _quiet(busy, 900, {"rank2": "nothing"}, **few)
    assert not busy.hangs, "it has worked for longer than the limit and waits now"


def test_a_pause_that_ended_by_itself_makes_the_next_one_longer() -> None:
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    watch.job.now_ns += 50 * SECOND
    watch.beats(*[{"collectives": MIN_COLLECTIVES + 1}] * 4)
    assert watch.monitor._worst_gap_s == 50


def test_suspicion_of_a_silent_script_comes_early() -> None:
    watch = Script()
    watch.beats(*[{"collectives": MIN_COLLECTIVES}] * 4)
    _quiet(watch, SUSPECT_AFTER_S + 1, {"rank2": "nothing"})
    assert any(isinstance(event, HangSuspected) for event in watch.verdicts) and not watch.hangs


def test_a_framework_that_posts_may_evaluate_but_not_sleep() -> None:
    for idle in (True, False):
        watch = Script()
        for post in range(8):
            watch.posted(25 * post, began_s=5.0 * post, step_s=0.2)
            watch.job.now_ns += 5 * SECOND
        began = watch.job.now_ns
        reported = {"counted_by": "posted", "step": 175, "ticks": 177, "step_s": 0.2}
        while watch.job.now_ns < began + 120 * SECOND and not watch.hangs:
            watch.job.now_ns += SECOND // 2
            quiet_s = (watch.job.now_ns - began) / SECOND + 5
            rest = {"idle_s": quiet_s} if idle else {}
            found = watch.beats({**reported, "quiet_s": quiet_s, **rest}, rest, rest, rest)
            if any(isinstance(event, HangSuspected) for event in found):
                watch.inspect(rank1="nothing")
        assert bool(watch.hangs) is idle
        if idle:
            assert watch.hangs[0].ranks[0] == 1
            assert (watch.job.now_ns - began) / SECOND < 10


def test_an_incident_of_a_silent_script_is_over_when_its_ranks_begin_collectives_again() -> None:
    watch = Script()
    state = watch.job.state
    watch.job.succeed(LaunchGroup)
    assert state.phase == "running", "it may never begin any"
    for count in (3, BEGUN_COLLECTIVES, 40):
        watch.beats(*[{"collectives": count}] * 4)
    assert state.counted_by == "collectives"
    assert len([v for v in watch.verdicts if isinstance(v, CollectivesBegun)]) == 1
    watch.restart()
    assert state.phase == "recovering"
    watch.job.wait(6)
    watch.beats(*[{"collectives": BEGUN_COLLECTIVES}] * 4, generation=2)
    (incident,) = state.incidents
    assert state.phase == "running" and incident.first_step_ns == watch.job.now_ns
    assert incident.resumed_after_step is None and incident.shows_progress


def test_the_ranks_that_remain_when_the_one_that_posts_has_ended_do_not_hang() -> None:
    watch = Script()
    for post in range(8):
        watch.posted(25 * post, began_s=5.0 * post, step_s=0.2)
        watch.job.now_ns += 5 * SECOND
    watch.job.exits(0, code=0, step=175)
    for _ in range(200):
        watch.job.now_ns += SECOND // 2
        watch.posted(175, step_s=0.2)
        watch.give(Tick())
    assert not watch.hangs
    assert not any(isinstance(event, HangSuspected) for event in watch.verdicts)
