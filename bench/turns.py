"""Runs jobs in turns on one machine whose speed drifts: only one of them is awake.

The processes of the others are stopped (SIGSTOP). Turns of 4 s are in random order, so that all
jobs see the same machine. The first second of a turn does not count, because timers of a stopped
process catch up. The rate is the number of steps over the rest of the time.

Properties of one start, such as memory addresses, change a job's speed by percents for its whole
life. So the samples are starts of all jobs.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import psutil

from . import timeline
from .contestants.holdfast import Holdfast
from .contestants.holdfast_ray import HoldfastOnRay

TURN_S = 4.0
SETTLING_S = 1.0
MAX_STOPPED_S = 600.0
"""No process is stopped for this long: until the others have started, then for a few turns."""
STEPS = 100_000
"""More than there is time for."""
WARM_STEPS = 8
STANDBYS_S = 6.0
"""Time until a job's standbys are forked and rehearsed."""

Processes = dict[int, psutil.Process]


@dataclass(frozen=True)
class Turn:
    """Period in which one side alone was awake, and the CPU time of its processes by then."""

    woken: float
    settled: float
    stopped: float
    cpu_settled_s: float
    cpu_stopped_s: float


@dataclass(frozen=True)
class Sample:
    """One start of one side."""

    step_s: float
    """Mean time of a step."""
    cpu_step_s: float
    """CPU time of all its processes in one step; what a throttled machine takes away is no part."""
    steps_of_turns: list[float]
    """Steps per second in each turn that counts."""
    faults: list[float]
    """Page faults of each rank per second of its CPU time."""


Samples = dict[str, Sample]
"""Side -> its sample of one start of all sides."""
Pairs = Sequence[tuple[str, str]]
"""Sides whose ratio is asked for."""


def starts(
    make: Callable[[str], dict[str, Holdfast]], pairs: Pairs, num: int, rounds: int
) -> Iterator[list[Samples]]:
    """All samples until now, after each start; the sides begin by turns. Says how each went.

    `make`: jobs of all sides, from a name for this start.
    """
    found: list[Samples] = []
    for number in range(num):
        jobs = list(make(str(number)).items())
        first = number % len(jobs)
        found.append(measure(dict(jobs[first:] + jobs[:first]), rounds))
        longer = [f"{found[-1][one].step_s / found[-1][other].step_s:.3f}x" for one, other in pairs]
        print(f"{number + 1} of {num}:", *longer, flush=True)
        yield found


def measure(jobs: dict[str, Holdfast], rounds: int) -> Samples:
    """Measure jobs that are started in this order."""
    with contextlib.ExitStack() as started:
        sides: dict[str, Processes] = {}
        for name, job in jobs.items():
            started.callback(job.stop)
            job.start()
            timeline.wait_for_step(job.workload.timeline, WARM_STEPS, 240)
            time.sleep(STANDBYS_S)
            sides[name] = processes_of(job)
            started.callback(tell, sides[name], signal.SIGCONT)
            tell(sides[name], signal.SIGSTOP)  # the next one starts sooner
        assert sum(map(len, sides.values())) == len(
            {pid for side in sides.values() for pid in side}
        )
        before = {name: faults(side) for name, side in sides.items()}
        turns = take_turns(sides, rounds)
        after = {name: faults(side) for name, side in sides.items()}
        return {
            name: sample(job, turns[name], fault_rates(before[name], after[name]))
            for name, job in jobs.items()
        }


def take_turns(sides: dict[str, Processes], rounds: int) -> dict[str, list[Turn]]:
    """Take turns with all of them stopped, before and after."""
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        random.shuffle(order)  # a fixed order would let one side always follow the same other
        for name in order:
            side = sides[name]
            woken = time.time()
            tell(side, signal.SIGCONT)
            time.sleep(SETTLING_S)
            settled, cpu_settled_s = time.time(), cpu_s(side)
            time.sleep(TURN_S - SETTLING_S)
            tell(side, signal.SIGSTOP)
            turns[name].append(Turn(woken, settled, time.time(), cpu_settled_s, cpu_s(side)))
    return turns


