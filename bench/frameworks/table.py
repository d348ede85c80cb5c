"""bench/results/frameworks.md: the page of all results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from tests.frameworks.catalogue import FRAMEWORKS, by_name

from .faults import SAVE, Account, Measured, Result

HEAD = """\
Each script is written for torchrun and has no line about Holdfast
(`tests/frameworks/scripts`). 2 nodes x {workers} workers on one machine, gloo, one thread a
rank; a checkpoint of the script every {every} steps; each rank waits {pace:g} s in each step.
All figures are from the script's own step log: one line per step of rank 0. Seconds are from
the fault to the first step of the next launch; *twice* is the number of steps that were
trained again. A fault comes in the middle between two checkpoints. `grow` has no fault: its
seconds are those without a step. `suspend, resume` counts from `resume`; for torchrun that is
a start of both agents after SIGTERM. Each figure is one observation unless a number of runs
stands beside it; `load` is the load average at the fault. Sides with different loads must not
be compared. "No step within N s" is no more than that: torchrun starts Python again, and on
loaded cores the import of torch alone takes a minute.
"""
OURS, THEIRS = "Holdfast", "torchrun, best settings"
BUSY = """\
**The machine had other work: its load was above the number of its processors, so each figure has
time in it in which processes waited for a processor, those of torchrun most, which import torch
at each restart. It is to be measured again on an idle machine.**
"""
SETTINGS = """\
torchrun's best settings: c10d rendezvous, one agent a node, `--nnodes 1:2`, `--rdzv-conf
keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1`, `--max-restarts 1000`,
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Its defaults: without the configuration and the variable.
"""


def page(
    facts: dict[str, str], results: list[Result], accounts: list[Account], last: Measured
) -> str:
    lines = ["# Scripts of other frameworks, Holdfast beside torchrun", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    if results and median(one.load for one in results) > (os.cpu_count() or 1):
        lines += ["", BUSY]
    lines += [
        "",
        HEAD.format(every=last.save_every, pace=last.pace_s, workers=last.workers),
        SETTINGS,
        "Versions: " + versions() + ".",
        "",
    ]
    lines += list(recoveries(results))
    lines += ["", "## What Holdfast reports, beside the step log", "", *claims(results)]
    lines += ["", *whole_runs(accounts)]
    return "\n".join(lines) + "\n"


def versions() -> str:
    found = []
    for package in ("torch", "transformers", "accelerate", "trl", "peft", "lightning", "deepspeed"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def recoveries(results: list[Result]) -> Iterator[str]:
    """A row per framework and fault; a column per side."""
    sides = list(dict.fromkeys(one.side for one in results))
    yield "| framework | fault | " + " | ".join(sides) + " | torchrun / Holdfast |"
    yield "|---|---|" + "---|" * (len(sides) + 1)
    order = [one.name for one in FRAMEWORKS]
    for name in sorted({one.framework for one in results}, key=order.index):
        some = [one for one in results if one.framework == name]
        for fault in dict.fromkeys(one.fault for one in some):
            cells = [
                cell([one for one in some if (one.fault, one.side) == (fault, side)])
                for side in sides
            ]
            of_fault = [one for one in some if one.fault == fault]
            title = by_name(name).title
            yield f"| {title} | {fault} | " + " | ".join(cells) + f" | {ratio(of_fault)} |"


def shown_seconds(one: Result) -> float | None:
    return one.gap_s if one.seconds is None else one.seconds


def cell(some: list[Result]) -> str:
    """Median seconds, spread, number of runs, steps trained twice, and what ended for good."""
    if not some:
        return ""
    known = [s for one in some if (s := shown_seconds(one)) is not None]
    notes = [one.note.replace("|", "/").replace("\n", " ")[-120:] for one in some if one.note]
    if not known:
        return f"{notes[0]}, load {some[0].load:.0f}"
    text = f"**{median(known):.1f} s**"
    if len(known) > 1:
        text += f" [{min(known):.1f} to {max(known):.1f}] ({len(known)})"
    twice = [one.trained_twice for one in some if one.trained_twice is not None]
    text += f", twice {median(twice):g}"
    text += f", after {some[0].settled_s:.0f} s of steps" if some[0].settled_s else ""
    text += f", load {median(one.load for one in some):.0f}"
    return text + (f"; {len(notes)} of {len(some)}: {notes[0]}" if notes else "")


def ratio(some: list[Result]) -> str:
    """Of medians, where both sides had about the same load."""

    def of(side: str) -> list[float]:
        return [s for one in some if one.side == side and (s := shown_seconds(one)) is not None]

    ours, theirs = of(OURS), of(THEIRS)
    loads = [median(one.load for one in some if one.side == side) for side in (OURS, THEIRS)
             if any(one.side == side for one in some)]  # fmt: skip
    equal = len(loads) == 2 and max(loads) < 1.25 * min(loads)
    return f"{median(theirs) / median(ours):.1f}x" if ours and theirs and equal else ""


def claims(results: list[Result]) -> Iterator[str]:
    yield (
        "| framework | side | fault | seconds, log | seconds, report | twice, log | lost, report | "
        "named after | load |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in results:
        if one.reported_s is None or one.fault == SAVE:
            continue
        lost = number(one.reported_lost)
        named = "-" if one.named_s is None or one.seconds is None else f"{one.named_s:.1f} s"
        shown = shown_seconds(one)
        assert shown is not None
        yield (
            f"| {by_name(one.framework).title} | {one.side} | {one.fault} | {shown:.2f} | "
            f"{one.reported_s:.2f} | {one.trained_twice} | {lost} | {named} | {one.load:.1f} |"
        )


def number(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def whole_runs(accounts: list[Account]) -> Iterator[str]:
    yield (
        "Whole runs. Goodput by the log is the time in which new steps were trained, over the time "
        "that Holdfast counts from the first launch."
    )
    yield ""
    yield (
        "| framework | side | step | goodput, report | goodput, log | lost, report | twice, log | "
        "steps known to Holdfast |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for one in accounts:
        yield (
            f"| {by_name(one.framework).title} | {one.side} | {one.step_s:.2f} s | "
            f"{one.goodput:.1%} | {one.goodput_by_log:.1%} | {number(one.reported_lost)} | "
            f"{one.trained_twice} | {'yes' if one.steps_known else 'no'} |"
        )


def load() -> str:
    """For the conditions."""
    return f"{os.getloadavg()[0]:.1f} at the start"
