"""Views as HTML: sections of a page, and the report of a job as one file.

A section depends on the JSON of `holdfast status` alone. Jinja escapes every text, so a name or an
exception with HTML in it stays text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from holdfast.orchestrator import limits
from holdfast.orchestrator.cli import output, render
from holdfast.orchestrator.cli.report import PHASES, incident_lines
from holdfast.orchestrator.core.transitions import MEANING, TERMINAL
from holdfast.orchestrator.runtime.observe.view import Incident, JobView, NodeView

from . import charts

STATIC = Path(__file__).parent / "static"
PHASE_COLOURS = dict(zip(PHASES, ("red", "magenta", "blue", "cyan", "yellow"), strict=True))
CATEGORY_COLOURS = ("green", "cyan", "blue", "magenta", "yellow", "red", "bright_black")
SECTIONS = ("head", "time", "charts", "incidents", "nodes", "checkpoints", "plan")
HEALTHY = ("running", "starting")
NOTHING: Mapping[str, str] = MappingProxyType({})
MANY_NODES = 16
"""A job with more nodes shows those with trouble first."""
FRESH_S = 5.0
"""A younger heartbeat is one of now."""


VERBS = {
    "checkpoint": (
        "checkpoint now",
        "All ranks stage the same step, and it is written to storage.",
    ),
    "suspend": ("suspend", "A checkpoint is written, the workers stop and all nodes are released."),
    "resume": ("resume", "The suspended job gets nodes again and continues."),
    "resize": ("resize", "The job stops briefly and continues on this number of nodes."),
    "cancel": ("cancel", "The job ends permanently. Its record and its checkpoints stay."),
}
"""Verb of a request -> its button, and what happens."""


@functools.cache
def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("holdfast.orchestrator.ui"), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {
        "duration": output.duration, "size": output.size, "date": output.date,
        "clock": output.clock, "count": output.count, "plural": output.plural,
        "colour": colour, "bar": charts.bar, "meaning": MEANING, "terminal": TERMINAL,
    }  # fmt: skip
    return environment


def render_page(name: str, **values: Any) -> str:
    return templates().get_template(name).render(**values)


def colour(state: str) -> str:
    """The terminal's colour of a state, without its weight."""
    return output.STATE_STYLES.get(state, "bright_black").removeprefix("bold ")


# -- all jobs -----------------------------------------------------------------------------------
def jobs_section(views: Sequence[JobView], problems: Sequence[str], empty: str, where: str) -> str:
    rows = [_row(view) for view in sorted(views, key=lambda view: -view.submitted_ns)]
    return render_page("jobs.html", rows=rows, problems=problems, empty=empty, where=where)


def _row(view: JobView) -> dict[str, Any]:
    return {
        "view": view,
        "state": state_of(view),
        "age": _age(view),
        "steps": render.steps(view).replace(" steps", "") or "-",
        "left_s": left_s(view),
        "loss": "" if view.loss is None else f"{view.loss:.4f}",
        "nodes": sum(node.state == "member" for node in view.nodes),
        "goodput": render.goodput(view) if view.goodput else "",
    }


def _age(view: JobView) -> str:
    """Age of a job; of an ended job, its duration and the time of its submission."""
    end_ns = view.finished_ns or view.now_ns
    if not view.submitted_ns or not end_ns:
        return ""
    age = output.duration((end_ns - view.submitted_ns) / 1e9)
    return f"took {age}, {output.date(view.submitted_ns)}" if view.state in TERMINAL else age


def state_of(view: JobView) -> str:
    return view.state if view.controller_alive or view.state in TERMINAL else "unattended"


def left_s(view: JobView) -> float | None:
    """Seconds until the last step at the pace of now."""
    steps = view.total_steps - view.step - 1
    return steps * view.step_s if steps > 0 and view.step_s and view.state == "running" else None


