"""Reads entries of a shard in an object store: runs of adjacent entries in one request each,
several requests at a time, in bounded memory. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .layout import Bytes, Entry

RUN_BYTES = 8 * 2**20
"""Most bytes of one request: takes longer than the latency of a store, and ten are small beside a
rank's state."""
MAX_GAP_BYTES = 128 * 1024
"""Bytes between two entries that are not needed: cheaper to read than a further request."""
REQUESTS_AT_A_TIME = 10
"""The number of connections that botocore keeps open by default."""


@dataclass(frozen=True)
class Run:
    """Entries that are read together. An entry above RUN_BYTES is a run of its own and takes
    several requests."""

    begin: int
    end: int
    entries: tuple[Entry, ...]

    @property
    def requests(self) -> list[tuple[int, int]]:
        starts = range(self.begin, self.end, RUN_BYTES)
        return [(at, min(at + RUN_BYTES, self.end)) for at in starts]


def runs_of(wanted: Iterable[Entry]) -> list[Run]:
    """The entries in the order of their bytes."""
    runs: list[Run] = []
    held: list[Entry] = []
    for entry in sorted(wanted, key=lambda one: (one.begin, one.end)):
        if held and (
            entry.begin - held[-1].end > MAX_GAP_BYTES
            or max(entry.end, held[-1].end) - held[0].begin > RUN_BYTES
        ):
            runs.append(_run(held))
            held = []
        held.append(entry)
    return [*runs, _run(held)] if held else runs


def _run(held: Sequence[Entry]) -> Run:
    return Run(held[0].begin, max(entry.end for entry in held), tuple(held))


def read_entries(
    wanted: Iterable[Entry], read: Callable[[int, int], bytes], tick: Callable[[], None]
) -> Iterator[tuple[Entry, Bytes]]:
    """Each entry and its bytes; these are valid until the next one. `read` is called in other
    threads, `tick` in this one after each request. Raises what `read` raises."""
    runs = runs_of(wanted)
    ranges = [request for run in runs for request in run.requests]
    parts = _read_ahead(ranges, read) if len(ranges) > 1 else (read(*span) for span in ranges)
    for run in runs:
        num_requests = len(run.requests)
        if num_requests == 1:
            data = np.frombuffer(next(parts), dtype=np.uint8)
            tick()
        else:
            data, at = np.empty(run.end - run.begin, dtype=np.uint8), 0
            for _ in range(num_requests):
                part = np.frombuffer(next(parts), dtype=np.uint8)
                data[at : at + len(part)] = part
                at += len(part)
                tick()
        for entry in run.entries:
            yield entry, data[entry.begin - run.begin : entry.end - run.begin]


def _read_ahead(
    ranges: Sequence[tuple[int, int]], read: Callable[[int, int], bytes]
) -> Iterator[bytes]:
    """The bytes of each range, in order. At most REQUESTS_AT_A_TIME are under way or unused."""
    pool = ThreadPoolExecutor(REQUESTS_AT_A_TIME, thread_name_prefix="holdfast-restore")
    pending: deque[Future[bytes]] = deque()
    rest = iter(ranges)
    try:
        while True:
            while len(pending) < REQUESTS_AT_A_TIME and (span := next(rest, None)) is not None:
                pending.append(pool.submit(read, *span))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
