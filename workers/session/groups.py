"""Process groups that survivors form again in the same process, with gloo of torch 2.15.

All of torch's ways to make a group pass one function or split a group. Both are wrapped: each group
is made reconfigurable and is listed in the order of creation. A group without connections can be
built on; a collective on it raises. Invariant: ranks connect only if they list the same groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import socket
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch._C._distributed_c10d import Store
from torch.amp.grad_scaler import GradScaler
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError

from .inspection import num_collectives
from .store import TIMEOUT

FORM_TIMEOUT_S = 10.0
FIRST_POLL_S, LONGEST_POLL_S = 0.0005, 0.02
CPU = torch.device("cpu")
_originals: list[tuple[Any, str, Callable[..., Any]]] = []
"""(owner, name, function) of what `Groups` has replaced in torch."""
of_script: list[Groups] = []
"""Groups that the script has made before session.init, which takes them."""


class NotKept(HoldfastError):
    """A kept process cannot continue in this generation; all ranks are forked again."""


class ReplicasDiverged(HoldfastError):
    """Replicas of a parameter differ after processes were kept."""


def why_not_formed() -> str:
    """Reason why this torch cannot form groups again; empty: it can. Its API is private."""
    helper = inspect.signature(c10d._new_process_group_helper).parameters
    has_all = (
        "enable_reconfigure" in helper
        and hasattr(native, "ReconfigureOptions")
        and hasattr(c10d._world, "pg_group_ranks")
        and hasattr(getattr(native, "FakeProcessGroup", None), "_create_internal")
    )
    if not has_all:
        return "this torch cannot form process groups again (2.15 can)"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return "TORCH_DISTRIBUTED_DEBUG is DETAIL"
    if hasattr(c10d._new_process_group_helper, "__wrapped__"):
        return "" if of_script else "session.init was called before in this process"
    if threading.current_thread() is not threading.main_thread():
        return "session.init was not called in the main thread"
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "true")
    return "TORCH_GLOO_LAZY_INIT is set" if lazy else ""


class SwitchStore(Store):
    """Passes on to the store of the current generation: rank 0 hosts it, and may have died."""

    def __init__(self, now: Store) -> None:
        super().__init__()
        self.now = now

    def has_extended_api(self) -> bool:
        return True


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda store, *given, **named: getattr(store.now, name)(*given, **named)


for _name in (
    "set", "get", "add", "wait", "check", "multi_get", "multi_set", "compare_set", "delete_key",
    "num_keys", "clone", "set_timeout",
):  # fmt: skip
    setattr(SwitchStore, _name, _passed_on(_name))


class Groups:
    """The process groups of this process. It makes all that are made from now on."""

    def __init__(
        self,
        store: SwitchStore,
        rank: int,
        world_size: int,
        generation: int,
        *,
        connected: bool,
        replicas: int = 1,
    ) -> None:
        """`connected`: each group connects when it is made; otherwise `connect` does it for all.
        `replicas`: how often the world has all shards."""
        self.store = store
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._each = world_size // replicas
        self.connected = connected
        self._alone = False
        """Collectives return at once and move no data."""
        self._listed: dict[str, tuple[Any, list[int], tuple[int, int]]] = {}
        """Name -> group, its ranks, and `_place` when it was made, in the order of creation."""
        self._times: Counter[str] = Counter()
        """Formations of each named group in this generation: a script may replace it."""
        self._connections: dict[str, dict[int, int]] = {}
        """Name of a group -> the inode of each connection's socket -> its descriptor."""
        self.num_collectives = 0
        """Collectives by which DDP compared its values."""
        self.replicated: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self.scales = False
        """A GradScaler is in use, which an attempt may leave between two of its calls."""
        self._wrap()

    def _wrap(self) -> None:
        make, init = c10d._new_process_group_helper, DistributedDataParallel.__init__
        update, split = GradScaler.update, dist.ProcessGroup.split_group

        @wraps(make)
        def make_listed(*given: Any, **named: Any) -> Any:
            size, _, ranks, backend, _, name = given[:6]
            if str(backend) != "gloo":
                return make(*given, **named)
            group, store = make(*given, **named | {"enable_reconfigure": True})
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._list(str(name), group, list(ranks) or list(range(size)))
            return group, store

        @wraps(init)
        def init_listed(made: DistributedDataParallel, /, *given: Any, **named: Any) -> None:
            # Without connections it cannot compare its values, which the restore sets anyway.
            before = num_collectives()
            init(made, *given, **named | ({} if self.connected else {"init_sync": False}))
            self.num_collectives += num_collectives() - before
            self.replicated.add(made)

        @wraps(update)
        def update_seen(scaler: GradScaler, *given: Any, **named: Any) -> None:
            self.scales |= scaler.is_enabled()
            update(scaler, *given, **named)

        @wraps(split)
        def split_listed(parent: Any, at: list[int], *given: Any, **named: Any) -> Any:
            group = split(parent, at, *given, **named)
            if group is not None and self._has(parent):
                members = dist.get_process_group_ranks(parent)
                self._list(group.group_name, group, [members[index] for index in at])
            return group

        patched: list[tuple[Any, Callable[..., Any]]] = [
            (c10d, make_listed),
            (DistributedDataParallel, init_listed),
            (GradScaler, update_seen),
            (dist.ProcessGroup, split_listed),
        ]
        for owner, function in patched:
            name = function.__name__
            _originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, function)

    def _list(self, name: str, group: Any, ranks: list[int]) -> None:
        self._listed[name] = (group, ranks, self._place)
        if self.connected:
            self._form(name)
        elif self._alone:
            _use_backend(group, alone=True)

    def pretend(self, *, alone: bool) -> None:
        """`alone`: collectives return at once and move no data, for a step that is tried without
        peers. False: groups can be connected again."""
        self._alone = alone
        for group, *_ in self._listed.values():
            _use_backend(group, alone=alone)

    def connect(
        self, store: Store, rank: int, world_size: int, generation: int, is_over: Callable[[], bool]
    ) -> None:
        """Connect all groups, in a generation in which processes were kept; `rank` is this one's in
        it. Collective. `is_over`: the generation has ended. Raises NotKept, or RuntimeError."""
        moved = (self._rank - rank) % (self._each if world_size != self._world_size else world_size)
        if moved:
            raise NotKept("ranks of kept processes have moved")
        here = c10d._world.pg_map
        self._listed = {name: entry for name, entry in self._listed.items() if entry[0] in here}
        self.store.now, self._generation = store, generation
        store.set(f"kept/{rank}", json.dumps(list(self._listed)))
        keys = [f"kept/{other}" for other in range(world_size)]
        self._await(keys, limits.STARTUP_TIMEOUT_S, is_over)
        listed = [json.loads(said) for said in store.multi_get(keys)]
        self._connections.clear()
        self._times.clear()
        self._rank, self._world_size, self.connected = rank, world_size, True
        for name, (group, created, place) in self._listed.items():
            members = ranks_now(created, self._each, place, self._place)
            if lack := [member for member in members if name not in listed[member]]:
                raise NotKept(f"rank {rank} has the process group {name}, rank {lack[0]} does not")
            c10d._world.pg_group_ranks[group] = {at: index for index, at in enumerate(members)}
            self._form(name, is_over)

    @property
    def foreign(self) -> bool:
        """A group cannot be formed again."""
        return not all(map(self._has, c10d._world.pg_map))

    def _has(self, group: Any) -> bool:
        return any(listed is group for listed, *_ in self._listed.values())

    @property
    def _place(self) -> tuple[int, int]:
        """This rank, and the number of replicas."""
        return self._rank, self._world_size // self._each

    def _form(self, name: str, is_over: Callable[[], bool] | None = None) -> None:
        """Connect one group; with `is_over` of ranks that are all here. Its key names the members:
        a rank that lists others never meets these."""
        group, created, place = self._listed[name]
        members = ranks_now(created, self._each, place, self._place)
        store, number = self.store.now, self._times[name]
        prefix = f"form/{self._generation}/{name}/{number}/{members}"
        self._times[name] += 1
        keys = [f"{prefix}/{member}" for member in members]
        gloo, options = group._get_backend(CPU), native.ReconfigureOptions()
        store.set(f"{prefix}/{self._rank}", gloo.get_reconfigure_handle())
        if is_over is None:
            store.wait(keys, TIMEOUT)
        else:
            self._await(keys, FORM_TIMEOUT_S, is_over)
        options.handles = [handle.decode() for handle in store.multi_get(keys)]
        # Survivors that moved have groups with the names of other ones now.
        options.uuid = int.from_bytes(hashlib.blake2b(prefix.encode(), digest_size=7).digest())
        options.timeout = TIMEOUT if is_over is None else timedelta(seconds=FORM_TIMEOUT_S)
        before = _sockets()
        gloo.reconfigure(options).wait()
        after = _sockets().items()
        self._connections[name] = {inode: at for inode, at in after if inode not in before}

    def _await(self, keys: list[str], timeout_s: float, is_over: Callable[[], bool]) -> None:
        deadline, pause_s = time.monotonic() + timeout_s, FIRST_POLL_S
        while not self.store.now.check(keys):
            if is_over() or time.monotonic() > deadline:
                raise NotKept("process groups were not formed again in time")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_POLL_S)

    def cut(self) -> None:
        """End each collective that waits, from another thread: close the groups' connections."""
        cut(set[int]().union(*list(self._connections.values())))

    @property
    def whole(self) -> bool:
        """False once gloo has closed a connection: its peer has ended, or a collective failed."""
        here = [name for name, entry in self._listed.items() if entry[0] in c10d._world.pg_map]
        try:
            pairs = (pair for name in here for pair in self._connections.get(name, {}).items())
            return all(_inode(at) == inode for inode, at in pairs)
        except OSError:
            return False

    def reset(self) -> None:
        """New reducers for DDP: those of survivors have other buckets than those of new processes,
        and their sums would differ without an error."""
        module: Any
        for module in self.replicated:
            parameters, sparse = module._build_params_for_reducer()
            names = module._build_debug_param_to_name_mapping(parameters)
            module._ddp_init_helper(parameters, sparse, names, module.static_graph)
            module._has_rebuilt_buckets = False
            # False after a forward without gradients: others would broadcast buffers, this not.
            module.require_forward_param_sync = module.require_backward_grad_sync = True


