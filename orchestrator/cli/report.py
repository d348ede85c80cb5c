"""The report of a job: how it ended, where the time went, what happened and what it cost.

Owns: its layout. Must not: compute; everything is in the view, which is also what `--json` prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..runtime.view import Incident, JobView
from .output import clock, count, date, duration, plural, size, state_text
from .render import FINISHED, ledger, outcome, storage_problem

PHASES = ("detect", "stop", "place", "launch", "first-step")


def print_report(console: Console, view: JobView) -> None:
    console.print(report(view), soft_wrap=not console.is_terminal)


def report(view: JobView) -> Group:
    parts: list[RenderableType] = [_title(view), *_summary(view)]
    if view.ledger:
        parts += ["", Text(f"goodput {view.goodput:.1%}", style="bold"), ledger(view)]
    if view.incidents:
        parts += ["", Text(plural(len(view.incidents), "incident"), style="bold")]
        ended = view.state in FINISHED
        parts += [_incident(incident, ended=ended) for incident in view.incidents]
    elif view.submitted_ns:
        parts += ["", "no incidents"]
    parts += ["", *_checkpoints(view)]
    if view.traceback:
        parts += ["", Text("the error that ended it", style="bold"), Text(view.traceback.rstrip())]
    return Group(*parts)


def _title(view: JobView) -> Text:
    text = Text(view.name, style="bold")
    text.append("  ")
    text.append_text(state_text(view.state))
    end = view.finished_ns or view.now_ns
    if view.submitted_ns and end:
        verb = "after" if view.state in FINISHED else "for"
        text.append(f" {verb} {duration((end - view.submitted_ns) / 1e9)}")
    return text


def _summary(view: JobView) -> Iterator[str]:
    if view.reason:
        yield view.reason
    if view.submitted_ns:
        yield f"submitted {date(view.submitted_ns)}, job id {view.job_id}"
    steps = f"{view.step + 1} of {view.total_steps} steps" if view.total_steps else ""
    if not steps and view.step >= 0:
        steps = plural(view.step + 1, "step")
    loss = f"loss {view.loss:.4f}" if view.loss is not None else ""
    speed = f"{count(view.tokens_per_s)} tokens/s" if view.tokens_per_s else ""
    pace = f"{view.step_s:.3f} s per step" if view.step_s else ""
    if line := ", ".join(part for part in (steps, loss, speed, pace) if part):
        yield line
    if view.world_size:
        world = f"{plural(view.world_size, 'worker')}, {view.strategy}: {view.mesh}"
        restarts = sum(view.restarts.values())
        yield f"{world}; generation {view.generation}, {plural(restarts, 'restart')}"
    if view.controller_restarts:
        yield f"controller taken over {plural(view.controller_restarts, 'time')}"


def _incident(incident: Incident, *, ended: bool) -> RenderableType:
    head = Text(f"{incident.number}. {clock(incident.at_ns)}  ")
    head.append(incident.title, style="bold")
    label = f"  {incident.failure_class}" + (", rehearsal" if incident.rehearsal else "")
    head.append(label, style="dim")
    lines = (textwrap.indent(line, "   ") for line in incident_lines(incident, ended=ended))
    return Group(head, *lines)


def incident_lines(incident: Incident, *, ended: bool = False) -> Iterator[str]:
    """What is known of it, one fact per line."""
    culprit = incident.culprit_node
    if incident.culprit_rank is not None:
        culprit = f"rank {incident.culprit_rank}" + (f" on {culprit}" if culprit else "")
    if culprit:
        yield f"culprit: {culprit}"
    if incident.evidence:
        yield f"evidence: {incident.evidence}"
    if incident.decision:
        yield f"decision: {incident.decision}"
    yield f"outcome: {outcome(incident, ended=ended)}"
    known = [name for name in PHASES if name in incident.seconds]
    known += [name for name in incident.seconds if name not in (*PHASES, "total")]
    if known:
        yield "phases: " + ", ".join(f"{name} {duration(incident.seconds[name])}" for name in known)
    if incident.traceback:
        yield incident.traceback.rstrip()
    # Victims all wait in the same collective; the culprit's stack is the one that tells.
    culprits = {str(incident.culprit_rank)} & incident.stacks.keys() or incident.stacks.keys()
    for who, stack in incident.stacks.items():
        if who not in culprits:
            continue
        yield f"stack of rank {who}:\n{stack.rstrip()}"
    if left := len(incident.stacks) - len(culprits):
        yield f"{plural(left, 'more stack')} in --json"


def _checkpoints(view: JobView) -> Iterator[str | Text]:
    if view.storage_problem:
        yield Text(storage_problem(view), style="red")
    if not view.checkpoints:
        yield f"no checkpoint in storage ({view.checkpoint_path})" if view.checkpoint_path else ""
        return
    last = view.checkpoints[-1]
    yield f"checkpoint of step {last.step} ({size(last.num_bytes)}) in {view.checkpoint_path}"
    yield f"take it out with: holdfast checkpoint export {view.name} DIRECTORY"
