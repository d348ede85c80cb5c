"""Recovery, launch and step time on a Ray cluster: Holdfast beside Ray Train v2.

    python -m bench.ray                        # all, once: about ten minutes
    python -m bench.ray --reps 3 --only "worker killed"

Both run on the same cluster, one after the other. Writes bench/results/ray.json and .md after every
run, so that an interrupted one keeps its results. The cluster is that of the tests: every Ray node
is a raylet on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from tests.e2e.ray.cluster_rig import RayRig

from . import cases, conditions, timeline
from .cases import Case, Result
from .contestants.base import ROOT, Contestant, Workload
from .contestants.holdfast import Holdfast
from .contestants.holdfast_ray import HoldfastOnRay
from .contestants.raytrain import RayTrain, wait_for_nodes
from .recovery import describe, spread

RESULTS = Path(__file__).parent / "results"
PEER, LOCAL = RayTrain.name, "Holdfast, local"
STEPS = 100
START_BOUND_S = BOUND_S = 240.0
"""A busy machine: Ray Train needs 16 s on a quiet one."""
QUIET_CORES = 0.6
"""Used by an idle cluster of four raylets and its dashboard."""
TARGETS = {
    "start": 2.0,
    "worker killed": 12.0,
    "node lost, room": 10.0,
    "node lost, shrink": 30.0,
}
"""Holdfast's wanted advantage over Ray Train, as a factor."""


@dataclass(frozen=True)
class Plan:
    """One run on that many Ray nodes."""

    nodes: int
    name: str
    contestant: str
    run: Callable[[], Result]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name or contestant contains this")
    parser.add_argument("--out", type=Path, default=RESULTS / "ray")
    options = parser.parse_args()
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        print("error: Ray Train is not complete here: pip install '.[bench]'")
        return 1
    # SIGTERM ends the cluster, too.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    facts = conditions.describe() | {"ray": version("ray")}
    os.environ["PYTHONPATH"] = str(ROOT)  # Ray's workers have it from the raylet
    cluster = RayRig(nodes=3)
    results: list[Result] = []
    noise: list[float] = []
    try:
        connect(cluster)
        for _ in range(options.reps):
            for plan in plans(cluster):
                if options.only not in plan.name and options.only not in plan.contestant:
                    continue
                resize(cluster, plan.nodes)
                noise.append(conditions.wait_until_quiet(QUIET_CORES))
                result = guarded(plan)
                results.append(result)
                print(describe(result), flush=True)
                write(options.out, facts, results, noise)
    finally:
        cluster.close()
    return 0


def guarded(plan: Plan) -> Result:
    """A run that fails becomes a result without a time."""
    try:
        return replace(plan.run(), case=plan.name, contestant=plan.contestant)
    except Exception as error:
        return Result(plan.name, plan.contestant, None, note=f"{type(error).__name__}: {error}")


def plans(cluster: RayRig) -> Iterable[Plan]:
    """The runs of one repetition: first those with a free Ray node, then those without."""
    peer = lambda w: RayTrain(w, cluster)  # noqa: E731
    elastic = lambda w: RayTrain(w, cluster, elastic=True)  # noqa: E731
    ours = lambda w: HoldfastOnRay(w, cluster)  # noqa: E731
    spare = lambda w: HoldfastOnRay(w, cluster, spares=1)  # noqa: E731
    sent = lambda w: HoldfastOnRay(w, cluster, submitted=True)  # noqa: E731
    lost = lose_ray_node

    def fault(
        nodes: int, name: str, who: str, build: Callable[[Workload], Contestant], provoke: Any
    ) -> Plan:
        case = Case(name, who, build, provoke, BOUND_S, START_BOUND_S)
        return Plan(nodes, name, who, lambda: cases.run(case))

    def calm(who: str, build: Callable[[Workload], Contestant]) -> Plan:
        name = "undisturbed"
        return Plan(2, name, who, lambda: cases.run_without_fault(build, STEPS))

    yield fault(3, "node lost, room", PEER, peer, lost)
    yield fault(3, "node lost, room", "Holdfast, spare", spare, lost)
    yield fault(3, "node lost, room", "Holdfast, replacement", ours, lost)
    yield fault(2, "worker killed", PEER, peer, cases.kill_worker)
    yield fault(2, "worker killed", "Holdfast", ours, cases.kill_worker)
    yield fault(2, "node lost, shrink", PEER, elastic, lost)
    yield fault(2, "node lost, shrink", "Holdfast", ours, lost)
    yield calm(LOCAL, Holdfast)
    yield calm("Holdfast", ours)
    yield calm(PEER, peer)
    yield Plan(2, "submitted", "Holdfast", lambda: cases.run_without_fault(sent, 8))


