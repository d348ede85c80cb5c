"""Queries of the state."""

from __future__ import annotations

from .harness import Transcript


def test_a_rank_outside_the_world_runs_on_no_node() -> None:
    job = Transcript()
    job.submit()
    assert job.state.mesh is None and job.state.node_of(0) == ""
    job = Transcript().started()
    assert [job.state.node_of(rank) for rank in (-1, 0, 1, 2, 3, 4)] == ["", "a", "a", "b", "b", ""]
