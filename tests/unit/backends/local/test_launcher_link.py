"""The start of a node launcher that takes its time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.orchestrator.backends.local.launcher_link import (
    LauncherLink,
    LauncherProcess,
    connect,
)
from holdfast.orchestrator.errors import HoldfastError


async def test_a_launcher_that_does_not_listen_in_time_is_killed_and_names_the_field(
    tmp_path: Path,
) -> None:
    (tmp_path / "imports.py").write_text("import time\ntime.sleep(1000)\n")
    environment, place = {**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path / "socket"
    process = LauncherProcess("imports", place, tmp_path / "host.log", environment, tmp_path)
    with pytest.raises(HoldfastError, match=r"within 0.1 s.*recovery.startupTimeoutSeconds"):
        await connect(place, lambda: LauncherLink(print, lambda: None), process, 0.1)
    await process.ended
