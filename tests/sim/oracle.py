"""Safety properties after each decision and step, by the state and no check of the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.orchestrator import limits
from holdfast.orchestrator.core import actions as a
from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.failure import DIVERGED
from holdfast.orchestrator.core.keeping import NOT_KEPT
from holdfast.orchestrator.core.recovery import STORE_UNREADABLE
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.orchestrator.protocol.manifest import MAX_NUMBER, directory_name, parse_directory_name
from holdfast.orchestrator.protocol.mesh import Mesh

from ..unit.core.harness import check_timers

if TYPE_CHECKING:
    from .trainer import Payload
    from .world import World


UNCHARGED = (STORE_UNREADABLE, NOT_KEPT, DIVERGED)
"""Rules of incidents that charge no restart."""
NEW_CODE_S = 45.0
"""Training may go on with the old code for so long: while a node that leaves is replaced."""
FULL_SIZE_S = limits.STANDBYS_WAIT_S + limits.JOIN_WAIT_S + 45.0
"""A job has its full size again so long after the last fault, if there is room."""
SPARES_S = 20.0
"""Missing nodes have joined by then, if there is room."""
RESIZED_S = limits.JOIN_WAIT_S + 20.0
"""A requested step is staged before the job has another size."""
RELEASED_S = 5.0
"""A suspended job has released its nodes by then."""
HEARTBEAT_S = 1.0
"""A finished step is reported by then."""
GROWS_S = limits.STANDBYS_WAIT_S + limits.JOIN_WAIT_S + 30.0
"""A requested step is staged before the job grows."""


class Unsafe(AssertionError):
    """A property does not hold; the message names the seed."""


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.finished = False
        self.committed: dict[str, bool] = {}
        """Checkpoints that a controller knew -> whether a reader has refused them."""
        self._seats: dict[tuple[int, str], tuple[int, ...]] = {}
        self._node_of: dict[int, dict[int, str]] = {}
        """Generation -> rank -> node."""
        self._ids: dict[int, None] = {}
        self._stage_actions: dict[int, a.StageStep] = {}
        self._members: dict[int, tuple[str, ...]] = {}
        self._commits: dict[tuple[int, int], None] = {}  # (step, generation)
        self._judged: set[int] = set()
        self._uncharged: set[int] = set()
        self._cordoned: dict[str, None] = {}
        self._charged = 0
        self.requested: dict[tuple[int, int], dict[str, None]] = {}
        """(generation, step) -> members that have staged it at the controller's request."""
        self.copies: dict[int, tuple[int, tuple[str, ...]]] = {}
        """Generation -> the newest step of which all buddies have a copy, and its members."""
        self.received = {"suspend": 0, "new-code": 0}
        """Purpose -> how often a user requested it."""
        self.code = ""
        """Code that the next generation must run."""
        self._code_of: dict[int, str] = {}
        """Generation -> the code of its first launch, which all its nodes must run."""
        self.waits_for_code: tuple[int, float] | None = None
        """Generation and time of a request for new code that none runs yet."""
        self.new_codes: dict[int, None] = {}
        """Generations that were ended for new code."""
        self.grows: tuple[int, float] | None = None
        """Generation and time since which it only waits for standbys to grow."""
        self.growths_that_waited: dict[int, None] = {}
        """Generations that have waited so."""
        self.saved: dict[int, None] = {}
        """Generations that ended with the loss of one node, and such a copy was there."""
        self._small_since_s: float | None = None
        self._few_since_s: float | None = None
        self._resized_since_s: float | None = None
        self._suspended_since_s: float | None = None

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Unsafe(f"seed {self.world.seed} at {self.world.time_s:.3f} s: {text}")

    def decided(self, state: JobState, event: e.AnyEvent, actions: tuple[a.AnyAction, ...]) -> None:
        """Check each step's decisions. A crash may undo what is not durable yet."""
        check_timers(state)
        for known in state.catalog.committed:
            self.committed[directory_name(*known.key)] = known.refused
        if isinstance(event, e.SuspendRequested | e.AgainRequested):
            suspends = isinstance(event, e.SuspendRequested)
            self.received["suspend" if suspends else "new-code"] += 1
        self._new_code(state, event)
        self._growth(state)
        self._size(state)
        self._spares(state)
        self._suspension(state)
        self._cordons(state)
        if isinstance(event, e.ActionSucceeded) and event.action_id in self._stage_actions:
            done = self._stage_actions[event.action_id]
            self.requested.setdefault((done.generation, done.step), {})[done.node] = None
        for action in actions:
            if isinstance(action, a.PersistStep | a.CommitManifest):
                self.require(not state.keeping.doubts(action.generation), f"doubtful: {action}")
            match action:
                case a.LaunchGroup():
                    self._launch(state, action)
                case a.CommitManifest():
                    self._commit(state, action)
                case a.RequestNodes():
                    self._request(state, action)
        self._budgets(state)

    def _new_code(self, state: JobState, event: e.AnyEvent) -> None:
        """Expect new code in the next generation, which comes soon."""
        if isinstance(event, e.AgainRequested):
            self.code = self.code if event.code is None else event.code
            self.waits_for_code = (state.generation, self.world.time_s)
        if self.waits_for_code is None:
            return
        generation, since_s = self.waits_for_code
        if state.generation > generation:
            self.waits_for_code = None
            self.new_codes[generation] = None
        elif state.phase == "running" and state.stop is None:
            waited_s = self.world.time_s - since_s
            self.require(waited_s < NEW_CODE_S, f"old code runs {waited_s:.1f} s after new code")

    def _growth(self, state: JobState) -> None:
        """A job does not wait for standbys for long, and trains meanwhile."""
        if "standbys" not in state.timers:
            self.grows = None
            return
        if self.grows is None:
            self.grows = (state.generation, self.world.time_s)
            self.growths_that_waited[state.generation] = None
        generation, since_s = self.grows
        waited_s = self.world.time_s - since_s
        self.require(waited_s < GROWS_S, f"it waits for standbys for {waited_s:.1f} s")
        trains = generation == state.generation and state.group.active
        self.require(trains, "it waits and does not train")

    def _size(self, state: JobState) -> None:
        """A job that trains has a size of its spec, and grows to the largest one."""
        nodes, members = state.job.spec.nodes, len(state.group.members)
        if not (state.group.active and state.phase == "running" and state.stop is None):
            self._small_since_s = None
            return
        if nodes.min <= members <= nodes.max:
            self._resized_since_s = None
        else:
            since_s = self._resized_since_s = self._resized_since_s or self.world.time_s
            soon = self.world.time_s - max(since_s, self.world.crashed_s) < RESIZED_S
            self.require(soon, f"{members} nodes train, not {nodes.min} to {nodes.max}")
        cordoned = [name for name in self.world.backend_nodes() if name in state.ledger.cordoned]
        room = self.world.capacity - len(cordoned) >= nodes.max + (nodes.spares or 0)
        # A requested node that lost power is awaited as long as one that starts slowly.
        if members == nodes.max or not room or self.world.hidden:
            self._small_since_s = None
            return
        since_s = max(self._small_since_s or self.world.time_s, self.world.fault_s)
        self._small_since_s = since_s
        short_s = self.world.time_s - since_s
        self.require(short_s < FULL_SIZE_S, f"{members} of {nodes.max} nodes for {short_s:.0f} s")

    def _spares(self, state: JobState) -> None:
        """Spares that were used are replaced."""
        cordoned = state.ledger.cordoned
        stay = [n for n in state.nodes.values() if not n.preempting and n.name not in cordoned]
        wanted = state.job.spec.nodes.max + (state.job.spec.nodes.spares or 0)
        room = self.world.capacity - len(cordoned) >= wanted and not self.world.hidden
        trains = state.group.active and state.phase == "running" and state.stop is None
        if len(stay) >= wanted or not room or not trains:
            self._few_since_s = None
            return
        since_s = max(self._few_since_s or self.world.time_s, self.world.fault_s)
        self._few_since_s = since_s
        few_s = self.world.time_s - since_s
        self.require(few_s < SPARES_S, f"{len(stay)} of {wanted} nodes for {few_s:.0f} s")

    def _request(self, state: JobState, action: a.RequestNodes) -> None:
        """A request that failed, or whose answer was lost, is repeated for what is missing only."""
        gone = {*state.nodes.leaving, *state.ledger.cordoned, *state.supply.released}
        gone |= {*self.world.leaving}
        nodes = [n.name for n in self.world.nodes.values() if n.alive and n.name not in gone]
        wanted = state.target_nodes + state.job.spec.nodes.spares
        text = f"{action.count} nodes are requested beside {nodes}; {wanted} are wanted"
        self.require(len(nodes) + action.count <= wanted, text)

    def _suspension(self, state: JobState) -> None:
        """A suspended job holds no node. Those that lost power are not known to be gone."""
        if state.phase != "suspended":
            self._suspended_since_s = None
            return
        if self._suspended_since_s is None:
            self._suspended_since_s = self.world.time_s
        for_s = self.world.time_s - self._suspended_since_s
        held = [node.name for node in self.world.nodes.values() if node.alive]
        released = for_s < RELEASED_S or not held
        self.require(released, f"suspended for {for_s:.1f} s and holds {held}")

    def _cordons(self, state: JobState) -> None:
        """A machine is used until it has badNodeStrikes incidents within the window."""
        recovery = state.job.spec.recovery
        since_ns = state.now_ns - round(recovery.budgets.infrastructure.window_s * SECOND_NS)
        for name in [name for name in state.ledger.cordoned if name not in self._cordoned]:
            self._cordoned[name] = None
            blamed = [
                i.number
                for i in state.incidents
                if i.culprit_node == name and (i.stopped_ns or 0) > since_ns
            ]
            few = f"{name} is cordoned after incidents {blamed} only"
            self.require(len(blamed) >= recovery.bad_node_strikes, few)

    def carried_out_once(self, state: JobState) -> None:
        """No request of a user interrupts the job twice, also where a controller died with it."""
        for purpose, received in self.received.items():
            times = sum(one.purpose == purpose for one in state.incidents)
            self.require(times <= received, f"{times} of {received} times: {purpose}")

    def accounts(self, ledger: dict[str, float]) -> None:
        """The report's time by cause is what the world did. The first step of a generation, and
        one that it did not finish, may count elsewhere. What no controller saw is dated by what
        was seen next: steps of nodes that were lost then are recovery, a hang then is training."""
        world = self.world
        step_s = world.step_s + world.sizes.stall_s
        tolerance_s = 2 * step_s * len(world.trained_generations) + HEARTBEAT_S + world.blind_s
        shown = {"productive": ledger["productive"] + ledger["stalled"], "redone": ledger["redone"]}
        for cause, trained_s in world.trained_s.items():
            text = f"{shown[cause]:.1f} s {cause}, {trained_s:.1f} s is true"
            self.require(abs(shown[cause] - trained_s) <= tolerance_s, text)

    def copied(self, state: JobState, order: m.CopyStep) -> None:
        """The controller confirms a step of the buddy tier."""
        known = self.copies.get(order.generation, (-1, ()))
        if order.generation == state.generation and order.confirmed > known[0]:
            self.copies[order.generation] = (order.confirmed, state.group.members)

    def _survives_one_node(self, state: JobState, step: int) -> None:
        """A single lost node costs nothing that all buddies have a copy of."""
        at, members = self.copies.get(state.generation - 1, (-1, ()))
        lost = [name for name in members if name not in state.nodes]
        distrusted = (at, state.generation - 1) in state.catalog.distrusted
        if at < 0 or len(lost) > 1 or distrusted or state.keeping.doubts(state.generation - 1):
            return
        if lost:
            self.saved[state.generation - 1] = None
        self.require(step >= at, f"resumes after {step}, all buddies had {at}; lost {lost}")

    def durable(self, state: JobState, actions: tuple[a.AnyAction, ...]) -> None:
        """These decisions are in the journal and are carried out next."""
        for action in actions:
            self._stage_actions.pop(action.action_id, None)  # ids of lost records are used again
            self.require(action.action_id not in self._ids, f"id {action.action_id} is used twice")
            self._ids[action.action_id] = None
            if self.finished:
                self.require(isinstance(action, a.FinishJob), f"{action} after the end")
            match action:
                case a.StageStep():
                    self._stage_actions[action.action_id] = action
                    self._members[action.generation] = state.group.members
                case a.LaunchGroup() if action.membership.ahead:
                    trains = state.is_member(action.node)
                    self.require(not trains, f"{action.node} trains, and builds for the next one")
                case a.LaunchGroup():
                    self._seat(action)
                case a.FinishJob():
                    self.finished = True

    def _seat(self, action: a.LaunchGroup) -> None:
        generation = action.membership.generation
        key, ranks = (generation, action.node), tuple(seat.rank for seat in action.seats)
        self.require(self._seats.setdefault(key, ranks) == ranks, f"{key}: other ranks than before")
        node_of = self._node_of.setdefault(generation, {})
        for rank in ranks:
            known = node_of.setdefault(rank, action.node)
            self.require(known == action.node, f"rank {rank} is on {known} and {action.node}")

    def _launch(self, state: JobState, action: a.LaunchGroup) -> None:
        generation, mesh = action.membership.generation, action.membership.mesh
        self.require(generation == state.generation, f"launch of {generation}")
        code = self._code_of.setdefault(generation, self.code)
        self.require(action.code == code, f"launch of {action.code!r}, not {code!r}")
        self.require(
            mesh.world_size == action.membership.num_nodes * action.membership.workers_per_node,
            f"{mesh} on {action.membership.num_nodes} nodes",
        )
        if generation not in self._node_of:
            self._resume(state, action)

    def _resume(self, state: JobState, action: a.LaunchGroup) -> None:
        """A generation restores a complete state, and none older than the newest that is left."""
        restore = action.membership.restore
        step = restore.step if restore else -1
        committed = max((c.step for c in state.catalog.committed if not c.refused), default=-1)
        self.require(step >= committed, f"resumes after {step}, {committed} is committed")
        held: dict[tuple[int, int, int], set[int]] = {}
        for node in state.nodes.values():
            for s in node.staged:
                held.setdefault((s.step, s.generation, s.num_shards), set()).add(s.shard)
        whole = [at for at, shards in held.items() if len(shards) == at[2]]
        doubts, distrusted = state.keeping.doubts, state.catalog.distrusted
        good = [at for at in whole if at[:2] not in distrusted and not doubts(at[1])]
        best = max((at[0] for at in good), default=-1)
        self.require(step >= best, f"resumes after {step}, memory has all of {best}")
        for (generation, at), nodes in self.requested.items():
            members = self._members[generation]
            there = all(node in nodes and node in state.nodes for node in members)
            if there and generation == state.generation - 1 and not doubts(generation):
                self.require(step >= at, f"resumes after {step}, all have staged {at} as requested")
        self._survives_one_node(state, step)
        if restore is not None and not restore.directory:
            named = {source.shard for source in restore.sources}
            self.require(named == set(range(restore.num_shards)), f"sources of {named} only")
            key = (restore.step, restore.generation, restore.num_shards)
            self.require(key in whole, f"{key} is not complete in memory")
        elif restore is not None:
            known = [directory_name(*c.key) for c in state.catalog.committed if not c.refused]
            self.require(restore.directory in known, f"{restore.directory} is not a checkpoint")
        else:
            begins = not state.catalog.committed or state.catalog.start_over
            self.require(begins, "begins at step 0 by itself, although there were checkpoints")

    def _commit(self, state: JobState, action: a.CommitManifest) -> None:
        drain = state.drain
        drained = drain is not None and (drain.step, drain.generation) == (
            action.step, action.generation,
        )  # fmt: skip
        again = (action.step, action.generation) in self._commits
        self._commits[action.step, action.generation] = None
        self.require(
            action.generation == state.generation or drained or again,
            f"commit of generation {action.generation} in {state.generation}",
        )
        shards = [file.shard for file in action.files]
        self.require(shards == list(range(action.mesh.num_shards)), f"manifest of shards {shards}")
        committed = max((c.step for c in state.catalog.committed if not c.refused), default=-1)
        self.require(action.step > committed, f"commit of {action.step} after {committed}")

    def restarted(self, state: JobState) -> None:
        """A controller has replayed its journal, which may lack the last decisions. It gives their
        ids again; answers to those of another connection are not accepted."""
        if self.world.num_full_disks:
            self._ids = {n: None for n in self._ids if n < state.next_action_id}
            self.finished &= state.terminal
            # A generation that was launched without a record is launched again under its number.
            self._node_of = {n: of for n, of in self._node_of.items() if n <= state.generation}
            self._seats = {k: v for k, v in self._seats.items() if k[0] <= state.generation}
        self.code = state.job.spec.code or ""
        self._code_of = {n: code for n, code in self._code_of.items() if n <= state.generation}
        if not state.new_code:
            self.waits_for_code = None
        self._judged = _judged(state)
        self._charged = sum(state.ledger.restarts.values())
        self._uncharged &= self._judged

    def _budgets(self, state: JobState) -> None:
        """Every incident with a failure class costs one restart, except where no restart follows:
        the job fails, or the user has requested that it is suspended or cancelled."""
        judged, charged = _judged(state), sum(state.ledger.restarts.values())
        new = judged - self._judged
        if charged - self._charged < len(new):
            ends = state.outcome == "failed" or state.intent != "run"
            self.require(len(new) == 1 and ends, f"incident {new} is not charged")
            self._uncharged |= new
        self._judged, self._charged = judged, charged
        self.require(
            charged == len(judged) - len(self._uncharged) or state.num_incidents > 400,
            f"{charged} restarts charged, {len(judged)} incidents with a class, "
            f"{len(self._uncharged)} of them not followed by a restart",
        )


