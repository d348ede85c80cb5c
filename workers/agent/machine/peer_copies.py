"""Buddy copies: shards of another node that this one holds in memory. Pure bookkeeping.

Owns: the rule: of each shard the two newest versions, and one more while it arrives. Must not: know
connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.orchestrator.protocol.facts import StagedShard

from .staging_buffers import version


@dataclass
class PeerCopy:
    number: int
    num_bytes: int
    content: StagedShard | None = None
    arriving: StagedShard | None = None
    pins: int = 0


class PeerCopies:
    """All buddy copies of a node."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.copies: dict[int, PeerCopy] = {}
        self._numbers = numbers

    def begin(self, staged: StagedShard) -> tuple[int, bool, list[int]]:
        """Room for a copy: (buffer, whether it must be allocated, buffers to free)."""
        freed = self._forget()
        idle = [c for c in self.copies.values() if not (c.content or c.arriving or c.pins)]
        for copy in idle:
            if copy.num_bytes >= staged.num_bytes:
                copy.arriving = staged
                return copy.number, False, freed
        for copy in idle:
            del self.copies[copy.number]
            freed.append(copy.number)
        copy = PeerCopy(next(self._numbers), staged.num_bytes, arriving=staged)
        self.copies[copy.number] = copy
        return copy.number, True, freed

    def end(self, number: int, ok: bool) -> list[int]:
        """The bytes are here, or will not come. Returns the buffers to free."""
        copy = self.copies.get(number)
        if copy is not None:
            copy.content, copy.arriving = (copy.arriving if ok else None), None
        return self._forget()

    def abandon(self, after_step: int, generation: int) -> list[int]:
        """A generation resumes after this step: what was staged beyond it never was."""
        for copy in self.copies.values():
            held = copy.content
            if held and held.generation < generation and held.step > after_step:
                copy.content = None
        return self._forget()

    def inventory(self) -> tuple[StagedShard, ...]:
        return tuple(c.content for c in self.copies.values() if c.content is not None)

    def find(self, step: int, generation: int, shard: int) -> PeerCopy | None:
        for copy in self.copies.values():
            held = copy.content
            if held and (held.step, held.generation, held.shard) == (step, generation, shard):
                return copy
        return None

    def _forget(self) -> list[int]:
        """Keep two versions of each shard, and one idle buffer per kept copy at most."""
        by_shard: dict[tuple[int, int], list[PeerCopy]] = {}
        for copy in self.copies.values():
            if copy.content is not None:
                key = (copy.content.shard, copy.content.num_shards)
                by_shard.setdefault(key, []).append(copy)
        for held in by_shard.values():
            held.sort(key=lambda c: version(c.content) if c.content else (0, 0), reverse=True)
            for old in held[2:]:
                old.content = None
        idle = [c for c in self.copies.values() if not (c.content or c.arriving or c.pins)]
        freed = []
        for copy in idle[max(1, len(by_shard)) :]:
            del self.copies[copy.number]
            freed.append(copy.number)
        return freed
