"""Opens the CUDA context of a standby's GPU, with `recovery.gpuStandbys`: a recovery then does not
wait for it.

After the fork only: a process with a context cannot fork. The GPU is that of the local rank that
the standby will probably get; see WorkerPool.assign.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES, is_mig

from ..process import process_env


def open_context(
    job: TrainingJob, local_rank: int, make: Callable[[int], None] | None = None
) -> bool:
    """True if the context of GPU `local_rank` is open now. A failure is printed: the worker opens
    it later, and reports what is wrong."""
    if not wanted(job, local_rank):
        return False
    process_env.adopt(job.spec.env)  # CUDA reads its variables when it is initialised
    try:
        (make or _make)(local_rank)
    except Exception as error:
        print(f"this standby has no CUDA context: {error}", file=sys.stderr)
        return False
    return True


def wanted(job: TrainingJob, local_rank: int) -> bool:
    """True only if every worker sees all GPUs of the node: with several GPUs for each, or parts of
    them, CUDA_VISIBLE_DEVICES comes with the rank."""
    named = job.spec.env.get(VISIBLE_DEVICES, os.environ.get(VISIBLE_DEVICES, ""))
    one_each = job.spec.resources.num_gpus == 1 and not is_mig(named.split(","))
    return job.spec.recovery.gpu_standbys and one_each and local_rank >= 0


def _make(index: int) -> None:
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RuntimeError(f"torch sees no GPU with number {index}")
    torch.cuda.set_device(index)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
