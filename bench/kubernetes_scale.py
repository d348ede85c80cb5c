"""Number of jobs and pods that one operator can handle, on a real control plane with fake nodes.

    python -m bench.kubernetes_scale                         # both shapes, five minutes
    python -m bench.kubernetes_scale --only "1000 jobs"
    python -m bench.kubernetes_scale --jobs 40 --pods 5 --out /tmp/small

Writes bench/results/kubernetes_scale.json and .md after every phase; --label keeps the runs of
different commits side by side. Needs the binaries of `make kubernetes-binaries`, no privileges.

A measurement: all jobs are created as fast as the API server accepts them, until all of their pods
exist and are bound; then the operator idles for IDLE_S; then all jobs are deleted, until no object
is left. No agent connects: the work for training jobs is measured elsewhere. Pods whose agents do
not join are replaced after half an hour: on a machine that needs longer, the idle minute shows
this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from tests.e2e.kubernetes import request_counts
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.waiting import until

from . import conditions, scale_rig
from .scale_rig import JOBS_NAMESPACE, Reading, Scale

RESULTS = Path(__file__).parent / "results"
SHAPES = ((1000, 5), (1, 1000))
"""(jobs, pods of each)"""
NUM_NODES = 1000
IDLE_S = 60.0
CLIENTS = 8
"""Requests of the one who applies the jobs that are under way."""
BOUND_S = 1800
PEERS = (
    "Published figures of others, on other machines: JobSet reschedules 290 pods/s at 15,000 nodes "
    "(its README), Kueue admits 42 jobs/s (its performance tests in CI: 50,000 workloads in "
    "1,179 s, the rest of the cluster simulated)."
)


@dataclass
class Result:
    label: str
    shape: str
    num_jobs: int
    num_pods: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds since the first apply, or since the request to delete."""
    rates: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Phase -> process -> CPU-seconds."""
    memory_mib: dict[str, float] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    requests: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> verb and resource -> requests of the operator, and `by the API server's count`."""
    delay_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """Phase -> of /healthz."""
    noise: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--jobs", type=int, help="one shape of this many jobs")
    parser.add_argument("--pods", type=int, default=5, help="... of this many pods each")
    parser.add_argument("--label", default="now", help="of the row; one of the same is replaced")
    parser.add_argument("--out", type=Path, default=RESULTS / "kubernetes_scale")
    options = parser.parse_args()
    refusal = programs.locate().refusal(programs.CONTROL_PLANE)
    if refusal:
        print(f"error: {refusal}")
        return 1
    shapes = ((options.jobs, options.pods),) if options.jobs else SHAPES
    results = load(options.out)
    for num_jobs, pods_each in shapes:
        if options.only not in name_of(num_jobs, pods_each):
            continue
        one = Result(options.label, name_of(num_jobs, pods_each), num_jobs, num_jobs * pods_each)
        one.noise, one.facts = conditions.wait_until_quiet(), conditions.describe()
        results = [r for r in results if (r.label, r.shape) != (one.label, one.shape)] + [one]
        with scale_rig.scale(NUM_NODES) as scale:
            for phase in (fill, rest, remove):
                phase(scale, one)
                write(options.out, results)
        print(json.dumps(asdict(one)), flush=True)
    return 0


def name_of(num_jobs: int, pods_each: int) -> str:
    jobs = "1 job" if num_jobs == 1 else f"{num_jobs} jobs"
    return f"{jobs} of {pods_each} pods"


# -- the measurement ----------------------------------------------------------------------------
def fill(scale: Scale, result: Result) -> None:
    num_jobs, num_pods = result.num_jobs, result.num_pods
    before = scale.read()
    note_levels(result, "before", before)
    with scale.probing() as delays:
        began_s = time.monotonic()
        create(scale, result)
        created_s = wait(lambda: scale.count("pods") >= num_pods, "all pods", scale)
        result.seconds["all pods created"] = round(created_s - began_s, 2)
        created = scale.read()
        unbound = "&fieldSelector=spec.nodeName%3D"
        bound_s = wait(lambda: not scale.count("pods", unbound), "all pods bound", scale)
        result.seconds["all pods bound"] = round(bound_s - began_s, 2)
        result.seconds["operator quiet"] = round(settle(scale) - began_s, 2)
    note(result, "until created", before, created)
    note(result, "until quiet", before, scale.read(), delays)
    took_s = created_s - began_s
    result.rates = {"pods/s": round(num_pods / took_s, 1), "jobs/s": round(num_jobs / took_s, 2)}


