"""Holdfast: keeps elastic multi-node PyTorch training alive. This package is the public API.

    from holdfast import session          # in a training script; imports torch
    from holdfast import TrainingJob      # the job spec's types
    from holdfast import Client           # starts and watches jobs, from Python or a notebook

`holdfast.orchestrator` and `holdfast.workers` are links to the folders beside this one; internal.
Importing `holdfast` itself imports neither torch nor pydantic: the names above load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.orchestrator import limits

if TYPE_CHECKING:
    from holdfast import session as session
    from holdfast.orchestrator.api.v1alpha1 import JobSpec as JobSpec
    from holdfast.orchestrator.api.v1alpha1 import TrainingJob as TrainingJob
    from holdfast.orchestrator.client import Client as Client
    from holdfast.orchestrator.client import JobHandle as JobHandle

__version__ = limits.RELEASE
__all__ = ["Client", "JobHandle", "JobSpec", "TrainingJob", "__version__", "session"]

_MODULES = {
    "Client": "client", "JobHandle": "client",
    "JobSpec": "api.v1alpha1", "TrainingJob": "api.v1alpha1",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"holdfast.orchestrator.{_MODULES[name]}"), name)
    if name == "session":
        return importlib.import_module("holdfast.session")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
