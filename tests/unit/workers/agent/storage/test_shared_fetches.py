"""A shard that several workers of a node restore is fetched once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from holdfast.workers.agent.storage.shared_fetches import Fetched, SharedFetches

DATA = b"a shard"


def num_open() -> int:
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
        fd = os.memfd_create("holdfast-test-shard")
        os.write(fd, DATA)
        return fd, len(DATA)


def content(found: Fetched) -> bytes:
    assert not isinstance(found, str)
    fd, num_bytes = found
    data = os.pread(fd, num_bytes, 0)
    os.close(fd)
    return data


async def test_workers_that_ask_together_or_later_get_one_fetch() -> None:
    fetches, peer = SharedFetches(), Peer()
    first = [asyncio.create_task(fetches.get(1, 0, 8, peer.fetch)) for _ in range(5)]
    await asyncio.sleep(0)
    peer.may_send.set()
    for task in first:
        assert content(await task) == DATA
    assert num_open() == 1, "for the workers that have not asked yet"
    for _ in range(3):
        assert content(await fetches.get(1, 0, 8, peer.fetch)) == DATA
    assert peer.num_fetches == 1
    assert num_open() == 0, "all have it"


async def test_ranks_of_another_mesh_share_a_fetch_that_is_under_way() -> None:
    fetches, peer = SharedFetches(), Peer()
    both = [asyncio.create_task(fetches.get(1, 3, 1, peer.fetch)) for _ in range(2)]
    await asyncio.sleep(0)
    peer.may_send.set()
    assert [content(await one) for one in both] == [DATA, DATA]
    assert (peer.num_fetches, num_open()) == (1, 0)
    assert content(await fetches.get(1, 3, 1, peer.fetch)) == DATA
    assert (peer.num_fetches, num_open()) == (2, 0)


async def test_a_failed_fetch_is_tried_again_by_the_next_worker() -> None:
    fetches, peer = SharedFetches(), Peer("node-1: it has ended")
    peer.may_send.set()
    assert await fetches.get(1, 0, 8, peer.fetch) == "node-1: it has ended"
    assert content(await fetches.get(1, 0, 1, peer.fetch)) == DATA
    assert num_open() == 0


async def test_the_next_generation_keeps_nothing_of_the_one_before() -> None:
    fetches, peer, slow = SharedFetches(), Peer(), Peer()
    peer.may_send.set()
    assert content(await fetches.get(1, 0, 8, peer.fetch)) == DATA
    late = asyncio.create_task(fetches.get(1, 1, 8, slow.fetch))
    await asyncio.sleep(0)
    fetches.begin(2)
    await asyncio.sleep(0)
    assert num_open() == 0
    slow.may_send.set()
    assert content(await late) == DATA
    await asyncio.sleep(0)
    assert num_open() == 0
    assert content(await fetches.get(1, 0, 8, peer.fetch)) == DATA, "a worker that is late"
    assert num_open() == 0
