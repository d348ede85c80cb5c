"""The earlier form of fields that are choices now: rejected, with the line to write.

The line is built from the whole part: a choice has the settings of the other fields inside it. The
CRD rejects the same fields in the same words (rules.py), except those whose type changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from holdfast.orchestrator.errors import Problem

Fields = dict[str, Any]

OPTIMIZER = "spec.entrypoint.recipe.config.optimizer"
CHECKPOINTING = "spec.parallelism.activationCheckpointing"
PIPELINE, FSDP = "spec.parallelism.pipeline", "spec.parallelism.fsdp"
GUARD = "spec.checkpoint.guard"

_COUNT = {"type": "number"}
_COUNT_OR_WORD = {"x-kubernetes-int-or-string": True, "maxLength": 64}
_TEXTS = {"type": "array", "maxItems": 16, "items": {"type": "string", "maxLength": 4096}}
SCHEMAS: dict[str, dict[str, Fields]] = {
    CHECKPOINTING: {
        "mode": {"type": "string", "enum": ["none", "full", "selective", "budget"]},
        "everyNthBlock": _COUNT,
        "keep": _TEXTS,
    },
    "spec.parallelism": {
        "pipelineSchedule": {"type": "string", "maxLength": 64},
        "pipelineStagesPerRank": _COUNT_OR_WORD,
        "reshardAfterForward": {"type": "boolean"},  # CEL sees no field without a type
        "accumulateGradients": {"type": "string", "maxLength": 64},
        "prefetchBlocks": _COUNT,
    },
    "spec.checkpoint": {"guardDirectories": _TEXTS},
}
"""Part -> its fields of the earlier form, with the schemas that they had: so the CRD's rule, and
not the schema, rejects them. An integer for reshardAfterForward has the schema's error: see the
field's description."""

MOVED = {
    PIPELINE: {"pipelineSchedule": "schedule", "pipelineStagesPerRank": "stagesPerRank"},
    FSDP: {name: name for name in ("reshardAfterForward", "accumulateGradients", "prefetchBlocks")},
    GUARD: {"guardDirectories": "directories"},
}
"""Choice -> fields of the earlier form that were beside it, and their names inside it."""
_METHODS: dict[str, Fields] = {
    "adamw": {"inBackward": "inBackward"},
    "adamw8bit": {},
    "muon": {"momentum": "momentum"},
    "dion": {"momentum": "momentum", "rankFraction": "rankFraction"},
}
_SCHEDULES: dict[str, Fields] = {
    "cosine": {"minLearningRateRatio": "minRatio"},
    "linear": {"minLearningRateRatio": "minRatio"},
    "constant": {},
    "wsd": {"minLearningRateRatio": "minRatio", "decaySteps": "decaySteps"},
}
MODES: dict[str, Fields] = {
    "none": {},
    "full": {"everyNthBlock": "everyNthBlock"},
    "selective": {"everyNthBlock": "everyNthBlock", "keep": "keep"},
    "budget": {},
}

RETYPED = {
    PIPELINE: " Earlier form, rejected: N; write pipeline: {ranks: N}.",
    GUARD: " Earlier form, rejected: auto or never; write guard: {} or guard: {never: {}}.",
}
"""End of the CRD's description of a field whose type changed, which no rule of the CRD reaches."""


def line(place: str) -> str:
    """What to write, with %s for the settings of the choice."""
    written = f"write {place.rpartition('.')[2]}: {{%s}}"
    return f"{written}, without {_listed(place)} beside it" if place in MOVED else written


def description(part: str, field: str) -> str:
    """A field of the earlier form in `kubectl explain`."""
    place = next((place for place, moved in MOVED.items() if field in moved), part)
    return f"The earlier form, which is rejected: {line(place) % '...'}."


def removed(place: str) -> str:
    """What to remove: settings that had no effect."""
    return f"remove {_listed(place)}: no effect"


def _listed(place: str) -> str:
    *names, last = MOVED[place]
    return f"{', '.join(names)} and {last}" if names else last


