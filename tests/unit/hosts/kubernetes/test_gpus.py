"""`resources.gpu: auto` on Kubernetes: by the nodes that the pods may use, once for the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.hosts.kubernetes.status import condition
from holdfast.orchestrator.kube.client import Document
from holdfast.orchestrator.kube.errors import JOBS
from tests.unit.kube.fake_api import eventually, status

from .operator_harness import StatefulFakeApi, running_operator, training_job

FORBIDDEN = status(403, "Forbidden", "nodes is forbidden")


def node(name: str, gpus: int, **labels: str) -> Document:
    taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if gpus else []
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints},
        "status": {"allocatable": {"cpu": "64", "nvidia.com/gpu": str(gpus)}},
    }


LLM = JOBS.path("team", "llm")
GPU_POOL = [node("cpu-1", 0), node("gpu-1", 8, pool="gpu")]
ON_CPU = {"podTemplate": {"spec": {"nodeSelector": {"pool": "cpu"}}}}
ASKS = {"podTemplate": {"spec": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}}}


@pytest.mark.parametrize(
    ("nodes", "spec", "gpus", "words"),
    [
        (GPU_POOL, {}, 1, "the largest has 8 nvidia.com/gpu"),
        ([node("cpu-1", 0)], {}, 0, "the largest has no nvidia.com/gpu"),
        (GPU_POOL, {"kubernetes": ON_CPU}, 0, "of 0 nodes that its pods may use"),
        ([node("cpu-1", 0)], {"kubernetes": ASKS}, 1, "podTemplate asks for nvidia.com/gpu"),
    ],
)
async def test_auto_is_decided_by_the_nodes_that_pods_may_use(
    tmp_path: Path, nodes: list[Document], spec: dict[str, Any], gpus: int, words: str
) -> None:
    api = StatefulFakeApi(nodes=nodes)
    async with running_operator(api, str(tmp_path)) as operator:
        operator.start(training_job("llm", **spec))
        written = await operator.status_when(
            "llm", "to have a controller", lambda s: "gpusPerWorker" in s
        )
        assert written["gpusPerWorker"] == gpus
        events = events_of(api, "GpusDecided")
        await eventually(lambda: bool(events_of(api, "GpusDecided")), "the Event")
        events = events_of(api, "GpusDecided")
        assert words in events[0]["message"]
        assert len(events) == 1


async def test_a_new_operator_keeps_the_number(tmp_path: Path) -> None:
    api = StatefulFakeApi(nodes=GPU_POOL)
    async with running_operator(api, str(tmp_path)) as operator:
        job = operator.start(training_job("llm"))
        await eventually(lambda: job.view is not None, "a controller")
    api.nodes = [node("cpu-1", 0)]
    api.objects[LLM].pop("status", None)  # it may not have been written
    async with running_operator(api, str(tmp_path)) as operator:
        job = operator.start(training_job("llm"))
        await eventually(lambda: job.view is not None, "a controller")
        assert job.view is not None and job.view.gpus_per_worker == 1
        assert job._backend is not None
        assert job._backend._job.spec.resources.num_gpus == 1


async def test_fewer_gpus_than_workers_are_refused_until_there_are_more(tmp_path: Path) -> None:
    api = StatefulFakeApi(nodes=[node("gpu-1", 1)])
    async with running_operator(api, str(tmp_path)) as operator:
        job = operator.start(training_job("llm", workersPerNode=2))
        found = await operator.status_when("llm", "to be refused", lambda s: refusal(s) is not None)
        assert "expected 0, or a node with 2 GPUs" in str(refusal(found))
        operator.context.gpus._read_s = None
        api.nodes = GPU_POOL
        await eventually(lambda: job.view is not None, "a controller")


async def test_an_operator_that_may_not_list_nodes_names_the_right_and_the_field(
    tmp_path: Path,
) -> None:
    api = StatefulFakeApi(nodes=GPU_POOL)
    api.reject = lambda request: FORBIDDEN if request[1] == "/api/v1/nodes" else None
    async with running_operator(api, str(tmp_path)) as operator:
        job = operator.start(training_job("llm"))
        await eventually(lambda: job.view is not None, "a controller")
        await eventually(lambda: bool(events_of(api, "GpusDecided")), "the Event")
        assert "may not list nodes" in events_of(api, "GpusDecided")[0]["message"]
        assert "write gpu: 1" in events_of(api, "GpusDecided")[0]["message"]


def refusal(found: Document) -> str | None:
    one = condition({"status": found}, "Accepted")
    return one["message"] if one.get("status") == "False" else None


def events_of(api: StatefulFakeApi, reason: str) -> list[Document]:
    return [one for one in api.objects.values() if one.get("reason") == reason]
