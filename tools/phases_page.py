"""Generates docs/concepts/job-phases.md; run `python -m tools.phases_page > FILE`."""

from __future__ import annotations

from holdfast.orchestrator.core.transitions import MEANING, TRANSITIONS, targets


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> pending"]
    for phase in MEANING:
        lines += [f"    {phase} --> {target}" for target in targets(phase) or ("[*]",)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    phases = [f"| `{phase}` | {meaning} |" for phase, meaning in MEANING.items()]
    moves = [
        f"| `{start}` | `{then}` | {one.cause} | {one.guard} |"
        for (start, then), one in TRANSITIONS.items()
    ]
    return "\n".join(
        [
            "# The phases of a job",
            "",
            "Generated from `orchestrator/core/transitions.py` by `python -m tools.phases_page`.",
            "",
            "| phase | meaning |",
            "|---|---|",
            *phases,
            "",
            "```mermaid",
            diagram().rstrip(),
            "```",
            "",
            "| from | to | when | if |",
            "|---|---|---|---|",
            *moves,
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
