"""Row that decides, its limit of time without progress, and since when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.hang import table
from holdfast.orchestrator.core.hang.facts import (
    DOING,
    PULSE_STALE_S,
    STARVED_MEMORY_S,
    Doing,
    InspectedStack,
    condition,
    doing,
)
from holdfast.orchestrator.protocol.facts import Stack, WorkerBeat
from tools.hangs_page import page

from ..harness import SECOND
from .moments import BEGUN, DEVICE, NOW, OUTSIDE, READS, WAITS, WORKS, moment

ROOT = Path(__file__).resolve().parents[4]
OWN = {"hangTimeoutSeconds": 12}
SCRIPT: dict[str, Any] = {"script": True, "steps": 0}
EARLY: dict[str, Any] = {"script": True, "steps": 3}
SILENT = {"step": -1, "ticks": 0, "phase": "start", **BEGUN}
FEW = {**SILENT, "collectives": 99, "idle_s": 9.0}
POSTS = {"counted_by": "posted", **BEGUN}
STOPPED = {"stopped": True, "ran_s": 2.0}
SAVES = {"phase": "save", "quiet_s": 3.0}
POSTED_SLOW = {**POSTS, "quiet_s": 9.0}

ROWS: list[tuple[str, float, float, list[dict[str, Any]], dict[str, Any]]] = [
    # (row, its limit in s, seconds since the progress that it counts from, ranks, the job)
    ("stopped-process", 3.0, 2.0, [{}, STOPPED, {}], {}),
    ("stopped-process", 3.0, 4.0, [{"stopped": True, "ran_s": 4.0}, STOPPED, {}], {"steps": 0}),
    ("stopped-process", 3.0, 2.0, [{**SAVES, **STOPPED}, {}], {}),
    ("stopped-process", 3.0, 2.0, [SILENT, {**SILENT, **STOPPED}], SCRIPT),
    ("configured", 12.0, 9.0, [STOPPED], OWN),
    # A script loads.
    ("loading", 600.0, 9.0, [FEW], {**SCRIPT, "launched_s": 609.0}),
    ("loading", 600.0, 7.0, [{**FEW, "idle_s": 7.0}, FEW], {**SCRIPT, "launched_s": 607.0}),
    ("loading", 600.0, 500.0, [{**FEW, "idle_s": 900.0}], {**SCRIPT, "launched_s": 500.0}),
    ("loading", 90.0, 9.0, [FEW], {**SCRIPT, "launched_s": 99.0, "startupTimeoutSeconds": 90}),
    ("unwatched", 0, 0, [FEW], {**SCRIPT, "launched_s": 609.1}),
    ("unwatched", 0, 0, [FEW], {**SCRIPT, "launched_s": 609.0, "ended": 1}),
    ("unwatched", 0, 0, [{"never": True}], SCRIPT),
    ("start-up", 600.0, 2000.0, [{"never": True}], {"steps": 0}),
    # A script reports no step.
    ("collectives", 60.0, 9.0, [SILENT | OUTSIDE, SILENT | WAITS], SCRIPT),
    ("collectives", 60.0, 9.0, [SILENT | WAITS], SCRIPT),
    ("collectives", 60.0, 4.0, [SILENT | OUTSIDE, SILENT | WAITS | {"quiet_s": 4.0}], SCRIPT),
    ("collectives", 16.0, 9.0, [SILENT | WAITS], {**SCRIPT, "busyTimeoutSeconds": 8}),
    ("collectives", 150.0, 9.0, [SILENT | WAITS], {**SCRIPT, "gap_s": 50.0}),
    ("unwatched", 0, 0, [SILENT | READS, SILENT | WAITS], SCRIPT),
    ("unwatched", 0, 0, [SILENT | WORKS, SILENT | WAITS], SCRIPT),
    ("unwatched", 0, 0, [SILENT], SCRIPT),
    ("unwatched", 0, 0, [{**FEW, "counted_by": "posted", "ticks": 9, "idle_s": 0.0}, FEW], SCRIPT),
    ("unwatched", 0, 0, [SILENT | WAITS], {**SCRIPT, "ended": 1}),
    ("unwatched", 0, 0, [SILENT | WAITS, {"never": True}], SCRIPT),
    ("unwatched", 0, 0, [SILENT | WAITS], {**SCRIPT, "starved_s": STARVED_MEMORY_S}),
    ("collectives", 60.0, 9.0, [SILENT | WAITS], {**SCRIPT, "starved_s": STARVED_MEMORY_S + 0.1}),
    ("configured", 12.0, 9.0, [SILENT], {**SCRIPT, **OWN}),
    ("unwatched", 0, 0, [SILENT, {"never": True}], {**SCRIPT, **OWN}),
    ("save", 600.0, 3.0, [SILENT | OUTSIDE | SAVES, SILENT | WAITS], SCRIPT),
    ("unwatched", 0, 0, [SILENT | WORKS | SAVES, SILENT | WAITS], SCRIPT),
    # No step has finished.
    ("start-up", 600.0, 9.0, [SILENT, {**SILENT, "phase": "build"}], SCRIPT),
    ("start-up", 600.0, 9.0, [SILENT, {**SILENT, "began_after": -1}], SCRIPT),
    ("start-up", 600.0, 9.0, [SILENT, {**SILENT, "step": 0}], SCRIPT),
    ("start-up", 20.0, 4.0, [SILENT, SAVES | {"quiet_s": 4.0}, SILENT],
     {"steps": 0, "startupTimeoutSeconds": 20}),
    ("start-up", 600.0, 9.0, [SILENT], {"steps": 0, **OWN}),
    ("unwatched", 0, 0, [{"leaves": True}], {"steps": 0}),
    ("unwatched", 0, 0, [{"leaves": True}], {}),
    ("unwatched", 0, 0, [{}], {"ended": 4}),
    ("unwatched", 0, 0, [POSTS, {"step": -1}], {"script": True, "ended": 1}),
    # A phase.
    *[("save", 600.0, 3.0, [{"phase": phase, "quiet_s": 3.0}, {}], more)
      for phase in ("build", "restore", "compile", "evaluate", "save", "finish")
      for more in ({}, OWN, {"steps": 2})],
    # Few steps.
    ("configured", 12.0, 9.0, [{}], {**OWN, "steps": 3}),
    ("configured", 12.0, 9.0, [WAITS], OWN),
    ("first-steps", 600.0, 9.0, [{}], {"steps": 4}),
    ("first-steps", 600.0, 9.0, [BEGUN | WAITS], {"steps": 4}),
    ("first-steps", 100.0, 9.0, [{}], {"steps": 4, "startupTimeoutSeconds": 100}),
    ("first-steps", 600.0, 9.0, [POSTS | READS, POSTS | WAITS], EARLY),
    ("first-steps", 600.0, 2.0, [POSTS, POSTS | {"quiet_s": 2.0}], EARLY),
    ("first-steps", 600.0, 9.0, [POSTS, {"quiet_s": 2.0}], EARLY),
    ("collectives", 60.0, 9.0, [POSTS | OUTSIDE, POSTS | WAITS], {**EARLY, "first_s": 1.0}),
    ("collectives", 300.0, 9.0, [POSTS | WAITS], {**EARLY, "first_s": 100.0}),
    ("collectives", 600.0, 9.0, [POSTS | WAITS], {**EARLY, "first_s": 400.0}),
    ("collectives", 600.0, 9.0, [POSTS | WAITS], EARLY),
    # The step time is known.
    ("hang", 4.5, 9.0, [OUTSIDE, WAITS], {"steps": 5}),
    ("hang", 4.5, 9.0, [WAITS | {"quiet_s": 5.0}, WAITS], {}),
    ("hang", 4.5, 9.0, [{"activity": "engine", "idle_s": 5.0}, WAITS], {}),
    ("hang", 4.5, 9.0, [{"activity": "", "pulse_age_s": 9.0, "idle_s": 5.0}, WAITS], {}),
    ("hang", 4.5, 9.0, [DEVICE, OUTSIDE, WAITS], {}),
    ("hang", 9.5, 9.0, [POSTED_SLOW | OUTSIDE, WAITS | {"quiet_s": 0.0}], {"script": True}),
    ("busy-worker", 30.0, 9.0, [WORKS, WAITS], {}),
    ("busy-worker", 30.0, 9.0, [READS, WAITS], {}),
    ("busy-worker", 30.0, 9.0, [{"activity": "compiles", "idle_s": 5.0}, WAITS], {}),
    ("busy-worker", 30.0, 9.0, [{"activity": "staging", "idle_s": 5.0}, WAITS], {}),
    ("busy-worker", 30.0, 9.0, [{"activity": "engine"}, WAITS], {}),
    ("busy-worker", 30.0, 9.0, [DEVICE, WAITS], {}),
    ("busy-worker", 30.0, 9.0, [{}, WAITS], {}),
    ("busy-worker", 30.0, 9.0, [{}], {"ended": 1}),
    ("busy-worker", 19.5, 9.0, [{}], {"busyTimeoutSeconds": 8, "gap_s": 6.5}),
    ("busy-worker", 4.5, 9.0, [{}], {"busyTimeoutSeconds": 1}),
    ("busy-worker", 600.0, 9.0, [POSTS | READS, WAITS], {"script": True}),
    ("starved-machine", 120.0, 9.0, [WAITS], {"starved_s": STARVED_MEMORY_S}),
    ("hang", 4.5, 9.0, [WAITS], {"starved_s": STARVED_MEMORY_S + 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "limit_s", "since_s", "given", "job"), ROWS)
def test_the_first_row_that_holds_decides(
    name: str, limit_s: float, since_s: float, given: list[dict[str, Any]], job: dict[str, Any]
) -> None:
    facts = moment(*given, **job)
    row = next(row for row in table.TABLE if row.holds(facts))
    assert row.name == name
    limit = table.decide(facts)
    if limit is None:
        assert row.limit_s is None and limit_s == 0
        return
    assert (limit.limit_s, (NOW - limit.moved_ns) / SECOND) == pytest.approx((limit_s, since_s))


@pytest.mark.parametrize(
    ("counts_from_s", "given", "job"),
    [
        (9.0, [WAITS], {}),
        (2.5, [WAITS], {"busy_s": 2.5}),
        (4.0, [WAITS | {"quiet_s": 40.0}], {"starved_s": 14.0}),
        (3.0, [WAITS | {"quiet_s": 40.0}], {"starved_s": 14.0, "busy_s": 3.0}),
        (5.0, [OUTSIDE | {"quiet_s": 40.0}, WAITS], {"starved_s": 14.0}),
        (4.0, [SILENT | WAITS | {"quiet_s": 40.0}], {**SCRIPT, "starved_s": 14.0}),
        (9.0, [{}], {"busy_s": 2.5}),
        (9.0, [{}], {"steps": 2, "busy_s": 2.5}),
    ],
)
def test_a_hang_counts_from_the_last_work_and_a_starved_machine_excuses_only_ranks_that_wait(
    counts_from_s: float, given: list[dict[str, Any]], job: dict[str, Any]
) -> None:
    limit = table.decide(moment(*given, **job))
    assert limit is not None
    assert (NOW - limit.due_ns) / SECOND + limit.limit_s == pytest.approx(counts_from_s)


@pytest.mark.parametrize(
    ("after_s", "given", "job"),
    [
        (3.5, [{}], {}),
        (8.5, [POSTS], {"script": True}),
        (None, [{}], {"steps": 4}),
        (None, [{}], OWN),
        (None, [FEW], SCRIPT),
        (4.0, [SILENT], SCRIPT),
        (9.0, [POSTS], EARLY),
        (599.0, [SAVES], {}),
        (None, [SAVES], {"steps": 0}),
        (None, [SILENT, SILENT | SAVES | {"phase": "compile"}], SCRIPT),
        (599.0, [SILENT | SAVES], SCRIPT),
    ],
)
def test_workers_are_asked_what_they_do_before_the_limit_is_over(
    after_s: float | None, given: list[dict[str, Any]], job: dict[str, Any]
) -> None:
    assert moment(*given, **job).ask_after_s == after_s


IDLE_S = limits.IDLE_S


@pytest.mark.parametrize(
    ("activity", "idle_s", "before_s", "found"),
    [
        ("peers", IDLE_S, 0, "waits"),
        ("peers", IDLE_S - 0.1, 0, "device"),
        ("peers", IDLE_S, 2, "waits"),
        ("nothing", IDLE_S, IDLE_S, "outside"),
        ("nothing", IDLE_S, IDLE_S + 0.1, "unknown"),
        ("nothing", IDLE_S - 0.1, 0, "unknown"),
        ("engine", IDLE_S, IDLE_S, "waits"),
        ("engine", IDLE_S, IDLE_S + 0.1, "unknown"),
        ("nothing", 0.0, 2, "busy"),
        ("engine", 0.0, 2, "busy"),
        ("", IDLE_S, 0, "unknown"),
    ],
)
def test_a_stack_holds_for_as_long_as_the_process_has_been_idle_since(
    activity: Any, idle_s: float, before_s: float, found: Doing
) -> None:
    """The stack was taken `before_s` ago."""
    known = InspectedStack(Stack(2, "", False, "S", activity), NOW - round(before_s * SECOND))
    assert doing(NOW, WorkerBeat(rank=2, idle_s=idle_s, pulse_age_s=0.1), known) == found
    assert doing(NOW, WorkerBeat(rank=2, idle_s=idle_s), None) == "unknown"


@pytest.mark.parametrize(
    ("pulse_age_s", "state", "found"),
    [
        (PULSE_STALE_S, "S", "unknown"),
        (PULSE_STALE_S + 0.1, "S", "outside"),
        (PULSE_STALE_S + 0.1, "D", "unknown"),
    ],
)
def test_a_rank_that_did_not_answer_does_nothing_once_its_pulse_is_stale(
    pulse_age_s: float, state: str, found: Doing
) -> None:
    beat = WorkerBeat(rank=2, idle_s=IDLE_S, pulse_age_s=pulse_age_s)
    assert doing(NOW, beat, InspectedStack(Stack(2, "", False, state, ""), NOW)) == found


@pytest.mark.parametrize(
    ("every", "found"),
    [
        (("waits", "waits"), "idle"),
        (("waits", "outside", "device"), "idle"),
        (("waits", "device"), "unknown"),
        (("outside", "unknown"), "unknown"),
        (("outside", "unknown", "busy"), "busy"),
    ],
)
def test_one_rank_at_work_is_enough_to_wait_for(every: tuple[Doing, ...], found: str) -> None:
    assert condition(every) == found


def test_the_rows_have_names_of_their_own_and_the_page_shows_them() -> None:
    names = [row.name for row in table.TABLE]
    assert len(names) == len(dict.fromkeys(names)) and names[-1] == "busy-worker"
    assert {name for name, *_rest in ROWS} == set(names), "each row has a case"
    assert (ROOT / "docs/concepts/hangs.md").read_text() == page()
    assert all(len(columns) == 3 for columns in DOING.values())
