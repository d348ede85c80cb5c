"""The legal moves of a job between its phases, as a table; the diagram in docs/ comes from it.

Owns: the phases and their order. Must not: know why a move is made.
"""

from __future__ import annotations

from typing import Literal

JobPhase = Literal[
    "pending", "starting", "running", "recovering", "finishing",
    "suspending", "suspended", "succeeded", "failed", "cancelled",
]  # fmt: skip

MEANING: dict[JobPhase, str] = {
    "pending": "no workers; waiting for nodes",
    "starting": "first launch under way; no step finished yet",
    "running": "training",
    "recovering": "interrupted: stopping, placing, launching, until the next step of all ranks",
    "finishing": "no more steps; the last checkpoint or the last stop is under way",
    "suspending": "stopping, and writing the newest state to storage",
    "suspended": "no nodes; waits for a resume",
    "succeeded": "all workers ended with exit code 0",
    "failed": "given up, or trained but not stored, for the reason shown",
    "cancelled": "ended on request",
}

MOVES: dict[JobPhase, tuple[JobPhase, ...]] = {
    "pending": ("starting", "suspending", "suspended", "finishing", "failed", "cancelled"),
    "starting": ("running", "recovering", "finishing", "suspending", "pending"),
    "running": ("recovering", "finishing", "suspending"),
    "recovering": ("running", "pending", "finishing", "suspending", "failed", "cancelled"),
    # A node that is lost while the last checkpoint is written may take finished steps with it.
    "finishing": ("recovering", "succeeded", "failed", "cancelled"),
    # Somebody resumes before the job was suspended: its memory is still there.
    "suspending": ("suspended", "recovering", "finishing", "failed", "cancelled"),
    "suspended": ("pending", "finishing", "failed", "cancelled"),
    "succeeded": (),
    "failed": (),
    "cancelled": (),
}


TERMINAL: tuple[JobPhase, ...] = ("succeeded", "failed", "cancelled")


class IllegalMove(AssertionError):
    """A move that the table does not have: our own bug."""


def check_move(now: JobPhase, then: JobPhase) -> None:
    """Raises IllegalMove for a move that the table does not have."""
    if then not in MOVES[now]:
        legal = ", ".join(MOVES[now]) or "nothing"
        raise IllegalMove(f"{now} -> {then}: not a legal move; from {now} one can go to {legal}")


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> pending"]
    for phase, targets in MOVES.items():
        lines += [f"    {phase} --> {target}" for target in targets or ("[*]",)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/concepts/job-phases.md: `python -m holdfast.orchestrator.core.transitions > FILE`."""
    rows = [f"| `{phase}` | {meaning} |" for phase, meaning in MEANING.items()]
    return "\n".join(
        [
            "# The phases of a job",
            "",
            "Generated from `orchestrator/core/transitions.py`; a test compares the two. To change",
            "it: change the table, then run",
            "`python -m holdfast.orchestrator.core.transitions > docs/concepts/job-phases.md`.",
            "",
            "| phase | meaning |",
            "|---|---|",
            *rows,
            "",
            "```mermaid",
            diagram().rstrip(),
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
