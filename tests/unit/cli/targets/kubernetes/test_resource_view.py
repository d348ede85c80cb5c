"""The view of a TrainingJob object. The statuses are written by the operator's own code."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from holdfast.orchestrator.cli import render, report
from holdfast.orchestrator.cli.targets.kubernetes.job import KubernetesTransport
from holdfast.orchestrator.cli.targets.kubernetes.resource_view import (
    nodes_of,
    operator_absence,
    spec_changed_ns,
    status_written_ns,
    view_of_object,
)
from holdfast.orchestrator.cli.targets.kubernetes.session import ClusterSession
from holdfast.orchestrator.cli.targets.remote_job import RemoteJob
from holdfast.orchestrator.hosts.kubernetes.status import StatusContext, status_of
from holdfast.orchestrator.kube.client import Document
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.unit.cli.fixtures import NS, T0, make_incident, make_view

from .pods import pod

CREATED = "2023-11-14T22:13:20Z"  # T0


def written(seconds: int, *, status: bool = True, manager: str = "holdfast-operator") -> Document:
    entry = {"manager": manager, "time": f"2023-11-14T22:13:{20 + seconds}Z"}
    return {**entry, "subresource": "status"} if status else entry


def make_object(view: JobView | None = None, **metadata: Any) -> Document:
    """An object with the status that the operator writes for `view`."""
    made: Document = {
        "metadata": {
            "name": "demo", "namespace": "team", "uid": "0123", "generation": 1,
            "creationTimestamp": CREATED, "managedFields": [written(30)], **metadata,
        },
        "spec": {"nodes": {"max": 2}, "workersPerNode": 2},
    }  # fmt: skip
    if view is not None:
        made["status"] = status_of(view, StatusContext("demo", 1, 2, view.now_ns))
    return made


def shown(renderable: object) -> str:
    console = Console(width=200, record=True, file=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_the_report_of_a_job_on_a_cluster_is_that_of_a_local_one() -> None:
    view = make_view(incidents=[make_incident()], nodes=[], restarts={"infrastructure": 1})
    seen = view_of_object(make_object(view), view.now_ns)
    assert shown(report.report(seen)) == shown(report.report(view))
    assert shown(render.status(seen)) == shown(render.status(view))


def test_a_job_without_a_status_has_not_been_looked_at() -> None:
    view = view_of_object(make_object(), T0 + NS)
    assert (view.state, view.step, view.incidents) == ("pending", -1, [])
    assert "not looked at" in view.reason


def test_fields_of_a_newer_operator_are_left_out() -> None:
    document = make_object(make_view(incidents=[make_incident()], num_incidents=1))
    document["status"]["colour"] = "blue"
    document["status"]["nodes"]["asleep"] = 1
    document["status"]["incidents"][0]["mood"] = "sad"
    view = view_of_object(document, T0 + NS)
    assert view.step == 41
    assert view.incidents[0].title == "worker 2 on node-1 was killed by SIGKILL"


def test_problems_of_pods_are_part_of_the_reason() -> None:
    waiting = make_view(state="pending", reason="waiting for 2 nodes", nodes=[])
    problems = (("Unschedulable", "demo-x: no node has 8 nvidia.com/gpu"),)
    document = make_object(waiting)
    document["status"] = status_of(waiting, StatusContext("demo", 1, 2, T0, problems))
    reason = view_of_object(document, T0 + NS).reason
    assert reason == "waiting for 2 nodes; demo-x: no node has 8 nvidia.com/gpu"


def test_the_number_of_incidents_counts_those_that_the_status_left_out() -> None:
    many = [make_incident(number=number) for number in range(1, 15)]
    view = view_of_object(make_object(make_view(incidents=many)), T0)
    assert [one.number for one in view.incidents] == list(range(5, 15))
    assert view.num_incidents == 14


@pytest.mark.parametrize(
    ("state", "seconds", "absence"),
    [
        ("running", 10, ""),
        ("running", 200, "no operator has looked"),
        ("pending", 200, ""),
        ("pending", 40, ""),
        ("suspended", 200, ""),
        ("succeeded", 200, ""),
    ],
)
def test_an_outdated_status_is_reported_as_absence_of_the_operator(
    state: str, seconds: int, absence: str
) -> None:
    document = make_object(make_view(state=state))
    missing = operator_absence(document, status_written_ns(document) + seconds * NS)
    assert (absence in missing.what) if missing and absence else missing is None and not absence
    view = view_of_object(document, status_written_ns(document) + seconds * NS)
    assert view.controller_alive == (not absence)


def test_the_operator_has_time_to_look_at_a_new_job() -> None:
    document = make_object(managedFields=[written(0, status=False, manager="kubectl")])
    assert operator_absence(document, T0 + 5 * NS) is None
    missing = operator_absence(document, T0 + 30 * NS)
    assert missing is not None and "not looked at this job" in missing.what
    assert missing.since_ns == T0


def test_a_change_of_the_spec_without_a_reaction_is_reported() -> None:
    fields = [written(10), written(20, status=False, manager="kubectl")]
    document = make_object(make_view(state="suspended"), generation=2, managedFields=fields)
    assert spec_changed_ns(document) == T0 + 20 * NS
    assert operator_absence(document, T0 + 25 * NS) is None
    missing = operator_absence(document, T0 + 50 * NS)
    assert missing is not None and "last change of the spec" in missing.what


def test_pods_are_the_nodes_of_a_job_in_the_order_of_their_ranks() -> None:
    document = make_object(make_view())
    document["status"]["nodes"]["spares"] = 1
    pods = [
        pod("demo-spare"),
        pod("demo-b", rank="2"),
        pod("demo-a", rank="0"),
        pod("demo-old", rank="0", generation="0", phase="Failed"),
        pod("demo-new", phase="Pending"),
    ]
    found = nodes_of(document, pods)
    states = {node.name: node.state for node in found}
    assert states == {
        "demo-a": "member", "demo-b": "member", "demo-spare": "spare", "demo-old": "lost",
        "demo-new": "joining",
    }  # fmt: skip
    assert [node.name for node in found][:2] == ["demo-a", "demo-b"]
    assert [worker.rank for worker in found[1].workers] == [2, 3]
    assert found[0].address == "10.0.0.7 on host-1"


def test_a_remark_says_since_when_no_operator_handles_a_job() -> None:
    document = make_object(make_view())
    session = ClusterSession("team", None, None, plugin=True)
    job = RemoteJob(KubernetesTransport(session, document))
    view = view_of_object(document, status_written_ns(document) + 5 * NS)
    assert job.remarks(view) == []
    view = view_of_object(document, status_written_ns(document) + 125 * NS)
    [remark] = job.remarks(view)
    assert remark.startswith("For 2 min 05 s no operator has looked at this job (its last status")
    assert "`kubectl describe trainingjob demo -n team`" in remark
