"""The faults of the recovery table: each case runs, injects a fault at a known step, and times
recovery.

A result is the time from the fault to the first step that all ranks of the next incarnation finish,
and the number of finished steps that were trained again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from . import timeline
from .contestants.base import Contestant, Workload, print_logs
from .contestants.holdfast import Holdfast
from .contestants.torchrun import Bare, Torchrun

FAULT_STEP = 14
"""Mid-interval of a checkpoint every 10 steps, so that what a checkpoint loses is seen."""


START_BOUND_S = 90.0
FULL = "full shard: "
"""Begins the names of cases where all ranks share one copy of the model."""


@dataclass
class Result:
    """One run. `seconds` is None when nothing happened within the bound."""

    case: str
    contestant: str
    seconds: float | None
    steps_lost: int | None = None
    launch_s: float | None = None
    step_s: float | None = None
    note: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, as the contestant itself reports them."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start, as the ranks measured them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    name: str
    contestant: str
    build: Callable[[Workload], Contestant]
    provoke: Callable[[Contestant, timeline.Incarnation], float | None]
    """Returns when the fault happened, where that is later than the call."""
    bound_s: float = 150.0
    start_bound_s: float = START_BOUND_S
    repeat: bool = True
    """False: once is enough, such as for `never`, or where fixed time-outs make up the time."""


def run(case: Case, **workload: Any) -> Result:
    """Carry out one repetition; leaves no process and no file behind."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    contestant = case.build(Workload(directory, **workload))
    try:
        started = time.time()
        contestant.start()
        try:
            before = timeline.wait_for_step(
                contestant.workload.timeline, FAULT_STEP, case.start_bound_s
            )
        except TimeoutError:
            print_logs(directory, sys.stdout)
            note = f"did not reach step {FAULT_STEP} in {case.start_bound_s:g} s; no fault yet"
            return Result(case.name, case.contestant, None, note=note)
        first = before.finished_by_all(before.first_step)
        launch = first - (contestant.begun() or started) if first else None
        steps = timeline.step_seconds(before, 4, FAULT_STEP - 1)
        base = Result(case.name, case.contestant, None, None, launch, median(steps))
        time.sleep(median(steps) / 2)  # in the middle of a step
        asked = time.time()
        fault = case.provoke(contestant, before) or asked
        try:
            after = timeline.wait_for_next(contestant.workload.timeline, before.name, case.bound_s)
        except TimeoutError:
            print_logs(directory, sys.stdout)
            base.note = f"nothing within {case.bound_s:g} s"
            return base
        old = next(o for o in timeline.read(contestant.workload.timeline) if o.name == before.name)
        done = after.finished_by_all(after.first_step)
        assert done is not None
        base.seconds = done - fault
        base.steps_lost = max(0, old.last_step + 1 - after.first_step)
        base.phases, base.parts = contestant.phases(), after.parts
        if "total" in base.phases:
            # What its own account leaves out: from the fault to the moment it knew.
            base.phases["detect"] = max(0.0, base.seconds - base.phases["total"])
        return base
    finally:
        contestant.stop()
        shutil.rmtree(directory, ignore_errors=True)


def kill_worker(contestant: Contestant, job: timeline.Incarnation) -> None:
    os.kill(job.pids[len(job.pids) > 1], signal.SIGKILL)


def hang_worker(contestant: Contestant, job: timeline.Incarnation) -> None:
    os.kill(job.pids[len(job.pids) > 1], signal.SIGSTOP)


def lose_node(contestant: Contestant, job: timeline.Incarnation) -> None:
    """The node that does not host torchrun's store; a replacement is at hand at once."""
    contestant.kill_node(job.pids[ordinary_rank(contestant, job)])
    contestant.replace_node()


def lose_store_node(contestant: Contestant, job: timeline.Incarnation) -> None:
    host = contestant.store_host()
    ranks = [rank for rank, pid in job.pids.items() if psutil.Process(pid).ppid() == host]
    contestant.kill_node(job.pids[min(ranks, default=0)])
    contestant.replace_node()


def ordinary_rank(contestant: Contestant, job: timeline.Incarnation) -> int:
    """The last rank that does not run beside the contestant's store."""
    host = contestant.store_host()
    return max(rank for rank, pid in job.pids.items() if psutil.Process(pid).ppid() != host)


def lose_node_for_good(contestant: Contestant, job: timeline.Incarnation) -> float | None:
    rank = ordinary_rank(contestant, job)
    if isinstance(contestant, Holdfast):
        return contestant.lose_for_good(rank, job.pids[rank])
    contestant.kill_node(job.pids[rank])
    return None


def _full_shard(case: Case) -> Case:
    build = case.build
    return replace(
        case, name=f"{FULL}{case.name}", build=lambda w: build(replace(w, shard="world"))
    )


