"""Copies of shards of another node, whose buddy this one is. Pure bookkeeping, no memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.orchestrator.protocol.facts import StagedShard

from .buffer_states import Holder, Version


@dataclass
class PeerCopy(Holder):
    """A buffer for a shard of another node."""

    number: int
    num_bytes: int
    content: StagedShard | None = None
    arriving: StagedShard | None = None
    pins: int = 0


class PeerCopies:
    """All buddy copies of a node: of each shard the confirmed version and the newest one (without a
    confirmed one the two newest), and one that arrives."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.copies: dict[int, PeerCopy] = {}
        self.confirmed: Version | None = None
        self._numbers = numbers

    def begin(self, staged: StagedShard) -> tuple[int, bool, list[int]]:
        """A buffer for a copy: (number, whether it must be allocated, buffers to free)."""
        freed = self._discard_old()
        idle = self._idle()
        for copy in idle:
            if copy.num_bytes >= staged.num_bytes:
                copy.arriving = staged
                return copy.number, False, freed
        freed += self._free(idle)
        copy = PeerCopy(next(self._numbers), staged.num_bytes, arriving=staged)
        self.copies[copy.number] = copy
        return copy.number, True, freed

    def end(self, number: int, ok: bool) -> list[int]:
        """The transfer is over. Returns the buffers to free."""
        copy = self.copies.get(number)
        if copy is not None:
            copy.content, copy.arriving = (copy.arriving if ok else None), None
        return self._discard_old()

    def abandon(self, after_step: int, generation: int) -> list[int]:
        """A generation resumes after this step: later ones are discarded."""
        for copy in self.copies.values():
            held = copy.content
            if held and held.generation < generation and held.step > after_step:
                copy.content = None
        return self._discard_old()

    def release(self, kept: Version | None) -> list[int]:
        """Give up all copies but this version: memory lacks."""
        for copy in self.copies.values():
            if copy.version != kept:
                copy.content = None
        return self._free(self._idle())

    def inventory(self) -> tuple[StagedShard, ...]:
        return tuple(c.content for c in self.copies.values() if c.content is not None)

    def _discard_old(self) -> list[int]:
        """Keep two versions of each shard, and one idle buffer per shard at most."""
        by_shard: dict[tuple[int, int], list[PeerCopy]] = {}
        for copy in self.copies.values():
            if copy.content is not None:
                shard = (copy.content.shard, copy.content.num_shards)
                by_shard.setdefault(shard, []).append(copy)
        for held in by_shard.values():
            held.sort(key=lambda copy: copy.version, reverse=True)
            wanted = [copy for copy in held if copy.version == self.confirmed]
            kept = [*held[:1], *wanted] if wanted else held[:2]
            for old in [copy for copy in held if all(copy is not new for new in kept)]:
                old.content = None
        return self._free(self._idle()[max(1, len(by_shard)) :])

    def _idle(self) -> list[PeerCopy]:
        return [c for c in self.copies.values() if not (c.content or c.arriving or c.pins)]

    def _free(self, copies: list[PeerCopy]) -> list[int]:
        for copy in copies:
            del self.copies[copy.number]
        return [copy.number for copy in copies]
