"""The cost of an event does not grow with the number of nodes. Work is counted in bytecodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import AnyAction, LaunchGroup, RequestNodes, StopGroup
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    AnyEvent,
    ControllerStarted,
    FromNode,
    JobSubmitted,
    NodeLost,
    StepCompleted,
)
from holdfast.orchestrator.protocol.facts import Exit, StagedShard, WorkerBeat
from holdfast.orchestrator.protocol.messages import (
    GroupStopped,
    Heartbeat,
    NodeJoined,
    WorkerExited,
)
from holdfast.orchestrator.runtime.job_loop import JobLoop

from ..core.harness import SECOND, facts, spec

FEW, MANY = 640, 2048
"""Both are big jobs for the progress monitor."""
MEASURED = 64
GROWTH = 1.25
BETWEEN_NS = 1_000
"""Nanoseconds between two events: too few for the monitor to check two measured ones."""


class Bytecodes:
    """Counts those of everything that is called."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, function: Callable[..., Any], *arguments: Any) -> Any:
        sys.settrace(self._enter)
        try:
            return function(*arguments)
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        self.count += event == "opcode"
        return self._step


class BigJob:
    """A job with one worker on each node, and what a node in the middle of each phase costs."""

    def __init__(self, num_nodes: int) -> None:
        document = spec({"min": num_nodes - 8, "max": num_nodes}, workers=1)
        self.loop = JobLoop(job_from_mapping(document), Controller())
        self.names = [f"n{number}" for number in range(num_nodes)]
        self.now_ns = 1_000 * SECOND
        self.work: dict[str, float] = {}
        submitted = JobSubmitted(job_id="j", spec=document, spec_directory=".")
        self.loop.start(self.now_ns, submitted, (), None)
        self.actions = list(self._turn())

    def _turn(self) -> tuple[AnyAction, ...]:
        actions = self.loop.ready(self.now_ns).actions
        self.loop.advance()
        return actions

    def _apply(self, event: AnyEvent) -> tuple[AnyAction, ...]:
        self.loop.feed(self.now_ns, event)
        return self._turn()

    def apply(self, phase: str, events: Iterable[AnyEvent]) -> None:
        """One event per node. The work is the mean of some in the middle, and that of the last
        one, which may begin the next phase, for each node."""
        all_events, self.actions = list(events), []
        first = (len(all_events) - MEASURED) // 2
        middle, last = Bytecodes(), Bytecodes()
        for index, event in enumerate(all_events):
            self.now_ns += BETWEEN_NS
            if event is all_events[-1]:
                self.actions += last.of(self._apply, event)
            elif first <= index < first + MEASURED:
                self.actions += middle.of(self._apply, event)
            else:
                self.actions += self._apply(event)
        self.work[phase] = middle.count / MEASURED
        self.work[f"{phase}: the last, for each node"] = last.count / len(self.names)

    def of(self, kind: type) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

    # -- phases -------------------------------------------------------------------------------
    def join(self) -> None:
        (request,) = self.of(RequestNodes)
        self._apply(ActionSucceeded(action_id=request.action_id, nodes=tuple(self.names)))
        self.apply("join", (FromNode(one, NodeJoined(facts=facts(one, 1))) for one in self.names))

    def launched(self) -> None:
        launches = self.of(LaunchGroup)
        assert len(launches) == len(self.names)
        self.apply("launched", (ActionSucceeded(action_id=one.action_id) for one in launches))

    def beat(self, step: int) -> None:
        self.apply(
            "heartbeat",
            (
                FromNode(
                    name,
                    Heartbeat(
                        generation=1,
                        workers=(WorkerBeat(rank=rank, phase="train", step=step, ticks=step + 1),),
                    ),
                )
                for rank, name in enumerate(self.names)
            ),
        )
        self.now_ns += SECOND // 2
        check = Bytecodes()
        check.of(self._turn)
        self.work["check, for each node"] = check.count / len(self.names)

    def report(self) -> None:
        steps = range(10, 10 + 3 * MEASURED)
        self.apply("step report", (StepCompleted(generation=1, step=step) for step in steps))

    def rejoin(self, phase: str) -> None:
        self.apply(
            phase,
            (
                FromNode(name, NodeJoined(facts=facts(name, 1), generation=1, ranks=(rank,)))
                for rank, name in enumerate(self.names)
            ),
        )

    def stop(self) -> None:
        exited = FromNode("n0", WorkerExited(generation=1, exit=Exit(rank=0, signal=9)))
        self.apply("stop", (exited,))
        stops = self.of(StopGroup)
        assert len(stops) == len(self.names)
        self.apply(
            "stopped",
            (
                FromNode(
                    stop.node,
                    GroupStopped(
                        action_id=stop.action_id,
                        generation=1,
                        staged=(StagedShard(9, 1, index % 2, 2, 100),),
                    ),
                )
                for index, stop in enumerate(stops)
            ),
        )
        assert len(self.of(LaunchGroup)) == len(self.names)

    def lose(self) -> None:
        """Every second node, one by one; for each of them another one is requested."""
        self.apply("lost", (NodeLost(node=name, cause="gone") for name in self.names[::2]))
        assert len(self.of(RequestNodes)) == len(self.names) // 2

    def live(self) -> dict[str, float]:
        """All phases of a job's life."""
        self.join()
        self.launched()
        for step in range(3):
            self.beat(step)
        assert self.loop.state.group.first_step_ns
        self.report()
        self.rejoin("reconnect")
        self._apply(ControllerStarted(incarnation=2, nodes=tuple(self.names)))
        self.rejoin("rejoin")
        self.stop()
        self.lose()
        return self.work


def test_an_event_of_a_large_job_costs_what_one_of_a_small_job_costs() -> None:
    few, many = BigJob(FEW).live(), BigJob(MANY).live()
    grown = {phase: (few[phase], many[phase]) for phase in few if many[phase] > GROWTH * few[phase]}
    assert not grown, "(bytecodes with few nodes, with many)"
