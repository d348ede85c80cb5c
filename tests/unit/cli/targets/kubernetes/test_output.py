"""Logs of pods: the printed lines, and the pods of a rank or node."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.orchestrator.cli.log_files import LogMissing
from holdfast.orchestrator.cli.targets.kubernetes.output import LineFilter, _LogReader, select_pods
from holdfast.orchestrator.cli.targets.kubernetes.session import ClusterSession
from holdfast.orchestrator.cli.targets.remote_job import LogSelector
from holdfast.orchestrator.kube.client import Document
from tests.unit.kube.fake_api import FakeApi, cluster_of

from .pods import pod

LINES = [
    b"agent: welcome",
    b"[rank 0, gen 1] step 1",
    b"[rank 11, gen 1] step 1",
    b"[rank 0, gen 2] step 2",
    b"[rank 1, gen 2] [rank 0] odd",
]


@pytest.mark.parametrize(
    ("selector", "shown"),
    [
        (LogSelector(), [b"[ 0] step 1", b"[11] step 1", b"[ 0] step 2", b"[ 1] [rank 0] odd"]),
        (LogSelector(rank=0), [b"step 1", b"step 2"]),
        (LogSelector(generation=2), [b"[ 0] step 2", b"[ 1] [rank 0] odd"]),
        (LogSelector(rank=0, generation=1), [b"step 1"]),
        (LogSelector(node="demo-a"), [b"agent: welcome"]),
    ],
    ids=["workers", "rank", "generation", "rank of a generation", "agent"],
)
def test_lines_of_a_pod_are_printed_like_local_logs(
    selector: LogSelector, shown: list[bytes]
) -> None:
    show = LineFilter(selector, world_size=12)
    assert [line for line in map(show, LINES) if line is not None] == shown


def test_a_line_names_the_generation_when_it_changes() -> None:
    show = LineFilter(LogSelector(rank=0), 2, headings=True)
    shown = [line for line in map(show, [*LINES, b"[rank 0, gen 1] other pod"]) if line is not None]
    heading = b"== generation %d ==\n%b"
    assert shown == [b"step 1", heading % (2, b"step 2"), heading % (1, b"other pod")]


@pytest.mark.parametrize("node", [None, "demo-a"])
def test_of_a_progress_bar_the_last_state_is_printed(node: str | None) -> None:
    show = LineFilter(LogSelector(node=node), 2)
    head = b"" if node else b"[rank 1, gen 1] "
    assert show(head + b"10%|#   |\r50%|##  |\r100%|####|\r") == (
        b"100%|####|" if node else b"[1] 100%|####|"
    )


def test_the_pod_of_a_rank_is_found_by_its_label() -> None:
    pods = [pod("b", rank="2"), pod("a", rank="0"), pod("spare")]
    names = lambda selector: [p["metadata"]["name"] for p in select_pods(pods, selector, 2)]
    assert names(LogSelector()) == ["a", "b", "spare"]
    assert names(LogSelector(rank=3)) == ["b"]
    assert names(LogSelector(rank=9)) == ["a", "b", "spare"], "labels may be late"
    assert names(LogSelector(node="a")) == ["a"]
    every = names(LogSelector(rank=3, generation=1))
    assert every == ["a", "b", "spare"], "labels are those of the newest generation"


def printed(selector: LogSelector, *, follow: bool = False) -> list[bytes]:
    """Output of a job that shrank from 3 ranks to 1 and moved rank 0 to another pod, and ended."""
    api, shown = FakeApi(listed=[pod("b", rank="0"), pod("a")]), list[bytes]()
    for document in api.listed:
        document["status"]["phase"] = "Succeeded"
        path = f"/api/v1/namespaces/default/pods/{document['metadata']['name']}"
        api.objects[path] = document
    api.logs = {
        "/api/v1/namespaces/default/pods/a/log": b"2026-01-01T00:00:01Z [rank 0, gen 1] early\n"
        b"2026-01-01T00:00:02Z [rank 2, gen 1] no data\n",
        "/api/v1/namespaces/default/pods/b/log": b"2026-01-01T00:00:03Z [rank 0, gen 2] late\n",
    }
    job: Document = {
        "metadata": {"name": "demo", "namespace": "default", "uid": "1"},
        "spec": {}, "status": {"state": "succeeded", "worldSize": 1, "generation": 2},
    }  # fmt: skip
    api.objects["/apis/holdfast.dev/v1alpha1/namespaces/default/trainingjobs/demo"] = job

    async def scenario() -> None:
        async with cluster_of(api) as cluster:
            session = ClusterSession(None, None, None)
            reader = _LogReader(session, job, selector, shown.append, headings=True)
            await (reader.follow if follow else reader.print)(cluster, "default")

    asyncio.run(scenario())
    return shown


def test_the_lines_of_a_generation_are_found_on_the_pod_that_ran_it() -> None:
    assert printed(LogSelector(rank=0, generation=1)) == [b"early"]
    assert printed(LogSelector(rank=2, generation=1)) == [b"no data"], "it had more ranks than now"
    assert printed(LogSelector(rank=2, generation=1), follow=True) == [b"no data"]
    assert printed(LogSelector(generation=2)) == [b"[0] late"]
    assert printed(LogSelector()) == [
        b"== generation 2 ==\n[0] late", b"== generation 1 ==\n[0] early", b"[2] no data",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (LogSelector(generation=9), "--generation: got 9; expected one of 1, 2"),
        (LogSelector(rank=5, generation=1), "--rank: got 5; expected one of 0, 2"),
    ],
)
def test_a_missing_log_is_reported_with_the_existing_ones(
    selector: LogSelector, message: str
) -> None:
    with pytest.raises(LogMissing, match=message):
        printed(selector)
    with pytest.raises(LogMissing, match=message):
        printed(selector, follow=True)
