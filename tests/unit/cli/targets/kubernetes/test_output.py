"""Logs of pods: the printed lines, and the pods of a rank or node."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.cli.targets.base import LogSelector
from holdfast.orchestrator.cli.targets.kubernetes.output import line_filter, select_pods

from .pods import pod

LINES = [b"agent: welcome", b"[rank 0] step 1", b"[rank 11] step 1", b"[rank 1] [rank 0] odd"]


@pytest.mark.parametrize(
    ("selector", "shown"),
    [
        (LogSelector(), [b"[ 0] step 1", b"[11] step 1", b"[ 1] [rank 0] odd"]),
        (LogSelector(rank=0), [b"step 1"]),
        (LogSelector(node="demo-a"), [b"agent: welcome"]),
    ],
    ids=["workers", "rank", "agent"],
)
def test_lines_of_a_pod_are_printed_like_local_logs(
    selector: LogSelector, shown: list[bytes]
) -> None:
    show = line_filter(selector, world_size=12)
    assert [line for line in map(show, LINES) if line is not None] == shown


def test_the_pod_of_a_rank_is_found_by_its_label() -> None:
    pods = [pod("b", rank="2"), pod("a", rank="0"), pod("spare")]
    names = lambda selector: [p["metadata"]["name"] for p in select_pods(pods, selector, 2)]
    assert names(LogSelector()) == ["a", "b", "spare"]
    assert names(LogSelector(rank=3)) == ["b"]
    assert names(LogSelector(rank=9)) == ["a", "b", "spare"], "labels may be late"
    assert names(LogSelector(node="a")) == ["a"]
