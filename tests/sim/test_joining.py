"""Workers of nodes that join build beside the running job, in whole jobs whose size changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from holdfast.orchestrator.core import events as e

from . import run_seed
from .world import World


class Changing(World):
    """The survivors keep their processes, and nodes come and go."""

    def __init__(self, seed: int, verbose: bool = False) -> None:
        super().__init__(seed, verbose)
        self.keeps_any, self.fixed_size, self.poison = True, seed % 8 == 7, None

    def _draw_job(self) -> dict[str, Any]:
        document = super()._draw_job()
        spec = document["spec"]
        spec["nodes"] = {"min": 1, "max": 3}
        spec["workersPerNode"], spec["parallelism"] = 2, {"shard": 1 + self.seed % 2}
        return document

    def change(self) -> None:
        self.total_steps = 200
        for number in range(6):
            at = 8.0 + 12 * number
            self.after(at, self._change)
            if self.chance(0.4):  # while workers build
                self.after(at + self.between(0.0, 10.0), self._fault)
        self.after(80.0, self._heal)

    def _change(self) -> None:
        members = len(self.host.state.group.members) if self.host.up else 0
        self.fault_s = self.time_s
        if self.chance(0.5):
            self.host.handle(e.ResizeRequested(nodes=4 - members, by="sim"))
        else:
            self._preempt()


@functools.cache
def play(seed: int) -> World:
    return run_seed.play(seed, faults=lambda world: world.change(), make=Changing)


@pytest.mark.parametrize("seed", range(40))
def test_the_job_ends_as_expected_and_leaves_nothing_behind(seed: int) -> None:
    play(seed)


def test_workers_that_were_built_get_seats() -> None:
    worlds = [play(seed) for seed in range(40)]
    assert sum(world.num_joined for world in worlds) >= 10
