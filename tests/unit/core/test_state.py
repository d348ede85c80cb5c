"""Queries of the state, and what snapshots of earlier versions hold."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.state import DrainKind

from .harness import Transcript


def test_the_old_name_of_a_drain_is_read_and_no_other() -> None:
    assert DrainKind("park") is DrainKind.AT_RISK
    with pytest.raises(ValueError, match="parked"):
        DrainKind("parked")


def test_a_rank_outside_the_world_runs_on_no_node() -> None:
    job = Transcript()
    job.submit()
    assert job.state.mesh is None and job.state.node_of(0) == ""
    job = Transcript().started()
    assert [job.state.node_of(rank) for rank in (-1, 0, 1, 2, 3, 4)] == ["", "a", "a", "b", "b", ""]
