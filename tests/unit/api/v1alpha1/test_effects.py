"""A field that would have no effect is refused by name when a job is submitted, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1.effects import without_effect
from holdfast.orchestrator.api.v1alpha1.load import job_from_mapping, parse_job
from holdfast.orchestrator.errors import SpecError

SCRIPT = {"script": "train.py"}
RECIPE = {"recipe": {"name": "pretrain"}}
SMALL_PASSES = {"recipe": {"name": "pretrain", "config": {"microBatch": 1}}}
COMPILED = {"recipe": {"name": "pretrain", "config": {"compile": True}}}


TWO_NODES = {"nodes": {"min": 2, "max": 2}}


def of_model(**model: Any) -> dict[str, Any]:
    return {"recipe": {"name": "pretrain", "config": {"model": model}}}


def document(entrypoint: Any, parallelism: Any, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "demo"},
        "spec": {
            "entrypoint": entrypoint,
            "workersPerNode": 2,
            "parallelism": parallelism,
            **spec,
        },
    }


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("precision", document(SCRIPT, {"precision": {"reduce": "bfloat16"}})),
        (
            "activationCheckpointing",
            document(SCRIPT, {"activationCheckpointing": {"mode": "full"}}),
        ),
        ("offload", document(SCRIPT, {"offload": "cpu"})),
        ("reshardAfterForward", document(SCRIPT, {"reshardAfterForward": False})),
        ("offload", document(RECIPE, {"offload": "cpu"}, resources={"gpu": 0})),
        ("offload", document(RECIPE, {"offload": "cpu", "shard": 1}, resources={"gpu": 1})),
        (
            "precision.reduce",
            document(RECIPE, {"precision": {"reduce": "bfloat16"}}, workersPerNode=1),
        ),
        ("reshardAfterForward", document(RECIPE, {"reshardAfterForward": False, "shard": 1})),
        ("prefetchBlocks", document(RECIPE, {"prefetchBlocks": 1, "shard": 1})),
        ("prefetchBlocks", document(RECIPE, {"prefetchBlocks": 1})),
        ("reshardAfterForward", document(RECIPE, {"reshardAfterForward": 2})),
        ("accumulateGradients", document(SMALL_PASSES, {"accumulateGradients": "whole"})),
        ("offload", document(RECIPE, {"offload": "cpu"}, resources={"gpu": 1})),
        (
            "precision.linear",
            document(RECIPE, {"precision": {"linear": "float8"}}, resources={"gpu": 0}),
        ),
        ("precision.linear", document(RECIPE, {"precision": {"linear": "float8"}, "tensor": 2})),
        ("prefetchBlocks", document(RECIPE, {"prefetchBlocks": 4, "shard": 2})),
        ("accumulateGradients", document(RECIPE, {"accumulateGradients": "whole", "shard": 2})),
        (
            "accumulateGradients",
            document(SMALL_PASSES, {"accumulateGradients": "whole", "shard": 1}),
        ),
        ("accumulateGradients", document(SCRIPT, {"accumulateGradients": "whole"})),
        ("prefetchBlocks", document(SCRIPT, {"prefetchBlocks": 1})),
        ("ddp", document(SCRIPT, {"ddp": {"bucketMib": 1}})),
        ("ddp", document(RECIPE, {"ddp": {"bucketMib": 1}})),
        ("ddp", document(RECIPE, {"ddp": {"bucketMib": 1}, "shard": 2})),
        ("ddp", document(RECIPE, {"ddp": {"bucketMib": 1}, "shard": 1, "tensor": 2})),
        ("ddp", document(RECIPE, {"ddp": {"bucketMib": 1}, "shard": 1}, workersPerNode=1)),
        ("ddp.staticGraph", document(SMALL_PASSES, {"ddp": {"staticGraph": True}, "shard": 1})),
        (
            "activationCheckpointing.everyNthBlock",
            document(RECIPE, {"activationCheckpointing": {"everyNthBlock": 2}}),
        ),
        (
            "activationCheckpointing.keep",
            document(RECIPE, {"activationCheckpointing": {"mode": "full", "keep": ["matmul"]}}),
        ),
        (
            "activationCheckpointing.budget",
            document(RECIPE, {"activationCheckpointing": {"mode": "selective", "budget": 0.1}}),
        ),
        (
            "activationCheckpointing.mode",
            document(RECIPE, {"activationCheckpointing": {"mode": "budget"}}),
        ),
        (
            "activationCheckpointing.everyNthBlock",
            document(RECIPE, {"activationCheckpointing": {"mode": "full", "everyNthBlock": 5}}),
        ),
        (
            "activationCheckpointing.everyNthBlock",
            document(
                RECIPE,
                {"pipeline": 2, "activationCheckpointing": {"mode": "full", "everyNthBlock": 3}},
            ),
        ),
        (
            "precision.reduce",
            document(RECIPE, {"precision": {"reduce": "bfloat16"}, "tensor": 2}),
        ),
        (
            "precision.linear",
            document(of_model(dim=24, numHeads=2), {"precision": {"linear": "float8"}}),
        ),
        ("tensor", document(SCRIPT, {"tensor": 4}, **TWO_NODES)),
        ("tensorOverNodes", document(SCRIPT, {"tensor": 2, "tensorOverNodes": True})),
        ("tensorOverNodes", document(RECIPE, {"tensorOverNodes": True})),
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
        document(SCRIPT, {"shard": 2}),
        document(RECIPE, {"offload": "cpu", "shard": 2}, resources={"gpu": 1}),
        document(RECIPE, {"precision": {"parameters": "bfloat16", "reduce": "bfloat16"}}),
        document(RECIPE, {"activationCheckpointing": {"mode": "full"}, "shard": 1}),
        document(RECIPE, {"precision": {"reduce": "bfloat16"}, "shard": 1}),
        document(RECIPE, {"precision": {"parameters": "float16"}}),
        document(RECIPE, {"precision": {"linear": "float8"}}),
        document(RECIPE, {"prefetchBlocks": 3, "shard": 2}),
        document(SMALL_PASSES, {"accumulateGradients": "whole", "shard": 2}),
        document(RECIPE, {"ddp": {"bucketMib": 1, "staticGraph": True}, "shard": 1}),
        document(RECIPE, {"ddp": {"bucketMib": 1}, "replicate": 2}),
        document(RECIPE, {"activationCheckpointing": {"mode": "selective", "keep": ["matmul"]}}),
        document(COMPILED, {"activationCheckpointing": {"mode": "budget", "budget": 0.1}}),
        document(RECIPE, {"activationCheckpointing": {"mode": "full", "everyNthBlock": 4}}),
        document(RECIPE, {"precision": {"reduce": "bfloat16"}, "context": 2}),
        document(SCRIPT, {"tensor": 4, "tensorOverNodes": True}, **TWO_NODES),
        document(RECIPE, {"tensor": 4, "tensorOverNodes": True}, **TWO_NODES),
    ],
    ids=str,
)
def test_a_field_with_an_effect_is_accepted(given: Any) -> None:
    assert without_effect(job_from_mapping(given)) == []


def of_optimizer(**settings: Any) -> dict[str, Any]:
    return {"recipe": {"name": "pretrain", "config": {"optimizer": settings}}}


def in_backward(**settings: Any) -> dict[str, Any]:
    return of_optimizer(inBackward=True, gradientClip=0, **settings)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("momentum", document(of_optimizer(momentum=0.9), {})),
        ("rankFraction", document(of_optimizer(name="muon", rankFraction=0.5), {})),
        ("name", document(of_optimizer(name="muon"), {"tensor": 2})),
        ("name", document(of_optimizer(name="adamw8bit"), {"tensor": 2})),
        ("inBackward", document(of_optimizer(inBackward=True), {"shard": 2})),
        ("inBackward", document(in_backward(), {"shard": 1})),
        ("inBackward", document(in_backward(), {})),
        ("inBackward", document(in_backward(name="muon"), {"shard": 2})),
        (
            "inBackward",
            document(in_backward(), {"shard": 2, "precision": {"parameters": "float16"}}),
        ),
        ("inBackward", document(in_backward(), {"shard": "world", "tensor": 2})),
        (
            "name",
            document(
                of_optimizer(name="dion"), {"offload": "cpu", "shard": 2}, resources={"gpu": 1}
            ),
        ),
        (
            "inBackward",
            document(in_backward(), {"offload": "cpu", "shard": 2}, resources={"gpu": 1}),
        ),
    ],
    ids=str,
)
def test_a_setting_that_the_optimizer_cannot_follow_is_refused(field: str, given: Any) -> None:
    (problem,) = without_effect(job_from_mapping(given))
    assert problem.field == f"spec.entrypoint.recipe.config.optimizer.{field}"


def test_settings_that_the_optimizer_follows_are_accepted() -> None:
    for settings in ({"name": "muon", "momentum": 0.9}, {"name": "dion", "rankFraction": 0.5}):
        assert without_effect(job_from_mapping(document(of_optimizer(**settings), {}))) == []
    for axes in ({"shard": 2}, {"context": 2}):
        assert without_effect(job_from_mapping(document(in_backward(), axes))) == []


def test_moments_of_8_bits_need_rows_that_can_have_them() -> None:
    for model, accepted in (({"dim": 64}, False), ({"dim": 64, "ffnDim": 512}, True)):
        entrypoint = of_optimizer(name="adamw8bit")
        entrypoint["recipe"]["config"]["model"] = model
        problems = without_effect(job_from_mapping(document(entrypoint, {})))
        assert (problems == []) == accepted
        for problem in problems:
            assert problem.got == "adamw8bit with model.dim 64 and ffnDim 192"


def test_a_number_of_validation_samples_needs_an_evaluation() -> None:
    config = {"data": {"validation": {"samples": 5}}}
    for more, accepted in (({}, False), ({"evaluateEverySteps": 10}, True)):
        recipe = {"recipe": {"name": "pretrain", "config": {**config, **more}}}
        problems = without_effect(job_from_mapping(document(recipe, {})))
        assert (problems == []) == accepted
        for problem in problems:
            assert problem.field == "spec.entrypoint.recipe.config.data.validation.samples"


def test_a_micro_batch_larger_than_the_global_batch_is_refused_at_submission() -> None:
    recipe = {"recipe": {"name": "pretrain", "config": {"globalBatch": 8, "microBatch": 9}}}
    (problem,) = without_effect(job_from_mapping(document(recipe, {})))
    assert str(problem) == (
        "spec.entrypoint.recipe.config.microBatch: got 9; expected at most globalBatch (8); use "
        "auto, or a smaller number"
    )


def test_a_minimum_of_a_constant_rate_is_refused_at_submission() -> None:
    optimizer = {"schedule": "constant", "minLearningRateRatio": 0.5}
    recipe = {"recipe": {"name": "pretrain", "config": {"optimizer": optimizer}}}
    (problem,) = without_effect(job_from_mapping(document(recipe, {})))
    assert problem.field.endswith("optimizer.minLearningRateRatio")
    assert problem.got == "0.5 with schedule constant"


@pytest.mark.parametrize(("gpu", "accepted"), [(0, False), (2, False), (1, True), ("auto", True)])
def test_standbys_with_a_gpu_need_one_gpu_per_worker(gpu: int | str, accepted: bool) -> None:
    given = document(SCRIPT, {}, resources={"gpu": gpu}, recovery={"gpuStandbys": True})
    found = [problem.field for problem in without_effect(job_from_mapping(given))]
    assert found == ([] if accepted else ["spec.recovery.gpuStandbys"])
