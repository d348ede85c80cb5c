"""Survivors of a kill keep their process, and training is what it would have been: kills of random
workers and nodes at random moments, also while the job recovers from the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.runtime.observe.view import JobView

from .kept_rig import KINDS, Killer, Steps, scripted
from .local_rig import Job, last_state
from .test_compile import needs_compiler

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 100
CALM: dict[str, Job] = {}
"""Strategy -> its job without kills, which several tests compare with."""


@pytest.fixture
def started() -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.end()


@pytest.fixture
def calm(tmp_path_factory: pytest.TempPathFactory, started: list[Job]) -> Callable[[str], Job]:
    def run(kind: str) -> Job:
        if kind not in CALM:
            job = scripted(tmp_path_factory.mktemp("calm"), kind, STEPS)
            started.append(job)
            job.run()
            assert job.wait().state == "succeeded", job.output()
            CALM[kind] = job
        return CALM[kind]

    return run


@pytest.mark.parametrize(
    ("kind", "plain"),
    [*((kind, False) for kind in ("hsdp", "fsdp", "ddp", "tensor", "hsdp-1")), ("fsdp", True)],
)
def test_losses_after_kills_at_random_moments_are_those_of_an_undisturbed_job(
    tmp_path: Path, started: list[Job], calm: Callable[[str], Job], kind: str, plain: bool
) -> None:
    """The script of a plain loop runs again."""
    env = {"PLAIN": "1"} if plain else {}
    job = scripted(tmp_path / "killed", kind, STEPS, env=env)
    started.append(job)
    job.run()
    killer = Killer(job, kind, KINDS | {"stop": 0})
    killer.steps.plain = plain
    killer.until(3, 0)
    while killer.steps.last[0][0] < STEPS - 10:
        killer.recover()
        killer.until(killer.rng.randint(0, 3), killer.steps.generation - 1)
    assert job.wait().state == "succeeded", job.output()
    killer.steps.read()
    want, last = Steps(calm(kind).place), STEPS - 1
    assert killer.steps.losses == want.losses and sorted(want.losses) == list(range(STEPS))
    assert last_state(job, last) == last_state(calm(kind), last)
    if "-" in kind:
        killer.steps.expect_each_sample_once()
    assert killer.num_kills >= STEPS / 5
    assert killer.num_kept >= 3 / 4 * killer.num_survivors


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_survivors_of_kills_keep_what_they_have_compiled(
    tmp_path: Path, started: list[Job], backend: str
) -> None:
    cache = {"env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}}
    for name in ("calm", "killed"):
        started.append(scripted(tmp_path / name, "hsdp", 60, backend, **cache))
        started[-1].run()
        if name == "killed":
            killer = Killer(started[-1], "compiled", {"worker": 2, "rank 0": 1}, nested=0)
            for _ in range(4):
                killer.until(3, killer.steps.generation - 1)
                killer.recover()
            logs = started[-1].directory.path.glob("logs/agent-*.log")
            assert killer.num_kept == killer.num_survivors == 12, [log.read_text() for log in logs]
        assert started[-1].wait().state == "succeeded", started[-1].output()
    calm, killed = (Steps(job.place) for job in started)
    assert killed.losses == calm.losses and sorted(calm.losses) == list(range(60))
    assert last_state(started[0], 59) == last_state(started[1], 59)


RESIZED = {"nodes": {"min": 1, "max": 2}, "env": {"SLOW_IN": "2"}}


def resized_twice(job: Job) -> JobView:
    job.run()
    for nodes in (1, 2):
        before = job.until(lambda view: view.state == "running" and view.step >= 5)
        assert job.request("resize", nodes=nodes).ok
        more = before.step + 5
        job.until(lambda v: v.generation > before.generation and v.step >= more)  # noqa: B023
    view = job.wait()
    assert view.state == "succeeded", job.output()
    assert [one.world_size_after for one in view.incidents] == [2, 4]
    return view


def test_compiled_processes_start_again_at_another_size(tmp_path: Path, started: list[Job]) -> None:
    started.append(job := scripted(tmp_path / "resized", "hsdp", STEPS, "aot_eager", **RESIZED))
    view = resized_twice(job)
    decisions = [one.decision for one in view.incidents]
    assert all("start again: torch.compile has compiled" in text for text in decisions), decisions
    steps = Steps(job.place)
    pids = [{steps.processes(at)[rank][0] for at in (1, 2)} for rank in (0, 1)]
    assert [len(one) for one in pids] == [1, 1], "in the smaller world they run the script again"


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


@pytest.mark.parametrize("kind", ["hsdp", "ddp", "ddp-1"])
def test_a_resized_job_keeps_its_processes_and_its_training(
    tmp_path: Path, started: list[Job], calm: Callable[[str], Job], kind: str
) -> None:
    started.append(job := scripted(tmp_path / "resized", kind, STEPS, **RESIZED))
    view = resized_twice(job)
    decisions = [one.decision for one in view.incidents]
    assert all("2 of " in text and "keep their" in text for text in decisions), decisions
    assert view.incidents[1].title.endswith("the new workers are ready"), view.incidents[1]
    resized, last = Steps(job.place), STEPS - 1
    assert {resized.of[rank, 3] for rank in (0, 1)} == {resized.of[rank, 1] for rank in (0, 1)}
    size = {gen: max(rank for rank, at in resized.of if at == gen) + 1 for gen in (1, 2, 3)}
    assert size == {1: 4, 2: 2, 3: 4} and sorted(resized.losses) == list(range(STEPS))
    assert last_state(job, last).keys() == last_state(calm(kind), last).keys()
    if "-" in kind:  # ranks have other shares of a last batch
        resized.expect_each_sample_once()
        return
    before, after = (float(one.losses[last]) for one in (Steps(calm(kind).place), resized))
    assert abs(after - before) < 1e-4 * abs(before)


def test_whole_nodes_train_on_while_new_workers_build(tmp_path: Path, started: list[Job]) -> None:
    elastic = {"nodes": {"min": 1, "max": 2}, "recovery": {"replacementWaitSeconds": 0}}
    started.append(job := scripted(tmp_path, "hsdp", 400, **elastic))
    job.run()
    view = job.until(lambda v: v.state == "running" and v.world_size == 4 and v.step >= 5)
    before, grown = job.worker_pids(), view.generation + 2
    job.kill(before[1])
    view = job.until(lambda v: v.generation == grown and v.state == "running")
    after = job.worker_pids()
    assert (after[0], after[1]) == (before[2], before[3]) and len(after) == 4
    assert [one.world_size_after for one in view.incidents[-2:]] == [2, 4]
    assert view.incidents[-2].decision.endswith("; the others are built beside the running job")
    assert view.incidents[-1].title.endswith("the new workers are ready"), view.incidents[-1]


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
            time.sleep(0.3 if name == "B" and s.generation < 4 else 0.02)
s.finish()
session.leave()
"""


