"""Reading a shard from an object store: few requests, several at a time, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from holdfast.workers.checkpoint import shard_reading
from holdfast.workers.checkpoint.layout import Box, DamagedCheckpoint, Entry, parse_header
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.shard_reading import REQUESTS_AT_A_TIME, read_entries, runs_of
from holdfast.workers.checkpoint.shard_sources import RemoteShard, UnreadableCheckpoint
from holdfast.workers.checkpoint.state import TrainingState

from .fake_ranks import staged_alone

NUM_LAYERS = 40


@dataclass
class Store:
    """A file system with one file. Counts requests, and those that run at the same time."""

    content: bytes
    requests: list[tuple[int, int]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    fails_at: int = -1
    """A request that begins at or after this byte fails; negative: none."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        with self.lock:
            self.requests.append((start, end))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            if 0 <= self.fails_at <= start:
                raise OSError("the store is away")
            return self.content[start:end]
        finally:
            with self.lock:
                self.running -= 1


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_reading, "RUN_BYTES", 1000)
    monkeypatch.setattr(shard_reading, "MAX_GAP_BYTES", 100)


def entry(begin: int, end: int) -> Entry:
    return Entry(f"model.{begin}", "U8", Box((end - begin,), (0,), (end - begin,)), begin, end)


def model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(NUM_LAYERS)])
    made.append(torch.nn.Linear(3, 2000))  # larger than a run
    return made, torch.optim.AdamW(made.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def file() -> bytes:
    made, optimizer = model(seed=1)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return staged_alone(made, optimizer)


def load(store: Store) -> tuple[bytes, int]:
    """Bytes staged after a restore from the store, and the number of ticks."""
    made, optimizer = model(seed=2)
    source, ticks = RemoteShard(store, "path", "file", len(store.content)), []
    state = TrainingState(made, optimizer, None)
    values = restore(
        state, lambda _: source, shard=0, num_shards=1, num_stored=1, step=0,
        tick=lambda: ticks.append(1),
    )  # fmt: skip
    state.import_extra(values)
    return staged_alone(made, optimizer), len(ticks)


# -- which bytes are read in one request ------------------------------------------------------
@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(0, 0)], [], id="empty"),
        pytest.param(
            [(0, 400), (400, 1000), (1000, 1004)], [(0, 1000), (1000, 1004)], id="adjacent"
        ),
        pytest.param([(500, 600), (0, 500)], [(0, 600)], id="any-order"),
        pytest.param([(0, 10), (110, 120), (221, 230)], [(0, 120), (221, 230)], id="gaps"),
        pytest.param(
            [(0, 4), (4, 2504), (2504, 2508)],
            [(0, 4), (4, 1004), (1004, 2004), (2004, 2504), (2504, 2508)],
            id="large",
        ),
    ],
)
@pytest.mark.usefixtures("small_runs")
def test_adjacent_entries_are_read_in_one_request(
    entries: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    runs = runs_of(entry(*one) for one in entries)
    assert [request for run in runs for request in run.requests] == expected


@pytest.mark.usefixtures("small_runs")
def test_every_entry_comes_once_with_its_bytes() -> None:
    content = bytes(number % 251 for number in range(9000))
    edges = [0, 1, 1, 900, 1003, 1100, 4321, 4325, 9000]
    wanted = [entry(*pair) for pair in pairwise(edges)]
    got = [
        (one, data.tobytes())
        for one, data in read_entries(reversed(wanted), lambda a, b: content[a:b], lambda: None)
    ]
    assert got == [(one, content[one.begin : one.end]) for one in wanted]


@pytest.mark.usefixtures("small_runs")
def test_requests_run_at_the_same_time_and_wait_for_what_is_used() -> None:
    """The first request ends once as many as allowed have begun, and no more do before then."""
    begun, lock, all_begun = [], threading.Lock(), threading.Event()

    def read(begin: int, end: int) -> bytes:
        with lock:
            begun.append(begin)
            if len(begun) == REQUESTS_AT_A_TIME:
                all_begun.set()
        assert all_begun.wait(60)
        return bytes(end - begin)

    wanted = [entry(1000 * number, 1000 * number + 1000) for number in range(50)]
    found: Iterator[tuple[Entry, object]] = read_entries(wanted, read, lambda: None)
    for used, _ in enumerate(found, 1):
        with lock:
            assert len(begun) <= used + REQUESTS_AT_A_TIME
    assert used == len(begun) == 50


# -- restore ----------------------------------------------------------------------------------
def test_a_restore_takes_few_requests_and_reports_progress(file: bytes) -> None:
    store = Store(file)
    restored, ticks = load(store)
    assert restored == file
    assert len(parse_header(file, "file").entries) == 8 * (NUM_LAYERS + 1)
    assert len(store.requests) == 3, "two for the header"
    assert ticks == 2


@pytest.mark.usefixtures("small_runs")
def test_a_large_shard_is_read_with_ticks_and_several_requests_at_a_time(file: bytes) -> None:
    store = Store(file)
    restored, ticks = load(store)
    assert restored == file
    assert ticks == len(store.requests) - 1, "one for each but the first 8 bytes"
    assert max(end - begin for begin, end in store.requests[2:]) <= 1000
    assert store.most_running <= REQUESTS_AT_A_TIME


@pytest.mark.usefixtures("small_runs")
@pytest.mark.parametrize("part", ["header", "data"])
def test_a_damaged_byte_is_refused(file: bytes, part: str) -> None:
    content, start = bytearray(file), parse_header(file, "file").data_start
    at = file.index(b'"lr') + 1 if part == "header" else start + 5000
    content[at] ^= 1
    with pytest.raises(DamagedCheckpoint, match="header" if part == "header" else "checksum"):
        load(Store(bytes(content)))


@pytest.mark.usefixtures("small_runs")
def test_a_short_file_and_a_store_that_goes_away_are_named(file: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match="its header expects"):
        load(Store(file[:-1]))
    store = Store(file, fails_at=parse_header(file, "file").data_start + 5000)
    with pytest.raises(UnreadableCheckpoint, match="file: cannot be read: the store is away"):
        load(store)
    assert len(store.requests) < 30, "the others are not sent"