def create(scale: Scale, result: Result) -> None:
    began_s = time.monotonic()
    asyncio.run(_create(scale, result.num_jobs, result.num_pods // result.num_jobs))
    result.seconds["all jobs taken by the API server"] = round(time.monotonic() - began_s, 2)


async def _create(scale: Scale, num_jobs: int, pods_each: int) -> None:
    slots = asyncio.Semaphore(CLIENTS)
    async with await KubeClient.connect(kubeconfig=scale.plane.kubeconfig) as cluster:

        async def one(index: int) -> None:
            async with slots:
                await cluster.create(JOBS, JOBS_NAMESPACE, job(f"job-{index:04d}", pods_each))

        await asyncio.gather(*(one(index) for index in range(num_jobs)))


def job(name: str, pods_each: int) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": {"script": "train.py"},
            "image": "registry.invalid/holdfast/worker:scale",
            "nodes": {"min": pods_each, "max": pods_each},
            # No kubelet will ever confirm that a pod has ended.
            "kubernetes": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 0}}},
        },
    }


def rest(scale: Scale, result: Result) -> None:
    """Nothing happens. This is the one place where time itself has to pass."""
    begin = scale.read()
    with scale.probing() as delays:
        time.sleep(IDLE_S)
    end = scale.read()
    note(result, "idle", begin, end, delays)
    note_levels(result, "idle", end)
    began_s = time.monotonic()
    page = scale.replica.get("/metrics")[1]
    result.seconds["one scrape"] = round(time.monotonic() - began_s, 2)
    result.memory_mib["page of a scrape"] = round(len(page) / 2**20, 2)


def remove(scale: Scale, result: Result) -> None:
    before = scale.read()
    with scale.probing() as delays:
        began_s = time.monotonic()
        asyncio.run(_remove(scale, result.num_jobs))

        def gone() -> bool:
            return not any(scale.count(what) for what in ("trainingjobs", "pods", "secrets"))

        end_s = wait(gone, "all to go", scale)
        # The one that is left belongs to the namespace.
        end_s = wait(lambda: scale.count("configmaps") == 1, "journals to go", scale)
        result.seconds["all deleted"] = round(end_s - began_s, 2)
        settle(scale)
    note(result, "deletion", before, scale.read(), delays)
    note_levels(result, "after", scale.read())


async def _remove(scale: Scale, num_jobs: int) -> None:
    slots = asyncio.Semaphore(CLIENTS)
    async with await KubeClient.connect(kubeconfig=scale.plane.kubeconfig) as cluster:

        async def one(index: int) -> None:
            async with slots:
                await cluster.delete(JOBS, JOBS_NAMESPACE, f"job-{index:04d}")

        await asyncio.gather(*(one(index) for index in range(num_jobs)))


def wait(condition: Callable[[], bool], what: str, scale: Scale) -> float:
    """Returns when it was true first."""

    def look() -> bool:
        with contextlib.suppress(scale_rig.Busy):
            return condition()
        return False

    until(look, what, timeout_s=BOUND_S, every_s=0.1, last=scale.replica.tail)
    return time.monotonic()


def settle(scale: Scale) -> float:
    """Returns since when the operator has asked nothing of the API server but to keep its lease."""
    quiet_s = time.monotonic()
    last = request_counts.counted_by_server(scale.plane)
    while time.monotonic() - quiet_s < 6:
        time.sleep(2)
        now = request_counts.counted_by_server(scale.plane)
        if now - last > 3:  # a lease of 10 s is renewed every 2 s, by two requests
            quiet_s = time.monotonic()
        last = now
    return quiet_s


