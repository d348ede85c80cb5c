"""Main memory of a node: offloaded states, staged checkpoints, copies for the buddy."""

from __future__ import annotations

import itertools

from holdfast.orchestrator.explorer.host import host_rows
from holdfast.orchestrator.planner.choose import needs_buddy
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.agent.machine.peer_copies import PeerCopies

from ..planner.builders import device_rows, make_job, planned


def test_a_script_has_no_rows() -> None:
    assert host_rows(make_job(), Mesh(shard=2)) == ()


def test_offload_moves_the_states_to_the_node() -> None:
    job = make_job(recipe={}, parallelism={"offload": "cpu"}, workers=2)
    work, _layout = planned(job, Mesh(shard=2))
    rows = {row.what: row for row in host_rows(job, Mesh(shard=2))}
    states = rows["offloaded shards, gradients, moments"]
    assert (states.where, states.num_bytes) == ("node", 2 * -(-16 * work.counts.total // 2))
    device = {term.category for term in device_rows(job, Mesh(shard=2)).values()}
    assert not device & {"master", "moments", "gradients"}


def test_offload_does_nothing_without_shards() -> None:
    """7B with offload under DDP was planned at 15 GiB and took 115."""
    job = make_job(recipe={}, parallelism={"offload": "cpu"})
    work, _layout = planned(job, Mesh(replicate=2))
    assert "offloaded" not in " ".join(row.what for row in host_rows(job, Mesh(replicate=2)))
    rows = device_rows(job, Mesh(replicate=2))
    states = [row for row in rows.values() if row.category in ("master", "moments", "gradients")]
    assert {row.category for row in states} == {"master", "moments", "gradients"}
    own = ("float32 parameters", "AdamW moments", "gradients")
    assert sum(rows[what].num_bytes for what in own) == 16 * work.counts.total


def test_buddy_copies_count_only_if_no_replica_holds_the_shard() -> None:
    job = make_job(recipe={})
    assert not needs_buddy(job, Mesh(replicate=2, shard=2))
    assert needs_buddy(job, Mesh(shard=4))
    assert not needs_buddy(job, Mesh(shard=2))
    assert needs_buddy(job, Mesh(replicate=2, pipeline=2))


def test_the_plan_has_as_many_buddy_copies_as_a_node_holds() -> None:
    job, mesh = make_job(recipe={}), Mesh(shard=4)
    held = PeerCopies(itertools.count())
    for step in range(9):
        number, _fresh, _freed = held.begin(StagedShard(step, 1, 0, mesh.num_shards, 100))
        held.end(number, ok=True)
    work, _layout = planned(job, mesh)
    shard = -(-12 * work.counts.total // mesh.num_shards)
    row = next(row for row in host_rows(job, mesh) if "buddy" in row.what)
    assert row.num_bytes == len(held.copies) * shard * job.spec.workers_per_node


def test_a_checkpoint_has_twelve_bytes_per_parameter() -> None:
    job = make_job(recipe={})
    work, _layout = planned(job, Mesh(shard=4))
    row = next(row for row in host_rows(job, Mesh(shard=4)) if row.where == "storage")
    assert (row.num_bytes, row.exact) == (12 * work.counts.total, True)
