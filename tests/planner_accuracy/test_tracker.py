"""Counts of bench/plan_accuracy: storages and collectives, on cases whose figures are known."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from bench.plan_accuracy import trace
from bench.plan_accuracy.cases import SMALL, Case
from bench.plan_accuracy.sent import Sent
from bench.plan_accuracy.storages import StorageTracker
from holdfast.orchestrator.protocol.mesh import Mesh


def test_a_storage_counts_once_from_its_allocation_until_it_is_freed() -> None:
    with FakeTensorMode(), StorageTracker() as tracker:
        tracker.phase = "first"
        kept = torch.empty(1000)
        view = kept.view(10, 100)[1:]
        passing = kept + 1
        del passing
        tracker.phase = "second"
        half = kept.bfloat16()
        tracker.mark(view, "weights")
    peaks = tracker.peaks()
    assert peaks["first"].num_bytes == 8000
    assert peaks["second"].num_bytes == 6000
    assert peaks["second"].by_category() == {"weights": 4000, "activations and rest": 2000}
    assert half.shape == kept.shape


def test_a_resized_storage_counts_by_its_size_at_each_moment() -> None:
    with FakeTensorMode(), StorageTracker() as tracker:
        tracker.phase = "full"
        gathered = torch.empty(1000)
        gathered.untyped_storage().resize_(0)
        tracker.phase = "empty"
        small = torch.empty(10)
        tracker.phase = "full again"
        gathered.untyped_storage().resize_(4000)
    peaks = {phase: peak.num_bytes for phase, peak in tracker.peaks().items()}
    assert peaks == {"full": 4000, "empty": 40, "full again": 4040}
    assert small.numel() == 10


def test_autograd_keeps_what_backward_needs_and_no_more() -> None:
    with FakeTensorMode(), StorageTracker() as tracker:
        weight = torch.empty(100, 100, requires_grad=True)
        tracker.phase = "forward"
        x = torch.empty(50, 100)
        result = torch.relu(x @ weight).sum()  # keeps x and the result of relu
        tracker.phase = "kept"
        torch.empty(1)
        del result
    assert tracker.peaks()["kept"].num_bytes == 4 * (100 * 100 + 2 * 50 * 100 + 1 + 1)


@pytest.mark.parametrize(("replicate", "shard"), [(1, 8), (2, 4)])
def test_bytes_of_a_collective_are_those_of_a_ring_over_its_group(
    replicate: int, shard: int
) -> None:
    mesh = Mesh(replicate=replicate, shard=shard)
    sent, tracker = Sent(mesh, 0), StorageTracker()
    tracker.observers.append(sent.observe)
    with trace.fake_groups(8, 0), FakeTensorMode():
        group = dist.new_group(list(range(shard)))
        with tracker:
            part = torch.empty(100)
            dist.all_gather_into_tensor(torch.empty(100 * shard), part, group=group)
            dist.reduce_scatter_tensor(part, torch.empty(100 * shard), group=group)
            dist.all_reduce(part, group=group)
            functional.all_gather_single(part, 0, group)
            dist.send(part, dst=1, group=group)
    ring = (shard - 1) / shard
    assert sent.num_bytes == {
        ("all-gather", "shard"): 2 * 400 * shard * ring,
        ("reduce-scatter", "shard"): 400 * shard * ring,
        ("all-reduce", "shard"): 2 * 400 * ring,
        ("send", "shard"): 400,
    }


@pytest.mark.parametrize(
    ("parameters", "vocabulary", "length"), [("float32", 4096, 2048), ("bfloat16", 256, 32)]
)
def test_the_peak_of_fsdp_is_that_of_torchs_own_tracker(
    parameters: str, vocabulary: int, length: int
) -> None:
    """FSDPMemTracker changes the order in which a group of two modules, norm and head, is reduced,
    so the peaks are elsewhere: one in the activations, one in FSDP's buffers."""
    recipe = {
        "globalBatch": 8,
        "model": {**SMALL, "numLayers": 2, "vocabSize": vocabulary},
        "data": {"sequenceLength": length},
    }
    precision = {"precision": {"parameters": parameters}}
    case = Case("FSDP", "FSDP 8", Mesh(shard=8), recipe, precision, on_gpu=False)
    measured = trace.measure(case.job, case.mesh, cuda=False)
    peak, kinds = _tracked_by_torch(case)
    assert measured.peak.num_bytes == peak
    ours = measured.peak.by_category()
    assert ours["weights"] == kinds["SHARDED_PARAM"]
    assert ours["optimizer state"] == kinds["OPT"]
    assert ours.get("gradients", 0) == kinds["SHARDED_GRAD"]


def _tracked_by_torch(case: Case) -> tuple[int, dict[str, int]]:
    """(peak, bytes by kind) of the second step by FSDPMemTracker."""
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(trace.trainer_on_fakes(case.job, case.mesh, 0))
        tracker = FSDPMemTracker(trainer.parallel.model, trainer.optimizer)
        with tracker:
            trace.loop.train_step(trainer, 0)
            tracker.reset_mod_stats()
            trace.loop.train_step(trainer, 1)
        (of_cpu,) = tracker.get_tracker_snapshot("peak").values()
    kinds = {getattr(kind, "name", str(kind)): size for kind, size in of_cpu.items()}
    return kinds["Total"], kinds
