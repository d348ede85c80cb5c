"""A shard that several workers of a node restore is fetched once."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable
from pathlib import Path

from holdfast.workers.agent.storage.memfd import Memfd
from holdfast.workers.agent.storage.shared_fetches import Fetched, SharedFetches

DATA = b"a shard"


async def num_open() -> int:
    await asyncio.sleep(0)  # the event loop has the last result
    gc.collect()
    links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return sum("holdfast-test-shard" in str(one.readlink()) for one in links)


class Peer:
    """Sends the shard when `may_send` is set."""

    def __init__(self, *fails: str) -> None:
        self.num_fetches = 0
        self.may_send = asyncio.Event()
        self._fails = list(fails)

    async def fetch(self) -> Fetched:
        self.num_fetches += 1
        await self.may_send.wait()
        if self._fails:
            return self._fails.pop(0)
        memory = Memfd("test-shard", len(DATA))
        os.write(memory.fd, DATA)
        return memory


async def content(getting: Awaitable[Fetched]) -> bytes:
    memory = await getting
    assert not isinstance(memory, str)
    return os.pread(memory.fd, memory.num_bytes, 0)


async def test_workers_that_ask_together_or_later_get_one_fetch() -> None:
    fetches, peer = SharedFetches(), Peer()
    first = [asyncio.create_task(content(fetches.get(1, 0, 8, peer.fetch))) for _ in range(5)]
    await asyncio.sleep(0)
    peer.may_send.set()
    assert await asyncio.gather(*first) == [DATA] * 5
    assert await num_open() == 1, "for the workers that have not asked yet"
    for _ in range(3):
        assert await content(fetches.get(1, 0, 8, peer.fetch)) == DATA
    assert peer.num_fetches == 1
    assert await num_open() == 0, "all have it"


async def test_ranks_of_another_mesh_share_a_fetch_that_is_under_way() -> None:
    fetches, peer = SharedFetches(), Peer()
    both = [asyncio.create_task(content(fetches.get(1, 3, 1, peer.fetch))) for _ in range(2)]
    await asyncio.sleep(0)
    peer.may_send.set()
    assert await asyncio.gather(*both) == [DATA, DATA]
    assert (peer.num_fetches, await num_open()) == (1, 0)
    assert await content(fetches.get(1, 3, 1, peer.fetch)) == DATA
    assert (peer.num_fetches, await num_open()) == (2, 0)


async def test_a_failed_fetch_is_tried_again_by_the_next_worker() -> None:
    fetches, peer = SharedFetches(), Peer("node-1: it has ended")
    peer.may_send.set()
    assert await fetches.get(1, 0, 8, peer.fetch) == "node-1: it has ended"
    assert await content(fetches.get(1, 0, 1, peer.fetch)) == DATA
    assert await num_open() == 0


async def test_the_next_generation_keeps_nothing_of_the_one_before() -> None:
    fetches, peer, slow = SharedFetches(), Peer(), Peer()
    peer.may_send.set()
    assert await content(fetches.get(1, 0, 8, peer.fetch)) == DATA
    late = asyncio.create_task(content(fetches.get(1, 1, 8, slow.fetch)))
    await asyncio.sleep(0)
    fetches.begin(2)
    assert await num_open() == 0
    slow.may_send.set()
    assert await late == DATA
    assert await num_open() == 0
    assert await content(fetches.get(1, 0, 8, peer.fetch)) == DATA, "a worker that is late"
    assert await num_open() == 0
