"""The preload list is complete: a forked worker imports almost nothing until its first step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.local.local_rig import Job, spec

pytestmark = pytest.mark.e2e
HANDFUL = 5

PROGRAM = """
import os, sys, json
from holdfast.workers.agent.pool import preload
preload.preload()
import torch
before = set(sys.modules)

def first_steps(rank, out):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.zeros(4).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if rank == 0:
        with open(out, "w") as file:
            json.dump(sorted(set(sys.modules) - before), file)

threads = preload.num_threads()
children = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            first_steps(rank, sys.argv[1])
            code = 0
        finally:
            os._exit(code)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
print(json.dumps({"threads": threads, "codes": codes}))
sys.stdout.flush()
os._exit(0)
"""


def test_a_first_hsdp_step_imports_at_most_a_handful_of_modules(tmp_path: Path) -> None:
    out = tmp_path / "new.json"
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = str(reserved.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MASTER_PORT": port},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"threads": 1, "codes": [0, 0]}, done.stderr
    new = json.loads(out.read_text())
    assert len(new) <= HANDFUL, new


QUIET = "import os\nPID = os.getpid()\n"
THREADED = (
    QUIET
    + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)
SCRIPT = """
import json, os, sys
from pathlib import Path
found = {name: sys.modules[name].PID == os.getpid() for name in sys.argv[1:]}
Path(f"out-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize("names", [["hf_quiet"], ["hf_quiet", "hf_threaded"]])
def test_modules_of_the_job_are_imported_before_the_fork_unless_that_would_be_unsafe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """A module that starts a thread is imported by the worker instead, and the job runs."""
    library, project = tmp_path / "lib", tmp_path / "p"
    library.mkdir()
    project.mkdir()
    (library / "hf_quiet.py").write_text(QUIET)
    (library / "hf_threaded.py").write_text(THREADED)
    (project / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(library), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    document = spec(
        "pre", 1, entrypoint={"script": "train.py", "args": names}, preload=names,
        nodes={"min": 1, "max": 1}, parallelism={},
    )  # fmt: skip
    job = Job(project, document)
    try:
        job.run()
        view = job.wait()
        assert (view.state, job.command.returncode) == ("succeeded", 0), job.output()
    finally:
        job.end()
    in_worker = len(names) > 1
    for rank in range(2):
        found = json.loads((project / f"out-{rank}.json").read_text())
        assert found == dict.fromkeys(names, in_worker)
