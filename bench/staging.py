"""Delay of a memory-tier checkpoint, beside one memory copy of the same bytes and beside DCP.

One process: state of the given size, FSDP2 on one rank, with AdamW moments. The lower bound is a
copy of all tensors into warm memory. Prints a table; `--out` also writes it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from bench import conditions
from holdfast import session
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.checkpoint.twin_parts import WritableBuffer


class Memory:
    """The agent's part, in small: three memfds, the oldest one is always free."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._next = 0

    def request_buffers(self, num_bytes: int) -> None:
        for number in range(3):
            fd = os.memfd_create(f"bench-{number}")
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
            np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
            self._maps.append(memory)

    def take_buffer(self, step: int, num_bytes: int, layout: int) -> WritableBuffer:
        self._next = (self._next + 1) % len(self._maps)
        return WritableBuffer(self._next, self._maps[self._next])

    def staged(self, buffer: int, step: int, num_bytes: int, sample: int = 0) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[12, 24, 40, 200, 1000])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/staging.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    session.init()
    lines = ["# Stall of a memory-tier checkpoint", ""]
    lines += [f"{name}: {value}. " for name, value in conditions.describe().items()]
    lines += ["One rank, one thread, medians. `x`: times the memory copy.", ""]
    lines += [
        "| state | memory copy | Holdfast stage | DCP async, as it ships | DCP, kept stager |"
    ]
    lines += ["|---|---|---|---|---|"]
    for megabytes in options.megabytes:
        lines.append(measure(megabytes, options.repetitions))
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n")
    session.leave()


def measure(megabytes: int, repetitions: int) -> str:
    """One row. All methods take turns within each repetition."""
    model, optimizer = build(megabytes)
    state = TrainingState(model, optimizer, None)
    sources = [held.local for held in state.tensors()]
    targets = [torch.empty_like(source).copy_(source) for source in sources]
    stager = Stager(
        state, Memory(), generation=1, shard=0, num_shards=1, device=torch.device("cpu")
    )
    directory = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    kept = DefaultStager(StagingOptions(False, False, False, False))
    step = iter(range(10_000))

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def save(own: DefaultStager | None) -> Callable[[], None]:
        def run() -> None:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            begin = time.perf_counter()
            response = dcp.async_save(
                {"model": model_state, "optim": optimizer_state},
                checkpoint_id=str(directory / str(next(step))),
                **({"async_stager": own} if own else {}),
            )
            stall.append(time.perf_counter() - begin)
            getattr(response, "upload_completion", response).result()

        stall: list[float] = []
        run.stall = stall  # type: ignore[attr-defined]
        return run

    methods: list[Callable[[], object]] = [
        copy, lambda: stager.stage(next(step)), save(None), save(kept),
    ]  # fmt: skip
    times: list[list[float]] = [[] for _ in methods]
    for repetition in range(repetitions + 2):
        for method, found in zip(methods, times, strict=True):
            begin = time.perf_counter()
            method()
            seconds = time.perf_counter() - begin
            # DCP writes behind the loop's back; what counts is how long the call blocks.
            seconds = getattr(method, "stall", [seconds])[-1]
            if repetition >= 2:  # warm buffers, as in a long run
                found.append(seconds)
    kept.close()
    shutil.rmtree(directory, ignore_errors=True)
    size = sum(source.nbytes for source in sources) / 1e6
    floor = median(times[0])
    cells = [f"{median(t) * 1e3:.1f} ms ({median(t) / floor:.2f}x)" for t in times[1:]]
    return f"| {size:.0f} MB | {floor * 1e3:.1f} ms | " + " | ".join(cells) + " |"


def build(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers of 1 M parameters until parameters and two moments fill `megabytes`."""
    layers = max(1, round(megabytes / 12))
    model = nn.Sequential(*[nn.Linear(1024, 976) if i % 2 == 0 else nn.Linear(976, 1024)
                            for i in range(layers)])  # fmt: skip
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


if __name__ == "__main__":
    main()
