"""`holdfast again`: the edited script runs on the nodes of the job, as the next generation."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local_rig import Job, holdfast
from .test_entrypoints import job

pytestmark = pytest.mark.e2e

SCRIPT = """
import time
import torch, torch.distributed as dist
from holdfast import session
import helper

s = session.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begin = s.restore(model, optimizer)
print("begins", begin, flush=True)
for step in range(begin, 1_000_000):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
    s.step(step, loss=1.0)
    if step % 5 == 0:
        print("code", helper.VERSION, flush=True)
"""


def again(found: Job, *more: str) -> subprocess.CompletedProcess[str]:
    return holdfast(found, "again", found.name, *more)


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VERSION = 1\n")
    found = job(tmp_path, "edited", {"script": "train.py"})
    found.run()
    yield found
    found.end()


def test_edited_code_runs_on_the_same_nodes_from_the_last_checkpoint(
    found: Job, tmp_path: Path
) -> None:
    before = found.until(lambda view: view.state == "running" and view.step >= 10)
    log = found.directory.path / "logs/gen-0002/rank-00000.log"

    (tmp_path / "train.py").write_text(SCRIPT + "def\n")
    refused = again(found)
    assert refused.returncode == 2 and "compiles" in refused.stderr
    assert found.until(lambda view: view.step > before.step).generation == 1, "it trains on"

    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VERSION = 2\n")
    done = again(found)
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # how long it took
    assert "generation 2 runs the new code after" in done.stdout
    resumed = found.until(lambda view: view.generation == 2 and view.state == "running")
    # It was long past before.step where the refused command took its time: ten steps of this code.
    after = found.until(lambda view: view.step > resumed.step + 10)
    assert [node.name for node in after.nodes] == [node.name for node in before.nodes]
    assert after.incidents[-1].failure_class == "new-code" and not any(after.restarts.values())
    text = log.read_text()
    assert "code 2" in text and "code 1" not in text
    begin = int(text.split("begins ")[1].split()[0])
    assert begin > before.step - 10, "from the last checkpoint in memory"

    file = again(found, str(tmp_path / "job.yaml"))
    assert file.returncode == 2 and "where they are" in file.stderr
    assert found.request("cancel").ok
    found.wait()
    ended = again(found, str(tmp_path / "job.yaml"))
    assert ended.returncode == 2 and "where they are" in ended.stderr


def test_a_job_that_has_ended_runs_again_from_its_checkpoint(found: Job, tmp_path: Path) -> None:
    before = found.until(lambda view: view.state == "running" and view.step >= 10)
    assert found.request("cancel").ok
    last = found.wait()
    assert last.state == "cancelled" and last.checkpoints[-1].step >= before.step

    (tmp_path / "train.py").write_text(SCRIPT + "def\n")
    refused = again(found)
    assert refused.returncode == 2 and "compiles" in refused.stderr
    assert found.wait().state == "cancelled", "nothing was changed"

    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VERSION = 3\n")
    found.run(found.name, verb="again")
    step = last.checkpoints[-1].step
    view = found.until(lambda view: view.state == "running" and view.step > step + 5)
    assert view.generation == 2, "that of the checkpoint was 1"
    assert not view.incidents
    text = found.directory.rank_log(2, 0).read_text()
    assert f"begins {step + 1}" in text and "code 3" in text and "code 1" not in text
    printed = found.output()
    says = (
        f"the current code, from its checkpoint after {step + 1} steps; its old journal and logs "
    )
    assert f"(cancelled) runs again with {says}are in " in printed
    assert "[rank 0] code 3" in printed
    earlier = found.directory.path / "earlier-1"
    assert (earlier / "journal").exists() and (earlier / "logs/gen-0001").is_dir()
    assert found.request("cancel").ok
    assert found.wait().state == "cancelled" and found.command.returncode == 1
