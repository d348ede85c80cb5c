"""CUDA branches of workers/ on a real device. The tests skip without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from bench.contestants.base import ROOT
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.workers.checkpoint.device import CudaDevice, PageLocks
from holdfast.workers.checkpoint.layout import parse_header
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from tests.unit.workers.checkpoint.fake_ranks import Memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20


def in_a_process(program: str, **environment: str) -> Any:
    """The last line that a new Python prints, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def job(**spec: Any) -> dict[str, Any]:
    config = {"steps": 3, "model": {"dim": 64, "numLayers": 2, "numHeads": 2}}
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "j"},
        "spec": {
            "entrypoint": {"recipe": {"name": "pretrain", "config": config}},
            "resources": {"gpu": 1},
            **spec,
        },
    }


def staged(memory: Memory, name: str, dtype: torch.dtype) -> torch.Tensor:
    header = parse_header(memory.file, "file")
    entry = header.entries[name]
    data = memory.file[header.data_start + entry.begin : header.data_start + entry.end]
    return torch.frombuffer(bytearray(data), dtype=dtype)


def stager_for(model: nn.Module, optimizer: Any, memory: Memory) -> Stager:
    state = TrainingState(model, optimizer, None)
    device = torch.device("cuda", 0)
    return Stager(state, memory, generation=1, shard=0, num_shards=1, device=device)


def test_a_forward_on_a_gpu_does_not_overwrite_tensors_that_are_being_staged() -> None:
    model, memory = nn.Linear(8192, 8192, device="cuda"), Memory()
    seen = torch.zeros(4096, device="cuda")
    model.register_buffer("seen", seen)
    stager = stager_for(model, torch.optim.AdamW(model.parameters(), fused=True), memory)
    for step in range(3):
        seen.fill_(step)
        stager.stage(step)
        seen.fill_(1000 + step)  # as the next forward
        stager.finish()
        wanted = torch.full((4096,), float(step))
        assert torch.equal(staged(memory, "model.seen", torch.float32), wanted)


def test_staging_on_a_gpu_overlaps_and_delays_the_next_optimizer_step() -> None:
    model, memory = nn.Linear(4096, 4096, device="cuda"), Memory()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stager = stager_for(model, optimizer, memory)
    for step in range(3):
        model(torch.ones(8, 4096, device="cuda")).sum().backward()
        optimizer.step()
        wanted = model.weight.detach().cpu()
        stager.stage(step)
        optimizer.step()  # overwrites what is being copied, unless it waits
        stager.finish()
        assert parse_header(memory.file, "file").step == step
        assert torch.equal(staged(memory, "model.weight", torch.float32), wanted.view(-1))


