"""Hardware of a plan by the user's measurements, and the process that measures."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..catalogue.calibration import Calibration, CalibrationEntry, Measured, key_of, with_entry
from ..catalogue.measurements import LARGEST_FACTOR, SMALLEST_FACTOR, is_sane, read, write
from ..catalogue.types import Link
from ..errors import UserError
from ..explorer.hardware import calibrated, workers_here
from ..explorer.step_time import Hardware, parts_alone, update_seconds
from ..planner.choose import choose_mesh, memory_on
from ..planner.micro_batch import fitted_layout
from ..planner.workload import ParallelLayout, Workload, workload_of
from ..protocol import python_command
from ..protocol.facts import NodeFacts
from ..runtime.job_directory import Home
from .output import stderr

MODULE = "holdfast.workers.training.calibrate"

STEPS = 20
TIMEOUT_S = 1800.0
"""Limit of the measuring process: compilation of a large block takes minutes."""


def with_calibration(
    file: Path, job: TrainingJob, nodes: int | None, memory: int | None, facts: NodeFacts,
    hardware: Hardware | None, home: Path | None, measure: bool,
) -> Hardware | None:  # fmt: skip
    """The hardware with what was measured on it; `measure`: now. Raises UserError where that is not
    possible."""
    work = workload_of(job)
    memory_known = memory_on(job, [facts])
    if memory is not None:
        memory_known = memory_known._replace(device=memory)
    mesh = choose_mesh(job, job.spec.nodes.max if nodes is None else nodes, memory_known)
    if work is None or hardware is None or mesh is None:
        if measure:
            got = "GPUs that the catalogue does not have" if work else "a script or a module"
            got = "a job that no mesh fits" if work and hardware else got
            raise UserError.of("--calibrate", got, "a recipe on devices that the planner knows")
        return hardware
    layout, directory = fitted_layout(job, mesh[0], memory_known.device), Home(home).path
    if measure:
        workers = job.spec.workers_per_node if work.on_gpu else workers_here(job)
        entries = calibrate(file, directory, hardware, work, layout, workers)
    else:
        entries = read(directory, stderr().print)
    return calibrated(hardware, work, layout, entries)


def calibrate(
    file: Path, home: Path, hardware: Hardware, work: Workload, layout: ParallelLayout, workers: int
) -> tuple[CalibrationEntry, ...]:
    """Measures on this machine with so many workers at once, stores the factors, and returns all
    entries. `hardware`: without a calibration. Raises UserError where it cannot be measured."""
    measured = _run(file, layout, workers)
    calibration = factors(measured, hardware, work, layout)
    if not is_sane(calibration):
        got = f"{calibration.describe()}"
        expected = f"factors between {SMALLEST_FACTOR} and {LARGEST_FACTOR:g}"
        raise UserError.of("--calibrate", got, expected, "repeat it on an idle machine")
    key = key_of(work, layout, hardware.device.name)
    entries = with_entry(
        read(home, stderr().print), CalibrationEntry(key=key, calibration=calibration)
    )
    write(home, entries)
    return entries


def factors(
    measured: Measured, hardware: Hardware, work: Workload, layout: ParallelLayout
) -> Calibration:
    """Measured over estimated."""
    block, head = parts_alone(work, layout, hardware)
    optimizer = 1.0
    if measured.optimizer_s is not None:
        optimizer = measured.optimizer_s / update_seconds(work, measured.parameters, hardware)
    link = None
    if measured.link_bandwidth is not None and measured.link_latency_s is not None:
        link = Link(
            name=hardware.node_link.name,
            bandwidth=measured.link_bandwidth,
            latency=measured.link_latency_s,
            shared=hardware.node_link.shared,
            source="an all-reduce between the workers of this machine",
        )
    return Calibration(
        block=measured.block_s / block,
        head=measured.head_s / head,
        optimizer=optimizer,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        link=link,
    )


def _run(file: Path, layout: ParallelLayout, workers: int) -> Measured:
    command = [*python_command.start(MODULE), str(file), "--steps", str(STEPS)]
    command += ["--workers", str(workers), "--micro-batch", str(layout.micro_batch)]
    command += ["--sharded"] if layout.fsdp else []
    environment = {**os.environ, "PYTHONPATH": python_command.import_path()}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        got = f"no result within {TIMEOUT_S:g} s"
        raise UserError.of("--calibrate", got, "one", "use a smaller model") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if done.returncode < 0:
            last = f"a process that signal {-done.returncode} ended; 9 is usually out of memory"
        expected = "a block and the head of the job that run on this machine"
        fix = "use a smaller microBatch, or plan without --calibrate"
        raise UserError.of("--calibrate", last, expected, fix)
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Measured)
