"""Recovery does not change training: the losses and bytes are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .local_rig import Job, last_state, losses_of, spec

pytestmark = pytest.mark.e2e

STEPS = 160


class Undisturbed(NamedTuple):
    losses: dict[int, str]
    state: dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    job = Job(tmp_path_factory.mktemp("undisturbed"), document())
    job.run()
    assert job.wait().state == "succeeded", job.output()
    losses, state = losses_of(job), last_state(job, STEPS - 1)
    assert sorted(losses) == list(range(STEPS))
    assert len([name for name in state if name.endswith(" extra")]) == 2
    assert any(".exp_avg_sq" in name for name in state)
    return Undisturbed(losses, state)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, document())
    job.run()
    yield job
    job.end()


def document() -> dict[str, Any]:
    return spec("losses", STEPS, recovery={"growDelaySeconds": 0.5})


def test_kills_of_a_worker_and_a_node_change_no_loss_and_no_weight(
    job: Job, undisturbed: Undisturbed
) -> None:
    job.until(lambda view: view.step >= 20)
    job.kill(job.worker_pids()[1])
    job.running(incidents=1, steps=15)
    job.kill(job.agent_pid("node-1"))
    job.running(incidents=2, steps=15)
    job.kill(job.worker_pids()[2])
    view = job.wait()
    assert losses_of(job) == undisturbed.losses
    assert last_state(job, STEPS - 1) == undisturbed.state
    assert [i.failure_class for i in view.incidents] == ["infrastructure"] * 3
    assert all(i.restored_from == "memory" for i in view.incidents)
    assert all(i.steps_lost is not None and i.steps_lost <= 1 for i in view.incidents)


def test_a_job_that_shrinks_and_grows_again_has_the_same_losses(
    job: Job, undisturbed: Undisturbed
) -> None:
    """Sums have another order at another world size, so losses differ by rounding."""
    job.until(lambda view: view.step >= 20)
    assert job.request("resize", nodes=1).ok
    job.until(lambda view: view.state == "running" and view.world_size == 2)
    assert job.request("resize", nodes=2).ok
    job.until(lambda view: view.state == "running" and view.world_size == 4)
    view = job.wait()
    assert [one.world_size_after for one in view.incidents] == [2, 4]
    losses = losses_of(job)
    assert sorted(losses) == list(range(STEPS))
    for step, loss in undisturbed.losses.items():
        assert float(losses[step]) == pytest.approx(float(loss), rel=0.02, abs=0.02)
