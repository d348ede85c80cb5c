"""Jobs on a Ray cluster."""

from __future__ import annotations

from typing import Any

import typer


def choose(address: str) -> Any:
    """Return an address's target. At a dashboard's, status, report and logs read what is there; any
    other command runs again inside the cluster, and this process exits with its exit code."""
    if address.startswith(("http://", "https://")):
        from .dashboard import DashboardTarget, can_look
        from .jobs_api import forward

        if can_look():
            return DashboardTarget(address)
        raise typer.Exit(forward(address))
    from .target import RayTarget

    return RayTarget(address)
