"""The earlier form of fields that are choices now: following the printed line is valid."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.api.v1alpha1.load import read_yaml
from holdfast.orchestrator.errors import SpecError
from tests.unit.api.wrong_jobs import job, recipe

OPTIMIZER = "entrypoint.recipe.config.optimizer"
CHECKPOINTING = "parallelism.activationCheckpointing"

# Part of the spec, its earlier form and its present form.
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (OPTIMIZER, {"name": "adamw"}, {"adamw": {}}),
    (OPTIMIZER, {"name": "adamw", "inBackward": True}, {"adamw": {"inBackward": True}}),
    (OPTIMIZER, {"name": "dion", "momentum": 0.9}, {"dion": {"momentum": 0.9}}),
    (OPTIMIZER, {"muon": {}, "momentum": 0.9}, {"muon": {"momentum": 0.9}}),
    (
        OPTIMIZER,
        {"name": "muon", "schedule": "wsd", "minLearningRateRatio": 0.2, "decaySteps": 5},
        {"muon": {}, "learningRateSchedule": {"wsd": {"minRatio": 0.2, "decaySteps": 5}}},
    ),
    (
        OPTIMIZER,
        {"schedule": "linear", "minLearningRateRatio": 0.2, "learningRate": 0.01},
        {"learningRate": 0.01, "learningRateSchedule": {"linear": {"minRatio": 0.2}}},
    ),
    (OPTIMIZER, {"schedule": "constant"}, {"learningRateSchedule": {"constant": {}}}),
    (OPTIMIZER, {"momentum": 0.95, "rankFraction": 0.25}, {}),
    (OPTIMIZER, {"name": "muon", "inBackward": False, "decaySteps": 5}, {"muon": {}}),
    (CHECKPOINTING, {"mode": "none", "budget": 0.5}, {}),
    (CHECKPOINTING, {"full": {}, "everyNthBlock": 2}, {"full": {"everyNthBlock": 2}}),
    (CHECKPOINTING, {"mode": "full", "budget": 0.5}, {"full": {}}),
    (CHECKPOINTING, {"mode": "budget", "everyNthBlock": 2}, {"budget": 0.5}),
    (CHECKPOINTING, {"mode": "budget"}, {"budget": 0.5}),
    (CHECKPOINTING, {"mode": "selective", "keep": ["matmul"]}, {"selective": {"keep": ["matmul"]}}),
    ("parallelism", {"pipeline": 1, "pipelineSchedule": "gpipe"}, {}),
    ("parallelism", {"pipelineSchedule": "gpipe", "shard": 2}, {"shard": 2}),
    ("parallelism", {"pipeline": 4}, {"pipeline": {"ranks": 4}}),
    (
        "parallelism",
        {"pipeline": 4, "pipelineSchedule": "1f1b", "reshardAfterForward": False, "tensor": 1},
        {"pipeline": {"ranks": 4, "schedule": "1f1b"}, "tensor": 1},
    ),
    (
        "parallelism",
        {"shard": 4, "reshardAfterForward": 2, "accumulateGradients": "whole"},
        {"shard": 4, "fsdp": {"reshardAfterForward": 2, "accumulateGradients": "whole"}},
    ),
    ("checkpoint", {"guard": "auto"}, {}),
    ("checkpoint", {"guard": "never", "guardDirectories": ["a"]}, {"guard": {"never": {}}}),
    (
        "checkpoint",
        {"guard": "auto", "guardDirectories": ["a", "b: c"]},
        {"guard": {"directories": ["a", "b: c"]}},
    ),
)


def document(part: str, value: dict[str, Any]) -> dict[str, Any]:
    made = job(recipe({}, nodes={"min": 4, "max": 4}))
    *path, last = part.split(".")
    inner = made["spec"]
    for key in path:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return made


def follow(value: dict[str, Any], fix: str) -> dict[str, Any]:
    """The part as the fix says."""
    steps = dict(step.split(" ", 1) for step in fix.split("; "))
    gone = steps.get("remove", "").split(", ")
    kept = {key: child for key, child in value.items() if key not in gone}
    return {**kept, **read_yaml(f"{{{steps.get('write', '')}}}")}


@pytest.mark.parametrize("part, old, new", CASES, ids=str)
def test_the_line_to_write_means_the_same(
    part: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    with pytest.raises(SpecError) as caught:
        job_from_mapping(document(part, old))
    written = old
    for problem in caught.value.problems:
        assert "got its earlier form; expected each choice as a key; " in str(problem)
        written = follow(written, problem.fix)
    assert job_from_mapping(document(part, written)) == job_from_mapping(document(part, new))


def test_a_part_has_one_problem_and_other_mistakes_are_listed_beside_it() -> None:
    wrong = document(OPTIMIZER, {"name": "dion", "momentum": 0.9, "schedule": "wsd", "beta3": 1})
    with pytest.raises(SpecError) as caught:
        job_from_mapping(wrong)
    fields = [problem.field.rpartition(".")[2] for problem in caught.value.problems]
    assert fields == ["name", "beta3"]


@pytest.mark.parametrize(
    "parallelism, fix",
    [
        ({"reshardAfterForward": True}, "remove reshardAfterForward"),
        ({"activationCheckpointing": {"mode": "full"}}, "remove mode"),
    ],
)
def test_settings_of_a_recipe_are_removed_from_the_job_of_a_script(
    parallelism: dict[str, Any], fix: str
) -> None:
    with pytest.raises(SpecError) as caught:
        job_from_mapping(job({"entrypoint": {"script": "train.py"}, "parallelism": parallelism}))
    assert [problem.fix for problem in caught.value.problems] == [fix]


def test_packages_of_a_job_are_installed_by_uv() -> None:
    with pytest.raises(
        SpecError, match=r"spec.environment: .*write entrypoint.command: uv run --wi"
    ):
        job_from_mapping(document("environment", {"file": "requirements.txt"}))


@pytest.mark.parametrize("name", ["adam", ["muon"], None])
def test_an_unknown_choice_has_no_line(name: Any) -> None:
    with pytest.raises(SpecError, match=r"optimizer.name: got an unknown key; expected one of ad"):
        job_from_mapping(document(OPTIMIZER, {"name": name}))


def test_settings_of_a_choice_without_settings_are_rejected() -> None:
    with pytest.raises(SpecError, match=r"adamw8bit: got .*; expected {}, a choice without"):
        job_from_mapping(document(OPTIMIZER, {"adamw8bit": {"momentum": 0.9}}))
