"""States of a node's staging buffers, and the changes that follow from them. Data types."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from holdfast.orchestrator.protocol.facts import StagedShard

from .commands import FreeBuffer, MakeBuffer

Version = tuple[int, int]
"""(generation, step); a later version compares greater."""
STEPS_KNOWN = 64
"""Staged steps remembered per slot. An order that names an older one is answered: too late."""

NOTHING: Version = (0, -1)


class Holder:
    """A buffer that may hold a shard."""

    content: StagedShard | None

    @property
    def version(self) -> Version:
        """The content's version, or NOTHING."""
        return NOTHING if self.content is None else version(self.content)


@dataclass
class StagingBuffer(Holder):
    number: int
    slot: int
    num_bytes: int
    holder: int = 0
    """Generation of the worker that has the descriptor; 0: none."""
    writable: bool = False
    """The holder may write it now."""
    content: StagedShard | None = None
    pins: int = 0
    ranks: tuple[int, ...] = ()
    """Local ranks that have staged its content."""
    filling: Filling | None = None
    """Twins write it."""
    sharers: set[int] = field(default_factory=set)
    """Twins that have the descriptor."""

    @property
    def is_idle(self) -> bool:
        return not (self.content or self.pins or self.holder or self.filling)


@dataclass
class Filling:
    """A step that twins write into one buffer, each its part."""

    step: int
    layout: int
    waiting: set[int]
    """Local ranks that have not staged it."""
    writing: set[int] = field(default_factory=set)
    """Local ranks that may write the buffer now."""
    samples: set[int] = field(default_factory=set)
    """Checksums of the same bytes of each twin."""
    void: bool = False
    """True when the step can no longer become complete."""


@dataclass
class Slot:
    """One local rank of the running generation, or several that share buffers."""

    generation: int = 0
    members: tuple[int, ...] = ()
    by_step: bool = False
    """True if the members ask for the buffer of each step."""
    asks: dict[int, Ask] = field(default_factory=dict)
    """Local rank -> its request that is not answered."""
    reserve_bytes: int = 0
    """Size of the buffers that twins will need."""
    early: set[int] = field(default_factory=set)
    """Local ranks that want their descriptors before they write them."""
    newest: dict[int, int] = field(default_factory=dict)
    """Local rank -> the last step that it has staged, of twins."""
    differ: bool = False
    """True if the members have different state."""
    wanted: list[int] = field(default_factory=list)
    """Sizes of unanswered requests."""
    requested: bool = False
    """True if the worker has requested buffers."""
    waits: bool = False
    """True if the worker waits for a buffer."""
    latest: Version | None = None
    """Newest version that the worker of this generation has staged."""
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_KNOWN))
    """The last steps that it has staged, held or not."""


@dataclass(frozen=True)
class Ask:
    """A twin will stage a part of a step; -1: soon."""

    step: int
    layout: int
    num_bytes: int


@dataclass(frozen=True)
class Give:
    """Give a buffer to a worker, by its local rank: that of the slot or a twin. `sent`: the worker
    already has the descriptor. `part` of `parts`: what it writes of the file; 0 parts: nothing
    yet."""

    buffer: int
    slot: int
    num_bytes: int
    sent: bool
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Differ:
    """Twins have different state: each stages the whole shard from now on."""

    ranks: tuple[int, ...]


Change = Give | MakeBuffer | FreeBuffer | Differ


def version(staged: StagedShard) -> Version:
    return (staged.generation, staged.step)
