"""Reports of this node's ranks about checkpoints that their script writes by itself, and how many
of them the controller receives. Pure: time is an argument."""

from __future__ import annotations

from holdfast.orchestrator.protocol.messages import OwnCheckpointSeen
from holdfast.workers.worker_protocol import CheckpointWritten

MAX_KNOWN = 64
BURST = 64
"""Reports at once; a script may write thousands of files, such as cached samples."""
PER_S = 1.0
REPEATED_AFTER_S = 30.0
"""A file that is written again and again is reported the first two times, then this often."""


class OwnCheckpoints:
    """Checkpoints that the scripts of one node wrote."""

    def __init__(self) -> None:
        self._known: dict[str, OwnCheckpointSeen] = {}
        self._times: dict[str, dict[tuple[int, int], int]] = {}
        """Path -> how often each rank wrote it: all ranks may write one cache at the start."""
        self._sent_s: dict[str, float] = {}
        self._room, self._filled_s = float(BURST), 0.0

    def wrote(
        self, now_s: float, seat: tuple[int, int], report: CheckpointWritten
    ) -> OwnCheckpointSeen | None:
        """Message about this report; None: none (now). `seat`: (generation, rank)."""
        path, generation = report.path, seat[0]
        before = self._known.pop(path, None)
        if before is None or before.generation != generation:
            self._times[path] = {}
        counts = self._times[path]
        counts[seat] = counts.get(seat, 0) + 1
        times = max(counts.values())
        message = OwnCheckpointSeen(
            generation=generation,
            path=path,
            times=times,
            unread=report.unread,
            waits=report.waits,
        )
        self._known[path] = message
        while len(self._known) > MAX_KNOWN:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._sent_s.pop(oldest, None)
            self._times.pop(oldest, None)
        self._room = min(BURST, self._room + (now_s - self._filled_s) * PER_S)
        self._filled_s = now_s
        recently = now_s - self._sent_s.get(path, -REPEATED_AFTER_S) < REPEATED_AFTER_S
        again = before is not None and (before.generation, before.times) == (generation, times)
        if not report.unread and (self._room < 1 or (recently and (again or times > 2))):
            return None
        self._room -= 1
        self._sent_s[path] = now_s
        return message

    def known(self) -> list[OwnCheckpointSeen]:
        """Repeat them for a new connection: what was reported over the old one may be lost."""
        return list(self._known.values())