def _judged(state: JobState) -> set[int]:
    """Numbers of the incidents that have a failure class."""
    incidents = [
        i
        for i in state.incidents
        if i.failure_class is not None and not i.fault_injected and i.rule not in UNCHARGED
    ]
    return {incident.number for incident in incidents}


class Storage:
    """The storage tier: shared, durable, and a checkpoint may be damaged."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files: dict[str, dict[str, Payload | None]] = {}
        self.manifests: dict[str, tuple[Mesh, tuple[ShardFile, ...]]] = {}
        self.damaged: dict[str, None] = {}
        self.away = False
        """True while the storage cannot be read, like a volume that is not mounted."""

    def write(self, directory: str, file: str, staged: object, payload: Payload | None) -> None:
        self.files.setdefault(directory, {})[file] = payload

    def carry_out(self, action: a.AnyAction) -> str:
        """Returns why it failed."""
        match action:
            case a.CommitManifest():
                return self._commit(action)
            case a.CleanStorage():
                self._clean(action.retained)
                inflight = self.world.host.state.inflight.values()
                if not any(isinstance(o, a.CleanStorage) and o != action for o in inflight):
                    self.check_retention(action.retained.newest, action.retained.keep)
            case a.FinishJob():
                self._clean(action.retained)
        return ""

    def _commit(self, action: a.CommitManifest) -> str:
        directory = directory_name(action.step, action.generation)
        have = self.files.get(directory, {})
        if not have:
            return f"{directory} is missing"
        for file in action.files:
            expected = (action.step, file.shard, action.mesh.num_shards)
            self.world.oracle.require(
                have.get(file.file) == expected,
                f"{directory}/{file.file} is {have.get(file.file)}, not {expected}",
            )
        self.manifests[directory] = (action.mesh, action.files)
        return ""

    def _clean(self, retained: a.Retained) -> None:
        """The newest checkpoint that can be read is never deleted, nor are the newest `keepLast` of
        which no reader has found that they cannot, if a controller knew that they are committed."""
        keep = self.world.host.job.spec.checkpoint.retention.keep_last
        refused = self.world.oracle.committed
        known = [name for name in self.manifests if not refused.get(name, True)]
        keys = sorted(key for key in map(parse_directory_name, known) if key is not None)
        wanted = {*keys[-keep:], *self._good()[-1:]}
        for name in list(self.files):
            at = parse_directory_name(name)
            assert at is not None
            if at in retained.keep or at[1] > retained.generation or at > retained.abandoned:
                continue
            if at > retained.newest and name in self.manifests:
                continue
            text = f"{name} is deleted, one of the newest {keep} that can be read"
            self.world.oracle.require(at not in wanted, text)
            self.manifests.pop(name, None)
            del self.files[name]

    def _good(self) -> list[tuple[int, int]]:
        keys = map(parse_directory_name, self.manifests.keys() - self.damaged.keys())
        return sorted(key for key in keys if key is not None)

    def check_retention(
        self,
        until: tuple[int, int] = (MAX_NUMBER, MAX_NUMBER),
        kept: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Check the kept checkpoints. Up to this one there are: the newest `keepLast` good ones,
        damaged ones that are newer; while the job runs, one that is restored (a launch may have
        changed it since `kept` was decided), and those whose commit is under way."""
        keep = self.world.host.job.spec.checkpoint.retention.keep_last
        state, good = self.world.host.state, [key for key in self._good() if key <= until]
        keys = {name: key for name in self.files if (key := parse_directory_name(name))}
        newest = good[-1] if good else (-1, -1)
        # Nothing has read those that the world damaged in silence.
        refused = self.world.oracle.committed
        allowed = {name for name in self.damaged if not refused.get(name)}
        allowed |= {name for name in self.manifests if keys[name] > newest}
        allowed |= {name for name in self.manifests if keys[name] in good[-keep:]}
        if until < (MAX_NUMBER, MAX_NUMBER):
            restore = state.group.membership.restore if state.group.membership else None
            allowed |= {restore.directory} if restore is not None else set()
            allowed |= {directory_name(*key) for key in state.catalog.pending}
            before = {directory_name(*key) for key in kept if key <= until} - allowed
            self.world.oracle.require(len(before) <= 1, f"{sorted(before)} are kept too")
            allowed |= before
        # One with a larger number is of a launch that a full disk kept out of the journal.
        allowed |= {name for name, (_, number) in keys.items() if number > state.generation}
        extra = [name for name, key in keys.items() if key <= until and name not in allowed]
        self.world.oracle.require(not extra, f"{extra} are kept; {keep} are wanted")

    def committed(self) -> tuple[ShardFile, ...]:
        return tuple(file for _mesh, files in self.manifests.values() for file in files)

    def verify(self, directory: str) -> tuple[str, str]:
        """(error of a reader, what it finds wrong); empty: nothing."""
        if self.away or not self.manifests:
            return "UnreadableCheckpoint", f"neither {directory} nor any other checkpoint"
        if directory not in self.manifests:
            return "MissingCheckpoint", f"{directory} has no manifest"
        damage = f"{directory}: a checksum differs" if directory in self.damaged else ""
        return "DamagedCheckpoint", damage
