"""The nodes of a job and the promises of nodes, indexed by what the reconcilers ask for after each
event.

Every node of a large job sends events, so an event must not cost a walk over all nodes. Records
cannot be modified: `Roster.change` replaces one, and the index follows.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ..protocol.facts import NodeFacts, StagedShard
from ..protocol.host_memory import HostMemory

StepKey = tuple[int, int]
"""(step, generation that wrote it): names one state of the training."""


class NodeRecord(Struct, frozen=True):
    """A node that has joined and is not lost."""

    name: str
    facts: NodeFacts
    join_order: int
    generation: int = 0
    """The generation whose workers may run there; 0: none."""
    staged: tuple[StagedShard, ...] = ()
    """Content of its memory tier when it last joined or stopped its workers."""
    offered_port: int = 0
    confirmed: bool = True
    """True if the node has connected to this controller, not only to an earlier one."""
    preempting: bool = False
    """True if the node has a preemption notice; no new generation uses it then."""
    leave_reason: str = ""
    """Text of its preemption notices."""
    slow: bool = False
    """True if the node leaves because a spare replaces it, see recovery.replaceStragglers."""
    leaves_ns: int | None = None
    """Time at which it leaves, if a notice had it."""
    standbys_ready: bool = False
    """True if the standbys have imported what the script imports."""
    host_memory: HostMemory | None = None
    """Capacity of its memory, as its agent last planned; None: not known yet."""


class PendingNode(Struct, frozen=True):
    """A node that the backend has promised and that has not joined."""

    name: str | None
    """None: the backend could not name it yet."""
    since_ns: int
    recovered: bool = False
    """A new controller found it at the backend; when it was promised is not known."""


class _Least:
    """The smallest of numbers that come and go."""

    def __init__(self) -> None:
        self._count: dict[int, int] = {}
        """Number -> how often it is here. One that has left stays until it is the smallest."""
        self._heap: list[int] = []

    def add(self, number: int) -> None:
        if number not in self._count:
            heapq.heappush(self._heap, number)
        self._count[number] = self._count.get(number, 0) + 1

    def remove(self, number: int) -> None:
        self._count[number] -= 1

    def get(self) -> int | None:
        while self._heap and not self._count[self._heap[0]]:
            del self._count[heapq.heappop(self._heap)]
        return self._heap[0] if self._heap else None


class Roster(dict[str, NodeRecord]):
    """Name -> record, in the order of joining. Only `[]`, `change` and `pop` modify it."""

    def __init__(self, records: Mapping[str, NodeRecord] | None = None) -> None:
        super().__init__()
        self.leaving: dict[str, None] = {}
        """Nodes that are preempting."""
        self.unconfirmed: dict[str, None] = {}
        self.without_standbys: dict[str, None] = {}
        self.num_busy = 0
        """Nodes whose workers may run."""
        self.on_host: dict[str, dict[str, None]] = {}
        """Host name -> nodes."""
        self.holders: dict[tuple[int, int, int], Counter[int]] = defaultdict(Counter)
        """(step, generation, number of shards) -> shard -> nodes with it in memory."""
        self._ready: Counter[tuple[int, int]] = Counter()
        """(generation, slots) -> confirmed nodes that are not leaving."""
        self._device_bytes, self._host_bytes = _Least(), _Least()
        for name, record in (records or {}).items():
            self[name] = record

    def __setitem__(self, name: str, record: NodeRecord) -> None:
        self._index(name, self.get(name), record)
        super().__setitem__(name, record)

    def change(self, name: str, **fields: object) -> NodeRecord:
        """Replace these fields of a record."""
        self[name] = record = replace(self[name], **fields)
        return record

    def pop(self, name: str, default: NodeRecord | None = None) -> NodeRecord | None:  # type: ignore[override]
        if name not in self:
            return default
        record = super().pop(name)
        self._index(name, record, None)
        return record

    # -- questions ----------------------------------------------------------------------------
    def num_ready(self, slots: int, generations: tuple[int, ...]) -> int:
        """Confirmed nodes that stay, have so many slots, and run one of these generations."""
        return sum(
            count
            for (generation, here), count in self._ready.items()
            if here >= slots and generation in generations
        )

    def least_memory(self) -> tuple[int | None, int | None]:
        """Bytes of the smallest GPU and of the smallest main memory; None: not known."""
        return self._device_bytes.get(), self._host_bytes.get()

    def in_order(self, names: Iterable[str]) -> list[NodeRecord]:
        """The records of those names that are here, in the order of joining."""
        here = (self[name] for name in dict.fromkeys(names) if name in self)
        return sorted(here, key=lambda record: record.join_order)

    def complete(self, without: Iterable[str] = ()) -> list[tuple[StepKey, int]]:
        """((step, generation), num_shards) of every state whose shards are all in memory, newest
        first; `without` the memory of these nodes. checkpoints.in_memory has those to be used."""
        away: dict[tuple[int, int, int], Counter[int]] = {}
        for record in self.in_order(without):
            for held in record.staged:
                key = (held.step, held.generation, held.num_shards)
                away.setdefault(key, Counter())[held.shard] += 1
        complete = []
        for key, holders in self.holders.items():
            gone = sum(holders[shard] == count for shard, count in away.get(key, {}).items())
            if len(holders) - gone == key[2]:
                complete.append((key[:2], key[2]))
        return sorted(complete, reverse=True)

    def index_is_right(self) -> bool:
        """True if a new index of the same records is equal."""
        return self._indexes() == Roster(dict(self))._indexes()

    def _indexes(self) -> tuple[object, ...]:
        named = (self.leaving, self.unconfirmed, self.without_standbys, self.on_host, self.holders)
        return *named, self.num_busy, self._ready, self.least_memory()

    # -- index --------------------------------------------------------------------------------
    def _index(self, name: str, old: NodeRecord | None, new: NodeRecord | None) -> None:
        _mark(self.leaving, name, new is not None and new.preempting)
        _mark(self.unconfirmed, name, new is not None and not new.confirmed)
        _mark(self.without_standbys, name, new is not None and not new.standbys_ready)
        for record, sign in ((old, -1), (new, 1)):
            if record is not None:
                self._count(record, sign)
        if old is None or new is None or old.facts != new.facts:
            self._index_facts(name, old, new)
        if old is None or new is None or old.staged is not new.staged:
            self._index_staged(old, new)

    def _count(self, record: NodeRecord, sign: int) -> None:
        self.num_busy += sign * bool(record.generation)
        if record.confirmed and not record.preempting:
            key = (record.generation, record.facts.slots)
            self._ready[key] += sign
            if not self._ready[key]:
                del self._ready[key]

    def _index_facts(self, name: str, old: NodeRecord | None, new: NodeRecord | None) -> None:
        if old is not None:
            here = self.on_host[old.facts.hostname]
            del here[name]
            if not here:
                del self.on_host[old.facts.hostname]
            for least, number in self._numbers(old.facts):
                least.remove(number)
        if new is not None:
            self.on_host.setdefault(new.facts.hostname, {})[name] = None
            for least, number in self._numbers(new.facts):
                least.add(number)

    def _numbers(self, facts: NodeFacts) -> Iterator[tuple[_Least, int]]:
        for gpu in facts.gpus:
            yield self._device_bytes, gpu.memory_bytes
        if facts.memory_bytes:
            yield self._host_bytes, facts.memory_bytes

    def _index_staged(self, old: NodeRecord | None, new: NodeRecord | None) -> None:
        for record, sign in ((new, 1), (old, -1)):
            for shard in record.staged if record is not None else ():
                key = (shard.step, shard.generation, shard.num_shards)
                holders = self.holders[key]
                holders[shard.shard] += sign
                if not holders[shard.shard]:
                    del holders[shard.shard]
                if not holders:
                    del self.holders[key]


def _mark(names: dict[str, None], name: str, belongs: bool) -> None:
    if belongs:
        names[name] = None
    else:
        names.pop(name, None)


class Promises:
    """Nodes that were promised, in the order of the promises."""

    def __init__(self, promises: Iterable[PendingNode] = ()) -> None:
        self._all: dict[str | int, PendingNode] = {}
        """Name, or a number if there is none -> promise."""
        self._unnamed: dict[int, None] = {}
        self._number = 0
        for promise in promises:
            self.append(promise)

    def __iter__(self) -> Iterator[PendingNode]:
        return iter(self._all.values())

    def __reversed__(self) -> Iterator[PendingNode]:
        return reversed(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Promises) and list(self) == list(other)

    def append(self, promise: PendingNode) -> None:
        if promise.name is None:
            self._number += 1
            self._unnamed[self._number] = None
        self._all[self._number if promise.name is None else promise.name] = promise

    def named(self, name: str) -> PendingNode | None:
        return self._all.get(name)

    def take(self, name: str | None) -> PendingNode | None:
        """Remove the promise of this node, or the oldest without a name; None: there is neither."""
        if name is not None and name in self._all:
            return self._all.pop(name)
        if not self._unnamed:
            return None
        number = next(iter(self._unnamed))
        del self._unnamed[number]
        return self._all.pop(number)
