"""The world of one seed: a job, nodes, backend, network, storage, controller, and random faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from holdfast.orchestrator import limits
from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.protocol.facts import Membership
from holdfast.workers.agent.machine import inputs

from .host import Host
from .network import Link
from .node import SimNode
from .oracle import Oracle, Storage
from .sizes import Sizes
from .trainer import Delay, SimGang, SimWorker
from .virtual_time import VirtualTime

FAULTS_S = 60.0
"""Faults happen until then; afterwards everything recovers."""
BOUND_S = 900.0
"""The job must have ended by then."""
STAGE_EVERY = 6
"""Steps between stagings in a third of the worlds; in others the controller chooses, or it is 1."""

# (nodes, workers per node, shard): FSDP over nodes, HSDP in and over nodes, DDP, one node.
SHAPES = (
    ({"min": 1, "max": 2}, 2, 2), ({"min": 1, "max": 2, "spares": 1}, 2, 2),
    ({"min": 2, "max": 4}, 2, 4), ({"min": 2, "max": 4, "spares": 1}, 1, 2),
    ({"min": 1, "max": 3}, 1, 1), ({"min": 2, "max": 2, "spares": 1}, 2, 4),
    ({"min": 2, "max": 6}, 1, 2), ({"min": 1, "max": 3}, 2, "auto"),
)  # fmt: skip


class World(VirtualTime):
    def __init__(self, seed: int, verbose: bool = False) -> None:
        super().__init__(seed, verbose)
        self.seed = seed
        self.job_name = f"sim-{seed}"
        self.document = self._draw_job()
        self.total_steps = self.rng.randrange(30, 160)
        self.step_s = self.between(0.2, 0.8)
        self.sizes = Sizes.draw(seed, self.step_s, self.document["spec"]["workersPerNode"])
        self.poison: int | None = None
        if self.chance(0.05):
            self.poison = self.rng.randrange(self.total_steps - 1)
        self.capacity = self.document["spec"]["nodes"]["max"] + 3
        self.nodes: dict[str, SimNode] = {}
        self.hidden: dict[str, None] = {}
        """Dead nodes that the backend still lists."""
        self._named = 0
        self._gangs: dict[tuple[int, str, int], SimGang] = {}
        self._healed: dict[str, int] = {}
        self.leaving: dict[str, None] = {}
        self.write_failures = 0.0
        self.fork_failures = 0.0
        self.delays: dict[int, Delay] = {}
        """Rank -> how it is late at its next step."""
        self.cpu_pressure = 0.0
        self._measuring = False
        self.num_faults = self.num_codes = 0
        self.fault_s = self.crashed_s = 0.0
        """Times of the last fault and of the last death of a controller."""
        # Of its own random numbers: other draws of the seed stay what they are.
        self.codes = random.Random(f"new code {seed}")
        self.takeovers = random.Random(f"takeovers {seed}")
        self.num_takeovers = self.num_full_disks = 0
        self.cancelled = False
        self.trained_s = {"productive": 0.0, "redone": 0.0}
        self.trained_step, self.trained_generations = -1, dict[int, None]()
        self.blind_s = 0.0
        """Seconds in which no controller was there, or without heartbeats of some nodes."""
        # Of its own random numbers: other draws of the seed stay what they are.
        self.keeps = random.Random(f"keeps {self.seed}")
        """Fate of halted and kept workers; half of the seeds keep none."""
        self.builds = random.Random(f"builds {self.seed}")
        self.keeps_any = self.keeps.random() < 0.5
        self.fixed_size = random.Random(f"size {self.seed}").random() < 0.25
        """The script reads the size outside its attempts."""
        self.num_built = self.num_joined = 0
        """Workers that were ready beside the running job, and those of them that got a seat."""
        self.differ_share = 0.0
        """Share of generations with kept processes in which replicas come to differ."""
        self.unfit_share = 0.03
        """Share of kept processes that cannot go on."""
        self.runs_again = random.Random(f"again {self.seed}").random() < 0.5
        """Processes that do not go on as they are run the script again."""
        self.num_kept = self.num_again = self.num_differed = 0
        """Seats that kept processes got, those in which they ran the script again, and ranks that
        saw replicas differ."""
        self.oracle = Oracle(self)
        self.storage = Storage(self)
        self.host = Host(self)

    def _draw_job(self) -> dict[str, Any]:
        nodes, workers, shard = self.rng.choice(SHAPES)
        parallelism: dict[str, Any] = {"shard": "world" if self.seed % 4 == 3 else shard}
        generous = {"restarts": 1000, "windowSeconds": (3600, 12)[self.seed % 2]}
        recovery = {
            "budgets": dict.fromkeys(("user", "infrastructure", "preemption", "hang"), generous),
            "startupTimeoutSeconds": 20,
            "keepProcesses": "auto",
            "replacementWaitSeconds": 2 if self.seed % 5 else 0,
            "badNodeStrikes": self.rng.choice((2, 3, 50)),
        }
        storage = self.rng.choice(({"everySteps": 5}, {"everySteps": 10}, {"everySeconds": 4}))
        memory = {"buddy": self.rng.choice(("auto", "auto", "always", "never"))}
        memory["everySteps"] = (1, "auto", STAGE_EVERY)[self.seed % 3]
        return {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": self.job_name},
            "spec": {
                "entrypoint": {"recipe": {"name": "pretrain"}},
                "nodes": nodes,
                "workersPerNode": workers,
                "parallelism": parallelism,
                "checkpoint": {"storage": storage, "memory": memory},
                "recovery": recovery,
            },
        }

    worker: type[SimWorker] = SimWorker

    # -- for trainers and nodes ---------------------------------------------------------------
    def gang(self, membership: Membership) -> SimGang:
        # A generation whose records were lost on a full disk has its number twice.
        key = (membership.generation, membership.master_address, membership.master_port)
        return self._gangs.setdefault(key, SimGang(self, membership))

    def step_trained(self, generation: int, step: int, since_ns: int) -> None:
        """All ranks have finished a step."""
        cause = "productive" if step > self.trained_step else "redone"
        self.trained_s[cause] += (self.now - since_ns) / SECOND_NS
        self.trained_step = max(self.trained_step, step)
        self.trained_generations[generation] = None

    def measure_activity(self) -> None:
        """Twice a second, as long as a rank is late."""
        if not self._measuring:
            self._measuring = True
            self._measure()

    def _measure(self) -> None:
        workers = [w for n in self.nodes.values() for w in n.workers.values() if n.alive]
        self._measuring = any(w.alive and w.doing != "peers" for w in workers)
        for node in list(self.nodes.values()):
            node.measure()
        if self._measuring:
            self.after(0.5, self._measure)

    def fork_fails(self) -> bool:
        return self.fork_failures > 0 and self.chance(self.fork_failures)

    def write_fails(self) -> bool:
        return self.write_failures > 0 and self.chance(self.write_failures)

    def connect(self, node: SimNode) -> Link | None:
        if not self.host.up or self.disconnected(node):
            return None
        return Link(self, node, self.host)

    def disconnected(self, node: SimNode) -> bool:
        return self.healed_ns(node) > self.now

    def healed_ns(self, node: SimNode) -> int:
        return self._healed.get(node.name, 0)

    # -- the backend --------------------------------------------------------------------------
    def backend_nodes(self) -> list[str]:
        return [n.name for n in self.nodes.values() if n.alive or n.name in self.hidden]

    def request_nodes(self, count: int) -> list[str]:
        """Names of the new nodes; none without capacity."""
        if len(self.backend_nodes()) + count > self.capacity:
            return []
        names = []
        slots = self.document["spec"]["workersPerNode"]
        for _ in range(count):
            node = self.make_node(f"n{self._named}", slots)
            self._named += 1
            self.nodes[node.name] = node
            self.after(self.between(0.1, 1.5), node.connect)
            names.append(node.name)
        return names

    def release(self, name: str) -> None:
        self.hidden.pop(name, None)
        node = self.nodes.get(name)
        if node is not None and node.alive:
            self.node_dies(node, visible=True, why="released")

    def release_all(self) -> None:
        for name in list(self.nodes):
            self.release(name)

    def make_node(self, name: str, slots: int) -> SimNode:
        return SimNode(self, name, slots)

    def node_dies(self, node: SimNode, visible: bool, why: str) -> None:
        """`visible`: the connections close and the backend reports the end."""
        if not node.alive:
            return
        self.log(f"** {node.name} dies ({why})")
        node.die()
        if not visible:
            self.hidden[node.name] = None
            return
        if node.link is not None:
            node.link.close()
        gone = e.NodeLost(node=node.name, cause="gone", detail=why)
        self.after(self.between(0.005, 0.05), lambda: self.host.handle(gone))

    # -- faults -------------------------------------------------------------------------------
    def schedule_faults(self) -> None:
        self.differ_share = 0.3
        calm = self.between(0.5, 15.0)
        at = self.between(1.0, 10.0)
        while at < FAULTS_S:
            self.after(at, self._fault)
            if self.chance(0.3):
                # Often a second fault comes while the first is being handled.
                self.after(at + self.rng.expovariate(5.0), self._fault)
            at += self.rng.expovariate(1 / calm)
        self.after(FAULTS_S, self._heal)
        for _ in range(self.codes.choice((0, 0, 1, 2))):
            self.after(self.codes.uniform(1.0, FAULTS_S), self._again)
        if self.seed % 5 == 2:
            for _ in range(self.takeovers.choice((1, 2))):
                self.after(self.takeovers.uniform(1.0, FAULTS_S), self._take_over)
        if self.seed % 5 == 4:
            self.after(self.takeovers.uniform(1.0, FAULTS_S), self._fill_disk)

    def _fault(self) -> None:
        kinds: list[tuple[float, Callable[[], str]]] = [
            (6, self._kill_worker),
            (4, self._hang_worker),
            (5, self._crash_node),
            (2, self._power_loss),
            (4, self._partition),
            (1, self._lose_heartbeats),
            (0.3, self.blackout),
            (3, self._break_link),
            (6, self._crash_controller),
            (1, self._forks_fail),
            (2, self._writes_fail),
            (2, self._lose_capacity),
            (3, self._preempt),
            (2, self._resize),
            (1, self.suspend),
            (1, self._damage_checkpoint),
            (0.1, self._cancel),
        ]
        act = self.rng.choices([k for _w, k in kinds], [w for w, _k in kinds])[0]
        text = act()
        if text:
            self.num_faults += 1
            self.fault_s = self.time_s
            self.log(f"** fault: {text}")

    def _live(self) -> SimNode | None:
        live = [node for node in self.nodes.values() if node.alive]
        return self.rng.choice(live) if live else None

    def _worker(self):  # type: ignore[no-untyped-def]
        live = [w for n in self.nodes.values() if n.alive for w in n.workers.values() if w.alive]
        return self.rng.choice(live) if live else None

    def _kill_worker(self) -> str:
        worker = self._worker()
        if worker is None:
            return ""
        signal = self.rng.choice((9, 9, 11, 15))
        self.after(0.0, lambda: worker.end(None, signal))
        return f"rank {worker.rank} of generation {worker.generation} gets signal {signal}"

    def _hang_worker(self) -> str:
        worker = self._worker()
        if worker is None:
            return ""
        worker.node.stop_worker(worker)
        return f"rank {worker.rank} of generation {worker.generation} is stopped"

    def _crash_node(self) -> str:
        return self._node_dies(visible=True, why="crash", text="crashes")

    def _power_loss(self) -> str:
        return self._node_dies(visible=False, why="power loss", text="loses power")

    def _node_dies(self, *, visible: bool, why: str, text: str) -> str:
        node = self._live()
        if node is not None:
            self.node_dies(node, visible=visible, why=why)
        return f"{node.name} {text}" if node else ""

    def _partition(self) -> str:
        node, seconds = self._live(), self.between(0.3, 8.0)
        if node is None:
            return ""
        self._healed[node.name] = self.now + round(seconds * SECOND_NS)
        self.blind_s += seconds
        return f"{node.name} is disconnected for {seconds:.1f} s"

    def _lose_heartbeats(self) -> str:
        """The controller gets no heartbeat: its machine is overloaded or disconnected."""
        return self.lose_heartbeats(self.between(0.5, 14.0))

    def lose_heartbeats(self, seconds: float) -> str:
        self.blind_s += seconds
        for node in self.nodes.values():
            self._healed[node.name] = max(
                self.healed_ns(node), self.now + round(seconds * SECOND_NS)
            )
        return f"no heartbeat arrives for {seconds:.1f} s"

    def blackout(self) -> str:
        live = [node for node in self.nodes.values() if node.alive]
        for node in live:
            self.node_dies(node, visible=False, why="blackout")
        return f"all {len(live)} nodes lose power" if live else ""

    def _break_link(self) -> str:
        node = self._live()
        if node is None or node.link is None:
            return ""
        node.link.close()
        return f"the link of {node.name} breaks"

    def _crash_controller(self) -> str:
        if not self.host.up:
            return ""
        points = ("before-journal", "after-journal", "between-actions", None)
        point = self.rng.choice(points)
        if point is None:
            self.host.crash()
            return "the controller is killed"
        self.host.crash_at = point
        return f"the controller will die {point}"

    def _forks_fail(self) -> str:
        self.fork_failures = 0.3
        self.after(3.0, lambda: setattr(self, "fork_failures", 0.0))
        return "forks fail for 3 s"

    def _writes_fail(self) -> str:
        self.write_failures = 0.5
        self.after(6.0, lambda: setattr(self, "write_failures", 0.0))
        return "storage fails for 6 s"

    def _lose_capacity(self) -> str:
        self.capacity = 0
        room = self.document["spec"]["nodes"]["max"] + 3
        self.after(self.between(2.0, 15.0), lambda: setattr(self, "capacity", room))
        return "the backend has no capacity"

    def _preempt(self) -> str:
        node = self._live()
        if node is None or node.name in self.leaving:
            return ""
        self.leaving[node.name] = None
        grace_s = self.rng.choice((self.between(0.5, 8.0), 30.0))
        node.feed(inputs.Terminated(grace_s))
        self.after(grace_s, lambda: self._taken_away(node))
        return f"{node.name} gets SIGTERM and has {grace_s:.1f} s"

    def _taken_away(self, node: SimNode) -> None:
        """A node with a preemption notice ends within its grace period."""
        self.oracle.require(not node.alive, f"{node.name} has not ended within its grace")

    def _resize(self) -> str:
        top = self.document["spec"]["nodes"]["max"]
        nodes = self.rng.randrange(1, top + 2)
        self.host.handle(e.ResizeRequested(nodes=nodes, by="sim"))
        return f"resize to {nodes}"

    def suspend(self) -> str:
        self.host.handle(e.SuspendRequested(by="sim"))
        self.after(self.between(1.0, 8.0), lambda: self.host.handle(e.ResumeRequested(by="sim")))
        return "suspend"

    def _again(self) -> None:
        """New code; the control API refuses it for a job that ends."""
        if not self.host.up or not self.host.submitted:
            return
        state = self.host.state
        if state.phase == "finishing" or state.terminal or state.intent in ("cancel", "deadline"):
            return
        self.num_codes += 1
        code = self.codes.choice((None, "", f"{self.num_codes:064}"))
        self.log(f"** new code {code!r}")
        self.host.handle(e.AgainRequested(code=code, by="sim"))

    def _take_over(self) -> None:
        if self.host.up and self.host.submitted and not self.oracle.finished:
            self.num_takeovers += 1
            self.blind_s += limits.RECONNECT_MAX_S
            self.host = self.host.take_over()

    def _fill_disk(self) -> None:
        """The journal cannot be written for some seconds, in which its controller may die."""
        self.num_full_disks += 1
        self.log("** the disk of the journal is full")
        self.host.journal.broken = True
        for_s = self.takeovers.uniform(1.0, 10.0)
        self.blind_s += for_s
        if self.takeovers.random() < 0.5:
            self.after(for_s / 2, lambda: self.host.crash() if self.host.up else None)
        self.after(for_s, lambda: setattr(self.host.journal, "broken", False))

    def _cancel(self) -> str:
        if self.host.up:
            self.cancelled = True
            self.host.handle(e.CancelRequested(by="sim"))
        return "cancel" if self.cancelled else ""

    def _damage_checkpoint(self) -> str:
        if not self.storage.manifests:
            return ""
        keep = self.host.job.spec.checkpoint.retention.keep_last
        *others, directory = list(self.storage.manifests)[-keep:]
        if any(other in self.storage.damaged for other in others):
            return ""  # no controller could know which older one to keep
        self.storage.damaged[directory] = None
        return f"{directory} is damaged"

    def store_away(self, seconds: float) -> str:
        self.storage.away = True
        self.after(seconds, lambda: setattr(self.storage, "away", False))
        return f"storage cannot be read for {seconds:.1f} s"

    def lose_manifest(self) -> str:
        """A user deletes the manifest of the newest checkpoint."""
        if not self.storage.manifests:
            return ""
        directory = max(self.storage.manifests)
        del self.storage.manifests[directory]
        return f"the manifest of {directory} is gone"

    def damage_all(self) -> str:
        self.storage.damaged = dict.fromkeys(self.storage.manifests)
        return f"{len(self.storage.damaged)} checkpoints are damaged"

    def _heal(self) -> None:
        self.log("** no faults from here on")
        self.fault_s = self.time_s
        self.capacity = self.document["spec"]["nodes"]["max"] + 3
        self.fork_failures = self.write_failures = 0.0
        self.host.crash_at = None
        self._healed = dict.fromkeys(self._healed, self.now)
        self._resume_until_received()

    def _resume_until_received(self) -> None:
        """A user repeats a resume that a dead controller did not receive."""
        if self.oracle.finished:
            return
        if self.host.up and self.host.state.intent == "suspend":
            # All its checkpoints may have been damaged.
            start_over = self.host.state.hold is not None
            self.host.handle(e.ResumeRequested(by="sim", start_over=start_over))
        self.after(5.0, self._resume_until_received)
