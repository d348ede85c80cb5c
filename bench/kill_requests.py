"""A writer of checkpoints on S3 is stopped at each of its requests, then as in `bench.kill_points`.

The store is a real S3 server in a process of its own. A stopped writer sends no more requests: with
`ANSWERED` after the server has carried out the n-th, else before it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec.config
import s3fs
from fsspec.asyn import sync_wrapper

from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from tests.e2e.storage.server import BUCKET, S3

from .kill_points import (
    GENERATION,
    JOB,
    Case,
    Layout,
    Outcome,
    cases_of,
    check,
    main,
    show_progress,
    write_shards,
)  # fmt: skip

PART_BYTES = 5 * 2**20
"""The least that S3 takes as a part of an upload; a shard of more has several."""
_names = itertools.count()


class Moment(enum.Enum):
    SENT = "the writer is stopped before it sends the request"
    ANSWERED = "the writer is stopped after the server has carried out the request"


class Stopped(Exception):
    """End of the requests."""


class Requests:
    """Requests of all S3 file systems of this process while `watched`."""

    def __init__(self, stop_at: int = 0, moment: Moment = Moment.SENT) -> None:
        self.count, self.stopped = 0, False
        self._stop_at, self._moment = stop_at, moment

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        requests, system = self, s3fs.S3FileSystem
        originals = system._call_s3, system.call_s3
        original = system._call_s3

        async def call(self: Any, *args: Any, **more: Any) -> Any:
            number = requests.sent()
            try:
                return await original(self, *args, **more)
            finally:
                requests.point(number, Moment.ANSWERED)

        system._call_s3, system.call_s3 = call, sync_wrapper(call)
        try:
            yield
        finally:
            system._call_s3, system.call_s3 = originals

    def sent(self) -> int:
        self.count += 1
        self.point(self.count, Moment.SENT)
        return self.count

    def point(self, number: int, moment: Moment) -> None:
        """Some requests are sent together."""
        self.stopped |= (number, moment) == (self._stop_at, self._moment)
        if self.stopped:
            raise Stopped(f"request {number}")


@contextlib.contextmanager
def server() -> Iterator[S3]:
    """A server with the environment that this process needs to reach it."""
    s3 = S3()
    os.environ.update(s3.environment)
    fsspec.config.conf["s3"] = {"default_block_size": PART_BYTES}
    try:
        yield s3
    finally:
        del fsspec.config.conf["s3"]
        for name in s3.environment:
            del os.environ[name]
        s3.kill()


def stop_at_requests(
    case: Case, layout: Layout, moments: Sequence[Moment], outcome: Outcome
) -> None:
    """The writer of a case is stopped at each of its requests."""
    counting = Requests()
    run(case, layout, counting)
    for moment in moments:
        for stop_at in range(1, counting.count + 1):
            requests = Requests(stop_at, moment)
            path, done = run(case, layout, requests)
            outcome.points[f"S3: {case.name}"] += 1
            outcome.losses[moment.value] += 1
            try:
                assert requests.stopped, f"request {stop_at} was not sent again"
                check(path, case, layout, done)
            except Exception as error:
                what = f"{case.name}, {layout}: stopped at request {stop_at} of {counting.count}"
                outcome.problems.append(f"S3: {what}, {moment.value}: {error!r} ({path})")


def run(case: Case, layout: Layout, requests: Requests) -> tuple[str, int]:
    """(path, newest step whose commit had returned)."""
    path = f"s3://{BUCKET}/{next(_names)}"
    for step in range(layout.before):
        files = write_shards(path, layout, step, GENERATION - 1)
        CheckpointStore(path, JOB).commit(step, layout.mesh, files)
    case.prepare(path, layout)
    done = [-1]
    _forget()
    with requests.watched():
        try:
            case.write(path, layout, done.append)
        except Exception:
            if not requests.stopped:
                raise
    _forget()
    return path, done[-1]


def _forget() -> None:
    """Writer and reader are other processes: each has nothing of the other's."""
    for system in s3fs.S3FileSystem._cache.values():
        system.invalidate_cache()


def stop_all(outcome: Outcome) -> None:
    with server():
        # The last one's shard is uploaded in several parts.
        for layout in (Layout(2, 7, 2, 1), Layout(3, 31, 3, 2), Layout(1, 60_000, 1, 1)):
            for case in cases_of(layout):
                stop_at_requests(case, layout, list(Moment), outcome)
                show_progress(outcome, f"S3, {layout}")


if __name__ == "__main__":
    main(stop_all)
