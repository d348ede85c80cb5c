"""Checkpoints of DeepSpeed's ZeRO for another number of ranks than wrote them: rank 0 converts them
with DeepSpeed's own program (`ds_to_universal`) when a script loads one.

ZeRO divides the optimizer into a part for each rank, and refuses the parts in another number.
Nothing of the script's checkpoint is changed; the converted one is in a hidden folder beside it,
and is replaced by the next one.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from holdfast.orchestrator.errors import UserError
from holdfast.workers.agent.storage.script_checkpoints import optimizer_parts, tag_of_latest
from holdfast.workers.session import reporting

TRIED = ("0.19.8",)
WITHOUT = "checkpoints are read by as many ranks as wrote them only"
FOLDER = ".holdfast-universal"
CONVERT_TIMEOUT_S = 1800.0
"""Reading and writing a checkpoint of 1 TB at 1 GB/s takes about so long."""
POLL_S = 0.5
"""Seconds between the ranks' exchanges whether the program still runs."""
_RUNS, _SAME, _CONVERTED, _FAILED = "runs", "same", "converted", "failed"
_OUTPUT_BYTES = 1500
"""Bytes of the program's last output in the message of its failure."""


def patch(module: ModuleType) -> None:
    """`module` has the engine."""
    read_other_sizes(module.DeepSpeedEngine)


def read_other_sizes(engine_class: Any) -> None:
    """Has `load_checkpoint` of this class, DeepSpeed's engine, convert what it would refuse."""
    inner = engine_class.load_checkpoint
    if getattr(inner, "reads_other_sizes", False):
        return

    @wraps(inner)
    def load_checkpoint(*args: Any, **more: Any) -> Any:
        call = inspect.signature(inner).bind(*args, **more)
        call.apply_defaults()
        engine, arguments = call.args[0], call.arguments
        if not _reads_optimizer(engine, arguments):
            return inner(*args, **more)
        source = _newest(engine, arguments)
        converted = _converted(engine, source) if source is not None else None
        if source is None or converted is None:
            return inner(*args, **more)
        arguments["load_dir"], arguments["tag"] = str(converted.parent), converted.name
        engine._config.load_universal_checkpoint = True
        try:
            path, client_state = inner(*call.args, **call.kwargs)
        finally:
            engine._config.load_universal_checkpoint = False
        return path and str(source / Path(path).name), client_state

    load_checkpoint.reads_other_sizes = True  # type: ignore[attr-defined]
    engine_class.load_checkpoint = load_checkpoint


def _reads_optimizer(engine: Any, arguments: dict[str, Any]) -> bool:
    wanted = arguments["load_optimizer_states"] and not arguments["load_module_only"]
    universal = engine.load_universal_checkpoint()
    return bool(engine.zero_optimization() and wanted and not universal and dist.is_initialized())


def _newest(engine: Any, arguments: dict[str, Any]) -> Path | None:
    """The folder that would be loaded, as rank 0 sees it; None: DeepSpeed says what is missing."""
    folder, tag = Path(arguments["load_dir"]), arguments["tag"]
    source = tag_of_latest(folder) if tag is None else folder / str(tag)
    path = str(source) if source is not None and _num_parts(source) else None
    return Path(agreed) if (agreed := _from_first(engine, path)) is not None else None


def _from_first(engine: Any, value: Any) -> Any:
    """The value of rank 0. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=engine.device)
    return box[0]


def _converted(engine: Any, source: Path) -> Path | None:
    """Place of this checkpoint for any number of ranks; None: it has the right one. Collective.
    While it is converted, the ranks restore: their collectives are no training. Raises UserError if
    it could not be converted."""
    leads, size = dist.get_rank() == 0, int(engine.seq_dp_world_size)
    conversion = _Conversion(source, size) if leads else None
    state, why = _RUNS, ""
    with reporting.within("restore"):
        while state == _RUNS:
            state, why = _from_first(engine, conversion.state() if conversion is not None else None)
            reporting.progress("restore")
    if state == _FAILED:
        raise UserError(
            f"DeepSpeed checkpoint {source}: got {_num_parts(source)} parts of the optimizer for "
            f"{size} ranks; expected as many parts, or that DeepSpeed converts them; "
            f"deepspeed.checkpoint.ds_to_universal failed: {why}"
        )
    return _place(source) if state == _CONVERTED else None


def _num_parts(source: Path) -> int:
    return optimizer_parts(source)[0]


def _place(source: Path) -> Path:
    return source.parent / FOLDER / source.name


class _Conversion:
    """The program on rank 0. It writes under another name, so that what has the name is whole."""

    def __init__(self, source: Path, size: int) -> None:
        self._source, self._size, self._began_s = source, size, time.monotonic()
        self._partial = _place(source).with_name(f"{source.name}.partial")
        self._process: subprocess.Popen[bytes] | None = None

    def state(self) -> tuple[str, str]:
        """(state, why it failed). Starts the converter if it is needed, and waits POLL_S."""
        try:
            if self._process is not None:
                return self._wait(self._process)
            if _num_parts(self._source) == self._size:
                return _SAME, ""
            if _is_current(self._source):
                return _CONVERTED, ""
            self._start()
        except OSError as error:
            return _FAILED, str(error)
        return _RUNS, ""

    def _start(self) -> None:
        shutil.rmtree(self._partial.parent, ignore_errors=True)
        self._partial.parent.mkdir(exist_ok=True)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open while the program runs)
        print(
            f"holdfast: {self._source} was written by {_num_parts(self._source)} ranks; it is "
            f"converted for {self._size} to DeepSpeed's universal format",
            file=sys.stderr,
        )
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
                "--input_folder", str(self._source), "--output_folder", str(self._partial),
                "--inject_missing_state",
            ],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[str, str]:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() - self._began_s < CONVERT_TIMEOUT_S:
                return _RUNS, ""
            process.kill()
            process.wait()
            return _FAILED, f"it did not end within {CONVERT_TIMEOUT_S:g} s"
        if code:
            return _FAILED, f"exit code {code}: {self._printed()}"
        self._partial.rename(_place(self._source))
        seconds = time.monotonic() - self._began_s
        print(f"holdfast: {self._source} is converted after {seconds:.1f} s", file=sys.stderr)
        return _CONVERTED, ""

    def _printed(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _OUTPUT_BYTES))
        return self._output.read().decode(errors="replace").strip()


def _is_current(source: Path) -> bool:
    """True if the converted copy is newer than the checkpoint."""
    place = _place(source)
    written = max(entry.stat().st_mtime_ns for entry in source.iterdir())
    return place.is_dir() and place.stat().st_mtime_ns > written
