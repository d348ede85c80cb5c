"""The GPUs of this machine that the nodes of a job use. The node launcher assigns them to nodes."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol import hardware
from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES
from holdfast.orchestrator.protocol.facts import Gpu

DEVICE_DIRECTORY = Path("/dev")
DEVICE_DIRECTORY = Path("/dev")
DEVICE_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")
"""Device files of GPU drivers, also of AMD, Jetson and WSL, which nvidia-smi does not list."""


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    try:
        return hardware.query_gpus()
    except (OSError, subprocess.SubprocessError):
        return ()


def gpu_names(job: TrainingJob) -> tuple[str, ...] | None:
    """Values for CUDA_VISIBLE_DEVICES of this job's nodes; empty: there is no GPU. None: nodes get
    no GPUs of their own: the job needs none, or names them itself, or the GPUs are unknown."""
    if not job.spec.resources.gpu or VISIBLE_DEVICES in job.spec.env:
        return None
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None:
        return tuple(name for part in visible.split(",") if (name := part.strip()))
    if found := gpus():
        return tuple(str(index) for index in range(len(found)))
    return None if any(any(DEVICE_DIRECTORY.glob(name)) for name in DEVICE_FILES) else ()
