"""The faults, one after the other in one run of a script, and what the step log shows of each.

A fault is caused in the middle between two checkpoints, and not before the launch has trained for
a while, so that standbys are there and what a checkpoint loses is seen. When a job has ended for
good, the next fault gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from bench import conditions
from holdfast.orchestrator.runtime.observe.view import Incident
from tests.frameworks.step_log import (
    Line,
    Recovery,
    productive_seconds,
    step_seconds,
    trained_twice,
)

from .sides import Side, UnderHoldfast

ROOT = Path(__file__).parents[2]
START_BOUND_S = 120.0
HANG_BOUND_S = 100.0
"""More than a hang of a script may take that reports nothing."""
CLOSED_S = 30.0
"""Limit until an incident is over for Holdfast: a framework that posts its steps does so every 5
s."""
SAVE_BOUND_S = 120.0
DELAYS_S = 0.1
"""A kill in the middle of a save comes after a random part of this."""


class Result(msgspec.Struct, kw_only=True):
    """One fault on one side, by the step log; `reported_*` by the report of Holdfast."""

    framework: str
    side: str
    fault: str
    seconds: float | None = None
    """Time from the fault to the next step; None: no step within the bound."""
    gap_s: float | None = None
    trained_twice: int | None = None
    world: int | None = None
    note: str = ""
    named_s: float | None = None
    """Time until Holdfast had named what failed: a hang's rank, or the incident's culprit."""
    opened_s: float | None = None
    """Time until Holdfast had opened the incident."""
    reported_s: float | None = None
    reported_lost: int | None = None
    load: float = 0.0
    """Load average of the last minute at the fault: a restart of torchrun raises it."""
    others: float | None = None
    """Cores that processes of others used before the fault."""
    settled_s: float = 0.0
    """The least time from the first step of a launch to the fault."""
    at: str = ""
    """Time of the fault, in UTC."""
    bound_s: float = 0.0
    """Longest wait for the next step, in seconds."""
    commit: str = ""


class Account(msgspec.Struct, kw_only=True):
    """A whole run: Holdfast's report beside the step log."""

    framework: str
    side: str
    goodput: float
    goodput_by_log: float
    reported_lost: int | None
    trained_twice: int
    steps_known: bool
    """Holdfast knew the steps of the script."""
    step_s: float
    seconds: float


class Measured(msgspec.Struct, kw_only=True):
    """One framework, all sides in one run."""

    framework: str
    conditions: dict[str, str]
    workers: int
    """Per node."""
    save_every: int
    pace_s: float
    results: list[Result]
    accounts: list[Account]
    remark: str = ""
    """Remark on this run for readers."""


@dataclass
class Run:
    """One job on one side; faults follow each other in it."""

    side: Side
    bound_s: float
    settled_s: float
    others: float | None = None
    closed: list[tuple[Result, list[int]]] = field(default_factory=list)
    """Results with the numbers of their incidents: how many steps were lost may be known later."""

    def settle(self) -> list[Line]:
        """The lines in the middle between two checkpoints. Raises TimeoutError, or RuntimeError
        when the job has ended."""
        every = self.side.save_every

        def settled(lines: list[Line]) -> bool:
            self._check()
            newest = [line for line in lines if line.launch == lines[-1].launch]
            long = time.time() - newest[0].time > self.settled_s and len(newest) > every
            complete = newest[-1].world == 2 * self.side.workers_per_node
            return complete and long and newest[-1].step % every == every // 2

        work = conditions.OtherWork(self.side.marks)
        lines = self.side.log.until(settled, START_BOUND_S)
        self.others = work.cores()
        return lines

    def _check(self) -> None:
        if why := self.side.over():
            raise RuntimeError(why)

    def recovery(
        self, before: list[Line], fault: float, bound_s: float, *, trains_on: bool
    ) -> Recovery:
        """`trains_on`: the launch may train until the next one begins, with all workers; two parts
        that train side by side are no growth. Raises TimeoutError, Missed, or RuntimeError when the
        job ends instead."""
        known = {line.launch for line in before}

        full = 2 * self.side.workers_per_node if trains_on else 0

        def gone_on(lines: list[Line]) -> bool:
            self._check()
            return lines[-1].launch not in known and lines[-1].world >= full

        self.side.log.until(gone_on, bound_s)
        found = self.side.log.recovery(before, fault, 1.0)
        if found.late_steps and not trains_on:
            raise Missed(f"{found.late_steps} steps were trained after the fault")
        return found


class Missed(Exception):
    """The fault did not happen to the launch that trained."""


