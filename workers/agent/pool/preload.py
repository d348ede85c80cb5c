"""Modules that are imported once per machine before any fork, so that workers import nothing.

The list comes from sys.modules before and after a first HSDP step and a first DCP save in a forked
child; tests/e2e/agent/test_preload.py repeats that comparison. An import must not start a thread or
open CUDA.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from holdfast.orchestrator.protocol.environment import CACHES

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment without which numpy's OpenBLAS starts threads at import, and a process with threads
must not fork. Workers set their number of threads after the fork."""

MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim.lr_scheduler",
    "torch.utils.checkpoint",
    "torch.utils.data",
    # Imported lazily when FSDP2 first wraps a module and at the first step.
    "torch._dynamo",
    "torch._dynamo.polyfills.loader",
    "torch.utils.serialization",
    # Used by the session to read and write.
    "fsspec.implementations.local",
    "msgspec",
    "runpy",
    "safetensors",
    "xxhash",
)
"""Missing modules are skipped: the list serves torch 2.11 and later."""

OURS = (
    "holdfast.workers.worker_transport",
    "holdfast.workers.session",
    "holdfast.workers.checkpoint.stage",
    "holdfast.workers.checkpoint.restore",
    "holdfast.workers.checkpoint.state",
    "holdfast.workers.training.recipes.pretrain",
    "holdfast.workers.agent.pool.warmup",
)
"""Modules of Holdfast itself, if installed."""


def preload() -> None:
    """Import everything, then freeze it: the garbage collector then never touches, and so never
    copies, the pages that children share. It rests while modules are imported, since its passes
    over ever more objects that stay are a fifth of the time (2.7 s become 2.1 s)."""
    for name, value in SINGLE_THREADED.items():
        assert os.environ.get(name) == value, f"{name} must be set before the interpreter starts"
    gc.disable()
    import_all((*MODULES, *OURS))
    gc.collect()
    gc.freeze()
    gc.enable()
    assert num_threads() == 1, f"{num_threads()} threads after preloading: a fork is not safe"


def import_all(names: Iterable[str]) -> None:
    """Import those that are there. torch._dynamo puts its default TORCHINDUCTOR_CACHE_DIR into the
    environment, where an agent that is forked later would take it for a choice of the user."""
    chosen = {name for name in CACHES if name in os.environ}
    for name in names:
        import_if_there(name)
    for name in set(CACHES) - chosen:
        os.environ.pop(name, None)


def import_if_there(name: str) -> None:
    """Import a module if possible. A broken one fails again in the worker that needs it."""
    try:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    except ImportError as error:
        print(f"preload: {name}: {error}", file=sys.stderr)


def num_threads() -> int:
    """Threads of this process, from the kernel."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.split("Threads:")[1].split()[0])
