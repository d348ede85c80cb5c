"""A field that would have no effect is refused by name when a job is submitted, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1.effects import without_effect
from holdfast.orchestrator.api.v1alpha1.load import job_from_mapping, parse_job
from holdfast.orchestrator.errors import SpecError
from tests.unit.api import wrong_jobs

CPUS, GPUS = {"resources": {"gpu": 0}}, {"resources": {"gpu": 1}}
WHOLE = {"accumulateGradients": "whole"}
TWO_NODES = {"nodes": {"min": 2, "max": 2}}


def script(mesh: Any = None, **spec: Any) -> Any:
    return wrong_jobs.job(
        wrong_jobs.script(parallelism=mesh or {}, **{"workersPerNode": 2, **spec})
    )


def recipe(mesh: Any = None, config: Any = None, **spec: Any) -> Any:
    two = {"workersPerNode": 2, **spec}
    return wrong_jobs.job(wrong_jobs.recipe(config, parallelism=mesh or {}, **two))


def small_passes(mesh: Any) -> Any:
    return recipe(mesh, {"microBatch": 1})


def checkpointing(mode: str, settings: Any, **mesh: Any) -> Any:
    return recipe({"activationCheckpointing": {mode: settings}, **mesh})


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("precision", script({"precision": {"reduce": "bfloat16"}})),
        ("activationCheckpointing", script({"activationCheckpointing": {"full": {}}})),
        ("offload", script({"offload": "cpu"})),
        ("fsdp", script({"fsdp": {"reshardAfterForward": False}})),
        ("offload", recipe({"offload": "cpu"}, **CPUS)),
        ("offload", recipe({"offload": "cpu", "shard": 1}, **GPUS)),
        ("precision.reduce", recipe({"precision": {"reduce": "bfloat16"}}, workersPerNode=1)),
        ("fsdp", recipe({"fsdp": {"reshardAfterForward": False}, "shard": 1})),
        ("fsdp", recipe({"fsdp": {"prefetchBlocks": 1}})),
        ("fsdp", small_passes({"fsdp": WHOLE})),
        ("offload", recipe({"offload": "cpu"}, **GPUS)),
        ("precision.linear", recipe({"precision": {"linear": "float8"}}, **CPUS)),
        ("precision.linear", recipe({"precision": {"linear": "float8"}, "tensor": 2})),
        ("fsdp.prefetchBlocks", recipe({"fsdp": {"prefetchBlocks": 4}, "shard": 2})),
        ("fsdp.accumulateGradients", recipe({"fsdp": WHOLE, "shard": 2})),
        ("pipeline", script({"pipeline": {"ranks": 2, "schedule": "gpipe"}})),
        ("ddp", script({"ddp": {"bucketMib": 1}})),
        ("ddp", recipe({"ddp": {"bucketMib": 1}, "shard": 1, "tensor": 2})),
        ("ddp", recipe({"ddp": {"bucketMib": 1}, "shard": 1}, workersPerNode=1)),
        ("ddp.staticGraph", small_passes({"ddp": {"staticGraph": True}, "shard": 1})),
        ("activationCheckpointing.budget", checkpointing("budget", 0.1)),
        ("activationCheckpointing.full.everyNthBlock", checkpointing("full", {"everyNthBlock": 5})),
        (
            "activationCheckpointing.selective.everyNthBlock",
            checkpointing("selective", {"everyNthBlock": 3}, pipeline={"ranks": 2}),
        ),
        ("precision.reduce", recipe({"precision": {"reduce": "bfloat16"}, "tensor": 2})),
        (
            "precision.linear",
            recipe({"precision": {"linear": "float8"}}, {"model": {"dim": 24, "numHeads": 2}}),
        ),
        ("tensor", script({"tensor": 4}, **TWO_NODES)),
        ("tensorOverNodes", script({"tensor": 2, "tensorOverNodes": True})),
        ("tensorOverNodes", recipe({"tensorOverNodes": True})),
    ],
    ids=str,
)
def test_a_field_without_its_effect_is_refused_at_submission(field: str, given: Any) -> None:
    (problem,) = without_effect(job_from_mapping(given))
    assert problem.field == f"spec.parallelism.{field}"
    with pytest.raises(SpecError, match=problem.field):
        parse_job(str(given))  # a dict of such values is YAML


@pytest.mark.parametrize(
    "given",
    [
        script({"shard": 2}),
        recipe({"offload": "cpu", "shard": 2}, **GPUS),
        recipe({"precision": {"parameters": "bfloat16", "reduce": "bfloat16"}}),
        checkpointing("full", {}, shard=1),
        recipe({"precision": {"reduce": "bfloat16"}, "shard": 1}),
        recipe({"precision": {"parameters": "float16"}}),
        recipe({"precision": {"linear": "float8"}}),
        recipe({"fsdp": {"prefetchBlocks": 3}, "shard": 2}),
        small_passes({"fsdp": WHOLE, "shard": 2}),
        recipe({"ddp": {"bucketMib": 1}}),
        script({"pipeline": {"ranks": 2}}),
        recipe({"ddp": {"bucketMib": 1, "staticGraph": True}, "shard": 1}),
        recipe({"ddp": {"bucketMib": 1}, "replicate": 2}),
        checkpointing("selective", {"keep": ["matmul"]}),
        recipe({"activationCheckpointing": {"budget": 0.1}}, {"compile": True}),
        checkpointing("full", {"everyNthBlock": 4}),
        recipe({"precision": {"reduce": "bfloat16"}, "context": 2}),
        script({"tensor": 4, "tensorOverNodes": True}, **TWO_NODES),
        recipe({"tensor": 4, "tensorOverNodes": True}, **TWO_NODES),
    ],
    ids=str,
)
def test_a_field_with_an_effect_is_accepted(given: Any) -> None:
    assert without_effect(job_from_mapping(given)) == []


def in_backward(mesh: Any, clip: int = 0, **spec: Any) -> Any:
    optimizer = {"adamw": {"inBackward": True}, "gradientClip": clip}
    return recipe(mesh, {"optimizer": optimizer}, **spec)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("muon", recipe({"tensor": 2}, {"optimizer": {"muon": {}}})),
        ("adamw8bit", recipe({"tensor": 2}, {"optimizer": {"adamw8bit": {}}})),
        ("dion", recipe({"offload": "cpu", "shard": 2}, {"optimizer": {"dion": {}}}, **GPUS)),
        ("adamw.inBackward", in_backward({"shard": 2}, clip=1)),
        ("adamw.inBackward", in_backward({"shard": 1})),
        ("adamw.inBackward", in_backward({})),
        ("adamw.inBackward", in_backward({"shard": 2, "precision": {"parameters": "float16"}})),
        ("adamw.inBackward", in_backward({"shard": "world", "tensor": 2})),
        ("adamw.inBackward", in_backward({"offload": "cpu", "shard": 2}, **GPUS)),
    ],
    ids=str,
)
def test_a_setting_that_the_optimizer_cannot_follow_is_refused(field: str, given: Any) -> None:
    (problem,) = without_effect(job_from_mapping(given))
    assert problem.field == f"spec.entrypoint.recipe.config.optimizer.{field}"


def test_settings_that_the_optimizer_follows_are_accepted() -> None:
    for optimizer in ({"muon": {"momentum": 0.9}}, {"dion": {"rankFraction": 0.5}}):
        assert without_effect(job_from_mapping(recipe({}, {"optimizer": optimizer}))) == []
    for axes in ({"shard": 2}, {"context": 2}):
        assert without_effect(job_from_mapping(in_backward(axes))) == []


def test_moments_of_8_bits_need_rows_that_can_have_them() -> None:
    for model, accepted in (({"dim": 64}, False), ({"dim": 64, "ffnDim": 512}, True)):
        given = recipe({}, {"optimizer": {"adamw8bit": {}}, "model": model})
        problems = without_effect(job_from_mapping(given))
        assert (problems == []) == accepted
        for problem in problems:
            assert problem.got == "it with model.dim 64 and ffnDim 192"


def test_a_number_of_validation_samples_needs_an_evaluation() -> None:
    config = {"data": {"validation": {"samples": 5}}}
    for more, accepted in (({}, False), ({"evaluateEverySteps": 10}, True)):
        problems = without_effect(job_from_mapping(recipe({}, {**config, **more})))
        assert (problems == []) == accepted
        for problem in problems:
            assert problem.field == "spec.entrypoint.recipe.config.data.validation.samples"


def test_a_micro_batch_larger_than_the_global_batch_is_refused_at_submission() -> None:
    (problem,) = without_effect(job_from_mapping(recipe({}, {"globalBatch": 8, "microBatch": 9})))
    assert str(problem) == (
        "spec.entrypoint.recipe.config.microBatch: got 9; expected at most globalBatch (8); use "
        "auto, or a smaller number"
    )


@pytest.mark.parametrize(("gpu", "accepted"), [(0, False), (2, False), (1, True), ("auto", True)])
def test_standbys_with_a_gpu_need_one_gpu_per_worker(gpu: int | str, accepted: bool) -> None:
    given = script(resources={"gpu": gpu}, recovery={"gpuStandbys": True})
    found = [problem.field for problem in without_effect(job_from_mapping(given))]
    assert found == ([] if accepted else ["spec.recovery.gpuStandbys"])