Cause = Callable[[Run, list[Line]], float]
"""Returns when the fault happened, seconds since the epoch."""


def kill_worker(run: Run, _: list[Line]) -> float:
    os.kill(run.side.workers()[1], signal.SIGKILL)
    return time.time()


def replace_node(run: Run, _: list[Line]) -> float:
    return run.side.lose_node(replaced=True)


def shrink(run: Run, _: list[Line]) -> float:
    return run.side.lose_node(replaced=False)


def grow(run: Run, before: list[Line]) -> float:
    run.side.grow()
    return before[-1].time


def hang(run: Run, _: list[Line]) -> float:
    """One rank stops; it goes on when the bound is over."""
    os.kill(run.side.workers()[1], signal.SIGSTOP)
    return time.time()


def stuck(run: Run, _: list[Line]) -> float:
    """One rank waits in its own code, outside of a collective."""
    Path(f"{run.side.log.path}.stuck-{run.side.workers()[1]}").touch()
    return time.time()


def let_go_on(run: Run) -> None:
    """A rank that `hang` or `stuck` keeps."""
    for file in run.side.place.glob(f"{run.side.log.path.name}.stuck-*"):
        file.unlink()
    with contextlib.suppress(KeyError, psutil.NoSuchProcess):
        psutil.Process(run.side.workers()[1]).send_signal(signal.SIGCONT)


def suspend(run: Run, _: list[Line]) -> float:
    """Suspend and resume the job; the time after `resume` counts."""
    run.side.suspend()
    asked = time.time()
    run.side.resume()
    return asked


class KillInSave:
    """SIGKILL of one rank while rank 0 writes a checkpoint: rank 0 itself and a survivor's peer by
    turns, after a random time, most often a short one, from the first change of the directory."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._rank = 1

    def __call__(self, run: Run, _: list[Line]) -> float:
        self._rank = 1 - self._rank
        victim = run.side.workers()[self._rank]
        place = run.side.checkpoints
        delay_s = DELAYS_S * self._random.random() ** 3  # most saves take a few milliseconds
        before, deadline = _entries(place), time.monotonic() + SAVE_BOUND_S
        while _entries(place) == before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no save began in {place} within {SAVE_BOUND_S:g} s")
            time.sleep(0.001)
        time.sleep(delay_s)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            raise Missed("a launch ended between the look for the victim and the kill") from None
        return time.time()


def _entries(place: Path) -> dict[str, int]:
    """Names with the time of their last change."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found[entry.name] = entry.stat().st_mtime_ns if entry.is_file() else 0
    return found


SHRINK = "node killed, shrink"
STUCK = "stuck rank"
HANGS = ("hang", STUCK)
SUSPEND = "suspend, resume"
NO_STEP = "no step within {:g} s"
NOT_COUNTED = "not counted: "
NOT_STARTED = "did not start: "
"""Notes of results."""
FAULTS: dict[str, Cause] = {
    "worker killed": kill_worker,
    "node killed, replaced": replace_node,
    SHRINK: shrink,
    "grow": grow,
    "hang": hang,
    STUCK: stuck,
    SUSPEND: suspend,
}
SAVE = "killed in a save"


def measure(
    measured: Measured,
    build: Callable[[], Side],
    wanted: list[tuple[str, Cause]],
    bound_s: float,
    settled_s: float,
) -> Iterator[None]:
    """All faults on one side, in order; `measured` has one more at each turn."""
    run: Run | None = None
    grows = "grow" in [fault for fault, _ in wanted]
    try:
        for fault, cause in wanted:
            if run is None and fault == "grow":
                continue  # it did not shrink
            if run is None:
                run = Run(build(), bound_s, settled_s)
                run.side.start()
            result, ok = _one(run, fault, cause, measured.conditions["commit"])
            if result.note.startswith(NOT_STARTED):  # after the fault before: in a new run, once
                print(_line(result), flush=True)
                measured.accounts += _close(run, [*measured.results, result])
                run = Run(build(), bound_s, settled_s)
                run.side.start()
                result, ok = _one(run, fault, cause, measured.conditions["commit"])
            measured.results.append(result)
            print(_line(result), flush=True)
            yield
            if not ok:
                measured.accounts += _close(run, measured.results)
                run = None
            elif fault == SHRINK and not grows:
                run.side.grow()
        if run is not None:
            measured.accounts += _close(run, measured.results)
            run = None
        yield
    finally:
        if run is not None:
            run.side.stop()


