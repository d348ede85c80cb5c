"""What the ranks of this node report of the checkpoints that their script writes by itself, and how
much of it the controller receives. Pure: time is an argument."""

from __future__ import annotations

from holdfast.orchestrator.protocol.messages import OwnCheckpointWritten

MAX_KNOWN = 64
BURST = 64
"""Reports at once; a script may write thousands of files, such as cached samples."""
PER_S = 1.0
REPEATED_AFTER_S = 30.0
"""A file that is written again and again is reported the first two times, then this often."""


class OwnCheckpoints:
    """Of one node."""

    def __init__(self) -> None:
        self._known: dict[str, OwnCheckpointWritten] = {}
        self._sent_s: dict[str, float] = {}
        self._room, self._filled_s = float(BURST), 0.0

    def wrote(self, now_s: float, generation: int, path: str) -> OwnCheckpointWritten | None:
        """What to send about this; None: nothing (now)."""
        before = self._known.pop(path, None)
        times = before.times + 1 if before and before.generation == generation else 1
        message = OwnCheckpointWritten(generation=generation, path=path, times=times)
        self._known[path] = message
        while len(self._known) > MAX_KNOWN:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._sent_s.pop(oldest, None)
        self._room = min(BURST, self._room + (now_s - self._filled_s) * PER_S)
        self._filled_s = now_s
        recently = now_s - self._sent_s.get(path, -REPEATED_AFTER_S) < REPEATED_AFTER_S
        if self._room < 1 or (times > 2 and recently):
            return None
        self._room -= 1
        self._sent_s[path] = now_s
        return message

    def known(self) -> list[OwnCheckpointWritten]:
        """For a new connection: what was reported over the old one may be lost."""
        return list(self._known.values())
