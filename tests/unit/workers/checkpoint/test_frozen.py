"""Parameters that are not trained, as the base of a LoRA: copied once per buffer, in every file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.orchestrator.errors import UserError
from holdfast.workers.checkpoint import stage
from holdfast.workers.checkpoint.device import CudaDevice, bit_sum
from holdfast.workers.checkpoint.layout import Bytes, copy_and_hash, hash_bytes, parse_header
from holdfast.workers.checkpoint.restore import WrongModel, restore
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState

from .fake_device import FakeDevice
from .fake_ranks import Memory, ShardInBytes

BASE_BYTES = 64 * 64 * 4


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.down = nn.Linear(64, 2, bias=False)


class Rig:
    """A LoRA that is staged, on the CPU or from a fake device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_device: bool) -> None:
        torch.manual_seed(1)
        self.model, self.memory = Lora(), Memory()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.device = FakeDevice() if on_device else None
        self._copied = 0
        monkeypatch.setattr(stage, "copy_and_hash", self._count)
        self.stager = Stager(
            TrainingState(self.model, self.optimizer, None), self.memory,
            generation=1, shard=0, num_shards=1, device=self.device or torch.device("cpu"),
        )  # fmt: skip

    def _count(self, target: Bytes, source: Bytes) -> int:
        self._copied += source.nbytes
        return copy_and_hash(target, source)

    @property
    def copied_bytes(self) -> int:
        return self.device.copied_bytes if self.device else self._copied

    def stage(self, step: int, then: Callable[[], None] = lambda: None) -> bool:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.stager.stage(step)
        then()
        if self.device:
            self.device.run()
        return self.stager.finish()

    def expect_whole(self, step: int) -> None:
        """The last staged file has the parameters as they are, and true checksums."""
        header = parse_header(self.memory.file, "file")
        assert header.step == step
        for name, parameter in self.model.named_parameters():
            entry = header.entries[f"model.{name}"]
            begin = header.data_start + entry.begin
            stored = self.memory.file[begin : header.data_start + entry.end]
            assert stored == parameter.detach().numpy().tobytes()
            assert entry.checksum == f"{hash_bytes(np.frombuffer(stored, dtype=np.uint8)):016x}"


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch, on_device=request.param)


def test_a_frozen_parameter_is_copied_once_and_is_in_every_file(rig: Rig) -> None:
    assert rig.stage(0)
    rig.expect_whole(0)
    first = rig.copied_bytes
    assert first > BASE_BYTES
    for step in (1, 2, 3):
        assert rig.stage(step)
        rig.expect_whole(step)
    assert rig.copied_bytes == first + 3 * (first - BASE_BYTES)


def test_a_parameter_that_is_trained_later_is_copied_from_then_on(rig: Rig) -> None:
    rig.stage(0)
    rig.model.base.requires_grad_(True)
    before = rig.copied_bytes
    for step in (1, 2):
        assert rig.stage(step)
        rig.expect_whole(step)
    assert rig.copied_bytes >= before + 2 * BASE_BYTES


@pytest.mark.parametrize("unseen", [False, True], ids=["in place", "through .data"])
def test_a_frozen_parameter_that_is_written_is_never_stale(
    rig: Rig, unseen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A moving average, for example. torch does not count writes through `.data`."""
    rig.stage(0)
    rig.stage(1)
    with torch.no_grad():
        weight = rig.model.base.weight
        (weight.data if unseen else weight).mul_(0.5)
    assert rig.stage(2) == (rig.device is None)
    if rig.device:
        assert "requires_grad False, but was written" in capsys.readouterr().err
        assert parse_header(rig.memory.file, "file").step == 1
    assert rig.stage(3)
    rig.expect_whole(3)


def test_one_that_is_written_after_every_step_is_staged_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, on_device=True)

    def average() -> None:
        with torch.no_grad():
            rig.model.base.weight.mul_(0.5)

    kept = [rig.stage(step, then=average) for step in range(5)]
    assert kept[-2:] == [True, True]


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_bits_sees_a_change_of_one_value(dtype: torch.dtype) -> None:
    values = torch.linspace(1, 2, 24).reshape(4, 6).t().to(dtype)
    before = int(bit_sum(values))
    assert int(bit_sum(values.clone())) == before
    changed = values.clone()
    changed[1, 2] = 0.5
    assert int(bit_sum(changed)) != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_bits_copies_nothing(dtype: torch.dtype) -> None:
    values = torch.ones(1000, 8).to(dtype)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        bit_sum(values)
    assert max(event.cpu_memory_usage for event in profile.function_events) < 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sums_of_bits_on_a_gpu_are_those_of_the_cpu() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    values = [torch.randn(100, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    device.follow_training()
    sums = device.bit_sums([one.cuda() for one in values])
    device.wait(device.record())
    assert sums() == [int(bit_sum(one)) for one in values]


def quantized(seed: int) -> Lora:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(seed)
    model = Lora()
    model.register_buffer("seen", torch.tensor([seed]))
    quantize_(model, Int8WeightOnlyConfig(), lambda module, _: module is model.base)
    assert type(model.base.weight.data) is not torch.Tensor
    return model


def kept(model: nn.Module) -> tuple[TrainingState, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters())  # the frozen ones too
    return TrainingState(model, optimizer, None, keep="trainable"), optimizer


def file_of(model: nn.Module, state: TrainingState, optimizer: torch.optim.Optimizer) -> bytes:
    model.down.weight.grad = torch.ones_like(model.down.weight)  # type: ignore[union-attr,arg-type]
    optimizer.step()
    memory = Memory()
    Stager(state, memory, generation=1, shard=0, num_shards=1, device=torch.device("cpu")).stage(0)
    return memory.file


def test_a_quantized_base_is_neither_staged_nor_restored_with_keep_trainable() -> None:
    model = quantized(1)
    file = file_of(model, *kept(model))
    assert set(parse_header(file, "file").entries) == {
        "model.down.weight", "model.seen", "optim.down.weight.exp_avg",
        "optim.down.weight.exp_avg_sq", "optim.down.weight.step",
    }  # fmt: skip
    assert len(file) < BASE_BYTES, "smaller than the base"
    other = quantized(2)
    base = other.base.weight.dequantize()  # type: ignore[operator]
    state, _ = kept(other)
    shard = ShardInBytes(file, "file")
    extra = restore(state, lambda _: shard, shard=0, num_shards=1, num_stored=1, step=0)
    state.import_extra(extra)
    assert torch.equal(other.down.weight, model.down.weight) and other.seen.item() == 1
    assert torch.equal(other.base.weight.dequantize(), base), "as the script loaded it"  # type: ignore[operator]
    with pytest.raises(UserError, match=r'base.weight: got a .*keep="trainable"') as caught:
        list(TrainingState(other, torch.optim.SGD([other.down.weight]), None).model_tensors())
    assert "at each start" in str(caught.value)


def test_what_was_left_out_must_stay_frozen_and_a_checkpoint_of_it_is_rejected() -> None:
    model = Lora()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = file_of(model, TrainingState(model, optimizer, None), optimizer)
    again = Lora()
    state, other = kept(again)
    shard = ShardInBytes(whole, "file")
    with pytest.raises(WrongModel, match=r"not in the model \(1\): base.weight"):
        restore(state, lambda _: shard, shard=0, num_shards=1, num_stored=1, step=0)
    again.base.requires_grad_(True)
    with pytest.raises(UserError, match=r"got base.weight, which is trained now and was frozen"):
        file_of(again, state, other)
