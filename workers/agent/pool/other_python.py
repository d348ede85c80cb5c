"""Runs a script or module in the interpreter of a user: `PYTHON other_python.py ORDER`.

The worker process becomes this program, with its descriptors. Nothing but the standard library is
imported, as Holdfast may be missing there; a failure is reported to the agent all the same. It runs
with Python 3.8 and later.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import runpy
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_OURS = (__file__, str(_HERE / "accelerate_launch.py"), str(_HERE / "framework_hooks.py"))


def main(order: dict[str, Any]) -> int:
    """`order`: script (absolute) or module, argv, accelerate (words of the launcher, or null),
    wire, stack and asked (descriptors), signal (at which stacks are written), bytes (bound of a
    traceback), audit (whether to report checkpoints and to patch frameworks)."""
    leaving = _load("leaving")
    faulthandler.enable()
    faulthandler.register(order["signal"], file=order["stack"], all_threads=False)
    if importlib.util.find_spec("holdfast") is not None:
        _load("other_pulse").start(order["wire"], order["asked"], _load)
        if order.get("audit"):
            _load("framework_hooks").install()
            _audit(order["wire"])
    try:
        if order["accelerate"] is not None:
            os.environ.update(_load("accelerate_launch").variables(order["accelerate"]))
        sys.argv = order["argv"]
        if order["script"]:
            sys.path[0] = str(Path(order["script"]).parent)
            runpy.run_path(order["script"], run_name="__main__")
        else:
            sys.path[0] = str(Path.cwd())
            runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        _leave(order)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            _leave(order)
        else:
            error.__traceback__ = _user_traceback(error.__traceback__)
            _report(order, error)
        raise
    except BaseException as error:
        leaving.silence_signals()
        error.__traceback__ = _user_traceback(error.__traceback__)
        traceback.print_exception(type(error), error, error.__traceback__)
        _report(order, error)
        leaving.call_excepthook(error)
        return 1
    return 0


def _audit(wire: int) -> None:
    """Another version of Holdfast may lack what it needs: the script runs all the same."""
    try:
        _load("file_audit").install(wire)
    except Exception as error:
        print(f"holdfast: its checkpoints are not known ({type(error).__name__}: {error})",
              file=sys.stderr)  # fmt: skip


def _load(name: str) -> Any:
    """A module by its path from here, under a name that no module of the user has."""
    path = _HERE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_holdfast_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _user_traceback(begin: Any) -> Any:
    """The traceback from the user's first frame on; None: the script did not run."""
    frame = begin
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file not in _OURS and "runpy" not in file:
            return frame
        frame = frame.tb_next
    return None


def _leave(order: dict[str, Any]) -> None:
    """Say that the script has ended; the interpreter does the rest."""

    def tell(waits_for: str) -> None:
        _send(order, {"type": "leaving", "waits_for": waits_for})

    tell("")
    _load("leaving").tell_if_it_lingers(tell)


def _report(order: dict[str, Any], error: BaseException) -> None:
    """Send worker_protocol.Failed."""
    failures, bound = _load("failures"), order["bytes"]
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = failures.encodable(failures.text_of(error))[: bound // 4]
    fields = {
        "type": "failed",
        "error_type": failures.encodable(type(error).__qualname__),
        "message": message,
        "traceback": failures.encodable(text).encode()[-bound:].decode(errors="replace"),
        "secondary": failures.is_secondary(error),
        "out_of_memory": failures.is_out_of_memory(error),
    }
    _send(order, fields)


def _send(order: dict[str, Any], fields: dict[str, Any]) -> None:
    try:
        with socket.socket(fileno=os.dup(order["wire"])) as link:
            link.send(packed(fields))
    except OSError:
        pass  # the agent has ended, so this process ends too


def packed(fields: dict[str, Any]) -> bytes:
    """A map of texts and booleans as msgpack: a map of at most 15 fields, str 32, true and false
    (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
    parts = [bytes([0x80 | len(fields)])]
    for name, value in fields.items():
        for text in (name, value):
            if isinstance(text, bool):
                parts.append(b"\xc3" if text else b"\xc2")
            else:
                data = text.encode()
                parts.append(b"\xdb" + struct.pack(">I", len(data)) + data)
    return b"".join(parts)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
