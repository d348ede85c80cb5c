"""Ray Train's TorchTrainer for existing code: change its imports, not the code.

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
    from holdfast.orchestrator.client.ray_trainer import RayTrainer as TorchTrainer
    from holdfast.orchestrator.client.ray_trainer import RayTrainer as Trainer
    from holdfast.orchestrator.client.ray_trainer import Result as Result
    from holdfast.orchestrator.client.ray_trainer import RunConfig as RunConfig
    from holdfast.orchestrator.client.ray_trainer import ScalingConfig as ScalingConfig
    from holdfast.orchestrator.client.ray_trainer import TorchConfig as TorchConfig
    from holdfast.orchestrator.client.ray_trainer import TrainingFailedError as TrainingFailedError
    from holdfast.orchestrator.protocol.run_directory import TrainCheckpoint as Checkpoint
    from holdfast.workers.integrations.ray_train import CheckpointUploadMode as CheckpointUploadMode
    from holdfast.workers.integrations.ray_train import TrainContext as TrainContext
    from holdfast.workers.integrations.ray_train import get_checkpoint as get_checkpoint
    from holdfast.workers.integrations.ray_train import get_context as get_context
    from holdfast.workers.integrations.ray_train import get_device as get_device
    from holdfast.workers.integrations.ray_train import get_devices as get_devices
    from holdfast.workers.integrations.ray_train import prepare_data_loader as prepare_data_loader
    from holdfast.workers.integrations.ray_train import prepare_model as prepare_model
    from holdfast.workers.integrations.ray_train import report as report

_STARTED = "holdfast.orchestrator.client.ray_trainer"
_WORKER = "holdfast.workers.integrations.ray_train"
_PLACES = {
    "CheckpointConfig": (_STARTED, "CheckpointConfig"),
    "FailureConfig": (_STARTED, "FailureConfig"),
    "TorchConfig": (_STARTED, "TorchConfig"),
    "TorchTrainer": (_STARTED, "RayTrainer"),
    "Trainer": (_STARTED, "RayTrainer"),
    "Result": (_STARTED, "Result"),
    "RunConfig": (_STARTED, "RunConfig"),
    "ScalingConfig": (_STARTED, "ScalingConfig"),
    "TrainingFailedError": (_STARTED, "TrainingFailedError"),
    "Checkpoint": ("holdfast.orchestrator.protocol.run_directory", "TrainCheckpoint"),
    "CheckpointUploadMode": (_WORKER, "CheckpointUploadMode"),
    "TrainContext": (_WORKER, "TrainContext"),
    "get_checkpoint": (_WORKER, "get_checkpoint"),
    "get_context": (_WORKER, "get_context"),
    "get_device": (_WORKER, "get_device"),
    "get_devices": (_WORKER, "get_devices"),
    "prepare_data_loader": (_WORKER, "prepare_data_loader"),
    "prepare_model": (_WORKER, "prepare_model"),
    "report": (_WORKER, "report"),
}
_INSTEAD = {
    "DataConfig": "a DataLoader and prepare_data_loader",
    "get_dataset_shard": "a DataLoader and prepare_data_loader",
    "get_all_reported_checkpoints": "get_checkpoint, or Result.best_checkpoints after fit",
    "get_preemption_info": "holdfast.session.preemption",
    "LoggingConfig": "the options of `holdfast logs`",
    "UserCallback": "code in the function",
    "ValidationConfig": "a validation in the function",
    "enable_reproducibility": "torch.manual_seed and torch.use_deterministic_algorithms",
    "accelerate": "torch.amp",
    "backward": "loss.backward",
    "prepare_optimizer": "the optimizer as it is",
    "TorchCheckpoint": "Checkpoint",
}
"""Names of ray.train and ray.train.torch that are not here -> what to use."""

__all__ = [
    "Checkpoint", "CheckpointConfig", "CheckpointUploadMode", "FailureConfig", "Result",
    "RunConfig", "ScalingConfig", "TorchConfig", "TorchTrainer", "TrainContext", "Trainer",
    "TrainingFailedError", "get_checkpoint", "get_context", "get_device", "get_devices",
    "prepare_data_loader", "prepare_model", "report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        from holdfast.orchestrator.errors import Problem, UserError

        raise UserError(str(Problem("holdfast.ray", name, _INSTEAD[name])))
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)