# -- one job ------------------------------------------------------------------------------------
def job_sections(
    view: JobView, remarks: Sequence[str] = (), rejections: Mapping[str, str] = NOTHING
) -> dict[str, str]:
    """Name of each section -> its HTML; empty where the job has nothing of the kind.

    `rejections`: verb of a request that the reader may not send -> the right that is missing.
    """
    make: dict[str, Callable[[JobView], dict[str, Any] | None]] = {
        "time": _time, "charts": _charts, "incidents": _incidents, "nodes": _nodes,
        "checkpoints": _checkpoints, "plan": _plan,
    }  # fmt: skip
    sections = {
        "actions": render_page("actions.html", **_actions(view, rejections)),
        "stacks": "" if view.state in TERMINAL else render_page("stacks.html", view=view),
        "head": render_page("head.html", **_head(view, remarks)),
    }
    for name, values_of in make.items():
        values = values_of(view)
        sections[name] = "" if values is None else render_page(f"{name}.html", view=view, **values)
    return sections


def _actions(view: JobView, rejections: Mapping[str, str]) -> dict[str, Any]:
    """Requests that this state allows, and the rights that the reader lacks for some."""
    wanted = _wanted(view)
    missing = dict.fromkeys(rejections[verb] for verb in wanted if verb in rejections)
    verbs = {verb: VERBS[verb][0] for verb in wanted if verb not in rejections}
    return {"verbs": verbs, "missing": list(missing)}


def _wanted(view: JobView) -> list[str]:
    if view.state in TERMINAL or not view.controller_alive:
        return []  # nothing answers
    wanted = ["suspend", "resize", "cancel"]
    if view.state == "running" and view.own_checkpoint is None:
        wanted.insert(0, "checkpoint")
    if view.state in ("suspending", "suspended"):
        wanted = ["resume", "cancel"]
    return wanted


def _head(view: JobView, remarks: Sequence[str]) -> dict[str, Any]:
    end_ns = view.finished_ns or view.now_ns
    labelled = dict(render.fact_lines(view, []))
    facts = {name: str(text) for name, text in labelled.items() if name and name != "goodput"}
    problems = [view.storage_problem and render.storage_problem(view), view.journal_problem]
    problems += [f"{render.after(bad)}: {bad.problem}" for bad in view.refused_checkpoints]
    return {
        "view": view, "state": state_of(view), "facts": facts, "left_s": left_s(view),
        "steps": render.steps(view), "done": (view.step + 1) / (view.total_steps or 1),
        "age_s": (end_ns - view.submitted_ns) / 1e9 if view.submitted_ns and end_ns else None,
        "goodput": render.goodput(view) if view.goodput else "",
        "problems": [text for text in (*remarks, view.hold, *problems) if text],
    }  # fmt: skip


def _time(view: JobView) -> dict[str, Any] | None:
    total = sum(view.ledger.values()) - view.ledger.get("queued", 0.0)
    rows: list[dict[str, Any]] = [
        {"name": name, "colour": tint, "seconds": seconds, "meaning": meaning,
         "share": 0.0 if name == "queued" else seconds / (total or 1.0)}
        for name, (tint, meaning) in render.TIME_CAUSES.items()
        if (seconds := view.ledger.get(name, 0.0)) > 0
    ]  # fmt: skip
    if not rows:
        return None
    parts = [
        (row["colour"], row["seconds"], f"{row['name']}: {output.duration(row['seconds'])}")
        for row in rows
        if row["name"] != "queued"
    ]
    return {"rows": rows, "parts": parts, "total": total, "goodput": render.goodput(view)}


def _charts(view: JobView) -> dict[str, Any] | None:
    marks = [charts.Mark(incident.at_ns / 1e9, incident.title) for incident in view.incidents]
    of_history = view.history
    series = (
        ("loss", [(p.at_ns / 1e9, p.loss) for p in of_history if p.loss is not None], "{:.4f}"),
        ("step time", [(p.at_ns / 1e9, p.step_s) for p in of_history if p.step_s], "{:.3g} s"),
        ("tokens/s", [(p.at_ns / 1e9, p.tokens_per_s) for p in of_history if p.tokens_per_s], ""),
    )
    drawn = [
        charts.line(name, points, marks, form.format if form else output.count)
        for name, points, form in series
    ]
    charts_drawn = [chart for chart in drawn if chart is not None]
    return {"charts": charts_drawn, "history": of_history} if charts_drawn else None


