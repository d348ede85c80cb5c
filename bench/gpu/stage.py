"""Rates of each way that a checkpoint takes beside a bare copy, and what staging costs a step."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.staging import Memory
from holdfast.orchestrator.api.v1alpha1 import Checkpoint
from holdfast.orchestrator.core.events import StepCompleted
from holdfast.orchestrator.core.staging_interval import measured, wanted
from holdfast.orchestrator.core.state import StagingSample
from holdfast.workers.agent.storage import persist
from holdfast.workers.checkpoint.device import CudaDevice, PageLocks
from holdfast.workers.checkpoint.layout import Bytes, hash_bytes, parse_header
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.checkpoint.upload import CudaUpload, Uploader

from .kit import GB, Figures, Kit, Measurement

WIDTH = 4096
STEP_S = 0.25
"""Compute of a step, at least: on one GPU a model of 1 to 16 GB of state takes about that."""

LONGEST = 30
"""Steps between stagings of `auto` here: a longer interval costs less than what is measured."""


def measurements() -> list[Measurement]:
    return [
        Measurement("stage", "bare copies", bare, 20, 1, device_gb=4),
        *(
            Measurement(
                "stage", f"{gb} GB of state", partial(steps, gb=gb), 45 + 6 * gb, value,
                device_gb=2 * gb + 2, on_cpu=gb == 1,
            )
            for gb, value in ((4, 2), (1, 4), (16, 5))
        ),
        Measurement("stage", "bits of 1,000 steps", bits, 90, 3),
        Measurement("stage", "memory to disk", to_disk, 30, 6),
        Measurement("stage", "memory to the buddy", to_buddy, 30, 6),
    ]  # fmt: skip


class Buffers(Memory):
    """Three page-locked buffers in memory files, as the agent's."""

    _prepare: Callable[[Bytes], None] | None = None

    def prepare_with(self, prepare: Callable[[Bytes], None]) -> None:
        self._prepare = prepare

    def request_buffers(self, num_bytes: int) -> None:
        super().request_buffers(num_bytes)
        for memory in self._maps if self._prepare else ():
            self._prepare(self.view(memory))

    def put_back(self, buffer: int) -> None:
        pass

    def staged(self, buffer: int, step: int, num_bytes: int, sample: int = 0) -> None:
        self.num_bytes = num_bytes

    @staticmethod
    def view(memory: Any) -> Bytes:
        return np.frombuffer(memory, dtype=np.uint8)

    @property
    def newest(self) -> Bytes:
        return self.view(self._maps[self._next])


def bare(kit: Kit) -> Figures:
    """GB/s of single copies of one size."""
    num_bytes = kit.size(GB, 2**24)
    held = torch.ones(num_bytes, dtype=torch.uint8, device=kit.device)
    pageable = torch.zeros(num_bytes, dtype=torch.uint8)
    ways: dict[str, Callable[[], object]] = {
        "to pageable memory": lambda: pageable.copy_(held),
        "from pageable memory": lambda: held.copy_(pageable),
        "checksum": lambda: hash_bytes(pageable.numpy()),
    }
    figures: Figures = {}
    if not kit.rehearse:
        pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        mapped, device = np.zeros(num_bytes, dtype=np.uint8), CudaDevice(held.device)
        began = time.perf_counter()
        locks = PageLocks(device)
        locks(mapped)
        figures["page locks"] = num_bytes / (time.perf_counter() - began) / GB
        figures["page locks refused"] = locks.refused or "no"
        locked, other = torch.from_numpy(mapped), torch.empty_like(held)
        ways |= {
            "to pinned memory": lambda: pinned.copy_(held, non_blocking=True),
            "from pinned memory": lambda: held.copy_(pinned, non_blocking=True),
            "to memory that CudaDevice locked": lambda: locked.copy_(held, non_blocking=True),
            "on the device": lambda: other.copy_(held),
        }
    return {**{name: rate(run, num_bytes, kit) for name, run in ways.items()}, **figures}


def rate(run: Callable[[], object], num_bytes: int, kit: Kit) -> float:
    """GB/s, the median of some."""
    seconds = []
    for _ in range(6):
        _settle(kit)
        began = time.perf_counter()
        run()
        _settle(kit)
        seconds.append(time.perf_counter() - began)
    return num_bytes / median(seconds[1:]) / GB


def _settle(kit: Kit) -> None:
    if not kit.rehearse:
        torch.cuda.synchronize()


