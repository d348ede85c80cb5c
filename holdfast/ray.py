"""For code that was written for Ray Train's TorchTrainer: change its imports, not the code.

    from holdfast.ray import RunConfig, ScalingConfig, Trainer      # where the job is started
    from holdfast.ray import Checkpoint, get_checkpoint, get_context, report   # in the function

See docs/user/python-client.md. The names of the second line import torch when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.orchestrator.client.ray_trainer import CheckpointConfig as CheckpointConfig
    from holdfast.orchestrator.client.ray_trainer import FailureConfig as FailureConfig
    from holdfast.orchestrator.client.ray_trainer import RayTrainer as Trainer
    from holdfast.orchestrator.client.ray_trainer import Result as Result
    from holdfast.orchestrator.client.ray_trainer import RunConfig as RunConfig
    from holdfast.orchestrator.client.ray_trainer import ScalingConfig as ScalingConfig
    from holdfast.orchestrator.client.ray_trainer import TrainingFailedError as TrainingFailedError
    from holdfast.orchestrator.protocol.run_directory import TrainCheckpoint as Checkpoint
    from holdfast.workers.integrations.ray_train import get_checkpoint as get_checkpoint
    from holdfast.workers.integrations.ray_train import get_context as get_context
    from holdfast.workers.integrations.ray_train import get_device as get_device
    from holdfast.workers.integrations.ray_train import prepare_data_loader as prepare_data_loader
    from holdfast.workers.integrations.ray_train import prepare_model as prepare_model
    from holdfast.workers.integrations.ray_train import report as report

_STARTED = "holdfast.orchestrator.client.ray_trainer"
_WORKER = "holdfast.workers.integrations.ray_train"
_PLACES = {
    "CheckpointConfig": (_STARTED, "CheckpointConfig"),
    "FailureConfig": (_STARTED, "FailureConfig"),
    "Trainer": (_STARTED, "RayTrainer"),
    "Result": (_STARTED, "Result"),
    "RunConfig": (_STARTED, "RunConfig"),
    "ScalingConfig": (_STARTED, "ScalingConfig"),
    "TrainingFailedError": (_STARTED, "TrainingFailedError"),
    "Checkpoint": ("holdfast.orchestrator.protocol.run_directory", "TrainCheckpoint"),
    "get_checkpoint": (_WORKER, "get_checkpoint"),
    "get_context": (_WORKER, "get_context"),
    "get_device": (_WORKER, "get_device"),
    "prepare_data_loader": (_WORKER, "prepare_data_loader"),
    "prepare_model": (_WORKER, "prepare_model"),
    "report": (_WORKER, "report"),
}

__all__ = [
    "Checkpoint", "CheckpointConfig", "FailureConfig", "Result", "RunConfig", "ScalingConfig",
    "Trainer", "TrainingFailedError", "get_checkpoint", "get_context", "get_device",
    "prepare_data_loader", "prepare_model", "report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)
