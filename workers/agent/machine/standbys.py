"""The standbys of a node: when they are forked, and whether they have imported what the script
imports. The controller is notified, since a launch that comes sooner waits for those imports.

Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.orchestrator.protocol import messages as m

from . import commands
from .commands import Command
from .script_progress import SECOND_NS

REFILL_DELAY_S = 1.0
"""Time from a generation's first step to the fork of standbys: start-up needs the cores."""
SPARE_DELAY_S = 4.0
"""Time from Welcome to the fork of standbys on a node without ranks. A spare often joins because
another node was just lost, and where nodes share cores its warm-up would delay the recovery."""


@dataclass
class Standbys:
    """The standbys of one node."""

    due_ns: int | None = None
    """Time of the next fork; None when no standby is needed."""
    reported: bool | None = None
    """True if the standbys are ready, as last reported; None: not known yet."""

    modules: tuple[str, ...] = ()
    """Modules that rank 0 had imported, if it ran here."""
    leaving: bool = False
    """The node will be taken away, and gets no other launch."""

    def schedule(self, now_ns: int, delay_s: float) -> None:
        self.due_ns = None if self.leaving else now_ns + int(delay_s * SECOND_NS)

    def cancel(self) -> None:
        self.due_ns = None

    def leave(self) -> None:
        self.leaving, self.due_ns = True, None

    def fork(self, now_ns: int, count: int) -> list[Command]:
        """Fork the standbys that `count` lacks, if it is time."""
        if self.due_ns is None or now_ns < self.due_ns:
            return []
        self.due_ns = None
        return [commands.RefillStandbys(count)]

    def configured(self, *, must_import: bool) -> list[Command]:
        """The job is known, and whether there is something that they have to import."""
        return self._report(ready=not must_import)

    def learned(self, modules: tuple[str, ...], *, by_rank: int) -> list[Command]:
        """A worker has reported what it imported, and standbys for the next launch follow."""
        if not modules:
            return []
        sent: list[Command] = []
        if by_rank == 0 and modules != self.modules:
            self.modules = modules
            sent = [commands.Send(m.ImportsLearned(modules=modules))]
        return [*sent, *self._report(ready=False)]

    def imported(self) -> list[Command]:
        """All that were forked have imported it. Not the answer to a fork that is still to come."""
        return self._report(ready=True) if self.due_ns is None else []

    def repeat(self) -> list[Command]:
        """Repeat the reports after a Welcome: the controller may be a new one."""
        learned = m.ImportsLearned(modules=self.modules)
        return [*([commands.Send(learned)] if self.modules else []), *self._current()]

    def _current(self) -> list[Command]:
        if self.reported is None:
            return []
        return [commands.Send(m.StandbysReported(ready=self.reported))]

    def _report(self, *, ready: bool) -> list[Command]:
        if self.reported == ready:
            return []
        self.reported = ready
        return self._current()