def cut(connections: set[int] | None) -> None:
    """Close these connections, by their inodes; None: all of this process to other machines and
    programs by TCP. The owner may close a descriptor meanwhile, so duplicates are checked and
    closed."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if not _inode(int(name)):
                continue  # a file's locks end when a duplicate is closed
            copy = os.dup(int(name))
            try:
                inode = _inode(copy)
                if inode in connections if connections is not None else inode:
                    with socket.socket(fileno=os.dup(copy)) as connection:
                        if connection.family in (socket.AF_INET, socket.AF_INET6):
                            connection.getpeername()  # gloo's listening thread would abort
                            connection.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(copy)


def forget() -> None:
    """Destroy all groups, and have torch make new ones as it does by itself."""
    of_script.clear()
    while _originals:
        setattr(*_originals.pop())
    if dist.is_initialized():
        dist.destroy_process_group()


def _use_backend(group: Any, *, alone: bool) -> None:
    kinds = dist.ProcessGroup.BackendType
    if alone:
        fake = native.FakeProcessGroup._create_internal(group.rank(), group.size())
        group._register_backend(CPU, kinds.CUSTOM, fake)
    else:
        group._register_backend(CPU, kinds.GLOO, None)  # the one that it has


def ranks_now(
    made: list[int], each: int, before: tuple[int, int], now: tuple[int, int]
) -> list[int]:
    """The ranks of a group that was `made` with others, in replicas of `each` ranks; `before` and
    `now`: this rank, and the number of replicas. A group within a replica is where this rank's
    replica is now, and one over all replicas is over all that are there. Raises NotKept."""
    if now == before:
        return made
    offsets = [rank % each for rank in made if rank // each == before[0] // each]
    if before[1] == 1 or made != [at * each + o for at in range(before[1]) for o in offsets]:
        if before[1] == 1 or len(offsets) != len(made):
            raise NotKept("a process group is neither within a replica nor over all")
        return [now[0] // each * each + offset for offset in offsets]
    return [at * each + offset for at in range(now[1]) for offset in offsets]


def _inode(descriptor: int) -> int:
    """The inode of a socket; 0 for other files."""
    status = os.fstat(descriptor)
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0


def _sockets() -> dict[int, int]:
    """Inode of each socket of this process -> its descriptor."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            sockets[_inode(int(name))] = int(name)
    return sockets  # 0: other files
