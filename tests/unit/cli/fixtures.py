"""JobViews for tests of the output."""

from __future__ import annotations

from holdfast.orchestrator.runtime.observe.view import (
    CheckpointView,
    Incident,
    JobView,
    NodeView,
    WorkerView,
)

NS = 1_000_000_000
T0 = 1_700_000_000 * NS


def make_view(**changes: object) -> JobView:
    """A job in the middle of its run."""
    view = JobView(
        name="demo",
        job_id="0123",
        state="running",
        submitted_ns=T0,
        now_ns=T0 + 60 * NS,
        generation=1,
        world_size=4,
        mesh="replicate 2 x shard 2",
        strategy="HSDP",
        step=41,
        total_steps=100,
        loss=2.5,
        step_s=0.35,
        tokens_per_s=12345.0,
        memory_step=41,
        checkpoints=[CheckpointView(step=39, generation=1, num_bytes=40 * 2**20)],
        checkpoint_path="/somewhere/checkpoints",
        nodes=[
            NodeView(
                name="node-0",
                state="member",
                address="127.0.0.1",
                heartbeat_age_s=0.2,
                workers=[WorkerView(rank=0, state="running", phase="train", step=41)],
            )
        ],
        ledger={"productive": 50.0, "starting": 4.0, "recovering": 1.0},
        goodput=0.909,
    )
    for name, value in changes.items():
        setattr(view, name, value)
    return view


def make_incident(*, over: bool = True, **changes: object) -> Incident:
    incident = Incident(
        number=1,
        at_ns=T0 + 20 * NS,
        failure_class="infrastructure",
        title="worker 2 on node-1 was killed by SIGKILL",
        culprit_node="node-1",
        culprit_rank=2,
        evidence="exit by signal 9",
        decision="restart all 4 workers from memory",
        rehearsal=True,
        generation_before=1,
        generation_after=2 if over else None,
        world_size_before=4,
        world_size_after=4 if over else None,
        resumed_after_step=20 if over else None,
        restored_from="memory" if over else "",
        steps_lost=1 if over else None,
        seconds={"stop": 0.05, "launch": 0.02, "first-step": 0.6, "total": 0.67} if over else {},
    )
    for name, value in changes.items():
        setattr(incident, name, value)
    return incident
