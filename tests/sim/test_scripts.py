"""Scripts that keep their own checkpoints: one reports each step, a framework posts every five
seconds, one reports nothing. Their ranks are killed and stopped; what the job concludes is compared
with what the script did."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.events import ResumeRequested, SuspendRequested
from holdfast.orchestrator.core.state import IncidentRecord
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import StepSource
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import inputs

from .trainer import SimWorker
from .world import BOUND_S, World

TOTAL_STEPS = 400
SAVE_EVERY = 25
LOADING_S = 3.0
"""A script begins one collective, loads its model for so long, and trains."""
PULSE_S = 0.5
POST_S = 5.0
COLLECTIVES_A_STEP = 4
SAVE_S = 2.0
"""Seconds of the script's save on SIGTERM, after which it ends."""


class ScriptWorker(SimWorker):
    """A rank of such a script."""

    world: ScriptWorld
    collectives = 0
    saves = ignores = waits = False
    posted_ns = moved_ns = 0

    def send(self, message: worker_protocol.FromWorker) -> None:
        if isinstance(message, worker_protocol.Pulse):
            message = worker_protocol.Pulse(collectives=self.collectives)
        super().send(message)

    @property
    def uses_cpu(self) -> bool:
        """True while the rank loads or computes; one that waits for a stopped rank is idle."""
        return self.world.now - self.moved_ns < (LOADING_S + 1.0) * SECOND_NS

    @uses_cpu.setter
    def uses_cpu(self, value: bool) -> None:
        self.moved_ns = self.world.now

    def begin(self) -> None:
        if not self._runs(None):
            return
        self.gang.workers[self.rank] = self
        ignores = self.ignores and self.membership.restart_count
        self.world.starts.setdefault(self.generation, -1 if ignores else self.world.saved)
        self.step = self.world.starts[self.generation]
        self.collectives = 1
        self._pulse()
        self.world.after(LOADING_S, self._train)

    def _train(self) -> None:
        if not self._runs(None):
            return
        self.world.loaded_ns = self.world.now
        self._next()

    def _pulse(self) -> None:
        if self.alive:
            self.send(worker_protocol.Pulse())
            if self.waits:  # a node repeats it over a new connection
                self._writes()
            self.world.measure_activity()
            self.world.after(PULSE_S, self._pulse)

    def advance(self) -> None:
        if not self._runs(None):
            return
        self.step += 1
        self.moved_ns = self.world.now
        self.collectives += COLLECTIVES_A_STEP
        if self.rank == 0:
            self.world.trained.append(self.step)
            if (self.step + 1) % SAVE_EVERY == 0 or self.step == self.world.total_steps - 1:
                self._writes()
                if self.waits:
                    return
                self.world.saved = self.step
        posts = self.rank == 0 and self.world.now - self.posted_ns >= POST_S * SECOND_NS
        step_s = self.world.step_s
        if self.world.kind in ("reports", "counts"):
            source: StepSource = "script" if self.world.kind == "reports" else "counted"
            self.send(worker_protocol.Reported(step=self.step, step_s=step_s, source=source))
        elif self.world.kind == "posts" and posts:
            self.posted_ns = self.world.now
            self.send(worker_protocol.Reported(step=self.step, step_s=step_s, source="posted"))
        self._next()

    def _writes(self) -> None:
        """Write as under file_audit.py: a rank that opened no checkpoint waits first."""
        unread = self.ignores and bool(self.membership.own_checkpoints)
        recovery = self.world.document["spec"]["recovery"]
        self.waits = unread and recovery.get("onIgnoredCheckpoint") != "warn"
        written = m.OwnCheckpointSeen(
            generation=self.generation, path="/o/ckpt.pt", times=2, unread=unread, waits=self.waits
        )
        if self.node.link is not None:
            self.node.link.to_controller(written)

    def _runs(self, again: object) -> bool:
        return super()._runs(again) and not self.saves

    def end(self, code: int | None, signal: int | None) -> None:
        if signal != 15 or not self._runs(None):
            super().end(code, signal)
            return
        self.saves = True
        self.world.after(SAVE_S, self._saved)

    def _saved(self) -> None:
        if self.alive:
            self.world.saved = self.step if self.ignores else max(self.world.saved, self.step)
            super().end(None, 15)

    def _next(self) -> None:
        if self.step >= self.world.total_steps - 1:
            self.end(0, None)
        else:
            super()._next()


