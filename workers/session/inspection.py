"""Reports of a worker's pulse thread when the agent asks why there is no progress: the stacks of
the threads, and the newest collective of each process group.

The thread answers while the main thread waits in native code. It cannot while the process is
stopped or native code holds the interpreter lock; the missing answer shows that.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.facts import GroupProgress

R = TypeVar("R")
MAX_FRAMES = 100
MAX_GROUPS = 16
"""Groups with the newest collectives; a mesh of five axes has fewer."""


def stacks() -> str:
    """Frames of all threads but this one, as faulthandler writes them; the main thread's first."""
    main, this, lines = threading.main_thread().ident, threading.get_ident(), []
    for ident, top in sorted(sys._current_frames().items(), key=lambda entry: entry[0] != main):
        if ident != this:
            kind = "Current thread" if ident == main else "Thread"
            lines.append(f"{kind} {ident:#x} (most recent call first):")
            for frame, number in list(traceback.walk_stack(top))[:MAX_FRAMES]:
                code = frame.f_code
                lines.append(f'  File "{code.co_filename}", line {number} in {code.co_name}')
    return "\n".join(lines)[: limits.MAX_STACK_BYTES]


def num_collectives() -> int:
    """Collectives that this process has begun, in all its process groups: 5 us, without a lock. 0
    without torch and without groups."""
    native = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(native, "_world", None)  # None also while the script imports torch
    groups = list(world.pg_map) if world is not None else []
    total = 0
    for group in groups:
        # A group without a backend for any device has no number.
        with contextlib.suppress(RuntimeError):
            total += int(group._get_sequence_number_for_group())
    return total


def collectives() -> tuple[GroupProgress, ...]:
    """Progress by torch's flight recorders; empty without torch, without process groups, and where
    this version of torch has no recorder for the backend."""
    groups = from_recorders(lambda dumps: [group for dump in dumps for group in parse(dump)])
    return tuple(groups or ())[-MAX_GROUPS:]


def from_recorders(read: Callable[[list[Any]], R]) -> R | None:
    """Result of `read`, of the dumps of all recorders; None: there is none that can be used."""
    if "torch.distributed" not in sys.modules:
        return None
    try:
        return read([dump() for dump in recorders()])
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        print(f"holdfast: the flight recorder's dump was not used: {error}", file=sys.stderr)
        return None


def recorders() -> list[Callable[[], Any]]:
    """Each dumps a flight recorder of torch as JSON: gloo records into the first one, and NCCL into
    the second one only."""
    native = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [dump for name in names if (dump := getattr(native, name, None)) is not None]


def parse(dump: str | bytes) -> tuple[GroupProgress, ...]:
    """The newest collective of each group in a dump. Send and receive are not counted: they have
    numbers per pair of ranks."""
    newest: dict[str, GroupProgress] = {}
    entries = json.loads(dump).get("entries", ())
    for entry in (entry for entry in entries if not entry.get("is_p2p")):
        name, label = entry["process_group"][:2]
        newest.pop(name, None)  # so that the newest collective decides the order
        newest[name] = GroupProgress(
            group=name,
            label=label,
            sequence=int(entry["collective_seq_id"]),
            operation=entry["profiling_name"],
            done=bool(entry.get("retired")) or entry.get("state") == "completed",
        )
    return tuple(newest.values())[-MAX_GROUPS:]