def causes(faults: list[str], kill_points: int) -> list[tuple[str, Cause]]:
    """Causes in the order of the table; `kill_points` kills in a save."""
    in_save: Cause = KillInSave(seed=0)
    several = [(SAVE, in_save)] * (kill_points if SAVE in faults else 0)
    return [(one, FAULTS[one]) for one in FAULTS if one in faults] + several


def _one(run: Run, fault: str, cause: Cause, commit: str) -> tuple[Result, bool]:
    """The result, and whether the job can be used for another fault."""
    side = run.side
    result = Result(
        framework=side.framework.name,
        side=side.name,
        fault=fault,
        settled_s=run.settled_s,
        commit=commit,
    )
    bound_s = min(run.bound_s, HANG_BOUND_S) if fault in HANGS else run.bound_s
    result.bound_s = bound_s
    try:
        if fault == "grow":
            before = side.log.until(
                lambda lines: lines[-1].world == side.workers_per_node, START_BOUND_S
            )
        else:
            before = run.settle()
        result.load, result.others = os.getloadavg()[0], run.others
        result.at = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        at = cause(run, before)
        seen = run.recovery(before, at, bound_s, trains_on=fault == "grow")
    except Missed as error:
        result.note = f"{NOT_COUNTED}{error}"
        return result, True
    except TimeoutError as error:
        result.note = NO_STEP.format(bound_s) if result.load else f"{NOT_STARTED}{error}"
        if fault in HANGS and result.at:
            _named(run, result, at)
            let_go_on(run)
            return result, True
        return result, False
    except RuntimeError as error:
        result.note = str(error).replace(f"{ROOT}/", "")
        return result, False
    # Holdfast grows by itself, so there is no moment from which to count.
    result.seconds = None if fault == "grow" else seen.seconds
    result.gap_s, result.trained_twice, result.world = seen.gap_s, seen.trained_twice, seen.world
    _claims(run, result, at)
    _named(run, result, at)
    return result, True


def _named(run: Run, result: Result, fault: float) -> None:
    """A suspicion may name the rank long before it is restarted."""
    if result.fault in HANGS and isinstance(run.side, UnderHoldfast):
        at_ns = run.side.named_ns(1, round(fault * 1e9))
        result.named_s = None if at_ns is None else at_ns / 1e9 - fault


def _claims(run: Run, result: Result, fault: float) -> None:
    """Add Holdfast's report of the incident that followed, once it is closed."""
    side = run.side
    if not isinstance(side, UnderHoldfast):
        return
    deadline = time.monotonic() + CLOSED_S
    found: list[Incident] = []
    while time.monotonic() < deadline and not (found and "total" in found[-1].seconds):
        time.sleep(0.5)
        found = [one for one in side.view().incidents if one.at_ns / 1e9 > fault - 1.0]
    if found:
        result.named_s = result.opened_s = found[0].at_ns / 1e9 - fault
        result.reported_s = sum(one.seconds.get("total", 0.0) for one in found)
        run.closed.append((result, [one.number for one in found]))


def _close(run: Run, results: list[Result]) -> list[Account]:
    """End the run; what its report says of the whole."""
    side, accounts = run.side, []
    try:
        if isinstance(side, UnderHoldfast) and not side.over():
            view, lines = side.view(), side.log.lines()
            for result, numbers in run.closed:
                lost = [one.steps_lost for one in view.incidents if one.number in numbers]
                known = [count for count in lost if count is not None]
                result.reported_lost = sum(known) if known else None
            productive = view.ledger.get("productive", 0.0)
            known_s = productive / view.goodput if view.goodput else 0.0
            by_log = productive_seconds(lines, view.now_ns / 1e9)
            accounts.append(Account(
                framework=side.framework.name, side=side.name, goodput=view.goodput,
                goodput_by_log=by_log / known_s if known_s else 0.0,
                reported_lost=view.steps_lost, trained_twice=trained_twice(lines),
                steps_known=view.step >= 0, step_s=step_seconds(lines), seconds=known_s,
            ))  # fmt: skip
    finally:
        let_go_on(run)
        side.stop()
        if results[-1].note:
            print(f"  kept for a look: {side.place}", flush=True)
        else:
            shutil.rmtree(side.place, ignore_errors=True)
    return accounts


def _line(result: Result) -> str:
    shown = result.gap_s if result.seconds is None else result.seconds
    seconds = "-" if shown is None else f"{shown:.2f} s"
    said = "-" if result.reported_s is None else f"{result.reported_s:.2f} s"
    return (
        f"{result.framework:17} {result.side:24} {result.fault:22} {seconds:>9}  twice "
        f"{result.trained_twice}  reported {said}  load "
        f"{result.load:.1f}  {result.note}"
    )
