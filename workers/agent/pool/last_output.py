"""Last output of a worker that its own native code ended: the stack that faulthandler wrote, the
message before it, and whether the watchdog of NCCL in torch ended it for a lost peer."""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast.workers.worker_protocol import Failed

TAIL_BYTES = 64 * 1024
"""Bytes to read: after the watchdog's line, faulthandler writes the stacks of all threads."""
MAX_LINE_CHARACTERS = 400

_WATCHDOG = re.compile(
    r"watchdog (thread )?(caught|terminated|got stuck)|taking the entire process down"
    r"|NCCL operations have failed or timed out|NCCL communicator (was aborted|encountered error)"
    r"|ncclRemoteError|ncclSystemError|ncclInternalError.*connection"
    r"|NCCL.*(remote process exited|connection closed by)|ProcessGroupNCCL\S* .*(abort|terminat)",
    re.IGNORECASE,
)


_FATAL = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File ".*", line \d+ in .*$')
# The message of a C++ exception is a second line, which begins with `what()`.
_CPP = "terminate called"


def crash(text: str) -> Failed | None:
    """Worker's end by native code: the line before the crash and Python's stack, or the line
    that reports a lost peer. None: the output does not show it."""
    lines = (line.strip() for line in text.splitlines())
    watchdog = next((line for line in lines if _WATCHDOG.search(line)), "")
    if watchdog:
        message = watchdog[:MAX_LINE_CHARACTERS]
        return Failed(error_type="", message=message, traceback="", secondary=True)
    fatal = _FATAL.search(text)
    if fatal is None:
        return None
    before = [line.strip() for line in text[: fatal.start()].splitlines() if line.strip()][-2:]
    message = " ".join(before if before and before[0].startswith(_CPP) else before[-1:])
    frames: list[str] = []
    inside = False
    for line in text[fatal.end() :].splitlines():
        if not line.startswith("  "):
            inside = line.startswith("Current thread ") and "C stack" not in line
        elif '"<frozen runpy>"' in line:
            inside = False  # the frames that started the script
        elif inside and _FRAME.match(line):
            frames.insert(0, line)
    traceback = "\n".join(["Traceback (most recent call last):", *frames, fatal[0]])
    return Failed(error_type="", message=message[:MAX_LINE_CHARACTERS], traceback=traceback)


def usage(text: str) -> Failed | None:
    """The last line after a usage message, as argparse prints both. None: there is no such
    message."""
    begin = re.search(r"^usage: ", text, re.IGNORECASE | re.MULTILINE)
    if begin is None:
        return None
    message = text[begin.start() :].strip().splitlines()[-1].strip()
    return Failed(error_type="", message=message[:MAX_LINE_CHARACTERS], traceback="")


def tail(path: str) -> str:
    """The last TAIL_BYTES of a file; empty if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
