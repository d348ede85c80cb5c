"""The planner beside a traced step of the recipe: one small job of each family. The large ones are
in `python -m bench.plan_accuracy`."""

from __future__ import annotations

import pytest

from bench.plan_accuracy.cases import BF16, FP32, SMALL, Case, case
from bench.plan_accuracy.report import compare
from holdfast.orchestrator.protocol.mesh import Mesh

TINY = {**SMALL, "numLayers": 2, "numKvHeads": 4}
BROAD = {**TINY, "dim": 1024, "numHeads": 16}
"""Norms, which the planner divides over a tensor axis although its ranks have them whole, are less
than a thousandth of it."""
WORDS = {**TINY, "vocabSize": 32000}
"""The head, and the sums of its gradient over the chunks of the loss, are most of it."""
AC = {"activationCheckpointing": {"full": {}}}

JOBS = (
    case("single", "one rank, float32, CPU", Mesh(), TINY, dtype=FP32, on_gpu=False),
    case("DDP", "DDP", Mesh(replicate=4), TINY, length=256, passes=2),
    case("FSDP", "states count", Mesh(shard=8), TINY, length=32, samples=1),
    case("FSDP", "activations count", Mesh(shard=8), TINY, length=1024),
    case("FSDP", "CPU", Mesh(shard=8), TINY, length=1024, dtype=BF16, on_gpu=False),
    case("ZeRO", "ZeRO-2", Mesh(shard=8), TINY, length=256, fsdp={"reshardAfterForward": False}),
    case("HSDP", "HSDP", Mesh(replicate=2, shard=4), TINY, length=256),
    case("TP", "TP and FSDP", Mesh(shard=2, tensor=4), BROAD),
    case("CP", "CP and FSDP", Mesh(shard=2, context=2), TINY, length=1024),
    case("PP", "PP", Mesh(pipeline=2), TINY, length=512, passes=4),
    case(
        "PP",
        "GPipe, a block on each rank",
        Mesh(pipeline=2),
        {**TINY, "vocabSize": 512},
        length=128,
        passes=2,
        pipeline={"schedule": "gpipe"},
    ),
    case("3-D", "PP, FSDP and TP", Mesh(pipeline=2, shard=2, tensor=2), BROAD, passes=2),
    case("AC", "AC full", Mesh(shard=8), SMALL, length=512, **AC),
    case("loss", "FSDP, chunks", Mesh(shard=8), WORDS, length=512, chunk=128),
    case("loss", "DDP, chunks", Mesh(replicate=4), WORDS, length=512, chunk=128),
    case(
        "loss", "CPU, chunks", Mesh(shard=4), WORDS, length=512, chunk=128, dtype=FP32, on_gpu=False
    ),
    case("offload", "offload", Mesh(shard=8), TINY, length=256, offload="cpu"),
)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.family}: {job.name}")
def test_the_plan_is_what_a_traced_step_needs_and_sends(job: Case) -> None:
    found = compare(job)
    states, peak, sent = found.states_error, found.peak_error, found.sent_error
    assert abs(states) <= 0.01, f"states {states:+.2%}"
    assert abs(peak) <= 0.1, f"peak {peak:+.1%}, in {found.peak_phase}"
    assert abs(sent) <= 0.001, f"sent {sent:+.3%}"
