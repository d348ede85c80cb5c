"""The controller's process in virtual time: the production loop over a simulated journal, network,
backend and storage. It can crash at any point between an event and the last of its actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core import actions as a
from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core import invariants
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.runtime import translate
from holdfast.orchestrator.runtime.job_loop import JobLoop, Ready

if TYPE_CHECKING:
    from .network import Link
    from .world import World

CrashPoint = Literal["before-journal", "after-journal", "between-actions"]
COMMIT_S = 0.05
DEPOSED_S = 5.0
"""A controller that cannot renew its lease ends by then."""
CLOCKS_DIFFER_S = 2.0
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, e.AnyEvent])


class WatchedController(Controller):
    """The production controller; `watch` sees every step."""

    watch: Callable[[e.AnyEvent, tuple[a.AnyAction, ...]], None] | None = None

    def step(self, now_ns: int, event: e.AnyEvent) -> tuple[a.AnyAction, ...]:
        actions = super().step(now_ns, event)
        invariants.check(self.state)
        if self.watch is not None:
            self.watch(event, actions)
        return actions


class SimJournal:
    """The durable records. In every other world the uncommitted ones die with their controller."""

    def __init__(self, loses_uncommitted: bool, compact_at: int | None) -> None:
        self.loses_uncommitted, self.compact_at = loses_uncommitted, compact_at
        self.snapshot: bytes | None = None
        self.records: list[bytes] = []
        """Records since the snapshot."""
        self.all: list[bytes] = []
        """Records since the beginning, which no controller reads."""
        self.num_compactions = 0
        self._num_durable = 0
        self.broken = False
        """True while the disk is full: what is appended stays in the memory of the controller."""

    problem = ""

    @property
    def full(self) -> bool:
        due = self.compact_at is not None and len(self.records) >= self.compact_at
        return due and not self.broken

    def append(self, record: Record) -> None:
        self.records.append(_ENCODER.encode(tuple(record)))
        self.all.append(self.records[-1])

    def commit(self) -> None:
        if not self.broken:
            self._num_durable = len(self.records)

    def compact(self, snapshot: bytes) -> None:
        self.snapshot = snapshot
        self.num_compactions += 1
        self.records.clear()
        self._num_durable = 0

    def crash(self) -> None:
        loses = self.loses_uncommitted or self.broken
        lost = len(self.records) - self._num_durable if loses else 0
        del self.records[len(self.records) - lost :]
        del self.all[len(self.all) - lost :]

    @staticmethod
    def decode(records: list[bytes]) -> list[Record]:
        return [Record(*_DECODER.decode(record)) for record in records]


class Host:
    def __init__(self, world: World, journal: SimJournal | None = None) -> None:
        self.world = world
        self.job = job_from_mapping(world.document)
        self.up = False
        self.deposed = False
        """Another controller has claimed the journal."""
        self.skew_ns = 0
        """Nanoseconds that the clock of this controller is ahead."""
        self.journal = journal or SimJournal(
            loses_uncommitted=world.seed % 2 == 1, compact_at=(None, 7, 40)[world.seed % 3]
        )
        self.slow_commits = world.seed % 4 == 3
        self.links: dict[str, Link] = {}
        self.crash_at: CrashPoint | None = None
        self.crashes = 0
        self.num_snapshots_restored = 0
        self.loop: JobLoop
        self._awaited = translate.AwaitedAnswers()
        self._committing = False
        self._life = 0
        self._storage_s = 0.0
        """Time at which the last call of the storage tier ends."""
        self._wake_ns: int | None = None

    @property
    def now(self) -> int:
        return self.world.now + self.skew_ns

    @property
    def submitted(self) -> bool:
        return self.loop.controller.submitted

    @property
    def state(self) -> JobState:
        return self.loop.state

    def history(self) -> list[Record]:
        return self.journal.decode(self.journal.all)

    # -- life ----------------------------------------------------------------------------------
    def start(self) -> None:
        self._life += 1
        self._wake_ns, self._committing = None, False
        self._awaited = translate.AwaitedAnswers()
        self.loop = self._restored()
        controller = self.loop.controller
        assert isinstance(controller, WatchedController)
        if controller.submitted:
            self.world.oracle.restarted(controller.state)
        controller.watch = self._decided
        self.up = True
        submission = e.JobSubmitted(job_id="j", spec=self.world.document, spec_directory=".")
        nodes = tuple(self.world.backend_nodes())
        storage = self.world.storage
        committed = () if storage.away else storage.committed()
        self.loop.start(self.now, submission, committed, nodes, listed=not storage.away)
        self._turn()

    def _restored(self) -> JobLoop:
        """The loop restored from the journal; a snapshot must give what a replay gives."""
        journal = self.journal
        loop = self._restore(journal.snapshot, journal.records)
        if journal.snapshot is not None:
            known, expected = _known(loop), _known(self._restore(None, journal.all))
            self.world.oracle.require(known == expected, "snapshot and replay differ")
            self.num_snapshots_restored += 1
        return loop

    def _restore(self, snapshot: bytes | None, records: list[bytes]) -> JobLoop:
        return JobLoop.restore(
            self.job, snapshot, SimJournal.decode(records), make_controller=WatchedController
        )

    def crash(self) -> None:
        """SIGKILL."""
        self.world.log("** the controller dies")
        self.world.crashed_s = self.world.time_s
        self.journal.crash()
        self.up = False
        self.crashes += 1
        self.crash_at = None
        for node in self.world.nodes.values():
            if node.link is not None and node.link.host is self:  # its Hello may be under way
                node.link.close()
        self.links.clear()
        away_s = self.world.between(0.1, 4.0)
        self.world.blind_s += away_s + limits.RECONNECT_MAX_S
        self.world.after(away_s, self.start)

    def take_over(self) -> Host:
        """Another controller claims the journal, on a machine with a clock of its own. This one
        lives on until its next commit, or until it notices that it does not lead any more."""
        self.world.log("** another controller takes over")
        self.journal.crash()
        self.deposed = True
        controller = self.loop.controller
        assert isinstance(controller, WatchedController)
        controller.watch = None
        heir = Host(self.world, self.journal)
        heir.skew_ns = round(self.world.takeovers.uniform(-CLOCKS_DIFFER_S, CLOCKS_DIFFER_S) * 1e9)
        heir.crashes, heir.num_snapshots_restored = self.crashes, self.num_snapshots_restored
        heir.start()
        self.world.after(self.world.takeovers.uniform(0.0, DEPOSED_S), self.stand_down)
        return heir

    def stand_down(self) -> None:
        """A controller that was superseded ends."""
        if self.up:
            self.up = False
            for link in list(self.links.values()):
                link.close()

    # -- the loop ------------------------------------------------------------------------------
    def handle(self, event: e.AnyEvent) -> None:
        if self.up:
            self.loop.feed(self.now, event)
            self._turn()

    def _turn(self) -> None:
        """Do one turn as driver.py does."""
        if self._committing:
            return
        ready = self.loop.ready(self.now)
        if self.deposed and ready.must_commit:
            self.stand_down()  # JournalLost
            return
        crash = self.crash_at if ready.actions else None
        if crash == "before-journal":
            self.crash()
            return
        for record in () if self.deposed else ready.records:
            self.journal.append(record)
        if not self.slow_commits or not ready.must_commit:
            self._committed(ready, crash)
            return
        self._committing = True
        life = self._life
        self.world.after(
            self.world.between(0.0, COMMIT_S),
            lambda: self._committed(ready, crash) if self.up and life == self._life else None,
        )

    def _committed(self, ready: Ready, crash: CrashPoint | None) -> None:
        if self.deposed and ready.must_commit:
            self._committing = False
            self.stand_down()
            return
        if self.deposed:
            pass
        elif self.journal.full and self.submitted:
            self.journal.compact(self.loop.snapshot())
        elif ready.must_commit:
            self.journal.commit()
        self._committing = False
        if not self.deposed:
            self.world.oracle.durable(self.state, ready.actions)
        self.loop.advance()
        if crash == "after-journal":
            self.crash()
            return
        for index, action in enumerate(ready.actions):
            if crash == "between-actions" and index == (len(ready.actions) + 1) // 2:
                self.crash()
                return
            self.world.log(f"    -> {_short(action)}")
            self._carry_out(action)
        for order in ready.orders:
            link = self.links.get(order.node)
            if link is not None:
                if isinstance(order.message, m.CopyStep) and not self.deposed:
                    self.world.oracle.copied(self.state, order.message)
                link.to_agent(order.message)
        if crash:
            self.crash()
        elif not self.loop.idle:
            self._turn()
        else:
            self._sleep()

    def _decided(self, event: e.AnyEvent, actions: tuple[a.AnyAction, ...]) -> None:
        if not isinstance(event, e.Tick | e.ActionSucceeded | e.StepCompleted) or actions:
            self.world.log(f"{_short(event)}  [{self.state.phase}]")
        self.world.oracle.decided(self.state, event, actions)

    def _sleep(self) -> None:
        due = self.loop.next_deadline_ns()
        due = None if due is None else due - self.skew_ns
        if due is None or (self._wake_ns is not None and self.world.now < self._wake_ns <= due):
            return
        self._wake_ns = max(due, self.world.now + 1)
        self.world.at(self._wake_ns, lambda at=self._wake_ns, life=self._life: self._wake(at, life))

    def _wake(self, at: int, life: int) -> None:
        if at == self._wake_ns and life == self._life and self.up:
            self._wake_ns = None
            self._turn()

    # -- actions -------------------------------------------------------------------------------
    def _later(self, delay_s: float, event: e.AnyEvent) -> None:
        life = self._life
        self.world.after(delay_s, lambda: self.handle(event) if life == self._life else None)

    def _result(
        self, action: a.AnyAction, ok: bool = True, within_s: float = 0.2, **fields: Any
    ) -> None:
        kind = e.ActionSucceeded if ok else e.ActionFailed
        event = kind(action_id=action.action_id, generation=action.generation, **fields)
        self._later(self.world.between(0.001, within_s), event)

    def _carry_out(self, action: a.AnyAction) -> None:
        world = self.world
        match action:
            case a.LaunchGroup() | a.StopGroup() | a.StageStep():
                self._send(action)
            case a.PersistStep() | a.InspectGroup():
                link = self.links.get(action.node)
                if link is not None:
                    link.to_agent(translate.to_message(action))
                self._result(action, ok=link is not None)
            case a.RequestNodes():
                names = tuple(world.request_nodes(action.count))
                if names:
                    self._result(action, nodes=names)
                else:
                    self._result(action, ok=False, detail="no capacity")
            case a.ReleaseNode():
                link = self.links.get(action.node)
                if link is not None:
                    link.to_agent(m.Shutdown(detail=action.reason.text))
                world.after(0.01, lambda: world.release(action.node))
                self._result(action)
            case a.CommitManifest() | a.CleanStorage():
                self._call_storage(action, lambda: None)
            case a.FinishJob():
                # No controller is started again for a job that has ended.
                self.journal.broken = False
                self.journal.commit()
                self._call_storage(action, world.release_all)

    def _call_storage(self, action: a.AnyAction, before: Callable[[], None]) -> None:
        """Calls are carried out in their order, also those of a controller that was killed."""
        due_s = max(self._storage_s, self.world.time_s) + self.world.between(0.01, 0.1)
        self._storage_s, life = due_s, self._life

        def call() -> None:
            before()
            problem = self.world.storage.carry_out(action)
            if life == self._life:
                self._result(action, ok=not problem, within_s=0.001, detail=problem)
                if isinstance(action, a.CommitManifest) and not problem:
                    for link in self.links.values():
                        link.to_agent(m.Committed(generation=action.generation, step=action.step))

        self.world.after(due_s - self.world.time_s, call)

    def _send(self, action: translate.NodeAction) -> None:
        link = self.links.get(action.node)
        if link is None:
            self._unknown(action, "not connected")
            return
        buddy = self.links.get(action.buddy) if isinstance(action, a.LaunchGroup) else None
        self._awaited.sent(action)
        written = tuple(self.state.own.written.values())
        facts = buddy.node.facts if buddy else None
        link.to_agent(translate.to_message(action, facts, own_checkpoints=written))

    def _unknown(self, action: translate.NodeAction, detail: str) -> None:
        self._later(0.0, e.ActionUnknown(action_id=action.action_id, detail=detail))

    # -- agents --------------------------------------------------------------------------------
    def received(self, link: Link, message: m.FromAgent) -> None:
        node = link.node.name
        if isinstance(message, m.Hello):
            self._hello(link, message)
        elif self.links.get(node) is link:
            if isinstance(message, translate.Answer) and not self._awaited.take(node, message):
                return
            event = translate.to_event(node, message)
            if event is not None:
                self.handle(event)

    def _hello(self, link: Link, hello: m.Hello) -> None:
        if refusal := translate.refusal(self.state, hello.node):
            link.to_agent(m.Refused(detail=refusal, final=True))
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
        unanswered = self._awaited.forget(hello.node)
        self.handle(e.FromNode(hello.node, hello.joined))
        for action in unanswered:
            self._unknown(action, "the node has reconnected")

    def link_closed(self, link: Link) -> None:
        node = link.node.name
        if self.links.get(node) is not link:
            return
        del self.links[node]
        if node not in self.world.backend_nodes():
            self._later(0.001, e.NodeLost(node=node, cause="disconnected", detail="link closed"))


def _known(loop: JobLoop) -> Any:
    """State that a restored loop must have too; the monitor starts again from heartbeats."""
    projection = loop.projection
    view = projection.view(projection.now_ns + 1_234_567, live=False)
    return loop.state, projection.memory, view, loop.controller.next_deadline_ns()


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
        elif name == "fact":
            parts.append(_short(shown))
        elif name == "seats":
            parts.append(f"ranks={[seat.rank for seat in shown]}")
        elif name in ("facts", "spec", "files", "exits", "stacks", "mesh", "committed"):
            continue
        elif name == "shard" and not isinstance(shown, int):
            parts.append(f"step={shown.step} shard={shown.shard}")
        else:
            parts.append(f"{name}={shown}")
    return f"{type(value).__name__} {' '.join(parts)}"
