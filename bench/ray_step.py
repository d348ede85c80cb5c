"""Step time on Ray beside the local backend's, on a machine whose own speed drifts.

    python -m bench.ray_step                   # a quarter of an hour

Two jobs of the same workload train on one machine at once, one of a local controller and one on a
Ray cluster, and of both only one is awake: all processes of the other are stopped (SIGSTOP). They
take turns of 1.5 s in a random order, too short for any limit of a heartbeat or a hang, so that
both see the same machine. Steps that fall into a side's turns, over the time of those turns.

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
from .contestants.base import ROOT, Contestant, Workload
from .contestants.holdfast import Holdfast
from .contestants.holdfast_ray import HoldfastOnRay
from .ray import QUIET_CORES, connect, resize

RESULTS = Path(__file__).parent / "results"
TURN_S = 1.5
STEPS = 100_000
"""More than there is time for."""
WARM_STEPS = 8
STANDBYS_S = 6.0
"""Until the standbys of both jobs are forked and rehearsed."""
NUM_ACTORS = 3
"""Of a job on two Ray nodes: a controller, two agents."""
LOCAL, RAY = "Holdfast, local", "Holdfast on Ray"

Processes = dict[int, psutil.Process]
Turn = tuple[float, float]
Rates = dict[str, float]
"""Side -> steps per second."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=10, help="starts of both jobs")
    parser.add_argument("--rounds", type=int, default=24, help="turns of each side in each")
    parser.add_argument("--out", type=Path, default=RESULTS / "ray_step")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)  # Ray's workers have it from the raylet
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    facts = conditions.describe()
    cluster = RayRig(nodes=2)
    try:
        connect(cluster)
        resize(cluster, 2)
        quiet = conditions.wait_until_quiet(QUIET_CORES)
        found: list[Rates] = []
        for rep in range(options.reps):
            local = Holdfast(Workload(directory / f"local-{rep}", steps=STEPS))
            on_ray = HoldfastOnRay(Workload(directory / f"ray-{rep}", steps=STEPS), cluster)
            found.append(measure(local, on_ray, options.rounds, ray_first=bool(rep % 2)))
            print(f"{rep + 1} of {options.reps}: {ratio(found[-1]):.3f}x", flush=True)
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
    write(options.out, facts, quiet, found, options.rounds)
    return 0


def measure(local: Holdfast, on_ray: HoldfastOnRay, rounds: int, *, ray_first: bool) -> Rates:
    jobs: dict[str, Holdfast] = {LOCAL: local, RAY: on_ray}
    with contextlib.ExitStack() as started:
        for one in reversed(jobs.values()) if ray_first else jobs.values():
            started.callback(one.stop)
            one.start()
            timeline.wait_for_step(one.workload.timeline, WARM_STEPS, 240)
        time.sleep(STANDBYS_S)
        sides = {LOCAL: local_processes(local), RAY: ray_processes(on_ray)}
        assert not set(sides[LOCAL]) & set(sides[RAY])
        turns = take_turns(sides, rounds)
        return {side: fmean(per_turn(jobs[side], turns[side])) for side in jobs}


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


def per_turn(contestant: Contestant, turns: list[Turn]) -> list[float]:
    """Steps per second, a step that one turn begins and another ends counted in each by its part.
    Raises RuntimeError when the turns themselves disturbed the job."""
    incarnations = timeline.read(contestant.workload.timeline)
    if len(incarnations) != 1:
        raise RuntimeError(f"{contestant.name} was restarted during the measurement")
    job = incarnations[0]
    finished: list[float] = []
    while (at := job.finished_by_all(job.first_step + len(finished))) is not None:
        finished.append(at)
    # How long the job had been awake at each bound of a turn, and at each end of a step.
    bounds = np.array(turns).ravel()
    lengths = np.diff(bounds)
    lengths[1::2] = 0.0  # between its turns
    awake = np.concatenate([[0.0], np.cumsum(lengths)])
    ends = np.interp([at for at in finished if bounds[0] < at < bounds[-1]], bounds, awake)
    done = np.interp(awake, ends, np.arange(len(ends)))
    # But the first and the last: their parts of a step are not known.
    return list(np.diff(done)[2:-2:2] / lengths[2:-2:2])


# -- whose processes -------------------------------------------------------------------------------
def local_processes(job: Holdfast) -> Processes:
    """The command, and the machine host with all below it, which know the job's home."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(job.home) in " ".join(process.info["cmdline"] or [])
    ]
    return trees([job.controller.pid, *(process.pid for process in found)])


def ray_processes(job: HoldfastOnRay) -> Processes:
    """The command, the job's actors, and what the agents have started."""
    actors = ("ray::ControllerActor", "ray::AgentActor")
    found = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if " ".join(process.info["cmdline"] or []).startswith(actors)
    ]
    assert len(found) == NUM_ACTORS
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


def write(out: Path, facts: dict[str, str], quiet: float, found: list[Rates], rounds: int) -> None:
    lines = ["# Step time on Ray beside the local backend's", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    ratios = [ratio(rates) for rates in found]
    error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    lines += [
        f"Busy cores before the run: {quiet:.2f} of {os.cpu_count()}, the idle cluster's own among "
        f"them. {len(found)} starts of both jobs, {rounds} turns of {TURN_S:g} s of each side in "
        "each, in random order, the other stopped meanwhile. 4 ranks on 2 nodes, HSDP 2 x 2 over "
        "gloo, one thread a rank, 3.3 M parameters; head, two raylets and everything else on this "
        "one machine.",
        "",
        "| side | step, s, in each start |",
        "|---|---|",
    ]
    for side in (LOCAL, RAY):
        steps = " ".join(f"{1 / rates[side]:.4f}" for rates in found)
        lines.append(f"| {side} | {steps} |")
    told = " ".join(f"{one:.3f}" for one in ratios)
    lines += [
        f"| Ray / local | {told} |",
        "",
        f"Ray / local: mean {fmean(ratios):.3f}x, standard error {error:.3f}, median "
        f"{median(ratios):.3f}x.",
    ]
    results = {"conditions": facts, "turns": rounds, "steps_per_s": found}
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    text = "\n".join(lines) + "\n"
    out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    raise SystemExit(main())
