"""Joining the job: ranks from the environment, device, process groups, device meshes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES, is_mig
from holdfast.orchestrator.protocol.facts import Membership
from holdfast.orchestrator.protocol.mesh import AXES, Mesh

from .groups import Groups, SwitchStore, of_script, why_not_formed
from .store import TIMEOUT, open_store

BEFORE_SESSION = "holdfast.workers.integrations.transformers_memory"
"""Module of a trainer whose framework makes its groups before the session. Without it a script's
groups are left as they are."""


@dataclass(frozen=True)
class RankEnv:
    """The ranks of this process, as in torchrun's environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    restart_count: int = 0


def rank_env() -> RankEnv:
    """The ranks in the environment, or a single process's if there are none. Raises
    UserError."""
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
    """The node lacks a GPU that the job requested; charged to the node (core/failure.py)."""


def pick_device(local_rank: int, job: TrainingJob | None = None) -> torch.device:
    """cuda:LOCAL_RANK if the node has GPUs, else the CPU, but never the CPU if `job` requests GPUs;
    with several GPUs per worker, cuda:0, the first of its own.

    Raises DeviceMissing if the node lacks a requested GPU, UserError for more workers than GPUs if
    none were requested or the user chose them.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    requested = 0 if job is None else job.spec.resources.num_gpus
    if not count and not requested:
        return torch.device("cpu")
    names = (os.environ.get(VISIBLE_DEVICES) or "").split(",")
    if requested > 1 or (requested == 1 and len(names) == 1 and is_mig(names)):
        first, last = 0, requested - 1  # CUDA_VISIBLE_DEVICES has this worker's only
    else:
        first = last = local_rank
    if last >= count:
        raise _missing(local_rank, count, job)
    device = torch.device("cuda", first)
    torch.cuda.set_device(device)
    return device


def expect_on(device: torch.device, placed: Iterable[tuple[str, torch.device]]) -> None:
    """Raises UserError for a parameter on another device of the same type: copies for checkpoints
    wait for the work of one device only."""
    for name, at in placed:
        if at.type == device.type and at != device:
            raise UserError(
                f"session.restore: got {name} on {at}; expected all parameters on {device} "
                "(session.device) or in main memory; with a model on several GPUs of one worker, "
                "keep your own checkpoints instead of calling restore"
            )


def _missing(local_rank: int, count: int, job: TrainingJob | None) -> HoldfastError:
    has = f"{count} GPU{'s' if count != 1 else ''}"
    named = None if job is None else job.spec.env.get(VISIBLE_DEVICES)
    each = 1 if job is None else max(1, job.spec.resources.num_gpus)
    gpus = "a GPU" if each == 1 else f"{each} GPUs"
    if named is not None and (
        len([name for name in named.split(",") if name.strip()]) < (local_rank + 1) * each
    ):
        return UserError(
            f"spec.env.{VISIBLE_DEVICES}: got {named!r} for a worker with local rank {local_rank}; "
            f"expected {gpus} for each of workersPerNode; name more, or lower workersPerNode"
        )
    if job is None or not job.spec.resources.num_gpus:
        return UserError(
            f"spec.workersPerNode: got a worker with local rank {local_rank}; expected at most "
            f"{count} workers on this node, which has {has}; lower workersPerNode"
        )
    workers = job.spec.workers_per_node
    if each > 1:
        return DeviceMissing(
            f"spec.resources.gpu: got {has} that torch can use in the worker with local rank "
            f"{local_rank}; expected {each}; see nvidia-smi and the kernel log for a failed GPU or "
            "driver; lower gpu or workersPerNode if this node never had more"
        )
    return DeviceMissing(
        f"spec.resources.gpu: got {has} that torch can use on this node; expected {workers}, one "
        "for each of workersPerNode; see nvidia-smi and the kernel log for a failed GPU or "
        "driver; lower workersPerNode if this node never had more"
    )


def join(
    at: RankEnv, device: torch.device, membership: Membership | None, *, keeps: bool = False
) -> Groups | None:
    """Makes the default process group, unless the script has made one.

    With a `membership`, as under Holdfast, rank 0 hosts a new store in every generation; otherwise
    the environment decides (torchrun's agent hosts one). `keeps`: make groups that can be formed
    again, and return them.
    """
    if dist.is_initialized():
        return of_script.pop() if keeps and of_script else None
    groups = None
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    store: Store | None = None
    if at.world_size == 1:
        store = HashStore()
    elif membership is not None and keeps:
        store, groups = _kept(at, membership)
    elif membership is not None:
        store = own_store(at, one_machine=membership.num_nodes == 1)
    if store is not None:
        options |= {"store": store, "rank": at.rank, "world_size": at.world_size}
    dist.init_process_group(backend, timeout=TIMEOUT, **options)
    return groups


def _kept(at: RankEnv, membership: Membership) -> tuple[SwitchStore, Groups]:
    connected = not (membership.kept_from or membership.ahead)  # others meet when all have built
    one_machine = membership.num_nodes == 1
    store = SwitchStore(own_store(at, one_machine=one_machine) if connected else HashStore())
    at_now = (at.rank, at.world_size, membership.generation)
    return store, Groups(store, *at_now, connected=connected, replicas=membership.mesh.replicate)


def keep_groups_of_script(membership: Membership) -> None:
    """Have the groups of a script or framework, which makes them by the environment before
    session.init, be ones that can be formed again."""
    module = sys.modules["torch.distributed.rendezvous"]
    handlers: dict[str, Any] = getattr(module, "_rendezvous_handlers", {})  # private to torch
    if (usual := handlers.get("env")) is None:
        return
    usual = getattr(usual, "usual", usual)  # the script's last run in this process

    def meet(url: str, *given: Any, **named: Any) -> Iterator[tuple[Store, int, int]]:
        at = rank_env() if BEFORE_SESSION in sys.modules and not why_not_formed() else RankEnv()
        query = dict(parse_qsl(urlparse(url).query))
        seat = {"rank": str(at.rank), "world_size": str(at.world_size)}
        if at.world_size != membership.world_size or not query.items() <= seat.items():
            yield from usual(url, *given, **named)
            return
        if not of_script:  # else it makes its groups once more
            of_script.append(_kept(at, membership)[1])
        yield of_script[0].store, at.rank, at.world_size

    meet.usual = usual  # type: ignore[attr-defined]
    handlers["env"] = meet


def own_store(at: RankEnv, *, one_machine: bool) -> Store:
    """The store of this generation. `one_machine`: all ranks are on it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return open_store(at.rank, at.world_size, address, port, one_machine=one_machine)


class Meshes:
    """The device meshes of a job, made on first use: process groups need a handshake, and a
    recovery should not wait for unused ones. All ranks must use the same meshes in the same
    order."""

    def __init__(self, shape: Mesh, device_type: str, prefix: str = "") -> None:
        """`prefix` is put before the axes' names. torch shares cached results between equal meshes,
        regardless of rank and process groups, so the warm-up needs a mesh that equals no real
        one."""
        self._shape, self._device_type, self._prefix = shape, device_type, prefix

    def resized(self, shape: Mesh) -> None:
        """Meshes that are not made yet get this shape. Those that are keep their sizes."""
        self._shape = shape

    @cached_property
    def all_axes(self) -> DeviceMesh:
        """`replicate`, `shard`, and those of tensor, context and pipeline that are larger than
        1."""
        sizes = zip(AXES, self._shape.sizes, strict=True)
        return self._make([a for a, size in sizes if size > 1 or a in ("replicate", "shard")])

    def axis(self, name: str) -> DeviceMesh:
        """The mesh of one axis of all_axes. Raises KeyError for one that it has not."""
        return self.all_axes[self._name(name)]

    @cached_property
    def data_parallel(self) -> DeviceMesh:
        """The mesh for fully_shard: `shard`, or `replicate` x `shard` with several replicas. The
        ranks of a context axis hold the same parameters, so they divide them too: their axis is
        then called `shard_context`."""
        shape = self._shape
        outer = ["replicate"] if shape.replicate > 1 else []
        if shape.tensor * shape.context * shape.pipeline == 1:
            return self._make([*outer, "shard"])
        # One root for all axes: fully_shard combines it with the mesh of a tensor axis, and the
        # context axis has its process group already.
        if shape.context == 1:
            return self.all_axes[(*map(self._name, outer), self._name("shard"))]
        both = self.all_axes[self._name("shard"), self._name("context")]
        flat = both._flatten(self._name("shard_context"))
        return DeviceMesh._concatenate([self.axis("replicate"), flat]) if outer else flat

    def _name(self, axis: str) -> str:
        return self._prefix + axis

    def _make(self, names: list[str]) -> DeviceMesh:
        shape = tuple(getattr(self._shape, name) for name in names)
        named = tuple(map(self._name, names))
        return init_device_mesh(self._device_type, shape, mesh_dim_names=named)
