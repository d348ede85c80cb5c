"""Journal events, and the decisions that followed from them, as lines for `holdfast debug events`.

Decisions are not stored: a Controller is given the same events again and decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console

from ..api.v1alpha1.job import redacted_document
from ..core import actions as a
from ..core import events as e
from ..core.controller import Controller
from ..journal.chunk_journal import Chunk, Store, read
from ..protocol import messages as m
from ..protocol.facts import Exit, state_after, steps_done
from ..protocol.host_memory import describe as describe_memory
from ..runtime.snapshot import decode
from .output import date, duration, plural, print_json_line, size, stdout


def sentence(event: e.AnyEvent) -> str:
    """The event in words."""
    fact = event.fact if isinstance(event, e.FromNode) else event
    describe: Callable[[Any], str] | None = _SENTENCES.get(type(fact))
    return describe(fact) if describe else type(fact).__name__


def document(event: e.AnyEvent) -> Any:
    """The event for JSON: a fact with its node, and no credentials."""
    if isinstance(event, e.FromNode):
        return {"node": event.node} | to_builtins(event.fact)
    if isinstance(event, e.JobSubmitted):
        return replace(event, spec=redacted_document(event.spec))
    return event


@dataclass
class _Refusal:
    """An action that failed last time, and is tried again."""

    action: str
    """The action with its reason."""
    result: str
    num_repeats: int = 0


def print_journal(
    store: Store, ended: Callable[[], bool], pause: Callable[[], None] | None, *, as_json: bool
) -> None:
    """Print what a journal keeps; with `pause`, which waits between two looks, also what is added
    until the job has ended."""
    console, formatter, after = stdout(), EventFormatter(), ""
    while True:
        # Before reading, so that the last records of a job that ends now are read.
        is_last = pause is None or ended()
        for chunk in read(store, after, history=True):
            formatter.print_chunk(console, chunk, as_json=as_json)
            after = chunk.name
        if is_last or pause is None:
            formatter.end(console, as_json=as_json)
            return
        pause()


class EventFormatter:
    """Prints the records of one journal, in order. A repeated refusal is printed once, and then how
    often it was repeated; JSON has them all."""

    def __init__(self) -> None:
        self._controller = Controller()
        self._actions: dict[int, str] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._num_records = self._now_ns = 0

    def print_chunk(self, console: Console, chunk: Chunk, *, as_json: bool) -> None:
        """Print its records. A snapshot is printed where records before it are gone."""
        if chunk.snapshot is not None and chunk.covered != self._num_records:
            self._num_records = chunk.covered
            self._print_snapshot(console, chunk.snapshot, as_json=as_json)
        for now_ns, event in chunk.records:
            self._num_records, self._now_ns = self._num_records + 1, now_ns
            self.print_record(console, now_ns, event, as_json=as_json)

    def _print_snapshot(self, console: Console, snapshot: bytes, *, as_json: bool) -> None:
        """Print that older records are gone, and continue from the state after them."""
        state, memory = decode(snapshot)
        self._controller = Controller(state)
        self._actions = {number: decision(action) for number, action in state.inflight.items()}
        if as_json:
            print_json_line({"at_ns": memory.now_ns, "facts_not_kept": self._num_records})
            return
        older = plural(self._num_records, "older event")
        since = f"{state.phase}, {steps_done(state.step)}: {state.reason.text}"
        console.print(
            f"{date(memory.now_ns)}  {'journal':<12}  {older} no longer kept; the job was {since}"
        )

    def print_record(
        self, console: Console, now_ns: int, event: e.AnyEvent, *, as_json: bool
    ) -> None:
        actions = self._controller.step(now_ns, event)
        if as_json:
            print_json_line({"at_ns": now_ns, "event": document(event), "actions": actions})
            return
        at = date(now_ns)
        if not isinstance(event, e.Tick):
            text = sentence(event)
            if isinstance(event, (e.ActionSucceeded, e.ActionFailed, e.ActionUnknown)):
                what = self._actions.pop(event.action_id, f"action {event.action_id}")
                text = text.replace(f"action {event.action_id}", what, 1)
                if self._is_repeated(what, text, failed=isinstance(event, e.ActionFailed)):
                    self._print_actions(console, at, actions)
                    return
                self._end_refusal(console, at, what)
                if isinstance(event, e.ActionFailed):
                    self._refusals[what] = _Refusal("", text)
            console.print(f"{at}  {source(event):<12}  {text}")
        self._print_actions(console, at, actions)

    def end(self, console: Console, *, as_json: bool) -> None:
        """No more records: print how often the last refusals were repeated."""
        if not as_json:
            for what in list(self._refusals):
                self._end_refusal(console, date(self._now_ns), what)

    def _print_actions(self, console: Console, at: str, actions: Iterable[a.AnyAction]) -> None:
        for action in actions:
            what = self._actions[action.action_id] = decision(action)
            text = f"{what}: {action.reason.text}"
            refusal = self._refusals.get(what)
            if refusal is not None:
                if refusal.action == text:
                    continue
                refusal.action = text
            console.print(f"{at}  {'->':<12}  {text}")

    def _is_repeated(self, what: str, text: str, *, failed: bool) -> bool:
        refusal = self._refusals.get(what)
        if refusal is None or not failed or refusal.result != text:
            return False
        refusal.num_repeats += 1
        return True

    def _end_refusal(self, console: Console, at: str, what: str) -> None:
        refusal = self._refusals.pop(what, None)
        if refusal is not None and refusal.num_repeats:
            times = plural(refusal.num_repeats, "more time")
            console.print(f"{at}  {'':<12}  {what} failed {times} like that")


def decision(action: a.AnyAction) -> str:
    """The action in words, without its reason."""
    kind = str(type(action).__struct_config__.tag).replace("-", " ")
    if isinstance(action, a.RequestNodes):
        return f"{kind} ({action.count})"
    if isinstance(action, (a.LaunchGroup, a.StopGroup)):
        return f"{kind} on {action.node}, generation {action.generation}"
    if isinstance(action, a.CommitManifest):
        return f"{kind} after {steps_done(action.step)}"
    if isinstance(action, a.StageStep):
        return f"stage {state_after(action.step)} on {action.node}"
    node = getattr(action, "node", "")
    return f"{kind} {node}".rstrip()


def source(event: e.AnyEvent) -> str:
    """The node that reported the event, or the controller."""
    return getattr(event, "node", "") or "controller"


def exit_text(exit: Exit) -> str:
    """Text about a worker's end."""
    if exit.signal is not None:
        import signal

        try:
            name = signal.Signals(exit.signal).name
        except ValueError:
            name = f"signal {exit.signal}"
        text = f"was killed by {name}"
        if exit.out_of_memory:
            text += ", out of memory"
    else:
        text = f"exited with code {exit.code}"
    if exit.by_us:
        text += ", stopped by Holdfast"
    if exit.error_type:
        text += f": {exit.error_type}: {exit.error_message}".rstrip(": ")
    return text


