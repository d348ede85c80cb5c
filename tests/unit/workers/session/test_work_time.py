"""The working time of the training thread: waits do not count, and the measurement is cheap. On a
GPU the time of matrix products: read when they are done, and cheap as well."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
import torch

from holdfast.orchestrator import limits
from holdfast.workers.session.work_time import GpuProbe, WorkMeter


def test_a_median_is_reported_when_there_are_enough_steps() -> None:
    now_s = 0.0
    meter = WorkMeter(lambda: now_s)
    reported = []
    for step in range(limits.STRAGGLER_WINDOW + 1):
        now_s += 100.0  # staging, which does not count
        meter.begin()
        now_s += 9.0 if step == 3 else 0.5
        reported.append(meter.end())
    assert reported == [0.0] * (limits.STRAGGLER_WINDOW - 1) + [0.5, 0.5]


def test_a_wait_for_peers_and_the_time_of_other_threads_are_no_work() -> None:
    def spin() -> None:
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass

    meter = WorkMeter()
    for _ in range(limits.STRAGGLER_WINDOW):
        waits_s = meter.end()
    other = threading.Thread(target=spin)
    other.start()
    other.join()
    for _ in range(limits.STRAGGLER_WINDOW):
        waits_s = meter.end()
    spin()
    for _ in range(limits.STRAGGLER_WINDOW // 2 + 1):
        meter.begin()
        spin()
        works_s = meter.end()
    assert waits_s < 0.1 <= works_s


def test_a_measurement_costs_a_tenth_of_a_percent_of_a_step_of_100_ms() -> None:
    meter = WorkMeter()
    began_s = time.thread_time()
    for _ in range(1000):
        meter.begin()
        meter.end()
    assert (time.thread_time() - began_s) / 1000 < 0.1 * 0.001


@dataclass
class Device:
    """Works off what is queued, one after the other; an event is done when what is before it is."""

    product_s: float = 0.0001
    now_s: float = 0.0
    free_s: float = 0.0
    """Time at which all that is queued is done."""
    probes: int = 0
    broken: bool = False

    def event(self) -> Event:
        return Event(self)

    def multiply(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.probes += 1
        self.queue(self.product_s)

    def queue(self, work_s: float) -> None:
        self.free_s = max(self.now_s, self.free_s) + work_s

    def probe(self) -> GpuProbe:
        return GpuProbe(
            torch.device("cpu"),
            clock=lambda: self.now_s,
            make_event=self.event,
            multiply=self.multiply,
        )


@dataclass
class Event:
    device: Device
    at_s: float = 0.0

    def record(self) -> None:
        self.at_s = max(self.device.now_s, self.device.free_s)

    def query(self) -> bool:
        return self.device.now_s >= self.at_s

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


@pytest.mark.parametrize("step_s", [0.01, 0.3])
def test_probes_take_a_thousandth_of_the_time_of_a_gpu_that_is_behind_its_host(
    step_s: float,
) -> None:
    device = Device()
    probe, reported = device.probe(), []
    for _ in range(1000):
        device.queue(step_s)  # the host does not wait for it: two steps are under way
        device.now_s = max(device.now_s, device.free_s - 1.5 * step_s)
        reported.append(probe.end())
    assert 12 <= device.probes <= device.now_s / 0.1 + 1
    known = [value for value in reported if value]
    assert known and all(value == pytest.approx(device.product_s) for value in known)


def test_a_gpu_that_becomes_slower_is_seen_within_the_steps_in_which_it_is_named() -> None:
    device = Device()
    probe = device.probe()
    for step in range(60):
        device.product_s = 0.00013 if step >= 40 else 0.0001
        device.queue(0.3)
        device.now_s = device.free_s
        if probe.end() > 0.00012:
            break
    assert 40 < step <= 40 + 20 - limits.STRAGGLER_STEPS


def test_a_gpu_that_cannot_be_measured_trains_on(capsys: pytest.CaptureFixture[str]) -> None:
    device = Device()
    probe = device.probe()
    for step in range(60):
        device.broken = step == 50
        device.queue(0.3)
        device.now_s = device.free_s
        last = probe.end()
    assert last == 0.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("holdfast: the speed of the GPU is not measured: CUDA error")


def test_the_products_are_of_numbers_of_the_probes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuProbe, "WIDTH", 64)
    before = torch.get_rng_state()
    probe = Device().probe()
    probe._products()
    assert probe._matrices is not None
    source, product = probe._matrices
    assert source.abs().max() == 1.0 and source.unique().numel() > 100
    assert torch.equal(product, source @ source) and torch.isfinite(product).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_of_a_gpu_take_the_same_time_and_no_random_numbers() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    before = torch.cuda.get_rng_state(device)
    now_s = 0.0
    probe = GpuProbe(device, clock=lambda: now_s)
    values = []
    for _ in range(100):
        torch.cuda.synchronize(device)
        now_s += 10.0
        values.append(probe.end())
    known = [value for value in values if value]
    assert len(known) > 80
    assert max(known) < min(known) * (1 + limits.STRAGGLER_SHARE)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