def lose_ray_node(contestant: Contestant, job: timeline.Incarnation) -> None:
    """SIGKILL a raylet with all its processes, ranks of one node among them, but not the raylet of
    the contestant's controller."""
    assert isinstance(contestant, RayTrain | HoldfastOnRay)
    keep = contestant.controller_node()
    places = {rank: contestant.cluster.node_of(pid) for rank, pid in job.pids.items()}
    contestant.kill_node(job.pids[max(rank for rank, at in places.items() if at != keep)])


def connect(cluster: RayRig) -> None:
    from holdfast.orchestrator.backends.ray import cluster as ours

    ours.connect(cluster.address)


def resize(cluster: RayRig, nodes: int) -> None:
    """Change the cluster to this many idle Ray nodes."""
    while cluster.num_nodes < nodes:
        cluster.add_node()
    while cluster.num_nodes > nodes:
        cluster.kill_newest()
    wait_for_nodes(nodes + 1)  # and the head


def write(out: Path, facts: dict[str, str], results: list[Result], noise: list[float]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    body = {"conditions": facts, "results": [result.as_dict() for result in results]}
    out.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    lines = ["# Holdfast on Ray beside Ray Train v2", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    lines += [
        f"Busy cores before the runs: median {median(noise):.2f}, most {max(noise):.2f} of "
        f"{os.cpu_count()}, the idle cluster's own among them.",
        "One Ray cluster for all runs: a head without CPUs, with dashboard, and 2 or 3 Ray nodes "
        "of 2 CPUs, all on this one machine. 4 ranks on 2 Ray nodes, HSDP 2 x 2 over gloo, one "
        "thread a rank, 3.3 M parameters. Ray Train: TorchTrainer, DCP every 10 steps "
        "(async_save into the run's storage, reported with an upload function that waits for it), "
        "restarts without limit, elastic only in the case without room. Holdfast: memory every "
        "step, storage every 10. Fault at step 14. Seconds from the fault to the first step that "
        "all ranks have finished; medians, [least to most], (runs).",
        "",
        "| case | contestant | seconds | steps lost | Ray Train / Holdfast | wanted |",
        "|---|---|---|---|---|---|",
    ]
    lines += [*table(results), "", *starts(results), "", *steps(results)]
    notes = [f"* {r.case}, {r.contestant}: {r.note}" for r in results if r.note]
    lines += ["", *notes] if notes else []
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def grouped(results: list[Result], value: Callable[[Result], float | None]) -> Any:
    """(case, contestant) -> its values."""
    found: dict[tuple[str, str], list[float]] = {}
    for result in results:
        seen = value(result)
        if seen is not None:
            found.setdefault((result.case, result.contestant), []).append(seen)
    return found


def ratio(theirs: list[float] | None, ours: list[float]) -> str:
    return f"{median(theirs) / median(ours):.1f}x" if theirs else ""


def table(results: list[Result]) -> Iterable[str]:
    seconds = grouped(results, lambda r: r.seconds)
    lost = grouped(results, lambda r: r.steps_lost)
    for (case, who), values in seconds.items():
        some = lost[(case, who)]
        losses = f"{median(some):g} [{min(some):g} to {max(some):g}]"
        ours = who != PEER
        times = ratio(seconds.get((case, PEER)), values) if ours else ""
        wanted = f"{TARGETS[case]:g}x" if ours else ""
        yield f"| {case} | {who} | {spread(values)} | {losses} | {times} | {wanted} |"


def starts(results: list[Result]) -> Iterable[str]:
    """Start times, of all runs that begin on the idle cluster."""
    kinds: dict[str, list[float]] = {
        "fit(), called by a process that has imported and connected": [],
        "`holdfast run --ray`, the command's own start included": [],
        "`holdfast submit --ray http://...`, likewise": [],
    }
    theirs, attached, sent = kinds.values()
    for result in results:
        if result.launch_s is None or result.contestant == LOCAL:
            continue
        if result.contestant == PEER:
            theirs.append(result.launch_s)
        elif result.case == "submitted":
            sent.append(result.launch_s)
        else:
            attached.append(result.launch_s)
    yield "| start on the running cluster | to the first step | Ray Train / Holdfast | wanted |"
    yield "|---|---|---|---|"
    for name, values in kinds.items():
        if values and values is theirs:
            yield f"| {PEER}: {name} | {spread(values)} | | |"
        elif values:
            times = ratio(theirs, values)
            yield f"| Holdfast: {name} | {spread(values)} | {times} | {TARGETS['start']:g}x |"


def steps(results: list[Result]) -> Iterable[str]:
    found = grouped([r for r in results if r.case == "undisturbed"], lambda r: r.step_s)
    local = found.get(("undisturbed", LOCAL))
    yield f"| undisturbed, median of {STEPS - 5} steps | step | / Holdfast, local |"
    yield "|---|---|---|"
    for (_, who), values in found.items():
        times = f"{median(values) / median(local):.3f}x" if local else ""
        yield f"| {who} | {spread(values, 4)} | {times} |"


if __name__ == "__main__":
    raise SystemExit(main())
