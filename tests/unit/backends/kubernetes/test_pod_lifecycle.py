"""Pods that do not start, and jobs that compete for capacity. Time is an argument."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.backends.kubernetes.gang_arbiter import GangArbiter, GangPriority
from holdfast.orchestrator.backends.kubernetes.placement import KnownNode, Placement
from holdfast.orchestrator.backends.kubernetes.pod_lifecycle import PodTiming, StartupTimeouts

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
    gangs: GangArbiter,
    name: str,
    created: str = "2026-01-01",
    needed: int = 2,
    namespace: str = "team",
    priority: int = 0,
    **pod_spec: Any,
) -> StartupTimeouts:
    rank = GangPriority(namespace, name, created, priority=priority)
    found = StartupTimeouts(rank, needed, LIMIT_S, gangs, TIMING)
    found.placement = Placement(pod_spec)
    return found


def incomplete(name: str, node: str = "n1", priority: int = 0) -> dict[str, Any]:
    pods = {f"{name}-1": scheduled(f"{name}-1"), f"{name}-2": stuck(f"{name}-2")}
    pods[f"{name}-1"]["spec"] = {"nodeName": node, "priority": priority}
    return pods


def waits_for(job: StartupTimeouts) -> str:
    ahead = job.blocked_by()
    return ahead.key if ahead is not None else ""


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
    assert waits_for(new) == "team/old"
    assert not old.decide(WAIT_S + 5, incomplete("old")).release
    whole = {"old-1": scheduled("old-1"), "old-2": scheduled("old-2")}
    assert not old.decide(WAIT_S + 6, whole).release
    assert waits_for(new) == "", "not blocked once the older job is complete"


def both_incomplete(
    first: StartupTimeouts, pods: dict[str, Any], second: StartupTimeouts, others: dict[str, Any]
) -> None:
    """Run until one of them has given up its nodes, or both keep them."""
    first.decide(0, pods)
    second.decide(0, others)
    for job, its in ((first, pods), (second, others)):
        job.decide(WAIT_S, its)


def test_the_priority_class_of_the_pods_goes_before_age() -> None:
    gangs = GangArbiter()
    old = starting(gangs, "old", "2026-01-01", namespace="a", priority=2147483647)
    urgent = starting(gangs, "urgent", "2026-01-02", namespace="b")
    both_incomplete(old, incomplete("old"), urgent, incomplete("urgent", priority=1000))
    assert waits_for(old) == "b/urgent", "spec.priority does not count in other namespaces"
    assert waits_for(urgent) == ""


def test_the_priority_of_the_spec_orders_the_jobs_of_one_namespace() -> None:
    gangs = GangArbiter()
    old = starting(gangs, "old", "2026-01-01")
    urgent = starting(gangs, "urgent", "2026-01-02", priority=1)
    both_incomplete(old, incomplete("old"), urgent, incomplete("urgent"))
    assert waits_for(old) == "team/urgent" and waits_for(urgent) == ""


def test_the_order_of_three_jobs_of_two_namespaces_has_no_cycle() -> None:
    gangs = GangArbiter()
    jobs = [
        starting(gangs, "first", "2026-01-01", namespace="a"),
        starting(gangs, "middle", "2026-01-02", namespace="b"),
        starting(gangs, "last", "2026-01-03", namespace="a", priority=10),
    ]
    for at_s in (0, WAIT_S):
        released = [
            bool(job.decide(at_s, incomplete(f"j{number}")).release)
            for number, job in enumerate(jobs)
        ]
    assert sorted(released) == [False, True, True], "exactly one keeps its nodes"


def test_a_message_names_no_job_of_another_namespace() -> None:
    gangs = GangArbiter()
    secret = starting(gangs, "secret", "2026-01-01", namespace="other")
    job = starting(gangs, "job", "2026-01-02")
    secret.decide(0, incomplete("secret"))
    job.decide(0, incomplete("job"))
    message = job.decide(WAIT_S, incomplete("job")).hold_off
    assert "secret" not in message and "other/" not in message
    assert "a job of another namespace, which comes first" in message


def known(**nodes: dict[str, Any]) -> Any:
    made = {
        name: KnownNode(name, {"kubernetes.io/hostname": name, **fields.get("labels", {})},
                        tuple(fields.get("taints", ())), fields.get("allocatable", {}))
        for name, fields in nodes.items()
    }  # fmt: skip
    return made.get


ON_N1 = {"nodeSelector": {"kubernetes.io/hostname": "n1"}}
GPU_POD = {"containers": [{"name": "w", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}
TAINT = {"key": "team", "value": "a", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("first", "node"),
    [
        (ON_N1, {}),
        (
            {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [
                    {"key": "pool", "operator": "In", "values": ["gpu"]}]}]}}}},
            {"labels": {"pool": "cpu"}},
        ),
        (GPU_POD, {"allocatable": {"cpu": "64", "nvidia.com/gpu": "4"}}),
        ({}, {"taints": [TAINT]}),
    ],
    ids=["selector", "affinity", "size", "taint"],
)  # fmt: skip
def test_a_job_gives_no_nodes_up_to_one_that_cannot_use_them(
    first: dict[str, Any], node: dict[str, Any]
) -> None:
    gangs, nodes = GangArbiter(), known(n1={}, n2=node)
    greedy, other = starting(gangs, "greedy", "2026-01-01", **first), starting(gangs, "other")
    greedy.decide(0, incomplete("greedy", "n1"), known=nodes)
    for at_s in (0.0, WAIT_S, HOLD_S - 1):
        assert not other.decide(at_s, incomplete("other", "n2"), known=nodes).release
    open_to_all = known(n1={}, n2={})
    if first != ON_N1:
        free = starting(gangs, "free", "2025-01-01")
        free.decide(0, incomplete("free", "n1"), known=open_to_all)
        assert other.decide(HOLD_S - 1, incomplete("other", "n2"), known=open_to_all).release


def test_a_job_that_was_never_incomplete_waits_for_no_other() -> None:
    gangs = GangArbiter()
    greedy, small = starting(gangs, "greedy"), starting(gangs, "small", needed=1, namespace="other")
    greedy.decide(0, incomplete("greedy"))
    assert waits_for(small) == ""
    small.decide(1, {"small-1": stuck("small-1")})
    assert waits_for(small) == ""


def test_the_replacement_of_a_running_job_never_waits_for_a_job_that_has_not_started() -> None:
    gangs = GangArbiter()
    greedy = starting(gangs, "greedy", "2026-01-01", namespace="other", priority=2147483647)
    running = starting(gangs, "running", "2026-01-02")
    greedy.decide(0, incomplete("greedy", priority=1_000_000))
    pods = {**incomplete("running"), "running-3": scheduled("running-3")}
    running.needed = 3
    for at_s in (0.0, WAIT_S, HOLD_S - 1):
        assert not running.decide(at_s, pods, {"running-1"}).release
        assert waits_for(running) == ""
    assert greedy.decide(WAIT_S, incomplete("greedy", priority=1_000_000)).release


def test_a_job_that_was_not_complete_within_its_hold_time_comes_last() -> None:
    gangs = GangArbiter()
    greedy, other = starting(gangs, "greedy", "2026-01-01"), starting(gangs, "other", "2026-01-02")
    greedy.decide(0, incomplete("greedy"))
    assert greedy.decide(HOLD_S, incomplete("greedy")).release
    greedy.decide(HOLD_S + 5, incomplete("greedy"))
    other.decide(HOLD_S + 5, incomplete("other"))
    assert not other.decide(2 * HOLD_S, incomplete("other")).release
    assert greedy.decide(2 * HOLD_S, incomplete("greedy")).release
    assert waits_for(greedy) == "team/other"


def test_nodes_are_held_longer_while_an_autoscaler_adds_machines() -> None:
    one, pods = starting(GangArbiter(), "one"), incomplete("one")
    for at_s in (0.0, HOLD_S, LIMIT_S, TIMING.provisioning_s - 1):
        assert not one.decide(at_s, pods, provisioned={"one-2"}).release
    assert one.decide(TIMING.provisioning_s, pods, provisioned={"one-2"}).release


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
    assert waits_for(first) == "", "it waits, but does not block other jobs without end"
    decision = one.decide(LIMIT_S, {**left, "one-4": stuck("one-4")}, {*left, "one-0"})
    assert set(decision.release) == {"one-4"}
    assert "not started within 120 s" in decision.release["one-4"]


def test_a_replacement_comes_before_younger_jobs_for_a_limited_time() -> None:
    gangs = GangArbiter()
    old, young = starting(gangs, "old", "2026-01-01"), starting(gangs, "young", "2026-01-02")
    pods = incomplete("old")
    old.decide(0, pods, {"old-1"})
    young.decide(0, incomplete("young"))
    assert "job old, which comes first" in young.decide(WAIT_S, incomplete("young")).hold_off
    assert waits_for(young) == "team/old"
    for at_s in (HOLD_S, HOLD_S + 1):
        assert not old.decide(at_s, pods, {"old-1"}).release
        assert waits_for(young) == "", "there may never be capacity"


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