class ScriptWorld(World):
    worker = ScriptWorker

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__(seed)
        self.kind = kind
        self.poison, self.total_steps, self.step_s = None, TOTAL_STEPS, 0.2
        self.saved = -1
        """The step of the script's own newest checkpoint."""
        self.starts: dict[int, int] = {}
        """Generation -> the step after which it began."""
        self.trained: list[int] = []
        """Steps in the order in which rank 0 finished them."""
        self.faults: list[tuple[int, str]] = []
        self.loaded_ns = 0
        self.after(0.0, self.host.start)

    def _draw_job(self) -> dict[str, Any]:
        document = super()._draw_job()
        spec = document["spec"]
        spec["entrypoint"] = {"script": "train.py"}
        spec["nodes"], spec["workersPerNode"] = {"min": 2, "max": 2}, 2
        spec["recovery"]["badNodeStrikes"] = 50
        del spec["checkpoint"], spec["parallelism"]
        return document

    def hit(self, at_s: float, how: str) -> None:
        """Kill or stop rank 1 at this time, or as soon as the script trains."""

        def act() -> None:
            alive = [w for n in self.nodes.values() for w in n.workers.values() if w.alive]
            ranks = [w for w in alive if w.rank == 1 and w.collectives > 150]
            if self.host.state.phase != "running" or not ranks:
                self.after(1.0, act)
                return
            self.faults.append((self.now, how))
            if how == "preempt":
                ranks[0].node.feed(inputs.Terminated(30.0))
            elif how == "suspend":
                self.host.handle(SuspendRequested(by="sim"))
                self.after(10.0, lambda: self.host.handle(ResumeRequested(by="sim")))
            elif how == "kill":
                ranks[0].end(None, 9)
            else:
                ranks[0].node.stop_worker(ranks[0])

        self.after(at_s, act)

    def play(self) -> list[IncidentRecord]:
        def over() -> bool:
            return self.host.up and self.host.submitted and self.host.state.terminal

        assert self.run(BOUND_S, over), self.host.state.reason
        state = self.host.state
        assert state.phase == "succeeded", state.reason
        assert self.trained[-1] == TOTAL_STEPS - 1
        ledger = self.host.loop.view(self.now).ledger
        if self.kind in ("reports", "counts"):
            self.oracle.accounts(ledger)
        else:  # which steps it trained twice is not seen, nor what it did after its last post
            trained_s = sum(self.trained_s.values())
            assert abs(ledger["productive"] + ledger["redone"] - trained_s) < POST_S, ledger
        return [one for one in state.incidents if one.purpose == "failure"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("kind", ["reports", "counts", "posts", "silent"])
def test_what_is_concluded_of_a_script_is_true(kind: str, how: str, seed: int) -> None:
    world = ScriptWorld(seed, kind)
    world.hit(40.0, how)
    incidents = world.play()
    assert len(incidents) == len(world.faults) == 1, incidents
    (incident,), (at_ns, _how) = incidents, world.faults[0]
    assert incident.failure_class == ("infrastructure" if how == "kill" else "hang")
    assert incident.culprit_rank == 1
    # It counts from the fault, and it is over when the script trains, not while it loads.
    assert abs(incident.at_ns - at_ns) < 2.5 * SECOND_NS
    assert incident.launched_ns is not None and incident.first_step_ns is not None
    began_s = (incident.first_step_ns - incident.launched_ns) / SECOND_NS
    assert LOADING_S <= began_s < LOADING_S + 6.0
    # Steps trained twice.
    after = world.starts[2]
    again = sum(world.trained.count(step) - 1 for step in set(world.trained))
    if kind in ("reports", "counts"):
        assert incident.resumed_after_step == after and not incident.at_least
        lost = incident.step_before - after
        assert again <= lost <= again + 1
    elif kind == "posts" and incident.resumed_after_step is not None:
        lost = incident.step_before - incident.resumed_after_step
        assert lost <= again + 1 or incident.resumed_estimated


@pytest.mark.parametrize("how", ["preempt", "suspend"])
@pytest.mark.parametrize("kind", ["reports", "silent"])
def test_a_script_may_save_before_a_planned_stop_and_trains_nothing_twice(
    kind: str, how: str
) -> None:
    world = ScriptWorld(7, kind)
    world.hit(40.0, how)
    assert world.play() == []
    (planned,) = [one for one in world.host.state.incidents if one.generation_before == 1]
    assert planned.purpose == {"preempt": "preemption"}.get(how, how)
    assert len(world.starts) == 2 and len(set(world.trained)) == len(world.trained)


class Ignoring(ScriptWorker):
    """A rank that begins at step 0 whenever it is started, and writes over one file."""

    ignores = True


class IgnoringWorld(ScriptWorld):
    worker = Ignoring

    def held(self) -> bool:
        state = self.host.state if self.host.up and self.host.submitted else None
        return state is not None and state.phase == "suspended" and state.hold is not None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["reports", "silent"])
