"""A watcher misses no change."""

from __future__ import annotations

import asyncio

from holdfast.orchestrator.runtime.notifier import ChangeNotifier


async def test_a_change_while_the_watcher_is_busy_is_not_missed() -> None:
    changes = ChangeNotifier()
    seen = changes.count
    changes.notify()
    await asyncio.wait_for(changes.after(seen), 5)


async def test_a_change_wakes_all_waiting_watchers_at_once() -> None:
    changes = ChangeNotifier()
    waiting = [asyncio.create_task(changes.after(changes.count)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    changes.notify()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