def _incidents(view: JobView) -> dict[str, Any] | None:
    if not view.submitted_ns:
        return None
    longest = max((sum_s(incident) for incident in view.incidents), default=0.0)
    ended, rows = view.state in TERMINAL, []
    for shown in reversed(view.incidents):
        phases = [(name, s) for name, s in shown.seconds.items() if name != "total"]
        parts = [
            (PHASE_COLOURS.get(name, "bright_black"), s, f"{name}: {output.duration(s)}")
            for name, s in phases
        ]
        lines = [line.partition(": ") for line in incident_lines(shown, ended=ended)]
        facts = {name: text for name, _, text in lines if name not in ("phases", "outcome")}
        rows.append(
            {"one": shown, "title": render.incident_title(shown), "phases": phases, "parts": parts,
             "outcome": render.outcome(shown, ended=ended), "facts": facts,
             "colours": PHASE_COLOURS, "is_open": render.is_open(shown) and not ended}
        )  # fmt: skip
    return {"rows": rows, "longest": longest, "many": max(view.num_incidents, len(rows))}


def sum_s(one: Incident) -> float:
    return sum(seconds for name, seconds in one.seconds.items() if name != "total")


def _nodes(view: JobView) -> dict[str, Any] | None:
    if not view.nodes:
        return None
    workers = [worker for node in view.nodes for worker in node.workers]
    counted = Counter(worker.state for worker in workers)
    rows = [_node_row(node) for node in view.nodes]
    if len(rows) > MANY_NODES:
        rows.sort(key=lambda row: not row["trouble"])
    return {"rows": rows, "counted": counted.most_common(), "many": len(workers)}


def _node_row(node: NodeView) -> dict[str, Any]:
    steps = [worker.step for worker in node.workers if worker.step >= 0]
    newest = max(steps, default=-1)
    late = node.heartbeat_age_s is not None and node.heartbeat_age_s > FRESH_S
    ranks = []
    for worker in node.workers:
        doing = worker.phase if worker.state == "running" and worker.phase else worker.state
        behind = f", {output.plural(worker.step + 1, 'step')}" if 0 <= worker.step < newest else ""
        memory = f", {output.size(worker.memory_bytes)}" if worker.memory_bytes else ""
        ranks.append(
            {"worker": worker, "bad": worker.state not in HEALTHY,
             "title": f"rank {worker.rank}: {doing}{behind}{memory}"}
        )  # fmt: skip
    return {
        "node": node, "ranks": ranks, "late": late, "step": newest,
        "memory": max((worker.memory_bytes for worker in node.workers), default=0),
        "trouble": late or node.state not in ("member", "spare") or any(r["bad"] for r in ranks),
    }  # fmt: skip


def _checkpoints(view: JobView) -> dict[str, Any] | None:
    if view.step < 0 and not view.checkpoints and not view.own_checkpoint:
        return None
    return {"stored": view.checkpoints[::-1][:20]}


def _plan(view: JobView) -> dict[str, Any] | None:
    if view.planned is None:
        return None
    plan, tints = view.planned, CATEGORY_COLOURS
    parts = [
        (tints[number % len(tints)], float(amount), f"{name}: {output.size(amount)}")
        for number, (name, amount) in enumerate(plan.categories.items())
    ]
    names = [(name, tint, amount) for (name, amount), (tint, _, _) in
             zip(plan.categories.items(), parts, strict=True)]  # fmt: skip
    most = max(plan.device_memory_bytes, view.device_memory_peak_bytes, 1)
    return {"plan": plan, "parts": parts, "names": names, "most": most}


# -- one file -----------------------------------------------------------------------------------
def report_html(view: JobView, command: str) -> str:
    """The report of a job as one file: no script but its own, and nothing from elsewhere."""
    style, script = ((STATIC / name).read_text() for name in ("page.css", "charts.js"))
    return render_page(
        "report.html", view=view, sections=job_sections(view), names=SECTIONS, command=command,
        style=Markup(style), script=Markup(script), style_hash=_hash(style),
        script_hash=_hash(script), release=limits.RELEASE,
    )  # fmt: skip


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
