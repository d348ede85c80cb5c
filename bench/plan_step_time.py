"""The planner's time of a step beside that of real jobs on this machine's processors.

For each job: `holdfast spec plan` without a measurement, with `--calibrate`, and the median of the
steps of `holdfast run`, from its report.

python -m bench.plan_step_time        # ten minutes on two idle cores
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench import conditions, plan_processor_time

RESULTS = Path(__file__).parent / "results"
HOLDFAST = [sys.executable, "-m", "holdfast.orchestrator.cli.main"]
STEPS = 25
"""The first five warm up; the report has the median of the newest."""
COLD, CALIBRATED = 0.20, 0.10
"""Errors that the planner is to stay within."""
TIMEOUT_S = 1800.0


class Case(NamedTuple):
    """One job."""

    name: str
    workers: int
    parallelism: dict[str, Any]
    config: dict[str, Any]


MODEL = {"dim": 256, "numLayers": 4, "numHeads": 4, "vocabSize": 2048}
WIDE = {"dim": 384, "numLayers": 3, "numHeads": 6, "vocabSize": 4096}
FULL = {"activationCheckpointing": {"full": {}}}
DDP = {"shard": 1, "replicate": 2}
FSDP = {"shard": 2}


def config(model: dict[str, Any], batch: int, length: int, **more: Any) -> dict[str, Any]:
    data = {"source": "stdlib", "sequenceLength": length}
    return {"steps": STEPS, "globalBatch": batch, "model": model, "data": data, **more}


CASES = (
    Case("one worker", 1, {}, config(MODEL, 8, 128)),
    Case("one worker, AC full", 1, FULL, config(WIDE, 4, 256)),
    Case("DDP", 2, DDP, config(MODEL, 8, 128)),
    Case("DDP, two micro-batches", 2, DDP, config(WIDE, 8, 128, microBatch=2)),
    Case("FSDP", 2, FSDP, config(WIDE, 4, 256)),
    Case("FSDP, loss in chunks", 2, FSDP, config(WIDE, 4, 256, loss={"chunkTokens": 128})),
)


SHAPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("width 256, 8 x 128 tokens", config(MODEL, 8, 128), {}),
    ("width 384, 2 x 256 tokens", config(WIDE, 2, 256), {}),
    ("the same, AC full", config(WIDE, 2, 256), FULL),
    ("the same, two micro-batches", config(WIDE, 4, 256, microBatch=2), {}),
    ("the same, loss in chunks", config(WIDE, 2, 256, loss={"chunkTokens": 128}), {}),
    ("the same, 1 x 1024 tokens", config(WIDE, 1, 1024), {}),
]


def processor_times() -> list[plan_processor_time.Step]:
    """One process for each shape."""
    steps = []
    for shape in SHAPES:
        steps.append(plan_processor_time.measure(*shape))
        print(json.dumps(steps[-1]._asdict()), flush=True)
    return steps


class Row(NamedTuple):
    """Seconds of a step."""

    case: Case
    cold: float
    calibrated: float
    measured: float
    factors: str
    load: float
    """Mean number of runnable processes on the machine while the job ran."""

    @property
    def errors(self) -> tuple[float, float]:
        return self.cold / self.measured - 1, self.calibrated / self.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_step_time", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_step_time.md")
    parser.add_argument("--only", help="a part of a job's name")
    options = parser.parse_args()
    chosen = [one for one in CASES if (options.only or "") in one.name]
    if not chosen:
        names = ", ".join(one.name for one in CASES)
        parser.error(f"--only: got {options.only}; expected a part of one of: {names}")
    rows: list[Row] = []
    alone = [] if options.only else processor_times()
    with tempfile.TemporaryDirectory() as directory:
        for case in chosen:
            rows.append(measure(case, Path(directory)))
            cold, calibrated = rows[-1].errors
            print(
                f"{case.name}: {rows[-1].measured:.3f} s, cold {cold:+.0%}, calibrated "
                f"{calibrated:+.0%}, load {rows[-1].load:.1f}; {rows[-1].factors}",
                flush=True,
            )
            options.out.write_text(page(rows, alone, conditions.describe()))
    return 0


def measure(case: Case, directory: Path) -> Row:
    """Raises subprocess.CalledProcessError if the job or a plan fails."""
    name = "".join(each if each.isalnum() else "-" for each in case.name.lower())
    home, file = directory / name, directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(_spec(case, name)))
    cold = _holdfast("spec", "plan", file, "--home", home)["estimate"]["time"]
    assert cold["calibration"] is None, "a new home has no measurement"
    planned = _holdfast("spec", "plan", file, "--home", home, "--calibrate")["estimate"]["time"]
    before = os.getloadavg()[0]
    report = _holdfast("run", file, "--home", home)
    factors = {one: planned["calibration"][one] for one in ("block", "head", "optimizer")}
    link = planned["calibration"]["link"]
    text = ", ".join(f"{what} {value:.2f}" for what, value in factors.items())
    if link is not None:
        text += f", link {link['bandwidth'] / 1e9:.2f} GB/s {link['latency'] * 1e6:.0f} us"
    load = (before + os.getloadavg()[0]) / 2
    return Row(case, cold["seconds"], planned["seconds"], report["step_s"], text, load)


def _spec(case: Case, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": {"recipe": {"name": "pretrain", "config": case.config}},
            "nodes": {"min": 1, "max": 1},
            "workersPerNode": case.workers,
            # One thread: on a busy machine two threads of a process wait for each other.
            "resources": {"gpu": 0, "cpu": 1},
            "parallelism": case.parallelism,
            # Nothing is staged between the measured steps.
            "checkpoint": {"memory": {"everySteps": 1000}, "storage": {"everySteps": 1000}},
        },
    }


def _holdfast(*arguments: str | Path) -> Any:
    command = [*HOLDFAST, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr, file=sys.stderr)
        done.check_returncode()
    return json.loads(done.stdout)


def page(rows: list[Row], alone: list[plan_processor_time.Step], about: dict[str, str]) -> str:
    lines = [
        "# Step time: the plan beside the job",
        "",
        "Written by `python -m bench.plan_step_time`. Cold: `spec plan` on nominal figures of",
        "a core. Calibrated: after `holdfast spec plan --calibrate`, which trains a block and the",
        "head of the same job 20 times. Measured: the median step of `holdfast run`, from its",
        f"report, {STEPS} steps. To stay within: {COLD:.0%} cold, {CALIBRATED:.0%} calibrated.",
        "",
        "; ".join(f"{what} {value}" for what, value in about.items()),
        "",
        "| job | workers | cold | calibrated | measured | error cold | error calibrated | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cold, calibrated = row.errors
        lines.append(
            f"| {row.case.name} | {row.case.workers} | {row.cold:.3f} s | {row.calibrated:.3f} s | "
            f"{row.measured:.3f} s | {cold:+.0%} | {calibrated:+.0%} | {row.load:.1f} |"
        )
    within = [
        sum(abs(row.errors[number]) <= bound for row in rows)
        for number, bound in enumerate((COLD, CALIBRATED))
    ]
    lines += [
        "",
        f"Within their bound: {within[0]} of {len(rows)} cold, {within[1]} of {len(rows)} "
        f"calibrated.",
    ]
    if min(within) < len(rows):
        lines += [
            "",
            "The others are mostly too low:",
            "[a profile of the step](../../docs/user/plan.md#where-a-figure-comes-from) shows what",
            "the formulas do not have.",
        ]
    quiet = 0.5
    cores = len(os.sched_getaffinity(0))
    if any(row.load > cores + quiet for row in rows):
        lines += [
            "",
            f"The machine has {cores} cores and was loaded by other work (column load: mean number",
            "of runnable processes). A job then gets a part of each core that changes from minute",
            "to minute: cold plans assume whole cores, and a calibration holds for the load under",
            "which it was measured. Such figures show how the parts work together, not how",
            "accurate a plan is on a machine of its own.",
        ]
    lines += ["", "Measured over estimated (link: as measured between the workers):", ""]
    lines += [f"* {row.case.name}: {row.factors}" for row in rows]
    if alone:
        lines += [
            "",
            "## In processor time",
            "",
            "The recipe in one process with one thread, and the same comparison with its processor",
            "time in place of the clock's, which other work on the machine changes less:",
            "",
            *plan_processor_time.table(alone),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