def test_a_write_through_data_on_a_gpu_throws_the_copy_away() -> None:
    model = nn.Linear(8192, 8192, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stager = stager_for(model, optimizer, Memory())
    stager.stage(0)
    assert stager.finish()
    model.weight.data.mul_(1.0)  # loads the kernel, which may wait for the device
    stager.stage(1)
    model.weight.data.mul_(0.5)
    assert not stager.finish()


def test_every_kind_of_tensor_is_staged_with_its_bits() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.randn(31, 17, device="cuda")
            self.turned = nn.Parameter(values.t())  # not contiguous
            self.narrow = nn.Parameter(torch.randn(7, device="cuda", dtype=torch.bfloat16))
            self.frozen = nn.Parameter(torch.randn(64, 3, device="cuda"), requires_grad=False)
            self.register_buffer("on_host", torch.arange(5.0))

    model, memory = Odd(), Memory()
    trained = [model.turned, model.narrow]
    stager = stager_for(model, torch.optim.AdamW(trained), memory)
    for step in range(3):
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        stager.stage(step)
        assert stager.finish()
        for name, value in model.state_dict().items():
            wanted = value.detach().cpu().contiguous().reshape(-1)
            assert torch.equal(staged(memory, f"model.{name}", value.dtype), wanted), name


def test_staging_adds_no_device_memory() -> None:
    model = nn.Linear(8192, 8192, device="cuda", dtype=torch.bfloat16)
    memory = Memory()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 8192, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    stager = stager_for(model, optimizer, memory)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stager.stage(0)
    assert stager.finish()
    assert torch.cuda.max_memory_allocated() - before < MIB


def test_copies_into_locked_pages_do_not_make_the_host_wait() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    memory = np.zeros(512 * MIB, dtype=np.uint8)
    locks = PageLocks(device)
    locks(memory)
    assert locks.refused == ""
    source = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    device.follow_training()
    began = time.perf_counter()
    device.copy([torch.from_numpy(memory)], [source])
    event = device.record()
    queued_s = time.perf_counter() - began
    device.wait(event)
    assert queued_s < (time.perf_counter() - began) / 3
    assert memory.min() == 1


def test_a_captured_step_is_copied_whole() -> None:
    model, memory = nn.Linear(2048, 2048, device="cuda"), Memory()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    inputs = torch.ones(8, 2048, device="cuda")

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    stager = stager_for(model, optimizer, memory)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(5):
        graph.replay()
        wanted = model.weight.detach().clone()
        stager.stage(number)
        graph.replay()  # writes the parameters without a hook
        assert stager.finish()
        assert torch.equal(staged(memory, "model.weight", torch.float32), wanted.cpu().view(-1))


def test_a_standby_opens_a_context() -> None:
    document = job(recovery={"gpuStandbys": True})
    program = f"""
import json, torch
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.workers.agent.pool.gpu_context import open_context
print(json.dumps([open_context(job_from_mapping({document!r}), 0), torch.cuda.is_initialized()]))
"""
    assert in_a_process(program) == [True, True]


@pytest.mark.parametrize("call", ["torch.zeros(1, device='cuda')", "torch.cuda.is_available()"])
def test_an_opened_device_is_seen_before_a_fork(call: str) -> None:
    program = f"""
import json, torch
from holdfast.workers.agent.pool.user_modules import cannot_fork
before = cannot_fork()
{call}
print(json.dumps([before, cannot_fork()]))
"""
    before, after = in_a_process(program)
    assert before == "" and after  # the driver may have started threads as well


def test_a_module_that_asks_for_gpus_leaves_the_template_able_to_fork() -> None:
    program = """
import json, os, torch
from holdfast.workers.agent.pool import import_template, user_modules
os.environ.update(import_template.SETTINGS)
asked = torch.cuda.is_available()
reads, writes = os.pipe()
if os.fork() == 0:
    os.write(writes, str(torch.ones(1, device="cuda").item()).encode())
    os._exit(0)
os.close(writes)
print(json.dumps([asked, user_modules.cannot_fork(), os.read(reads, 10).decode()]))
"""
    assert in_a_process(program) == [True, "", "1.0"]


def test_a_group_of_one_rank_uses_nccl_and_its_flight_recorder() -> None:
    program = """
import json, time, torch, torch.distributed as dist
from holdfast import session
from holdfast.workers.session import inspection
s = session.init()
for _ in range(3):
    dist.all_reduce(torch.ones(4, device=s.device))
torch.cuda.synchronize()
print(json.dumps([dist.get_backend(), inspection.num_collectives(),
                  [one.sequence for one in inspection.collectives()]]))
session.leave()
"""
    backend, number, sequences = in_a_process(program, TORCH_FR_BUFFER_SIZE="200")
    assert backend == "nccl" and number >= 3
    assert max(sequences) >= 3


def test_a_worker_is_bound_to_cpus_of_its_gpu() -> None:
    program = """
import json, os, torch
from holdfast.workers.session import numa
before = os.sched_getaffinity(0)
numa.bind_to(torch.device("cuda", 0))
place = numa.pci_place(torch.cuda.get_device_properties(0))
print(json.dumps([os.sched_getaffinity(0) <= before, place]))
"""
    kept, place = in_a_process(program)
    assert kept and place


def test_a_calibration_times_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job()))
    job_from_mapping(job())
    words = ["-m", "holdfast.workers.training.calibrate", str(file), "--steps", "5"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    times = json.loads(done.stdout)
    assert min(times["block_s"], times["head_s"], times["optimizer_s"]) > 0
