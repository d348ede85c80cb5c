"""The phases of a job and every transition between them; docs/concepts/job-phases.md is generated
from this table, and StepContext.move rejects any other transition."""

from __future__ import annotations

from typing import Literal, NamedTuple

JobPhase = Literal[
    "pending", "starting", "running", "recovering", "finishing",
    "suspending", "suspended", "succeeded", "failed", "cancelled",
]  # fmt: skip

MEANING: dict[JobPhase, str] = {
    "pending": "no workers; waiting for nodes",
    "starting": "first launch under way; no step finished yet",
    "running": "training",
    "recovering": "interrupted: stopping, placing, launching, until the next step of all ranks",
    "finishing": "no more steps; the last stop or the last checkpoint is under way",
    "suspending": "stopping, and writing the newest state to storage",
    "suspended": "no nodes; waiting for a resume, or for a decision about damaged checkpoints",
    "succeeded": "all workers ended with exit code 0",
    "failed": "stopped by an error or a limit, or trained but not stored; the reason says which",
    "cancelled": "ended on request",
}
TERMINAL: tuple[JobPhase, ...] = ("succeeded", "failed", "cancelled")


class Transition(NamedTuple):
    cause: str
    guard: str = ""
    """Further condition."""


_ENDS = "a user cancels, or activeDeadlineSeconds is over"
_NO_WORKERS = "no workers run"
_HOLDS = "it has committed checkpoints and none of them can be used"

TRANSITIONS: dict[tuple[JobPhase, JobPhase], Transition] = {
    ("pending", "starting"): Transition(
        "the first generation, or the first after a wait for nodes, is launched",
        "enough nodes are usable for whole replica groups",
    ),
    ("pending", "suspending"): Transition(f"a user suspends the job, or {_HOLDS}", _NO_WORKERS),
    ("pending", "finishing"): Transition(
        f"{_ENDS}, capacityTimeoutSeconds is over, or its model certainly does not fit",
        _NO_WORKERS,
    ),
    ("starting", "running"): Transition(
        "all ranks have finished a step; of a script: all nodes have started their workers"
    ),
    ("starting", "recovering"): Transition(
        "a failure, a hang, a preemption notice, a refused checkpoint, or new code"
    ),
    ("starting", "finishing"): Transition(f"all workers ended with exit code 0, or {_ENDS}"),
    ("starting", "suspending"): Transition("a user suspends the job"),
    ("running", "recovering"): Transition(
        "a failure, a hang, a preemption notice, a refused checkpoint, new code, or another number "
        "of nodes"
    ),
    ("running", "finishing"): Transition(f"all workers ended with exit code 0, or {_ENDS}"),
    ("running", "suspending"): Transition("a user suspends the job"),
    ("recovering", "running"): Transition(
        "all ranks have finished a step; of a script: all nodes have started their workers"
    ),
    ("recovering", "pending"): Transition(
        "too few nodes are usable for a generation",
        "no replacement is expected within replacementWaitSeconds",
    ),
    ("recovering", "finishing"): Transition(
        f"all workers of the new generation ended with exit code 0; {_ENDS}; or the failure ends "
        "the job: a restart budget is used up, or an error that a restart does not change"
    ),
    ("recovering", "suspending"): Transition(f"a user suspends the job, or {_HOLDS}"),
    ("finishing", "recovering"): Transition(
        "a node was lost with finished steps that storage does not have",
        "all workers had ended with exit code 0",
    ),
    ("finishing", "succeeded"): Transition(
        "the last checkpoint is committed, or nothing had to be written",
        "all workers had ended with exit code 0",
    ),
    ("finishing", "failed"): Transition(
        "the newest state is committed, or could not be written within finalTimeoutSeconds",
        "a failure or a limit ends the job; or all workers ended with exit code 0 and their last "
        "checkpoint could not be written",
    ),
    ("finishing", "cancelled"): Transition(
        "the newest state is committed, or could not be written within finalTimeoutSeconds, or the "
        "user cancels once more",
        "a user cancelled the job",
    ),
    ("suspending", "suspended"): Transition(
        "the newest state is committed, or could not be written within finalTimeoutSeconds"
    ),
    ("suspending", "recovering"): Transition("a user resumes the job before it is suspended"),
    ("suspending", "finishing"): Transition("a user cancels the job"),
    ("suspended", "pending"): Transition("a user resumes the job"),
    ("suspended", "finishing"): Transition("a user cancels the job"),
}


class IllegalTransition(AssertionError):
    """A transition that the table does not have: a bug of Holdfast."""


def check_transition(phase: JobPhase, then: JobPhase) -> None:
    """Raises IllegalTransition for a transition that the table does not have."""
    if (phase, then) not in TRANSITIONS:
        legal = ", ".join(targets(phase)) or "nothing"
        raise IllegalTransition(
            f"{phase} -> {then}: not a transition; from {phase} a job can go to {legal}"
        )


def targets(phase: JobPhase) -> tuple[JobPhase, ...]:
    """The phases that can follow."""
    return tuple(then for start, then in TRANSITIONS if start == phase)
