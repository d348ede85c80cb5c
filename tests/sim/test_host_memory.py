"""Random histories on nodes with little memory: the job ends as ever, and no node overflows."""

from __future__ import annotations

import random

import pytest

from holdfast.orchestrator.protocol.host_memory import MIN_RESERVE_BYTES, RESERVE
from holdfast.workers.agent.machine import commands
from holdfast.workers.agent.machine.commands import Command

from . import run_seed
from .node import SimNode
from .world import World

NUM_BUFFERS = (1, 2, 3, 4, 6, 8, 20)
"""Buffers of each worker that a node has room for."""


class ShortNode(SimNode):
    room = 20

    def _carry_out(self, out: Command) -> None:
        super()._carry_out(out)
        if isinstance(out, commands.MakeBuffer):
            limit = self.room * self.slots
            text = f"{self.name} holds {len(self.contents)} buffers; it has room for {limit}"
            self.world.oracle.require(len(self.contents) <= limit, text)


class ShortWorld(World):
    """Each node has a random amount of memory."""

    def make_node(self, name: str, slots: int) -> SimNode:
        node = ShortNode(self, name, slots)
        node.room = random.Random(f"{self.seed} {name}").choice(NUM_BUFFERS)
        held = node.room * slots * self.sizes.shard_bytes
        least = held + MIN_RESERVE_BYTES * slots
        node.memory_bytes = max(least, int(held / (1 - RESERVE))) + slots
        return node


@pytest.mark.parametrize("seed", range(24))
def test_a_job_on_small_nodes_ends_as_expected_within_their_memory(seed: int) -> None:
    run_seed.play(seed, make=ShortWorld)
