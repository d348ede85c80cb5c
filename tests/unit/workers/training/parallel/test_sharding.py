"""Messages of each way of sharding, and their times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.orchestrator.api.v1alpha1 import Parallelism
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import RankEnv
from holdfast.workers.training.loop import train_step
from holdfast.workers.training.parallel import sharding

from .recorded import Recorder, Sent, job_of, rank_of

BLOCKS = 3
GROUPS = BLOCKS + 2
"""Groups of FSDP2: the blocks, the embedding, and norm with head."""


def collectives(
    parallelism: dict[str, Any], mesh: Mesh, config: dict[str, Any] | None = None, steps: int = 1
) -> Counter[tuple[str, torch.dtype]]:
    """Sends of the last step of several."""
    with rank_of(job_of(parallelism, config, mesh.world_size), mesh) as trainer:
        for step in range(steps):
            with Recorder() as recorder:
                train_step(trainer, step)
    return Counter((sent.operation, sent.dtype) for sent in recorder.sent if sent.num_elements > 2)


GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
FLOAT, BF16 = torch.float32, torch.bfloat16
MICRO_BATCHES = 4
SMALL = {"microBatch": 1}
"""Two ranks: four micro-batches of each."""


KEPT, WHOLE = {"reshardAfterForward": False}, {"accumulateGradients": "whole"}


@pytest.mark.parametrize(
    ("parallelism", "gathers", "scatters"),
    [
        pytest.param({}, 2 * MICRO_BATCHES, MICRO_BATCHES, id="FULL_SHARD"),
        pytest.param(
            {"fsdp": {"reshardAfterForward": False}},
            MICRO_BATCHES,
            MICRO_BATCHES,
            id="SHARD_GRAD_OP",
        ),
        pytest.param({"fsdp": WHOLE}, 2 * MICRO_BATCHES, 1, id="whole gradients"),
        pytest.param({"fsdp": {**KEPT, **WHOLE}}, 1, 1, id="ZeRO-1"),
    ],
)
def test_parameters_are_gathered_and_gradients_reduced_as_often_as_the_strategy_needs(
    parallelism: dict[str, Any], gathers: int, scatters: int
) -> None:
    found = collectives({"shard": 2, **parallelism}, Mesh(shard=2), SMALL)
    assert found[GATHER, FLOAT] == gathers * GROUPS
    assert found[SCATTER, FLOAT] == scatters * GROUPS


@pytest.mark.parametrize("keep", [True, False], ids=["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_hybrid_sharding_reduces_over_replicas_once_a_step(keep: bool) -> None:
    config = {**SMALL, "globalBatch": 16}
    parallelism = {"shard": 2, "fsdp": {"reshardAfterForward": keep}}
    found = collectives(parallelism, Mesh(replicate=2, shard=2), config)
    assert found[GATHER, FLOAT] == (2 if keep else 1) * MICRO_BATCHES * GROUPS
    assert found[SCATTER, FLOAT] == MICRO_BATCHES * GROUPS
    assert found[REDUCE, FLOAT] == GROUPS


def test_an_integer_gathers_in_backward_from_groups_of_that_size() -> None:
    job = job_of({"shard": 4, "fsdp": {"reshardAfterForward": 2}}, workers=4)
    with rank_of(job, Mesh(shard=4)) as trainer, Recorder() as recorder:
        train_step(trainer, 0)
    gathered = [one.num_elements for one in recorder.sent if one.operation == GATHER]
    assert len(gathered) == 2 * GROUPS
    assert sorted(gathered[:GROUPS]) == sorted(gathered[GROUPS:])  # whole parameters, both times
    block = trainer.parallel.blocks[0]
    state = block._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one, by another name
    group = several[0] if several else state._fsdp_param_group
    assert group.post_forward_mesh_info.shard_mesh_size == 2


def test_fsdp2_sends_bfloat16_gradients_as_such_and_keeps_float32_ones() -> None:
    job = job_of({"shard": 2, "precision": {"reduce": "bfloat16"}}, workers=4)
    with rank_of(job, Mesh(replicate=2, shard=2)) as trainer:
        trainer.optimizer.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]
        with Recorder() as recorder:
            train_step(trainer, 0)
        gradients = {
            p.grad.dtype for p in trainer.parallel.shards.parameters() if p.grad is not None
        }
    sent = Counter(s.dtype for s in recorder.sent if s.operation in (SCATTER, REDUCE))
    assert sent == {BF16: 2 * GROUPS, FLOAT: 1}  # loss and norm
    assert gradients == {FLOAT}


@pytest.fixture
def one_gloo_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(settings: dict[str, Any], steps: int = 3) -> tuple[nn.Module, list[Sent]]:
    """A model in DDP after some steps, and what the last one sent."""
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(8)))
    parallelism = Parallelism.model_validate({"shard": 1, **settings})
    module = sharding.replicate(model, torch.device("cpu"), parallelism)
    for _ in range(steps):
        model.zero_grad()
        with Recorder() as recorder:
            module(torch.ones(1, 300)).sum().backward()
    return model, recorder.sent


@pytest.mark.usefixtures("one_gloo_rank")
def test_ddp_sends_bfloat16_gradients_as_such_and_keeps_float32_ones() -> None:
    for reduce, dtype in (("bfloat16", BF16), ("float32", FLOAT)):
        model, sent = reduced({"precision": {"reduce": reduce}})
        *gradients, used = sent
        assert {one.dtype for one in gradients} == {dtype}
        assert sum(one.num_elements for one in gradients) == 8 * 300 * 300
        # Which parameters were used: the buckets stay as they are, see `sharding.replicate`.
        assert (used.dtype, used.num_elements) == (torch.int32, 8)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FLOAT}


@pytest.mark.usefixtures("one_gloo_rank")
@pytest.mark.parametrize("static", [True, False])
def test_ddp_sends_buckets_of_the_given_size(static: bool) -> None:
    ddp = {"bucketMib": 1, "staticGraph": static}
    gradients = [one for one in reduced({"ddp": ddp})[1] if one.dtype == FLOAT]
    assert len(gradients) >= 3  # 2.7 MiB
    assert len([one for one in reduced({})[1] if one.dtype == FLOAT]) == 1


@pytest.mark.usefixtures("one_gloo_rank")
@pytest.mark.parametrize("view", [True, False])
def test_gradients_of_ddp_are_views_of_its_buckets_if_set(view: bool) -> None:
    model, _ = reduced({"ddp": {"gradientAsBucketView": view}})
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.untyped_storage().nbytes() > parameter.nbytes) == view


@pytest.mark.parametrize(
    ("mesh", "on_host"),
    [(Mesh(shard=2), True), (Mesh(context=2), True), (Mesh(tensor=2), False), (Mesh(), False)],
    ids=lambda one: one.describe() if isinstance(one, Mesh) else "",
)
def test_only_a_divided_copy_is_offloaded(mesh: Mesh, on_host: bool) -> None:
    """FSDP2 also wraps a whole copy beside a tensor axis: main memory and parameters must agree."""
    session = Session(RankEnv(world_size=mesh.world_size), torch.device("cuda", 0), mesh)
    offloaded = Parallelism.model_validate({"offload": "cpu"})
    assert sharding.offloads(session, offloaded) is on_host
    assert not sharding.offloads(session, Parallelism())


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_blocks_are_gathered_ahead_of_their_forward(ahead: int) -> None:
    job = job_of({"shard": 2, "fsdp": {"prefetchBlocks": ahead}})
    with rank_of(job, Mesh(shard=2)) as trainer, Recorder() as recorder:
        for number, block in enumerate(trainer.parallel.blocks):
            block.attention.register_forward_pre_hook(
                lambda *_, number=number: recorder.log.append(number)
            )
        train_step(trainer, 0)
    before = recorder.log[: recorder.log.index(0)]
    # The embedding, block 0, and what is gathered ahead of their turn.
    assert sum(getattr(one, "operation", "") == GATHER for one in before) == 2 + ahead
