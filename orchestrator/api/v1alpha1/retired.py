"""Fields of the spec that are gone, and settings that are inside their choice now: rejected, with
what to write. The CRD rejects each field that is gone and names the command that prints it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from holdfast.orchestrator.errors import Problem

MOVED: dict[str, dict[str, str]] = {
    "spec": {"environment": ""},
    "spec.entrypoint.recipe.config.optimizer": {
        "name": "{name}",
        "inBackward": "{name}.inBackward",
        "momentum": "{name}.momentum",
        "rankFraction": "{name}.rankFraction",
        "schedule": "learningRateSchedule.{schedule}",
        "minLearningRateRatio": "learningRateSchedule.{schedule}.minRatio",
        "decaySteps": "learningRateSchedule.{schedule}.decaySteps",
    },
    "spec.parallelism.activationCheckpointing": {
        "mode": "{mode}",
        "everyNthBlock": "{mode}.everyNthBlock",
        "keep": "{mode}.keep",
    },
    "spec.parallelism": {
        "pipeline": "pipeline.ranks",
        "pipelineSchedule": "pipeline.schedule",
        "pipelineStagesPerRank": "pipeline.stagesPerRank",
        "reshardAfterForward": "fsdp.reshardAfterForward",
        "accumulateGradients": "fsdp.accumulateGradients",
        "prefetchBlocks": "fsdp.prefetchBlocks",
    },
    "spec.checkpoint": {"guard": "guard.{guard}", "guardDirectories": "guard.directories"},
}
"""Part -> its earlier fields, and their places in it now; one that ends with } was the choice."""
CHOICES = {
    "name": ("adamw", "adamw8bit", "muon", "dion"),
    "schedule": ("cosine", "linear", "constant", "wsd"),
    "mode": ("none", "full", "selective", "budget"),
    "guard": ("auto", "never"),
}
"""Values of a field that was a choice, the default first; none and auto choose nothing."""
SETTINGS = {
    "inBackward": ("adamw",), "momentum": ("muon", "dion"), "rankFraction": ("dion",),
    "minLearningRateRatio": ("cosine", "linear", "wsd"), "decaySteps": ("wsd",),
}  # fmt: skip
"""Setting -> the choices that have it; it had no effect with the others."""


def without_retired(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Problem]]:
    """The document in the present form, and one problem for each part in the earlier one."""
    copied = json.loads(json.dumps(document))
    problems: list[Problem] = []
    recipe = "'recipe': " in str(copied.get("spec"))  # else its settings had no effect
    for place, moved in MOVED.items():
        part = copied
        for key in place.split("."):
            part = part.get(key) if isinstance(part, dict) else None
        if isinstance(part, dict) and part.pop("environment", None) is not None:
            got, expected = "packages to install", "them in the image, or installed by uv"
            fix = "write entrypoint.command: uv run --with-requirements requirements.txt SCRIPT"
            problems.append(Problem(f"{place}.environment", got, expected, fix))
        elif isinstance(part, dict) and (changed := _change(part, moved, recipe)):
            field, fix = f"{place}.{changed[0]}", changed[1]
            problems.append(Problem(field, "its earlier form", "each choice as a key", fix))
    return (copied if problems else document), problems


def _change(part: dict[str, Any], moved: dict[str, str], recipe: bool) -> tuple[str, str] | None:
    """Change a part to its present form. Its first earlier field, and what to write; None: it has
    none."""
    old = {k: part[k] for k in moved if not isinstance(part.get(k), (dict, type(None)))}
    present = {k: next((c for c in words if c in part), words[0]) for k, words in CHOICES.items()}
    chosen = {**present, **old} if recipe else {**present, **old, "mode": "none"}
    if not old or any(chosen[key] not in words for key, words in CHOICES.items()):
        return None
    before = [*part]
    for key in old:
        del part[key]
    if "mode" in old and chosen["mode"] != "budget":
        part.pop("budget", None)
    touched = []
    for key, value in old.items():
        if not {*SETTINGS.get(key, ("",))} & {"", chosen["name"], chosen["schedule"]}:
            continue
        first, *rest = moved[key].format_map(chosen).split(".")
        touched.append(first)
        _set(part, [first, *rest], {} if moved[key].endswith("}") else value)
    if "pipeline" in touched and part["pipeline"].get("ranks", 1) == 1:
        del part["pipeline"]
    if "fsdp" in touched and ({"ddp", "pipeline"} & {*part} or not recipe):
        del part["fsdp"]  # it had no effect
    written = {name: part[name] for name in touched if name in part}
    line = yaml.safe_dump(written, default_flow_style=True, sort_keys=False, width=1 << 20)[1:-2]
    steps = [f"write {line}"] * bool(written)
    gone = [name for name in before if name not in part]
    return next(iter(old)), "; ".join([*steps, *[f"remove {', '.join(gone)}"] * bool(gone)])


def _set(part: dict[str, Any], path: list[str], value: Any) -> None:
    if not {"auto", "none"} & {*path}:
        for name in path[:-1]:
            part = part.setdefault(name, {})
        if isinstance(part, dict) and "never" not in part:  # budget and never have no settings
            part.setdefault(path[-1], 0.5 if path == ["budget"] else value)
