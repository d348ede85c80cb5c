"""The gain from sharing the memory of the import of torch among the ranks of a machine.

    python -m bench.sharing                    # half an hour

Four ranks train independently: all forked from one process that has imported torch, as in the local
backend; two from each of two, as with two agents on one machine; or each with its own import, as
with torchrun. All three kinds run at once, and one is awake at a time (SIGSTOP, SIGCONT) for turns
of 1 s in random order. The result is the CPU time of a step, which excludes the waits of a
throttled machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import fmean, median, stdev
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from holdfast.workers.agent.linux import processes
from holdfast.workers.agent.pool import preload

from . import conditions
from .contestants.base import ROOT, python
from .contestants.holdfast import NUM_RANKS

RESULTS = Path(__file__).parent / "results"
IMPORTS = (1, 2, NUM_RANKS)
"""Number of processes that import torch for the four ranks."""
TURN_S = 1.0
WARM_STEPS = 5


def main() -> int:
    if sys.argv[1:2] == ["host"]:
        host(Path(sys.argv[2]), [int(word) for word in sys.argv[3:]])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=20, help="starts of each kind")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each kind in each")
    parser.add_argument("--out", type=Path, default=RESULTS / "sharing", help="without suffix")
    options = parser.parse_args()
    facts, quiet = conditions.describe(), conditions.wait_until_quiet()
    found: list[dict[int, float]] = []
    for number in range(options.reps):
        first = number % len(IMPORTS)
        found.append(measure(IMPORTS[first:] + IMPORTS[:first], options.rounds))
        print(number + 1, {kind: round(cpu_s, 4) for kind, cpu_s in found[-1].items()}, flush=True)
        write(options.out, facts, quiet, found, options.rounds)
    print(options.out.with_suffix(".md").read_text())
    return 0


class Ranks:
    """The four of one kind."""

    def __init__(self, directory: Path, num_imports: int) -> None:
        path = directory / str(num_imports)
        np.zeros((NUM_RANKS, 3)).tofile(path)
        self.progress = np.memmap(path, dtype=float, shape=(NUM_RANKS, 3))
        """Each rank has its pid, its steps, and its CPU seconds at the end of the last."""
        each = NUM_RANKS // num_imports
        environment = {
            **os.environ, **preload.SINGLE_THREADED, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self.hosts = [
            subprocess.Popen(
                [python(), "-m", "bench.sharing", "host", str(path), *map(str, range(i, i + each))],
                env=environment,
            )
            for i in range(0, NUM_RANKS, each)
        ]
        while self.progress[:, 1].min() < WARM_STEPS:
            assert all(host.poll() is None for host in self.hosts), "a host ended"
            time.sleep(0.1)
        self.tell(signal.SIGSTOP)

    def tell(self, number: signal.Signals) -> None:
        for pid in self.progress[:, 0]:
            os.kill(int(pid), number)

    def end(self) -> None:
        """Hosts have no other children, and these end with them, stopped or not."""
        for one in self.hosts:
            one.kill()
            one.wait()


def measure(kinds: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Kind -> CPU seconds of a step, mean over its ranks. They are started in this order."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as started:
        sides: dict[int, Ranks] = {}
        for kind in kinds:
            sides[kind] = Ranks(Path(directory), kind)
            started.callback(sides[kind].end)
        before = {kind: np.array(side.progress) for kind, side in sides.items()}
        order = list(kinds)
        for _ in range(rounds):
            random.shuffle(order)
            for kind in order:
                sides[kind].tell(signal.SIGCONT)
                time.sleep(TURN_S)
                sides[kind].tell(signal.SIGSTOP)
        taken = {kind: np.array(side.progress) - before[kind] for kind, side in sides.items()}
        return {kind: float(fmean(taken[kind][:, 2] / taken[kind][:, 1])) for kind in IMPORTS}


# -- in the processes that are measured ------------------------------------------------------------
def host(progress: Path, ranks: list[int]) -> NoReturn:
    preload.preload()
    parent = os.getpid()
    for rank in ranks:
        if os.fork() == 0:
            try:
                processes.die_with(parent)
                train(np.memmap(progress, dtype=float, shape=(NUM_RANKS, 3))[rank], rank)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    os.wait()
    os._exit(1)  # and the others with it


def train(progress: Any, rank: int) -> NoReturn:
    """The workload of the other benches (train.py), in a world of one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from holdfast.orchestrator.api.v1alpha1 import Pretrain

    from .train import Trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    session: Any = SimpleNamespace(
        fsdp_mesh=mesh, device="cpu", data_parallel_rank=rank, data_parallel_size=NUM_RANKS
    )
    trainer = Trainer(session, Pretrain(steps=1), fresh=True, local=False)
    progress[0] = os.getpid()
    step = 0
    while True:
        trainer.step(step)
        step += 1
        progress[2] = time.process_time()
        progress[1] = step


# -- what it says ----------------------------------------------------------------------------------
def write(
    out: Path, facts: dict[str, str], quiet: float, found: list[dict[int, float]], rounds: int
) -> None:
    lines = ["# Ranks that share the memory of one import of torch, and ranks that do not", ""]
    lines += [f"{name}: {value}. " for name, value in facts.items()]
    lines += [
        f"Busy cores before the run: {quiet:.2f} of {os.cpu_count()}. {len(found)} starts of each "
        f"kind, {rounds} turns of {TURN_S:g} s in each. {NUM_RANKS} ranks, each a world of one, "
        "FSDP2 over gloo, one thread, 3.3 M parameters.",
        "",
        "| imports of torch for four ranks | CPU time of a step, s, mean | "
        "beside one import: mean | standard error | median |",
        "|---|---|---|---|---|",
    ]
    for kind in IMPORTS:
        ratios = [start[kind] / start[IMPORTS[0]] for start in found]
        error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        mean_s = fmean(start[kind] for start in found)
        says = "|||" if kind == IMPORTS[0] else (
            f"{fmean(ratios):.3f}x | {error:.3f} | {median(ratios):.3f}x |"
        )  # fmt: skip
        lines.append(f"| {kind} | {mean_s:.4f} | {says}")
    results = {"conditions": facts, "turns": rounds, "starts": found}
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
