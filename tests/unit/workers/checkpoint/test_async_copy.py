"""Staging from a device: order and threads of the copies, and copies that were written meanwhile.

The device is a fake one; tests/unit/workers/session/test_session.py has the tests on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.workers.checkpoint.device import PageLocks
from holdfast.workers.checkpoint.layout import parse_header
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState

from .fake_device import STAGING, TRAINING, FakeDevice
from .fake_ranks import Memory, as_rank


class Rig:
    """A small model that is staged from a fake device."""

    def __init__(self, model: nn.Module | None = None, **optimizer: bool) -> None:
        torch.manual_seed(1)
        self.model = model or nn.Linear(4, 3)
        self.model.register_buffer("seen", torch.zeros(2))
        self.average = next(self.model.parameters())
        """Stands for what a script writes between session.step and the next optimizer step."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **optimizer)
        self.device, self.memory = FakeDevice(), Memory()
        self.stager = Stager(
            TrainingState(self.model, self.optimizer, None), self.memory,
            generation=1, shard=0, num_shards=1, device=self.device,
        )  # fmt: skip

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def stage(self, step: int, then: Callable[[], None] = lambda: None) -> bool:
        """Stages, does `then` while the device has not copied anything, and finishes."""
        self.train()
        self.stager.stage(step)
        then()
        self.device.run()
        return self.stager.finish()

    @property
    def staged_step(self) -> int:
        return parse_header(self.memory.file, "file").step if self.memory.file else -1


def weight_written(rig: Rig) -> None:
    with torch.no_grad():
        rig.average.mul_(0.5)


def test_a_parameter_that_is_written_while_it_is_copied_throws_the_copy_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rig = Rig()
    assert rig.stage(0)
    assert not rig.stage(1, then=lambda: weight_written(rig))
    assert (rig.staged_step, rig.stager.num_thrown_away, rig.memory.put_back_buffers) == (0, 1, [0])
    text = "the copy after 2 steps is discarded: weight was written after"
    assert text in capsys.readouterr().err


def test_after_one_such_write_the_training_stream_waits_for_that_tensor() -> None:
    rig = Rig()
    rig.stage(0, then=lambda: weight_written(rig))
    rig.device.delays.clear()
    assert rig.stage(1, then=lambda: weight_written(rig)), "on a device it is copied before"
    assert rig.device.delays, "the write is queued behind the copy"
    assert (rig.staged_step, rig.stager.num_thrown_away) == (1, 1)


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}])
def test_a_step_of_the_optimizer_waits_for_the_copy_and_is_no_such_write(
    kind: dict[str, bool],
) -> None:
    rig = Rig(**kind)
    rig.stage(0)
    rig.train()
    rig.stager.stage(1)
    before = len(rig.device.delays)
    rig.train()  # its writes are queued behind the copy
    assert len(rig.device.delays) == before + 1
    rig.device.run()
    assert rig.stager.finish()
    assert (rig.staged_step, rig.stager.num_thrown_away) == (1, 0)


def test_a_write_after_the_optimizers_step_is_queued_behind_the_copy_too() -> None:
    rig = Rig()

    def then() -> None:
        rig.train()
        weight_written(rig)

    assert rig.stage(0, then=then)


def test_buffers_may_be_written_by_the_next_forward() -> None:
    rig = Rig()
    assert rig.stage(0, then=lambda: rig.model.seen.add_(1))
    assert len(rig.device.delays) == 1, "the training stream waits for the buffers"


def test_a_write_of_a_sharded_parameter_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with as_rank(0, 2):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        rig = Rig(model)
        assert not rig.stage(0, then=lambda: weight_written(rig))
        local = rig.model.bias.to_local()
        with torch.no_grad():
            assert not rig.stage(1, then=lambda: local.add_(1))
    said = capsys.readouterr().err
    assert "1 step is discarded: weight" in said and "2 steps is discarded: bias" in said


def written_through_data(rig: Rig) -> None:
    rig.average.data.mul_(0.5)


def written_by_foreach(rig: Rig) -> None:
    with torch.no_grad():
        torch._foreach_mul_([rig.average], 0.5)


@pytest.mark.parametrize("write", [written_through_data, written_by_foreach])
def test_a_write_that_the_version_does_not_count_is_found_by_the_bits(
    write: Callable[[Rig], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with as_rank(0, 2):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        rig = Rig(model)
        assert rig.stage(0)
        assert not rig.stage(1, then=lambda: write(rig))
        assert "the copy after 2 steps is discarded: weight was written" in capsys.readouterr().err
        assert rig.stage(2, then=lambda: write(rig)), "it is queued behind the copy from now on"
    assert (rig.staged_step, rig.stager.num_thrown_away) == (2, 1)


def test_the_bits_of_parameters_are_read_twice_and_those_of_moments_never() -> None:
    rig = Rig(nn.Linear(64, 64))
    rig.stage(0)
    parameters = sum(one.nbytes for one in rig.model.parameters())
    assert rig.device.summed_bytes == 2 * parameters
    assert rig.device.copied_bytes > 3 * parameters


def test_a_step_that_a_graph_captured_has_every_staging_waited_for() -> None:
    rig = Rig()
    rig.device.captures = True
    rig.stage(0)  # its optimizer step is captured: no hook runs when it is replayed
    rig.device.captures = False
    rig.device.delays.clear()
    rig.stager.stage(1)
    assert len(rig.device.delays) == 2, "for the buffers, and for all the rest"
    rig.device.run()
    assert rig.stager.finish()


def test_only_the_staging_thread_waits_for_the_device() -> None:
    rig = Rig()
    rig.stage(0)
    assert rig.device.threads_of("wait") == {STAGING}
    for call in ("copy", "record", "follow_training", "delay_training"):
        assert rig.device.threads_of(call) == {TRAINING}
    order = [name for name, thread in rig.device.calls if thread == TRAINING]
    first = order.index("follow_training")
    assert order[first : first + 4] == ["follow_training", "copy", "record", "delay_training"]


def test_an_error_of_the_staging_thread_is_raised_at_the_next_staging() -> None:
    rig = Rig()

    def refuse(*_: object) -> None:
        raise OSError("the agent is gone")

    rig.memory.staged = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the agent is gone"):
        rig.stage(0)


def test_buffers_are_page_locked_before_they_are_used() -> None:
    rig = Rig()
    rig.stage(0)
    names = [name for name, _ in rig.device.calls]
    assert names.count("lock_pages") == 1 and names.index("lock_pages") < names.index("copy")
    assert rig.device.locked_bytes >= len(rig.memory.file)


def test_without_page_locks_training_goes_on_and_the_reason_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    locks = PageLocks(FakeDevice(refuses_pages=True))
    for _ in range(3):
        locks(np.zeros(8, dtype=np.uint8))
    said = capsys.readouterr().err
    assert said.count("not page-locked (cudaHostRegister failed: operation not supported)") == 1
