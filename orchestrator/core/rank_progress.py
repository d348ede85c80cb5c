"""What the progress monitor knows of a generation and of each of its ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..protocol.facts import WorkerBeat
from .hang_limits import InspectedStack
from .script_progress import Began
from .stragglers import Stragglers

RECENT_STEPS = 32
"""Step times that the median is taken over."""
WORKING = ("build", "restore", "compile", "evaluate", "save", "finish")
"""Worker phases other than training, which may take long without progress."""


@dataclass(slots=True)
class RankProgress:
    """The newest heartbeat of a rank."""

    beat: WorkerBeat
    moved_ns: int
    """Last sign of progress, by the controller's clock."""
    seen_ns: int = 0
    """When the beat came."""
    ran_ns: int = 0
    """When the process was last seen not stopped."""


@dataclass(slots=True)
class WatchedGeneration:
    number: int = 0
    began: Began = field(default_factory=Began)
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    done: int = -1
    """Last step finished by all ranks, according to heartbeats."""
    first: int = -1
    """The step after which this generation began."""
    reported: int = -1
    """The step of the last StepCompleted."""
    reported_ns: int = 0
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    num_steps: int = 0
    hung: bool = False
    suspected_ns: int | None = None
    """When a hang was last suspected; None: there is progress."""
    suspected_since_ns: int = 0
    """The oldest progress at that time."""
    inspected: dict[int, InspectedStack] = field(default_factory=dict)
    busy_ns: int = 0
    """When a rank was last seen at work while none had progress: what follows it is no hang yet."""
    starved_ns: int = 0
    """When the machine was last short of CPU time while no rank had progress."""
    stragglers: Stragglers = field(default_factory=Stragglers)


def any_works(live: dict[int, RankProgress]) -> bool:
    return any(known.beat.phase in WORKING for known in live.values())
