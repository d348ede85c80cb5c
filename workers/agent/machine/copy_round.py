"""One round of the buddy tier on this node: all agents push their copies of the same step.

The controller names a step; the first staged step at or after it is pushed, which is the same on
all nodes because all ranks stage the same steps. The copies of a step are of use only together, so
the last step that all agents have pushed (`confirmed`) is kept everywhere until the controller
confirms a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.orchestrator.protocol.facts import StagedShard, state_after
from holdfast.orchestrator.protocol.messages import CopyStep, StepCopied

from .buffer_states import Version, version
from .generation import Generation
from .inputs import PushDone
from .staging_buffers import StagingBuffers


@dataclass
class CopyRound:
    """A step that is to be pushed, from the order to the report."""

    wanted: int
    step: int | None = None
    """The first staged step at or after `wanted`, once there is one."""
    waiting: set[int] = field(default_factory=set)
    """Slots whose push is not complete."""
    seconds: float = 0.0
    """The longest push."""


class CopyRounds:
    """The rounds of the running generation."""

    def __init__(self) -> None:
        self.confirmed: Version | None = None
        """The newest version that all agents have pushed, as the controller says."""
        self.current: CopyRound | None = None
        self.report: StepCopied | None = None
        """The last one: sent again after a reconnect."""
        self._off = False

    def launch(self, group: Generation) -> None:
        """The restored state is kept until a step of the new generation is confirmed."""
        self.report, self.current, self.confirmed = None, None, None
        self._off = False
        if group.launch.buddy:
            restore = group.membership.restore
            self.confirmed = (restore.generation, restore.step) if restore else None
            self._begin(group, group.after_step + 1)

    def stop(self) -> None:
        self.current = None

    def give_up(self) -> None:
        """This node has no memory for copies: there are none until the next launch."""
        self.report, self.current, self.confirmed, self._off = None, None, None, True

    def order(self, group: Generation, order: CopyStep) -> bool:
        """A new round; False: it repeats the current one or the last, or there are none."""
        if self._off:
            return False
        newest = self.current.wanted if self.current else self.report.wanted if self.report else -1
        if order.confirmed >= 0:
            self.confirmed = (group.generation, order.confirmed)
        if not group.launch.buddy or group.stopped or order.step <= newest:
            return False
        self._begin(group, order.step)
        return True

    def raise_confirmed(self, known: Version) -> None:
        if known[1] >= 0 and not self._off and (self.confirmed is None or known > self.confirmed):
            self.confirmed = known

    def confirmed_step(self, group: Generation) -> int:
        """The newest confirmed step of this generation; -1: none."""
        generation, step = self.confirmed or (0, -1)
        return step if generation == group.generation else -1

    def _begin(self, group: Generation, wanted: int) -> None:
        self.current = CopyRound(wanted, waiting={twins[0] for twins in group.twins().values()})

    def kept(self, group: Generation) -> frozenset[Version]:
        """Versions that must stay in memory."""
        versions = {self.confirmed} if self.confirmed else set()
        if self.current and self.current.step is not None:
            versions.add((group.generation, self.current.step))
        return frozenset(versions)

    def choose(self, group: Generation, buffers: StagingBuffers) -> StepCopied | None:
        """Find the step of the round; the report if a slot does not hold that step any more."""
        current = self.current
        if current is None or current.step is not None:
            return None
        step, covered = buffers.first_staged(current.wanted)
        if step is None:
            return None
        current.step = step
        wanted = (group.generation, step)
        if not covered or not buffers.may_complete(wanted):
            return self._end(group, buffers, f"{state_after(step)} is held no more", missed=True)
        return None

    def pushed(
        self,
        group: Generation,
        buffers: StagingBuffers,
        slot: int,
        staged: StagedShard,
        done: PushDone,
    ) -> StepCopied | None:
        """A push has ended; the report if it failed or was the last one of the round."""
        current = self.current
        if current is None or version(staged) != (group.generation, current.step):
            return None
        if not done.detail:
            current.waiting.discard(slot)
            current.seconds = max(current.seconds, done.seconds)
            if current.waiting:
                return None
        return self._end(group, buffers, done.detail)

    def _end(
        self, group: Generation, buffers: StagingBuffers, detail: str, *, missed: bool = False
    ) -> StepCopied | None:
        current = self.current
        assert current is not None and current.step is not None
        self.report = StepCopied(
            generation=group.generation,
            wanted=current.wanted,
            step=current.step,
            staged_step=buffers.newest_staged(),
            seconds=current.seconds,
            detail=detail,
            missed=missed,
        )
        if detail:
            self.current = None
        return self.report  # the step stays among those that are kept until the next order
