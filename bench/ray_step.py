"""Step time on Ray beside the local backend's, on a machine whose own speed drifts.

    python -m bench.ray_step                   # four ranks on two nodes: half an hour
    python -m bench.ray_step --nodes 1         # on one

Two jobs of the same workload train on one machine at once, one of a local controller and one on a
Ray cluster, and of both only one is awake: all processes of the other are stopped (SIGSTOP). They
take turns of 4 s in a random order, so that both see the same machine. The first second of a turn
is not counted: what was stopped catches up on its timers. Of the rest the steps are counted, over
its time.

What one start of a job gets, such as its places in memory, makes it faster or slower by percents
for its whole life. So all of it is repeated with new jobs, and the repetitions are the samples.

Owns: the turns and the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np
import psutil

from tests.e2e.ray.rig import RayRig

from . import conditions, timeline
from .contestants.base import ROOT, Workload
from .contestants.holdfast import NUM_RANKS, Holdfast
from .contestants.holdfast_ray import HoldfastOnRay
from .ray import QUIET_CORES, connect

RESULTS = Path(__file__).parent / "results"
TURN_S = 4.0
SETTLING_S = 1.0
PATIENCE_S = 60.0
"""Nobody is stopped for so long: at most two turns of the other lie between two of one side's."""
STEPS = 100_000
"""More than there is time for."""
WARM_STEPS = 8
STANDBYS_S = 6.0
"""Until the standbys of both jobs are forked and rehearsed."""
LOCAL, RAY = "Holdfast, local", HoldfastOnRay.name

Processes = dict[int, psutil.Process]
Turn = tuple[float, float]
Rates = dict[str, float]
"""Side -> steps per second."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=2, help="of the four ranks")
    parser.add_argument("--reps", type=int, default=20, help="starts of both jobs")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side in each")
    parser.add_argument("--out", type=Path, help="without suffix")
    options = parser.parse_args()
    nodes, out = options.nodes, options.out or RESULTS / f"ray_step_on_{options.nodes}"
    os.environ["PYTHONPATH"] = str(ROOT)  # Ray's workers have it from the raylet
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    facts = conditions.describe()
    cluster = RayRig(nodes=0)
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=NUM_RANKS // nodes)
        connect(cluster)
        quiet = conditions.wait_until_quiet(QUIET_CORES)
        found: list[Rates] = []
        for rep in range(options.reps):
            jobs = both(directory / str(rep), cluster, nodes)
            if rep % 2:
                jobs = dict(reversed(jobs.items()))
            found.append(measure(jobs, options.rounds))
            print(f"{rep + 1} of {options.reps}: {ratio(found[-1]):.3f}x", flush=True)
            write(out, facts, quiet, found, options.rounds, nodes)
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
    print(out.with_suffix(".md").read_text())
    return 0


def both(directory: Path, cluster: RayRig, nodes: int) -> dict[str, Holdfast]:
    local = Workload(directory / "local", steps=STEPS)
    on_ray = Workload(directory / "ray", steps=STEPS)
    return {
        LOCAL: Holdfast(local, nodes=nodes, patience_s=PATIENCE_S),
        RAY: HoldfastOnRay(on_ray, cluster, nodes=nodes, patience_s=PATIENCE_S),
    }


def measure(jobs: dict[str, Holdfast], rounds: int) -> Rates:
    """With jobs that are started in this order."""
    with contextlib.ExitStack() as started:
        for one in jobs.values():
            started.callback(one.stop)
            one.start()
            timeline.wait_for_step(one.workload.timeline, WARM_STEPS, 240)
        time.sleep(STANDBYS_S)
        processes = {name: processes_of(job) for name, job in jobs.items()}
        assert sum(map(len, processes.values())) == len({p for s in processes.values() for p in s})
        turns = take_turns(processes, rounds)
        return {name: rate(job, turns[name]) for name, job in jobs.items()}


def take_turns(sides: dict[str, Processes], rounds: int) -> dict[str, list[Turn]]:
    """When each side alone was awake: from the signal that wakes it to that which stops it."""
    everybody = {pid: process for side in sides.values() for pid, process in side.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    order = list(sides)
    try:
        for _ in range(rounds):
            random.shuffle(order)  # a fixed order would let one side always follow the same other
            for name in order:
                others = {p: one for p, one in everybody.items() if p not in sides[name]}
                tell(others, signal.SIGSTOP)
                tell(sides[name], signal.SIGCONT)
                began = time.time()
                time.sleep(TURN_S)
                turns[name].append((began, time.time()))
    finally:
        tell(everybody, signal.SIGCONT)
    return turns


def tell(processes: Processes, number: signal.Signals) -> None:
    for process in processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def rate(job: Holdfast, turns: list[Turn]) -> float:
    """Steps per second of its turns, a step that one turn begins and another ends counted in each
    by its part. Raises RuntimeError when the turns themselves disturbed the job."""
    incarnations = timeline.read(job.workload.timeline)
    if len(incarnations) != 1:
        raise RuntimeError(f"{job.name} was restarted during the measurement")
    steps = incarnations[0]
    finished: list[float] = []
    while (at := steps.finished_by_all(steps.first_step + len(finished))) is not None:
        finished.append(at)
    # How long the job had been awake at each bound of a turn, and at each end of a step.
    bounds = np.array(turns).ravel()
    lengths = np.diff(bounds)
    lengths[1::2] = 0.0  # between its turns
    awake = np.concatenate([[0.0], np.cumsum(lengths)])
    ends = np.interp([at for at in finished if bounds[0] < at < bounds[-1]], bounds, awake)
    # But the first and the last turn: their parts of a step are not known.
    begins, stops = awake[2:-2:2] + SETTLING_S, awake[3:-2:2]
    done = np.interp([begins, stops], ends, np.arange(len(ends)))
    return float((done[1] - done[0]).sum() / (stops - begins).sum())


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


# -- the table -------------------------------------------------------------------------------------
def ratio(rates: Rates) -> float:
    """Step time on Ray over the local one."""
    return rates[LOCAL] / rates[RAY]


def write(
    out: Path, facts: dict[str, str], quiet: float, found: list[Rates], rounds: int, nodes: int
) -> None:
    lines = [
        f"# Step time on Ray beside the local backend's: {NUM_RANKS} ranks on {nodes} node(s)",
        "",
    ]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    lines += [
        f"Busy cores before the run: {quiet:.2f} of {os.cpu_count()}, the idle cluster's own among "
        f"them. {len(found)} starts of both jobs, {rounds} turns of {TURN_S:g} s of each side in "
        f"each, in random order, the other stopped meanwhile; without the first {SETTLING_S:g} s "
        "of each turn. HSDP 2 x 2 over gloo, one thread a rank, 3.3 M parameters; head, raylets "
        "and everything else on this one machine.",
        "",
        "| side | step, s, in each start |",
        "|---|---|",
    ]
    for side in (LOCAL, RAY):
        lines.append(f"| {side} | {' '.join(f'{1 / rates[side]:.4f}' for rates in found)} |")
    ratios = [ratio(rates) for rates in found]
    error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    lines += [
        f"| Ray / local | {' '.join(f'{one:.3f}' for one in ratios)} |",
        "",
        f"Ray / local: mean {fmean(ratios):.3f}x, standard error {error:.3f}, median "
        f"{median(ratios):.3f}x.",
    ]
    results = {"conditions": facts, "turns": rounds, "nodes": nodes, "steps_per_s": found}
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
