"""The callback: a planned stop costs no step: the trainer saves before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .catalogue import by_name
from .test_callbacks import SCRIPTS
from .test_recovery import BOUND_S, Start, finish, start, trained

__all__ = ["start"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RARELY = 1000
"""Steps between the checkpoints of a script that is to need none."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_trainer_saves_before_a_planned_stop(name: str, start: Start) -> None:
    framework = replace(by_name(name), script=SCRIPTS[name])
    job, log = start(framework, save_every=RARELY, steps=80, pace_s=0.1)
    before = trained(log, job, 8)
    assert job.request("suspend").ok
    job.until(lambda view: view.state == "suspended")
    assert job.request("resume").ok
    after = log.recovery(before, before[-1].time, BOUND_S)
    assert after.step > 8 and after.trained_twice == 0
    finish(job)
