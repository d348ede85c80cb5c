"""The working time of the training thread: waits do not count, and the measurement is cheap."""

from __future__ import annotations

import threading
import time

from holdfast.orchestrator import limits
from holdfast.workers.session.work_time import WorkMeter


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
