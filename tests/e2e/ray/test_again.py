"""`holdfast again` on Ray: edited code reaches the actors that the job has."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import Job, holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = """
import time
from pathlib import Path
from holdfast import session
import version

for step in range(1_000_000):
    session.report(step)
    with Path({seen!r}).open("a") as file:
        print(version.NUMBER, file=file)
    time.sleep(0.05)
"""


def test_edited_code_runs_on_the_same_nodes(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "train.py").write_text(SCRIPT.format(seen=str(seen)))
    (tmp_path / "version.py").write_text("NUMBER = 1\n")
    entry = {"script": "train.py"}
    job = Job(tmp_path, "edited", 1, entrypoint=entry, workersPerNode=1, parallelism={})
    try:
        before = job.running()
        first = before.generation  # 2 where the second node came late
        (tmp_path / "version.py").write_text("NUMBER = 2\n")
        where = ("--ray", job.cluster.address)
        done = holdfast("again", "edited", str(job.file), *where)
        assert done.returncode == 0, done.stderr
        print(done.stdout)  # how long it took
        assert "runs the new code after" in done.stdout
        after = job.until(lambda view: view.generation == first + 1 and view.step >= 5)
        assert [node.name for node in after.nodes] == [node.name for node in before.nodes]
        assert seen.read_text().split()[-1] == "2"
    finally:
        job.end()
