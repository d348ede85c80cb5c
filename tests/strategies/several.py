"""`python -m tests.strategies.several PORT=JOB.yaml ...`: one rank of several jobs, one after the
other, without Holdfast. Starting torch takes longer than such a job."""

from __future__ import annotations

import os
import sys

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from holdfast.orchestrator.api.v1alpha1 import load_job
from holdfast.workers.training.recipes.pretrain import main

from .rig import MARK

for argument in sys.argv[1:]:
    port, file = argument.split("=", 1)
    os.environ["MASTER_PORT"] = port
    job = load_job(file)
    print(MARK, job.name, flush=True)
    # torch keeps what it derives for one mesh for all equal ones, those of the job before included.
    _clear_sharding_prop_cache()
    main(job)
