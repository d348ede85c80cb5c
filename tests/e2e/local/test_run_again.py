"""A survivor's process runs its script again: as a new process would, or another one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.documents import job_document

from .local_rig import Job
from .test_kept import started

__all__ = ["started"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = """
import atexit, builtins, glob, json, logging, os, random, signal, sys, threading, time
import torch, torch.distributed as dist
import helper
from lib import counter  # a folder without __init__.py
from holdfast import session

WAY = sys.argv[1]


def found():
    fds = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
    return {
        "argv": sys.argv, "path": sys.path, "directory": os.getcwd(),
        "state": [os.environ.get("MINE"), len(helper.COUNTS), counter.COUNTS, print.__module__],
        "hooks": len(torch.nn.modules.module._global_forward_hooks),
        "timer": signal.getitimer(signal.ITIMER_REAL), "affinity": len(os.sched_getaffinity(0)),
        "handlers": [len(logging.getLogger(name).handlers) for name in ("", "mine", __name__)],
        "signal": str(signal.getsignal(signal.SIGTERM)), "hook": sys.excepthook.__name__,
        "random": [random.random(), torch.rand(1).item()],
        "torch": [str(torch.get_default_dtype()), torch.get_num_threads(), dist.is_initialized()],
        "threads": threading.active_count(),
        "fds": [name for name in fds if "pipe:" not in name and "/gen-" not in name],  # libuv's
    }


seen = found()
os.environ["MINE"] = "1"
helper.COUNTS.append(1)
counter.COUNTS += 1
torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
signal.setitimer(signal.ITIMER_REAL, 1000)
old_print = print
builtins.print = lambda *given, **named: old_print("mine:", *given, **named)
ended = os.path.abspath(f"ended-{os.getpid()}")
atexit.register(lambda: open(ended, "a").write("once"))
logging.basicConfig()
for name in ("mine", __name__):
    logging.getLogger(name).addHandler(logging.StreamHandler())
signal.signal(signal.SIGTERM, lambda *_: None)
sys.excepthook = lambda *_: None
s = session.init()
with open(f"found-{s.rank}", "a") as log:
    log.write(json.dumps([os.getpid(), s.generation, seen]) + "\\n")
sys.path.append("nowhere")
os.chdir("/")
torch.set_default_dtype(torch.float64)
torch.set_num_threads(3)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if WAY == "keeps its model":
    torch.kept = [*getattr(torch, "kept", ()), optimizer]
if WAY == "catches all":
    usual_step = optimizer.step
    optimizer.step = lambda: time.sleep(0.3) or usual_step() or time.sleep(0.3)
if WAY == "starts a thread":
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
if WAY == "patches torch":
    step_once = torch.optim.SGD.step
    torch.optim.SGD.step = lambda self, *given: step_once(self, *given)
if WAY == "starts a program":
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
if WAY == "runs once":
    torch.library.define("mine::double", "(Tensor x) -> Tensor")
first = model.weight[0, 0].item()
begin = s.restore(model, optimizer)
for step in range(begin, 40):
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    try:
        dist.all_reduce(loss.detach())
    except Exception:
        if WAY != "swallows errors":
            raise
        time.sleep(60)
    try:
        optimizer.step()
    except:
        if WAY != "catches all":
            raise
    optimizer.zero_grad()
    time.sleep(0.05)
    s.step(step, loss=loss, total_steps=40)
s.finish()
with open(os.path.dirname(ended) + f"/moved-{s.rank}", "w") as log:
    log.write(str(round(first - model.weight[0, 0].item(), 6)))
"""


def killed_once(place: Path, started: list[Job], way: str) -> Job:
    """A job of four ranks, of which rank 3 is killed once. It has succeeded."""
    fields = {
        "entrypoint": {"script": "train.py", "args": [way]},
        "nodes": {"min": 2, "max": 2},
        "workersPerNode": 2,
        "resources": {"cpu": 1, "gpu": 0},
        "parallelism": {"shard": 1},
    }
    (place / "train.py").write_text(SCRIPT)
    (place / "helper.py").write_text("COUNTS = []\n")
    (place / "lib").mkdir()
    (place / "lib" / "counter.py").write_text("COUNTS = 0\n")
    job = Job(place, job_document("again", fields))
    started.append(job)
    job.run()
    job.until(lambda view: view.step >= 8)
    job.kill(job.worker_pids()[3])
    assert job.wait().state == "succeeded", job.output()
    return job


def launches(job: Job, rank: int) -> list[tuple[int, int, dict[str, object]]]:
    """(pid, generation, what the script has found) of each launch."""
    return [json.loads(line) for line in (job.place / f"found-{rank}").read_text().splitlines()]


@pytest.mark.parametrize("way", ["as it is", "swallows errors", "catches all"])
def test_a_script_finds_what_it_has_found_the_first_time(
    tmp_path: Path, started: list[Job], way: str
) -> None:
    job = killed_once(tmp_path, started, way)
    for rank in range(3):
        first, second = launches(job, rank)
        assert first[0] == second[0] and first[2] == second[2]
        assert second[2]["torch"] != ["torch.float64", 3, True]
        assert (tmp_path / f"ended-{first[0]}").read_text() == "once"
    first, second = launches(job, 3)
    assert first[0] != second[0]
    (incident,) = job.wait().incidents
    assert "; survivors run the script again in their process" in incident.decision
    assert (incident.steps_lost, incident.restored_from) == (0, "memory")
    assert {(tmp_path / f"moved-{rank}").read_text() for rank in range(4)} == {"4.0"}, "torn"


@pytest.mark.parametrize(
    "way", ["keeps its model", "starts a thread", "starts a program", "patches torch"]
)
def test_a_process_in_which_something_stays_is_replaced(
    tmp_path: Path, started: list[Job], way: str
) -> None:
    job = killed_once(tmp_path, started, way)
    for rank in range(4):
        first, second = launches(job, rank)
        assert first[0] != second[0]
    (incident,) = job.wait().incidents
    assert "run the script again" not in incident.decision
    if way == "starts a thread":
        return
    log = job.directory.path / "logs" / "gen-0001" / "rank-00001.log"
    reasons = {
        "keeps its model": "an optimizer",
        "starts a program": "child",
        "patches torch": "the script",
    }
    assert f"the script does not run again here: {reasons[way]}" in log.read_text()


def test_a_script_that_can_run_once_only_is_run_again_once_only(
    tmp_path: Path, started: list[Job]
) -> None:
    job = killed_once(tmp_path, started, "runs once")
    killed, again = job.wait().incidents
    assert "was killed by SIGKILL" in killed.title
    assert "not charged" in again.title and "mine::double" in again.evidence
    pids = [pid for rank in range(3) for pid, _, _ in launches(job, rank)]
    assert len(pids) > len(set(pids)) == 6
