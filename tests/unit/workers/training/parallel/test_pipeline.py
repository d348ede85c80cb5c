"""The parts of a pipeline's ranks; what they train together is in tests/strategies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import pipelining

from holdfast.orchestrator.api.v1alpha1.parallelism import Parallelism, PipelineAxis
from holdfast.orchestrator.api.v1alpha1.recipe import Model
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.training.data import MicroBatch
from holdfast.workers.training.models.transformer import Transformer
from holdfast.workers.training.parallel.pipeline import Pipeline, _Stage

LAYERS = Model(dim=16, num_layers=8, num_heads=2)


def rank(number: int, ranks: int, schedule: Any) -> tuple[Pipeline, Transformer]:
    torch.manual_seed(0)
    model = Transformer(LAYERS)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    session = SimpleNamespace(shape=Mesh(pipeline=ranks), rank=number, tick=lambda: None)
    session.device = torch.device("cpu")
    mesh = Parallelism(pipeline=PipelineAxis(ranks=ranks, schedule=schedule))
    pipeline = Pipeline(model, session, mesh)  # type: ignore[arg-type]
    return pipeline, model


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbvZeroBubble"])
def test_the_ranks_have_each_parameter_once_under_the_name_of_the_whole_model(
    schedule: str,
) -> None:
    names = [name for n in range(4) for name, _ in rank(n, 4, schedule)[1].named_parameters()]
    assert sorted(names) == sorted(name for name, _ in Transformer(LAYERS).named_parameters())


def test_a_v_begins_and_ends_on_the_first_rank() -> None:
    blocks = [list(rank(n, 2, "zbvZeroBubble")[1].blocks._modules) for n in range(2)]
    assert blocks == [["0", "1", "6", "7"], ["2", "3", "4", "5"]]
    first, last = (rank(n, 2, "zbvZeroBubble")[1] for n in range(2))
    assert first.embedding is not None and first.head is not None
    assert last.embedding is None and last.head is None


@pytest.mark.parametrize("schedule", ["1f1b", "interleavedZeroBubble", "zbvZeroBubble"])
def test_the_stages_one_after_the_other_are_the_whole_model(schedule: str) -> None:
    tokens_bt = torch.arange(12).view(2, 6)
    whole = Transformer(LAYERS)
    parts: dict[int, Any] = {}
    for number in range(2):
        pipeline, model = rank(number, 2, schedule)
        pipeline.divide()
        parts |= pipeline._parts
        whole.load_state_dict(model.state_dict(), strict=False)
    x: Tensor = tokens_bt
    for number in sorted(parts):
        parts[number].next_batch = None
        x = parts[number](x)
    torch.testing.assert_close(x, whole(tokens_bt))


def test_added_samples_and_micro_batches_have_weight_0() -> None:
    pipeline, _ = rank(0, 4, "interleaved1f1b")
    full = MicroBatch(torch.ones(2, 3).long(), torch.ones(2, 3).long(), torch.ones(2))
    half = MicroBatch(torch.ones(1, 3).long(), torch.ones(1, 3).long(), torch.ones(1))
    filled = pipeline._filled([full] * 4 + [half])
    assert [batch.weights_b.tolist() for batch in filled] == [[1, 1]] * 4 + [[1, 0]] + [[0, 0]] * 3
    assert {tuple(batch.inputs_bt.shape) for batch in filled} == {(2, 3)}
    single, _ = rank(0, 4, "1f1b")
    assert len(single._filled([full])) == 4 and len(single._filled([full] * 5)) == 5


def test_a_rank_with_neighbouring_stages_sends_nothing_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = [SimpleNamespace(group_peer=peer) for peer in (0, 1, 1, 0)]
    name = "_get_init_p2p_neighbors_ops"  # of torch 2.11
    monkeypatch.setattr(pipelining.PipelineStage, name, lambda _: ops, raising=False)
    stage = object.__new__(_Stage)
    stage.group_rank = 1
    assert [op.group_peer for op in stage._get_init_p2p_neighbors_ops()] == [0, 0]
