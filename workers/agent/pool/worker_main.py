"""Main program of a forked worker: wait for Assign, set up the process, run the entrypoint.

Every path ends in os._exit: the teardown of an interpreter with torch loaded takes tenths of a
second and can only fail.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import os
import re
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.protocol import files
from holdfast.workers import worker_protocol, worker_transport

from ..linux import output as streams
from ..linux import processes
from ..process import process_env
from . import gpu_context, user_modules

_PACKAGE = __file__.removesuffix("workers/agent/pool/worker_main.py")
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited"
    r"|remote peer|Socket closed|Connection was likely closed|Timed out waiting|recvValue failed"
    r"|failed to recv|NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
    r"|Connection refused|Connection timed out|wait timeout|unexpected EOF",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|std::bad_alloc")
_RESERVE_BYTES = 2 * 2**20
"""Freed when the entrypoint has failed: a report of a failure for lack of memory needs some."""
_TORCH_DISTRIBUTED = re.compile(r"gloo|nccl|c10d|TCPStore|ProcessGroup|Watchdog", re.IGNORECASE)
_NETWORK_ERRORS = {"DistNetworkError", "DistBackendError", "DistStoreError", "DistQueueEmptyError"}


def run(
    wire_fd: int, stack_fd: int, asked_fd: int, job: TrainingJob, directory: str, local_rank: int
) -> NoReturn:
    """Everything from the fork to the end of the process."""
    link = socket.socket(fileno=wire_fd)
    code = 1
    reserve: list[bytearray] = []
    try:
        _reset_signals()
        faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True)
        if not select.select([link], [], [], 0)[0]:  # a standby: Assign has not come yet
            gpu_context.open_context(job, local_rank)
            user_modules.import_after_fork(job)
            _warm(job, directory)
        assign, output = worker_transport.receive(link)
        if assign is None:  # the agent has ended, or does not need this standby
            os._exit(0)
        assert isinstance(assign, worker_protocol.Assign)
        _set_up(assign, job, wire_fd, output)
        worker_transport.attached = worker_transport.Attached(
            link=link, assign=assign, job=job, inspection=socket.socket(fileno=asked_fd)
        )
        reserve.append(bytearray(_RESERVE_BYTES))
        user_modules.expect_imported(job)
        _run_entrypoint(job)
        code = _leave(0)
    except SystemExit as error:
        code = _leave(_exit_code(error))
    except BaseException as error:
        reserve.clear()
        error.__traceback__ = _without_launcher(error.__traceback__)
        if isinstance(error, (SyntaxError, UserError)) and _is_ours(error.__traceback__):
            error.__traceback__ = None  # the script did not run; the error names the place
        elif isinstance(error, UserError):
            error.__traceback__ = script_part(error.__traceback__)
        _print_traceback(error)  # first: the log keeps it even if the report fails
        _report_failure(link, error)
    finally:
        os._exit(code)


# -- process set-up ---------------------------------------------------------------------------
def _reset_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _warm(job: TrainingJob, directory: str) -> None:
    """One step before this standby has a rank, see warmup.py."""
    if importlib.util.find_spec("holdfast.workers.agent.pool.warmup") is not None:
        importlib.import_module("holdfast.workers.agent.pool.warmup").warm(job, directory)


def _set_up(
    assign: worker_protocol.Assign, job: TrainingJob, wire_fd: int, output: int | None
) -> None:
    processes.name_process(f"rank-{assign.seat.rank}")
    _open_streams(assign.log_file, output)
    process_env.adopt(assign.environment)
    os.environ[worker_transport.AGENT_FD] = str(wire_fd)
    if problem := enter_directory(assign, job):
        raise UserError(str(problem))
    if "torch" in sys.modules:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit():
            sys.modules["torch"].set_num_threads(max(1, int(threads)))
    if "numpy" in sys.modules:
        # Forked siblings would draw the same numbers; fresh interpreters do not.
        sys.modules["numpy"].random.seed()


def _open_streams(log_file: str, output: int | None) -> None:
    """stdout and stderr to one file, appended line by line, or to `output`; nothing on stdin."""
    null = os.open(os.devnull, os.O_RDWR)
    if output is not None:
        target = output
    elif log_file:
        target = streams.log_descriptor(log_file)
    else:
        target = null
    os.dup2(null, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    for fd in {null, target}:
        os.close(fd)
    # New objects: the parent process may have replaced or captured the inherited ones.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = streams.stream(1, "strict")
    sys.stderr = streams.stream(2, "backslashreplace")
    faulthandler.enable(file=2)


def enter_directory(assign: worker_protocol.Assign, job: TrainingJob) -> Problem | None:
    """Enter the working directory. Returns the problem if this node lacks it or the script."""
    entry, written = job.spec.entrypoint, job.spec.working_directory
    try:
        directory = files.resolve(assign.spec_directory, written)
        os.chdir(directory)
        if entry.script is not None:
            files.resolve(directory, entry.script).stat()
        return None
    except OSError as error:
        why = f"{error.filename}: {error.strerror} on this node"
    if entry.recipe is not None and Path(written) == Path():
        _enter_logs(assign, why)
        return None
    if entry.script is None:
        got, expected = f"{written} ({why})", "a directory of every node"
        return Problem("spec.workingDirectory", got, expected)
    got, expected = f"{entry.script} ({why})", "a file of every node"
    fix = (
        "on Kubernetes it has to be in the image; on Ray, `holdfast submit` takes along what lies "
        "beside the spec file"
    )
    return Problem("spec.entrypoint.script", got, expected, fix)


def _enter_logs(assign: worker_protocol.Assign, why: str) -> None:
    """A recipe needs only the spec, which came with the job."""
    logs = Path(assign.log_file).parent
    os.chdir(logs)
    print(f"not in the spec's directory ({why}), but in {logs.resolve()}", file=sys.stderr)


# -- the entrypoint ---------------------------------------------------------------------------
def _run_entrypoint(job: TrainingJob) -> None:
    entry = job.spec.entrypoint
    if entry.recipe is not None:
        importlib.import_module(f"holdfast.workers.training.recipes.{entry.recipe.name}").main(job)
    elif entry.script is not None:
        script = str(files.resolve(Path.cwd(), entry.script).resolve())
        sys.argv = [entry.script, *entry.args]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        assert entry.module is not None
        sys.argv = [entry.module, *entry.args]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(entry.module, run_name="__main__", alter_sys=True)


# -- the end ----------------------------------------------------------------------------------
def _exit_code(error: SystemExit) -> int:
    """The exit code that the interpreter would use."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int) -> int:
    """The interpreter's steps at its end, without the teardown."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    streams.flush()
    return code


def _print_traceback(error: BaseException) -> None:
    # A full disk or a closed stream does not keep the report back.
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exception(error)
    streams.flush()


def _report_failure(link: socket.socket, error: BaseException) -> None:
    try:
        worker_transport.send(link, failure_report(error))
    except OSError:
        return  # the agent has ended, so this process ends too


def failure_report(error: BaseException) -> worker_protocol.Failed:
    """The message about `error`. An exception of any kind has one: half of a surrogate pair, which
    UTF-8 cannot hold, is escaped, and a failing `__str__` is named."""
    text = _encodable("".join(traceback.format_exception(error))).encode()
    return worker_protocol.Failed(
        error_type=_encodable(type(error).__qualname__),
        message=_encodable(text_of(error))[: limits.MAX_TRACEBACK_BYTES // 4],
        traceback=text[-limits.MAX_TRACEBACK_BYTES :].decode(errors="replace"),
        secondary=is_secondary(error),
        out_of_memory=is_out_of_memory(error),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Host or device memory ran out: the same step may fit on another machine or mesh."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"MemoryError", "OutOfMemoryError"}:
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(text_of(error)))


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """The text of an exception whose `__str__` may fail."""
    try:
        return str(error)
    except BaseException as second:
        return f"<no text: __str__ raised {type(second).__name__}>"


def _without_launcher(begin: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on, without Holdfast's own frames."""
    frame = begin
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            return frame
        frame = frame.tb_next
    return begin


def script_part(begin: TracebackType | None) -> TracebackType | None:
    """The traceback of a user's mistake, without the frames from the first call of Holdfast on."""
    frame, last = begin, None
    while frame is not None and not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame, last = frame.tb_next, frame
    if last is None:
        return None
    last.tb_next = None
    return begin


def _is_ours(begin: TracebackType | None) -> bool:
    return begin is not None and begin.tb_frame.f_code.co_filename == __file__


def is_secondary(error: BaseException) -> bool:
    """Whether the error reports the loss of a peer or of the network: not the root cause."""
    seen: BaseException | None = error
    while seen is not None:
        kind, message = type(seen).__name__, text_of(seen)
        if kind in _NETWORK_ERRORS:
            # DistBackendError is also raised for wrong use; its text then names no peer.
            if kind != "DistBackendError" or _PEER_GONE.search(message):
                return True
        elif isinstance(seen, RuntimeError) and _PEER_GONE.search(message):
            return bool(_TORCH_DISTRIBUTED.search(message))
        seen = seen.__cause__
    return False
