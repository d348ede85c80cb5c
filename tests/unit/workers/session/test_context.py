"""The context axis: which part a rank gets, and what is refused, on groups that move no data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch.distributed.device_mesh import init_device_mesh

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session import Session
from holdfast.workers.session.context import divide
from holdfast.workers.session.distributed import RankEnv
from tests.unit.workers.checkpoint.fake_ranks import as_rank

INPUTS_BT = torch.arange(16).view(2, 8)


def test_without_a_context_axis_the_sequences_are_whole() -> None:
    session = Session(RankEnv(), torch.device("cpu"), Mesh())
    with session.context_parallel(INPUTS_BT) as (inputs_bt, positions_t):
        assert inputs_bt is INPUTS_BT and positions_t.tolist() == list(range(8))


def test_a_sequence_that_has_no_two_pieces_for_each_rank_is_refused() -> None:
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("context",))
        with (
            pytest.raises(UserError, match=r"got 4 for a sequence of 12; .* 8 divides"),
            divide(mesh, torch.zeros(2, 12)),
        ):
            pass


@pytest.mark.parametrize("options", [{}, {"attn_mask": torch.zeros(1, 1, 4, 8)}])
def test_attention_that_is_not_causal_is_refused(options: dict[str, torch.Tensor]) -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
        with divide(mesh, torch.zeros(1, 8)):
            q = k = v = torch.zeros(1, 2, 4, 8)
            with pytest.raises(UserError, match="expected is_causal=True without a mask"):
                F.scaled_dot_product_attention(q, k, v, **options)


def test_attention_without_a_kernel_of_the_ring_is_an_error_and_not_another_result() -> None:
    """The plain operators would take the order of the pieces for that of the sequence."""
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
        with divide(mesh, torch.zeros(1, 8)):
            q = k = v = torch.zeros(1, 2, 4, 8)
            with pytest.raises(RuntimeError, match="No available kernel"):
                F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
