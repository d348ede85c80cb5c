"""The controller's process: real Controller and Monitor, a journal, an executor; it can crash.

Owns: persist, then act; the replay; what the runtime's driver, relay and executor do, in virtual
time. Must not: decide.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping
from holdfast.orchestrator.core import actions as a
from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.protocol import messages as m

from .virtual_time import NS

if TYPE_CHECKING:
    from .network import Link
    from .world import World

NodeAction = a.LaunchGroup | a.StopGroup | a.StageStep
CrashPoint = Literal["before-journal", "after-journal", "between-actions"]
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, e.AnyEvent])


class Host:
    def __init__(self, world: World) -> None:
        self.world = world
        self.job = job_from_mapping(world.document)
        self.up = False
        self.journal: list[bytes] = []
        self.durable = 0
        """Records that a commit has made so; the rest dies with a controller whose journal is
        behind a network, and in every other world it does."""
        self.forgets = world.seed % 2 == 1
        self.links: dict[str, Link] = {}
        self.waiting: dict[int, NodeAction] = {}
        self.crash_at: CrashPoint | None = None
        self.crashes = 0
        self._incarnation = 0
        self._life = 0
        self._wake_ns: int | None = None

    # -- life ---------------------------------------------------------------------------------
    def start(self) -> None:
        self._life += 1
        self._wake_ns = None
        self.controller = Controller()
        self.monitor = ProgressMonitor(self.job, self.controller)
        for record in self.journal:
            now_ns, event = _DECODER.decode(record)
            self.controller.step(now_ns, event)
            self.monitor.observe(now_ns, event)
        self.up = True
        inflight: dict[int, a.AnyAction] = {}
        if self.journal:
            inflight = dict(self.controller.state.inflight)
            self._incarnation = self.controller.state.incarnation + 1
            self.world.oracle.restarted(self.controller.state)
        else:
            self._incarnation = 1
            document = job_to_mapping(self.job)
            self.handle(e.JobSubmitted(job_id="j", spec=document, spec_directory="."))
        if not self.up:
            return
        files = self.world.storage.committed()
        self.handle(
            e.ControllerStarted(
                incarnation=self._incarnation,
                committed=files,
                nodes=tuple(self.world.backend_nodes()),
            )
        )
        for action_id in inflight:
            self.handle(e.ActionUnknown(action_id=action_id, detail="the controller ended"))

    def crash(self) -> None:
        """SIGKILL."""
        self.world.tell("** the controller dies")
        if self.forgets:
            del self.journal[self.durable :]
        self.up = False
        self.crashes += 1
        self.crash_at = None
        self.waiting.clear()
        for link in list(self.links.values()):
            link.close()
        self.links.clear()
        self.world.after(self.world.between(0.1, 4.0), self.start)

    # -- the driver ---------------------------------------------------------------------------
    def handle(self, first: e.AnyEvent) -> None:
        """One event, and what the monitor concludes from it."""
        if not self.up:
            return
        pending = deque([first])
        while pending and self.up:
            event = pending.popleft()
            now = self.world.now
            if not isinstance(event, e.HeartbeatReceived):
                self._decide(now, event)
            if self.up:
                pending.extend(self.monitor.observe(now, event))
        self._sleep()

    def _decide(self, now: int, event: e.AnyEvent) -> None:
        world = self.world
        phase = self.controller.state.phase if self.controller.submitted else None
        actions = self.controller.step(now, event)
        crash = self.crash_at if actions else None
        if crash == "before-journal":
            self.crash()
            return
        self.journal.append(_ENCODER.encode((now, event)))
        if actions or self.controller.state.phase != phase:
            self.durable = len(self.journal)
        if not isinstance(event, e.Tick | e.ActionSucceeded | e.StepCompleted) or actions:
            world.tell(f"{_short(event)}  [{self.controller.state.phase}]")
        world.oracle.decided(self.controller.state, event, actions)
        if crash == "after-journal":
            self.crash()
            return
        for index, action in enumerate(actions):
            if crash == "between-actions" and index == (len(actions) + 1) // 2:
                self.crash()
                return
            world.tell(f"    -> {_short(action)}")
            self._carry_out(action)
        if crash:
            self.crash()

    def _sleep(self) -> None:
        if not self.up:
            return
        times = (self.controller.next_deadline_ns(), self.monitor.next_deadline_ns())
        due = min((at for at in times if at is not None), default=None)
        if due is None or (self._wake_ns is not None and self.world.now < self._wake_ns <= due):
            return
        self._wake_ns = max(due, self.world.now + 1)
        self.world.at(self._wake_ns, lambda at=self._wake_ns, life=self._life: self._wake(at, life))

    def _wake(self, at: int, life: int) -> None:
        if at != self._wake_ns or life != self._life or not self.up:
            return
        self._wake_ns = None
        due = self.controller.next_deadline_ns()
        if due is not None and due <= self.world.now:
            self.handle(e.Tick())
        elif self.up:
            for verdict in self.monitor.observe(self.world.now, e.Tick()):
                self.handle(verdict)
        self._sleep()

    # -- the executor -------------------------------------------------------------------------
    def _later(self, delay_s: float, event: e.AnyEvent) -> None:
        life = self._life
        self.world.after(delay_s, lambda: self.handle(event) if life == self._life else None)

    def _result(self, action: a.AnyAction, detail: str = "", ok: bool = True) -> None:
        kind = e.ActionSucceeded if ok else e.ActionFailed
        self._later(self.world.between(0.001, 0.2), kind(action_id=action.action_id, detail=detail))

    def _carry_out(self, action: a.AnyAction) -> None:
        world = self.world
        match action:
            case a.LaunchGroup():
                message = m.LaunchWorkers(
                    action_id=action.action_id,
                    membership=action.membership,
                    node_rank=action.node_rank,
                    seats=action.seats,
                    buddy=action.buddy,
                    persist_every_steps=action.persist_every_steps,
                )
                self._send(action, message)
            case a.StopGroup():
                stop = m.StopWorkers(
                    action_id=action.action_id,
                    generation=action.generation,
                    grace_s=action.grace_s,
                    stacks=action.stacks,
                )
                self._send(action, stop)
            case a.StageStep():
                order = m.Stage(
                    action_id=action.action_id,
                    generation=action.generation,
                    step=action.step,
                    hold=True,
                )
                self._send(action, order)
            case a.PersistStep():
                link = self.links.get(action.node)
                if link is not None:
                    link.to_agent(
                        m.Persist(
                            action_id=action.action_id,
                            generation=action.generation,
                            step=action.step,
                        )
                    )
                self._result(action, ok=link is not None)
            case a.RequestNodes():
                names = world.request_nodes(action.count)
                self._later(
                    world.between(0.001, 0.2),
                    e.ActionSucceeded(action_id=action.action_id, nodes=tuple(names))
                    if names
                    else e.ActionFailed(action_id=action.action_id, detail="no capacity"),
                )
            case a.ReleaseNode():
                link = self.links.get(action.node)
                if link is not None:
                    link.to_agent(m.Shutdown(detail=action.reason.text))
                world.after(0.01, lambda: world.release(action.node))
                self._result(action)
            case a.CommitManifest():
                world.after(world.between(0.01, 0.1), lambda: self._commit(action, self._life))
            case a.DeleteCheckpoint():
                world.storage.delete(action.step, action.written_by)
                self._result(action)
            case a.FinishJob():
                world.after(0.02, world.release_all)
                self._result(action)

    def _commit(self, action: a.CommitManifest, life: int) -> None:
        # The storage thread of a killed controller may still get through.
        self.world.storage.commit(action.step, action.generation, action.mesh, action.files)
        if life == self._life:
            for link in self.links.values():
                link.to_agent(m.Committed(generation=action.generation, step=action.step))
            self._result(action)

    def _send(self, action: NodeAction, message: m.ToAgent) -> None:
        link = self.links.get(action.node)
        if link is None:
            self._later(0.0, e.ActionUnknown(action_id=action.action_id, detail="not connected"))
            return
        self.waiting[action.action_id] = action
        link.to_agent(message)

    def _forget(self, node: str) -> None:
        for action in [one for one in self.waiting.values() if one.node == node]:
            del self.waiting[action.action_id]
            self._later(0.0, e.ActionUnknown(action_id=action.action_id, detail="a new link"))

    # -- the relay ----------------------------------------------------------------------------
    def received(self, link: Link, message: object) -> None:
        node = link.node.name
        if isinstance(message, m.Hello):
            self._hello(link, message)
            return
        if self.links.get(node) is not link:
            return
        match message:
            case m.Heartbeat():
                self.handle(
                    e.HeartbeatReceived(
                        node=node,
                        generation=message.generation,
                        workers=message.workers,
                        staged_step=message.staged_step,
                    )
                )
            case m.WorkerExitReport():
                self.handle(
                    e.WorkerExited(node=node, generation=message.generation, exit=message.exit)
                )
            case m.Launched() | m.ShardStaged():
                action = self.waiting.pop(message.action_id, None)
                if action is not None:
                    kind = e.ActionSucceeded if message.ok else e.ActionFailed
                    self.handle(kind(action_id=message.action_id, detail=message.detail))
            case m.Stopped():
                if self.waiting.pop(message.action_id, None) is not None:
                    self.handle(
                        e.GroupStopped(
                            action_id=message.action_id,
                            node=node,
                            generation=message.generation,
                            exits=message.exits,
                            staged=message.staged,
                            stacks=message.stacks,
                            offered_port=message.offered_port,
                        )
                    )
            case m.Persisted():
                self.handle(
                    e.ShardPersisted(node=node, generation=message.generation, shard=message.shard)
                )
            case m.NodeLeaving():
                self.handle(
                    e.PreemptionNoticed(node=node, detail=message.detail, grace_s=message.grace_s)
                )
            case m.ShardPersistFailed():
                self.handle(
                    e.PersistFailed(
                        node=node,
                        generation=message.generation,
                        step=message.step,
                        shard=message.shard,
                        detail=message.detail,
                        tried=message.tried,
                    )
                )

    def _hello(self, link: Link, hello: m.Hello) -> None:
        state = self.controller.state
        if state.terminal or hello.node in state.released_nodes:
            link.to_agent(m.Refused(detail="given up", final=True))
            return
        old = self.links.get(hello.node)
        self.links[hello.node] = link
        if old is not None:
            old.close()
        link.to_agent(
            m.Welcome(
                spec={},
                spec_directory=".",
                checkpoint_path="",
                log_directory="",
                heartbeat_interval_s=self.job.spec.recovery.heartbeat_interval_s,
            )
        )
        self._forget(hello.node)
        self.handle(
            e.NodeJoined(
                node=hello.node,
                facts=hello.facts,
                generation=hello.generation,
                ranks=hello.ranks,
                staged=hello.staged,
                offered_port=hello.offered_port,
            )
        )

    def link_closed(self, link: Link) -> None:
        node = link.node.name
        if self.links.get(node) is not link:
            return
        del self.links[node]
        if node not in self.world.backend_nodes():
            self._later(0.001, e.NodeLost(node=node, cause="disconnected", detail="link closed"))


def _short(value: msgspec.Struct) -> str:
    """One line of the transcript."""
    parts = []
    for name in value.__struct_fields__:
        shown = getattr(value, name)
        if name in ("reason",):
            parts.append(f"({shown.text})")
        elif name == "staged":
            steps = {f"{s.step}.g{s.generation}": None for s in shown}
            parts.append(f"staged={','.join(steps)}")
        elif name == "membership":
            restore = shown.restore
            at = f"{restore.step}.g{restore.generation}" if restore else "nothing"
            tier = "storage" if restore and restore.directory else "memory"
            parts.append(f"gen={shown.generation} {shown.mesh.describe()} from {tier} {at}")
        elif name == "exit":
            parts.append(f"rank={shown.rank} code={shown.code} signal={shown.signal}")
            parts.append(f"{shown.error_type} step={shown.step}")
        elif name == "seats":
            parts.append(f"ranks={[seat.rank for seat in shown]}")
        elif name in ("facts", "spec", "files", "exits", "stacks", "mesh", "committed"):
            continue
        elif name == "shard" and not isinstance(shown, int):
            parts.append(f"step={shown.step} shard={shown.shard}")
        else:
            parts.append(f"{name}={shown}")
    return f"{type(value).__name__} {' '.join(parts)}"


__all__ = ["NS", "Host"]
