"""Connections of a framework's trainer to Holdfast. Callbacks report its steps, evaluations and
saves, and have it save when the job will be stopped:

    from holdfast.integrations import TransformersCallback   # transformers.Trainer, TRL, ms-swift
    from holdfast.integrations import LightningCallback      # lightning.pytorch.Trainer

With these the state is in the memory of the nodes too, and no step is lost:

    from holdfast.integrations import in_memory              # trainer = in_memory(Trainer(...))
    from holdfast.integrations import InMemoryTrainer        # a base class, in place of Trainer
    from holdfast.integrations import InMemoryLightning      # a callback

`report_deepspeed(engine)` has an engine of DeepSpeed report steps and saves. `last_incident()` is
why the script was started again. torchtitan takes an argument instead of a line: see
holdfast.torchtitan.

Outside Holdfast they keep and report nothing. The framework is imported with the name. A loop of
one's own, also one with accelerate, calls `session.report` instead: see docs/user/frameworks.md.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "TransformersCallback": "transformers",
    "InMemoryTrainer": "transformers_memory",
    "in_memory": "transformers_memory",
    "LightningCallback": "lightning",
    "InMemoryLightning": "lightning_memory",
    "report_deepspeed": "deepspeed",
    "last_incident": "incidents",
}

__all__ = [  # noqa: F822 (see __getattr__)
    "InMemoryLightning",
    "InMemoryTrainer",
    "LightningCallback",
    "TransformersCallback",
    "in_memory",
    "last_incident",
    "report_deepspeed",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"holdfast.workers.integrations.{_MODULES[name]}")
    return getattr(module, name)
