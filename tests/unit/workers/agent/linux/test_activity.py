"""Activity of real processes, and the pressure figures of a machine that is a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.workers.agent.linux.activity import ActivityMeter

TICK = 100


class Machine:
    """The files of /proc that are read, of one worker with one child."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s = root, 100.0
        self.meter = ActivityMeter(root)
        for name in ("10", "10/task/10", "11", "11/task/11", "pressure"):
            (root / name).mkdir(parents=True)
        (root / "10/task/10/children").write_text("11")
        (root / "11/task/11/children").write_text("")
        self.set()

    def set(
        self, cpu: int = 0, child_cpu: int = 0, read: int = 0, ran_s: float = 0.0,
        waited_s: float = 0.0, stalled_s: float = 0.0, state: str = "S",
    ) -> None:  # fmt: skip
        for pid, ticks in (("10", cpu), ("11", child_cpu)):
            fields = " ".join([state, *["0"] * 10, str(ticks), "0"])
            (self.root / pid / "stat").write_text(f"{pid} (py (x)) {fields}")
            (self.root / pid / "io").write_text(f"rchar: {read}\nwchar: 0\nread_bytes: 0\n")
        (self.root / "10/schedstat").write_text(f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 1")
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={stalled_s * 1e6:.0f}\n"
        (self.root / "pressure/cpu").write_text(text)

    def idle_s(self, *, quiet: bool = True) -> float:
        self.now_s += 0.5
        found = self.meter.measure(self.now_s, {3: 10}, {3} if quiet else set())
        assert found is not None
        return found[0][3]

    def pressure(self) -> float:
        self.now_s += 0.5
        found = self.meter.measure(self.now_s, {3: 10}, ())
        assert found is not None
        return found[1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_process_that_does_nothing_is_idle_since_its_last_activity(machine: Machine) -> None:
    assert [machine.idle_s() for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    assert machine.meter.measure(machine.now_s + 0.1, {3: 10}, {3}) is None, "too soon"


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": 10}, {"child_cpu": 10}, {"read": 8192}, {"waited_s": 0.1}, {"state": "D"},
    ],
)  # fmt: skip
def test_cpu_time_io_and_a_wait_for_the_cpu_are_activity(
    machine: Machine, change: dict[str, int]
) -> None:
    machine.idle_s()
    assert machine.idle_s() == 0.5
    machine.set(**change)  # type: ignore[arg-type]
    assert machine.idle_s() == 0.0


def test_the_pulse_of_a_worker_is_no_activity(machine: Machine) -> None:
    machine.idle_s()
    machine.set(cpu=1, read=8, waited_s=0.001)
    assert machine.idle_s() == 0.5


def test_ticks_that_come_together_are_no_activity_but_those_of_a_second(machine: Machine) -> None:
    for _ in range(3):
        machine.idle_s()
    machine.set(cpu=4)
    assert machine.idle_s() == 1.5, "40 ms in one second"
    machine.set(cpu=8)
    assert machine.idle_s() == 0.0, "80 ms in one second"
    assert machine.idle_s() == 0.5, "it does nothing again"


def test_a_rank_with_progress_counts_as_active(machine: Machine) -> None:
    assert [machine.idle_s(quiet=False) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_the_pressure_is_the_share_of_time_that_runnable_threads_wait(machine: Machine) -> None:
    machine.pressure()
    machine.set(ran_s=0.1, waited_s=0.4, stalled_s=0.5)
    assert machine.pressure() == pytest.approx(0.8)
    machine.set(ran_s=0.3, waited_s=0.6, stalled_s=1.0)
    assert machine.pressure() == pytest.approx(0.5), "two threads on one core"
    machine.set(ran_s=0.3, waited_s=0.6, stalled_s=1.5)
    assert machine.pressure() == 0.0, "no worker wants the CPU"
    machine.set(ran_s=0.4, waited_s=1.0, stalled_s=1.5)
    assert machine.pressure() == 0.0, "the kernel shows no pressure"


def test_a_kernel_without_pressure_figures_has_those_of_the_threads(machine: Machine) -> None:
    (machine.root / "pressure/cpu").unlink()
    machine.pressure()
    (machine.root / "10/schedstat").write_text("100000000 400000000 9")
    assert machine.pressure() == pytest.approx(0.8)
    (machine.root / "10/schedstat").unlink()
    assert machine.pressure() == 0.0


def test_a_process_that_has_ended_is_no_error(tmp_path: Path) -> None:
    meter = ActivityMeter(tmp_path)
    assert meter.measure(1.0, {0: 4}, {0}) == ({0: 0.0}, 0.0)
    assert meter.measure(2.0, {0: 4}, {0}) == ({0: 1.0}, 0.0)
