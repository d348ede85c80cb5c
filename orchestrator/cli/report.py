"""The report of a job: how it ended, where the time went, and what each incident cost."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ..core.transitions import TERMINAL
from ..runtime.observe.view import Incident, JobView
from . import render
from .output import clock, date, duration, plural, size, state_text

PHASES = ("detect", "stop", "place", "launch", "first-step")


STACK_LINES = 15
"""Frames shown of the culprit's main thread, innermost first."""


def local_command(*words: str) -> str:
    """A command line for a local job."""
    return " ".join(["holdfast", *words])


def report(
    view: JobView,
    *,
    stacks: bool = False,
    command: Callable[..., str] = local_command,
    can_read: bool = True,
) -> Group:
    """`stacks`: print all stacks in full, not only the culprit's main thread. `command` makes the
    command lines of hints. `can_read`: this machine can read the checkpoints."""
    parts: list[RenderableType] = [_title(view), *_summary(view)]
    if view.ledger:
        share = Text(f"goodput {render.goodput(view)}", style="bold")
        share.append(" of the time since the first launch", style="not bold")
        parts += ["", share, render.ledger(view)]
        if view.step < 0 and view.ledger.get("productive"):
            parts.append(
                "no steps are reported: time is productive, except loading, hangs and restarts"
            )
    if view.incidents:
        parts += ["", _count(view)]
        ended = view.state in TERMINAL
        printed = {view.traceback: "at the end of this report"} if view.traceback else {}
        parts += [_incident(i, printed, ended=ended, stacks=stacks) for i in view.incidents]
    elif view.submitted_ns:
        parts += ["", "no incidents"]
    parts += ["", *_checkpoints(view, command, can_read)]
    if view.traceback:
        parts += [
            "",
            Text("the error that ended the job", style="bold"),
            Text(view.traceback.rstrip()),
        ]
    return Group(*parts)


def _count(view: JobView) -> Text:
    many = max(view.num_incidents, len(view.incidents))
    text = Text(plural(many, "incident"), style="bold")
    if many > len(view.incidents):
        text.append(f"; only the newest {len(view.incidents)} are kept", style="not bold")
    return text


def _title(view: JobView) -> Text:
    text = Text(view.name, style="bold")
    text.append("  ")
    text.append_text(state_text(view.state))
    end = view.finished_ns or view.now_ns
    if view.submitted_ns and end:
        verb = "after" if view.state in TERMINAL else "for"
        text.append(f" {verb} {duration((end - view.submitted_ns) / 1e9)}")
    return text


def _summary(view: JobView) -> Iterator[str]:
    if view.reason:
        yield view.reason
    if view.submitted_ns:
        yield f"submitted {date(view.submitted_ns)}, job id {view.job_id}"
    loss = f"loss {view.loss:.4f}" if view.loss is not None else ""
    pace = f"{view.step_s:.3f} s per step" if view.step_s else ""
    facts = (render.steps(view), loss, *render.throughput(view), pace)
    yield from filter(None, [", ".join(filter(None, facts))])
    if view.world_size:
        mesh = f", {view.strategy}: {view.mesh}" if view.mesh else ""
        world = f"{plural(view.world_size, 'worker')}{mesh}; generation {view.generation}"
        yield f"{world}, restarts: {render.restarts(view)}"
    if line := "; ".join(render.planned(view)):
        yield f"planned: {line}"
    if view.controller_restarts:
        yield f"controller restarted {plural(view.controller_restarts, 'time')}"


