"""bench/results/frameworks.md: the page of all results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import median

from tests.frameworks.catalogue import EVERY, by_name

from .faults import HANGS, NO_STEP, NOT_COUNTED, SAVE, SUSPEND, Account, Measured, Result
from .sides import InMemory

OTHERS = 0.3
"""Cores that processes of others may use before a fault: more, and its figure is not compared."""
FACTOR, NAMED_S, NAMED_STEPS, OFF = 4.0, 10.0, 3, 0.05
"""Goals: times faster than torchrun, seconds and steps until a hang is named, and how far
the report may be from the step log."""
HEAD = """\
Each script is written for torchrun and has no line about Holdfast
(`tests/frameworks/scripts`). 2 nodes x {workers} workers on one machine, gloo, one thread a
rank; a checkpoint of the script every {every} steps; each rank waits {pace:g} s in each step.
All figures are from the script's own step log: one line per step of rank 0. Seconds are from
the fault to the first step of the next launch; *twice* is the number of steps that were
trained again. A fault comes in the middle between two checkpoints. `grow` has no fault: its
seconds are those without a step. `suspend, resume` counts from `resume`; for torchrun that is
a start of both agents after SIGTERM. Each figure is one observation unless a number of runs
stands beside it; `load` is the load average at the fault, to which the restart before adds.
Figures are compared if processes of others used less than {others:g} cores before the fault.
"No step within N s" counts as N s in a ratio, which is then marked with >=. `hang` is a rank
stopped by SIGSTOP; `stuck rank` is one that waits in its own code, outside of a collective.
A fault that did not stop the launch that trained is not counted, and said.
"""
OURS, THEIRS = "Holdfast", "torchrun, best settings"
BUSY = """\
**The machine had other work during some faults: their figures have time in them in which processes
waited for a processor, those of torchrun most, which import torch at each restart. They are not
compared, and to be measured again.**
"""
REASONS = """\
Why goodput is not within the goal: of a script that reports no step, all time in which its ranks
communicate counts as productive, also that of steps which are trained again (`status` and `report`
show such a goodput as "at most"). Here a fault came every few seconds, so each such second weighs.
An incident of a silent script is over when its ranks begin collectives, which is before the end of
their first step. The accounts of torchtitan without memory and of ms-swift were measured before
three corrections: the time of a hang counted as productive, steps that were trained but never
posted were lost, and transformers did not post where it begins."""
SETTINGS = """\
torchrun's best settings: c10d rendezvous, one agent a node, `--nnodes 1:2`, `--rdzv-conf
keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1`, `--max-restarts 1000`,
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Its defaults: without the configuration and the variable.
After a node was replaced or a worker was killed, its two nodes sometimes trained side by side, two
ranks each, on the same checkpoint, until they were ended: then the next fault was caused in a new
run, and for `grow` that is "no step", as no launch had all ranks.
"""


def page(
    facts: dict[str, str], results: list[Result], accounts: list[Account], last: Measured
) -> str:
    lines = ["# Scripts of other frameworks, Holdfast beside torchrun", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    if not all(_alone(one) for one in results):
        lines += ["", BUSY]
    lines += [
        "",
        HEAD.format(every=last.save_every, pace=last.pace_s, workers=last.workers, others=OTHERS),
        SETTINGS,
        "",
    ]
    lines += ["## Goals", "", *goals(results, accounts), "", REASONS, "", "## Recoveries", ""]
    lines += list(recoveries(results))
    lines += ["", "## What Holdfast reports, beside the step log", "", *claims(results)]
    lines += ["", *whole_runs(accounts)]
    return "\n".join(lines) + "\n"


def recoveries(results: list[Result]) -> Iterator[str]:
    """A row per framework and fault; a column per side."""
    sides = list(dict.fromkeys(one.side for one in results))
    yield "| framework | fault | " + " | ".join(sides) + " | torchrun / Holdfast |"
    yield "|---|---|" + "---|" * (len(sides) + 1)
    order = [one.name for one in EVERY]
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
        return f"{notes[0]}, load {some[0].load:.1f}"
    text = f"**{median(known):.1f} s**"
    if len(known) > 1:
        text += f" [{min(known):.1f} to {max(known):.1f}] ({len(known)})"
    twice = [one.trained_twice for one in some if one.trained_twice is not None]
    text += f", twice {median(twice):g}"
    text += f", after {some[0].settled_s:.0f} s of steps" if some[0].settled_s else ""
    text += f", load {median(one.load for one in some):.1f}"
    return text + (f"; {len(notes)} of {len(some)}: {notes[0]}" if notes else "")


def _alone(one: Result) -> bool:
    """The machine had no other work. Older results have the load average only, which includes what
    the bench itself started."""
    if one.others is not None:
        return one.others < OTHERS
    return one.load <= (os.cpu_count() or 1)


def ratio(some: list[Result]) -> str:
    found = factor(some)
    return "" if found is None else f"{'>= ' if found[1] else ''}{found[0]:.1f}x"


def factor(some: list[Result]) -> tuple[float, bool] | None:
    """(The median of torchrun over that of Holdfast, whether it is at least that), of one fault.
    None: not measured on both sides, or others worked on the machine."""

    def of(side: str) -> list[tuple[float, bool]]:
        found = []
        for one in some:
            if one.side == side and (seconds := shown_seconds(one)) is not None:
                found.append((seconds, False))
            elif one.side == side and one.note == NO_STEP.format(one.bound_s):
                found.append((one.bound_s, True))
        return sorted(found)

    ours, theirs = of(OURS), of(THEIRS)
    if not ours or not theirs or any(late for _seconds, late in ours):
        return None
    if not all(_alone(one) for one in some if one.side in (OURS, THEIRS)):
        return None
    middle = theirs[(len(theirs) - 1) // 2]
    return middle[0] / median(seconds for seconds, _late in ours), middle[1]


def goals(results: list[Result], accounts: list[Account]) -> Iterator[str]:
    """A row per framework: what each goal of the comparison came to."""
    yield (
        f"| framework | faults that it went on after | torchrun / Holdfast, least of the faults "
        f"(goal {FACTOR:g}x) | a rank that does not go on, named after (goal {NAMED_S:g} s + "
        f"{NAMED_STEPS} steps) | report beside the log (goal {OFF:.0%}) | steps lost with its "
        "state in memory (goal 0) |"
    )
    yield "|---|---|---|---|---|---|"
    for framework in EVERY:
        some = [one for one in results if one.framework == framework.name]
        ours = [one for one in some if one.side == OURS and not one.note.startswith(NOT_COUNTED)]
        account = next(
            (a for a in accounts if (a.framework, a.side) == (framework.name, OURS)), None
        )
        cells = [
            _judged(f"{sum(shown_seconds(one) is not None for one in ours)} of {len(ours)}",
                    all(shown_seconds(one) is not None for one in ours)) if ours else "",
            _least(some),
            _named(ours, account.step_s if account else 0.0),
            _off(ours, account),
            _kept([one for one in some if one.side == InMemory.name])
            if framework.memory else "no such integration",
        ]  # fmt: skip
        yield f"| {framework.title} | " + " | ".join(one or "not measured" for one in cells) + " |"


def _judged(text: str, met: bool) -> str:
    return f"{text}, {'met' if met else '**missed**'}"


def _least(some: list[Result]) -> str:
    found = []
    for fault in dict.fromkeys(one.fault for one in some):
        factors = factor([one for one in some if one.fault == fault])
        if factors is not None and fault != "grow":  # it has no fault
            found.append((*factors, fault))
    if not found:
        return ""
    least, late, fault = min(found)
    text = f"{'>= ' if late else ''}{least:.1f}x ({fault}; {len(found)} faults compared)"
    return _judged(text, least >= FACTOR)


def _named(ours: list[Result], step_s: float) -> str:
    hangs = [one for one in ours if one.fault in HANGS and one.load]
    parts = [
        f"{one.fault} not within {one.bound_s:g} s"
        if one.named_s is None
        else f"{one.fault} {one.named_s:.1f} s"
        for one in hangs
    ]
    limit_s = NAMED_S + NAMED_STEPS * step_s
    met = all(one.named_s is not None and one.named_s <= limit_s for one in hangs)
    return _judged(", ".join(parts), met) if hangs else ""


def _off(ours: list[Result], account: Account | None) -> str:
    """Error of goodput, and of the seconds of all incidents together."""
    if account is None or not account.goodput_by_log:
        return ""
    goodput = account.goodput / account.goodput_by_log - 1
    pairs = []
    for one in ours:
        if one.fault != SUSPEND and one.seconds and one.opened_s and one.reported_s:
            pairs.append((one.opened_s + one.reported_s, one.seconds))
    text, met = f"goodput {goodput:+.1%}", abs(goodput) <= OFF
    if pairs:
        seconds = sum(said for said, _log in pairs) / sum(log for _said, log in pairs) - 1
        text, met = f"{text}, seconds of incidents {seconds:+.1%}", met and abs(seconds) <= OFF
    return _judged(text, met)


def _kept(in_memory: list[Result]) -> str:
    """`trained_twice` may be 1: rank 0 has logged the step in which its peer was killed."""
    known = [one.reported_lost for one in in_memory if one.reported_lost is not None]
    if not known:
        return ""
    logged = max(one.trained_twice or 0 for one in in_memory)
    text = f"{sum(known)} in {len(known)} faults; twice in the log {logged} at most"
    return _judged(text, not any(known) and logged <= 1)


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
    """Load, for the conditions."""
    return f"{os.getloadavg()[0]:.1f} at the start"
