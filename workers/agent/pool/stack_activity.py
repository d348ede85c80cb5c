"""Activity of a worker's main thread by its stack: a collective, a wait for the device, a read, a
compiler, or the user's own code.

The innermost frames decide. Native code has no frames: `loss.item()` is recognised by its source
line.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.orchestrator.protocol.facts import GroupProgress, StackActivity

TOP_FRAMES = 6
"""Innermost frames that are looked at: a collective is called through a few wrappers."""

_FRAME = re.compile(r'^\s+(File ".*|\S.* \(.*:\d+\))\s*$')
_FAULTHANDLER = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_PY_SPY = re.compile(r"(?P<name>\S.*) \((?P<file>.*):(?P<line>\d+)\)")

_STAGING = re.compile(r"workers/checkpoint/stage\.py|workers/session/agent_channel\.py")
_COLLECTIVE = re.compile(
    r"distributed_c10d|_functional_collectives|wait_tensor|_fsdp_collectives"
    r"|\b(all_reduce|all_gather|reduce_scatter|all_to_all|barrier|wait_for_unshard)\b"
)
_INNERMOST_COLLECTIVE = re.compile(r"torch/distributed/(?!tensor/)")
_DEVICE = re.compile(
    r"cuda/(__init__|streams)\.py.*synchronize|session/core\.py.*\b_report\b"
    r"|\b_report \(.*session/core\.py"
)
_ENGINE = re.compile(r"_engine_run_backward|autograd/graph\.py|torch/_tensor\.py.*backward")
_READ = re.compile(
    r"torch/utils/data/|/fsspec/|/s3fs/|/gcsfs/|/adlfs/|/datasets/|/pyarrow/|/aiohttp/|/urllib3/"
    r"|/http/client\.py|/socket\.py|/ssl\.py|multiprocessing/(connection|queues)\.py"
    r"|/(gzip|bz2|lzma|zipfile|tarfile)\.py|checkpoint/(restore|shard_sources|shard_reading)\.py"
)
_COMPILE = re.compile(r"torch/(_dynamo|_inductor|_functorch|fx)/|/triton/")
_DEVICE_CALL = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(|\bfloat\(|\.to\([\"']cpu")

_TOP: tuple[tuple[re.Pattern[str], StackActivity], ...] = (
    (_STAGING, "staging"),
    (_COLLECTIVE, "peers"),
    (_DEVICE, "device"),
    (_READ, "reads"),
    (_COMPILE, "compiles"),
    (_ENGINE, "engine"),
)


@dataclass(frozen=True)
class Inspection:
    """Report of a worker's pulse thread. An empty text: it did not answer."""

    text: str = ""
    groups: tuple[GroupProgress, ...] = ()


def activity(text: str, line_of: Callable[[str, int], str] = linecache.getline) -> StackActivity:
    """Activity of the main thread; empty if the text has no frame of it."""
    frames = main_frames(text)[:TOP_FRAMES]
    if not frames:
        return ""
    if _INNERMOST_COLLECTIVE.search(frames[0]):
        return "peers"
    for frame in frames:
        for pattern, kind in _TOP:
            if pattern.search(frame):
                return kind
    match = _FAULTHANDLER.search(frames[0]) or _PY_SPY.search(frames[0])
    if match and _DEVICE_CALL.search(line_of(match["file"], int(match["line"]))):
        return "device"
    return "nothing"


def waits_for_peers(kind: StackActivity) -> bool:
    """True in a collective, or in a wait for the device, whose queue holds the collective."""
    return kind in ("peers", "device")


def in_one_form(frame: str) -> str:
    """`function (file:line)`, of a frame that faulthandler or py-spy has written."""
    match = _FAULTHANDLER.search(frame) or _PY_SPY.search(frame)
    return f"{match['name']} ({match['file']}:{match['line']})" if match else frame


def main_frames(text: str) -> list[str]:
    """Innermost first. The main thread is `Current thread` in reports of the pulse thread, and
    `MainThread` in those of py-spy."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ", "Process ")):
            inside = "MainThread" in line or line.startswith("Current thread ")
        elif inside and _FRAME.match(line):
            frames.append(line.strip())
    return frames
