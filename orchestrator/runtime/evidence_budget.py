"""Bounds the stacks and tracebacks of one generation before they become events.

A thousand ranks report mostly the same. All facts of every rank are kept; only long texts are cut,
first ranks that waited for their peers.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..protocol.facts import Exit, Stack
from ..protocol.messages import GroupStopped, Message, WorkerExited

STACK_BYTES = 512 * 1024
"""Stacks of ranks that did not wait for their peers, in one generation. A journal of 1 MB holds
them compressed to a tenth."""
WAITING_STACK_BYTES = 128 * 1024
"""Stacks of ranks that waited for their peers: they show the same collective."""
TRACEBACK_BYTES = 256 * 1024
TRACEBACK_TAIL_BYTES = 400
"""Always kept of a traceback: the last frame distinguishes one error from another."""


class EvidenceBudget:
    """The bound of one job. Texts are kept in order of arrival until it is reached."""

    def __init__(self) -> None:
        self._generation = 0
        self._stacks = self._waiting = self._tracebacks = 0

    def bounded(self, message: Message) -> Message:
        """The same message with texts that fit."""
        match message:
            case WorkerExited():
                return msgspec.structs.replace(
                    message, exit=self.exit(message.generation, message.exit)
                )
            case GroupStopped():
                return msgspec.structs.replace(
                    message,
                    exits=tuple(self.exit(message.generation, exit) for exit in message.exits),
                    stacks=self.stacks(message.generation, message.stacks),
                )
            case _:
                return message

    def _follow(self, generation: int) -> None:
        if generation != self._generation:
            self._generation = generation
            self._stacks = self._waiting = self._tracebacks = 0

    def stacks(self, generation: int, stacks: Iterable[Stack]) -> tuple[Stack, ...]:
        """The same stacks; those beyond the bound without their text."""
        self._follow(generation)
        return tuple(self._stack(stack) for stack in stacks)

    def _stack(self, stack: Stack) -> Stack:
        size = len(stack.text.encode())
        if stack.in_collective:
            self._waiting += size
            fits = self._waiting <= WAITING_STACK_BYTES
        else:
            self._stacks += size
            fits = self._stacks <= STACK_BYTES
        if fits:
            return stack
        text = f"({size} bytes, not kept: other ranks reported the same)"
        return msgspec.structs.replace(stack, text=text)

    def exit(self, generation: int, exit: Exit) -> Exit:
        """The same exit; beyond the bound with only the end of its traceback."""
        self._follow(generation)
        size = len(exit.traceback.encode())
        if size <= TRACEBACK_TAIL_BYTES:
            return exit
        self._tracebacks += size
        if self._tracebacks <= TRACEBACK_BYTES:
            return exit
        tail = exit.traceback[-TRACEBACK_TAIL_BYTES:]
        return msgspec.structs.replace(exit, traceback="..." + tail)
