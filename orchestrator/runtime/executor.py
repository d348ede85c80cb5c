"""Carries out the actions of one job over an agent's connection, the backend or the storage tier.

Every action ends in exactly one result event. There are no retries and no time limits here: the
core has a timer for everything that it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from holdfast.orchestrator import tasks

from ..backends.base import Backend
from ..core.actions import (
    AnyAction,
    CleanStorage,
    CommitManifest,
    FinishJob,
    InspectGroup,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    Retained,
    StageStep,
    StopGroup,
    ToNode,
)
from ..core.events import ActionFailed, ActionSucceeded, ActionUnknown, AnyEvent
from ..protocol import messages as wire
from ..protocol.facts import LaunchIncident, OwnCheckpoint
from .agent_server import AgentConnection
from .checkpoint_store.async_store import ThreadedCheckpointStore
from .checkpoint_store.options import answer_of
from .checkpoint_store.store import CheckpointStore, NotCovered
from .translate import Answer, AwaitedAnswers, NodeAction, to_message

Result = dict[str, Any]
"""Fields of ActionSucceeded."""


class Executor:
    """One job's actions. Results arrive through `submit`."""

    def __init__(
        self,
        backend: Backend,
        store: ThreadedCheckpointStore,
        links: Mapping[str, AgentConnection],
        submit: Callable[[AnyEvent], None],
        settle_s: float = 5.0,
        incidents: Callable[[int], tuple[LaunchIncident, ...]] = lambda generation: (),
        own_checkpoints: Callable[[], tuple[OwnCheckpoint, ...]] = tuple,
    ) -> None:
        """`settle_s`: how long `close` and the end of the job wait for the storage tier to finish
        the calls that are under way. `incidents`: those that led to the launch of a generation.
        `own_checkpoints`: what the script has written."""
        self._backend, self._store, self._links = backend, store, links
        self._submit, self._settle_s = submit, settle_s
        self._incidents, self._own_checkpoints = incidents, own_checkpoints
        self._awaited = AwaitedAnswers()
        self._tasks = tasks.TaskSet()

    def carry_out(self, action: AnyAction | ToNode) -> None:
        """Start an action. Never blocks."""
        match action:
            case LaunchGroup() | StopGroup() | StageStep():
                self._send(action)
            case ToNode(node, message):
                if (link := self._links.get(node)) is not None:
                    link.send(message)
            case PersistStep() | InspectGroup():
                self._send_unanswered(action)
            case RequestNodes():
                self._run(action, self._request_nodes(action))
            case ReleaseNode():
                self._run(action, self._release_node(action))
            case CommitManifest():
                self._run(action, self._commit(action))
            case CleanStorage():
                self._run(action, self._clean(action.retained))
            case FinishJob():
                self._run(action, self._finish(action))

    async def close(self) -> None:
        """Cancel what is under way. A storage call that is not answered is not waited for: it may
        get through later, and the next controller expects that."""
        await tasks.end(self._tasks)
        await self._settle_storage()

    # -- over an agent's connection ------------------------------------------------------------
    def _send(self, action: NodeAction) -> None:
        link = self._links.get(action.node)
        if link is None:
            # The node may reconnect, and what it runs is not known until then.
            self._unknown(action, f"{action.node} is not connected")
            return
        self._awaited.sent(action)
        if not isinstance(action, LaunchGroup):
            link.send(to_message(action))
            return
        buddy = self._links.get(action.buddy)
        history = self._incidents(action.generation), self._own_checkpoints()
        link.send(to_message(action, buddy.facts if buddy is not None else None, *history))

    def _send_unanswered(self, action: PersistStep | InspectGroup) -> None:
        """Succeeds when it is sent; what follows is a fact (ShardPersisted, GroupInspected)."""
        link = self._links.get(action.node)
        if link is None:
            self._failed(action, f"{action.node} is not connected")
            return
        link.send(to_message(action))
        self._succeeded(action, {})

    def expects(self, node: str, message: Answer) -> bool:
        """True if this answers an action that is under way, which then ends."""
        return self._awaited.take(node, message) is not None

    def forget(self, node: str, why: str) -> None:
        """The node was lost or has reconnected: answers over the old connection will not come."""
        for action in self._awaited.forget(node):
            self._unknown(action, why)

    # -- backend and storage -------------------------------------------------------------------
    def _run(self, action: AnyAction, work: Coroutine[Any, Any, Result]) -> None:
        self._tasks.start(self._result(action, work))

    async def _result(self, action: AnyAction, work: Coroutine[Any, Any, Result]) -> None:
        try:
            result = await work
        # Clients of backends and storage drivers raise what their libraries raise. Without a
        # result event the core would wait without end, so every exception becomes one.
        except Exception as error:
            final = isinstance(error, NotCovered)
            text = answer_of(error) or str(error) or type(error).__name__
            self._failed(action, text, final=final)
        else:
            self._succeeded(action, result)

    async def _request_nodes(self, action: RequestNodes) -> Result:
        nodes = tuple(await self._backend.request_nodes(action.count, action.avoid))
        starts = self._backend.starts()
        return {"nodes": nodes, "start_s": starts.usual_s, "start_limit_s": starts.limit_s}

    async def _release_node(self, action: ReleaseNode) -> Result:
        link = self._links.get(action.node)
        if link is not None:
            link.send(wire.Shutdown(detail=action.reason.text))
        await self._backend.release_node(action.node)
        return {}

    async def _commit(self, action: CommitManifest) -> Result:
        num_bytes = await self._store.call(
            CheckpointStore.commit, action.step, action.mesh, action.files
        )
        generation = action.files[0].generation
        committed = wire.Committed(generation=generation, step=action.step)
        for link in self._links.values():
            link.send(committed)
        return {"detail": f"{num_bytes} bytes"}

    async def _clean(self, retained: Retained) -> Result:
        deleted = await self._store.call(CheckpointStore.clean, retained)
        return {"detail": f"deleted {', '.join(deleted)}" if deleted else ""}

    async def _finish(self, action: FinishJob) -> Result:
        await self._settle_storage()
        for link in self._links.values():
            link.send(wire.Shutdown(detail=f"the job has {action.outcome}"))
        await self._backend.close(release=True)
        # A store that does not answer must not keep a job that has ended from its end.
        cleaning = asyncio.get_running_loop().create_task(self._clean(action.retained))
        done, _ = await asyncio.wait([cleaning], timeout=self._settle_s)
        if not done:
            cleaning.cancel()
            return {"detail": f"storage was not cleaned in {self._settle_s:g} s"}
        error = cleaning.exception()
        return {"detail": f"storage was not cleaned: {error}"} if error else cleaning.result()

    async def _settle_storage(self) -> None:
        """Wait for commits and deletions under way."""
        settled = asyncio.get_running_loop().create_task(self._store.settle())
        await asyncio.wait([settled], timeout=self._settle_s)
        settled.cancel()

    # -- results -------------------------------------------------------------------------------
    def _succeeded(self, action: AnyAction, result: Result) -> None:
        self._submit(
            ActionSucceeded(action_id=action.action_id, generation=action.generation, **result)
        )

    def _failed(self, action: AnyAction, detail: str, *, final: bool = False) -> None:
        self._submit(
            ActionFailed(
                action_id=action.action_id,
                generation=action.generation,
                detail=detail,
                final=final,
            )
        )

    def _unknown(self, action: AnyAction, detail: str) -> None:
        self._submit(
            ActionUnknown(action_id=action.action_id, generation=action.generation, detail=detail)
        )
