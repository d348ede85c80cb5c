"""What somebody who watches a job is told when the head of its Ray cluster is lost.

Owns: the words, and the end of a command that has waited for too long. Must not: know how the head
is watched; backends/ray/head_monitor.py does.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import NoReturn

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray import head_monitor
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.host import checkpoint_path


def watched(
    display: Display, order: ControllerOrder, attach: str
) -> AbstractContextManager[None]:  # fmt: skip
    """`attach`: the command that watches the job again."""
    written = job_from_mapping(order.document, f"job {order.job}").spec.checkpoint.path
    path = checkpoint_path(order, written)

    def gone(address: str, limit_s: float) -> None:
        display.note(
            f"The head of the Ray cluster ({address}) does not answer. Training goes on as long as "
            f"the other Ray nodes wait for it; this command waits {limit_s:.0f} s"
        )

    def back(address: str) -> None:
        # Ray counts the drivers of a lost Ray node as ended, though they go on.
        display.note(
            f"The head of the Ray cluster ({address}) answers again. If nothing more comes, this "
            f"command was connected through the Ray node that was lost: `{attach}` watches anew"
        )

    def end(address: str) -> NoReturn:
        display.note(
            f"The head of the Ray cluster ({address}) stayed away, so this command ends. Where the "
            f"cluster keeps its store in Redis, `{attach}` watches the job again once there is a "
            f"head. Elsewhere the job is gone with the cluster; what it has committed stays in "
            f"{path}, and a job with that spec.checkpoint.path goes on from it"
        )
        display.__exit__(None, None, None)  # a live picture gives the terminal back
        sys.stdout.flush()
        os._exit(1)  # nothing of Ray's can be shut down any more: it would wait for the head

    return head_monitor.watched(gone, back, end)
