"""Pods that do not start, and jobs that compete for capacity. Time is an argument."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.backends.kubernetes.pod_lifecycle import (
    GangArbiter,
    GangPriority,
    PodTiming,
    StartupTimeouts,
)

LIMIT_S = 120.0
TIMING = PodTiming()
WAIT_S, HOLD_S = TIMING.gang_wait_s, TIMING.gang_hold_s


def scheduled(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "worker", "state": {"running": {}}}],
        },
    }


def stuck(name: str, reason: str = "Unschedulable") -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "no cpu"}
    return {
        "metadata": {"name": name},
        "spec": {},
        "status": {"phase": "Pending", "conditions": [condition]},
    }


def starting(
    gangs: GangArbiter, name: str, created: str = "2026-01-01", needed: int = 2
) -> StartupTimeouts:
    return StartupTimeouts(GangPriority(0, created, name), needed, LIMIT_S, gangs, TIMING)


def incomplete(name: str) -> dict[str, Any]:
    return {f"{name}-1": scheduled(f"{name}-1"), f"{name}-2": stuck(f"{name}-2")}


def test_of_two_incomplete_jobs_the_older_one_keeps_its_nodes() -> None:
    gangs = GangArbiter()
    old = starting(gangs, "old", "2026-01-01T00:00:00Z")
    new = starting(gangs, "new", "2026-01-02T00:00:00Z")
    assert not new.decide(0, incomplete("new")).release
    assert not old.decide(1, incomplete("old")).release
    assert not new.decide(WAIT_S - 1, incomplete("new")).release
    decision = new.decide(WAIT_S, incomplete("new"))
    assert set(decision.release) == {"new-1", "new-2"}
    assert "released to job old, which comes first" in decision.release["new-1"]
    assert decision.hold_off
    assert new.blocked_by() == "old"
    assert not old.decide(WAIT_S + 5, incomplete("old")).release
    whole = {"old-1": scheduled("old-1"), "old-2": scheduled("old-2")}
    assert not old.decide(WAIT_S + 6, whole).release
    assert new.blocked_by() == "", "not blocked once the older job is complete"


def test_priority_goes_before_age() -> None:
    gangs = GangArbiter()
    urgent = StartupTimeouts(GangPriority(-10, "2026-01-02", "urgent"), 2, LIMIT_S, gangs, TIMING)
    old = starting(gangs, "old", "2026-01-01")
    urgent.decide(0, incomplete("urgent"))
    old.decide(0, incomplete("old"))
    assert old.blocked_by() == "urgent"
    assert urgent.blocked_by() == ""


def test_an_incomplete_job_without_a_competitor_releases_its_nodes_later() -> None:
    only = starting(GangArbiter(), "only")
    decision = only.decide(0, incomplete("only"))
    assert not decision.release and decision.due_s is not None and decision.due_s <= HOLD_S
    assert not only.decide(HOLD_S - 1, incomplete("only")).release
    assert set(only.decide(HOLD_S, incomplete("only")).release) == {"only-1", "only-2"}


def test_trained_nodes_wait_for_their_replacement_without_limit() -> None:
    gangs = GangArbiter()
    one, first = starting(gangs, "one", "2026-01-02", needed=4), starting(gangs, "first")
    first.decide(0, incomplete("first"))
    left = {name: scheduled(name) for name in ("one-1", "one-2", "one-3")}
    for at_s in (0, WAIT_S, HOLD_S, LIMIT_S - 1):
        assert not one.decide(at_s, {**left, "one-4": stuck("one-4")}, {*left, "one-0"}).release
    assert first.blocked_by() == "", "it waits, but does not block other jobs without end"
    decision = one.decide(LIMIT_S, {**left, "one-4": stuck("one-4")}, {*left, "one-0"})
    assert set(decision.release) == {"one-4"}
    assert "not started within 120 s" in decision.release["one-4"]


def test_a_replacement_comes_before_younger_jobs_for_a_limited_time() -> None:
    gangs = GangArbiter()
    old, young = starting(gangs, "old", "2026-01-01"), starting(gangs, "young", "2026-01-02")
    pods = incomplete("old")
    old.decide(0, pods, {"old-1"})
    young.decide(0, incomplete("young"))
    assert young.blocked_by() == "old"
    assert "job old, which comes first" in young.decide(WAIT_S, incomplete("young")).hold_off
    for at_s in (HOLD_S, HOLD_S + 1):
        assert not old.decide(at_s, pods, {"old-1"}).release
        assert young.blocked_by() == "", "there may never be capacity"


def test_an_incomplete_job_releases_only_nodes_that_never_trained() -> None:
    one = starting(GangArbiter(), "one", needed=4)
    pods = {"one-1": scheduled("one-1"), "one-2": scheduled("one-2"), "one-3": stuck("one-3")}
    assert not one.decide(0, pods, {"one-1"}).release
    decision = one.decide(HOLD_S, pods, {"one-1"})
    assert set(decision.release) == {"one-2", "one-3"}
    assert "those that never trained are released" in decision.hold_off


def test_a_job_that_can_train_keeps_its_nodes() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    for at_s in (0, HOLD_S, LIMIT_S - 1):
        assert not one.decide(at_s, incomplete("one")).release
    decision = one.decide(LIMIT_S, incomplete("one"))
    assert set(decision.release) == {"one-2"}, "only what did not start in time"
    assert "not started within 120 s: the scheduler finds no node: no cpu" in decision.hold_off


def test_a_pod_that_starts_late_gets_the_full_time_limit_again() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    one.decide(0, {"one-1": stuck("one-1")})
    one.decide(LIMIT_S - 1, {"one-1": scheduled("one-1")})
    assert one.decide(LIMIT_S, {"one-1": stuck("one-1")}).release == {}
    assert one.stuck_since == {"one-1": LIMIT_S}


def test_a_gated_pod_has_no_time_limit() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    gated = {"one-1": stuck("one-1", "SchedulingGated")}
    assert one.decide(0, gated).due_s is None
    assert not one.decide(10 * LIMIT_S, gated).release


def test_a_decision_names_the_time_of_the_next_one() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    assert one.decide(10, {"one-1": stuck("one-1")}).due_s == 10 + LIMIT_S
    assert one.decide(20, {"one-1": stuck("one-1")}).due_s == 10 + LIMIT_S
    assert one.decide(30, {"one-1": scheduled("one-1")}).due_s is None
