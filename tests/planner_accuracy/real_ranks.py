"""The same trace with real processes, tensors and gloo, of several jobs one after the other:

    python -m tests.planner_accuracy.real_ranks RANK WORLD_SIZE STORE_FILE OUT

writes the peak and the bytes sent of this rank to the file OUT. A small module: it is
the program of each rank.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.plan_accuracy import trace
from bench.plan_accuracy.cases import FP32, SMALL, case
from holdfast.orchestrator.protocol.mesh import Mesh

TINY = {**SMALL, "dim": 128, "numLayers": 2, "numHeads": 4, "vocabSize": 512}
JOBS = tuple(
    case("real", mesh.describe(), mesh, TINY, length=64, passes=2, dtype=FP32, on_gpu=False)
    for mesh in (Mesh(tensor=2), Mesh(context=2), Mesh(pipeline=2))
)
"""Each on two ranks."""


def figures(measured: trace.Measured) -> dict[str, Any]:
    """Figures that real and traced ranks share."""
    return {
        "peak": measured.peak.num_bytes,
        "states": measured.states,
        "sent": {f"{kind} over {axes}": size for (kind, axes), size in measured.sent.items()},
    }


def main(rank: int, world_size: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    files = dist.FileStore(store, world_size)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size)

    def real(job: Any, mesh: Mesh, at: int, *modes: Any) -> contextlib.AbstractContextManager[Any]:
        return trace.trainer_of(job, mesh, at, *modes)

    found = {}
    for one in JOBS:
        measured = trace.measure_rank(one.job, one.mesh, rank, cuda=False, trainers=real)
        found[one.name] = figures(measured)
    Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
