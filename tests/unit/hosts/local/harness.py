"""A job on one machine with fake agents, whose controller may be killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.hosts.local.service import LocalHostTiming, LocalJobHost
from holdfast.orchestrator.journal.file_store import FileStore
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.job_directory import Home
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.unit.runtime.harness import BOUND_S, FakeAgent, FakeBackend, Frames, make_job


class JobHarness:
    """A job, its agents, and a controller that may be killed."""

    def __init__(
        self,
        tmp_path: Path,
        job: TrainingJob,
        open_store: Callable[[Path], FileStore] = FileStore,
        timing: LocalHostTiming = LocalHostTiming(),  # noqa: B008 - frozen
    ) -> None:
        self.job, self.open_store, self.timing = job, open_store, timing
        self.directory = Home(tmp_path).create(job, tmp_path)
        self.backend = FakeBackend()
        self.backend.directory = self.directory
        self.service: LocalJobHost
        self.task: asyncio.Task[JobView]

    def start(self) -> None:
        """A controller, the first or the next one."""
        self._lock = self.directory.locked()
        self._lock.__enter__()
        self.service = LocalJobHost(
            self.directory, self.job, make_backend=lambda job, directory: self.backend,
            open_store=self.open_store, timing=self.timing,
        )  # fmt: skip
        self.task = asyncio.create_task(self.service.run())

    async def kill_controller(self) -> None:
        """SIGKILL: no message is sent."""
        self.task.cancel()
        await asyncio.wait([self.task])
        self._lock.__exit__(None, None, None)

    async def until(self, condition: Callable[[JobView], bool]) -> JobView:
        """Wait until the view fulfils a condition."""
        async with asyncio.timeout(BOUND_S):
            while True:
                if self.task.done():
                    view = self.task.result()
                    assert condition(view), f"the job ended: {view.state}, {view.reason}"
                    return view
                if self.service.runtime.begun:
                    view = self.service.view()
                    if condition(view):
                        return view
                await asyncio.sleep(0)

    async def running(self, generation: int = 1) -> JobView:
        """All nodes have been launched and the first step is done."""
        await self.until(
            lambda view: (
                view.generation == generation
                and all(agent.launch is not None for agent in self.members())
                and len(self.members()) > 0
            )
        )
        first = self.restored_step() + 1
        for agent in self.members():
            agent.advance(first)
        return await self.until(
            lambda view: view.state == "running" and view.generation == generation
        )

    def welcomes(self, agent: FakeAgent) -> int:
        return sum(isinstance(message, wire.Welcome) for message in agent.received)

    async def back(self, agent: FakeAgent, welcomes: int) -> None:
        """Wait until an agent has received so many Welcomes."""
        async with asyncio.timeout(BOUND_S):
            while self.welcomes(agent) < welcomes:
                await asyncio.sleep(0)

    async def wait_received(self, agent: FakeAgent, message: wire.Message) -> None:
        """Wait until an agent has received a message."""
        async with asyncio.timeout(BOUND_S):
            while message not in agent.received:
                await asyncio.sleep(0)

    def members(self) -> list[FakeAgent]:
        names = self.service.runtime.state.group.members
        return [self.backend.agents[name] for name in names if name in self.backend.agents]

    def restored_step(self) -> int:
        launch = self.members()[0].launch
        assert launch is not None
        return launch.membership.restore.step if launch.membership.restore else -1

    async def ask(self, verb: str, **arguments: Any) -> wire.Reply:
        place = self.directory.controller()
        assert place is not None
        frames = await Frames.dial(place["address"], place["port"])
        frames.send(wire.Request(token=self.directory.token(), verb=verb, arguments=arguments))
        reply = await frames.receive()
        frames.close()
        assert isinstance(reply, wire.Reply)
        return reply

    async def finish(self) -> JobView:
        """All workers end with exit code 0; their last step goes to storage."""
        for agent in self.members():
            agent.exit_worker(0, signal=None, code=0)
            agent.exit_worker(1, signal=None, code=0)
        async with asyncio.timeout(BOUND_S):
            view = await self.task
        self._lock.__exit__(None, None, None)
        return view

    def read_place(self) -> dict[str, Any]:
        place: dict[str, Any] = json.loads(self.directory.controller_file.read_text())
        return place


async def running(tmp_path: Path, job: TrainingJob | None = None, **options: Any) -> JobHarness:
    """A job with a controller, whose workers run."""
    harness = JobHarness(tmp_path, job or make_job(), **options)
    harness.start()
    await harness.running()
    return harness
