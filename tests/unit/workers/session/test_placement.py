"""A model that is not sharded as the mesh of the job is refused, with the line to write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_transport
from holdfast.workers.checkpoint.placement import ShardedOverWorld, WrongSharding, expect_mesh
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.session.agent_channel import AgentChannel
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import Meshes, RankEnv
from tests.unit.workers.checkpoint.fake_ranks import as_rank, build


@pytest.fixture
def channel() -> Iterator[AgentChannel]:
    agent, worker = worker_transport.pair()
    with agent, worker:
        yield AgentChannel(worker)


def session_of(rank: int, shape: Mesh, channel: AgentChannel) -> Session:
    at = RankEnv(rank=rank, world_size=shape.world_size)
    found = Session(at, torch.device("cpu"), shape)
    found._channel = channel
    return found


@pytest.mark.parametrize("rank", range(4))
def test_a_model_over_all_ranks_is_refused_on_a_mesh_with_replicas(
    rank: int, channel: AgentChannel
) -> None:
    """The default of a script on 2 nodes x 2 workers, and fully_shard without a mesh."""
    with as_rank(rank, 4):
        model, optimizer = build(1, 4, seed=1)
        with pytest.raises(ShardedOverWorld) as error:
            session_of(rank, Mesh(replicate=2, shard=2), channel).restore(model, optimizer)
    text = str(error.value)
    assert text.startswith("spec.parallelism: got first.weight in 4 parts, placed as (Shard(dim=0)")
    assert "expected 2 parts as in the mesh of the job (replicate 2 x shard 2)" in text
    assert "write fully_shard(..., mesh=s.fsdp_mesh) in the script" in text
    assert "or `parallelism: {shard: world}` below `spec:`" in text


@pytest.mark.parametrize("rank", range(4))
def test_a_model_on_the_mesh_of_the_job_is_accepted(rank: int, channel: AgentChannel) -> None:
    shape = Mesh(replicate=2, shard=2)
    with as_rank(rank, 4):
        model, _ = build(2, 2, seed=1)
        found = session_of(rank, shape, channel)
        assert found.restore(model, torch.optim.SGD(model.parameters(), lr=0.1)) == 0


@pytest.mark.parametrize("rank", range(4))
def test_ranks_with_one_shard_index_and_different_parts_are_refused(rank: int) -> None:
    """The right number of parts, on the wrong ranks."""
    with as_rank(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh["shard"])
        with pytest.raises(WrongSharding, match=r"write fully_shard.*s.fsdp_mesh.* script$"):
            expect_mesh(dict(model.named_parameters()), Mesh(replicate=2, shard=2), rank)


def test_fewer_parts_than_ranks_of_a_replica_are_refused() -> None:
    with as_rank(0, 4):
        model, _ = build(2, 2, seed=1)
        with pytest.raises(WrongSharding, match=r"in 2 parts.*expected 4 parts.*\{shard: 2\}") as e:
            expect_mesh(dict(model.named_parameters()), Mesh(shard=4), 0)
        assert not isinstance(e.value, ShardedOverWorld)


def test_a_parameter_that_is_a_partial_sum_is_refused() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()])
        with pytest.raises(UserError, match=r"model: got weight placed as \(Partial"):
            expect_mesh({"weight": weight}, Mesh(shard=2), 0)


def test_a_model_that_is_not_sharded_is_accepted_and_its_cost_is_printed(
    channel: AgentChannel, capsys: pytest.CaptureFixture[str]
) -> None:
    with as_rank(0, 4):
        model = nn.Linear(2, 2)
        found = session_of(0, Mesh(replicate=2, shard=2), channel)
        found.restore(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "the model is not sharded, but the mesh is replicate 2 x shard 2" in (
        capsys.readouterr().err
    )


SHAPES = [
    Mesh(shard=2, context=2),
    Mesh(replicate=2, shard=2, context=2),
    Mesh(shard=2, context=2, tensor=2),
    Mesh(replicate=2, shard=2, context=2, tensor=2),
    Mesh(replicate=2, shard=2, tensor=2),
    Mesh(pipeline=2, shard=2, context=2),
    Mesh(pipeline=2, replicate=2, shard=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=Mesh.describe)
def test_the_mesh_for_fully_shard_divides_the_model_among_all_ranks_of_a_replica(
    shape: Mesh,
) -> None:
    """Ranks of a context axis hold the same parameters unless they divide them too."""
    for rank in (0, shape.world_size // 2 - 1, shape.world_size - 1):
        with as_rank(rank, shape.world_size):
            meshes = Meshes(shape, "cpu")
            model = nn.Linear(16, 16)
            if shape.tensor > 1:
                parallelize_module(model, meshes.all_axes["tensor"], ColwiseParallel())
            fully_shard(model, mesh=meshes.data_parallel)
            assert expect_mesh(dict(model.named_parameters()), shape, rank)
            weight = model.weight
            assert isinstance(weight, DTensor)
            share = shape.num_shards // shape.pipeline
            assert weight.to_local().numel() == weight.numel() // share


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_refused_by_name(use_orig_params: bool) -> None:
    with as_rank(0, 2):
        model = FullyShardedDataParallel(
            nn.Linear(2, 2), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        with pytest.raises(WrongSharding, match=r"FSDP1\) at its root; expected fully_shard"):
            TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
