"""Two jobs fill a cluster. One loses a Ray node, the other is untouched; a new one is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import cluster_rig
from .jobs import Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_job_that_shrinks_and_grows_does_not_affect_another_job(tmp_path: Path) -> None:
    cluster = cluster_rig.connected()
    while cluster.num_nodes < cluster_rig.NODES:
        cluster.add_node()
    jobs = [Job(tmp_path, name, 1_000_000) for name in ("left", "right")]
    try:
        left, right = jobs
        for job in jobs:
            job.running()
        places = [{job.facts(node)["ray_node"] for node in job.members()} for job in jobs]
        assert not places[0] & places[1], "two jobs on one Ray node"
        before, others = right.view(), left.view()
        node = right.members()[-1]
        cluster.kill_node(right.facts(node)["ray_node"])
        incident = right.incident_after(before.num_incidents)
        assert incident.world_size_after == 2 and incident.steps_lost == 0
        assert left.until(lambda view: view.step > others.step).generation == others.generation
        cluster.add_node()
        assert right.running(nodes=2).world_size == 4
        assert left.view().num_incidents == others.num_incidents
    finally:
        for job in jobs:
            job.end()
