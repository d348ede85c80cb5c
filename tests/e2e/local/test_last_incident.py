"""A script that is started again can read why."""

from __future__ import annotations

import signal
from pathlib import Path
from textwrap import dedent

import pytest

from tests.documents import job_document

from .local_rig import Job
from .test_entrypoints import log_of, writers_of

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, time
from pathlib import Path
from holdfast import session
from holdfast.integrations import last_incident

kept = Path(f"rank-{os.environ['RANK']}.step")
start = int(kept.read_text()) + 1 if kept.exists() else 0
incident = last_incident()
if incident is None:
    print("first start", flush=True)
else:
    ago_s = time.time() - incident.at_ns / 1e9
    print(incident.number, incident.failure_class, incident.title, 0 < ago_s < 60,
          incident.last_step >= 5, incident.decision, sep=" | ", flush=True)
for step in range(start, 60):
    time.sleep(0.1)
    session.report(step)
    kept.write_text(str(step))
"""


def test_a_script_reads_which_incident_led_to_its_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    one = Job(tmp_path, job_document("restarted", {
            "entrypoint": {"script": "train.py"},
            "workersPerNode": 2,
            "resources": {"cpu": 1, "gpu": 0},
        }))  # fmt: skip
    one.run()
    try:
        one.until(lambda view: view.step >= 8)
        (pid,) = writers_of(one)[1]
        one.kill(pid, signal.SIGKILL)
        view = one.wait()
        assert view.state == "succeeded" and len(view.incidents) == 1
        (incident,) = view.incidents
        expected = ["1", "infrastructure", incident.title, "True", "True", incident.decision]
        for rank in (0, 1):
            assert log_of(one, rank) == "first start\n"
            assert log_of(one, rank, 2).strip().split(" | ") == expected
    finally:
        one.end()
