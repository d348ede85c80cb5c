"""Pods that do not start, and jobs that compete for a gang's room. Time is an argument."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.backends.kubernetes.gang_arbiter import (
    HOLD_S,
    PATIENCE_S,
    GangArbiter,
    GangPriority,
)
from holdfast.orchestrator.backends.kubernetes.startup_timeouts import StartupTimeouts

LIMIT_S = 120.0


def placed(name: str) -> dict[str, Any]:
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
    return StartupTimeouts(GangPriority(0, created, name), needed, LIMIT_S, gangs)


def half(name: str) -> dict[str, Any]:
    return {f"{name}-1": placed(f"{name}-1"), f"{name}-2": stuck(f"{name}-2")}


def test_of_two_jobs_with_half_a_gang_each_the_older_one_keeps_its_half() -> None:
    gangs = GangArbiter()
    old = starting(gangs, "old", "2026-01-01T00:00:00Z")
    new = starting(gangs, "new", "2026-01-02T00:00:00Z")
    assert not new.look(0, half("new")).give_back
    assert not old.look(1, half("old")).give_back
    assert not new.look(PATIENCE_S - 1, half("new")).give_back
    decision = new.look(PATIENCE_S, half("new"))
    assert set(decision.give_back) == {"new-1", "new-2"}
    assert "given back to job old, which came first" in decision.give_back["new-1"]
    assert decision.hold_off
    assert new.blocked_by() == "old"
    assert not old.look(PATIENCE_S + 5, half("old")).give_back
    whole = {"old-1": placed("old-1"), "old-2": placed("old-2")}
    assert not old.look(PATIENCE_S + 6, whole).give_back
    assert new.blocked_by() == "", "the way is free when the older one has what it needs"


def test_priority_goes_before_age() -> None:
    gangs = GangArbiter()
    urgent = StartupTimeouts(GangPriority(-10, "2026-01-02", "urgent"), 2, LIMIT_S, gangs)
    old = starting(gangs, "old", "2026-01-01")
    urgent.look(0, half("urgent"))
    old.look(0, half("old"))
    assert old.blocked_by() == "urgent"
    assert urgent.blocked_by() == ""


def test_half_a_gang_that_competes_with_nobody_known_is_given_back_later() -> None:
    only = starting(GangArbiter(), "only")
    decision = only.look(0, half("only"))
    assert not decision.give_back and decision.due_s is not None and decision.due_s <= HOLD_S
    assert not only.look(HOLD_S - 1, half("only")).give_back
    assert set(only.look(HOLD_S, half("only")).give_back) == {"only-1", "only-2"}


def test_nodes_that_have_trained_wait_for_their_replacement_as_long_as_it_takes() -> None:
    gangs = GangArbiter()
    one, first = starting(gangs, "one", "2026-01-02", needed=4), starting(gangs, "first")
    first.look(0, half("first"))
    left = {name: placed(name) for name in ("one-1", "one-2", "one-3")}
    for at_s in (0, PATIENCE_S, HOLD_S, LIMIT_S - 1):
        assert not one.look(at_s, {**left, "one-4": stuck("one-4")}, {*left, "one-0"}).give_back
    assert first.blocked_by() == "", "it waits with what it has, and holds up nobody for ever"
    decision = one.look(LIMIT_S, {**left, "one-4": stuck("one-4")}, {*left, "one-0"})
    assert set(decision.give_back) == {"one-4"}
    assert "not started within 120 s" in decision.give_back["one-4"]


def test_the_replacement_of_a_job_that_trained_comes_before_younger_jobs_for_a_while() -> None:
    gangs = GangArbiter()
    old, young = starting(gangs, "old", "2026-01-01"), starting(gangs, "young", "2026-01-02")
    pods = half("old")
    old.look(0, pods, {"old-1"})
    young.look(0, half("young"))
    assert young.blocked_by() == "old"
    assert "job old, which came first" in young.look(PATIENCE_S, half("young")).hold_off
    for at_s in (HOLD_S, HOLD_S + 1):
        assert not old.look(at_s, pods, {"old-1"}).give_back
        assert young.blocked_by() == "", "it may be that there never is room"


def test_of_nodes_that_are_not_enough_those_that_never_trained_are_given_back() -> None:
    one = starting(GangArbiter(), "one", needed=4)
    pods = {"one-1": placed("one-1"), "one-2": placed("one-2"), "one-3": stuck("one-3")}
    assert not one.look(0, pods, {"one-1"}).give_back
    decision = one.look(HOLD_S, pods, {"one-1"})
    assert set(decision.give_back) == {"one-2", "one-3"}
    assert "the room of those that never trained is given back" in decision.hold_off


def test_a_job_that_has_enough_to_train_keeps_what_it_has() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    for at_s in (0, HOLD_S, LIMIT_S - 1):
        assert not one.look(at_s, half("one")).give_back
    decision = one.look(LIMIT_S, half("one"))
    assert set(decision.give_back) == {"one-2"}, "what did not start in time, and only that"
    assert "not started within 120 s: the scheduler finds no place: no cpu" in decision.hold_off


def test_a_pod_that_starts_after_all_is_forgiven() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    one.look(0, {"one-1": stuck("one-1")})
    one.look(LIMIT_S - 1, {"one-1": placed("one-1")})
    assert one.look(LIMIT_S, {"one-1": stuck("one-1")}).give_back == {}
    assert one.troubled == {"one-1": LIMIT_S}


def test_a_pod_behind_a_queues_gate_waits_as_long_as_it_takes() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    gated = {"one-1": stuck("one-1", "SchedulingGated")}
    assert one.look(0, gated).due_s is None
    assert not one.look(10 * LIMIT_S, gated).give_back


def test_it_says_when_to_look_again() -> None:
    one = starting(GangArbiter(), "one", needed=1)
    assert one.look(10, {"one-1": stuck("one-1")}).due_s == 10 + LIMIT_S
    assert one.look(20, {"one-1": stuck("one-1")}).due_s == 10 + LIMIT_S
    assert one.look(30, {"one-1": placed("one-1")}).due_s is None
