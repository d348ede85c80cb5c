"""Several ranks on one GPU, which neither NCCL nor Holdfast allows in production.

NCCL rejects two ranks of one host on one device. It compares hash of the host and bus id, so each
rank gets a host id of its own, and sockets as transport. Source: initTransportsRank in NCCL's
src/init.cc, and NCCL_HOSTID in its list of environment variables.
"""

from __future__ import annotations

import os
import sys

import torch

ASKED = "BENCH_SHARE_GPU"
"""nccl or gloo: what the ranks of a script talk with. Not set: each rank has a GPU."""
JOB_WORDS = (sys.executable, "-m", "bench.gpu.sharing")
"""Command before a job's file: one rank of its recipe, without Holdfast."""


def share_one_gpu() -> None:
    """All ranks use cuda:0. Must come before the process group."""
    kind = os.environ.get(ASKED)
    if not kind or not torch.cuda.is_available():
        return
    os.environ |= {
        "NCCL_HOSTID": f"rank-{os.environ.get('RANK', '0')}", "NCCL_NET": "Socket",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_HOST_ENABLE": "0",
    }  # fmt: skip
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    from holdfast.workers.session import core

    core.pick_device = lambda local_rank, job=None: device
    if kind == "gloo":
        joined = core.join

        def join(at, on, **options):  # type: ignore[no-untyped-def]
            joined(at, torch.device("cpu"), **options)

        core.join = join


if __name__ == "__main__":
    from holdfast.orchestrator.api.v1alpha1 import load_job
    from holdfast.workers.training.recipes.pretrain import main

    share_one_gpu()
    main(load_job(sys.argv[1]))
