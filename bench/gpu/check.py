"""The machine, the tests that need a GPU, and NCCL with several ranks on one GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
import torch.distributed as dist

from bench.contestants.base import ROOT
from tests.strategies.rig import of_ranks

from .kit import Figures, Folder, Kit, Measurement, Skip
from .sharing import share_one_gpu

SEVERAL = "two ranks on one GPU"
JOBS = ("tests/e2e/local/test_gpu.py", "tests/strategies/test_gpus.py")
MESSAGE = 2**24
RANK_S = 40
"""A rank that hangs ends then, and gloo has its turn."""


def measurements() -> list[Measurement]:
    return [
        Measurement("check", "machine", machine, 8, 0),
        Measurement("check", "tests of CUDA branches", branches, 90, 0),
        Measurement("check", SEVERAL, several_ranks, 25, 1),
        Measurement("check", "tests of jobs on a GPU", jobs, 150, 4, on_cpu=False),
    ]


def machine(kit: Kit) -> Figures:
    """Figures of the machine, by which a reader judges the others."""
    limit = subprocess.run(["bash", "-c", "ulimit -l"], capture_output=True, text=True, check=True)
    figures: Figures = {"cores": os.cpu_count(), "locked memory": limit.stdout.strip()}
    if kit.rehearse:
        return figures
    free, total = torch.cuda.mem_get_info()
    return figures | {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "context_bytes": total - free,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
    }


def branches(kit: Kit) -> Figures:
    """Files by name: others need packages that the machine may lack."""
    unit = (ROOT / "tests/unit/workers").rglob("test_*.py")
    files = [str(file) for file in unit if "torch.cuda.is_available()," in file.read_text()]
    return run_tests(kit, "-m", "gpu", "bench/gpu/test_cuda.py", *kit.size(files, []))


def jobs(kit: Kit) -> Figures:
    return run_tests(kit, *JOBS)


def run_tests(kit: Kit, *words: str) -> Figures:
    """Outcomes by test. A failed test is a figure: the kit goes on, and the page shows it."""
    report = kit.scratch / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    command += ["--timeout", "120", f"--junit-xml={report}"]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}")
    return outcomes(report)


def outcomes(report: Path) -> Figures:
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        what = next((c for c in case if c.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kind = "passed" if what is None else "skipped" if what.tag == "skipped" else "failed"
        why = "" if what is None else f": {(what.get('message') or what.tag).splitlines()[0][:150]}"
        found[kind].append(name + why)
    counts = {kind: len(names) for kind, names in found.items()}
    return {**counts, "failures": found["failed"], "skips": found["skipped"]}


def several_ranks(kit: Kit) -> Figures:
    """Two ranks on one GPU, by NCCL with a host id of its own for each rank, else by gloo."""
    kinds = ("gloo",) if kit.rehearse else ("nccl", "gloo")
    why = {}
    for kind in kinds:
        try:
            place = kit.scratch / kind
            place.mkdir()
            words = [sys.executable, "-m", "bench.gpu.check", kit.device]
            text = of_ranks(place, words, 2, BENCH_SHARE_GPU=kind)
        except AssertionError as error:
            print(f"{kind}: {error}", flush=True)
            why[f"{kind} failed"] = re.sub(r"\s+", " ", str(error))[:300]
            continue
        rates = dict(re.findall(r"^(\S+) (\d\S*)$", text, re.M))
        return {"backend": kind, **{name: float(rate) for name, rate in rates.items()}, **why}
    raise Skip("; ".join(f"{name}: {reason}" for name, reason in why.items()))


def shared_backend(kit: Kit) -> str:
    """Backend of ranks on one GPU. Raises Skip if neither nccl nor gloo works."""
    record = Folder(kit.folder).records().get(("check", SEVERAL))
    figures = record.figures if record is not None else several_ranks(kit)
    if "backend" not in figures:
        raise Skip(f"two ranks on one GPU: {record.why if record else figures}")
    return str(figures["backend"])


def _rank(device: str) -> None:
    """Collectives as FSDP2 uses them; rank 0 prints rates in GB/s."""
    import time

    if device == "cuda":
        signal.alarm(RANK_S)
    share_one_gpu()
    dist.init_process_group(os.environ["BENCH_SHARE_GPU"] if device == "cuda" else "gloo")
    size = dist.get_world_size()
    whole = torch.ones(MESSAGE // 4, device=device)
    part = torch.empty(len(whole) // size, device=device)
    operations = {
        "all_reduce_gb_s": lambda: dist.all_reduce(whole),
        "all_gather_gb_s": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter_gb_s": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    dist.all_reduce(whole)
    assert float(whole[0]) == float(whole[-1]) == size, "the sum is wrong"
    for name, run in operations.items():
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            print(name, f"{MESSAGE / sorted(seconds)[2] / 1e9:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1])
