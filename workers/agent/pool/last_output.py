"""The last lines that a worker printed before SIGABRT: torch's watchdog of NCCL ends a process that
way when a peer or the network is gone, without a Python exception.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 64 * 1024
"""After the watchdog's line faulthandler writes the stacks of all threads."""
MAX_LINE_CHARACTERS = 400

_WATCHDOG = re.compile(
    r"watchdog (thread )?(caught|terminated|got stuck)|taking the entire process down"
    r"|NCCL operations have failed or timed out|NCCL communicator (was aborted|encountered error)"
    r"|ncclRemoteError|ncclSystemError|ncclInternalError.*connection"
    r"|NCCL.*(remote process exited|connection closed by)|ProcessGroupNCCL\S* .*(abort|terminat)",
    re.IGNORECASE,
)


def watchdog_line(text: str) -> str:
    """The first line of torch's watchdog or of NCCL that reports a lost peer; empty: there is
    none."""
    lines = (line.strip() for line in text.splitlines())
    found = next((line for line in lines if _WATCHDOG.search(line)), "")
    return found[:MAX_LINE_CHARACTERS]


def tail(path: str) -> str:
    """The last TAIL_BYTES of a file; empty if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
