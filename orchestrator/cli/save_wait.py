"""`checkpoint save --wait`: request a checkpoint and wait until it is committed."""

from __future__ import annotations

import time

from ..errors import HoldfastError
from ..runtime.observe.view import JobView
from .output import stderr
from .render import FINISHED
from .targets.base import Response, Target

INTERVAL_S = 0.5
ABSENCE_S = 60.0
"""Without a controller nothing is committed. A new controller is usually there within seconds."""
BETWEEN_GENERATIONS = ("starting", "recovering")
"""The controller refuses requests for a checkpoint now and accepts them again within seconds."""


def save_and_wait(place: Target, name: str) -> Response:
    """Wait until a checkpoint of the requested step, or of a later one, is committed.

    A request ends with its generation, so each new generation gets a new request. Raises
    HoldfastError when the job does not train any more or has no controller, and UserError when the
    controller refuses the request.
    """
    step: int | None = None
    generation = 0
    """The generation that has the request; 0: none."""
    absent_since: float | None = None
    shown: set[str] = set()
    while True:
        job = place.find(name)
        view = job.view()
        newest = max((one.step for one in view.checkpoints), default=-1)
        if step is not None and newest >= step:
            return Response(f"step {newest} is committed", {"step": newest})
        if step is not None and (view.state == "suspended" or view.state in FINISHED):
            raise HoldfastError(_not_committed(view, step, view.state))
        absent_since = None if view.controller_alive else absent_since or time.monotonic()
        if absent_since is not None and time.monotonic() - absent_since > ABSENCE_S:
            raise HoldfastError(_not_committed(view, step, "no controller for a minute"))
        first = generation == 0 and view.state not in BETWEEN_GENERATIONS
        if first or (view.state == "running" and view.generation != generation):
            requested = _request(place, name, view)
            if requested is not None:
                step, generation = requested, view.generation
        problem = f"not committed yet: {view.storage_problem}" if view.storage_problem else ""
        for text in {*job.remarks(view), problem} - {"", *shown}:
            stderr().print(text, soft_wrap=True)
            shown.add(text)
        time.sleep(INTERVAL_S)


def _request(place: Target, name: str, view: JobView) -> int | None:
    """The requested step. None: the generation ended meanwhile, and the next one gets the request.

    Without a step in the answer it is the next step: on Kubernetes the step is in an Event, which
    not every user may read.
    """
    job = place.find(name)
    try:
        step = job.request("checkpoint").body.get("step")
    except HoldfastError:
        if job.view().state in BETWEEN_GENERATIONS:
            return None
        raise
    return view.step + 1 if step is None else int(step)


def _not_committed(view: JobView, step: int | None, what: str) -> str:
    newest = max((one.step for one in view.checkpoints), default=-1)
    has = f"the newest is of step {newest}" if newest >= 0 else "there is none"
    wanted = "a new checkpoint" if step is None else f"a checkpoint of step {step}"
    return f"job {view.name}: {what}, and {wanted} is not committed; {has}"
