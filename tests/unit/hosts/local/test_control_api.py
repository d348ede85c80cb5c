"""Verbs whose reply depends on what the job does next."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import Recovery
from holdfast.orchestrator.core.quiesce import PACE_S
from holdfast.orchestrator.protocol import messages as wire
from tests.unit.runtime.harness import make_job

from .harness import running


async def test_a_suspend_can_be_withdrawn_before_workers_stop(tmp_path: Path) -> None:
    harness = await running(tmp_path, make_job(checkpoint={"memory": {"everySteps": 50}}))
    assert not (await harness.ask("resume")).ok, "no suspend was requested"
    assert (await harness.ask("suspend")).ok
    withdrawn = await harness.ask("resume")
    assert withdrawn.ok and withdrawn.detail == "training continues"
    await asyncio.sleep(PACE_S + 0.2)  # by then it would have begun
    projection = harness.service.runtime.driver.loop.projection
    view = projection.view(projection.now_ns)
    assert (view.state, view.generation) == ("running", 1)
    assert not any(
        isinstance(m, wire.StopWorkers) for one in harness.members() for m in one.received
    )
    await harness.finish()


async def test_agents_follow_an_adjusted_heartbeat_interval(tmp_path: Path) -> None:
    harness = await running(tmp_path, make_job(recovery={"heartbeatIntervalSeconds": 1.0}))
    recovery = Recovery(heartbeat_interval_s=0.7).model_dump(mode="json", by_alias=True)
    assert (await harness.ask("adjust", min_nodes=1, spares=0, recovery=recovery)).ok
    agent = harness.members()[0]

    def intervals() -> list[float]:
        return [m.heartbeat_interval_s for m in agent.received if isinstance(m, wire.Welcome)]

    await harness.until(lambda view: intervals()[-1] == 0.7)
    assert agent.frames is not None
    agent.frames.close()
    await harness.back(agent, 3)
    assert intervals() == [1.0, 0.7, 0.7], "also after a reconnect"
    await harness.finish()
