"""Watching processes that are not children of this one."""

from __future__ import annotations

import threading

from holdfast.orchestrator.backends.local.processes import identify, watch


def test_a_pid_that_now_belongs_to_a_thread_is_not_watched() -> None:
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
