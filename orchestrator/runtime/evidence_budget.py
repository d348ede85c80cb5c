"""How much of stacks and tracebacks becomes an event: what a thousand ranks say is mostly the same.

Owns: the bound for one generation. Must not: choose a culprit; of every rank the facts stay, only
long texts are cut, and those of ranks that merely waited for others first.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..protocol.facts import Exit, Stack

STACK_ROOM_BYTES = 512 * 1024
"""Stacks of ranks that did not wait for their peers, in one generation; in a journal of 1 MB, where
they are compressed to a tenth."""
WAITING_ROOM_BYTES = 128 * 1024
"""Stacks of ranks that did: they show the same collective."""
TRACEBACK_ROOM_BYTES = 256 * 1024
TAIL_BYTES = 400
"""Always kept of a traceback: its last frame is what tells one mistake from another."""


class EvidenceBudget:
    """Of one job. Every text is given once; what comes first is kept."""

    def __init__(self) -> None:
        self._generation = 0
        self._stacks = self._waiting = self._tracebacks = 0

    def _follow(self, generation: int) -> None:
        if generation != self._generation:
            self._generation = generation
            self._stacks = self._waiting = self._tracebacks = 0

    def stacks(self, generation: int, stacks: Iterable[Stack]) -> tuple[Stack, ...]:
        """The same stacks, those for which there is no room without their text."""
        self._follow(generation)
        return tuple(self._stack(stack) for stack in stacks)

    def _stack(self, stack: Stack) -> Stack:
        size = len(stack.text.encode())
        if stack.in_collective:
            self._waiting += size
            fits = self._waiting <= WAITING_ROOM_BYTES
        else:
            self._stacks += size
            fits = self._stacks <= STACK_ROOM_BYTES
        if fits:
            return stack
        return msgspec.structs.replace(stack, text=f"({size} bytes, not kept: others say the same)")

    def exit(self, generation: int, exit: Exit) -> Exit:
        """The same exit; where there is no room, only the end of its traceback."""
        self._follow(generation)
        size = len(exit.traceback.encode())
        if size <= TAIL_BYTES:
            return exit
        self._tracebacks += size
        if self._tracebacks <= TRACEBACK_ROOM_BYTES:
            return exit
        return msgspec.structs.replace(exit, traceback="..." + exit.traceback[-TAIL_BYTES:])
