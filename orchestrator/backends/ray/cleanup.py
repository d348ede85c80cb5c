"""What a job has in the cluster, ended without its controller.

Owns: finding and ending all of it. Must not: do so while a controller could; it cannot checkpoint,
and asks nobody.
"""

from __future__ import annotations

import contextlib
from typing import Any

from . import actors, names, placement_groups


def end(job: str) -> None:
    """SIGKILL for the controller, the agents with their workers, and the room they had."""
    import ray

    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == names.NAMESPACE and names.belongs(one["name"], job):
            _kill(one["name"])
    placement_groups.remove_all(job)


def _kill(name: str) -> None:
    import ray

    with contextlib.suppress(ValueError):  # it has just ended
        actor: Any = ray.get_actor(name, names.NAMESPACE)
        actors.kill(actor)
