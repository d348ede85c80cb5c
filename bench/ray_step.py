"""Step time on Ray beside the local backend's, on a machine whose own speed drifts.

    python -m bench.ray_step                   # eleven minutes

Two jobs of the same workload train on one machine at once, one of a local controller and one on a
Ray cluster, and of both only one is awake: all processes of the other are stopped (SIGSTOP). They
take turns of 1.5 s in a random order, too short for any limit of a heartbeat or a hang, so that
both see the same machine. Steps that fall into a side's turns, over the time of those turns.

A third side is the local job with idle actors awake, as many as the job on Ray has: what actors
cost by being there. Ray wakes the main thread of every one a hundred times a second.

Owns: the turns and the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import quantiles
from typing import Any

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
LOCAL, BESIDE, RAY = "Holdfast, local", "Holdfast, local, beside 3 idle actors", "Holdfast on Ray"
RESAMPLES = 2000

Processes = dict[int, psutil.Process]
Turn = tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=130, help="turns of each side")
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
        local = Holdfast(Workload(directory / "local", steps=STEPS))
        on_ray = HoldfastOnRay(Workload(directory / "ray", steps=STEPS), cluster)
        counts = measure(local, on_ray, options.rounds)
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
    write(options.out, facts, quiet, counts)
    return 0


def measure(local: Holdfast, on_ray: HoldfastOnRay, rounds: int) -> dict[str, list[float]]:
    """Side -> steps per second of each of its turns."""
    with contextlib.ExitStack() as started:
        for one in (local, on_ray):
            started.callback(one.stop)
            one.start()
            timeline.wait_for_step(one.workload.timeline, WARM_STEPS, 240)
        time.sleep(STANDBYS_S)
        mine, theirs = local_processes(local), ray_processes(on_ray)
        assert not set(mine) & set(theirs)
        actors = idle_actors()
        sides = {LOCAL: mine, BESIDE: mine | processes_of(actors), RAY: theirs}
        turns = take_turns(sides, rounds)
        jobs = {LOCAL: local, BESIDE: local, RAY: on_ray}
        return {side: per_turn(jobs[side], turns[side]) for side in turns}


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


def idle_actors() -> list[Any]:
    """Theirs is the life of what is returned."""
    import ray

    make = ray.remote(_Idle).options(num_cpus=0, scheduling_strategy="SPREAD")
    return [make.remote() for _ in range(NUM_ACTORS)]


def processes_of(actors: list[Any]) -> Processes:
    import ray

    return trees(ray.get([actor.pid.remote() for actor in actors]))


class _Idle:
    def pid(self) -> int:
        return os.getpid()


def trees(pids: Iterable[int]) -> Processes:
    found: Processes = {}
    for pid in pids:
        process = psutil.Process(pid)
        found |= {one.pid: one for one in [process, *process.children(recursive=True)]}
    return found


# -- the table -------------------------------------------------------------------------------------
def write(out: Path, facts: dict[str, str], quiet: float, counts: dict[str, list[float]]) -> None:
    rows: dict[str, Any] = {}
    lines = ["# Step time on Ray beside the local backend's", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    rounds = len(counts[LOCAL])
    lines += [
        f"Busy cores before the run: {quiet:.2f} of {os.cpu_count()}, the idle cluster's own among "
        f"them. {rounds} turns of {TURN_S:g} s of each side, in random order, the others stopped "
        "meanwhile. 4 ranks on 2 nodes, HSDP 2 x 2 over gloo, one thread a rank, 3.3 M "
        "parameters; head, two raylets and everything else on this one machine. In brackets: the "
        "middle 90 % of what resampling the turns gives.",
        "",
        "| side | step, s | / local | / local beside idle actors |",
        "|---|---|---|---|",
    ]
    for side, rates in counts.items():
        ratios = [against(counts[base], rates) for base in (LOCAL, BESIDE)]
        told = [f"{one:.3f}x [{low:.3f} to {high:.3f}]" for one, low, high in ratios]
        step = len(rates) / sum(rates)
        lines.append(f"| {side} | {step:.4f} | {' | '.join(told)} |")
        rows[side] = {"step_s": step, "steps_per_s": rates}
    out.with_suffix(".json").write_text(
        json.dumps({"conditions": facts, "results": rows}, indent=1) + "\n"
    )
    text = "\n".join(lines) + "\n"
    out.with_suffix(".md").write_text(text)
    print(text)


def against(base: list[float], rates: list[float]) -> tuple[float, float, float]:
    """Step time over step time: of all turns, and the bounds of its middle 90 %."""
    drawn = []
    for _ in range(RESAMPLES):
        some = random.choices(range(len(rates)), k=len(rates))  # a round stays together
        drawn.append(sum(base[one] for one in some) / sum(rates[one] for one in some))
    parts = quantiles(drawn, n=20)
    return sum(base) / sum(rates), parts[0], parts[-1]


if __name__ == "__main__":
    raise SystemExit(main())
