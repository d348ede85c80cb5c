"""Asking for a checkpoint, and waiting until it is there.

Owns: when it is asked for once more, and when there is nothing to wait for any more. Must not: know
where the job is.
"""

from __future__ import annotations

import time

from ..errors import HoldfastError
from ..runtime.observe.view import JobView
from .output import stderr
from .render import FINISHED
from .targets.base import Response, Target

INTERVAL_S = 0.5
ABSENCE_S = 60.0
"""Without a controller nothing is committed; another one is there within seconds, where somebody
starts one."""


def save_and_wait(place: Target, name: str) -> Response:
    """Until a checkpoint of the step that was asked for, or of a later one, is committed.

    A generation takes the wish with it when it ends: then the next one is asked. Raises
    HoldfastError once the job does not train any more or nobody controls it, UserError when it
    cannot be asked.
    """
    view = place.find(name).view()
    step = _asked(place, name, view)
    absent_since: float | None = None
    told: set[str] = set()
    while True:
        job = place.find(name)
        now = job.view()
        newest = max((one.step for one in now.checkpoints), default=-1)
        if newest >= step:
            return Response(f"step {newest} is committed", {"step": newest})
        if now.state == "suspended" or now.state in FINISHED:
            raise HoldfastError(_without(now, step, now.state))
        absent_since = None if now.controller_alive else absent_since or time.monotonic()
        if absent_since is not None and time.monotonic() - absent_since > ABSENCE_S:
            raise HoldfastError(_without(now, step, "nobody has controlled it for a minute"))
        if now.state == "running" and now.generation != view.generation:
            view, step = now, _asked(place, name, now)
        problem = f"not committed yet: {now.storage_problem}" if now.storage_problem else ""
        for text in {*job.remarks(now), problem} - {"", *told}:
            stderr().print(text, soft_wrap=True)
            told.add(text)
        time.sleep(INTERVAL_S)


def _asked(place: Target, name: str, view: JobView) -> int:
    """The step; at the least the next one, where the answer does not say it: Kubernetes has Events
    for that, which not everybody may read."""
    step = place.find(name).request("checkpoint").body.get("step")
    return view.step + 1 if step is None else int(step)


def _without(view: JobView, step: int, what: str) -> str:
    newest = max((one.step for one in view.checkpoints), default=-1)
    has = f"the newest is of step {newest}" if newest >= 0 else "there is none"
    return f"job {view.name}: {what}, and a checkpoint of step {step} is not committed; {has}"