def _joined(event: m.NodeJoined) -> str:
    if event.ranks:
        ranks = ", ".join(map(str, event.ranks))
        return f"joined, running ranks {ranks} of generation {event.generation}"
    return f"joined with slots for {plural(event.facts.slots, 'worker')}"


def _stopped(event: m.GroupStopped) -> str:
    last = max((shard.step for shard in event.staged), default=None)
    staged = f"; {state_after(last)} is staged" if last is not None else ""
    return f"generation {event.generation} stopped{staged}"


def _step_completed(event: e.StepCompleted) -> str:
    loss = f", loss {event.loss:.4f}" if event.loss is not None else ""
    return f"all ranks have finished {steps_done(event.step)}{loss}"


def _result(word: str) -> Callable[[Any], str]:
    def describe(event: Any) -> str:
        detail = event.detail or ", ".join(getattr(event, "nodes", ()))
        return f"action {event.action_id} {word}" + (f": {detail}" if detail else "")

    return describe


def _by(event: Any) -> str:
    return f" by {event.by}" if event.by else ""


_SENTENCES: dict[type, Callable[[Any], str]] = {
    e.JobSubmitted: lambda v: f"job {v.job_id} submitted",
    e.ResizeRequested: lambda v: f"resize to {plural(v.nodes, 'node')} requested{_by(v)}",
    e.AdjustRequested: lambda v: (
        f"new settings for spec.nodes (min {v.min_nodes}, spares {v.spares}) and spec.recovery "
        f"requested{_by(v)}"
    ),
    e.AgainRequested: lambda v: f"a generation with new code requested{_by(v)}",
    e.SuspendRequested: lambda v: f"suspend requested{_by(v)}",
    e.ResumeRequested: lambda v: (
        f"resume{' from step 0' if v.start_over else ''} requested{_by(v)}"
    ),
    e.CancelRequested: lambda v: f"cancel requested{_by(v)}",
    e.FaultInjected: lambda v: (
        f"fault injected: {v.kind}" + (f" rank {v.rank}" if v.rank >= 0 else "") + _by(v)
    ),
    m.NodeJoined: _joined,
    m.StandbysReported: lambda v: (
        "its standbys are ready" if v.ready else "its standbys import what the script imports"
    ),
    e.NodeLost: lambda v: f"lost, {v.cause}" + (f": {v.detail}" if v.detail else ""),
    m.PreemptionNoticed: lambda v: f"preemption notice: {v.detail}",
    m.NodeRemarked: lambda v: v.text,
    m.OwnCheckpointSeen: lambda v: (
        f"the script would write its own checkpoint {v.path}, and waits"
        if v.waits
        else f"the script writes its own checkpoint {v.path}"
    ),
    m.OwnCheckpointRead: lambda v: f"the script reads its own checkpoint {v.path}",
    m.WorkerExited: lambda v: f"worker {v.exit.rank} {exit_text(v.exit)}",
    e.StepCompleted: _step_completed,
    e.HangDetected: lambda v: f"hang: {v.evidence}",
    e.HangSuspected: lambda v: f"hang suspected: {v.evidence}",
    e.HangSuspicionEnded: lambda v: f"progress after {v.seconds:.1f} s without any",
    e.CollectivesBegun: lambda v: "all ranks begin collectives; the script reports no steps",
    m.GroupInspected: lambda v: f"{plural(len(v.stacks), 'worker')} inspected",
    e.StragglerDetected: lambda v: f"straggler: {v.evidence}",
    e.HeartbeatsLost: lambda v: (
        f"no heartbeat from any of {plural(v.nodes, 'node')} for {v.seconds:.1f} s: this machine "
        f"may be overloaded or disconnected; they are declared lost after {v.patience_s:g} s"
    ),
    e.HeartbeatsRestored: lambda v: f"heartbeats arrive again, after {v.seconds:.1f} s without any",
    e.ActionSucceeded: _result("succeeded"),
    e.ActionFailed: _result("failed"),
    e.ActionUnknown: _result("result unknown (controller or connection lost)"),
    m.GroupStopped: _stopped,
    m.NodeMemoryPlanned: lambda v: f"host memory: {describe_memory(v.memory)}",
    m.ShardPersisted: lambda v: (
        f"shard {v.shard.shard} of {state_after(v.shard.step)} is in storage "
        f"({size(v.shard.num_bytes)} in {duration(v.seconds)})"
    ),
    m.PersistFailed: lambda v: f"shard {v.shard} of {state_after(v.step)} not stored: {v.detail}",
    e.CheckpointRefused: lambda v: f"checkpoint after {steps_done(v.step)} refused: {v.detail}",
    e.CheckpointsListed: lambda v: (
        "storage has checkpoints after "
        + ", ".join(map(steps_done, sorted({f.step for f in v.files})))
        if v.files
        else "storage has no checkpoint"
    ),
    e.ControllerStarted: lambda v: (
        "started" if v.incarnation <= 1 else f"started again, incarnation {v.incarnation}"
    ),
    e.Tick: lambda v: "timer fired",
}
