"""A job whose spec or whose new pod template is refused: what its conditions and Events say."""

from __future__ import annotations

from pathlib import Path

from holdfast.orchestrator.cli.targets.kubernetes.resource_view import is_refused
from holdfast.orchestrator.hosts.kubernetes.status import condition
from holdfast.orchestrator.kube.client import Document
from tests.unit.kube.fake_api import eventually, status

from .operator_harness import StatefulFakeApi, running_operator, training_job

TYPO = {"podTemplate": {"spec": {"tolerationz": []}}}
INVALID = status(422, "Invalid", "spec.nodeSelector: Invalid value")


async def test_a_misspelt_field_is_refused_at_once_and_the_job_starts_when_it_is_corrected(
    tmp_path: Path,
) -> None:
    async with running_operator(StatefulFakeApi(), str(tmp_path)) as operator:
        job = operator.start(training_job("llm", kubernetes=TYPO))
        await operator.status_when("llm", "to be refused", lambda s: refused(s))
        document = operator.object("llm")
        found = condition(document, "Accepted")
        assert found["reason"] == "InvalidSpec"
        assert found["message"].startswith("spec.kubernetes.podTemplate.spec.tolerationz: got")
        assert document["status"]["state"] == "pending" and is_refused(document)
        assert condition(document, "Failed")["status"] == "False"
        operator.edit(job, kubernetes={})
        await eventually(lambda: job.view is not None, "a controller")
        await operator.status_when("llm", "to be accepted", lambda s: not refused(s))
        assert not is_refused(operator.object("llm"))


def refused(found: Document) -> bool:
    return condition({"status": found}, "Accepted").get("status") == "False"


async def test_a_new_template_that_the_api_server_refuses_is_not_used(tmp_path: Path) -> None:
    """Suspended jobs may get one."""
    api = StatefulFakeApi()
    async with running_operator(api, str(tmp_path)) as operator:
        job = operator.start(training_job("llm"))
        await eventually(lambda: job.view is not None, "a controller")
        api.reject = lambda request: INVALID if request[1].endswith("/pods") else None
        operator.edit(job, kubernetes={"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}})
        await operator.status_when(
            "llm", "to report it", lambda s: "spec.nodeSelector" in str(s["conditions"])
        )
        assert job._backend is not None
        assert job._backend._job.spec.kubernetes.pod_template == {}
