"""A job grows when the standbys of its nodes have imported what the script imports."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import Recovery
from holdfast.orchestrator.core.actions import LaunchGroup, StopGroup
from holdfast.orchestrator.core.events import ControllerStarted, FromNode, ResizeRequested
from holdfast.orchestrator.protocol.messages import StandbysReported

from .harness import RequestNodes, Transcript, spec

GROW_DELAY_S = Recovery().grow_delay_s


def shrunk() -> Transcript:
    """One node of two trains, and nothing holds it back."""
    job = Transcript().started()
    job.lose("b")
    job.succeed(RequestNodes)
    job.stopped("a", 5)
    job.wait(2.1)
    job.succeed(LaunchGroup)
    job.step(6)
    return job


def ready(job: Transcript, node: str, *, now: bool = True) -> None:
    job.apply(FromNode(node, StandbysReported(ready=now)))


def test_training_goes_on_while_a_new_node_imports_and_the_reason_says_so() -> None:
    job = shrunk()
    job.join("c", standbys_ready=False)
    ready(job, "c", now=False)
    job.wait(GROW_DELAY_S + 1)
    assert not job.of(StopGroup) and job.state.phase == "running"
    assert job.state.reason.text == (
        "2 nodes are usable, 1 are used; the job grows when the standbys of c have imported what "
        "the script imports, or after 60 s"
    )
    ready(job, "c")
    assert job.one_reason(StopGroup) == "2 nodes are usable, 1 are used"
    job.stopped("a", 20)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_a_job_whose_nodes_have_nothing_to_import_grows_as_soon_as_before() -> None:
    job = shrunk()
    job.join("c", standbys_ready=False)
    ready(job, "c")
    job.wait(GROW_DELAY_S - 0.1)
    assert not job.of(StopGroup), "the grow delay gathers nodes"
    job.wait(0.1)
    assert job.of(StopGroup)


def test_a_job_grows_without_standbys_that_take_too_long() -> None:
    job = shrunk()
    job.join("c", standbys_ready=False)
    job.wait(GROW_DELAY_S + limits.STANDBYS_WAIT_S - 0.1)
    assert not job.of(StopGroup)
    job.wait(0.1)
    reason = "2 nodes are usable, 1 are used; the standbys of c have not imported everything"
    assert job.one_reason(StopGroup) == f"{reason} after 60 s"
    assert job.replayed().state == job.state


def test_a_node_that_trains_may_import_as_well() -> None:
    """The node's workers have reported what they imported a moment ago."""
    job = shrunk()
    ready(job, "a", now=False)
    job.join("c")
    job.wait(GROW_DELAY_S)
    assert not job.of(StopGroup)
    ready(job, "a")
    assert job.of(StopGroup)


def test_a_requested_size_waits_as_well_and_without_the_grow_delay() -> None:
    job = Transcript(spec({"min": 1, "max": 2})).started()
    job.apply(ResizeRequested(nodes=3))
    job.succeed(RequestNodes)
    job.join("c", standbys_ready=False)
    assert not job.of(StopGroup)
    ready(job, "c")
    assert job.of(StopGroup)


def test_a_lost_node_is_replaced_by_one_that_imports() -> None:
    """Training stands already."""
    job = Transcript().started()
    job.lose("b")
    job.succeed(RequestNodes)
    job.stopped("a", 5)
    job.join("c", standbys_ready=False)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_the_wait_ends_with_the_node_and_the_next_one_has_the_whole_time() -> None:
    job = shrunk()
    job.join("c", standbys_ready=False)
    job.wait(GROW_DELAY_S + limits.STANDBYS_WAIT_S - 1)
    job.lose("c")
    assert job.state.reason.text == "training continues on the nodes that it has"
    job.join("d", standbys_ready=False)
    job.wait(GROW_DELAY_S + 2)
    assert not job.of(StopGroup), "60 s from here"
    ready(job, "d")
    assert job.of(StopGroup)


@pytest.mark.parametrize("report", [True, False])
def test_a_new_controller_keeps_what_it_knows_until_the_next_report(report: bool) -> None:
    job = shrunk()
    job.join("c", standbys_ready=False)
    job.apply(ControllerStarted(incarnation=2, nodes=("a", "c")))
    job.join("c", standbys_ready=False)
    ready(job, "c", now=report)
    assert job.state.nodes["c"].standbys_ready == report


def test_what_a_lost_node_reports_is_ignored() -> None:
    job = shrunk()
    ready(job, "b")
    assert "b" not in job.state.nodes
