"""Capacity of a node's memory, and what is given up, in order."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.protocol.host_memory import (
    HostMemory,
    HostRoom,
    describe,
    least,
    plan_host_memory,
    reserve_bytes,
    scaled,
)

GIB = 2**30
LIMIT, SHARD, WORKERS = 1000 * GIB, 10 * GIB, 2
UNIT = SHARD * WORKERS


def planned(units: float, *, buddy: bool = True) -> HostMemory:
    """The plan with usable memory for so many buffers of each worker."""
    room = HostRoom(LIMIT, int(units * UNIT) + LIMIT // 10)
    return plan_host_memory(room, shard_bytes=SHARD, num_shards=4, workers=WORKERS, buddy=buddy)


@pytest.mark.parametrize(
    ("units", "buddy", "buffers", "given_up"),
    [(9, True, 6, "nothing"), (8, True, 5, "nothing"), (7.9, False, 4, "copies"),
     (4, False, 4, "copies"), (3.9, False, 3, "buffers"), (2, False, 2, "buffers"),
     (1.9, False, 1, "memory-tier")],
)  # fmt: skip
def test_copies_are_given_up_first_then_buffers_then_the_memory_tier(
    units: float, buddy: bool, buffers: int, given_up: str
) -> None:
    memory = planned(units)
    grant = memory.grant
    assert (grant.buddy, grant.buffers, grant.given_up) == (buddy, buffers, given_up)
    assert (grant.buffers + 3 * grant.buddy) * UNIT <= memory.usable_bytes


def test_the_reserve_is_a_tenth_and_at_least_256_mib_for_each_worker() -> None:
    def reserve(limit: int, *, on_cpu: bool = False) -> int:
        return reserve_bytes(HostRoom(limit, limit, on_cpu), shard_bytes=SHARD, workers=WORKERS)

    assert reserve(LIMIT) == LIMIT // 10
    assert reserve(GIB) == GIB // 2
    assert reserve(LIMIT, on_cpu=True) == LIMIT // 10 + 2 * UNIT


def test_where_no_copies_are_wanted_none_are_given_up() -> None:
    assert planned(9, buddy=False).grant.given_up == "nothing"
    assert planned(4, buddy=False).grant.buffers == 4


def test_one_buffer_may_take_the_reserve_but_not_more_than_there_is() -> None:
    def at(available: int) -> HostMemory:
        room = HostRoom(LIMIT, available)
        return plan_host_memory(room, shard_bytes=SHARD, num_shards=4, workers=WORKERS, buddy=True)

    assert at(UNIT).grant.given_up == "memory-tier"
    assert (at(UNIT - 1).grant.given_up, at(UNIT - 1).grant.buffers) == ("checkpoints", 0)


def test_half_of_the_shards_are_twice_as_large() -> None:
    memory = scaled(planned(8), num_shards=2, workers=WORKERS, buddy=True)
    assert memory.shard_bytes == 2 * SHARD and memory.grant.given_up == "copies"


def test_the_node_that_holds_least_decides() -> None:
    found = least({"a": planned(9), "b": planned(3), "c": planned(5)})
    assert found is not None and found[0] == "b"
    text = describe(found[1], "b")
    assert text.startswith("3 buffers per worker instead of 4, no buddy copies")
    assert text.endswith("on b")
