"""World sizes that a job may have: by its spec, and learned from how its generations end.

Some scripts cannot go on with another number of ranks (a ZeRO checkpoint of DeepSpeed, a batch
size that does not divide). Such a script fails in its first seconds at the new size only, and a
restart does not help; the size at which it worked does. Pure functions over plain values.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from ..api.v1alpha1 import TrainingJob

EARLY_S = 120.0
"""A script that fails later than this after its launch has trained, if nothing that it does can be
seen: a checkpoint is read and a model is built within two minutes, in most jobs."""
TRIES = 2
"""Failures at a new size before it is given up, if the old size has to be waited for."""
MAX_NEW_SIZES = 2
"""Sizes with a failed script, after which only sizes that worked are tried."""
RULES = ("user-exception", "exit-code", "out-of-memory")
"""Failures that may be a matter of the size."""


class Sizes(Struct):
    """World sizes, in workers."""

    worked: list[int] = field(default_factory=list)
    """All ranks have finished a step, or began collectives and went on."""
    failed: dict[int, int] = field(default_factory=dict)
    """Size -> early failures there, of a size that never worked."""
    refused: dict[int, str] = field(default_factory=dict)
    """Size that is not tried again -> the error."""
    began: bool = False
    """The running generation, which reports no steps, began collectives."""
    visible: bool = False
    """A generation of this job reported a step or began collectives, so training is visible; a
    generation that shows neither still reads its checkpoint."""

    def allows(self, world: int) -> bool:
        if world in self.refused:
            return False
        return len(self.refused) < MAX_NEW_SIZES or world in self.worked

    def is_new(self, world: int) -> bool:
        """True if this size never worked, and another one did."""
        return bool(self.worked) and world not in self.worked

    def has_worked(self, world: int) -> None:
        if world not in self.worked:
            self.worked.append(world)
        self.failed.pop(world, None)

    def early_s(self, startup_timeout_s: float) -> float:
        """Seconds after its launch in which a generation without a step may still begin."""
        loads = self.visible and not self.began
        return max(EARLY_S, startup_timeout_s) if loads else EARLY_S

    def describe(self) -> str:
        """Added to the reason of a job that waits for nodes; empty: nothing was learned."""
        if not self.refused:
            return ""
        at = " and ".join(str(world) for world in self.refused)
        good = " or ".join(str(world) for world in sorted(self.worked))
        return f"; the script failed with a world of {at}, and works with {good}"


def is_elastic(job: TrainingJob, num_nodes: int) -> bool:
    """True if spec.elasticity allows this many nodes."""
    allowed = job.spec.elasticity
    if isinstance(allowed, str):
        return allowed == "any" or num_nodes == job.spec.nodes.max
    return num_nodes * job.spec.workers_per_node in allowed


def elastic_sizes(job: TrainingJob, limit: int) -> Iterable[int]:
    """Numbers of nodes up to the limit that spec.nodes and spec.elasticity allow, largest first."""
    allowed, low, full = job.spec.elasticity, job.spec.nodes.min, job.spec.nodes.max
    if allowed == "any":
        return range(limit, low - 1, -1)
    if isinstance(allowed, str):
        return [full] if low <= full <= limit else []
    workers = job.spec.workers_per_node
    fitting = {world // workers for world in allowed if world % workers == 0}
    return sorted((size for size in fitting if low <= size <= limit), reverse=True)


def describe_elasticity(job: TrainingJob) -> str:
    """Added to the reason of a job that waits for nodes; empty: any size would do."""
    allowed, full = job.spec.elasticity, job.spec.nodes.max
    if isinstance(allowed, str):
        return "" if allowed == "any" else f"; all {full} are needed with elasticity: fixed"
    return f"; elasticity allows {', '.join(map(str, allowed))} workers"
