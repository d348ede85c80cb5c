"""What a replica that stands by says of its lease. How leaders take over from each other is tested
at a real API server (tests/e2e/kubernetes/test_replicas.py)."""

from __future__ import annotations

from holdfast.orchestrator.kube.leader_election import LeaseSilence

EXPIRED = "the API server at x does not accept our credentials"


def test_before_the_first_answer_it_is_not_ready_and_says_why() -> None:
    silence = LeaseSilence(10.0)
    assert silence.problem(0.0) == "the lease cannot be had: not asked for yet"
    silence.failed(EXPIRED)
    assert silence.problem(0.1) == f"the lease cannot be had: {EXPIRED}"


def test_that_another_one_leads_is_an_answer() -> None:
    silence = LeaseSilence(10.0)
    for second in range(0, 1000, 2):
        silence.answered(float(second))
        assert silence.problem(second + 1.9) == ""


def test_an_outage_shorter_than_the_lease_is_none() -> None:
    silence = LeaseSilence(10.0)
    for second in range(100):
        if second % 10 == 0:
            silence.answered(float(second))
        else:
            silence.failed("503")
        assert silence.problem(float(second)) == ""


def test_a_longer_outage_is_told_and_ends_with_the_first_answer() -> None:
    silence = LeaseSilence(10.0)
    silence.answered(0.0)
    silence.failed(EXPIRED)
    assert silence.problem(9.9) == ""
    assert silence.problem(10.0) == f"the lease cannot be had: {EXPIRED}"
    silence.answered(11.0)
    assert silence.problem(11.0) == ""


def test_a_request_that_is_never_answered_is_an_outage_too() -> None:
    silence = LeaseSilence(10.0)
    silence.answered(0.0)
    assert silence.problem(25.0) == "the lease cannot be had: no answer for 25 s"
