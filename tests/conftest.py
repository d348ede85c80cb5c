"""Common to all tests: signals of processes that they start, settings that they do not take from
the user's home, the end of a test that hangs, which tests may run at once (`pytest -n`)."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
from hypothesis import settings

from .long_tests import LONG

# A shell starts a background command with SIGINT ignored, and its children inherit that: the tests
# of Ctrl-C would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A token of another cluster in ~/.ray would lock the tests' own clusters.
os.environ["RAY_AUTH_MODE"] = "disabled"
# The width of the terminal in which the tests run, which xdist hands on.
os.environ.pop("COLUMNS", None)

# By default hypothesis fails an example that takes over 0.2 s; no test has a time limit.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

AFTER_ITS_TIME_S = 120
"""A test whose time is over ends by an exception, which native code does not see, and then tears
down without a limit. So much later its process ends, with the stacks of all threads on stderr."""
STDERR = pytest.StashKey[int]()

IN_ONE_PROCESS = {
    "tests/e2e/ray/test_autoscaler.py": "heads",
    "tests/e2e/ray/test_head.py": "heads",
    "tests/e2e/ray/": "ray",
    "tests/contract/": "ray",
    "tests/e2e/kubernetes/nodes/": "nodes",
    "tests/e2e/kubernetes/": "kubernetes",
    "tests/e2e/local/": "local",
    "tests/e2e/": "agents",
    "tests/strategies/": "agents",
}
"""Directories of tests -> shared clusters, which take long to start. The first one counts."""
LONGEST_FIRST = ("ray", "agents", "local", "nodes", "kubernetes", "heads")
"""The groups in the order in which they begin. One that began last would run alone in the end."""


def _group(nodeid: str) -> str | None:
    found = (name for directory, name in IN_ONE_PROCESS.items() if nodeid.startswith(directory))
    return next(found, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="with the tests of long_tests.py")


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not item.config.pluginmanager.hasplugin("timeout"):  # as in tests/mutants
        return (yield)
    marker = item.get_closest_marker("timeout")
    limit_s = marker.args[0] if marker is not None else float(item.config.getini("timeout"))
    stderr = item.config.stash[STDERR]
    faulthandler.dump_traceback_later(limit_s + AFTER_ITS_TIME_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in a loop of its own, inside of the arguments that are
    asynchronous contexts."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def run() -> None:
        async with AsyncExitStack() as contexts:
            arguments = {name: pyfuncitem.funcargs[name] for name in names}
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await contexts.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select and order tests. Without `--all`, long tests run only if the command names their file.
    With `-n`, groups come before the other tests, longest first; within them nothing changes."""
    named = [argument for argument in config.args if ".py" in argument]
    if not config.getoption("--all") and not named:
        left_out = [item for item in items if item.nodeid.startswith(LONG)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.nodeid.startswith(LONG)]
    if not hasattr(config, "workerinput"):
        return
    order = {name: index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(_group(item.nodeid) or "", len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Control planes, clusters with nodes, the Ray cluster and the training jobs of one machine
    each in one process; files of other tests wherever there is room."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ClustersTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid) or nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # by the number of tests: the longest groups have few
    return ClustersTogether(config, log)
