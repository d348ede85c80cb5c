"""The planner's time of a step beside the processor time of the recipe, in one process with one
thread: figures that other work on the machine changes less than those of a clock.

`python -m bench.plan_step_time` writes them into its page.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from holdfast.orchestrator.api.v1alpha1 import load_job
from holdfast.orchestrator.catalogue.calibration import Measured
from holdfast.orchestrator.catalogue.load import load_catalogue
from holdfast.orchestrator.cli.calibration import factors
from holdfast.orchestrator.explorer.cpu import EFFICIENCY, cpu_device
from holdfast.orchestrator.explorer.step_time import Hardware, step_time
from holdfast.orchestrator.planner.workload import layout_of, workload_of
from holdfast.orchestrator.protocol.hardware import processor
from holdfast.orchestrator.protocol.mesh import Mesh

STEPS = 15
WARM_UP = 3
CLOCK = "import sys, time; time.perf_counter = time.process_time; import torch; "
CLOCK += "torch.set_num_threads(1); from holdfast.workers.training"
RECIPE = f"{CLOCK} import loop; from holdfast.workers.training.recipes import pretrain; "
RECIPE += "loop.main_without_agent(pretrain.main)"
CALIBRATE = f"{CLOCK} import calibrate; sys.exit(calibrate.main(sys.argv[1:]))"


class Step(NamedTuple):
    """Seconds of processor time of a step."""

    name: str
    cold: float
    calibrated: float
    measured: float


def measure(name: str, config: dict[str, Any], parallelism: dict[str, Any]) -> Step:
    """Raises subprocess.CalledProcessError if the recipe fails."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "job.yaml"
        spec = {
            "entrypoint": {"recipe": {"name": "pretrain", "config": config | {"steps": STEPS}}},
            "resources": {"gpu": 0, "cpu": 1},
            "parallelism": parallelism,
        }
        head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob"}
        file.write_text(yaml.safe_dump({**head, "metadata": {"name": "alone"}, "spec": spec}))
        job = load_job(file)
        work, layout = workload_of(job), layout_of(job, Mesh())
        assert work is not None
        link = load_catalogue().link("loopback")
        hardware = Hardware(cpu_device(1, 0, 1, processor()), link, link, efficiency=EFFICIENCY)
        sizes = ["--workers", "1", "--threads", "1", "--micro-batch", str(layout.micro_batch)]
        printed = _run(CALIBRATE, str(file), *sizes)
        measured = msgspec.json.decode(printed.splitlines()[-1], type=Measured)
        factor = factors(measured, hardware, work, layout)
        rates = re.findall(r"tokens/s (\d+)", _run(RECIPE, str(file)))
    seconds = [work.tokens_per_step / float(rate) for rate in rates[WARM_UP:]]
    cold = step_time(work, layout, hardware).seconds
    calibrated = step_time(work, layout, hardware._replace(calibration=factor)).seconds
    return Step(name, cold, calibrated, statistics.median(seconds))


def _run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout[-1000:], done.stderr[-3000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout


def table(steps: list[Step]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| shape | cold | calibrated | measured | error cold | error calibrated |"
    yield "|---|---|---|---|---|---|"
    for one in steps:
        cold, calibrated = one.cold / one.measured - 1, one.calibrated / one.measured - 1
        yield (
            f"| {one.name} | {one.cold:.3f} s | {one.calibrated:.3f} s | {one.measured:.3f} s | "
            f"{cold:+.0%} | {calibrated:+.0%} |"
        )
