"""The start of a node launcher that takes its time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdfast.orchestrator.backends.local.launcher_link import (
    LauncherLink,
    LauncherProcess,
    connect,
)
from holdfast.orchestrator.errors import HoldfastError


def test_a_launcher_that_does_not_listen_in_time_is_killed_and_names_the_field(
    tmp_path: Path,
) -> None:
    async def scene() -> str:
        (tmp_path / "imports.py").write_text("import time\ntime.sleep(1000)\n")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        log = tmp_path / "host.log"
        process = LauncherProcess("imports", tmp_path / "socket", log, environment, tmp_path)
        with pytest.raises(HoldfastError) as late:
            await connect(
                tmp_path / "socket", lambda: LauncherLink(print, lambda: None), process, 0.1
            )
        await process.ended
        return str(late.value)

    text = asyncio.run(scene())
    assert "within 0.1 s" in text and "recovery.startupTimeoutSeconds" in text
