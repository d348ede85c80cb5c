"""A job under another name continues from adopted checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .local_rig import BOUND_S, Job, holdfast, spec

pytestmark = pytest.mark.e2e


def adopt(job: Job, target: str, whose: str) -> subprocess.CompletedProcess[str]:
    return holdfast(job, "checkpoint", "adopt", target, "--job", whose, "--yes")


def test_a_renamed_job_continues_from_adopted_checkpoints(tmp_path: Path) -> None:
    tier = {"path": str(tmp_path / "tier"), "storage": {"everySteps": 20}}
    before = Job(tmp_path, spec("before", 100_000, checkpoint=tier))
    try:
        before.run()
        before.until(lambda view: bool(view.checkpoints))
        refused = adopt(before, "before", "after")
        assert refused.returncode == 2
        assert "job: got before, running; expected a job that has ended" in refused.stderr
        assert before.request("cancel").ok
        last = before.wait().checkpoints[-1].step
    finally:
        before.end()

    after = Job(tmp_path, spec("after", last + 20, checkpoint=tier))
    try:
        after.run()
        after.command.wait(BOUND_S)
        assert after.command.returncode == 2
        assert f"adopt {tier['path']} --job after" in " ".join(after.output().split())
        given = adopt(before, "before", "after")
        assert given.returncode == 0 and "of before in" in given.stdout, given.stderr
        after.run()
        view = after.wait()
        assert (view.state, view.step) == ("succeeded", last + 19), after.output()
        assert view.generation > 1, "a new generation, so that no checkpoint directory is reused"
        # What `run` prints of a short start depends on timing, so read the journal.
        events = holdfast(after, "debug", "events", "after").stdout
        assert f"from storage after {last + 1} steps" in events
    finally:
        after.end()
