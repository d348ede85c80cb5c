"""A standby replica's reports on its lease; tests/e2e/kubernetes/test_replicas.py takes over."""

from __future__ import annotations

from holdfast.orchestrator.kube.leader_election import LeaseHealth

EXPIRED = "the API server at x rejected the credentials"


def test_a_candidate_has_a_problem_before_the_first_answer() -> None:
    health = LeaseHealth(10.0)
    assert health.problem(0.0) == "the lease cannot be acquired: not requested yet"
    health.failed(EXPIRED)
    assert health.problem(0.1) == f"the lease cannot be acquired: {EXPIRED}"


def test_another_leader_is_no_problem() -> None:
    health = LeaseHealth(10.0)
    for second in range(0, 1000, 2):
        health.answered(float(second))
        assert health.problem(second + 1.9) == ""


def test_an_outage_shorter_than_the_lease_is_no_problem() -> None:
    health = LeaseHealth(10.0)
    for second in range(100):
        if second % 10 == 0:
            health.answered(float(second))
        else:
            health.failed("503")
        assert health.problem(float(second)) == ""


def test_a_longer_outage_is_a_problem_until_the_first_answer() -> None:
    health = LeaseHealth(10.0)
    health.answered(0.0)
    health.failed(EXPIRED)
    assert health.problem(9.9) == ""
    assert health.problem(10.0) == f"the lease cannot be acquired: {EXPIRED}"
    health.answered(11.0)
    assert health.problem(11.0) == ""


def test_a_request_without_any_answer_is_an_outage_too() -> None:
    health = LeaseHealth(10.0)
    health.answered(0.0)
    assert health.problem(25.0) == "the lease cannot be acquired: no answer for 25 s"
