"""Survivors of a kill keep their process, and training is what it would have been: kills of random
workers and nodes at random moments, also while the job recovers from the one before."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.documents import job_document

from .local_rig import Job, last_state

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SCRIPT = """\
import ctypes, os, sys, time
import psutil, torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from holdfast import session

TOTAL, KIND = int(sys.argv[1]), sys.argv[2]


def sample(step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


s = session.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
if KIND == "ddp":
    # Its buckets stay, so that sums have the same order after a restart.
    model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
else:
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=s.fsdp_mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
s.restore(model, optimizer)


def train(step):
    if s.rank == 1 and step % 7 == 3:
        time.sleep(0.05)
    if s.rank == 2 and step % 7 == 5:
        ctypes.CDLL(None).usleep(50_000)
    if s.rank == 3 and step % 11 == 5:
        sum(range(3_000_000))  # in C, with the interpreter's lock
    part = sample(step).chunk(s.data_parallel_size)[s.data_parallel_rank]
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


for step in s.steps(TOTAL):
    with s.attempt():
        if s.generation == 1 and s.rank == 3 and step == int(os.environ.get("LOST_AT", -1)):
            psutil.Process().parent().parent().kill()  # the agent of this node
            time.sleep(60)
        loss = train(step)
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        s.step(step, loss=loss, total_steps=TOTAL)
        with open("steps.txt", "a") as log:
            where = f"{s.rank} {step} {s.generation} {os.getpid()} {id(model)}"
            log.write(f"{where} {total.item():.6f}\\n")
        time.sleep(0.02)
s.finish()
session.leave()
"""


def scripted(place: Path, kind: str, steps: int, **changes: Any) -> Job:
    place.mkdir()
    (place / "train.py").write_text(SCRIPT)
    shard = {"hsdp": 2, "fsdp": 4, "ddp": 1}[kind]
    document = job_document(
        f"kept-{kind}",
        {
            "entrypoint": {"script": "train.py", "args": [str(steps), kind]},
            "nodes": {"min": 2, "max": 2},
            "workersPerNode": 2,
            "resources": {"cpu": 1, "gpu": 0},
            "parallelism": {"shard": shard},
            "recovery": {
                "keepProcesses": "auto",
                "budgets": {"infrastructure": {"restarts": 1000}},
                "badNodeStrikes": 1000,
            },
            "checkpoint": {"storage": {"everySteps": 50}, "memory": {"everySteps": 1}},
            **changes,
        },
    )
    return Job(place, document)


class Steps:
    """What the ranks of a job have written after each step."""

    def __init__(self, place: Path) -> None:
        lines = [line.split() for line in (place / "steps.txt").read_text().splitlines()]
        self.losses: dict[int, str] = {}
        self.of: dict[tuple[int, int], tuple[str, str]] = {}
        """(rank, generation) -> pid and id of the model."""
        for rank, step, generation, pid, model, loss in lines:
            before = self.losses.setdefault(int(step), loss)
            assert before == loss, f"step {step} of rank {rank}: {loss} after {before}"
            self.of[int(rank), int(generation)] = (pid, model)


def kill_now_and_then(job: Job, kinds: list[str], rng: random.Random, until_step: int) -> int:
    """Kills at random moments; a third of them while the job recovers."""
    num = 0
    while (view := job.until(lambda view: bool(view.generation))).step < until_step:
        kind = rng.choice(kinds)
        try:
            if kind == "node":
                job.kill(job.agent_pid(rng.choice(view.nodes).name))
            elif pids := job.worker_pids():
                number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
                job.kill(rng.choice(list(pids.values())), number)
        except (ProcessLookupError, KeyError, psutil.NoSuchProcess):
            continue
        num += 1
        if rng.random() < 1 / 3:
            time.sleep(rng.uniform(0, 0.5))
            continue
        done = len(view.incidents)
        seen = job.until(lambda v: v.state == "running" and len(v.incidents) > done)  # noqa: B023
        more = seen.step + rng.randint(3, 12)
        job.until(lambda v: v.step >= more or v.state != "running")  # noqa: B023
    return num


@pytest.fixture
def started() -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.end()


@pytest.mark.parametrize("kind", ["hsdp", "fsdp", "ddp"])
def test_losses_after_kills_at_random_moments_are_those_of_an_undisturbed_job(
    tmp_path: Path, started: list[Job], kind: str
) -> None:
    steps, num = 150, 0
    for name in ("calm", "killed"):
        job = scripted(tmp_path / name, kind, steps)
        started.append(job)
        job.run()
        if name == "killed":
            job.until(lambda view: view.step >= 5)
            num = kill_now_and_then(job, ["worker"] * 4 + ["node"], random.Random(kind), steps - 30)
        assert job.wait().state == "succeeded", job.output()
    calm, killed = (Steps(job.place) for job in started)
    assert killed.losses == calm.losses and sorted(calm.losses) == list(range(steps))
    assert last_state(started[1], steps - 1) == last_state(started[0], steps - 1)
    pairs = [(killed.of[at], killed.of.get((at[0], at[1] + 1))) for at in killed.of]
    kept = sum(before == after for before, after in pairs)
    print(f"{kind}: {num} kills; in {len(pairs)} changes of generation {kept} processes were kept")
    assert kept >= num / 2


@pytest.mark.parametrize("kind", ["hsdp", "ddp"])
def test_a_job_that_shrinks_trains_on_as_one_whose_workers_start_again(
    tmp_path: Path, started: list[Job], kind: str
) -> None:
    for keeps in ("auto", "never"):
        job = scripted(
            tmp_path / keeps,
            kind,
            60,
            env={"LOST_AT": "20"},
            nodes={"min": 1, "max": 2},
            recovery={
                "keepProcesses": keeps, "replacementWaitSeconds": 0, "growDelaySeconds": 3600
            },
        )  # fmt: skip
        started.append(job)
        job.run()
        view = job.wait()
        assert view.state == "succeeded", job.output()
        assert [one.world_size_after for one in view.incidents] == [2]
        decision = view.incidents[0].decision
        assert ("2 of 2 workers keep their process" in decision) == (keeps == "auto"), decision
    kept, forked = (Steps(job.place) for job in started)
    assert kept.losses == forked.losses and sorted(kept.losses) == list(range(60))
    assert last_state(started[0], 59) == last_state(started[1], 59)
    assert sorted(kept.of[rank, 2] for rank in (0, 1)) == sorted(kept.of[r, 1] for r in (0, 1))


@pytest.mark.parametrize("kind", ["hsdp", "ddp"])
def test_a_resized_job_keeps_its_processes_and_its_training(
    tmp_path: Path, started: list[Job], kind: str
) -> None:
    for name in ("calm", "resized"):
        job = scripted(tmp_path / name, kind, 120, nodes={"min": 1, "max": 2})
        started.append(job)
        job.run()
        for nodes in (1, 2) if name == "resized" else ():
            before = job.until(lambda view: view.state == "running" and view.step >= 5)
            assert job.request("resize", nodes=nodes).ok
            more = before.step + 5
            job.until(lambda v: v.generation > before.generation and v.step >= more)  # noqa: B023
        view = job.wait()
        assert view.state == "succeeded", job.output()
    assert [one.world_size_after for one in view.incidents] == [2, 4]
    assert all("2 of " in one.decision and "keep their" in one.decision for one in view.incidents)
    calm, resized = (Steps(job.place) for job in started)
    assert {resized.of[rank, 3] for rank in (0, 1)} == {resized.of[rank, 1] for rank in (0, 1)}
    size = {gen: max(rank for rank, at in resized.of if at == gen) + 1 for gen in (1, 2, 3)}
    assert size == {1: 4, 2: 2, 3: 4} and sorted(resized.losses) == list(range(120))
    ends, end = (last_state(job, 119) for job in started)
    assert end.keys() == ends.keys()
    before, after = (float(one.losses[119]) for one in (calm, resized))
    assert abs(after - before) < 1e-4 * abs(before)


LOOPS = """\
import time
import torch
from holdfast import session

s = session.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
s.restore(model, optimizer)
size, rank = s.data_parallel_size, s.data_parallel_rank
for name, until in (("A", 15), ("B", 30)):
    for step in s.steps(until):
        with s.attempt():
            part = torch.ones(8, 16)[rank::size] * step  # of the size at the start
            assert s.data_parallel_size > s.data_parallel_rank
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            s.step(step, total_steps=30)
            with open("steps.txt", "a") as log:
                log.write(f"{step} {name} {len(part) * s.world_size}\\n")
            time.sleep(0.3 if name == "B" and s.generation == 1 else 0.02)
s.finish()
session.leave()
"""


@pytest.mark.parametrize(
    ("shrinks", "why"),
    [(False, "before the first one of this loop"), (True, "outside its")],
)
def test_a_loop_whose_attempts_cannot_go_on_as_they_are_is_forked_instead(
    tmp_path: Path, started: list[Job], shrinks: bool, why: str
) -> None:
    changes: dict[str, Any] = {"workersPerNode": 1, "parallelism": {"shard": 1}}
    memory = {"everySteps": 1 if shrinks else 12}
    changes["checkpoint"] = {"storage": {"everySteps": 50}, "memory": memory}
    if shrinks:
        changes["nodes"] = {"min": 1, "max": 2}
        changes["recovery"] = {
            "keepProcesses": "auto", "replacementWaitSeconds": 0, "growDelaySeconds": 3600
        }  # fmt: skip
    job = scripted(tmp_path / "job", "ddp", 30, **changes)
    (job.place / "train.py").write_text(LOOPS)
    started.append(job)
    job.run()
    view = job.until(lambda view: view.step >= 15)
    job.kill(job.agent_pid(view.nodes[1].name) if shrinks else job.worker_pids()[1])
    view = job.wait()
    assert view.state == "succeeded", job.output()
    assert len(view.incidents) == 2 and why in view.incidents[1].evidence
    lines = set((job.place / "steps.txt").read_text().splitlines())
    assert lines == {f"{step} {'AB'[step >= 15]} 8" for step in range(30)}
