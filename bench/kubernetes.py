"""The cost of a lost node on Kubernetes, without and with Holdfast, on the tests' own cluster.

    python -m bench.kubernetes                          # all: 11 minutes, half of it one wait
    python -m bench.kubernetes --only "Holdfast shrink"

This module measures the cluster alone, which is the yardstick: two pods of a Deployment on three
nodes; the node of one of them loses its power or its network. node_loss.py and operator_loss.py
measure Holdfast, kubernetes_table.py makes the tables. Writes bench/results/kubernetes.json and .md
after every case, so that an interrupted run keeps its results; a failed case is reported and the
next one runs. A run with --only writes there only with --out. Needs root and the binaries of `make
kubernetes-binaries`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.node import Node
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.settings import DEFAULT, SHORT
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.rig.workloads import pod

from . import conditions, node_loss, operator_loss
from .kubernetes_table import Result, Table
from .operator_loss import Result as Restart

RESULTS = Path(__file__).parent / "results"
SETTINGS = {"default": DEFAULT, "short": SHORT}
LOOK_EVERY_S = 0.1
BOUND_S = 420


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose name contains it"
    )
    parser.add_argument("--out", type=Path, help="a path without .json and .md")
    options = parser.parse_args()
    refusal = programs.machine_refusal() or programs.locate().refusal(
        programs.CONTROL_PLANE + programs.NODE
    )
    if refusal:
        print(f"error: {refusal}")
        return 1
    scratch = Path(tempfile.gettempdir()) / "holdfast-bench-kubernetes"
    out = options.out or (scratch if options.only else RESULTS / "kubernetes")
    table = Table(conditions.describe())
    for name, case in cases(table).items():
        if options.only and not any(text in name for text in options.only):
            continue
        table.noise.append(conditions.wait_until_quiet())
        try:
            print(json.dumps(asdict(case())), flush=True)
        # Whatever the rig or the job raises: the other cases are worth their run all the same.
        except Exception as error:
            traceback.print_exc()
            table.failures.append(f"{name}: {(str(error) or repr(error)).splitlines()[0]}")
        table.write(out)
    print(f"written to {out}.md")
    return 1 if table.failures else 0


def cases(table: Table) -> dict[str, Callable[[], Result | node_loss.Result | Restart]]:
    """Cases by name, the longest one last."""

    def ours(case: str) -> node_loss.Result:
        table.ours.append(node_loss.measure(case))
        return table.ours[-1]

    def alone(settings: str, fault: str) -> Result:
        table.alone.append(measure(settings, fault))
        return table.alone[-1]

    def restart() -> Restart:
        table.restarts.append(operator_loss.measure())
        return table.restarts[-1]

    found: dict[str, Callable[[], Result | node_loss.Result | Restart]] = {
        f"Holdfast {case}": partial(ours, case) for case in ("spare", "replacement", "shrink")
    }
    found["Holdfast operator"] = restart
    for settings, fault in (("short", "power"), ("short", "partition"), ("default", "power")):
        found[f"{settings} {fault}"] = partial(alone, settings, fault)
    return found


def measure(settings: str, fault: str) -> Result:
    result = Result(settings, fault)
    with Run() as run:
        start_s = time.monotonic()
        cluster = Cluster(run, programs.locate(), settings=SETTINGS[settings])
        cluster.start(0)
        result.start["pods can be created"] = since(start_s)
        nodes = [cluster.add_node(wait=False) for _ in range(3)]
        for node in nodes:
            node.wait_ready()
        result.start["three nodes ready"] = since(start_s)
        cluster.kubectl().apply(deployment())
        until(lambda: len(running(cluster)) == 2, "two pods", timeout_s=60, every_s=LOOK_EVERY_S)
        result.memory_mib = memory(cluster)
        victim = next(iter(sorted(running(cluster).items())))
        node = lose(cluster, *victim, fault, result.loss)
        result.two_copies = any("sleep" in words(pid) for pid in node.processes())
        if fault == "partition":
            heal(cluster, node, victim[0], result.loss)
    return result


def lose(cluster: Cluster, name: str, where: str, fault: str, seen: dict[str, float]) -> Node:
    """Puts the fault to the node of a pod and notes when each thing is seen first."""
    node = cluster.nodes[where]
    before = set(pods(cluster))
    fault_s = time.monotonic()
    if fault == "power":
        node.lose_power()
    else:
        node.cut()

    def look() -> bool:
        listed = pods(cluster)
        new = set(listed) - before
        for what, true in {
            "node Ready=Unknown": node.readiness() == "Unknown",
            "pod marked for deletion": "deletionTimestamp" in listed[name]["metadata"],
            "replacement created": bool(new),
            "replacement running": any(is_running(listed[n]) for n in new),
        }.items():
            if true:
                seen.setdefault(what, since(fault_s))
        return "replacement running" in seen

    until(look, "a replacement", timeout_s=BOUND_S, every_s=LOOK_EVERY_S)
    return node


def heal(cluster: Cluster, node: Node, name: str, seen: dict[str, float]) -> None:
    heal_s = time.monotonic()
    node.heal()
    until(lambda: name not in pods(cluster), "the old pod to go", timeout_s=120)
    seen["old pod gone, after the heal"] = since(heal_s)


def since(start_s: float) -> float:
    return round(time.monotonic() - start_s, 2)


def words(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


def pods(cluster: Cluster) -> dict[str, dict[str, Any]]:
    text = cluster.control_plane.request("/api/v1/namespaces/default/pods")
    return {one["metadata"]["name"]: one for one in json.loads(text or '{"items": []}')["items"]}


def is_running(document: dict[str, Any]) -> bool:
    return bool(document["status"].get("phase") == "Running")


def running(cluster: Cluster) -> dict[str, str]:
    """Name of a running pod -> its node."""
    listed = pods(cluster).items()
    return {name: one["spec"]["nodeName"] for name, one in listed if is_running(one)}


def deployment() -> dict[str, Any]:
    one = pod("unused", "sleep", "100000")["spec"]
    del one["restartPolicy"]
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}
    one["affinity"] = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "pair", "namespace": "default"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": one},
        },
    }


def memory(cluster: Cluster) -> dict[str, float]:
    plane = cluster.control_plane
    servers = (plane.etcd, plane.api_server, plane.controller_manager, plane.scheduler)
    node = cluster.nodes["node1"]
    return {
        "control plane": resident_mib([server.pid for server in servers]),
        "a node with its pods": resident_mib(node.processes()),
    }


def resident_mib(pids: list[int]) -> float:
    """Proportional size: what processes share is counted once."""
    return round(sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**20)


if __name__ == "__main__":
    raise SystemExit(main())
