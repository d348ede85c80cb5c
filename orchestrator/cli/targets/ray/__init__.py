"""Jobs on a Ray cluster."""

from __future__ import annotations

from typing import Any

import typer

from ....parts import is_installed


def choose(address: str, verb: str) -> Any:
    """Return an address's target. At a dashboard's, status and logs read what is there, and run and
    submit hand a job in; any other command runs again inside the cluster, and this process exits
    with its exit code. Raises ModuleNotFoundError without Ray."""
    if not is_installed("ray"):
        raise ModuleNotFoundError(name="ray")
    if address.startswith(("http://", "https://")):
        from .dashboard import COMMANDS, DashboardTarget
        from .jobs_api import forward

        if verb in COMMANDS:
            return DashboardTarget(address)
        raise typer.Exit(forward(address))
    from .target import RayTarget

    return RayTarget(address)
