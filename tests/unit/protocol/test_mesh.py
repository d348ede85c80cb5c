"""The names of meshes."""

from __future__ import annotations

from holdfast.orchestrator.protocol.mesh import Mesh


def test_a_shard_is_redundant_if_two_nodes_have_it() -> None:
    for mesh in (Mesh(replicate=4), Mesh(replicate=2, shard=2), Mesh(replicate=4, pipeline=2)):
        for workers in (1, 2):
            holders: dict[int, set[int]] = {}
            for rank in range(mesh.world_size):
                holders.setdefault(mesh.shard_index(rank), set()).add(rank // workers)
            assert mesh.redundant(workers) == (min(map(len, holders.values())) > 1)
    assert Mesh(replicate=2, pipeline=2).redundant(1)
    assert not Mesh(replicate=2, pipeline=2).redundant(2)  # each node has both of one stage
    assert not Mesh(shard=4).redundant(2)


def test_a_strategy_has_the_names_of_its_axes() -> None:
    names = {
        Mesh(): "single",
        Mesh(replicate=2): "DDP",
        Mesh(shard=4): "FSDP",
        Mesh(replicate=2, shard=2): "HSDP",
        Mesh(shard=2, tensor=8): "FSDP + TP",
        Mesh(tensor=2): "TP",
        Mesh(replicate=2, shard=2, context=2, pipeline=2): "HSDP + CP + PP",
    }
    assert {mesh: mesh.strategy for mesh in names} == names
