"""`resources.gpu: auto` becomes a number once; it never hides GPUs without a word."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.planner.choose import memory_on
from holdfast.orchestrator.planner.gpus import GpusFound, TooFewGpus, is_auto, resolve, with_gpus
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts

from .builders import make_job


def job(recipe: Any = None, **spec: Any) -> TrainingJob:
    return make_job(nodes=(1, 1), workers=4, recipe=recipe, **spec)


@pytest.mark.parametrize(
    ("found", "gpu", "words"),
    [
        (GpusFound(8, "this machine has 8 GPUs"), 1, "each worker gets one GPU; this machine"),
        (GpusFound(4, "it has 4"), 1, "one GPU"),
        (GpusFound(0, "this machine has no GPU"), 0, "train on the CPU; this machine has no GPU"),
        (GpusFound(0, "the template asks", wanted=True), 1, "one GPU; the template asks"),
    ],
)
def test_auto_is_one_gpu_per_worker_where_nodes_have_them(
    found: GpusFound, gpu: int, words: str
) -> None:
    resolved, why = resolve(job(), found)
    assert resolved.spec.resources.num_gpus == resolved.spec.resources.gpu == gpu
    assert words in why and "spec.resources.gpu auto" in why
    written = job_to_mapping(resolved)
    assert written["spec"]["resources"] == {"gpu": gpu}, "0 is written, too"
    assert job_from_mapping(written) == resolved


def test_fewer_gpus_than_workers_are_refused_with_both_ways_out() -> None:
    with pytest.raises(TooFewGpus, match=r"got auto \(it has 2\); expected 0, or a node with 4"):
        resolve(job(), GpusFound(2, "it has 2"))


@pytest.mark.parametrize("gpu", [0, 1, 2])
def test_a_number_is_left_alone(gpu: int) -> None:
    given = job(resources={"gpu": gpu})
    assert resolve(given, GpusFound(8, "it has 8")) == (given, "")
    assert with_gpus(given, 7) is given


def test_an_empty_list_of_visible_devices_means_the_cpu() -> None:
    resolved, why = resolve(job(env={"CUDA_VISIBLE_DEVICES": ""}), GpusFound(8, "it has 8"))
    assert resolved.spec.resources.num_gpus == 0 and "CUDA_VISIBLE_DEVICES is empty" in why


def test_fields_without_effect_are_found_with_the_number() -> None:
    given = job({}, parallelism={"offload": "cpu", "shard": 4})
    assert is_auto(given)
    with pytest.raises(SpecError, match="offload: got cpu for a job on CPUs"):
        resolve(given, GpusFound(0, "it has none"))
    resolve(given, GpusFound(4, "it has 4"))


def test_memory_is_counted_for_all_gpus_of_a_worker() -> None:
    gpus = (Gpu("H100", 80 * 2**30),) * 8
    node = NodeFacts(hostname="a", address="10.0.0.1", data_port=1, slots=4, gpus=gpus)
    assert memory_on(job(resources={"gpu": 2}), [node]).device == 160 * 2**30
