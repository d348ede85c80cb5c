"""Faults that a training script causes itself, on request: a file names the fault and the rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from bench import timeline
from bench.contestants.base import Contestant

BOUND_S = 30.0


def order(kind: str) -> Callable[[Contestant, timeline.Incarnation], float]:
    """Function that provokes a fault of this kind in the last rank, and returns its time."""

    def provoke(contestant: Contestant, job: timeline.Incarnation) -> float:
        directory = contestant.workload.directory
        part = directory / "fault.part"
        part.write_text(f"{kind} {max(job.pids)}")
        part.rename(directory / "fault")
        deadline = time.monotonic() + BOUND_S
        while not (at := directory / "fault.at").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{kind} did not happen")
            time.sleep(0.01)
        return float(at.read_text())

    return provoke


def happen(directory: Path, rank: int, device: torch.device) -> None:
    """Cause the fault that is requested of this rank, once."""
    file = directory / "fault"
    if not file.exists():
        return
    kind, _, chosen = file.read_text().partition(" ")
    if int(chosen) != rank:
        return
    file.unlink()
    part = directory / "fault.writing"
    part.write_text(str(time.time()))
    part.rename(directory / "fault.at")
    FAULTS[kind](device)


def _exception(device: torch.device) -> None:
    raise ValueError("requested by the bench")


def _absent(device: torch.device) -> None:
    """The rank never enters the next collective; its peers wait on the device."""
    while True:
        time.sleep(1)


def _out_of_memory(device: torch.device) -> None:
    hoard = []
    while device.type == "cuda":
        hoard.append(torch.empty(2**30, dtype=torch.uint8, device=device))
    raise MemoryError(f"requested by the bench, with {len(hoard)} GiB")


def _illegal_access(device: torch.device) -> None:
    """A sticky error: no further call to CUDA works in this process."""
    if device.type != "cuda":
        os.abort()
    memory = torch.empty(2**30, dtype=torch.uint8, device=device)
    place = {"data": (memory.data_ptr(), False), "shape": (2**30,), "typestr": "|u1", "version": 3}
    freed = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=device)
    del memory
    torch.cuda.empty_cache()
    freed.fill_(1)
    torch.cuda.synchronize()
    raise AssertionError("memory that was given back could be written")


FAULTS = {
    "exception": _exception,
    "absent": _absent,
    "memory": _out_of_memory,
    "access": _illegal_access,
}