class Loop:
    """Layers with AdamW in float32, `num_bytes` of state, in steps of at least `step_s`."""

    def __init__(self, kit: Kit, num_bytes: float, step_s: float = STEP_S) -> None:
        width = kit.size(WIDTH, 256)
        layers = max(1, round(num_bytes / (12 * width**2)))
        with torch.device(kit.device):
            self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
            self._inputs = torch.randn(kit.size(2048, 8), width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._kit, self._passes = kit, 1
        for _ in range(2):
            self.step()
        _settle(kit)
        began = time.perf_counter()
        self.step()
        _settle(kit)
        took_s = time.perf_counter() - began
        self._passes = max(1, math.ceil(kit.size(step_s, 0.01) / took_s))

    def step(self) -> None:
        for _ in range(self._passes):
            self.model(self._inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stager(self, buffers: Buffers) -> Stager:
        state = TrainingState(self.model, self.optimizer, None)
        device = torch.device(self._kit.device, *([] if self._kit.rehearse else [0]))
        return Stager(state, buffers, generation=1, shard=0, num_shards=1, device=device)


def steps(kit: Kit, gb: int) -> Figures:
    loop, buffers = Loop(kit, kit.size(gb * GB, 2**24)), Buffers()
    stager, number = loop.stager(buffers), iter(range(10**6))
    figures: Figures = {}
    alone = _seconds(kit, loop, stager, 0, number)
    before = 0 if kit.rehearse else torch.cuda.max_memory_allocated()
    began = time.perf_counter()
    stager.stage(next(number))
    stager.finish()
    figures |= {"step_s": mean(alone), "first staging_s": time.perf_counter() - began}
    every = 1
    for name in ("every 1", "every 5", "auto"):
        stalls: list[float] = []
        every = 5 if name == "every 5" else every
        with_it = _seconds(kit, loop, stager, every, number, stalls)
        figures[name] = {
            "slowdown": mean(with_it) / mean(alone) - 1, "stall_s": median(stalls),
            "copy_s": stager.copy_s, "staging_s": stager.staging_s, "interval": every,
        }  # fmt: skip
        sample = StagingSample(0, median(stalls), stager.copy_s, stager.staging_s)
        costs = measured(StepCompleted(generation=1, step=0, step_s=median(alone)), [sample], every)
        every = wanted(costs, Checkpoint().memory.budget_percent, LONGEST)
    num_bytes = buffers.num_bytes
    figures["GB"] = num_bytes / GB
    if stager.copy_s:
        figures["copy GB/s"] = num_bytes / stager.copy_s / GB
    if not kit.rehearse:
        figures["device bytes added"] = torch.cuda.max_memory_allocated() - before
        target = torch.empty(min(num_bytes, GB), dtype=torch.uint8, device="cuda")
        upload, source = Uploader(CudaUpload()), buffers.newest[: target.numel()]

        def restore() -> None:
            upload.copy_and_hash(target, source)
            upload.finish()

        figures["restore GB/s"] = rate(restore, target.numel(), kit)
    return figures


def _seconds(
    kit: Kit, loop: Loop, stager: Stager, every: int, number: Any, stalls: list[float] | None = None
) -> list[float]:
    """Seconds of each step, with a staging after every k-th; 0: without."""
    seconds = []
    for count in range(max(kit.size(20, 6), 3 + every)):
        began = time.perf_counter()
        loop.step()
        if every and (count - 3) % every == 0:
            delay_s = stager.stage(next(number))
            if stalls is not None:
                stalls.append(delay_s)
        if not kit.rehearse:  # not the device: the copy goes on beside the next step
            torch.cuda.current_stream().synchronize()
        seconds.append(time.perf_counter() - began)
    stager.finish()
    return seconds[3:]


def bits(kit: Kit) -> Figures:
    """Stagings whose bits differ from the parameters after their step, while the optimizer goes
    on."""
    loop, buffers = Loop(kit, kit.size(200e6, 1e6), step_s=0), Buffers()
    stager, wrong = loop.stager(buffers), 0
    count = kit.size(1000, 20)
    for step in range(count):
        loop.step()
        wanted = {f"model.{n}": p.detach().clone() for n, p in loop.model.named_parameters()}
        stager.stage(step)
        loop.step()
        kept = stager.finish()
        view = buffers.newest
        header = parse_header(view[: 2**20].tobytes(), "file")
        for name, value in wanted.items():
            entry = header.entries[name]
            data = view[header.data_start + entry.begin : header.data_start + entry.end]
            copied = torch.from_numpy(data.copy()).to(value.device)
            wrong += not (kept and torch.equal(copied, value.reshape(-1).view(torch.uint8)))
    figures: Figures = {"stagings": count, "tensors that differ": wrong}
    return {**figures, "thrown away": stager.num_thrown_away}


def to_disk(kit: Kit) -> Figures:
    """An agent's write of a staged shard, with its checksum and its fsync, beside a plain one; and
    the way back, which ends in memory: from there to the device it is "restore GB/s"."""
    num_bytes = kit.size(4 * GB, 2**24)
    with tempfile.TemporaryDirectory() as place:
        data = np.ones(num_bytes, dtype=np.uint8)

        def plain() -> None:
            with open(f"{place}/plain", "wb") as file:  # noqa: PTH123
                file.write(data)
                os.fsync(file.fileno())

        buffers = Buffers()
        stager = Loop(kit, num_bytes).stager(buffers)
        stager.stage(0)
        stager.finish()
        fd = os.memfd_create("shard")
        with open(fd, "wb", closefd=False) as file:
            file.write(buffers.newest[: buffers.num_bytes])
        figures: Figures = {"plain GB/s": rate(plain, num_bytes, kit)}
        num_bytes = os.fstat(fd).st_size
        began = time.perf_counter()
        persist.write_shard(fd, num_bytes, place, "step-0", "shard")
        figures["write_shard GB/s"] = num_bytes / (time.perf_counter() - began) / GB
        with open(f"{place}/step-0/shard", "rb") as file:  # noqa: PTH123
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            np.fromfile(file, dtype=np.uint8)
        return figures | {"to memory GB/s": num_bytes / (time.perf_counter() - began) / GB}


def to_buddy(kit: Kit) -> Figures:
    """A fetch from another agent's memory into one's own over loopback: it is the way back too."""
    from bench import data_port
    from holdfast.workers.agent.storage import peer_transfer

    num_bytes = kit.size(GB, 2**24)
    clear = peer_transfer.credentials("token", None, "")
    seconds, cpu_s = data_port.measure(num_bytes, clear, 3)
    return {"GB/s": num_bytes / seconds / GB, "CPU seconds per GB": cpu_s / num_bytes * GB}
