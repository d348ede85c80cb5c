"""The parts of Holdfast that an installation may lack.

The rest asks for a part here, and does without it where it is missing.
"""

from __future__ import annotations

import importlib.util
from typing import Any

_CLI, _HERE = "holdfast.orchestrator.cli", "holdfast.orchestrator"
PARTS = {
    "catalogue": f"{_HERE}.catalogue.load:load_catalogue",
    "command operator": f"{_CLI}.commands.operator:register",
    "command plan": f"{_CLI}.commands.plan:register",
    "command ui": f"{_HERE}.ui.command:register",
    "command preflight": f"{_CLI}.commands.preflight:register",
    "fix": f"{_HERE}.explorer.advice:fix",
    "measurements": f"{_HERE}.catalogue.measurements:read",
    "planned figures": f"{_HERE}.runtime.observe.planned:PlannedFigures",
    "recipe finetune": "holdfast.workers.training.recipes.finetune:main",
    "recipe pretrain": "holdfast.workers.training.recipes.pretrain:main",
    "resource definition": f"{_HERE}.kube.pod_schema:definition_text",
    "target kubernetes": f"{_CLI}.targets.kubernetes.target:KubernetesTarget",
    "target local": f"{_CLI}.targets.local:LocalTarget",
    "target ray": f"{_CLI}.targets.ray:choose",
    "ui beside a run": f"{_HERE}.ui.command:beside",
    "ui report": f"{_HERE}.ui.command:write_report",
    "warm-up": "holdfast.workers.agent.pool.warmup:warm",
}
"""Name of what a part provides -> module and attribute."""


def part(name: str) -> Any:
    """The object that a part provides; None: the part is missing. Its own imports must be there."""
    return load(PARTS[name])


def load(path: str) -> Any:
    """The same for `module:attribute`."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return None
        raise


def is_installed(module: str) -> bool:
    """False for a module that an import would not find; only the packages above it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
