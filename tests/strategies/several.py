"""`python -m tests.strategies.several JOB.yaml ...`: one rank of several jobs, one after the other,
without Holdfast. Rank 0 chooses the port of a job when the job begins: a port that was free minutes
earlier may be another test's by then.

Importing torch takes longer than such a job, so each job is a fork of a process that has. One
process for all would keep what torch derives for one mesh, which is wrong for the next that is
equal: its process groups are others. That once ended in a corrupted heap, and once in a hang.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import load_job
from holdfast.orchestrator.parts import load
from holdfast.workers.agent.linux import processes
from holdfast.workers.agent.pool import preload
from tests.e2e.ports import free_port

from .rig import MARK


def port_of(file: Path) -> str:
    """The port of a job's store. Rank 0 writes it to a file, which the other ranks read."""
    shared = file.with_suffix(".port")
    if os.environ["RANK"] == "0":
        part = shared.with_suffix(".part")
        part.write_text(str(free_port()))
        part.replace(shared)
    while not shared.exists():  # if rank 0 fails, the test ends the ranks that wait
        time.sleep(0.01)
    return shared.read_text()


faulthandler.enable()
preload.preload()
draw = sys.modules["holdfast.workers.training.initial_values"]._draw


def draw_on_the_host(values: Any, *place: Any) -> None:
    """A GPU's generator draws other initial values than the CPU's."""
    drawn = values.cpu()
    draw(drawn, *place)
    values.copy_(drawn)


sys.modules["holdfast.workers.training.initial_values"]._draw = draw_on_the_host
preload.import_all(("torch.distributed.pipelining", "torch.distributed.tensor.experimental"))
parent = os.getpid()
for argument in sys.argv[1:]:
    file = Path(argument)
    job = load_job(file)
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    preload.import_all(recipe.config.preload)
    child = os.fork()
    if child == 0:
        processes.die_with(parent)
        os.environ["MASTER_PORT"] = port_of(file)
        print(MARK, job.name, flush=True)
        load(recipe.config.main)(job)
        sys.exit()
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{file}: ended with {os.waitstatus_to_exitcode(status)}")
