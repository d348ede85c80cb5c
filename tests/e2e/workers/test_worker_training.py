"""Real torch process groups over gloo, trained by the recipe against a small agent."""

from __future__ import annotations

import pytest
from fake_agent import Generation, make_job

from orchestrator.protocol.facts import Restore
from orchestrator.protocol.mesh import Mesh
from workers import wire

pytestmark = pytest.mark.e2e


def test_hsdp_on_four_ranks_trains_and_a_new_generation_goes_on_from_memory() -> None:
    whole = Generation(make_job(steps=6), Mesh(replicate=2, shard=2))
    assert whole.join() == [0, 0, 0, 0]
    assert sorted(whole.staged) == [0, 1, 2, 3, 4, 5]
    assert all(len(by_rank) == 4 for by_rank in whole.staged.values())
    losses = whole.losses()

    restore = Restore(step=2, generation=1, num_shards=2)
    again = Generation(
        make_job(steps=6), Mesh(replicate=2, shard=2), number=2, restore=restore,
        memory=whole.shards(2),
    )  # fmt: skip
    assert again.join() == [0, 0, 0, 0]
    assert [p.step for p in again.progress(0)] == [3, 4, 5]
    assert again.losses() == {step: losses[step] for step in (3, 4, 5)}
    finished = [m for _, m in again.messages if isinstance(m, wire.Finished)]
    assert [f.step for f in finished] == [5, 5, 5, 5]
