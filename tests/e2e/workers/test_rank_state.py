"""State of single ranks on real groups with a fake agent, exchanged by ranks with one shard."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol.facts import Restore
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.checkpoint.layout import parse_header
from holdfast.workers.checkpoint.rank_values import decode
from tests.e2e.workers.fake_agent import Generation, make_job

pytestmark = pytest.mark.e2e

STEPS = 8


def loop(job: TrainingJob) -> None:
    """Each rank draws from a generator of its own; some get a request to stage a step, and
    others do not."""
    import random

    import torch
    from torch import nn

    from holdfast import session

    s = session.init()
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    drawn: dict[str, Any] = {"drawn": []}
    draw = random.Random(s.rank)
    start = s.restore(model, optimizer, per_rank={"draw": draw, "seen": drawn})
    for step in range(start, STEPS):
        drawn["drawn"].append(draw.random())
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        s.step(step)
    s.finish()
    session.leave()


def drawn(file: bytes) -> dict[str, list[float]]:
    """Rank -> what it had drawn."""
    header, found = parse_header(file, "file"), {}
    for name, entry in header.entries.items():
        if name.startswith("rank."):
            data = file[header.data_start + entry.begin : header.data_start + entry.end]
            length = int.from_bytes(data[:8], "little")
            found[name] = decode(data[8 : 8 + length])["seen"]["drawn"]
    return found


def test_a_restored_rank_continues_with_its_own_state_at_hsdp() -> None:
    mesh = Mesh(replicate=2, shard=2)
    job = make_job(checkpoint={"memory": {"everySteps": 1}})
    first = Generation(job, mesh, entry=loop)
    assert first.join() == [0, 0, 0, 0], first.failures()
    whole = {**drawn(first.staged[STEPS - 1][0]), **drawn(first.staged[STEPS - 1][1])}
    assert sorted(whole) == ["rank.0", "rank.1", "rank.2", "rank.3"]
    assert len({tuple(numbers) for numbers in whole.values()}) == 4
    assert drawn(first.staged[3][0]) == drawn(first.staged[3][2]), "twins hold the same"
    restore = Restore(step=3, generation=1, num_shards=2)
    memory = {0: first.staged[3][2], 1: first.staged[3][1]}
    again = Generation(job, mesh, number=2, restore=restore, memory=memory, entry=loop)
    assert again.join() == [0, 0, 0, 0], again.failures()
    assert {**drawn(again.staged[7][2]), **drawn(again.staged[7][3])} == whole


def test_a_step_that_one_of_the_twins_is_asked_for_is_staged_by_both() -> None:
    """The interval has no step; the other rank gets no request."""
    job = make_job(checkpoint={"memory": {"everySteps": 1000}})
    generation = Generation(job, Mesh(replicate=2), entry=loop)
    asked = generation.seats[1]
    worker_transport.send(asked.link, worker_protocol.StageAt(step=5))
    assert generation.join() == [0, 0], generation.failures()
    assert sorted(generation.staged[5]) == [0, 1]
    assert generation.staged[5][0] == generation.staged[5][1]
    assert len(drawn(generation.staged[5][0])["rank.1"]) == 6
