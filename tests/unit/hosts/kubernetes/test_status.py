"""Conversion of a JobView to the status of a TrainingJob and back, and the choice of Events."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1.crd import definition
from holdfast.orchestrator.api.v1alpha1.status import TrainingJobStatus
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.hosts.kubernetes.status import (
    ConditionState,
    StatusContext,
    condition,
    status_of,
    status_without_controller,
    view_of,
)
from holdfast.orchestrator.hosts.kubernetes.status_writer import new_events
from holdfast.orchestrator.kube.names import INCIDENT
from holdfast.orchestrator.runtime.observe.view import (
    CheckpointView,
    Incident,
    JobView,
    NodeView,
    WorkerView,
)

NOW = 1_790_000_000 * SECOND_NS
CONTEXT = StatusContext(name="llm", generation=3, desired=2, now_ns=NOW)


def view() -> JobView:
    workers = [WorkerView(rank=rank) for rank in range(2)]
    return JobView(
        name="llm",
        job_id="0b1c",
        state="running",
        reason="all 4 ranks train",
        submitted_ns=NOW - 60 * SECOND_NS,
        now_ns=NOW,
        generation=2,
        world_size=4,
        mesh="replicate 2 x shard 2",
        strategy="HSDP",
        restarts={"infrastructure": 1},
        relaunches=1,
        step=7,
        total_steps=100,
        loss=float("nan"),
        step_s=0.25,
        memory_step=7,
        checkpoints=[CheckpointView(step=5, generation=1, num_bytes=10, committed_ns=NOW)],
        checkpoint_path="s3://b/c",
        nodes=[
            NodeView(name="llm-a", state="member", workers=workers),
            NodeView(name="llm-b", state="member"),
            NodeView(name="llm-c", state="spare"),
        ],
        incidents=[incident()],
        ledger={"productive": 50.123456, "starting": 9.9},
        goodput=0.8335,
    )


def incident() -> Incident:
    return Incident(
        number=1, at_ns=NOW - 30 * SECOND_NS, failure_class="infrastructure",
        title="worker 1 on llm-a was killed by SIGKILL", culprit_node="llm-a", culprit_rank=1,
        decision="restart on the same 2 nodes, from memory after 6 steps", generation_before=1,
        generation_after=2, steps_lost=0, seconds={"stop": 0.1, "total": 1.23456},
    )  # fmt: skip


def test_a_status_has_the_values_of_the_columns() -> None:
    status = status_of(view(), CONTEXT)
    assert status["nodes"] == {"ready": 2, "desired": 2, "summary": "2/2", "spares": 1}
    assert (status["state"], status["step"], status["worldSize"]) == ("running", 7, 4)
    assert (status["restarts"], status["goodput"]) == (1, "83.4%")
    assert status["replicas"] == 2
    assert status["observedGeneration"] == 3
    assert "loss" not in status, "NaN is no JSON"
    assert status["ledger"] == {"productive": 50.12, "starting": 9.9}
    assert status["incidents"][0]["class"] == "infrastructure"
    TrainingJobStatus.model_validate(status)


def test_every_field_of_a_status_is_in_the_schema_of_the_cluster() -> None:
    (version,) = definition()["spec"]["versions"]
    known = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    assert set(status_of(view(), CONTEXT)) <= set(known)


@pytest.mark.parametrize(
    ("state", "true"),
    [
        ("pending", {"Progressing"}),
        ("starting", {"Progressing"}),
        ("running", {"Ready", "Progressing"}),
        ("recovering", {"Progressing"}),
        ("suspended", {"Suspended"}),
        ("succeeded", {"Succeeded"}),
        ("failed", {"Failed"}),
        ("cancelled", {"Failed"}),
    ],
)
def test_each_state_has_its_conditions(state: Any, true: set[str]) -> None:
    status = status_of(replace(view(), state=state), CONTEXT)
    held = {one["type"] for one in status["conditions"] if one["status"] == "True"}
    assert held == true | {"Accepted"}
    assert all(one["reason"] and one["message"] for one in status["conditions"])


@pytest.mark.parametrize(
    ("state", "unknown"), [("running", True), ("pending", True), ("suspended", False)]
)
def test_nothing_is_known_of_a_job_whose_operator_ends(state: Any, unknown: bool) -> None:
    status = status_of(replace(view(), state=state), CONTEXT._replace(leaving=True))
    held = {one["type"] for one in status["conditions"] if one["status"] == "Unknown"}
    assert held == ({"Ready", "Progressing"} if unknown else set())


def test_a_condition_that_does_not_hold_has_a_reason_of_its_own() -> None:
    running = {one["type"]: one for one in status_of(view(), CONTEXT)["conditions"]}
    assert running["Ready"]["reason"] == "Running"
    assert (running["Failed"]["reason"], running["Failed"]["message"]) == (
        "NotFailed", "the job has not failed",
    )  # fmt: skip
    assert running["Suspended"]["reason"] == "NotSuspended"
    failed = status_of(replace(view(), state="failed", reason="ValueError: x"), CONTEXT)
    ended = {one["type"]: one for one in failed["conditions"]}
    assert (ended["Failed"]["reason"], ended["Failed"]["message"]) == ("Failed", "ValueError: x")
    assert ended["Succeeded"]["message"] == "the job has failed"


def test_a_message_quotes_a_problem_once() -> None:
    text = "2 pods were requested and none was created: exceeded quota"
    waits = replace(view(), state="pending", reason=f"waiting for 2 nodes: {text}")
    status = status_of(waits, CONTEXT._replace(problems=(("NoRoom", text),)))
    ready = condition({"status": status}, "Ready")
    assert ready["message"].count("exceeded quota") == 1 and ready["reason"] == "NoRoom"


def test_an_incident_names_the_machine_of_the_node_that_is_gone() -> None:
    lost = replace(incident(), title="llm-a was lost (silent)", culprit_machine="gpu-17")
    status = status_of(replace(view(), incidents=[lost]), CONTEXT)
    assert status["incidents"][0]["nodeName"] == "gpu-17"
    before = replace(view(), incidents=[])
    (event, *_) = new_events(before, replace(view(), incidents=[lost]))
    assert "on Kubernetes node gpu-17" in event.message
    document = {"metadata": {"name": "llm"}, "status": status}
    assert view_of(document, NOW).incidents[0].culprit_machine == "gpu-17"


def test_a_condition_keeps_its_transition_time_until_it_changes() -> None:
    first = status_of(view(), CONTEXT)["conditions"]
    later = CONTEXT._replace(now_ns=NOW + 60 * SECOND_NS)
    second = status_of(replace(view(), reason="other words"), later, first)["conditions"]
    assert [one["lastTransitionTime"] for one in second] == [
        one["lastTransitionTime"] for one in first
    ]
    third = status_of(replace(view(), state="recovering"), later, second)["conditions"]
    changed = {
        one["type"] for one, old in zip(third, second, strict=True)
        if one["lastTransitionTime"] != old["lastTransitionTime"]
    }  # fmt: skip
    assert changed == {"Ready"}


def test_problems_of_pods_are_the_reason_of_a_pending_job() -> None:
    context = CONTEXT._replace(problems=(("ImagePullBackOff", "image x cannot be pulled"),))
    status = status_of(replace(view(), state="pending", reason="waiting for nodes"), context)
    ready = condition({"status": status}, "Ready")
    assert ready["reason"] == "ImagePullBackOff"
    assert ready["message"] == "waiting for nodes; image x cannot be pulled"
    running = condition({"status": status_of(view(), context)}, "Ready")
    assert running["reason"] == "Running", (
        "problems of spare pods do not change the reason of a running job"
    )


def test_a_job_without_a_controller_has_a_status_too() -> None:
    invalid = ConditionState("pending", "InvalidSpec", "spec.image: got nothing", accepted=False)
    status = status_without_controller(invalid, CONTEXT)
    accepted = condition({"status": status}, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert accepted["message"] == "spec.image: got nothing"
    assert condition({"status": status}, "Failed")["status"] == "False", "it may still start"
    assert condition({"status": status}, "Progressing")["status"] == "False"
    assert status["replicas"] == 0
    TrainingJobStatus.model_validate(status)


def test_the_command_line_reads_the_status_that_the_operator_writes() -> None:
    document = {
        "metadata": {"name": "llm", "uid": "0b1c", "creationTimestamp": "2026-09-21T13:00:00Z"},
        "status": status_of(view(), CONTEXT),
    }
    found = view_of(document, NOW)
    for name in (
        "name", "job_id", "state", "reason", "generation", "world_size", "mesh", "step",
        "total_steps", "restarts", "relaunches", "memory_step", "checkpoint_path",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(view(), name), name
    assert found.checkpoints == view().checkpoints
    assert found.goodput == pytest.approx(0.8335, abs=1e-3)
    (one,) = found.incidents
    assert (one.title, one.seconds["total"]) == (incident().title, 1.235)


def test_a_job_without_a_status_is_pending() -> None:
    document = {"metadata": {"name": "x", "creationTimestamp": "2026-09-21T13:00:00Z"}}
    found = view_of(document, NOW)
    assert found.state == "pending" and "operator has not looked" in found.reason


# -- Events -------------------------------------------------------------------------------------
def test_an_incident_has_an_event_when_it_is_decided_and_another_when_it_is_over() -> None:
    before = replace(view(), incidents=[])
    undecided = replace(incident(), seconds={}, decision="")
    during = replace(view(), state="recovering", incidents=[undecided])
    assert new_events(before, during) == []
    decided = replace(view(), state="recovering", incidents=[replace(incident(), seconds={})])
    (opened,) = new_events(during, decided)
    assert (opened.severity, opened.reason) == ("Warning", "InfrastructureFailure")
    assert "killed by SIGKILL" in opened.message and "from memory after 6 steps" in opened.message
    (over,) = [one for one in new_events(decided, view()) if one.reason == "Recovered"]
    assert "1.23 s, no finished step lost" in over.message
    assert opened.annotations == over.annotations == {INCIDENT: "1"}
    assert new_events(view(), view()) == []


def test_an_operator_that_takes_over_does_not_repeat_earlier_events() -> None:
    assert new_events(None, view()) == []


def test_launches_and_the_end_of_a_job_have_events() -> None:
    launched = replace(view(), generation=3)
    assert [one.reason for one in new_events(view(), launched)] == ["GenerationStarted"]
    ended = replace(view(), state="failed", reason="ValueError: x")
    assert [(one.severity, one.reason) for one in new_events(view(), ended)] == [
        ("Warning", "Failed")
    ]
