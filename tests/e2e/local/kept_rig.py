"""Jobs whose survivors keep their process, and kills of them at random moments."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.documents import job_document

from .local_rig import BOUND_S, Job

SIZE = 69
"""Samples of the kinds that read with s.data."""

SCRIPT = """\
import contextlib, ctypes, itertools, os, sys, time
import psutil, torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from holdfast import session

TOTAL = int(sys.argv[1])
KIND, _, LOADERS = sys.argv[2].partition("-")  # "ddp-1": s.data, whose loader has one process
COMPILED = len(sys.argv) > 3  # the backend
PLAIN = "PLAIN" in os.environ  # a loop without attempts: the script runs again


def sample(step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def collate(rows):
    made = torch.stack(rows)
    if LOADERS == "0":
        made[:, 1:] += 0.1 * torch.randn(len(rows), 16)  # drawn in the process of the rank
    return made


s = session.init()
torch.manual_seed(0)
layers = (torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False))
model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
if COMPILED:
    for layer in model if KIND != "ddp" else [model]:
        layer.compile(backend=sys.argv[3])
if KIND == "ddp":
    # Its buckets stay, so that sums have the same order after a restart.
    model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
else:
    if KIND == "tensor":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, s.mesh["tensor"], plan, src_data_rank=None)  # sends nothing
    for layer in (model[0], model):
        fully_shard(layer, mesh=s.fsdp_mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if LOADERS:  # an epoch of nine batches in five steps
    rows = [torch.cat([torch.tensor([float(i)]), sample(i)[0]]) for i in range(SIZE)]
    loader = torch.utils.data.DataLoader(
        rows, batch_size=2, shuffle=True, num_workers=int(LOADERS), collate_fn=collate,
        persistent_workers=LOADERS == "2",
    )
    loader = s.data(loader, global_batch=8, epochs=TOTAL // 5)
begin = s.restore(model, optimizer)


def parts(step):
    if LOADERS:
        return itertools.islice(loader, 2)
    return [sample(step).chunk(s.data_parallel_size)[s.data_parallel_rank]]


def train(step, ids):
    if s.rank == 1 and step % 7 == 3:
        time.sleep(0.05)
    if s.rank == 2 and step % 7 == 5:
        ctypes.CDLL(None).usleep(50_000)
    if s.rank == 3 and step % 11 == 5 and not COMPILED:  # 0.05 s, or 0.7 s at a load of 15
        sum(range(3_000_000))  # in C, with the interpreter's lock
    if s.rank == 3 and step % 307 == 300:
        ctypes.PyDLL(None).sleep(2)  # with the lock, too long to be halted
    for rows in parts(step):
        ids += rows[:, 0].int().tolist() if LOADERS else []
        part = rows[:, -16:]
        loss = F.mse_loss(model(part), part.roll(1, -1))
        try:
            loss.backward()
        except RuntimeError:
            if s.rank != 1:
                raise
            time.sleep(60)  # this rank catches what is not its error, and waits
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


for step in range(begin, TOTAL) if PLAIN else s.steps(None if LOADERS else TOTAL):
    with contextlib.nullcontext() if PLAIN else s.attempt():
        if s.generation == 1 and s.rank == 3 and step == int(os.environ.get("LOST_AT", -1)):
            psutil.Process().parent().parent().kill()  # the agent of this node
            time.sleep(60)
        loss = train(step, ids := [])
        with open("samples.txt", "a") as log:  # no peer can end this step before
            log.write(f"{step} {s.generation} {ids}\\n")
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        s.step(step, loss=loss, total_steps=TOTAL)
        with open("steps.txt", "a") as log:
            where = f"{s.rank} {step} {s.generation} {os.getpid()} {id(model)}"
            log.write(f"{where} {total.item():.6f}\\n")
        time.sleep(0.2 if s.generation == int(os.environ.get("SLOW_IN", 0)) else 0.02)
s.finish()
session.leave()
"""

AXES = {
    "hsdp": {"shard": 2}, "fsdp": {"shard": 4}, "ddp": {"shard": 1},
    "tensor": {"shard": 2, "tensor": 2},
}  # fmt: skip
NUM_RANKS = 4
KINDS = {"worker": 8, "rank 0": 3, "twins": 3, "node": 2, "stop": 1}


def scripted(place: Path, kind: str, steps: int, backend: str = "", /, **changes: Any) -> Job:
    """`backend`: of torch.compile; empty: the model is not compiled."""
    arguments = [str(steps), kind, *([backend] if backend else [])]
    place.mkdir(parents=True, exist_ok=True)
    (place / "train.py").write_text(SCRIPT.replace("SIZE", str(SIZE)))
    document = job_document(
        f"kept-{kind}",
        {
            "entrypoint": {"script": "train.py", "args": arguments},
            "nodes": {"min": 2, "max": 2},
            "workersPerNode": 2,
            "resources": {"cpu": 1, "gpu": 0},
            "parallelism": AXES[kind.partition("-")[0]],
            "recovery": {
                "keepProcesses": "auto",
                "budgets": {
                    name: {"restarts": 10_000} for name in ("infrastructure", "hang")
                },
                "badNodeStrikes": 10_000,
            },
            "checkpoint": {"storage": {"everySteps": 50}, "memory": {"everySteps": 1}},
            **changes,
        },
    )  # fmt: skip
    return Job(place, document)


class Steps:
    """Lines that the ranks of a job have written after each step, read as they come."""

    plain = False
    """A kept process makes its model again."""

    def __init__(self, place: Path) -> None:
        self._file, self._read = place / "steps.txt", 0
        self.losses: dict[int, str] = {}
        self.of: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank, generation) -> pid and id of the model."""
        self.last: dict[int, tuple[int, int]] = {}
        self.read()

    def read(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._file.open() as log:
            log.seek(self._read)
            text = log.read()
            whole = text[: text.rfind("\n") + 1]
            self._read += len(whole)
            for line in whole.splitlines():
                rank, step, generation, pid, model, loss = line.split()
                before = self.losses.setdefault(int(step), loss)
                assert before == loss, f"step {step} of rank {rank}: {loss} after {before}"
                self.of[int(rank), int(generation)] = (int(pid), int(model))
                self.last[int(rank)] = int(step), int(generation)

    def expect_each_sample_once(self) -> None:
        newest: dict[int, tuple[int, list[int]]] = {}
        for line in (self._file.parent / "samples.txt").read_text().splitlines():
            step, generation, ids = line.split(maxsplit=2)
            at, before = newest.get(int(step), (0, []))
            if int(generation) >= at:
                kept = before if int(generation) == at else []
                newest[int(step)] = int(generation), kept + json.loads(ids)
        epoch: list[int] = []
        for number in sorted(newest):
            epoch += newest[number][1]
            if len(epoch) >= SIZE:
                assert sorted(epoch) == list(range(SIZE)), f"epoch that ends with step {number}"
                epoch = []
        assert newest and not epoch

    @property
    def generation(self) -> int:
        return max((generation for _, generation in self.last.values()), default=0)

    def processes(self, generation: int) -> dict[int, tuple[int, int]]:
        return {rank: one for (rank, at), one in self.of.items() if at == generation}


class Killer:
    """Kills processes of a job at random moments, `nested` of them while the job recovers."""

    def __init__(
        self, job: Job, seed: str, kinds: dict[str, int] = KINDS, nested: float = 1 / 3
    ) -> None:
        self.job, self.rng, self.kinds, self.nested = job, random.Random(seed), kinds, nested
        self.steps = Steps(job.place)
        self.killed: Counter[str] = Counter()
        self.num_recoveries = self.num_survivors = self.num_kept = 0
        """Recoveries from single kills, processes that these left alive, and kept ones."""

    @property
    def num_kills(self) -> int:
        return self.killed.total()

    def until(self, steps: int, generation: int) -> None:
        """Wait until all ranks have done so many more steps in a generation after this one."""
        deadline, begin = time.monotonic() + BOUND_S, None
        while True:
            self.steps.read()
            now = [step for step, at in self.steps.last.values() if at > generation]
            if len(now) == NUM_RANKS:
                begin = min(now) if begin is None else begin
                if min(now) >= begin + steps:
                    return
            assert self.job.command.poll() is None, self.job.output()[-3000:]
            assert time.monotonic() < deadline, f"no step: {self.steps.last}"
            time.sleep(0.01)

    def recover(self) -> dict[str, Any]:
        """Kill, sometimes again during the recovery, and wait for a step: what came of it."""
        self.steps.read()
        begin = self.steps.generation
        before = self.steps.processes(begin)
        kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
        time.sleep(self.rng.uniform(0, 0.06))
        at_s = time.monotonic()
        try:
            killed = self._strike(kind, {rank: pid for rank, (pid, _) in before.items()})
        except ProcessLookupError:  # the last kill came after the steps that were waited for
            self.until(0, begin)
            return self.recover()
        kills = [kind]
        while self.rng.random() < self.nested and len(kills) < 3:
            time.sleep(self.rng.uniform(0, 0.4))
            again = self.rng.choice(["worker", "worker", "rank 0", "node"])
            with contextlib.suppress(ProcessLookupError, LookupError, psutil.Error):
                self._strike(again, self.job.worker_pids())
                kills.append(again)
        self.until(0, begin)
        took_s, now = time.monotonic() - at_s, self.steps.processes(self.steps.generation)
        same = slice(1 if self.steps.plain else 2)
        kept = [rank for rank in before if now.get(rank, ())[same] == before[rank][same]]
        if len(kills) == 1:
            self.num_recoveries += 1
            self.num_survivors += NUM_RANKS - killed
            self.num_kept += len(kept)
        return {"kills": kills, "generations": [begin, self.steps.generation], "kept": kept,
                "survivors": NUM_RANKS - killed, "seconds": round(took_s, 3)}  # fmt: skip

    def _strike(self, kind: str, pids: dict[int, int]) -> int:
        """Kill; `pids` are those of the ranks. The number of ranks that this ends."""
        chosen = [self.rng.choice([pids[rank] for rank in pids if rank])]
        if kind == "node":
            agents = [p.pid for p in self.job.processes() if p.info["name"].startswith("hf-node")]
            chosen = [self.rng.choice(agents)]
        elif kind == "rank 0":
            chosen = [pids[0]]
        elif kind == "twins":
            rank = self.rng.choice([0, 1])
            chosen = [pids[rank], pids[rank + 2]]
        for pid in chosen:
            self.job.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        self.killed[kind] += 1
        return 2 if kind == "node" else len(chosen)
