"""`python -m tests.strategies.several PORT=JOB.yaml ...`: one rank of several jobs, one after the
other, without Holdfast.

Importing torch takes longer than such a job, so each job is a fork of a process that has. One
process for all would keep what torch derives for one mesh, which is wrong for the next that is
equal: its process groups are others. That once ended in a corrupted heap, and once in a hang.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from holdfast.orchestrator.api.v1alpha1 import load_job
from holdfast.workers.agent.linux import processes
from holdfast.workers.agent.pool import preload

from .rig import MARK

faulthandler.enable()
preload.preload()
preload.import_all(("torch.distributed.pipelining", "torch.distributed.tensor.experimental"))
parent = os.getpid()
for argument in sys.argv[1:]:
    port, file = argument.split("=", 1)
    child = os.fork()
    if child == 0:
        processes.die_with(parent)
        from holdfast.workers.training.recipes.pretrain import main

        os.environ["MASTER_PORT"] = port
        job = load_job(file)
        print(MARK, job.name, flush=True)
        main(job)
        sys.exit()
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{file}: ended with {os.waitstatus_to_exitcode(status)}")
