"""A fake agent for tests with real worker processes and process groups.

It serves buffers and shards, and keeps the two newest staged steps like the real agent. A test
chooses what each generation restores from.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.protocol.facts import Membership, Restore, ShardFile, WorkerSeat
from holdfast.orchestrator.protocol.manifest import Manifest, encode_manifest, shard_file_name
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool import preload, warmup
from tests.e2e.ports import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*preload.MODULES, *preload.OURS])


def make_job(steps: int = 6, **changes: Any) -> TrainingJob:
    """A small pre-training job; `config` changes the recipe, other `changes` the spec."""
    model = {"dim": 32, "numLayers": 2, "numHeads": 2}
    config = {
        "steps": steps, "globalBatch": 4, "model": model, "data": {"sequenceLength": 16},
    } | changes.pop("config", {})  # fmt: skip
    spec = {
        "entrypoint": {"recipe": {"name": "pretrain", "config": config}},
        "nodes": {"max": 4},
    } | changes
    document = {
        "apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": "tiny"}, "spec": spec,
    }  # fmt: skip
    return job_from_mapping(document)


def run_recipe(job: TrainingJob) -> None:
    from holdfast.workers.training.recipes import pretrain

    pretrain.main(job)


def run_session_loop(job: TrainingJob) -> None:
    """The example of a training loop, with more steps than a test takes."""
    script = Path(__file__).parents[3] / "examples" / "session_loop.py"
    sys.argv = [str(script), "100000"]
    runpy.run_path(str(script), run_name="__main__")


def _worker(
    link: socket.socket,
    assign: worker_protocol.Assign,
    job: TrainingJob,
    entry: Callable[..., None],
    warmed: bool,
) -> None:
    """A short form of worker_main."""
    import torch

    torch.set_num_threads(1)
    if warmed:
        warmup.warm(job)
    os.environ.update(assign.environment)
    worker_transport.attached = worker_transport.Attached(link, assign, job)
    try:
        entry(job)
    except BaseException as error:
        failed = worker_protocol.Failed(
            error_type=type(error).__name__, message=str(error), traceback=""
        )
        worker_transport.send(link, failed)
        raise


@dataclass
class _Seat:
    rank: int
    shard: int
    link: socket.socket
    process: Any
    buffers: dict[int, int] = field(default_factory=dict)
    """Number -> memfd."""
    held: dict[int, int] = field(default_factory=dict)
    """Step -> buffer."""


class Generation:
    """One launched membership on one fake node."""

    def __init__(
        self,
        job: TrainingJob,
        mesh: Mesh,
        *,
        number: int = 1,
        restore: Restore | None = None,
        memory: dict[int, bytes] | None = None,
        checkpoint_path: str = "",
        entry: Callable[..., None] = run_recipe,
        warm_ranks: tuple[int, ...] = (),
    ) -> None:
        """`memory` is what FetchShard is served from, by shard index."""
        self.mesh, self.number = mesh, number
        self.memory = memory or {}
        self._warm_ranks = warm_ranks
        self.messages: list[tuple[int, Any]] = []
        self.staged: dict[int, dict[int, bytes]] = {}
        """Step -> rank -> the staged file."""
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        port = free_port()
        membership = Membership(
            generation=number, mesh=mesh, num_nodes=1, workers_per_node=mesh.world_size,
            master_address="127.0.0.1", master_port=port, restart_count=number - 1,
            restore=restore,
        )  # fmt: skip
        self.seats = [
            self._launch(rank, membership, job, checkpoint_path, entry)
            for rank in range(mesh.world_size)
        ]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _launch(
        self,
        rank: int,
        membership: Membership,
        job: TrainingJob,
        checkpoint_path: str,
        entry: Callable[..., None],
    ) -> _Seat:
        ours, theirs = worker_transport.pair()
        shard = self.mesh.shard_index(rank)
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.mesh.world_size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(membership.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(membership.restart_count),
        }  # fmt: skip
        assign = worker_protocol.Assign(
            membership=membership,
            seat=WorkerSeat(rank=rank, local_rank=rank, shard=shard, persists=True),
            node_rank=0, environment=environment, checkpoint_path=checkpoint_path,
        )  # fmt: skip
        arguments = (theirs, assign, job, entry, rank in self._warm_ranks)
        process = CONTEXT.Process(target=_worker, args=arguments)
        process.start()
        theirs.close()
        seat = _Seat(rank, shard, ours, process)
        self._selector.register(ours, selectors.EVENT_READ, seat)
        return seat

    # -- for tests ----------------------------------------------------------------------------
    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        with self._changed:
            done = self._changed.wait_for(condition, timeout_s)
        assert done, f"not seen within {timeout_s} s; last messages: {self.messages[-8:]}"

    def progress(self, rank: int) -> list[worker_protocol.Progress]:
        return [
            m for r, m in self.messages if r == rank and isinstance(m, worker_protocol.Progress)
        ]

    def losses(self) -> dict[int, float]:
        return {m.step: m.loss or 0.0 for m in self.progress(0)}

    def failures(self) -> list[worker_protocol.Failed]:
        return [m for _, m in self.messages if isinstance(m, worker_protocol.Failed)]

    def shards(self, step: int) -> dict[int, bytes]:
        """The state after a step by shard index, from the first replica."""
        by_rank = self.staged[step]
        return {
            self.mesh.shard_index(rank): by_rank[rank] for rank in sorted(by_rank, reverse=True)
        }

    def join(self, timeout_s: float = 60) -> list[int]:
        """Waits for all workers to end; their exit codes."""
        for seat in self.seats:
            seat.process.join(timeout_s)
        self._thread.join(timeout_s)
        return [seat.process.exitcode for seat in self.seats]

    def kill(self) -> None:
        for seat in self.seats:
            seat.process.kill()
        self.join()

    # -- messages -----------------------------------------------------------------------------
    def _serve(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                seat: _Seat = key.data
                try:
                    message, _fd = worker_transport.receive(seat.link)
                    if message is not None:
                        self._take(seat, message)
                except OSError:  # the worker ended with unread messages
                    message = None
                if message is None:
                    self._selector.unregister(seat.link)
                    self._close(seat)
                with self._changed:
                    self._changed.notify_all()

    def _close(self, seat: _Seat) -> None:
        seat.link.close()
        for fd in seat.buffers.values():
            os.close(fd)

    def _take(self, seat: _Seat, message: Any) -> None:
        with self._changed:
            self.messages.append((seat.rank, message))
        match message:
            case worker_protocol.BufferRequest():
                if len(seat.buffers) < limits.STAGING_BUFFERS:
                    number = len(seat.buffers)
                    fd = os.memfd_create(f"buffer-{number}")
                    os.ftruncate(fd, message.num_bytes)
                    seat.buffers[number] = fd
                    reply = worker_protocol.Buffer(buffer=number, num_bytes=message.num_bytes)
                    worker_transport.send(seat.link, reply, fd)
            case worker_protocol.Staged():
                content = os.pread(seat.buffers[message.buffer], message.num_bytes, 0)
                with self._changed:
                    self.staged.setdefault(message.step, {})[seat.rank] = content
                seat.held[message.step] = message.buffer
                for step in sorted(seat.held)[:-2]:
                    worker_transport.send(
                        seat.link, worker_protocol.BufferFree(buffer=seat.held.pop(step))
                    )
            case worker_protocol.FetchShard():
                content = self.memory.get(message.shard)
                if content is None:
                    detail = "no node has it"
                    worker_transport.send(
                        seat.link, worker_protocol.NoShard(shard=message.shard, detail=detail)
                    )
                    return
                fd = os.memfd_create("shard")
                os.write(fd, content)
                reply = worker_protocol.Shard(shard=message.shard, num_bytes=len(content))
                worker_transport.send(seat.link, reply, fd)
                os.close(fd)
            case _:
                pass


def persist(
    path: Path, generation: Generation, step: int, job: str = "tiny", commit: bool = True
) -> Manifest:
    """Write a staged step to a storage tier like agents and controller."""
    shards = generation.shards(step)
    files = []
    directory = ""
    for shard, content in sorted(shards.items()):
        name = shard_file_name(shard, len(shards))
        files.append(
            ShardFile(
                step=step, generation=generation.number, shard=shard, num_shards=len(shards),
                file=name, num_bytes=len(content), checksum=xxhash.xxh3_128_hexdigest(content),
            )
        )  # fmt: skip
    manifest = Manifest(
        job=job, step=step, generation=generation.number, mesh=generation.mesh,
        files=tuple(files), committed_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    directory = manifest.directory
    (path / directory).mkdir(parents=True)
    for file in files:
        (path / directory / file.file).write_bytes(shards[file.shard])
    if commit:
        (path / directory / "manifest.json").write_bytes(encode_manifest(manifest))
    return manifest
