"""Each script, unmodified: after a kill it goes on from its own checkpoint and succeeds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.local.local_rig import Job

from .catalogue import EVERY, FRAMEWORKS, LOG, Framework, by_name, document
from .step_log import Line, StepLog, trained_twice

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BOUND_S = 400.0
SAVE_EVERY = 5

Start = Callable[..., tuple[Job, StepLog]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a job of a framework; it ends with the test."""
    jobs: list[Job] = []

    def run(framework: Framework, **changes: Any) -> tuple[Job, StepLog]:
        fields = {"steps": 40, "save_every": SAVE_EVERY, **changes}
        job = Job(tmp_path, document(framework, tmp_path, **fields))
        job.run()
        jobs.append(job)
        return job, StepLog(tmp_path / LOG)

    yield run
    for job in jobs:
        job.end()


def trained(log: StepLog, job: Job, step: int) -> list[Line]:
    """The lines when `step` has been trained."""

    def reached(lines: list[Line]) -> bool:
        assert job.command.poll() is None or lines[-1].step >= step, job.output()[-3000:]
        return lines[-1].step >= step

    return log.until(reached, BOUND_S)


def finish(job: Job) -> None:
    job.command.wait(BOUND_S)
    assert job.command.returncode == 0, job.output()[-3000:]


@pytest.mark.parametrize("name", [one.name for one in EVERY])
def test_a_killed_worker_costs_the_steps_since_the_scripts_checkpoint(
    name: str, start: Start
) -> None:
    job, log = start(by_name(name))
    before = trained(log, job, SAVE_EVERY + 2)
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    # It may have written another checkpoint meanwhile.
    assert (after.step - 1) % SAVE_EVERY == 0 and after.step > 1
    assert after.trained_twice < SAVE_EVERY + 1
    assert after.world == 4
    finish(job)
    assert log.lines()[-1].step == 40
    view = job.wait()
    assert view.state == "succeeded"
    assert [one.culprit_rank for one in view.incidents] == [1]


@pytest.mark.parametrize("name", ["ddp", "hf", "lightning"])
def test_a_lost_node_is_replaced_and_the_script_goes_on(name: str, start: Start) -> None:
    job, log = start(by_name(name))
    before = trained(log, job, SAVE_EVERY + 2)
    node = job.until(lambda view: True).nodes[-1].name
    job.kill(job.agent_pid(node))
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert after.step > 1 and after.trained_twice <= SAVE_EVERY
    finish(job)
    assert log.lines()[-1].step == 40


@pytest.mark.parametrize("name", [one.name for one in FRAMEWORKS])
def test_a_job_without_a_replacement_goes_on_with_half_of_its_ranks(
    name: str, start: Start
) -> None:
    job, log = start(by_name(name))
    before = trained(log, job, SAVE_EVERY + 2)
    node = job.until(lambda view: True).nodes[-1].name
    assert job.request("chaos", kind="kill-node", node=node, hold_s=600.0).ok
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert (after.world, after.step > 1) == (2, True)
    finish(job)
    assert log.lines()[-1].step == 40
    if name.startswith("zero"):  # its checkpoint is converted, for most of that time
        (incident,) = job.wait().incidents
        assert incident.seconds["total"] > 0.5 * after.seconds


def test_the_steps_of_the_trainer_are_counted_without_a_line_in_the_script(start: Start) -> None:
    """The kill comes in the pause before a step, when all ranks have counted the one before."""
    job, log = start(by_name("hf"), steps=20, pace_s=0.8)
    before = trained(log, job, SAVE_EVERY + 3)
    os.kill(job.worker_pids()[1], signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    finish(job)
    end = job.wait()
    assert (end.step, end.total_steps) == (19, 20) and end.loss is not None
    (incident,) = end.incidents
    assert (incident.steps_lost, incident.steps_lost_at_least) == (after.trained_twice, False)
    assert incident.resumed_after_step == after.step - 2, "the log counts from 1"
    assert after.trained_twice == trained_twice(log.lines())


@pytest.mark.parametrize("name", ["ddp", "hf"])
def test_a_stopped_rank_is_named_although_the_script_says_nothing_to_holdfast(
    name: str, start: Start
) -> None:
    """The rank is named by the state of its process, which the agent reads: neither collectives nor
    posts are needed. A rank that sleeps in its own code is another matter:
    tests/e2e/local/test_silent_scripts.py."""
    job, log = start(by_name(name), steps=400, pace_s=0.1)
    trained(log, job, 40)
    before = log.lines()
    job.kill(job.worker_pids()[1], signal.SIGSTOP)
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert after.step > 1
    incident = job.until(lambda view: bool(view.incidents)).incidents[-1]
    assert (incident.failure_class, incident.culprit_rank) == ("hang", 1)


def test_a_suspended_script_goes_on_from_its_checkpoint(start: Start) -> None:
    job, log = start(by_name("ddp"), steps=60)
    before = trained(log, job, SAVE_EVERY + 2)
    assert job.request("suspend").ok
    job.until(lambda view: view.state == "suspended")
    assert job.request("resume").ok
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert (after.step - 1) % SAVE_EVERY == 0 and after.step > 1
    finish(job)
    assert log.lines()[-1].step == 60


TORN = {
    "hf": ("checkpoint-*/model.safetensors", b"\x10"),
    "trl": ("checkpoint-*/adapter_model.safetensors", b"\x10"),
    "fsdp2": ("step-*/.metadata", b""),
    "ddp": ("snapshot.pt", b"PK\x03\x04 the beginning of a file of torch.save"),
}
"""Framework -> a file that a kill in the middle of a save leaves, and its content; empty: none."""


@pytest.mark.parametrize("name", list(TORN))
def test_a_torn_newest_checkpoint_does_not_end_the_job(
    name: str, start: Start, tmp_path: Path
) -> None:
    job, log = start(by_name(name), steps=60, pace_s=0.2)
    before = trained(log, job, 2 * SAVE_EVERY + 2)
    pattern, content = TORN[name]
    victim = job.worker_pids()[1]
    newest = max((tmp_path / "out").glob(pattern), key=lambda path: path.stat().st_mtime_ns)
    newest.unlink()
    if content:
        newest.write_bytes(content)
    os.kill(victim, signal.SIGKILL)
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert (after.step == 1) == (name == "ddp")  # which has one file: nothing is left
    finish(job)
    assert log.lines()[-1].step == 60
