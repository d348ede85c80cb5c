"""A JobView as text and tables, for the live display, `status` and `report`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..core.transitions import TERMINAL
from ..runtime.observe.view import CheckpointView, Incident, JobView, NodeView, RefusedCheckpoint
from .output import clock, columns, count, duration, plural, size, sparkline, state_text

TIME_CAUSES = {
    "queued": ("blue", "before the first launch; not counted in shares"),
    "productive": ("green", "new training steps"),
    "starting": ("cyan", "first launch to first step"),
    "recovering": ("red", "from a failure to the next step"),
    "redone": ("yellow", "lost steps trained again"),
    "stalled": ("magenta", "training blocked by checkpoint staging"),
    "waiting": ("blue", "waiting for nodes"),
    "suspended": ("bright_black", "suspended, or held for a decision"),
    "finishing": ("cyan", "final checkpoint and shutdown"),
}
BAR_WIDTH = 40


def live(view: JobView, losses: list[float]) -> Group:
    """The live display."""
    parts: list[RenderableType] = [header(view), *_progress(view), facts(view, losses)]
    if view.nodes:
        parts += ["", nodes(view)]
    if view.incidents:
        parts += ["", incidents(view.incidents[-6:], ended=view.state in TERMINAL)]
    return Group(*parts)


def status(view: JobView) -> Group:
    """The same for `holdfast status`, printed once."""
    return live(view, [])


def header(view: JobView) -> Text:
    text = Text()
    text.append(view.name, style="bold")
    text.append("  ")
    text.append_text(state_text(view.state))
    if view.reason and view.state != "running":  # the reason of an earlier step is old then
        text.append(f"  {view.reason}", style="dim")
    return text


def steps(view: JobView) -> str:
    """Number of finished steps. Names of directories and JSON count from 0."""
    if view.total_steps:
        return f"{view.step + 1} of {view.total_steps} steps"
    return plural(view.step + 1, "step") if view.step >= 0 else ""


def _progress(view: JobView) -> Iterator[RenderableType]:
    if not view.total_steps:
        return
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=view.total_steps, completed=view.step + 1, width=BAR_WIDTH)
    left_s = (view.total_steps - view.step - 1) * view.step_s
    left = f", {duration(left_s)} left" if left_s > 0 and view.state == "running" else ""
    grid.add_row(bar, f"{steps(view)}{left}")
    yield grid


def throughput(view: JobView) -> Iterator[str]:
    """Tokens per second, in all and of one GPU, and MFU, as far as they are known."""
    if view.tokens_per_s:
        yield f"{count(view.tokens_per_s)} tokens/s"
        if gpus := view.gpus_per_worker * view.world_size:
            yield f"{count(view.tokens_per_s / gpus)} per GPU"
    if view.mfu is not None:
        yield f"MFU {view.mfu:.1%}"


def planned(view: JobView) -> Iterator[str]:
    """Figures that the planner predicted, beside those measured."""
    plan = view.planned
    if plan is None:
        return
    memory = f"{size(plan.device_memory_bytes)} per {_where(view)}"
    measured = view.device_memory_peak_bytes
    yield memory + _beside(view, size(measured) if measured else "")
    if plan.step_s is not None:
        step = f"{view.step_s:.3f} s" if view.step_s else ""
        yield f"{plan.step_s:.3f} s per step" + _beside(view, step)
    if plan.sent_bytes:
        sent = f"{size(plan.sent_bytes)} sent by a rank in a step"
        yield sent + _beside(view, size(view.sent_bytes) if view.sent_bytes else "")


def _where(view: JobView) -> str:
    """Device of the memory; on CPUs that is the worker's process."""
    return "device" if view.gpus_per_worker else "worker"


def _beside(view: JobView, measured: str) -> str:
    if measured:
        return f" (measured: {measured})"
    return " (measured: unknown)" if view.step >= 0 else ""


def devices(view: JobView) -> str:
    if not view.gpus_per_worker:
        return "no GPUs: the workers train on the CPU"
    return f"{plural(view.gpus_per_worker, 'GPU')} per worker"


