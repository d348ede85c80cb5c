"""`python -m bench.soak`: real faults, one after the other, in real jobs on this machine.

A job of two nodes with two workers each trains while its workers, nodes, node launcher, controller,
disks and storage are killed, stopped, filled, frozen or taken away, from a seed: at any moment,
during the start, during a save, or during a recovery. A fault counts as recovered when the job
makes steps beyond the newest one before the fault, by itself and with all its ranks. The controller
is started again by this program, as a supervisor does. The last checkpoint of each job of fixed
size has to equal that of a job without faults, bit by bit. Other jobs shrink to one node and grow
again; their sums have another order, so no identity is claimed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from holdfast.orchestrator.runtime.observe.view import JobView

from . import conditions
from .soak_rig import BOUND_S, EVERY_STEPS, WORLD_SIZE, NotRecovered, SoakJob, Victim, can_mount

KINDS = {
    "worker": 5, "node": 4, "all nodes": 2, "hang": 2, "host": 2, "controller": 3,
    "full disk": 1, "full storage": 1, "absent storage": 1, "slow storage": 1,
}  # fmt: skip
"""Fault -> how often, relative to the others."""
NEEDS_MOUNTS = ("full disk", "full storage", "slow storage")
PHASES = {"run": 4, "save": 3, "recovery": 3}
"""During which phase -> how often. `recovery`: of a killed worker: stop, start and restore."""
SHRINKING = ("worker", "node", "hang", "host", "controller")
"""Faults while a job shrinks to one node."""
IN_RECOVERY = ("worker", "node", "all nodes", "hang", "host", "controller")
IN_START = ("worker", "node", "host", "hang", "controller")
SHRINK_SHARE = 10
"""One of so many faults meets a job that shrinks and grows."""
TAIL_STEPS = 60
"""Steps from the last fault to the end of a job."""


@dataclass(frozen=True)
class Fault:
    number: int
    kind: str
    phase: str
    """start, run, save, recovery, shrink."""
    delay_s: float
    """Delay from the begin of the phase."""
    lasts_s: float
    """Seconds that a disk is full, or storage is away or slow."""


@dataclass
class Result:
    number: int
    kind: str
    phase: str
    victim: str = ""
    recovered: bool = False
    seconds: float = 0.0
    """Time from the fault to the second step of all ranks beyond the newest one before it. The time
    that a fault lasts is included."""
    problem: str = ""


@dataclass
class JobResult:
    """One job: its faults together."""

    faults: int
    fixed: bool
    steps: int = 0
    steps_lost: int = 0
    incidents: int = 0
    identical: bool | None = None
    """None: not compared."""
    problem: str = ""


def plan(seed: int, num: int, faults_per_job: int, disks: bool) -> Iterator[list[Fault]]:
    """The faults of each job; the same for the same arguments. After each job of fixed size there
    is a short one that shrinks."""
    number = 0
    while number < num:
        shrinking = max(1, faults_per_job // SHRINK_SHARE)
        for phases in ([None] * (faults_per_job - shrinking), ["shrink"] * shrinking):
            chance, faults = random.Random(f"{seed} {number}"), []
            for index, given in enumerate(phases):
                phase = given or ("start" if index == 0 else _pick(chance, PHASES))
                kind = _pick(chance, _kinds(phase, disks))
                faults.append(Fault(number, kind, phase, chance.random(), 1 + 2 * chance.random()))
                number += 1
            yield faults


def _kinds(phase: str, disks: bool) -> dict[str, int]:
    allowed: Iterable[str] = {"start": IN_START, "recovery": IN_RECOVERY, "shrink": SHRINKING}.get(
        phase, [kind for kind in KINDS if disks or kind not in NEEDS_MOUNTS]
    )
    return {kind: KINDS[kind] for kind in allowed}


def _pick(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]


# -- one job ---------------------------------------------------------------------------------------
class Soak:
    """Causes the faults of one job, one after the other."""

    def __init__(self, job: SoakJob, seed: int) -> None:
        self._job, self._seed = job, seed

    def cause(self, fault: Fault) -> Result:
        """Causes one fault, and waits until the job has recovered. Raises NotRecovered."""
        chance = random.Random(f"{self._seed} {fault.number}")
        result = Result(fault.number, fault.kind, fault.phase)
        try:
            self._reach(fault)
            began, highest = time.monotonic(), max(self._job.steps())
            restarts = self._job.watch.view.controller_restarts
            result.victim = self._break(fault, chance)
            self._recovered(began, result, highest, restarts)
        except NotRecovered as error:
            result.problem = str(error)
        return result

    def _reach(self, fault: Fault) -> None:
        watch = self._job.watch
        if fault.phase == "start":
            watch.until(lambda view: view.state in ("pending", "starting"), "the start", 60)
            time.sleep(1.5 * fault.delay_s)
        elif fault.phase == "run":
            time.sleep(0.6 * fault.delay_s)
        elif fault.phase == "save":
            deadline = time.monotonic() + 3.0
            while not self._job.writes() and time.monotonic() < deadline:
                time.sleep(0.001)
        elif fault.phase == "recovery":
            self._insist(lambda: self._job.kill_worker(random.Random(fault.number)))
            time.sleep(0.8 * fault.delay_s)
        else:
            watch.until(lambda v: v.state == "running" and v.step >= 5, "the start")
            reply = self._job.job.request("chaos", kind="kill-node", hold_s=2.0)
            assert reply.ok, reply
            time.sleep(1.5 * fault.delay_s)

    def _break(self, fault: Fault, chance: random.Random) -> str:
        job = self._job
        once: dict[str, Callable[[], str]] = {
            "worker": lambda: job.kill_worker(chance),
            "node": lambda: job.kill_nodes(chance, 1),
            "all nodes": lambda: job.kill_nodes(chance, 2),
            "hang": lambda: job.stop_worker(chance),
            "host": lambda: job.kill_host(chance),
            "controller": job.kill_controller,
        }
        if fault.kind in once:
            return self._insist(once[fault.kind])
        lasting: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "full disk": lambda: job.full(job.job.home),
            "full storage": lambda: job.full(job.disk),
            "absent storage": job.absent,
            "slow storage": job.slow,
        }
        with lasting[fault.kind]():
            time.sleep(fault.lasts_s / 2)
            victim = self._insist(lambda: job.kill_worker(chance))  # recovery must not need it
            time.sleep(fault.lasts_s / 2)
        return f"with {victim}"

    @staticmethod
    def _insist(act: Callable[[], str]) -> str:
        """Repeat until there is a victim: a phase may be over, and the next one has other
        processes."""
        deadline = time.monotonic() + BOUND_S
        while True:
            try:
                return act()
            except Victim as error:
                if time.monotonic() > deadline:
                    raise NotRecovered(str(error)) from None
                time.sleep(0.02)

    def _recovered(self, began: float, result: Result, highest: int, restarts: int) -> None:
        """Two steps beyond the newest one before the fault: a killed rank cannot have finished the
        first of them in its last moment."""
        while min(self._job.steps()) < highest + 2 and time.monotonic() < began + BOUND_S:
            ended = self._job.job.command.poll()
            if ended is not None:
                raise NotRecovered(f"the command has ended with {ended}")
            time.sleep(0.005)
        result.seconds = round(time.monotonic() - began, 2)

        def goes_on(view: JobView) -> bool:
            controller = result.kind != "controller" or view.controller_restarts > restarts
            whole = view.world_size == WORLD_SIZE and view.step > highest
            return controller and whole and view.state == "running"

        self._job.watch.until(goes_on, "recovery", max(began + BOUND_S - time.monotonic(), 1.0))
        result.recovered = True


def run_job(
    place: Path, fixed: bool, faults: list[Fault], seed: int, disks: bool,
    say: Callable[[Result], None],
) -> tuple[JobResult, dict[str, Any], bool]:  # fmt: skip
    """(its result, the state of its last checkpoint, whether all went well). If not, its directory
    stays and the result names it."""
    job = SoakJob(place, fixed=fixed, disks=disks)
    outcome = JobResult(0, fixed)
    state: dict[str, Any] = {}
    good = True
    try:
        job.start()
        soak = Soak(job, seed)
        for fault in faults:
            result = soak.cause(fault)
            outcome.faults += 1
            good = result.recovered
            if not good:
                result.problem += f"; journal and logs: {place}"
            say(result)
            if not good:
                return outcome, state, good
        job.finish(job.watch.view.step + TAIL_STEPS)
        state = job.last_state()
        outcome.steps = state["step"] + 1
        incidents = job.watch.incidents.values()
        outcome.incidents = len(incidents)
        outcome.steps_lost = sum(one.steps_lost or 0 for one in incidents)
    except (
        Exception
    ) as error:  # what the job did, or a defect of this program: both have to be read
        good, outcome.problem = False, f"{type(error).__name__}: {error}; journal and logs: {place}"
    finally:
        job.end(keep=not good)
    return outcome, state, good


def undisturbed(place: Path, steps: int) -> dict[str, Any]:
    """The last state of a job without faults."""
    job, state = SoakJob(place, fixed=True, disks=False, pause_s=0.0), {}
    try:
        job.stop_file.write_text(str(steps))
        job.start()
        job.finish(steps)
        state = job.last_state()
    finally:
        job.end(keep=not state)
    return state


def compare(place: Path, outcome: JobResult, state: dict[str, Any]) -> None:
    """Compare with a job without faults that trains as many steps."""
    try:
        expected = undisturbed(place, outcome.steps)
    except Exception as error:  # as in run_job
        outcome.problem = f"the job without faults: {type(error).__name__}: {error}; {place}"
        return
    outcome.identical = expected == state
    if not outcome.identical:
        names = [name for name in expected if expected[name] != state.get(name)]
        outcome.problem = f"{names[:5]} differ from those of the job without faults"


# -- all jobs --------------------------------------------------------------------------------------
class Log:
    """Results, one line each; a soak that was ended goes on after the last job in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[Result] = []
        self.jobs: list[JobResult] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            document = json.loads(line)
            if "fixed" in document:
                self.jobs.append(JobResult(**document))
            else:
                self.faults.append(Result(**document))
        self.faults = self.faults[: sum(job.faults for job in self.jobs)]

    def add(self, result: Result | JobResult) -> None:
        (self.jobs if isinstance(result, JobResult) else self.faults).append(result)  # type: ignore[arg-type]
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def summary(self) -> dict[str, Any]:
        compared = [job for job in self.jobs if job.identical is not None]
        return {
            "faults": len(self.faults),
            "recovered": sum(one.recovered for one in self.faults),
            "jobs": len(self.jobs),
            "jobs_compared": len(compared),
            "jobs_identical": sum(bool(job.identical) for job in compared),
            "steps": sum(job.steps for job in self.jobs),
            "steps_lost": sum(job.steps_lost for job in self.jobs),
            "seconds": {
                kind: spread([one.seconds for one in self.faults if one.kind == kind])
                for kind in KINDS
            },
            "problems": [one.problem for one in self.faults if one.problem]
            + [one.problem for one in self.jobs if one.problem],
        }


def spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    ninety = quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return {
        "count": len(seconds), "median": round(median(seconds), 2), "p90": round(ninety, 2),
        "most": max(seconds),
    }  # fmt: skip


def soak(
    root: Path, log: Log, *, faults: int, seed: int, faults_per_job: int, disks: bool,
    until: float = float("inf"), live: bool = False,
) -> None:  # fmt: skip
    """Jobs until so many faults were caused, or until that time (of `time.monotonic`)."""

    def say(result: Result) -> None:
        log.add(result)
        if live:
            good = sum(one.recovered for one in log.faults)
            print(f"{good} of {len(log.faults)}: {result.kind} during {result.phase}, "
                  f"{result.victim}: {result.seconds} s {result.problem}", file=sys.stderr,
                  flush=True)  # fmt: skip

    for index, planned in enumerate(plan(seed, faults, faults_per_job, disks)):
        fixed = planned[0].phase != "shrink"
        if index < len(log.jobs):
            continue
        if time.monotonic() > until:
            break
        place = root / f"job-{index}"
        outcome, state, good = run_job(place, fixed, planned, seed, disks, say)
        if good and fixed:
            compare(root / f"undisturbed-{index}", outcome, state)
        log.add(outcome)


def page(log: Log, minutes: float, seed: int, disks: bool) -> list[str]:
    found = log.summary()
    left = "" if disks else f" Without {', '.join(NEEDS_MOUNTS)}: this user cannot mount."
    lines = [
        f"{found['recovered']} of {found['faults']} faults recovered by themselves; the last "
        f"checkpoint of {found['jobs_identical']} of {found['jobs_compared']} jobs of fixed size "
        f"equals that of a job without faults, bit by bit. {found['jobs']} jobs, {found['steps']} "
        f"steps, {found['steps_lost']} steps trained again; {minutes:.0f} minutes, seed "
        f"{seed}.{left}",
        "",
        "2 nodes x 2 workers, HSDP 2 x 2 over gloo, steps of about 30 ms, memory every step, "
        f"storage every {EVERY_STEPS}. Seconds from the fault to new steps of all ranks, as a "
        "client of the job sees them; faults that last (full, absent, slow: 1 to 3 s, with a "
        "worker killed meanwhile) are included. Restart budgets are raised: by default so many "
        "faults in an hour end a job.",
        "",
        "| fault | count | median, s | 90 %, s | most, s |",
        "|---|---|---|---|---|",
    ]
    for kind, some in found["seconds"].items():
        if some["count"]:
            lines.append(
                f"| {kind} | {some['count']} | {some['median']} | {some['p90']} | {some['most']} |"
            )
    phases = {one.phase for one in log.faults}
    lines += ["", "| during | count |", "|---|---|"]
    lines += [
        f"| {phase} | {sum(one.phase == phase for one in log.faults)} |" for phase in sorted(phases)
    ]
    return lines + [f"\n* {problem}" for problem in found["problems"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--faults-per-job", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job later")
    parser.add_argument("--log", type=Path, help="results; an existing one is continued")
    parser.add_argument("--out", type=Path, help="a page with the figures (.md)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    log = Log(options.log or root / "results.jsonl")
    disks = can_mount()
    soak(
        root, log, faults=options.faults, seed=options.seed,
        faults_per_job=options.faults_per_job, disks=disks,
        until=began + 60 * options.minutes, live=sys.stderr.isatty() or not options.json,
    )  # fmt: skip
    found = log.summary()
    minutes = (time.monotonic() - began) / 60
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(*page(log, minutes, options.seed, disks), sep="\n")
    if options.out:
        facts = [f"{name}: {value}. " for name, value in conditions.describe().items()]
        lines = ["# Soak", "", *facts, f"load at the end: {os.getloadavg()[1]:.1f}.", ""]
        lines += page(log, minutes, options.seed, disks)
        options.out.write_text("\n".join(lines) + "\n")
    raise SystemExit(0 if not found["problems"] and found["faults"] else 1)


if __name__ == "__main__":
    main()
