"""Restore to a device: what is copied, from where, and in which order. The device is a fake one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.workers.checkpoint.layout import DamagedCheckpoint, hash_bytes
from holdfast.workers.checkpoint.upload import NUM_PLACES, CudaUpload, Uploader

from .fake_device import FakeUpload
from .fake_ranks import as_rank, restored, staged

SMALL = 64
"""Bytes of a place: most tensors of the model take several."""


@pytest.mark.parametrize(
    ("written", "read"), [((1, 2), (1, 2)), ((1, 3), (1, 2)), ((2, 2), (1, 1))]
)
def test_a_restore_through_few_page_locked_places_has_all_values(
    written: tuple[int, int], read: tuple[int, int]
) -> None:
    files = staged(*written)
    for rank in range(read[1]):
        with as_rank(rank, read[0] * read[1]):
            wanted, _ = restored(files, *read, rank)
        device = FakeUpload()
        with as_rank(rank, read[0] * read[1]):
            got, _ = restored(files, *read, rank, upload=Uploader(device, SMALL))
        assert wanted.keys() == got.keys()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
        assert device.locked_bytes == NUM_PLACES * SMALL, "all state goes through these"
        assert device.longest_queue == NUM_PLACES, "the device copies while the host reads on"


def test_large_parts_are_divided_until_they_fit() -> None:
    device = FakeUpload()
    upload = Uploader(device, SMALL)
    values = np.arange(7 * 3 * 11, dtype=np.int32).reshape(7, 3, 11)[::2, :, 1:]
    target = torch.zeros(4, 3, 12, dtype=torch.int32)[:, :, :10]
    upload.copy_part(target, values)
    upload.finish()
    assert np.array_equal(target.numpy(), values)
    assert device.num_uploads > values.nbytes // SMALL


def test_the_checksum_is_that_of_all_bytes() -> None:
    data = np.arange(1000, dtype=np.uint8)
    target = torch.zeros(1000, dtype=torch.uint8)
    upload = Uploader(FakeUpload(), SMALL)
    assert upload.copy_and_hash(target, data) == hash_bytes(data)
    upload.finish()
    assert np.array_equal(target.numpy(), data)


def test_a_damaged_entry_is_found_on_the_way_to_a_device() -> None:
    file = bytearray(staged(1, 1)[0])
    file[-1] ^= 1
    with as_rank(0, 1), pytest.raises(DamagedCheckpoint, match="checksum"):
        restored({0: bytes(file)}, 1, 1, 0, upload=Uploader(FakeUpload(), SMALL))


def test_without_page_locks_a_restore_works_and_the_reason_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = staged(1, 1)
    with as_rank(0, 1):
        upload = Uploader(FakeUpload(refuses_pages=True), SMALL)
        got, _ = restored(files, 1, 1, 0, upload=upload)
    with as_rank(0, 1):
        wanted, _ = restored(files, 1, 1, 0)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert capsys.readouterr().err.count("cannot be page-locked") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_reach_a_gpu() -> None:
    upload = Uploader(CudaUpload(), 4096)
    data = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)
    target = torch.zeros(100_000, dtype=torch.uint8, device="cuda")
    assert upload.copy_and_hash(target, data) == hash_bytes(data)
    upload.finish()
    assert np.array_equal(target.cpu().numpy(), data)
    part = torch.zeros(300, 100, dtype=torch.int32, device="cuda")[:, 10:90]
    values = np.arange(300 * 80, dtype=np.int32).reshape(300, 80)
    upload.copy_part(part, values)
    upload.finish()
    assert np.array_equal(part.cpu().numpy(), values)