def test_a_script_that_ignores_its_checkpoint_is_held_for_a_word_of_its_user(
    kind: str, seed: int
) -> None:
    world = IgnoringWorld(seed, kind)
    world.hit(40.0, "kill")
    assert world.run(200.0, world.held)
    kept, generation = world.saved, world.host.state.generation
    assert kept > SAVE_EVERY
    for pause_s in (10.0, 30.0):
        world.after(pause_s, lambda: world.host.crash())
    world.after(60.0, world._take_over)
    world.run(world.time_s + 150.0, lambda: False)
    assert world.held() and not world.backend_nodes()
    assert world.host.state.generation == generation, "nothing but a user's word starts it"
    # A resume alone does not say that the state may be lost.
    world.host.handle(ResumeRequested(by="sim"))
    assert world.run(world.time_s + 100.0, lambda: world.saved != kept or world.held())
    assert world.run(
        world.time_s + 100.0, lambda: world.held() and world.host.state.generation > generation
    )
    assert world.saved == kept, "its checkpoint is written over"
    world.host.handle(ResumeRequested(by="sim", start_over=True))
    world.play()
    last = world.trained[len(world.trained) - TOTAL_STEPS :]
    assert last == list(range(TOTAL_STEPS)), "it trains from step 0 to the end"


@pytest.mark.parametrize("seed", range(2))
def test_with_warn_such_a_script_goes_on_and_the_report_names_the_loss(seed: int) -> None:
    class Warned(IgnoringWorld):
        def _draw_job(self) -> dict[str, Any]:
            document = super()._draw_job()
            document["spec"]["recovery"]["onIgnoredCheckpoint"] = "warn"
            return document

    world = Warned(seed, "reports")
    world.hit(40.0, "kill")
    (incident,) = world.play()
    assert "has not opened /o/ckpt.pt, and writes over it" in incident.evidence
    lost = incident.step_before - (incident.resumed_after_step or -1)
    trained_twice = len(world.trained) - len(set(world.trained))
    assert trained_twice <= lost <= trained_twice + 1


@pytest.mark.parametrize("kind", ["reports", "counts", "posts", "silent"])
def test_a_script_that_nothing_happens_to_has_no_incident(kind: str) -> None:
    assert ScriptWorld(5, kind).play() == []


def test_the_time_before_the_first_step_is_not_productive() -> None:
    world = ScriptWorld(6, "silent")
    world.play()
    productive_s = world.host.loop.view(world.now).ledger["productive"]
    trained_s = (world.now - world.loaded_ns) / SECOND_NS
    assert productive_s == pytest.approx(trained_s, abs=1.5)
