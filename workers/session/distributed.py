"""Join the job: the environment's ranks, this process's device, the process groups, the mesh.

Owns: these. Must not: know the agent, models or checkpoints.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES
from holdfast.orchestrator.protocol.mesh import AXES, Mesh

_TIMEOUT = timedelta(seconds=limits.STARTUP_TIMEOUT_S)
"""A last resort: hangs are found much earlier, by progress, and ended by killing the processes."""

_CONNECT_TIMEOUT_S = 3.0
_CONNECT_RETRY_S = 0.002


@dataclass(frozen=True)
class RankEnv:
    """Where this process stands."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    restart_count: int = 0


def place() -> RankEnv:
    """From torchrun's environment; a single process where there is none. Raises UserError."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    values = []
    for name, default in zip(names, ("0", "0", "1", "0"), strict=True):
        text = os.environ.get(name, default)
        if not text.isdigit():
            raise UserError(
                f"environment variable {name}: got {text!r}; expected a number; start the script "
                "with holdfast or torchrun, or unset it"
            )
        values.append(int(text))
    return RankEnv(*values)


class DeviceMissing(HoldfastError):
    """A GPU that this node was to have is not there: the node's fault (core/failure.py)."""


def pick_device(local_rank: int, job: TrainingJob | None = None) -> torch.device:
    """cuda:LOCAL_RANK where there is a GPU, else the CPU; never the CPU where `job` wants GPUs.

    Raises DeviceMissing for a GPU that the job's node was to have, UserError for more workers than
    GPUs where nobody gave the node its own.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = job is not None and job.spec.resources.gpu > 0
    if not count and not wanted:
        return torch.device("cpu")
    if local_rank >= count:
        raise _missing(local_rank, count, job)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _missing(local_rank: int, count: int, job: TrainingJob | None) -> HoldfastError:
    has = f"{count} GPU{'s' if count != 1 else ''}"
    named = None if job is None else job.spec.env.get(VISIBLE_DEVICES)
    if named is not None and len([name for name in named.split(",") if name.strip()]) <= local_rank:
        return UserError(
            f"spec.env.{VISIBLE_DEVICES}: got {named!r} for a worker with local rank {local_rank}; "
            "expected a GPU for each of workersPerNode; name more, or lower workersPerNode"
        )
    if job is None or not job.spec.resources.gpu:
        return UserError(
            f"spec.workersPerNode: got a worker with local rank {local_rank}; expected at most "
            f"{count} workers on this node, which has {has}; lower workersPerNode"
        )
    workers = job.spec.workers_per_node
    return DeviceMissing(
        f"spec.resources.gpu: got {has} that torch can use on this node; expected {workers}, one "
        "for each of workersPerNode; nvidia-smi and the kernel's log say what became of a GPU or "
        "the driver; lower workersPerNode if this node never had more"
    )


def join(at: RankEnv, device: torch.device, own_store: bool) -> None:
    """Makes the default process group. A process group that the script has made already stays.

    `own_store`: rank 0 hosts the store itself, new with every generation, as under Holdfast;
    otherwise the environment decides (torchrun's agent hosts one).
    """
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    store: Store | None = None
    if at.world_size == 1:
        store = HashStore()
    elif own_store:
        # As env:// does, without its wait until all have connected: the group's own handshake
        # waits for them anyway, and every round trip counts in a recovery.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if at.rank != 0:
            _wait_until_open(address, port)
        store = TCPStore(
            address,
            port,
            at.world_size,
            is_master=at.rank == 0,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
    if store is not None:
        options |= {"store": store, "rank": at.rank, "world_size": at.world_size}
    dist.init_process_group(backend, timeout=_TIMEOUT, **options)


def _wait_until_open(address: str, port: int) -> None:
    """Returns when somebody listens there. TCPStore itself would wait, but a first attempt that
    comes a millisecond too early costs it 0.3 to 0.7 s, and the ranks of a recovery start together.
    """
    deadline = time.monotonic() + limits.STARTUP_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError:
            time.sleep(_CONNECT_RETRY_S)
        else:
            return


class Meshes:
    """The device meshes of a job. Each is made when first asked for: process groups cost a
    handshake, and a recovery should pay for none that is not used. Every rank must ask alike."""

    def __init__(self, shape: Mesh, device_type: str, prefix: str = "") -> None:
        """`prefix` goes before the axes' names. torch keeps what it derives for one mesh for all
        that are equal, the calling rank and the process groups not looked at, so a rehearsal must
        not use a mesh that is equal to a real one."""
        self._shape, self._device_type, self._prefix = shape, device_type, prefix

    @cached_property
    def all_axes(self) -> DeviceMesh:
        """`replicate`, `shard`, and those of tensor, context and pipeline that are > 1."""
        sizes = dict(zip(AXES, self._shape.sizes, strict=True))
        names = [axis for axis in AXES if sizes[axis] > 1 or axis in ("replicate", "shard")]
        return self._make(names)

    @cached_property
    def data_parallel(self) -> DeviceMesh:
        """What fully_shard wants: `shard`, or `replicate` x `shard` when there are replicas."""
        model_parallel = self._shape.world_size != self._shape.data_parallel_size
        names = ("replicate", "shard") if self._shape.replicate > 1 else ("shard",)
        return self.all_axes[names] if model_parallel else self._make(list(names))

    def _make(self, names: list[str]) -> DeviceMesh:
        sizes = dict(zip(AXES, self._shape.sizes, strict=True))
        shape = tuple(sizes[name] for name in names)
        named = tuple(self._prefix + name for name in names)
        return init_device_mesh(self._device_type, shape, mesh_dim_names=named)