# -- readings -> result -------------------------------------------------------------------------
def note(
    result: Result, phase: str, begin: Reading, end: Reading, delays: list[float] | None = None
) -> None:
    result.cpu_s[phase] = {
        name: round(end.cpu_s[name] - begin.cpu_s[name], 2) for name in end.cpu_s
    }
    requests = request_counts.beside_leases(end.by_operator - begin.by_operator)
    result.requests[phase] = {
        **{f"{verb} {what}": count for (verb, what), count in sorted(requests.items())},
        "all but leases": requests.total(),
        "leases": (end.by_operator - begin.by_operator).total() - requests.total(),
        "by the API server's count": end.by_server - begin.by_server,
    }
    if delays:
        ordered = sorted(delays)
        result.delay_ms[phase] = {
            "median": round(statistics.median(ordered), 1),
            "99 %": round(ordered[int(0.99 * len(ordered))], 1),
            "most": round(ordered[-1], 1),
        }


def note_levels(result: Result, when: str, reading: Reading) -> None:
    result.memory_mib[f"resident {when}"] = round(reading.resident_mib, 1)
    result.memory_mib[f"peak {when}"] = round(reading.peak_mib, 1)
    result.threads[when] = reading.num_threads
    result.files[when] = reading.num_files


# -- the table ----------------------------------------------------------------------------------
def load(out: Path) -> list[Result]:
    file = out.with_suffix(".json")
    return [Result(**one) for one in json.loads(file.read_text())] if file.exists() else []


def write(out: Path, results: list[Result]) -> None:
    out.with_suffix(".json").write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    lines = [
        "# What one operator carries on Kubernetes", "",
        f"A real API server, etcd, scheduler and controller-manager, {NUM_NODES} fake nodes, the "
        "operator and the client that applies the jobs, all on one machine: they share its cores. "
        "Scheduler and controller-manager may send 1,000 requests a second instead of 50 and 20. "
        f"{PEERS}", "",
    ]  # fmt: skip
    for name in dict.fromkeys(result.shape for result in results):
        lines += table([result for result in results if result.shape == name])
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def table(results: list[Result]) -> list[str]:
    lines = [f"## {results[0].shape}", ""]
    for one in results:
        facts = ". ".join(f"{name}: {value}" for name, value in one.facts.items())
        lines.append(f"* {one.label}: {facts}. Busy cores before: {one.noise:.2f}.")
    lines += ["", "| | " + " | ".join(one.label for one in results) + " |"]
    lines.append("|---|" + "---|" * len(results))
    rows = [rows_of(one) for one in results]
    for what in dict.fromkeys(what for row in rows for what in row):
        lines.append(f"| {what} | " + " | ".join(row.get(what, "") for row in rows) + " |")
    return [*lines, ""]


def rows_of(one: Result) -> dict[str, str]:
    rows = {what: f"{value:.1f} s" for what, value in one.seconds.items()}
    rows |= {what: f"{value:g}" for what, value in one.rates.items()}
    for phase, cpu_s in one.cpu_s.items():
        readings = ", ".join(f"{name} {value:.1f} s" for name, value in cpu_s.items())
        rows[f"CPU, {phase}"] = readings
    for phase, requests in one.requests.items():
        count = requests["all but leases"]
        if phase == "idle":
            per = f"{count / one.num_jobs / (IDLE_S / 60):.4f} per job and minute"
        else:
            per = f"{count / one.num_jobs:.2f} per job, {count / one.num_pods:.2f} per pod"
        rows[f"requests, {phase}"] = f"{per}: {listed(requests)}"
    memory = one.memory_mib
    for when in ("before", "idle", "after"):
        if f"peak {when}" in memory:
            rows[f"operator, {when}"] = (
                f"{memory[f'resident {when}']:.0f} MiB (peak {memory[f'peak {when}']:.0f}), "
                f"{one.threads[when]} threads, {one.files[when]} open files"
            )
    if "resident idle" in memory:
        grown = memory["resident idle"] - memory["resident before"]
        per_job, per_pod = 1024 * grown / one.num_jobs, 1024 * grown / one.num_pods
        rows["its memory, grown"] = f"{per_job:.0f} KiB per job, {per_pod:.0f} KiB per pod"
    for phase, delay in one.delay_ms.items():
        rows[f"/healthz answers, {phase}"] = ", ".join(f"{n} {v:g} ms" for n, v in delay.items())
    return rows


def listed(requests: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in requests.items())


if __name__ == "__main__":
    raise SystemExit(main())