def cases() -> list[Case]:
    """All rows of the table, contestants of a row beside each other."""
    plain = lambda w: Torchrun(w)  # noqa: E731
    tuned = lambda w: Torchrun(w, tuned=True)  # noqa: E731
    elastic = lambda w: Torchrun(w, elastic=True)  # noqa: E731
    elastic_tuned = lambda w: Torchrun(w, elastic=True, tuned=True)  # noqa: E731
    ours = lambda w: Holdfast(w)  # noqa: E731
    spare = lambda w: Holdfast(w, spares=1)  # noqa: E731
    shards = lambda w: Holdfast(w, engine="shards")  # noqa: E731
    kept = lambda w: Holdfast(w, engine="kept")  # noqa: E731
    again = lambda w: Holdfast(w, engine="holdfast again")  # noqa: E731
    again_spare = lambda w: Holdfast(w, engine="holdfast again", spares=1)  # noqa: E731
    kept_spare = lambda w: Holdfast(w, engine="kept", spares=1)  # noqa: E731
    shards_spare = lambda w: Holdfast(w, engine="shards", spares=1)  # noqa: E731
    others = [
        Case("store's node lost", "torchrun", plain, lose_store_node, 30, repeat=False),
        Case("store's node lost", "Holdfast, spare", spare, lose_store_node, repeat=False),
        Case("worker hangs", "torchrun", plain, hang_worker, 30, repeat=False),
        Case("worker hangs", "Holdfast", ours, hang_worker),
    ]
    return [
        Case("worker killed", "torchrun", plain, kill_worker),
        Case("worker killed", "Holdfast", ours, kill_worker),
        Case("worker killed", "Holdfast, shards", shards, kill_worker),
        Case("worker killed", "Holdfast, script again", again, kill_worker),
        Case("worker killed", "Holdfast, kept", kept, kill_worker),
        Case("node lost, replaced", "torchrun", plain, lose_node, repeat=False),
        Case("node lost, replaced", "torchrun tuned", tuned, lose_node),
        Case("node lost, replaced", "Holdfast, spare", spare, lose_node),
        Case("node lost, replaced", "Holdfast, shards, spare", shards_spare, lose_node),
        Case("node lost, replaced", "Holdfast, script again, spare", again_spare, lose_node),
        Case("node lost, replaced", "Holdfast, kept, spare", kept_spare, lose_node),
        Case("node lost, replaced", "Holdfast, no spare", ours, lose_node, repeat=False),
        Case("node lost, shrink", "torchrun", elastic, lose_node_for_good, repeat=False),
        Case("node lost, shrink", "torchrun tuned", elastic_tuned, lose_node_for_good),
        Case("node lost, shrink", "Holdfast", ours, lose_node_for_good),
        Case("node lost, shrink", "Holdfast, shards", shards, lose_node_for_good),
        Case("node lost, shrink", "Holdfast, script again", again, lose_node_for_good),
        Case("node lost, shrink", "Holdfast, kept", kept, lose_node_for_good),
        # One copy of the model over all ranks, so that a lost node takes a part that no other rank
        # holds.
        *(
            _full_shard(case)
            for case in [
                Case("node lost, shrink", "torchrun tuned", elastic_tuned, lose_node_for_good),
                Case("node lost, shrink", "Holdfast", ours, lose_node_for_good),
                Case("node lost, shrink", "Holdfast, shards", shards, lose_node_for_good),
                Case("worker killed", "torchrun", plain, kill_worker),
                Case("worker killed", "Holdfast", ours, kill_worker),
                Case("node lost, replaced", "torchrun tuned", tuned, lose_node),
                Case("node lost, replaced", "Holdfast, spare", spare, lose_node),
                *others,
            ]
        ),
        *others,
    ]


def run_without_fault(build: Callable[[Workload], Contestant], steps: int) -> Result:
    """Launch to first step, and the median step, of an undisturbed run."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    contestant = build(Workload(directory, steps=steps + 40))
    try:
        started = time.time()
        contestant.start()
        job = timeline.wait_for_step(contestant.workload.timeline, steps, 240)
        first = job.finished_by_all(job.first_step)
        assert first is not None
        step = median(timeline.step_seconds(job, 5, steps))
        launch = first - (contestant.begun() or started)
        return Result("undisturbed", contestant.name, None, None, launch, step)
    finally:
        contestant.stop()
        shutil.rmtree(directory, ignore_errors=True)


UNDISTURBED: list[type[Torchrun] | type[Bare] | type[Holdfast]] = [Bare, Torchrun, Holdfast]


def controller_killed(full_shard: bool) -> Result:
    """SIGKILL of the controller, attached again 15 steps later: the longest step gap of all
    ranks."""
    name = f"{FULL if full_shard else ''}controller killed"
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    workload = Workload(directory)
    contestant = Holdfast(replace(workload, shard="world") if full_shard else workload)
    try:
        contestant.start()
        before = timeline.wait_for_step(contestant.workload.timeline, FAULT_STEP, 120)
        typical = median(timeline.step_seconds(before, 4, FAULT_STEP - 1))
        at = before.last_step
        os.kill(contestant.controller.pid, signal.SIGKILL)
        timeline.wait_for_step(contestant.workload.timeline, at + 15, 60)
        contestant.attach()
        timeline.wait_for_step(contestant.workload.timeline, at + 30, 60)
        incarnations = timeline.read(contestant.workload.timeline)
        gaps = timeline.step_seconds(incarnations[0], at, at + 30)
        note = "" if len(incarnations) == 1 else "training was restarted"
        return Result(name, "Holdfast", max(gaps), 0, None, typical, note)
    finally:
        contestant.stop()
        shutil.rmtree(directory, ignore_errors=True)
