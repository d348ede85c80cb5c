"""What all tests share. Owns: how the processes that they start end, what they do not take from the
home of whoever runs them, and which of them may run beside each other (`pytest -n`)."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

# A shell that puts a command aside has it ignore Ctrl-C, and so has everything that it starts: the
# tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A token of some other cluster in ~/.ray would lock the tests' own clusters, for half of Ray only.
os.environ["RAY_AUTH_MODE"] = "disabled"

ONE_BY_ONE = ("tests/e2e/", "tests/contract/")
"""Clusters and training jobs: they share clusters that take long to start, and are in a hurry."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All that starts clusters in one process, one by one, as without `-n`; files of other tests in
    the other processes beside it."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ClustersOneByOne(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if nodeid.startswith(ONE_BY_ONE) else nodeid.partition("::")[0]

    return ClustersOneByOne(config, log)
