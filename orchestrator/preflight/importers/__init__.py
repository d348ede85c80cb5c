"""Configurations of accelerate, DeepSpeed and torchtitan as a TrainingJob.

What maps is kept, everything else is named with the reason; the result is a valid job.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.orchestrator.api.v1alpha1 import KIND, parse_job, yaml_text
from holdfast.orchestrator.api.v1alpha1.load import read_yaml
from holdfast.orchestrator.errors import UserError

from . import accelerate, deepspeed, torchtitan
from .draft import Draft
from .keys import ConfigKeys, Dropped

FORMATS = "an accelerate YAML, a DeepSpeed JSON or a torchtitan TOML"


class Imported(NamedTuple):
    """`text` is the YAML of `document`, with what was dropped as comments."""

    format: str
    document: dict[str, Any]
    text: str
    dropped: list[Dropped]


def import_config(
    path: Path,
    *,
    nodes: int | None = None,
    workers: int | None = None,
    script: str | None = None,
) -> Imported:
    """The job that a configuration describes; `nodes` and `workers` (of each node) where the file
    has not both. Raises UserError for a file that is none of the known formats, contradicts itself
    or has what Holdfast cannot do, and SpecError for axes that do not fit."""
    document = _read(path)
    kind = _format(path, document)
    keys = ConfigKeys(document, str(path))
    draft = Draft(keys, path.name, nodes=nodes, workers=workers)
    if kind == "accelerate":
        accelerate.read(keys, draft, path.parent)
        keys.drop_rest(accelerate.REASONS, deepspeed.NO_COUNTERPART)
    elif kind == "DeepSpeed":
        deepspeed.read(keys, draft)
        keys.drop_rest(deepspeed.REASONS, deepspeed.NO_COUNTERPART)
    else:
        torchtitan.read(keys, draft)
        keys.drop_rest(torchtitan.REASONS, deepspeed.NO_COUNTERPART)
    spec = draft.document(script)
    text = yaml_text(spec)
    parse_job(text, f"{path}, as a TrainingJob")
    return Imported(kind, spec, _comments(path, kind, keys.dropped) + text, keys.dropped)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            document: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            document = json.loads(text)
        else:
            document = read_yaml(text)
    except UserError as error:  # of read_yaml
        raise UserError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError.of("--import", f"{path} ({why})", FORMATS) from None
    if not isinstance(document, Mapping):
        raise UserError.of("--import", f"{path} with {type(document).__name__}", FORMATS)
    return document


def _format(path: Path, document: Mapping[str, Any]) -> str:
    if document.get("kind") == KIND:
        fix = f"holdfast spec preflight {path}"
        raise UserError.of("--import", f"{path}, a TrainingJob already", FORMATS, fix)
    for name, marks in (
        ("accelerate", accelerate.MARKS),
        ("DeepSpeed", deepspeed.MARKS),
        ("torchtitan", torchtitan.MARKS),
    ):
        if any(mark in document for mark in marks):
            return name
    keys = ", ".join(map(str, list(document)[:5])) or "no keys"
    raise UserError.of("--import", f"{path} with {keys}", FORMATS)


def _comments(path: Path, kind: str, dropped: list[Dropped]) -> str:
    lines = [f"Imported from {path.name} ({kind}) by holdfast spec preflight --import."]
    lines += ["Dropped:"] * bool(dropped) + [f"  {drop}" for drop in dropped]
    return "".join(f"# {' '.join(line.splitlines())}\n" for line in lines)
