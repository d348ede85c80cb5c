"""This machine's GPUs, and which of them the nodes of a job share out among themselves.

Owns: asking the driver, and what the environment leaves of its answer. Must not: give a GPU to a
node; the machine host does, because it outlives controllers.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES
from holdfast.orchestrator.protocol.facts import Gpu

NVIDIA_SMI_TIMEOUT_S = 10.0
DRIVER_FILES = tuple((Path("/dev"), name) for name in ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg"))


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """By nvidia-smi, which comes with the driver; importing torch to ask takes seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in done.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            found.append(Gpu(name.strip(), int(mebibytes) * 2**20))
    return tuple(found)


def shared_out(job: TrainingJob) -> tuple[str, ...] | None:
    """What CUDA_VISIBLE_DEVICES may name in this job; empty: there is no GPU. None: nodes are not
    given GPUs of their own: the job wants none, says itself which, or nobody knows which there are.
    """
    if not job.spec.resources.gpu or VISIBLE_DEVICES in job.spec.env:
        return None
    told = os.environ.get(VISIBLE_DEVICES)
    if told is not None:
        return tuple(name for part in told.split(",") if (name := part.strip()))
    if found := gpus():
        return tuple(str(index) for index in range(len(found)))
    return None if any_driver() else ()


def any_driver() -> bool:
    """Whether there may be GPUs of which nvidia-smi does not tell: AMD's, Jetson's, WSL's."""
    return any(any(root.glob(name)) for root, name in DRIVER_FILES)
