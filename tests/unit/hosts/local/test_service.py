"""A complete local controller over real sockets, with fake agents."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_to_mapping
from holdfast.orchestrator.cli.event_format import document
from holdfast.orchestrator.core.events import (
    ActionFailed,
    ActionSucceeded,
    ActionUnknown,
    ControllerStarted,
    FromNode,
    JobSubmitted,
    NodeLost,
)
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.hosts.local.job_records import read_view
from holdfast.orchestrator.hosts.local.service import LocalHostTiming, LocalJobHost
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.job_loop import replay
from holdfast.orchestrator.runtime.observe import notifications
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.unit.journal.files import records
from tests.unit.runtime.harness import BOUND_S, Frames, drive, make_job, node_facts
from tests.unit.runtime.observe.test_notifications import SECRET, SERVERS, TIMING, hook

from .harness import JobHarness, running


def journal(harness: JobHarness) -> list[Any]:
    return [event for _, event in records(harness.directory.journal)]


def without_clock(view: JobView) -> dict[str, Any]:
    """The part of a view that a replay must reproduce."""
    body: dict[str, Any] = msgspec.to_builtins(view)
    for name in ("now_ns", "metrics_port", "controller_alive"):
        del body[name]
    return body


async def test_a_job_runs_to_its_end_and_its_record_has_the_same_view(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    view = await harness.finish()
    assert view.state == "succeeded" and view.step == 0
    assert [one.step for one in view.checkpoints] == [0]
    assert sum(view.ledger.values()) == pytest.approx(
        (view.finished_ns - view.submitted_ns) / 1e9  # type: ignore[operator]
    )
    assert without_clock(read_view(harness.directory)) == without_clock(view)
    assert harness.directory.controller() is None
    assert harness.backend.agents == {}


async def test_a_killed_worker_is_an_incident_with_its_phases(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    harness.members()[1].exit_worker(0)
    view = await harness.running(generation=2)
    incident = view.incidents[0]
    assert incident.culprit_rank == 2 and incident.steps_lost == 0
    assert incident.restored_from == "memory"
    phases = dict(incident.seconds)
    assert phases.pop("total") == pytest.approx(sum(phases.values()))
    assert list(phases) == ["stop", "place", "launch", "first-step"]
    await harness.finish()


async def test_a_killed_node_is_lost_at_once_and_replaced(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    harness.backend.kill("node-1")
    view = await harness.running(generation=2)
    assert [node.name for node in view.nodes] == ["node-0", "node-2"]
    lost = [event for event in journal(harness) if isinstance(event, NodeLost)]
    assert [(event.node, event.cause) for event in lost] == [("node-1", "gone")]
    await harness.finish()


async def test_a_closed_connection_of_an_existing_node_is_not_a_loss(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    agent = harness.members()[0]
    welcomes = harness.welcomes(agent)
    assert agent.frames is not None
    agent.frames.writer.transport.abort()
    await harness.back(agent, welcomes + 1)
    agent.advance(1)
    harness.members()[1].advance(1)
    view = await harness.until(lambda view: view.step == 1)
    assert view.generation == 1 and view.incidents == []
    await harness.finish()


async def test_a_new_controller_takes_over_without_disturbing_training(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    await harness.kill_controller()
    assert harness.directory.controller() is None
    dead = read_view(harness.directory)
    assert (dead.state, dead.controller_alive) == ("running", False)
    harness.start()
    await harness.until(lambda view: len(harness.service.runtime.links) == 2)
    for agent in harness.members():
        agent.advance(7)
    view = await harness.until(lambda view: view.step == 7)
    assert (view.generation, view.incidents, view.controller_restarts) == (1, [], 1)
    for agent in harness.members():
        assert not any(isinstance(message, wire.StopWorkers) for message in agent.received)
    await harness.finish()


def test_a_terminal_that_cannot_be_written_does_not_end_the_controller(tmp_path: Path) -> None:
    def closed(text: str) -> None:
        said.append(text)
        raise BrokenPipeError

    said: list[str] = []
    host = LocalJobHost(JobHarness(tmp_path, make_job()).directory, make_job(), on_note=closed)
    host.runtime._journal_problem("the disk is full")
    assert said == ["the disk is full"]


async def test_killing_everything_ends_the_controller_also_when_a_node_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = LocalHostTiming(forced_end_s=0.0, second_ctrl_c_s=0.0)
    harness = await running(tmp_path, timing=timing)

    async def close(*, release: bool) -> None:
        if release:
            raise HoldfastError("node-0: still there")

    monkeypatch.setattr(harness.backend, "close", close)
    for _ in range(2):
        harness.service._on_signal(signal.SIGINT)
    async with asyncio.timeout(BOUND_S):
        view = await harness.task
    assert view.state == "cancelled" and harness.service.interrupted


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_is_delivered_twice_does_not_kill_the_nodes(
    second: signal.Signals, tmp_path: Path
) -> None:
    harness = await running(tmp_path)
    for number in (signal.SIGTERM, second):
        harness.service._on_signal(number)
    async with asyncio.timeout(BOUND_S):
        view = await harness.task
    assert view.state == "cancelled"
    assert [one.failure_class for one in view.incidents] == ["cancel"]
    assert harness.service._forced is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_note_names_ctrl_c_only_to_who_can_press_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    harness = await running(tmp_path)
    monkeypatch.setattr(harness.service, "_on_note", notes.append)
    harness.service._on_signal(number)
    async with asyncio.timeout(BOUND_S):
        await harness.task
    assert "cancelling the job" in notes[0]
    assert ("press Ctrl-C again" in notes[0]) == (number == signal.SIGINT)


async def test_sigterm_never_forces(tmp_path: Path) -> None:
    harness = await running(tmp_path, timing=LocalHostTiming(second_ctrl_c_s=0.0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        harness.service._on_signal(number)
    assert harness.service._forced is None
    async with asyncio.timeout(BOUND_S):
        await harness.task


async def test_a_node_that_ends_while_no_controller_runs_is_detected_as_lost(
    tmp_path: Path,
) -> None:
    harness = await running(tmp_path)
    await harness.kill_controller()
    harness.backend.on_node_gone = lambda gone: None
    harness.backend.kill("node-0")
    harness.start()
    view = await harness.running(generation=2)
    assert view.incidents[0].culprit_node == "node-0"
    await harness.finish()


async def test_every_action_ends_in_exactly_one_result(tmp_path: Path) -> None:
    """The rule holds also for an action whose result arrives after its controller was killed."""
    harness = await running(tmp_path)
    harness.members()[1].answers = False
    harness.members()[0].exit_worker(0)
    await harness.until(lambda view: view.state == "recovering")
    stopping = harness.members()[1]
    async with asyncio.timeout(BOUND_S):
        while not any(isinstance(message, wire.StopWorkers) for message in stopping.received):
            await asyncio.sleep(0)
    await harness.kill_controller()
    stopping.answers = True
    harness.start()
    await harness.running(generation=2)
    await harness.finish()
    facts = [e.fact if isinstance(e, FromNode) else e for e in journal(harness)]
    results = (ActionSucceeded, ActionFailed, ActionUnknown, wire.GroupStopped)
    ended = [fact.action_id for fact in facts if isinstance(fact, results)]
    assert len(ended) == len(set(ended))
    assert set(ended) == set(range(1, max(ended) + 1))
    starts = [e.incarnation for e in journal(harness) if isinstance(e, ControllerStarted)]
    assert starts == [1, 2]


async def test_the_live_view_and_the_replayed_view_agree(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    harness.members()[0].exit_worker(1)
    await harness.running(generation=2)
    reply = await harness.ask("suspend", by="test")
    assert reply.ok
    await harness.until(lambda view: view.state == "suspended")
    await harness.ask("resume")
    await harness.running(generation=3)
    harness.backend.kill(harness.members()[0].name)
    await harness.running(generation=4)
    story = harness.service.runtime.driver.loop.projection
    other = replay(harness.job, records(harness.directory.journal))
    now_ns = story.now_ns + 5_000_000_000
    assert other.view(now_ns, live=False) == story.view(now_ns, live=False)
    view = story.view(now_ns, live=False)
    assert sum(view.ledger.values()) == pytest.approx((now_ns - view.submitted_ns) / 1e9)
    await harness.finish()


async def test_requests_are_answered_and_carried_out(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    status = await harness.ask("status")
    assert msgspec.convert(status.body, JobView).state == "running"
    harness.backend.node_limit = lambda: 4
    refused = await harness.ask("resize", nodes=99)
    assert not refused.ok and "nodes: got 99; expected at most 4" in refused.detail
    refused = await harness.ask("resize", nodes=0)
    assert not refused.ok and "expected" in refused.detail
    assert (await harness.ask("resize", nodes="2")).detail == "nodes: got '2'; expected an integer"
    assert not (await harness.ask("resume")).ok
    assert "expected one of" in (await harness.ask("dance")).detail
    assert (await harness.ask("resize", nodes=1)).ok
    view = await harness.running(generation=2)
    assert view.world_size == 2 and view.incidents[0].failure_class == "resize"
    assert (await harness.ask("cancel", by="test")).ok
    async with asyncio.timeout(BOUND_S):
        view = await harness.task
    assert view.state == "cancelled" and harness.backend.agents == {}


async def test_an_injected_fault_is_recorded_before_it_happens(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    bad = [
        await harness.ask("chaos", kind="explode"),
        await harness.ask("chaos", kind="kill-worker", rank=9),
        await harness.ask("chaos", kind="kill-node", node="node-7"),
    ]
    assert [reply.detail.split(";")[0] for reply in bad] == [
        "kind: got explode", "rank: got 9", "node: got node-7",
    ]  # fmt: skip
    reply = await harness.ask("chaos", kind="kill-worker", rank=2)
    assert reply.ok and reply.body["node"] == harness.members()[1].name
    await harness.wait_received(harness.members()[1], wire.Chaos(kind="kill-worker", rank=2))
    harness.members()[1].exit_worker(0)
    view = await harness.running(generation=2)
    assert view.incidents[0].rehearsal
    held = await harness.ask("chaos", kind="kill-node", node="node-0", hold_s=60)
    assert held.ok
    harness.backend.kill("node-0")
    view = await harness.running(generation=3)
    assert view.world_size == 2
    await harness.finish()


async def test_a_watcher_sees_views_until_the_job_ends(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    place = harness.read_place()
    frames = await Frames.dial(place["address"], place["port"])
    frames.send(wire.Request(token=harness.directory.token(), verb="watch"))
    first = await frames.receive()
    assert first.body["state"] == "running"
    await harness.finish()
    while (reply := await frames.receive()) is not None:
        assert reply.ok
    frames.close()


async def test_a_checkpoint_can_be_requested(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    assert (await harness.ask("checkpoint")).ok
    view = await harness.until(lambda view: bool(view.checkpoints))
    assert view.checkpoints[0].step == 0 and view.commits == 1 and view.durable_s == 0.5
    for agent in harness.members():
        await harness.wait_received(agent, wire.Committed(generation=1, step=0))
    await harness.finish()


@pytest.mark.parametrize("every", [1, 50])
async def test_a_requested_checkpoint_is_staged_also_if_not_every_step_is(
    tmp_path: Path, every: int
) -> None:
    harness = await running(tmp_path, make_job(checkpoint={"memory": {"everySteps": every}}))
    step = (await harness.ask("checkpoint")).body["step"]
    for agent in harness.members():
        await harness.wait_received(agent, wire.Persist(action_id=0, generation=1, step=step))
        orders = [m for m in agent.received if isinstance(m, wire.Stage)]
        wanted = [] if every == 1 else [wire.Stage(action_id=0, generation=1, step=step)]
        assert orders == wanted
    await harness.finish()


async def test_connections_without_valid_credentials_are_refused(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    place = harness.read_place()
    token = harness.directory.token()

    async def hello(**fields: Any) -> Any:
        frames = await Frames.dial(place["address"], place["port"])
        joined = wire.NodeJoined(facts=node_facts())
        values = {"token": token, "job": "tiny", "node": "x", "joined": joined, **fields}
        frames.send(wire.Hello(**values))
        answer = await frames.receive()
        assert await frames.receive() is None
        frames.close()
        return answer

    assert (await hello(token="0" * 64)).detail == "token: not the one of this job"
    assert "(protocol 99); expected" in (await hello(version=99)).detail
    assert "this is not its controller" in (await hello(job="other")).detail
    frames = await Frames.dial(place["address"], place["port"])
    frames.send(wire.Request(token="wrong", verb="cancel"))
    assert not (await frames.receive()).ok
    frames.close()
    frames = await Frames.dial(place["address"], place["port"])
    frames.writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    assert await frames.receive() is None
    frames.close()
    harness.backend.kill("node-1")
    await harness.until(lambda view: "node-1" not in [node.name for node in view.nodes[:1]])
    assert "node-1 was lost" in (await hello(node="node-1")).detail
    view = await harness.running(generation=2)
    assert view.state == "running"
    await harness.finish()


async def test_a_node_that_connects_twice_keeps_its_newest_connection(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    agent = harness.members()[0]
    welcomes = harness.welcomes(agent)
    place = harness.read_place()
    frames = await Frames.dial(place["address"], place["port"])
    frames.send(
        wire.Hello(
            token=harness.directory.token(), job="tiny", node=agent.name,
            joined=wire.NodeJoined(facts=node_facts(), generation=1, ranks=(0, 1)),
        )
    )  # fmt: skip
    assert isinstance(await frames.receive(), wire.Welcome)
    # The agent whose connection was replaced connects again and replaces the other one.
    await harness.back(agent, welcomes + 1)
    assert await frames.receive() is None
    view = harness.service.view()
    assert view.generation == 1 and view.incidents == []
    frames.close()
    await harness.finish()


async def test_a_node_that_joins_learns_what_the_script_imports(tmp_path: Path) -> None:
    harness = await running(tmp_path)
    member, lost = harness.members()
    assert [one.imports for one in member.received if isinstance(one, wire.Welcome)] == [()]
    member.say(wire.ImportsLearned(modules=("transformers",)))
    async with asyncio.timeout(BOUND_S):
        while not harness.service.runtime._welcome().imports:
            await asyncio.sleep(0)
    before = set(harness.backend.agents)
    harness.backend.kill(lost.name)
    await harness.until(lambda view: set(harness.backend.agents) > before - {lost.name})
    (name,) = set(harness.backend.agents) - before
    new = harness.backend.agents[name]
    await harness.back(new, 1)
    (welcome,) = [one for one in new.received if isinstance(one, wire.Welcome)]
    assert welcome.imports == ("transformers",)
    await harness.kill_controller()


async def test_a_node_of_another_protocol_is_lost_with_the_reason_of_its_rejection(
    tmp_path: Path,
) -> None:
    harness = await running(tmp_path)
    member, _other = harness.members()
    place = member.directory.controller()
    assert place is not None
    frames = await Frames.dial(place["address"], place["port"])
    hello = wire.Hello(
        token=member.directory.token(), job=member.directory.name, node=member.name,
        version=limits.PROTOCOL_VERSION + 1, release="7.1.0",
        joined=wire.NodeJoined(facts=node_facts()),
    )  # fmt: skip
    frames.send(msgspec.structs.replace(hello, token="guessed"))
    assert (await frames.receive()).detail.startswith("token: ")
    frames = await Frames.dial(place["address"], place["port"])
    frames.send(hello)
    refused = await frames.receive()
    assert refused.final and "got 7.1.0 (protocol 2)" in refused.detail, refused.detail
    reason = f"{member.name} was lost (gone): {refused.detail}"
    await harness.until(lambda view: view.reason == reason)
    await harness.kill_controller()


def test_a_job_reports_its_recoveries_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A takeover repeats nothing. The server is slow; the recovery is not."""
    monkeypatch.setattr(notifications, "NotifyTiming", lambda: TIMING)

    async def scenario() -> None:
        when = ["recovered", "finished"]
        servers = [
            {"url": server.url(), "format": "json", "when": when},
            {"url": only_lost.url(), "format": "json", "when": ["lost-steps", "failed"]},
        ]
        job = JobHarness(tmp_path, make_job(notify=servers))
        job.start()
        await job.running()
        for step in (5, 8):
            for agent in job.members():
                staged = agent.staged if step == 8 else ()
                agent.advance(step)
                agent.staged = staged or agent.staged
            await job.until(lambda view, step=step: view.step == step)  # type: ignore[misc]
        job.members()[0].exit_worker()
        await job.running(2)
        async with asyncio.timeout(10):
            while not (server.got and only_lost.got):
                await asyncio.sleep(0.01)
        await job.kill_controller()
        job.start()
        await job.until(lambda view: view.state == "running" and view.controller_restarts == 1)
        view = await job.finish()
        assert view.state == "succeeded"

    with hook("slow", 200) as server, hook() as only_lost:
        drive(scenario())
    assert server.what() == ["recovered", "finished"]
    first, last = server.got
    assert (first["cause"], first["steps_lost"]) == ("infrastructure", 3) and first["seconds"] > 0
    assert "SIGKILL" in first["reason"] and last["seconds"] > 0
    assert first["command"] == "holdfast status tiny --report"
    assert only_lost.what() == ["lost-steps"]
    spec = job_to_mapping(make_job(notify=SERVERS))
    given = JobSubmitted(job_id="", spec=spec, spec_directory="", checkpoint_path="")
    events = str(document(given))
    assert SECRET not in events and "(hidden)" in events, "for `holdfast debug events`"


def test_a_job_that_waits_for_nodes_reports_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "NotifyTiming", lambda: TIMING)

    async def scenario() -> None:
        job = JobHarness(tmp_path, make_job(notify=[{"url": server.url(), "format": "json"}]))
        job.backend.room = False
        job.start()
        async with asyncio.timeout(10):
            while not server.got:
                await asyncio.sleep(0.01)
        await job.ask("cancel", by="test")
        await job.until(lambda view: view.state == "cancelled")

    with hook() as server:
        drive(scenario())
    assert server.what() == ["waiting"] and "node" in server.got[0]["reason"]
