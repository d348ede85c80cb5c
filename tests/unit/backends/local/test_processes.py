"""Processes that are not our children."""

from __future__ import annotations

import threading

from holdfast.orchestrator.backends.local.processes import identify, watch


def test_a_pid_that_is_a_thread_by_now_is_no_process() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        identity = identify(thread.native_id)
        assert identity is not None
        assert watch(identity, lambda: None) is None
    finally:
        over.set()
        thread.join()
