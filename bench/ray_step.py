"""Step time on Ray beside the local backend's.

    python -m bench.ray_step                   # four ranks on two nodes: an hour
    python -m bench.ray_step --nodes 1         # on one: half an hour

Jobs of the same workload train on one machine in turns (turns.py): one with the local backend and
one on a Ray cluster. With two nodes there is a third: local nodes share the memory of the import of
torch, and nodes of a Ray cluster do not, so a local job whose nodes do not share it either shows
Ray's part of the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from tests.e2e.ray.cluster_rig import RayRig

from . import conditions, turns
from .contestants.apart import HoldfastApart
from .contestants.base import ROOT, Workload
from .contestants.holdfast import NUM_RANKS, Holdfast
from .contestants.holdfast_ray import HoldfastOnRay
from .ray import QUIET_CORES, connect

RESULTS = Path(__file__).parent / "results"
LOCAL, APART, RAY = "Holdfast, local", HoldfastApart.name, HoldfastOnRay.name
PAIRS = {1: [(RAY, LOCAL)], 2: [(RAY, LOCAL), (RAY, APART), (APART, LOCAL)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=2, help="of the four ranks")
    parser.add_argument("--reps", type=int, default=20, help="starts of each job")
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
        for found in turns.starts(
            lambda name: sides(directory / name, cluster, nodes),
            PAIRS[nodes], options.reps, options.rounds,
        ):  # fmt: skip
            write(out, facts, quiet, found, options.rounds, nodes)
    finally:
        cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
    print(out.with_suffix(".md").read_text())
    return 0


def sides(directory: Path, cluster: RayRig, nodes: int) -> dict[str, Holdfast]:
    local, apart, on_ray = (
        Workload(directory / name, steps=turns.STEPS) for name in ("local", "apart", "ray")
    )
    found: dict[str, Holdfast] = {
        LOCAL: Holdfast(local, nodes=nodes, patience_s=turns.MAX_STOPPED_S),
        APART: HoldfastApart(apart, nodes=nodes, patience_s=turns.MAX_STOPPED_S),
        RAY: HoldfastOnRay(on_ray, cluster, nodes=nodes, patience_s=turns.MAX_STOPPED_S),
    }
    return {name: job for name, job in found.items() if any(name in pair for pair in PAIRS[nodes])}


def write(
    out: Path,
    facts: dict[str, str],
    quiet: float,
    found: list[turns.Samples],
    rounds: int,
    nodes: int,
) -> None:
    lines = [
        f"# Step time on Ray beside the local backend's: {NUM_RANKS} ranks on {nodes} node(s)",
        "",
    ]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    lines += [
        f"Busy cores before the run: {quiet:.2f} of {os.cpu_count()}, the idle cluster's own among "
        f"them. {turns.how(len(found), rounds)} HSDP 2 x 2 over gloo, one thread a rank, 3.3 M "
        "parameters; head, raylets and everything else on this one machine.",
        "",
        *turns.table(PAIRS[nodes], found),
    ]
    results = {"conditions": facts, "turns": rounds, "nodes": nodes, "starts": turns.raw(found)}
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
