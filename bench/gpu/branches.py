"""Places in workers/ that speak of CUDA, and the test of each on a GPU.

Invariant: PLACES names exactly the places that the code has (test_kit.py), so a new branch without
a line here fails a test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from bench.contestants.base import ROOT

OURS = "bench/gpu/test_cuda.py::"
SESSION = "tests/unit/workers/session/test_session.py::"
NO_TEST = "no test"
_STAGES = f"{OURS}test_staging_on_a_gpu_overlaps_and_delays_the_next_optimizer_step"
_GPU_JOB = "tests/e2e/local/test_gpu.py::test_a_killed_worker_on_a_gpu_is_restored_from_memory"
_FLOAT8 = (
    "tests/unit/workers/training/parallel/test_float8.py::test_products_on_the_device_are_close"
)
_OPTIONS = "tests/strategies/test_gpus.py::test_one_gpu_computes_what_a_cpu_computes"
_STRATEGIES = "tests/strategies/test_gpus.py::test_strategies_of_gpus_give_the_losses"
_PROBE = "tests/unit/workers/session/test_work_time.py::test_products_of_a_gpu_take_the_same_time"
_UPLOAD = "tests/unit/workers/checkpoint/test_upload.py::test_values_reach_a_gpu"
_LOSS = f"{SESSION}test_the_host_does_not_wait_for_a_loss_on_a_gpu"
_TEXT = "tests/unit/workers/agent/pool/test_last_output.py"
PLACES = {
    "agent/pool/accelerate_launch.py::module": "a name in a list; tests/frameworks",
    "agent/pool/failures.py::module": f"{_TEXT} (text only); recover: each fault",
    "agent/pool/gpu_context.py::_make": f"{OURS}test_a_standby_opens_a_context",
    "agent/pool/gpu_context.py::open_context": f"{OURS}test_a_standby_opens_a_context",
    "agent/pool/import_template.py::module": f"{OURS}test_a_module_that_asks_for_gpus_leaves",
    "agent/pool/last_output.py::module": f"{_TEXT} (text only); recover: each fault",
    "agent/pool/stack_activity.py::module": "tests/unit/workers/agent/pool (text only)",
    "agent/pool/user_modules.py::cannot_fork": f"{OURS}test_an_opened_device_is_seen",
    "checkpoint/async_copy.py::AsyncCopier.__init__": _STAGES,
    "checkpoint/device.py::CudaDevice.__init__": _STAGES,
    "checkpoint/device.py::CudaDevice._training": _STAGES,
    "checkpoint/device.py::CudaDevice.bit_sums": f"{OURS}test_staging_adds_no_device_memory",
    "checkpoint/device.py::CudaDevice.capturing": f"{OURS}test_a_captured_step_is_copied_whole",
    "checkpoint/device.py::CudaDevice.copy": f"{OURS}test_every_kind_of_tensor_is_staged",
    "checkpoint/device.py::CudaDevice.holds": f"{OURS}test_every_kind_of_tensor_is_staged",
    "checkpoint/device.py::CudaDevice.lock_pages": f"{OURS}test_copies_into_locked_pages",
    "checkpoint/device.py::CudaDevice.record": _STAGES,
    "checkpoint/device.py::CudaDevice.use": _STAGES,
    "checkpoint/device.py::PageLocks.__init__": f"{OURS}test_copies_into_locked_pages",
    "checkpoint/device.py::module": _STAGES,
    "checkpoint/stage.py::Stager.__init__": _STAGES,
    "checkpoint/stage.py::_with_memory_of_its_own": _STAGES,
    "checkpoint/upload.py::CudaUpload.holds": _UPLOAD,
    "checkpoint/upload.py::CudaUpload.record": _UPLOAD,
    "checkpoint/upload.py::CudaUpload.wait": _UPLOAD,
    "checkpoint/upload.py::Uploader.__init__": _UPLOAD,
    "checkpoint/upload.py::_Place": _UPLOAD,
    "integrations/ray_train.py::begin": NO_TEST,
    "integrations/ray_train.py::prepare_model": NO_TEST,
    "session/core.py::Session.__init__": _GPU_JOB,
    "session/core.py::Session._load": _GPU_JOB,
    "session/core.py::_why_not_kept": "kept processes are for CPUs only yet",
    "session/core.py::init": _GPU_JOB,
    "session/distributed.py::join": f"{OURS}test_a_group_of_one_rank_uses_nccl",
    "session/distributed.py::pick_device": _GPU_JOB,
    "session/inspection.py::recorders": f"{OURS}test_a_group_of_one_rank_uses_nccl",
    "session/loss.py::CudaScalars.start": _LOSS,
    "session/loss.py::LossReport.__init__": _LOSS,
    "session/measures.py::PeakMemory.read": _GPU_JOB,
    "session/numa.py::bind_to": f"{OURS}test_a_worker_is_bound_to_cpus_of_its_gpu",
    "session/work_time.py::_timed_event": _PROBE,
    "training/calibrate.py::_median": f"{OURS}test_a_calibration_times_a_gpu",
    "training/calibrate.py::_worker": f"{OURS}test_a_calibration_times_a_gpu",
    "training/data.py::_to": _OPTIONS,
    "training/optimizers/adamw8bit.py::_torchao_functions.step_one": _OPTIONS,
    "training/parallel/float8.py::expect_device": _FLOAT8,
    "training/parallel/float8.py::recipe_of": _FLOAT8,
    "training/parallel/model.py::Parallel.__init__": _OPTIONS,
    "training/parallel/precision.py::parameter_dtype": _OPTIONS,
    "training/parallel/sharding.py::offloads": f"{_STRATEGIES} (needs four GPUs)",
    "training/parallel/sharding.py::replicate": f"{_STRATEGIES} (needs four GPUs)",
}
"""Place -> the test that runs it on a GPU, or what there is instead."""

CUDA = re.compile(r"cuda|nccl", re.IGNORECASE)


def places(top: Path = ROOT / "workers") -> list[str]:
    """`file::function` of each place whose code, not its comments or docstrings, names CUDA."""
    return sorted(
        f"{path.relative_to(top)}::{name}"
        for path in top.rglob("*.py")
        for name in _names(ast.parse(path.read_text()))
    )


def _names(tree: ast.Module) -> set[str]:
    return {name for name, node in _nodes(tree, "") if CUDA.search(node)}


def _nodes(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
    """(innermost function, a word of its code)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        name = inside
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{inside}.{child.name}".lstrip(".")
        for value in (getattr(child, field, None) for field in ("id", "attr", "value", "arg")):
            if isinstance(value, str):
                yield name or "module", value
        yield from _nodes(child, name)