def facts(view: JobView, losses: list[float]) -> Table:
    """Two columns: name and value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in fact_lines(view, losses):
        grid.add_row(name, value)
    return grid


def fact_lines(view: JobView, losses: list[float]) -> Iterator[tuple[str, str | Text]]:
    if view.step >= 0 and not view.total_steps:
        yield "steps", str(view.step + 1)
    if view.loss is not None:
        line = sparkline(losses)
        yield "loss", f"{view.loss:.4f}" + (f"  {line}" if line else "")
    if view.step_s:
        pace = f"{view.step_s:.3f} s per step"
        yield "speed", ", ".join(part for part in (*throughput(view), pace) if part)
    if view.world_size:
        mesh = f", {view.strategy}: {view.mesh}" if view.mesh else ""
        yield "world", f"{plural(view.world_size, 'worker')}{mesh}, generation {view.generation}"
        yield "devices", devices(view)
    yield "checkpoint", checkpoints(view)
    if view.keeping:
        yield "failures", view.keeping
    if view.staging:
        yield "staging", view.staging
    if view.copies_thrown_away:
        count_of = plural(view.copies_thrown_away, "staged step")
        yield "", f"{count_of} thrown away: a tensor was written meanwhile, see the worker's log"
    if view.copied_step >= 0:
        yield "at buddies", copies(view)
    if view.host_memory is not None:
        short = view.host_memory.given_up != "nothing"
        yield "host memory", Text(view.host_memory.text, style="yellow" if short else "")
    for bad in view.refused_checkpoints:
        yield "refused", Text(f"{after(bad)}, {bad.refusal}: {bad.problem}", style="red")
    if view.storage_problem:
        yield "storage", Text(storage_problem(view), style="red")
    if view.journal_problem:
        yield "journal", Text(view.journal_problem, style="red")
    if view.relaunches:
        yield "restarts", restarts(view)
    if view.goodput:
        yield "goodput", goodput(view)
    if view.device_memory_peak_bytes:
        yield "memory", f"{size(view.device_memory_peak_bytes)} peak per {_where(view)}"
    if view.sent_bytes:
        yield "sent", f"{size(view.sent_bytes)} by a rank in a step"
    if line := "; ".join(planned(view)):
        yield "planned", line
    if view.metrics_port and view.controller_alive and view.state not in TERMINAL:
        yield "metrics", f"http://127.0.0.1:{view.metrics_port}/metrics"


def goodput(view: JobView) -> str:
    """Goodput; lost steps of a script that are not known count as productive time."""
    unknown = view.steps_lost is None or view.steps_lost_at_least
    return f"{'at most ' if unknown else ''}{view.goodput:.1%}"


def restarts(view: JobView) -> str:
    """`4 (charged to budgets: 2 infrastructure, 1 hang)`: a resize, for example, is not charged."""
    charged = ", ".join(f"{number} {name}" for name, number in view.restarts.items() if number)
    return f"{view.relaunches}" + (f" (charged to budgets: {charged})" if charged else "")


def checkpoints(view: JobView) -> str:
    """The newest one in each tier, or the script's own."""
    if view.own_checkpoint is not None:
        return view.own_checkpoint or "no checkpoint yet"
    memory = f"after {plural(view.memory_step + 1, 'step')}" if view.memory_step >= 0 else "none"
    last = view.checkpoints[-1] if view.checkpoints else None
    storage = f"{after(last)} ({size(last.num_bytes)})" if last else "none"
    return f"memory: {memory}; storage: {storage}"


def after(checkpoint: CheckpointView | RefusedCheckpoint) -> str:
    return f"after {plural(checkpoint.step + 1, 'step')}"


def copies(view: JobView) -> str:
    """Copies of the buddy tier."""
    return plural(view.copied_step + 1, "step") + (f"; {view.copies}" if view.copies else "")


def storage_problem(view: JobView) -> str:
    """Message with the path that failed, the cause, and the next attempt."""
    end = "" if view.state in TERMINAL else "; the next checkpoint tries again"
    return f"{view.checkpoint_path}: {view.storage_problem}{end}"


def nodes(view: JobView) -> Table:
    names = ("node", "state", "address", "heartbeat", "workers")
    table = columns(*names, leaves_out=("address", "heartbeat"))
    for node in view.nodes:
        heartbeat = "" if node.heartbeat_age_s is None else f"{node.heartbeat_age_s:.1f} s ago"
        table.add_row(node.name, state_text(node.state), node.address, heartbeat, _workers(node))
    return table


def _workers(node: NodeView) -> Text:
    text = Text()
    for worker in node.workers:
        if text:
            text.append("  ")
        doing = worker.phase if worker.state == "running" and worker.phase else worker.state
        text.append(f"{worker.rank} ")
        text.append_text(state_text(doing))
    return text


def incidents(found: list[Incident], *, ended: bool = False) -> Table:
    table = columns("time", "incident", "outcome")
    for incident in found:
        style = "yellow" if incident.generation_after is None else ""
        title = Text(incident_title(incident), style=style)
        table.add_row(clock(incident.at_ns), title, outcome(incident, ended=ended))
    return table


def incident_title(incident: Incident) -> str:
    return incident.title + (" (injected)" if incident.rehearsal else "")


def is_open(incident: Incident) -> bool:
    """True if the job has not finished a step of all ranks since then."""
    return "total" not in incident.seconds


def outcome(incident: Incident, *, ended: bool = False) -> str:
    """The result in one line. `ended`: the job has ended."""
    if is_open(incident):
        if incident.overtaken_by is not None:
            return f"superseded by incident {incident.overtaken_by}"
        if incident.no_steps and "launch" in incident.seconds:
            ran = duration(sum(incident.seconds.values()))
            return f"all workers run after {ran}, when training continued is unknown"
        return "the job ended" if ended else incident.decision or "in progress"
    resumed = "next step"
    if incident.inferred:
        resumed = "collectives again (no steps are reported)"
    parts = [f"{resumed} after {duration(incident.seconds['total'])}"]
    least = "at least " * incident.steps_lost_at_least
    if incident.steps_lost is not None and (incident.steps_lost or not least):
        parts.append(f"{least}{plural(incident.steps_lost, 'step')} lost")
    if incident.restored_from and incident.restored_from != "nothing":
        parts.append(f"restored from {incident.restored_from}")
    before, after = incident.world_size_before, incident.world_size_after
    if after is not None and after != before:
        parts.append(f"{before} -> {after} workers")
    return ", ".join(parts)


class _Bar(Bar):
    """A bar that takes the room there is, to BAR_WIDTH."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, BAR_WIDTH)


def ledger(view: JobView) -> Table:
    """Time by cause: one labelled bar each, readable without colours."""
    total = sum(view.ledger.values()) - view.ledger.get("queued", 0.0) or 1.0
    grid = Table.grid(padding=(0, 2))
    for name, (colour, meaning) in TIME_CAUSES.items():
        seconds = view.ledger.get(name, 0.0)
        if seconds <= 0:
            continue
        share = 0.0 if name == "queued" else seconds / total
        bar = _Bar(1.0, 0.0, share, color=colour)
        cells = (name, bar, duration(seconds), f"{share:.1%}" if share else "")
        grid.add_row(*cells, Text(meaning, style="dim"))
    return grid
