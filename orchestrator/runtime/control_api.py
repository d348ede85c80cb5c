"""The requests that the CLI may send to a running controller: verbs, arguments and replies.

Every change is an event. Injected faults are sent to the agent after their event is durable.
Questions about running workers (stacks, profile) change nothing and are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from ..api.v1alpha1 import Recovery, job_to_mapping
from ..backends.base import Backend, LimitsNodes, WithholdsCapacity
from ..core import events
from ..core.checkpoints import newest_committed, why_nothing_usable
from ..core.quiesce import pace_left_s, step_ahead
from ..core.requests import resize_problem
from ..errors import HoldfastError, UserError
from ..protocol import messages as wire
from ..protocol.facts import ShardFile, state_after
from .agent_server import AgentConnection, Connection
from .driver import Driver
from .inquiries import Inquiries, num_running
from .notifier import ChangeNotifier
from .observe.view import JobView

WATCH_INTERVAL_S = 0.25
CHAOS_KINDS = ("kill-worker", "kill-node", "hang-worker")


class ControlApi:
    """Answers requests. Raises UserError for what cannot be done as requested."""

    def __init__(
        self,
        driver: Driver,
        backend: Backend,
        links: Mapping[str, AgentConnection],
        view: Callable[[], JobView],
        changes: ChangeNotifier,
        welcome: Callable[[], wire.Welcome],
        list_checkpoints: Callable[[], Awaitable[tuple[ShardFile, ...]]],
        inquiries: Inquiries,
    ) -> None:
        self._driver, self._backend, self._links = driver, backend, links
        self._view, self._changes, self._welcome = view, changes, welcome
        self._list_checkpoints = list_checkpoints
        self._verbs: dict[str, Callable[[dict[str, Any]], Awaitable[wire.Reply]]] = {
            "status": self._status,
            "spec": self._spec,
            "resize": self._resize,
            "adjust": self._adjust,
            "again": self._again,
            "suspend": self._suspend,
            "resume": self._resume,
            "cancel": self._cancel,
            "chaos": self._chaos,
            "checkpoint": self._checkpoint,
            "stacks": lambda arguments: inquiries.stacks(self._driver.state, arguments),
            "profile": lambda arguments: inquiries.profile(self._driver.state, arguments),
        }

    async def handle(self, client: Connection, request: wire.Request) -> None:
        if request.verb == "watch":
            await self._watch(client)
            return
        client.send(await self.perform(request.verb, request.arguments))

    async def perform(self, verb: str, arguments: dict[str, Any]) -> wire.Reply:
        """Carry out any verb except `watch`; the reply comes when the change is durable. Raises
        UserError for what cannot be done as requested."""
        act = self._verbs.get(verb)
        if act is None:
            verbs = ", ".join(sorted([*self._verbs, "watch"]))
            raise UserError.of("verb", verb, f"one of {verbs}")
        return await act(arguments)

    async def _status(self, arguments: dict[str, Any]) -> wire.Reply:
        return wire.Reply(ok=True, body=view_body(self._view()))

    async def _spec(self, arguments: dict[str, Any]) -> wire.Reply:
        """The spec as it is now."""
        return wire.Reply(ok=True, body={"spec": job_to_mapping(self._driver.state.job)})

    async def _watch(self, client: Connection) -> None:
        """Send a view after every change until the client or the job ends."""
        while not client.closed:
            seen = self._changes.count
            client.send(wire.Reply(ok=True, body=view_body(self._view())))
            await asyncio.sleep(WATCH_INTERVAL_S)  # no person reads faster than that
            await self._changes.after(seen)

    # -- changes -------------------------------------------------------------------------------
    async def _resize(self, arguments: dict[str, Any]) -> wire.Reply:
        nodes = _integer(arguments, "nodes")
        state = self._driver.state
        if problem := resize_problem(state, nodes):
            raise UserError(problem)
        limit = self._backend.node_limit() if isinstance(self._backend, LimitsNodes) else None
        if limit is not None and nodes > limit:
            expected = f"at most {limit} at {state.job.spec.workers_per_node} workers per node"
            raise UserError.of("nodes", f"{nodes}", f"{expected}, on this machine")
        before = state.target_nodes
        interval_s = self._welcome().heartbeat_interval_s
        await self._request(events.ResizeRequested(nodes=nodes, by=_by(arguments)))
        if self._welcome().heartbeat_interval_s != interval_s:
            self._send_welcome()
        return wire.Reply(ok=True, detail=f"from {before} to {nodes} nodes")

    async def _adjust(self, arguments: dict[str, Any]) -> wire.Reply:
        """Apply the fields of a changed spec that a running job can follow, except its size."""
        try:
            recovery = Recovery.model_validate(arguments.get("recovery"))
        except ValidationError as error:
            raise UserError.of("recovery", str(error), "spec.recovery") from None
        low, spares = _integer(arguments, "min_nodes"), _integer(arguments, "spares")
        elasticity = arguments.get("elasticity")
        await self._request(
            events.AdjustRequested(
                min_nodes=low,
                spares=spares,
                recovery=recovery.model_dump(mode="json", by_alias=True),
                elasticity=tuple(elasticity) if isinstance(elasticity, list) else elasticity,
                by=_by(arguments),
            )
        )
        self._send_welcome()
        detail = f"nodes.min {low}, nodes.spares {spares}, recovery as in the spec"
        return wire.Reply(ok=True, detail=detail)

    def _send_welcome(self) -> None:
        """The heartbeat interval may have changed."""
        welcome = self._welcome()
        for link in list(self._links.values()):
            link.send(welcome)

    async def _again(self, arguments: dict[str, Any]) -> wire.Reply:
        """A new generation with edited code, on the nodes that the job has."""
        state = self._driver.state
        if state.phase == "finishing" or state.intent in ("cancel", "deadline"):
            raise UserError.of("job", state.phase, "a job that trains, or will")
        code, before = arguments.get("code"), state.job.spec.code or ""
        await self._request(
            events.AgainRequested(code=None if code is None else str(code), by=_by(arguments))
        )
        new = f"{'a new' if state.group.active else 'the next'} generation starts with it"
        return wire.Reply(ok=True, detail=f"new code: {new}", body={"before": before})

    async def _suspend(self, arguments: dict[str, Any]) -> wire.Reply:
        await self._request(events.SuspendRequested(by=_by(arguments)))
        own = self._driver.state.may_keep_own_checkpoints
        first = "the script is asked to end" if own else "the newest state goes to storage"
        return wire.Reply(ok=True, detail=f"{first}, then nodes are freed")

    async def _resume(self, arguments: dict[str, Any]) -> wire.Reply:
        state = self._driver.state
        if state.intent != "suspend":  # the phase may still be running
            raise UserError.of("job", state.phase, "a suspended job")
        start_over = bool(arguments.get("start_over"))
        if state.hold is not None and state.hold.ignored:
            await self._request(events.ResumeRequested(by=_by(arguments), start_over=start_over))
            how = "begins at step 0" if start_over else "has to read its own checkpoint"
            return wire.Reply(ok=True, detail=f"asking for nodes; the script {how}")
        if state.hold is not None:
            return await self._resume_from_hold(start_over, _by(arguments))
        if start_over:
            text = f"{state.phase}, which has checkpoints that can be used or never had any"
            fix = "resume it without --start-over, or submit another job"
            expected = "a job none of whose checkpoints can be used"
            raise UserError.of("--start-over", text, expected, fix)
        suspended = state.phase == "suspended"
        await self._request(events.ResumeRequested(by=_by(arguments)))
        return wire.Reply(ok=True, detail="asking for nodes" if suspended else "training continues")

    async def _resume_from_hold(self, start_over: bool, by: str) -> wire.Reply:
        """None of its checkpoints could be used. Storage may have a repaired one now."""
        try:
            files = await self._list_checkpoints()
        except HoldfastError as error:
            raise UserError(f"job: its checkpoints cannot be listed now: {error}") from None
        await self._request(events.CheckpointsListed(files=files))
        state = self._driver.state
        usable = newest_committed(state)
        if usable is None and not start_over:
            raise UserError(f"job: {why_nothing_usable(state)}")
        await self._request(events.ResumeRequested(by=by, start_over=start_over and not usable))
        if usable is not None:
            detail = f"asking for nodes; {state_after(usable.step)} is restored"
        else:
            detail = "asking for nodes; training begins at step 0"
        return wire.Reply(ok=True, detail=detail)

    async def _cancel(self, arguments: dict[str, Any]) -> wire.Reply:
        await self._request(events.CancelRequested(by=_by(arguments)))
        return wire.Reply(ok=True, detail="stopping all workers")

    async def _request(self, event: events.AnyEvent) -> None:
        state = self._driver.state
        if state.terminal:
            raise UserError.of("job", f"{state.phase}", "a job that has not ended")
        await self._driver.submit_durable(event)

    # -- faults and checkpoints ----------------------------------------------------------------
    async def _chaos(self, arguments: dict[str, Any]) -> wire.Reply:
        kind = str(arguments.get("kind", ""))
        if kind not in CHAOS_KINDS:
            raise UserError.of("kind", kind, f"one of {', '.join(CHAOS_KINDS)}")
        node, rank = self._target(kind, arguments)
        link = self._links.get(node)
        if link is None:
            raise UserError.of("node", f"{node}, not connected", "a connected node")
        hold_s = float(arguments.get("hold_s") or 0.0)
        backend = self._backend
        if hold_s and not isinstance(backend, WithholdsCapacity):
            raise UserError.of("hold_s", f"{hold_s:g}", "a backend that can withhold capacity")
        event = events.FaultInjected(kind=kind, node=node, rank=rank, by=_by(arguments))
        await self._driver.submit_durable(event)
        if hold_s and isinstance(backend, WithholdsCapacity):
            backend.withhold(hold_s)
        link.send(wire.Chaos(kind=kind, rank=rank))
        what = f"{node}" if kind == "kill-node" else f"worker {rank} on {node}"
        body = {"kind": kind, "node": node, "rank": rank, "hold_s": hold_s}
        return wire.Reply(ok=True, detail=f"{kind}: {what}", body=body)

    def _target(self, kind: str, arguments: dict[str, Any]) -> tuple[str, int]:
        """(node, rank); the last ones by default."""
        state = self._driver.state
        size = num_running(state)
        node = arguments.get("node")
        if kind == "kill-node" and node is not None:
            if node not in state.nodes:
                names = ", ".join(state.nodes)
                raise UserError.of("node", f"{node}", f"one of {names}")
            return str(node), -1
        rank = size - 1
        if node is not None:
            if node not in state.group.members:
                members = ", ".join(state.group.members)
                raise UserError.of("node", f"{node}", f"one of {members}")
            rank = state.group.members.index(str(node)) * state.job.spec.workers_per_node
        if arguments.get("rank") is not None:
            rank = _integer(arguments, "rank")
        if not 0 <= rank < size:
            raise UserError.of("rank", f"{rank}", f"0 to {size - 1}")
        return state.node_of(rank), -1 if kind == "kill-node" else rank

    async def _checkpoint(self, arguments: dict[str, Any]) -> wire.Reply:
        """Have all members write the same step, a little ahead of the current one."""
        state = self._driver.state
        if state.phase == "running":
            await asyncio.sleep(pace_left_s(state))
        if state.phase != "running":
            raise UserError.of("job", state.phase, "a running job")
        unrecorded = max(0, self._view().step - state.step)  # steps that only heartbeats report
        generation, step = state.generation, step_ahead(state) + unrecorded
        stages_every_step = state.stage_every_steps == 1
        for link in [self._links[name] for name in state.group.members if name in self._links]:
            if not stages_every_step:
                link.send(wire.Stage(action_id=0, generation=generation, step=step))
            link.send(wire.Persist(action_id=0, generation=generation, step=step))
        text = f"{state_after(step)} goes to storage"
        return wire.Reply(ok=True, detail=text, body={"step": step})


def view_body(view: JobView) -> dict[str, Any]:
    """The view as JSON-able values."""
    body: dict[str, Any] = msgspec.to_builtins(view)
    return body


def _integer(arguments: dict[str, Any], name: str) -> int:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError.of(name, repr(value), "an integer")
    return value


def _by(arguments: dict[str, Any]) -> str:
    return str(arguments.get("by", ""))
