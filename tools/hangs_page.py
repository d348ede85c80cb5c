"""Generates docs/concepts/hangs.md; run `python -m tools.hangs_page > FILE`."""

from __future__ import annotations

from holdfast.orchestrator.core.hang.table import TABLE

HEAD = """\
# What is a hang

Generated from `orchestrator/core/hang/table.py` by `python -m tools.hangs_page`.

The first row that holds decides how long a job may make no progress. Fields are those of
[`spec.recovery`](../user/job-spec-recovery.md#specrecovery). A sign of progress is a step, a phase
or a tick; for a script without the session also a collective. "Does nothing" means: the rank uses
no CPU, does no I/O and is in no collective, by its stack. While a node sends no heartbeats, no hang
is declared: the node returns, or is lost.

A second before the limit of a hang, and 4 s after the last collective of a script without steps,
the agents report what each rank does. `status` names the rank, and nothing is charged if training
goes on.

| row | when | no progress may last |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [f"| `{row.name}` | {row.when} | {row.lasts} |" for row in TABLE]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
