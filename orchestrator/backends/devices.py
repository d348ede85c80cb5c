"""The GPUs of this machine that the nodes of a job use. The node launcher assigns them to nodes."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.planner.gpus import GpusFound
from holdfast.orchestrator.protocol import hardware
from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES
from holdfast.orchestrator.protocol.facts import Gpu

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
    if not job.spec.resources.num_gpus or VISIBLE_DEVICES in job.spec.env:
        return None
    if (names := _usable()) or not _device_files():
        return names
    return None if os.environ.get(VISIBLE_DEVICES) is None else ()


def gpus_per_node(job: TrainingJob) -> int:
    return job.spec.resources.num_gpus * job.spec.workers_per_node


def found_here(job: TrainingJob) -> GpusFound:
    """This machine's GPUs, from which `gpu: auto` of a job is decided."""
    return found_by(job.spec.env)


def found_by(env: Mapping[str, str]) -> GpusFound:
    """The GPUs of this machine for a job whose spec has these variables."""
    visible = env.get(VISIBLE_DEVICES)
    names = _usable() if visible is None else split_names(visible)
    if visible is not None:
        return GpusFound(len(names), f"spec.env.{VISIBLE_DEVICES} names {_gpus(len(names))}")
    if names and _torch_build().endswith("+cpu"):
        return GpusFound(0, f"this machine has {_gpus(len(names))}, but torch is a build for CPUs")
    if os.environ.get(VISIBLE_DEVICES) is not None:
        return GpusFound(len(names), f"{VISIBLE_DEVICES} leaves {_gpus(len(names))}")
    if not names and (file := _device_files()):
        return GpusFound(
            0,
            f"nvidia-smi lists no GPU, though this machine has {file}: write gpu: 1 if torch can "
            f"use it",
        )
    return GpusFound(len(names), f"this machine has {_gpus(len(names))}")


def split_names(visible: str) -> tuple[str, ...]:
    """The devices in a value of CUDA_VISIBLE_DEVICES."""
    return tuple(name for part in visible.split(",") if (name := part.strip()))


def _usable() -> tuple[str, ...]:
    """Usable GPUs as values of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None:
        return split_names(visible)
    return tuple(gpu.device or str(index) for index, gpu in enumerate(gpus()))


def _device_files() -> str:
    """A device file of a GPU's driver; empty: there is none."""
    files = (path for name in DEVICE_FILES for path in DEVICE_DIRECTORY.glob(name))
    return str(next(files, ""))


def _gpus(count: int) -> str:
    return f"{count or 'no'} GPU{'s' * (count > 1)}"


def _torch_build() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
