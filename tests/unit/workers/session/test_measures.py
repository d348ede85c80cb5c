"""Measurements of a worker: the peak of its memory, and the bytes that it sends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holdfast.workers.session.measures import PeakMemory, SentBytes, sent_since

CPU = torch.device("cpu")
KIB = 1024


def status(path: Path, **kib: int) -> Path:
    path.write_text("Name:\tpython\n" + "".join(f"{k}:\t{v} kB\n" for k, v in kib.items()))
    return path


def test_the_peak_is_what_the_process_grew_by_without_files_and_shared_memory(
    tmp_path: Path,
) -> None:
    file = status(tmp_path / "status", VmHWM=500, RssAnon=300, RssFile=100, RssShmem=0)
    memory = PeakMemory(CPU, file)
    status(file, VmHWM=1500, RssAnon=700, RssFile=120, RssShmem=80)
    assert memory.read() == (1500 - 200 - 300) * KIB


def test_staged_checkpoints_in_shared_memory_are_no_peak_of_tensors(tmp_path: Path) -> None:
    file = status(tmp_path / "status", VmHWM=500, RssAnon=300, RssFile=100, RssShmem=0)
    memory = PeakMemory(CPU, file)
    status(file, VmHWM=1400, RssAnon=700, RssFile=100, RssShmem=0)
    first = memory.read()
    status(file, VmHWM=2400, RssAnon=700, RssFile=100, RssShmem=1000)
    assert memory.read() == first == 1000 * KIB


def test_a_kernel_that_does_not_show_the_peak_has_none(tmp_path: Path) -> None:
    assert PeakMemory(CPU, status(tmp_path / "status", VmRSS=5)).read() == 0
    assert PeakMemory(CPU, tmp_path / "missing").read() == 0


def test_a_tensor_of_this_process_is_in_its_peak() -> None:
    # The kernel's peak begins here, not with the tests before.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    memory = PeakMemory(CPU)
    size = 64 * 2**20
    tensor = torch.ones(size // 4)
    assert size * 0.9 < memory.read() < size * 2
    del tensor


def entry(name: str, at: int, given: list[int], made: list[int], **more: Any) -> dict[str, Any]:
    return {
        "profiling_name": name, "time_created_ns": at, "record_id": at, "process_group": ["1", ""],
        "input_sizes": [given], "input_dtypes": ["Float"],
        "output_sizes": [made], "output_dtypes": ["BFloat16"],
    } | more  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [("nccl:_all_gather_base", 100 * 4 * 3), ("gloo:all_gather", 100 * 4 * 3),
     ("nccl:all_gather_into_tensor_coalesced", 100 * 4 * 3),
     ("nccl:_reduce_scatter_base", 100 * 4 * 3 / 4),
     ("nccl:reduce_scatter_tensor_coalesced", 100 * 4 * 3 / 4),
     ("nccl:all_reduce", 2 * 100 * 4 * 3 / 4), ("nccl:all_to_all", 100 * 4 * 3 / 4),
     ("nccl:send 0->1", 100 * 4), ("nccl:recv 0<-1", 0), ("nccl:broadcast", 100 * 4),
     ("nccl:something_new", None)],
)  # fmt: skip
def test_a_collective_sends_what_a_ring_sends(name: str, expected: float | None) -> None:
    assert sent_since(5, [entry(name, 7, [100], [400], record_id=0)], {"1": 4}) == expected


def test_what_was_begun_before_the_step_is_not_counted() -> None:
    every = [entry("nccl:all_reduce", at, [100], [100]) for at in (3, 4, 6)]
    assert sent_since(5, every, {"1": 2}) == 400


def test_a_step_with_more_collectives_than_the_recorder_keeps_is_not_known() -> None:
    every = [entry("nccl:all_reduce", at, [100], [100]) for at in (6, 7)]
    assert sent_since(5, every, {"1": 2}) is None
    complete = [one | {"record_id": number} for number, one in enumerate(every)]
    assert sent_since(5, complete, {"1": 2}) == 800


def _rank(rank: int, file: str, found: Any) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    sent = SentBytes(complete=True)
    for step in range(4):
        sent.begin()
        if step < 3:  # the fourth step is not looked at: the second was
            gathered, scattered = torch.empty(2048), torch.empty(512)
            dist.all_gather_into_tensor(gathered, torch.ones(1024))
            dist.reduce_scatter_tensor(scattered, torch.ones(1024))
        sent.end()
        if rank == 0:
            found.append(sent.num_bytes)
    dist.destroy_process_group()


def test_the_second_step_of_a_real_group_is_measured(tmp_path: Path) -> None:
    with mp.Manager() as manager:
        found = manager.list()
        mp.spawn(_rank, (str(tmp_path / "store"), found), nprocs=2)
        # gloo reduces all 1024 numbers on both ranks.
        assert list(found) == [0, *[2048 * 4 / 2 + 2 * 1024 * 4 / 2] * 3]