def tell(processes: Processes, number: signal.Signals) -> None:
    for process in processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def sample(job: Holdfast, turns: list[Turn], fault_rates: list[float]) -> Sample:
    """A step that one turn begins and another ends is counted in each by its part. Raises
    RuntimeError when the turns themselves disturbed the job."""
    incarnations = timeline.read(job.workload.timeline)
    if len(incarnations) != 1:
        raise RuntimeError(f"{job.name} was restarted during the measurement")
    written = incarnations[0]
    finished: list[float] = []
    while (at := written.finished_by_all(written.first_step + len(finished))) is not None:
        finished.append(at)
    # How long the job had been awake at each bound of a turn, and at each end of a step.
    bounds = np.array([(turn.woken, turn.stopped) for turn in turns]).ravel()
    lengths = np.diff(bounds)
    lengths[1::2] = 0.0  # between its turns
    awake = np.concatenate([[0.0], np.cumsum(lengths)])
    ends = np.interp([at for at in finished if bounds[0] < at < bounds[-1]], bounds, awake)
    # But the first and the last turn: their parts of a step are not known.
    counted = turns[1:-1]
    seconds = np.array([turn.stopped - turn.settled for turn in counted])
    taken_s = sum(turn.cpu_stopped_s - turn.cpu_settled_s for turn in counted)
    begins = np.interp([turn.settled for turn in counted], bounds, awake)
    steps = np.diff(np.interp([begins, begins + seconds], ends, np.arange(len(ends))), axis=0)[0]
    return Sample(
        step_s=float(seconds.sum() / steps.sum()),
        cpu_step_s=float(taken_s / steps.sum()),
        steps_of_turns=[float(one) for one in steps / seconds],
        faults=fault_rates,
    )


def cpu_s(processes: Processes) -> float:
    """CPU seconds of all of them until now."""
    taken_s = 0.0
    for process in processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            taken_s += sum(process.cpu_times()[:2])
    return taken_s


def faults(processes: Processes) -> dict[int, tuple[int, float]]:
    """Page faults and CPU seconds of each rank until now."""
    found = {}
    for pid, process in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("hf-rank-"):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = (int(fields[7]), sum(process.cpu_times()[:2]))
    return found


def fault_rates(
    before: dict[int, tuple[int, float]], after: dict[int, tuple[int, float]]
) -> list[float]:
    return [(after[pid][0] - before[pid][0]) / (after[pid][1] - before[pid][1]) for pid in before]


# -- whose processes -------------------------------------------------------------------------------
def processes_of(job: Holdfast) -> Processes:
    """The command; locally the machine host with all below it, which know the job's home; on Ray
    the job's actors with all that the agents have started."""
    actors = ("ray::ControllerActor", "ray::AgentActor")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if words.startswith(actors) if isinstance(job, HoldfastOnRay) else str(job.home) in words:
            found.append(process.pid)
    return trees([job.controller.pid, *found])


def trees(pids: Iterable[int]) -> Processes:
    found: Processes = {}
    for pid in pids:
        process = psutil.Process(pid)
        found |= {one.pid: one for one in [process, *process.children(recursive=True)]}
    return found


# -- what it says ----------------------------------------------------------------------------------
def table(pairs: Pairs, found: Sequence[Samples]) -> list[str]:
    """Table for the page: the samples, and how long a step of one is beside one of the other."""
    lines = []
    for what, field in (("step, s", "step_s"), ("CPU time of a step, s", "cpu_step_s")):
        of = {side: [getattr(start[side], field) for start in found] for side in found[0]}
        lines += [f"| side | {what}, in each start |", "|---|---|"]
        lines += [f"| {side} | {' '.join(f'{one:.4f}' for one in of[side])} |" for side in of]
        says = []
        for one, other in pairs:
            ratios = [a / b for a, b in zip(of[one], of[other], strict=True)]
            error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            lines.append(f"| {one} / {other} | {' '.join(f'{ratio:.3f}' for ratio in ratios)} |")
            says += [
                f"{one} / {other}: mean {fmean(ratios):.3f}x, standard error {error:.3f}, median "
                f"{median(ratios):.3f}x.",
                "",
            ]
        lines += ["", *says]
    lines += [
        "| side | page faults of a rank per second of its CPU time: least, median, most |",
        "|---|---|",
    ]
    for side in found[0]:
        of_ranks = [rank for start in found for rank in start[side].faults]
        lines.append(
            f"| {side} | {min(of_ranks):.0f}, {median(of_ranks):.0f}, {max(of_ranks):.0f} |"
        )
    return lines


def raw(found: Sequence[Samples]) -> list[dict[str, Any]]:
    """Samples for the JSON beside the page."""
    return [{side: asdict(sample) for side, sample in start.items()} for start in found]


def how(num_starts: int, rounds: int) -> str:
    """The conditions of the turns, for the page."""
    return (
        f"{num_starts} starts of each job, {rounds} turns of {TURN_S:g} s of each side in each, "
        "in random order, the others stopped meanwhile; without the first "
        f"{SETTLING_S:g} s of each turn."
    )