def test_a_loop_whose_attempts_cannot_go_on_as_they_are_is_forked_instead(
    tmp_path: Path, started: list[Job]
) -> None:
    """First the restored step is before the loop, then the world is smaller than it was."""
    job = scripted(
        tmp_path / "job",
        "ddp",
        30,
        workersPerNode=1,
        nodes={"min": 1, "max": 2},
        recovery={
            "keepProcesses": "auto", "replacementWaitSeconds": 0, "growDelaySeconds": 3600
        },
        checkpoint={"storage": {"everySteps": 50}, "memory": {"everySteps": 12}},
    )  # fmt: skip
    (job.place / "train.py").write_text(LOOPS)
    started.append(job)
    job.run()
    job.until(lambda view: view.step >= 15)
    job.kill(job.worker_pids()[1])
    view = job.until(lambda view: view.generation == 3 and view.step >= 16)
    job.kill(job.agent_pid(view.nodes[1].name))
    view = job.wait()
    assert view.state == "succeeded", job.output()
    assert len(view.incidents) == 3
    assert "before the first one of this loop" in view.incidents[1].evidence
    assert "outside its attempts" in view.incidents[2].decision
    lines = set((job.place / "steps.txt").read_text().splitlines())
    assert lines == {f"{step} {'AB'[step >= 15]} 8" for step in range(30)}
