"""Limits of time without progress: one table, of which the first row that holds decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ... import limits
from .facts import HangFacts


@dataclass(frozen=True, slots=True)
class HangRow:
    name: str
    holds: Callable[[HangFacts], bool]
    limit_s: Callable[[HangFacts], float] | None
    """None: no time without progress is a hang."""
    when: str
    lasts: str
    excused: bool = False
    """The limit counts from the time at which the last rank worked, if that is later."""
    since_ns: Callable[[HangFacts], int | None] = attrgetter("moved_ns")


class Limit(NamedTuple):
    """A hang, unless there is progress before `due_ns`."""

    row: HangRow
    due_ns: int
    limit_s: float
    moved_ns: int
    """Time of the last progress."""


TABLE: tuple[HangRow, ...] = (
    HangRow("stopped-process",
        lambda f: f.auto and f.stopped_ns is not None, lambda f: limits.HANG_FLOOR_S,
        "a process is stopped (state T), at any time", f"{limits.HANG_FLOOR_S:g} s since it ran",
        since_ns=lambda f: f.stopped_ns),
    HangRow("loading",
        lambda f: f.loads, lambda f: f.recovery.startup_timeout_s,
        "a script loads: no step, fewer than 100 collectives, and it has not worked for longer "
        "than the limit", "`startupTimeoutSeconds` in which no rank uses the CPU or does I/O",
        since_ns=lambda f: f.idle_ns),
    HangRow("unwatched",
        lambda f: f.unwatched, None,
        "a script reports no step, and has a single rank, or one that has ended, or one that "
        "works; or the ranks that report steps have ended", "no limit"),
    HangRow("start-up",
        lambda f: not f.counted and not f.silent, lambda f: f.recovery.startup_timeout_s,
        "no step has finished, except in a smaller world of kept processes",
        "`startupTimeoutSeconds` without a sign of life of any rank"),
    HangRow("save",
        lambda f: f.works, lambda f: limits.SAVE_TIMEOUT_S,
        "a rank is in a phase: it builds, restores, compiles, evaluates, saves or finishes",
        f"{limits.SAVE_TIMEOUT_S:g} s without a sign of life of any rank"),
    HangRow("configured",
        lambda f: not f.auto, lambda f: float(f.recovery.hang_timeout_s),
        "`hangTimeoutSeconds` is a number",
        "that number, in place of every other row but those above"),
    HangRow("collectives",
        lambda f: f.by_collectives and f.hangs, lambda f: f.collectives_limit_s,
        "a script has reported fewer than 5 steps and begun 100 collectives; a rank does nothing "
        "that its peers wait for, or all wait for each other",
        "twice `busyTimeoutSeconds`, or three times the longest pause that ended by itself; after "
        "a first step at least three times the time that it took, `startupTimeoutSeconds` at most",
        excused=True),
    HangRow("first-steps",
        lambda f: not f.learned, lambda f: f.recovery.startup_timeout_s,
        "fewer than 5 steps have finished", "`startupTimeoutSeconds`"),
    HangRow("hang",
        lambda f: f.hangs, lambda f: f.hang_limit_s,
        "a rank does nothing that its peers wait for, or all wait for each other",
        f"{limits.HANG_FLOOR_S:g} s + {limits.HANG_STEP_FACTOR:g} x the median of the last 32 step "
        "times; 5 s more if a framework counts or posts the steps",
        excused=True),
    HangRow("starved-machine",
        lambda f: f.starved, lambda f: limits.STARVED_FACTOR * f.busy_limit_s,
        "the threads of a machine wait for its CPU",
        f"{limits.STARVED_FACTOR:g} x the limit of a busy worker"),
    HangRow("busy-worker",
        lambda f: True, lambda f: f.busy_limit_s,
        "a rank computes, reads, compiles, waits for its device, or did not answer",
        "`busyTimeoutSeconds`, or three times the longest such time that ended by itself; "
        f"{limits.SAVE_TIMEOUT_S:g} s at least if a framework counts or posts the steps"),
)  # fmt: skip


def decide(facts: HangFacts) -> Limit | None:
    """The limit of the first row that holds; None: there is none, or none can be over soon."""
    row = next(row for row in TABLE if row.holds(facts))
    moved_ns = row.since_ns(facts)
    if row.limit_s is None or moved_ns is None:
        return None
    limit_s = row.limit_s(facts)
    due_ns = facts.due_ns(max(moved_ns, facts.excused_ns * row.excused), limit_s)
    return None if due_ns is None else Limit(row, due_ns, limit_s, moved_ns)