def rejected(place: str) -> str:
    """The beginning of the message."""
    return f"{place}: got its earlier form; expected each choice as a key"


def without_retired(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Problem]]:
    """The document in the present form, and one problem for each part in the earlier one."""
    copied = json.loads(json.dumps(document))
    problems: list[Problem] = []
    for place, change in _CHANGES.items():
        *path, last = place.split(".")
        part = copied
        for key in path:
            part = part.get(key) if isinstance(part, dict) else None
        if isinstance(part, dict) and (fix := change(part, last, place)):
            problems.append(Problem.from_text(f"{rejected(place)}; {fix}"))
    return (copied if problems else document), problems


def _inside(part: Fields, last: str, place: str) -> str:
    """Change a part that has its choices inside; return what to write."""
    old = part.get(last)
    if not isinstance(old, dict):
        return ""
    new = _optimizer(dict(old)) if place == OPTIMIZER else _checkpointing(dict(old))
    if new is None or new == old:
        return ""
    part[last] = new
    return line(place) % _flow(new)[1:-1]


def _optimizer(part: Fields) -> Fields | None:
    schedule = _choose(part, "schedule", _SCHEDULES, part.get("learningRateSchedule"))
    if schedule:
        part["learningRateSchedule"] = schedule
    method = _choose(part, "name", _METHODS, part)
    return {**(method or {}), **{k: v for k, v in part.items() if k not in (method or {})}}


def _checkpointing(part: Fields) -> Fields | None:
    share = part.pop("budget", 0.5) if "mode" in part else None
    chosen = _choose(part, "mode", MODES, part)
    if chosen and "budget" in chosen:
        return {"budget": share}
    return part if chosen is None else {} if "none" in chosen else chosen


def _choose(part: Fields, key: str, choices: dict[str, Fields], present: Any) -> Fields | None:
    """Take the fields of the earlier form out of a part; return the choice with its settings. None
    without such fields, and for an unknown choice."""
    names = {name for settings in choices.values() for name in settings}
    taken = {name: part[name] for name in names if name in part}
    written = next((c for c in choices if isinstance(present, dict) and c in present), None)
    fitting = next(c for c in choices if {*taken} <= {*choices[c]} or c == [*choices][-1])
    chosen = part.get(key, written or fitting)
    if not (taken or key in part) or not isinstance(chosen, str) or chosen not in choices:
        return None
    for name in (key, *taken):
        part.pop(name, None)
    inside = present.get(chosen) if isinstance(present, dict) else None
    own = inside if isinstance(inside, dict) else {}
    return {chosen: {**own, **{new: taken[o] for o, new in choices[chosen].items() if o in taken}}}


def _beside(part: Fields, last: str, place: str) -> str:
    """Change a part that had settings of a choice beside it; return what to write."""
    old, moved = part.get(last), MOVED[place]
    taken = {new: part.pop(name) for name, new in moved.items() if name in part}
    own = old if isinstance(old, dict) else {}
    if place == PIPELINE and type(old) is int:
        own, taken = {"ranks": old}, {"ranks": old, **taken}
    if place == GUARD and old in ("auto", "never"):
        own, taken = {}, {"never": {}} if old == "never" else taken
    elif not taken:
        return ""
    part.pop(last, None)
    excluded = place == FSDP and ("pipeline" in part or "ddp" in part)
    if excluded or (place == PIPELINE and own.get("ranks", 1) == 1):
        return removed(place).replace(
            "remove ", "remove pipeline, " if "ranks" in taken else "remove "
        )
    part[last] = {**own, **taken}
    return line(place) % _flow(part[last])[1:-1]


_CHANGES = {
    OPTIMIZER: _inside,
    CHECKPOINTING: _inside,
    PIPELINE: _beside,
    FSDP: _beside,
    GUARD: _beside,
}


def _flow(value: Any) -> str:
    """The value in one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(child)}" for key, child in value.items()) + "}"
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value)
