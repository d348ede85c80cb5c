"""Carries out the core's actions, over an agent's link, the backend or the storage.

Owns: actions under way, and that each ends in exactly one result event. Must not: decide, retry or
time out; the core has deadlines for everything it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ..backends.base import Backend, Starts
from ..core.actions import (
    AnyAction,
    CommitManifest,
    DeleteCheckpoint,
    FinishJob,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StageStep,
    StopGroup,
)
from ..core.events import ActionFailed, ActionSucceeded, ActionUnknown, AnyEvent, GroupStopped
from ..protocol import messages as wire
from .agent_server import AgentConnection
from .checkpoint_store.async_store import AsyncCheckpointStore
from .evidence_budget import EvidenceBudget

NodeAction = LaunchGroup | StopGroup | StageStep
Result = str | tuple[str, ...]
"""Of an action that succeeded: a detail for people, or the names of promised nodes."""

SETTLE_S = 5.0
"""How long the end of a job or of its controller waits for storage to carry out what was asked."""


class Executor:
    """One job's actions."""

    def __init__(
        self,
        backend: Backend,
        tier: AsyncCheckpointStore,
        links: Mapping[str, AgentConnection],
        submit: Callable[[AnyEvent], None],
        evidence: EvidenceBudget,
    ) -> None:
        self._backend, self._tier, self._links = backend, tier, links
        self._submit = submit
        self._evidence = evidence
        self._waiting: dict[int, NodeAction] = {}
        """Sent to a node that has not answered yet."""
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, action: AnyAction) -> None:
        """Start an action; its result arrives through `submit`. Never blocks."""
        match action:
            case LaunchGroup():
                self._launch(action)
            case StopGroup():
                self._stop(action)
            case StageStep():
                self._stage(action)
            case PersistStep():
                self._persist(action)
            case RequestNodes():
                self._run(action, self._request_nodes(action))
            case ReleaseNode():
                self._run(action, self._release_node(action))
            case CommitManifest():
                self._run(action, self._commit(action))
            case DeleteCheckpoint():
                self._run(action, self._delete(action))
            case FinishJob():
                self._run(action, self._finish(action))

    async def close(self) -> None:
        """Let go of what is under way. A call to a store that does not answer is not waited for: it
        may get through later, which the next controller expects of the one before."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._settle_storage()

    # -- over a node's link --------------------------------------------------------------------
    def _launch(self, action: LaunchGroup) -> None:
        buddy = self._links.get(action.buddy)
        message = wire.LaunchWorkers(
            action_id=action.action_id,
            membership=action.membership,
            node_rank=action.node_rank,
            seats=action.seats,
            buddy=action.buddy if buddy else "",
            buddy_address=buddy.facts.address if buddy else "",
            buddy_port=buddy.facts.data_port if buddy else 0,
            persist_every_steps=action.persist_every_steps,
        )
        self._send(action, message)

    def _stop(self, action: StopGroup) -> None:
        message = wire.StopWorkers(
            action_id=action.action_id,
            generation=action.generation,
            grace_s=action.grace_s,
            stacks=action.stacks,
        )
        self._send(action, message)

    def _stage(self, action: StageStep) -> None:
        order = wire.Stage(
            action_id=action.action_id, generation=action.generation, step=action.step, hold=True
        )
        self._send(action, order)

    def _send(self, action: NodeAction, message: wire.Message) -> None:
        link = self._links.get(action.node)
        if link is None:
            # It may be on its way back, and what it runs is not known until it is here.
            self._unknown(action, f"{action.node} is not connected")
            return
        self._waiting[action.action_id] = action
        link.send(message)

    def _persist(self, action: PersistStep) -> None:
        """Succeeds when it is on its way; the files are reported one by one (Persisted)."""
        link = self._links.get(action.node)
        if link is None:
            self._failed(action, f"{action.node} is not connected")
            return
        link.send(
            wire.Persist(action_id=action.action_id, generation=action.generation, step=action.step)
        )
        self._succeeded(action, "")

    def answered(self, node: str, message: wire.Launched | wire.ShardStaged) -> None:
        action = self._waiting.get(message.action_id)
        # An answer to nothing that is asked now is an echo of an earlier connection.
        if isinstance(action, LaunchGroup | StageStep) and action.node == node:
            del self._waiting[message.action_id]
            if message.ok:
                self._succeeded(action, message.detail)
            else:
                self._failed(action, message.detail)

    def stopped(self, node: str, message: wire.Stopped) -> None:
        action = self._waiting.get(message.action_id)
        if isinstance(action, StopGroup) and action.node == node:
            del self._waiting[message.action_id]
            generation = message.generation
            self._submit(
                GroupStopped(
                    action_id=message.action_id,
                    node=node,
                    generation=generation,
                    exits=tuple(self._evidence.exit(generation, one) for one in message.exits),
                    staged=message.staged,
                    stacks=self._evidence.stacks(generation, message.stacks),
                    offered_port=message.offered_port,
                )
            )

    def forget(self, node: str, why: str) -> None:
        """The node was lost, or has come back over a new link: old answers will not come."""
        for action in [one for one in self._waiting.values() if one.node == node]:
            del self._waiting[action.action_id]
            self._unknown(action, why)

    # -- backend and storage -------------------------------------------------------------------
    def _run(self, action: AnyAction, work: Coroutine[Any, Any, Result]) -> None:
        task = asyncio.get_running_loop().create_task(self._result(action, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _result(self, action: AnyAction, work: Coroutine[Any, Any, Result]) -> None:
        try:
            result = await work
        # A backend's client and a storage driver raise what their libraries raise. Whatever it is,
        # the action failed, and the core must hear of it or it would wait for ever.
        except Exception as error:
            self._failed(action, str(error) or type(error).__name__)
        else:
            self._succeeded(action, result)

    async def _request_nodes(self, action: RequestNodes) -> tuple[str, ...]:
        return tuple(await self._backend.request_nodes(action.count, action.avoid))

    async def _release_node(self, action: ReleaseNode) -> str:
        link = self._links.get(action.node)
        if link is not None:
            link.send(wire.Shutdown(detail=action.reason.text))
        await self._backend.release_node(action.node)
        return ""

    async def _commit(self, action: CommitManifest) -> str:
        num_bytes = await self._tier.commit(action.step, action.mesh, action.files)
        committed = wire.Committed(generation=action.files[0].generation, step=action.step)
        for link in self._links.values():
            link.send(committed)
        return f"{num_bytes} bytes"

    async def _delete(self, action: DeleteCheckpoint) -> str:
        await self._tier.delete(action.step, action.written_by)
        return ""

    async def _finish(self, action: FinishJob) -> str:
        await self._settle_storage()
        for link in self._links.values():
            link.send(wire.Shutdown(detail=f"the job has {action.outcome}"))
        await self._backend.close(release=True)
        return ""

    async def _settle_storage(self) -> None:
        """Deletions under way, so that retention holds when the job has ended; not for long."""
        settled = asyncio.get_running_loop().create_task(self._tier.settle())
        await asyncio.wait([settled], timeout=SETTLE_S)
        settled.cancel()

    # -- results -------------------------------------------------------------------------------
    def _succeeded(self, action: AnyAction, result: Result) -> None:
        starts = self._backend.starts() if isinstance(action, RequestNodes) else Starts()
        self._submit(
            ActionSucceeded(
                action_id=action.action_id,
                generation=action.generation,
                detail=result if isinstance(result, str) else "",
                nodes=result if isinstance(result, tuple) else (),
                start_s=starts.usual_s,
                start_limit_s=starts.limit_s,
            )
        )

    def _failed(self, action: AnyAction, detail: str) -> None:
        self._submit(
            ActionFailed(action_id=action.action_id, generation=action.generation, detail=detail)
        )

    def _unknown(self, action: AnyAction, detail: str) -> None:
        self._submit(
            ActionUnknown(action_id=action.action_id, generation=action.generation, detail=detail)
        )
