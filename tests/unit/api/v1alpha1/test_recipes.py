"""Recipes by name: those in the tree, and one of another package."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping, recipe
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.parts import load
from tests.unit.api.wrong_jobs import job

FILES = {"model": "model", "data": "data.jsonl", "output": "tuned"}


class Ours(recipe.RecipeConfig):
    """Settings of a recipe in another package."""

    main = "json:dumps"

    rounds: int = 1


def with_recipe(name: str, config: dict[str, Any] | None, **spec: Any) -> dict[str, Any]:
    written = {"name": name} | ({} if config is None else {"config": config})
    return job({"entrypoint": {"recipe": written}, "resources": {"gpu": 0}, **spec})


def test_a_package_adds_a_recipe_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("ours", f"{__name__}:Ours", "holdfast.recipes")
    monkeypatch.setattr(recipe, "entry_points", lambda group: [point] if group else [])
    made = job_from_mapping(with_recipe("ours", {"rounds": 2, "globalBatch": 3}))
    assert job_from_mapping(job_to_mapping(made)) == made
    config = made.spec.entrypoint.recipe.config  # type: ignore[union-attr]
    assert isinstance(config, Ours) and (config.rounds, config.global_batch) == (2, 3)
    assert load(config.main)([1]) == "[1]"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (with_recipe("other", {}), "name: got other; expected one of pretrain, finetune"),
        (with_recipe("finetune", None), "config.model: got nothing"),
        (with_recipe("finetune", {**FILES, "out": 1}), "did you mean output"),
        (with_recipe("finetune", {**FILES, "merge": True}), "merge: got true with method full"),
        (with_recipe("finetune", {**FILES, "adapter": {"rank": 4}}), "adapter: got settings with"),
        (with_recipe("finetune", {**FILES, "evaluateEverySteps": 2}), "expected validation: FILE"),
        (with_recipe("finetune", {**FILES, "steps": 9, "epochs": 2}), "epochs: got 2 with steps"),
        (with_recipe("finetune", {**FILES, "optimizer": {"muon": {}}}), "muon: got it with recipe"),
        (
            with_recipe("finetune", FILES, workersPerNode=2, parallelism={"context": 2}),
            "parallelism.context: got 2 with recipe finetune; expected 1",
        ),
        (
            with_recipe(
                "finetune", FILES | {"method": "qlora"}, workersPerNode=2, parallelism={"tensor": 2}
            ),
            "parallelism.tensor: got 2 with recipe finetune; expected 1, as weights of method",
        ),
        (
            with_recipe(
                "finetune",
                FILES,
                nodes={"min": 2, "max": 2},
                workersPerNode=3,
                parallelism={"tensor": 2},
            ),
            "parallelism.tensor: got 2; expected a divisor of workersPerNode (3)",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_wrong_settings_are_rejected(written: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        job_from_mapping(written)
    assert message in str(caught.value)


def test_adapters_have_a_larger_learning_rate() -> None:
    rates = []
    for config in ({}, {"method": "lora"}, {"method": "lora", "optimizer": {"learningRate": 0.5}}):
        made = job_from_mapping(with_recipe("finetune", FILES | config)).spec.entrypoint.recipe
        assert made is not None
        rates.append(made.config.optimizer.learning_rate)
    assert rates == [1e-5, 2e-4, 0.5]


@pytest.mark.parametrize(
    ("method", "rate", "usual"),
    [("full", 2e-4, "1e-6 to 2e-5"), ("full", 2e-5, ""), ("lora", 1e-5, "1e-4 to 3e-4")],
)
def test_the_learning_rate_of_the_other_method_is_remarked(
    method: str, rate: float, usual: str
) -> None:
    config = FILES | {"method": method, "optimizer": {"learningRate": rate}}
    (text,) = remarks(job_from_mapping(with_recipe("finetune", config))) or [""]
    assert text.endswith(usual) and bool(text) == bool(usual)


def test_a_warm_up_without_an_end_is_remarked() -> None:
    texts = [
        remarks(job_from_mapping(with_recipe("finetune", FILES | {"steps": steps})))
        for steps in (20, 21)
    ]
    assert "warmupSteps: 20 with steps: 20" in texts[0][0] and texts[1] == []
