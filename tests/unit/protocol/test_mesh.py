"""The names of meshes."""

from __future__ import annotations

from holdfast.orchestrator.protocol.mesh import Mesh


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
