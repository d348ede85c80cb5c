"""`make bench`: recovery, launch and step time, Holdfast beside torchrun and bare processes.

Contestants take turns within every repetition, so that a drift of the machine affects all of them.
Writes bench/results/recovery.json and .md after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from . import cases, conditions
from .cases import Result
from .contestants.torchrun import Torchrun

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="", help="regular expression for 'case: contestant'")
    parser.add_argument("--repeat-all", action="store_true", help="also what runs once by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "recovery")
    options = parser.parse_args()
    facts = conditions.describe()
    results: list[Result] = []
    noise: list[float] = []
    for repetition in range(options.repetitions):
        first = repetition == 0 or options.repeat_all
        for job in plan(re.compile(options.only), first):
            noise.append(conditions.wait_until_quiet())
            result = job()
            results.append(result)
            print(describe(result), flush=True)
            write(options.out, facts, results, noise)


def plan(only: re.Pattern[str], first: bool) -> Iterable[Any]:
    """The runs of one repetition; those of which once is enough only in the first."""
    for case in cases.cases():
        if only.search(f"{case.name}: {case.contestant}") and (case.repeat or first):
            yield lambda case=case: cases.run(case)
    for build in cases.UNDISTURBED:
        # The launch of torchrun is seen in every other row.
        if only.search(f"undisturbed: {build.name}") and (first or build is not Torchrun):
            yield lambda build=build: cases.run_without_fault(build, 40)
    for prefix in ("", cases.FULL):
        if only.search(f"{prefix}controller killed: Holdfast") and first:
            yield lambda full=prefix == cases.FULL: cases.controller_killed(full)


def describe(result: Result) -> str:
    seconds = "-" if result.seconds is None else f"{result.seconds:.2f} s"
    return (
        f"{result.case:22} {result.contestant:20} {seconds:>9}  lost {result.steps_lost}  "
        f"launch {result.launch_s and round(result.launch_s, 2)}  "
        f"step {result.step_s and round(result.step_s, 3)}  {result.note}"
    )


def write(out: Path, facts: dict[str, str], results: list[Result], noise: list[float]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    body = {"conditions": facts, "results": [result.as_dict() for result in results]}
    out.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    lines = ["# Recovery, Holdfast beside torchrun", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    lines += [
        f"Busy cores before the runs: median {median(noise):.2f}, most {max(noise):.2f} of "
        f"{os.cpu_count()}.",
        "4 ranks over 2 nodes of one machine, HSDP 2 x 2 (full shard: FSDP over all ranks) over "
        "gloo, one thread a rank, 3.3 M parameters, DCP every 10 steps (torchrun) or memory every "
        "step and storage every 10 (Holdfast). Seconds from the fault to the first step that all "
        "ranks finished; medians, [least to most], (runs).",
        "",
        "| case | contestant | seconds | steps lost | torchrun / Holdfast |",
        "|---|---|---|---|---|",
    ]
    lines += list(table(results))
    lines += ["", *phase_table(results)]
    lines += ["", "| undisturbed | launch to first step | step |", "|---|---|---|"]
    for name in dict.fromkeys(r.contestant for r in results if r.case == "undisturbed"):
        some = [r for r in results if r.case == "undisturbed" and r.contestant == name]
        launch = spread([r.launch_s for r in some if r.launch_s])
        step = spread([r.step_s for r in some if r.step_s], 3)
        lines.append(f"| {name} | {launch} | {step} |")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def table(results: list[Result]) -> Iterable[str]:
    grouped: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.case != "undisturbed":
            grouped.setdefault((result.case, result.contestant), []).append(result)
    for (case, contestant), some in grouped.items():
        seconds = [r.seconds for r in some if r.seconds is not None]
        lost = [r.steps_lost for r in some if r.steps_lost is not None]
        shown = spread(seconds) if seconds else some[0].note
        losses = f"{median(lost):g} [{min(lost)} to {max(lost)}]" if lost else ""
        ratios = ""
        if contestant.startswith("Holdfast") and seconds:
            ratios = ", ".join(
                f"{median(theirs) / median(seconds):.1f}x ({name})"
                for (other, name), runs in grouped.items()
                if other == case and name.startswith("torchrun")
                and (theirs := [r.seconds for r in runs if r.seconds is not None])
            )  # fmt: skip
        yield f"| {case} | {contestant} | {shown} | {losses} | {ratios} |"


FLOORS = {
    "detect": "49 ms: the kernel tears down a 600 MB process before its exit is seen; a hang: the "
    "rule, 3 s and 3 steps",
    "stop": "49 ms: as above, for the survivors",
    "place": "0: a decision and one fsync of the journal",
    "launch": "5 ms: a fork of a process that has imported torch",
    "first-step": "4 ms gloo + 8 ms first all-reduce + a copy of the state + one step",
}
"""Lower bound of each phase, measured on such a machine."""


def phase_table(results: list[Result]) -> Iterable[str]:
    """Holdfast's recoveries by phase, beside the floor of each."""
    some = [r for r in results if r.phases]
    if not some:
        return
    yield "| Holdfast's time, median | " + " | ".join(FLOORS) + " |"
    yield "|---|" + "---|" * len(FLOORS)
    for case, contestant in dict.fromkeys((r.case, r.contestant) for r in some):
        runs = [r.phases for r in some if (r.case, r.contestant) == (case, contestant)]
        cells = [f"{median([p.get(name, 0.0) for p in runs]):.3f} s" for name in FLOORS]
        yield f"| {case}, {contestant} | " + " | ".join(cells) + " |"
    yield "| floor | " + " | ".join(FLOORS.values()) + " |"


def spread(values: list[float], digits: int = 2) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} [{low:.{digits}f} to {high:.{digits}f}] ({len(values)})"


if __name__ == "__main__":
    main()
