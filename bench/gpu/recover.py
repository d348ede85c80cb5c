"""Recoveries on one GPU, Holdfast beside torchrun, and the floor of their parts.

Large: one rank, 1.0 G parameters with AdamW in bfloat16. Small: two nodes with two ranks each,
which share the GPU. Seconds from the fault to the first step that all ranks have finished.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from bench import cases
from bench.cases import Case
from bench.contestants.base import ROOT, Workload
from bench.contestants.holdfast import Holdfast
from bench.contestants.torchrun import Torchrun

from . import faults
from .check import shared_backend
from .kit import Figures, Kit, Measurement
from .plan import LARGE
from .regroup import regroup

BIG = {"model": LARGE, "globalBatch": 2, "data": {"sequenceLength": 512}}
SMALL = {"globalBatch": 8}
KILLED, COMPILED = "worker killed", "worker killed, compiled"
LOST, ABSENT = "node lost", "absent from a collective"
Provoke = Callable[[Any, Any], Any]
FAULTS: dict[str, tuple[Provoke, int]] = {
    KILLED: (cases.kill_worker, 2),
    COMPILED: (cases.kill_worker, 3),
    "illegal memory access": (faults.order("access"), 3),
    "out of memory": (faults.order("memory"), 4),
    "exception": (faults.order("exception"), 5),
    "worker stopped": (cases.hang_worker, 6),
    LOST: (cases.lose_node, 3),
    ABSENT: (faults.order("absent"), 4),
}
"""Name -> what causes it, and its value."""
REHEARSED = {("large", KILLED, "Holdfast"), ("large", KILLED, "torchrun"),
             ("large", COMPILED, "Holdfast"), ("large", LOST, "Holdfast"),
             ("small", KILLED, "Holdfast")}  # fmt: skip
HANGS = ("worker stopped", ABSENT)
SIDES = {"Holdfast": Holdfast, "torchrun": Torchrun}


def measurements() -> list[Measurement]:
    rows = [
        Measurement("recover", "floors", floors, 30, 1),
        Measurement("recover", "groups formed again after a kill", regroup, 60, 2, device_gb=4),
    ]
    for size, without in {"large": ABSENT, "small": COMPILED}.items():
        for name in [name for name in FAULTS if name != without]:
            for side in SIDES:
                # torchrun does not see a hang: its bound passes, and shows nothing more.
                value = FAULTS[name][1] + (3 if side == "torchrun" and name in HANGS else 0)
                run = partial(recover, size=size, name=name, side=side)
                rows.append(
                    Measurement(
                        "recover", f"{size}, {name}, {side}", run, 50, value,
                        device_gb=24 if size == "large" else 8,
                        on_cpu=(size, name, side) in REHEARSED,
                    )
                )  # fmt: skip
    return rows


def recover(kit: Kit, size: str, name: str, side: str) -> Figures:
    nodes = 1 if size == "large" else 2
    options: dict[str, Any] = {"num_ranks": nodes**2, "shard": 1 if size == "large" else 2}
    environment = {}
    config = SMALL if size == "small" or kit.rehearse else BIG
    options["options"] = ("--config", json.dumps(config))
    if not kit.rehearse:
        options["options"] += ("--dtype", "bfloat16")
        options["gpu"] = 1 if size == "large" else 0
        environment = {"CUDA_VISIBLE_DEVICES": "0"}
        if size == "small":
            environment["BENCH_SHARE_GPU"] = shared_backend(kit)
    # Holdfast has a GPU's devices from the node; a rank that shares one has it by its variables.
    chosen = environment if size == "small" or side == "torchrun" else {}
    spares = {"spares": 1} if name == LOST and side == "Holdfast" else {}
    tuned = {"tuned": True} if side == "torchrun" else {}

    def build(workload: Workload) -> Any:
        return SIDES[side](workload, nodes=nodes, **spares, **tuned)  # type: ignore[arg-type]

    if name == COMPILED:
        options["options"] += ("--compile",)
    provoke = FAULTS[name][0]
    if name == LOST and size == "large":
        provoke = cases.lose_store_node  # there is no other
    bound_s = 40.0 if side == "torchrun" and name in HANGS else 90.0
    case = Case(name, side, build, provoke, bound_s, kit.size(90.0, 300.0))
    done = cases.run(case, environment=chosen, **options)
    if done.seconds is None and done.launch_s is None:
        raise RuntimeError(done.note)
    figures: Figures = {"seconds": done.seconds, "steps_lost": done.steps_lost}
    figures |= {"launch_s": done.launch_s, "step_s": done.step_s}
    figures |= {"parts_s": done.phases, "parts of the slowest rank_s": done.parts}
    return {**figures, "note": done.note} if done.note else figures


FLOORS = """
import sys, time
import torch, torch.distributed as dist
began = time.perf_counter()
device = torch.device(sys.argv[1])
torch.zeros(1, device=device)
if device.type == "cuda":
    torch.cuda.synchronize()
context_s = time.perf_counter() - began
began = time.perf_counter()
options = {"device_id": torch.device("cuda", 0)} if device.type == "cuda" else {}
kind = "nccl" if device.type == "cuda" else "gloo"
dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1, **options)
values = torch.ones(1, device=device)
dist.all_reduce(values)
assert float(values) == 1
group_s = time.perf_counter() - began
dist.destroy_process_group()
print(context_s, group_s)
"""


def floors(kit: Kit) -> Figures:
    """Seconds of a bare context, and of a bare process group of one rank after it."""
    rows = []
    for _ in range(kit.size(3, 1)):
        words = [sys.executable, "-c", FLOORS, kit.device]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows.append([float(number) for number in done.stdout.split()])
    contexts, groups = zip(*rows, strict=True)
    return {"context_s": median(contexts), "process_group_s": median(groups)}