def _incident(
    incident: Incident, printed: dict[str, str], *, ended: bool, stacks: bool
) -> RenderableType:
    """`printed`: traceback -> where the report prints it, so that none is printed twice."""
    head = Text(f"{incident.number}. {clock(incident.at_ns)}  ")
    head.append(incident.title, style="bold")
    label = f"  {incident.failure_class}" + (", injected" if incident.rehearsal else "")
    head.append(label, style="dim")
    lines = [*incident_lines(incident, ended=ended)]
    if where := printed.get(incident.traceback):
        lines.append(f"traceback: {where}")
    elif incident.traceback:
        printed[incident.traceback] = f"as in incident {incident.number}"
        lines.append(incident.traceback.rstrip())
    lines += _stacks(incident, full=stacks)
    return Group(head, *(textwrap.indent(line, "   ") for line in lines))


def incident_lines(incident: Incident, *, ended: bool = False) -> Iterator[str]:
    """The facts of an incident, one per line, without tracebacks and stacks."""
    culprit = incident.culprit_node
    if incident.culprit_rank is not None:
        culprit = f"rank {incident.culprit_rank}" + (f" on {culprit}" if culprit else "")
    if incident.culprit_machine and incident.culprit_machine != culprit:
        culprit += f" (machine {incident.culprit_machine})"
    if culprit:
        yield f"culprit: {culprit}"
    if incident.evidence:
        yield f"evidence: {incident.evidence}"
    if incident.decision:
        yield f"decision: {incident.decision}"
    yield f"outcome: {render.outcome(incident, ended=ended)}"
    timed = [name for name in PHASES if name in incident.seconds]
    timed += [name for name in incident.seconds if name not in (*PHASES, "total")]
    if timed:
        yield "phases: " + ", ".join(f"{name} {duration(incident.seconds[name])}" for name in timed)


def _stacks(incident: Incident, *, full: bool) -> Iterator[str]:
    """Stacks; by default only the culprit's, since the other ranks wait in the same collective."""
    if not incident.stacks:
        return
    if full:
        for rank, stack in incident.stacks.items():
            yield f"stack of rank {rank}:\n{stack.rstrip()}"
        return
    culprit = str(incident.culprit_rank)
    rank = culprit if culprit in incident.stacks else next(iter(incident.stacks))
    lines = main_thread(incident.stacks[rank])
    yield f"stack of rank {rank}, innermost call first:\n" + "\n".join(lines[:STACK_LINES])
    hidden = [f"{len(lines) - STACK_LINES} more frames"] if len(lines) > STACK_LINES else []
    others = len(incident.stacks) - 1
    hidden += [f"the stacks of {plural(others, 'other rank')}"] if others else []
    if hidden:
        yield f"(--stacks shows {' and '.join(hidden)})"


def main_thread(stack: str) -> list[str]:
    """The frames of the main thread, innermost first. py-spy names it `MainThread`, the agent
    `Current thread`."""
    frames: list[str] = []
    inside = False
    for line in stack.splitlines():
        if line.startswith(("Thread ", "Current thread ", "Process ")):
            inside = "MainThread" in line or line.startswith("Current thread ")
        elif inside and line.startswith(" "):
            frames.append(f"  {line.strip()}")
    return frames or stack.rstrip().splitlines()


def _checkpoints(
    view: JobView, command: Callable[..., str], can_read: bool
) -> Iterator[str | Text]:
    if view.storage_problem:
        yield Text(render.storage_problem(view), style="red")
    if view.staging:
        yield f"staged in memory {view.staging}"
    if view.own_checkpoint is not None:
        own = view.own_checkpoint
        yield f"the script last wrote {own}" if own else "no checkpoint of the script was seen"
        return
    if not view.checkpoints:
        yield f"no checkpoint in storage ({view.checkpoint_path})" if view.checkpoint_path else ""
        return
    last = view.checkpoints[-1]
    yield f"checkpoint {render.after(last)} ({size(last.num_bytes)}) in {view.checkpoint_path}"
    if view.result:
        if view.state == "succeeded":
            yield f"the trained model is in {view.result}"
    elif can_read:
        yield f"export it with: {command('checkpoint', 'export', view.name, 'DIRECTORY')}"
    else:
        yield "export it where that path is mounted: holdfast checkpoint export PATH DIRECTORY"
