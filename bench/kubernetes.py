"""What a lost node costs on Kubernetes, by itself and with Holdfast, on the tests' own cluster.

    python -m bench.kubernetes                  # all; Kubernetes by default takes six minutes
    python -m bench.kubernetes --only Holdfast

Owns: the measurement of the cluster alone, which is the yardstick, and the table; node_loss.py has
Holdfast's side. Alone: two pods of a Deployment on three nodes; the node of one of them loses its
power or its network. Writes bench/results/kubernetes.json and .md after every run. Needs root and
the binaries of `make kubernetes-binaries`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
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

from . import conditions, node_loss

RESULTS = Path(__file__).parent / "results"
SETTINGS = {"default": DEFAULT, "short": SHORT}
LOOK_EVERY_S = 0.1
BOUND_S = 420


@dataclass
class Result:
    """Seconds after the start for `start`, seconds after the fault for `loss`."""

    settings: str
    fault: str
    start: dict[str, float] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, float] = field(default_factory=dict)
    two_copies: bool = False
    """The old process still ran on its node when the replacement ran elsewhere."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="runs whose settings or fault contain this")
    parser.add_argument("--out", type=Path, default=RESULTS / "kubernetes")
    options = parser.parse_args()
    refusal = programs.machine_refusal() or programs.locate().refusal(
        programs.CONTROL_PLANE + programs.NODE
    )
    if refusal:
        print(f"error: {refusal}")
        return 1
    facts = conditions.describe()
    noise: list[float] = []
    results: list[Result] = []
    ours: list[node_loss.Result] = []
    for case in node_loss.CASES:
        if options.only in f"Holdfast {case}":
            noise.append(conditions.wait_until_quiet())
            ours.append(node_loss.measure(case))
            print(json.dumps(asdict(ours[-1])), flush=True)
            write(options.out, facts, results, ours, noise)
    for settings, fault in (("short", "power"), ("short", "partition"), ("default", "power")):
        if options.only in f"{settings} {fault}":
            noise.append(conditions.wait_until_quiet())
            results.append(measure(settings, fault))
            print(json.dumps(asdict(results[-1])), flush=True)
            write(options.out, facts, results, ours, noise)
    return 0


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


def write(
    out: Path,
    facts: dict[str, str],
    results: list[Result],
    ours: list[node_loss.Result],
    noise: list[float],
) -> None:
    body = {
        "conditions": facts,
        "kubernetes": [asdict(result) for result in results],
        "holdfast": [asdict(result) for result in ours],
    }
    out.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    lines = ["# What a lost node costs on Kubernetes", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    lines += [
        f"Busy cores before the runs: most {max(noise):.2f}. One run each, Kubernetes and all "
        "nodes on this one machine.",
    ]
    lines += table_of_ours(ours) if ours else []
    lines += table_of_kubernetes(results) if results else []
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def table_of_ours(ours: list[node_loss.Result]) -> list[str]:
    lines = [
        "",
        "## Holdfast, Kubernetes at its default settings",
        "",
        "4 ranks in 2 pods on 2 of 3 nodes, HSDP 2 x 2 over gloo. The node of the pod without rank "
        "0 loses its power, its cable first. By the times of the workers' log lines.",
        "",
        "| case | apply to first step | power loss to next step | steps lost | Kubernetes' view of "
        "the node then | decision |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {one.case} | {one.first_step_s:.1f} s | {one.next_step_s:.2f} s | {one.steps_lost} | "
        f"Ready={one.node_readiness} | {one.decision} |"
        for one in ours
    ]


def table_of_kubernetes(results: list[Result]) -> list[str]:
    lines = [
        "",
        "## Kubernetes alone",
        "",
        "A Deployment of two pods on three nodes; the node of one of them loses its power (cable "
        "first) or is cut off and healed once the replacement runs.",
        "",
        "| seconds after the fault | "
        + " | ".join(f"{r.settings}, {r.fault}" for r in results)
        + " |",
        "|---|" + "---|" * len(results),
    ]
    for what in dict.fromkeys(what for result in results for what in result.loss):
        cells = [f"{r.loss[what]:.1f}" if what in r.loss else "" for r in results]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    copies = ["yes" if r.two_copies else "no" for r in results]
    lines.append("| old process runs beside the replacement | " + " | ".join(copies) + " |")
    lines += ["", "Seconds after the start of everything, and memory:", ""]
    for result in results:
        times = ", ".join(f"{what} {value:.1f} s" for what, value in result.start.items())
        sizes = ", ".join(f"{what} {value:.0f} MiB" for what, value in result.memory_mib.items())
        lines.append(f"* {result.settings}, {result.fault}: {times}; {sizes}.")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
