"""Staged state that a node's memory can hold: the arithmetic that agents, controller and plan
share.

With N bytes of staged state per worker (one shard) and W different shards on a node, it needs

    W x N x (buffers + copies)

where each worker has BUFFERS buffers, with buddy copies BUDDY_BUFFERS, and each shard of the node
whose buddy this one is takes COPIES. What does not fit is given up in this order: the copies, the
third and fourth buffer, the memory tier. A longer staging interval saves no memory: the last staged
step stays while the next one is written, however far apart they are. An agent plans with what it
measures when its workers ask for buffers, `holdfast spec plan` with an estimate.
"""

from __future__ import annotations

from typing import Literal

import msgspec

BUFFERS = 4
"""Per worker, without buddy copies: two steps are kept, because nodes may differ by one step at a
failure; one is written; and one more keeps a step that goes to storage."""
MIN_BUFFERS = 2
"""A memory tier needs this many: the last step is kept while the next one is written."""
BUDDY_BUFFERS = 6
"""The most with buddy copies: also the step that all buddies hold, and one that is copied."""
MIN_BUDDY_BUFFERS = 5
"""The older of the two kept steps may be given up a moment earlier."""
COPIES = 3
"""Copies of each shard of another node: the newest, that of all buddies, one that arrives."""
RESERVE = 0.1
"""Share of the memory limit that is left to what workers, standbys and libraries allocate later."""
MIN_RESERVE_BYTES = 256 * 2**20
"""The least part of that for each worker."""
TRANSIENT_SHARDS = 2
"""Shards of gradients and gathered parameters that come and go within a step on the CPU: they are
gone when memory is measured, after a step. Measured: 1.9 shards (FSDP2 over two ranks, gloo)."""

GivenUp = Literal["nothing", "copies", "buffers", "memory-tier", "checkpoints"]
"""The last thing of the order that was given up, and all before it. copies: shards have no buddy
copies; buffers: workers have fewer than BUFFERS; memory-tier: one buffer each, only steps that go
to storage are staged; checkpoints: not even one buffer fits."""


class HostRoom(msgspec.Struct, frozen=True):
    """Memory that one node may use for staged state, in bytes."""

    limit_bytes: int
    """Memory of the node: the smallest limit of its cgroups, or what the machine has."""
    available_bytes: int
    """The part of the limit that is neither used by anything else nor needed by another node of the
    machine."""
    on_cpu: bool = False
    """Workers train in this memory, and were measured between two steps."""


class HostGrant(msgspec.Struct, frozen=True):
    """Buffers that a node holds."""

    buffers: int
    """Staging buffers per worker, at most."""
    buddy: bool = False
    """True if the node holds copies of another node's shards."""
    given_up: GivenUp = "nothing"


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one node, with the numbers that it comes from."""

    room: HostRoom
    shard_bytes: int
    """Staged state of one worker."""
    num_shards: int
    """Shards of the mesh that they belong to."""
    workers: int
    grant: HostGrant
    shards: int = 0
    """Sets of buffers: workers with one shard share theirs; 0: each has its own."""

    @property
    def usable_bytes(self) -> int:
        """Bytes for buffers and copies."""
        kept = reserve_bytes(self.room, shard_bytes=self.shard_bytes, workers=self.workers)
        return max(0, self.room.available_bytes - kept)

    @property
    def unit_bytes(self) -> int:
        """One buffer for each shard."""
        return self.shard_bytes * (self.shards or self.workers)


def reserve_bytes(room: HostRoom, *, shard_bytes: int, workers: int) -> int:
    """Bytes that stay free for the workers."""
    kept = max(int(RESERVE * room.limit_bytes), MIN_RESERVE_BYTES * workers)
    return kept + room.on_cpu * TRANSIENT_SHARDS * shard_bytes * workers


def plan_host_memory(
    room: HostRoom,
    *,
    shard_bytes: int,
    num_shards: int,
    workers: int,
    buddy: bool,
    shards: int = 0,
) -> HostMemory:
    """Plan the staged state of a node. `buddy`: copies for another node are wanted. `shards`: see
    HostMemory."""
    usable = room.available_bytes - reserve_bytes(room, shard_bytes=shard_bytes, workers=workers)
    unit = shard_bytes * (shards or workers)
    fits = max(0, usable) // max(1, unit)
    grant = HostGrant(0, given_up="checkpoints")
    if buddy and fits >= MIN_BUDDY_BUFFERS + COPIES:
        grant = HostGrant(min(BUDDY_BUFFERS, fits - COPIES), buddy=True)
    elif fits >= BUFFERS:
        grant = HostGrant(BUFFERS, given_up="copies" if buddy else "nothing")
    elif fits >= MIN_BUFFERS:
        grant = HostGrant(fits, given_up="buffers")
    elif room.available_bytes >= unit:
        # Without one buffer there are no checkpoints at all, so it may take the reserve too.
        grant = HostGrant(1, given_up="memory-tier")
    return HostMemory(
        room=room,
        shard_bytes=shard_bytes,
        num_shards=num_shards,
        workers=workers,
        grant=grant,
        shards=shards,
    )


def scaled(
    memory: HostMemory, *, num_shards: int, workers: int, buddy: bool, shards: int = 0
) -> HostMemory:
    """The plan of the same node for another mesh: the whole state is as large as before. Workers
    that do not share their buffers as they could go on with that."""
    if memory.num_shards == num_shards and memory.workers == workers:
        shards = memory.shards
    shard = -(-memory.shard_bytes * memory.num_shards // max(1, num_shards))
    return plan_host_memory(
        memory.room,
        shard_bytes=shard,
        num_shards=num_shards,
        workers=workers,
        buddy=buddy,
        shards=shards,
    )


def least(plans: dict[str, HostMemory]) -> tuple[str, HostMemory] | None:
    """The node that can hold least; what all nodes agree on depends on it."""
    ordered = sorted(plans.items(), key=lambda one: (one[1].grant.buddy, one[1].grant.buffers))
    return ordered[0] if ordered else None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def describe(memory: HostMemory, node: str = "") -> str:
    """One line about what is held, what is given up, and why."""
    grant, unit = memory.grant, memory.unit_bytes
    each = f"{grant.buffers} buffer{'s' * (grant.buffers != 1)} per worker"
    what = {
        "nothing": f"{each}{f' and {COPIES} buddy copies per shard' if grant.buddy else ''}",
        "copies": f"{each}, no buddy copies",
        "buffers": f"{each} instead of {BUFFERS}, no buddy copies",
        "memory-tier": f"{each}, for storage only: no checkpoints in memory",
        "checkpoints": "no buffer: no checkpoint can be made",
    }[grant.given_up]
    needs = grant.buffers + COPIES * grant.buddy
    takes = f"{needs} x {_size(unit)}" if needs else f"each needs {_size(unit)}"
    where = f" on {node}" if node else ""
    room = f"{_size(memory.usable_bytes)} of {_size(memory.room.limit_bytes)} available{where}"
    return f"{what} ({takes}); {room}"


def too_little(memory: HostMemory) -> str:
    """Reason why no buffer is given, and what helps."""
    return (
        f"host memory: {_size(memory.room.available_bytes)} of {_size(memory.room.limit_bytes)} "
        f"are free on this node; expected at least {_size(memory.unit_bytes)}, a checkpoint of "
        f"{memory.workers} workers; give the node more (spec.resources.memory), or spread the "
        "state over more workers (spec.parallelism.shard)"
    )
