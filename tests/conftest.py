"""What all tests share: signals of the processes that they start, settings that they do not take
from the user's home, and which tests may run beside each other (`pytest -n`)."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import settings

# A shell starts a background command with SIGINT ignored, and its children inherit that: the tests
# of Ctrl-C would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A token of another cluster in ~/.ray would lock the tests' own clusters.
os.environ["RAY_AUTH_MODE"] = "disabled"

# By default hypothesis fails an example that takes over 0.2 s; no test has a time limit.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

IN_ONE_PROCESS = {
    "tests/e2e/ray/test_autoscaler.py": "heads",
    "tests/e2e/ray/test_head.py": "heads",
    "tests/e2e/kubernetes/nodes/": "nodes",
    "tests/e2e/kubernetes/": "kubernetes",
    "tests/e2e/ray/": "ray",
    "tests/contract/": "ray",
    "tests/e2e/": "local",
    "tests/strategies/": "local",
}
"""Where tests lie -> what they share: clusters that take long to start. The first one counts."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Control planes, clusters with nodes, the Ray cluster and all other training jobs each in one
    process, in the order without `-n`; files of other tests wherever there is room."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ClustersTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            for directory, group in IN_ONE_PROCESS.items():
                if nodeid.startswith(directory):
                    return group
            return nodeid.partition("::")[0]

    return ClustersTogether(config, log)
