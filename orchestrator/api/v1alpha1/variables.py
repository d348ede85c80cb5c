"""Environment variables that users set and that do not do what they expect: the one table.

Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, FlightRecorder.hpp and Utils.hpp of torch
2.11 to 2.15 (the names that torch reads, the newer name first); the variables in libnccl 2.30 and
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (what NCCL has removed, and
since when); torch/distributed/argparse_util.py (PET_*: defaults of torchrun's options).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

GROUP_TIMEOUT = (
    "spec.recovery.hangTimeoutSeconds, and init_process_group(timeout=...) in your own script"
)
PET = "PET_"


class Ineffective(NamedTuple):
    why: str
    instead: str


def _old(new: str) -> Ineffective:
    return Ineffective("an old name, which torch reads with a warning", new)


def _removed(since: str, instead: str) -> Ineffective:
    return Ineffective(f"NCCL has not read it since {since}", instead)


_NEVER_READ = "neither torch nor NCCL reads it"

INEFFECTIVE: dict[str, Ineffective] = {
    "NCCL_TIMEOUT": Ineffective(_NEVER_READ, GROUP_TIMEOUT),
    "TORCH_NCCL_TIMEOUT": Ineffective(_NEVER_READ, GROUP_TIMEOUT),
    "NCCL_ASYNC_ERROR_HANDLING": _old("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_BLOCKING_WAIT": _old("TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_DESYNC_DEBUG": _old("TORCH_NCCL_DESYNC_DEBUG"),
    "NCCL_ENABLE_TIMING": _old("TORCH_NCCL_ENABLE_TIMING"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": _old("TORCH_FR_BUFFER_SIZE"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": _old("TORCH_FR_DUMP_ON_TIMEOUT"),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": _old("TORCH_FR_DUMP_TEMP_FILE"),
    "NCCL_CHECKS_DISABLE": _removed("2.2.12", "NCCL_CHECK_POINTERS=0"),
    "NCCL_IB_CUDA_SUPPORT": _removed("2.4", "NCCL_NET_GDR_LEVEL"),
    "NCCL_SINGLE_RING_THRESHOLD": _removed("2.3", "nothing: NCCL chooses by size"),
    "NCCL_LL_THRESHOLD": _removed("2.5", "NCCL_PROTO"),
    "NCCL_TREE_THRESHOLD": _removed("2.5", "NCCL_ALGO"),
    "NODE_RANK": Ineffective(
        "it is the same on all nodes, which get their numbers in every generation",
        "nothing; scripts read GROUP_RANK",
    ),
    "NVIDIA_VISIBLE_DEVICES": Ineffective(
        "a container runtime reads it before workers exist",
        "CUDA_VISIBLE_DEVICES, or env of spec.kubernetes.podTemplate",
    ),
}
"""Variable -> why it has no effect, or not the usual one, and what to write."""


def remarks(env: dict[str, str], num_gpus: int | None) -> Iterator[str]:
    """One sentence for each such variable. `num_gpus`: of a worker; None: not known yet."""
    for name in env:
        if effect := INEFFECTIVE.get(name):
            yield f"spec.env.{name}: {effect.why}; write {effect.instead}"
        elif name.startswith(PET):
            yield f"spec.env.{name}: {PET}* are options of torchrun; write fields of spec"
    read = [name for name in env if name not in INEFFECTIVE]
    if num_gpus == 0 and (names := [n for n in read if n.startswith(("NCCL_", "TORCH_NCCL_"))]):
        listed = ", ".join(names)
        yield f"spec.env: no process reads {listed}: workers without GPUs communicate by gloo"
