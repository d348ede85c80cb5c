"""Main program of a forked worker: wait for Assign, set up the process, run the entrypoint.

Every path ends in os._exit, after what Python promises (leaving.py): the teardown of an interpreter
with torch loaded takes tenths of a second and can only fail.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.launchers import Program
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.parts import load, part
from holdfast.orchestrator.protocol import files
from holdfast.workers import worker_protocol, worker_transport

from ..linux import output as streams
from ..linux import processes
from ..process import process_env
from . import entrypoint, fork_protocol, gpu_context, leaving, run_again, user_modules
from .failures import encodable, is_out_of_memory, is_secondary, text_of

if TYPE_CHECKING:
    from holdfast.workers.session.agent_channel import AgentChannel

_PACKAGE = __file__.removesuffix("workers/agent/pool/worker_main.py")
_RESERVE_BYTES = 2 * 2**20
"""Freed when the entrypoint has failed: a report of a failure for lack of memory needs some."""


def run(
    descriptors: entrypoint.Descriptors,
    job: TrainingJob,
    directory: str,
    request: fork_protocol.ForkWorker,
    inherited: frozenset[str],
) -> NoReturn:
    """Everything from the fork to the end of the process. `inherited`: the modules that every
    worker has; the others are the script's."""
    link = socket.socket(fileno=descriptors.wire)
    code = 1
    reserve: list[bytearray] = []
    try:
        _reset_signals()
        faulthandler.register(processes.STACK_SIGNAL, descriptors.stack, all_threads=False)
        if not select.select([link], [], [], 0)[0]:  # a standby: Assign has not come yet
            gpu_context.open_context(job, request.local_rank)
            user_modules.import_after_fork(job, request.modules)
            if warm := part("warm-up"):
                warm(job, directory)
            with contextlib.suppress(OSError):  # the agent has ended
                worker_transport.send(link, worker_protocol.StandbyImported())
        assign, output = _wait_for_rank(link)
        _set_up(assign, job, descriptors.wire, output)
        worker_transport.attached = worker_transport.Attached(
            link=link,
            assign=assign,
            job=job,
            inspection=socket.socket(fileno=descriptors.asked),
            take_seat=_take_seat,
        )
        reserve.append(bytearray(_RESERVE_BYTES))
        program = entrypoint.prepare(job, descriptors)
        channel = process = None
        if job.spec.entrypoint.recipe is None:
            channel = _start_pulse(job, inherited)
        user_modules.expect_imported(job)
        if channel is not None:
            process = _before_script(channel, assign, job)
        while not _ran_to_its_end(job, program, process):
            assert process is not None and channel is not None
            assign = process.next_run().assign
            _enter(assign, job)
            program = entrypoint.prepare(job, descriptors, again=True)
            process = _before_script(channel, assign, job)
        code = _leave(link, 0)
    except SystemExit as error:
        code = _leave(link, _exit_code(link, error))
    except BaseException as error:
        leaving.silence_signals()
        reserve.clear()
        error.__traceback__ = _without_launcher(error.__traceback__)
        if isinstance(error, (SyntaxError, UserError)) and _is_ours(error.__traceback__):
            error.__traceback__ = None  # the script did not run; the error names the place
        elif isinstance(error, UserError):
            error.__traceback__ = script_part(error.__traceback__)
        _print_traceback(error)  # first: the log keeps it even if the report fails
        _report_failure(link, error)  # before what may take long: the peers do not wait for it
        leaving.call_excepthook(error)
        leaving.leave()
        streams.flush()
    finally:
        os._exit(code)


def _wait_for_rank(link: socket.socket) -> tuple[worker_protocol.Assign, int | None]:
    assign, output = None, None
    with contextlib.suppress(ConnectionResetError):  # closed with a message of ours unread
        assign, output = worker_transport.receive(link)
    if assign is None:  # the agent has ended, or does not need this standby
        os._exit(0)
    assert isinstance(assign, worker_protocol.Assign)
    return assign, output


# -- process set-up ---------------------------------------------------------------------------
def _reset_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _set_up(
    assign: worker_protocol.Assign, job: TrainingJob, wire_fd: int, output: int | None
) -> None:
    _take_seat(assign, output)
    # New objects: the parent process may have replaced or captured the inherited ones.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = streams.stream(1, "strict")
    sys.stderr = streams.stream(2, "backslashreplace")
    faulthandler.enable(file=2)
    os.environ[worker_transport.AGENT_FD] = str(wire_fd)
    _enter(assign, job)


def _enter(assign: worker_protocol.Assign, job: TrainingJob) -> None:
    """Begin a run of the script in the working directory, with as many threads as the seat has."""
    if problem := enter_directory(assign, job):
        raise UserError(str(problem))
    if "torch" in sys.modules:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit():
            sys.modules["torch"].set_num_threads(max(1, int(threads)))
    if "numpy" in sys.modules:
        # Forked siblings would draw the same numbers; fresh interpreters do not.
        sys.modules["numpy"].random.seed()


def _take_seat(assign: worker_protocol.Assign, output: int | None) -> None:
    """Give a kept process its seat in another generation."""
    processes.name_process(f"rank-{assign.seat.rank}")
    _open_streams(assign.log_file, output)
    process_env.adopt(assign.environment)


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


def enter_directory(assign: worker_protocol.Assign, job: TrainingJob) -> Problem | None:
    """Enter the working directory. Returns the problem if this node lacks it or the script."""
    entry, written = job.spec.entrypoint, job.spec.working_directory
    script = entry.program.script
    try:
        directory = files.resolve(assign.spec_directory, written)
        os.chdir(directory)
        if script is not None:
            files.resolve(directory, script).stat()
        return None
    except OSError as error:
        why = f"{error.filename}: {error.strerror} on this node"
    if entry.recipe is not None and Path(written) == Path():
        _enter_logs(assign, why)
        return None
    if script is None:
        got, expected = f"{written} ({why})", "a directory of every node"
        return Problem("spec.workingDirectory", got, expected)
    got, expected = f"{script} ({why})", "a file of every node"
    fix = (
        "`holdfast run --kubernetes`, and on Ray `holdfast submit`, upload what lies beside the "
        "spec file; other jobs on Kubernetes have the files of their image"
    )
    return Problem(entry.script_field, got, expected, fix)


def _enter_logs(assign: worker_protocol.Assign, why: str) -> None:
    """A recipe needs only the spec, which came with the job."""
    logs = Path(assign.log_file).parent
    os.chdir(logs)
    print(f"not in the spec's directory ({why}), but in {logs.resolve()}", file=sys.stderr)


def _start_pulse(job: TrainingJob, inherited: frozenset[str]) -> AgentChannel:
    """A thread that shows, also of a script without the session, whether the interpreter runs and
    whether the rank begins collectives, and that reports stacks."""
    from holdfast.workers.session import agent_channel  # with torch, which the forkserver has

    channel = agent_channel.of_process()
    assert channel is not None
    learn = partial(user_modules.installed_since, inherited) if job.spec.learn_preload else None
    channel.start_pulse(learn, of_script=True)
    return channel


def _before_script(
    channel: AgentChannel, assign: worker_protocol.Assign, job: TrainingJob
) -> run_again.Process | None:
    """The process as the script finds it; None: it is not kept."""
    keeps = job.spec.recovery.keep_processes == "auto" and not job.spec.resources.num_gpus
    if not keeps or assign.membership.world_size == 1:
        return None
    from holdfast.workers.session import distributed  # with torch, as above

    # Frameworks make their process groups before they know of a session.
    distributed.keep_groups_of_script(assign.membership)
    return run_again.Process(channel, _run_entrypoint.__code__)


# -- the entrypoint ---------------------------------------------------------------------------
def _ran_to_its_end(job: TrainingJob, program: Program, process: run_again.Process | None) -> bool:
    """Run the entrypoint; False if the agent has halted it, so that it runs again."""
    try:
        _run_entrypoint(job, program)
    except BaseException as error:
        if process is not None and process.attempts.ends_script(error):
            return False
        raise
    finally:
        if process is not None:
            process.attempts.runs_again = None
    return True


def _run_entrypoint(job: TrainingJob, program: Program) -> None:
    recipe = job.spec.entrypoint.recipe
    if recipe is not None:
        if problem := recipe.missing():
            raise UserError(str(problem))
        load(recipe.config.main)(job)
    elif program.script is not None:
        script = str(files.resolve(Path.cwd(), program.script).resolve())
        sys.argv = [program.script, *program.args]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        assert program.module is not None
        sys.argv = [program.module, *program.args]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)


# -- the end ----------------------------------------------------------------------------------
def _exit_code(link: socket.socket, error: SystemExit) -> int:
    """The exit code that the interpreter would use. A text in its place is a failure's message."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    error.__traceback__ = _without_launcher(error.__traceback__)
    _report_failure(link, error)
    return 1


def _leave(link: socket.socket, code: int) -> int:
    """The interpreter's steps at its end, without the teardown."""

    def tell(waits_for: str) -> None:
        with contextlib.suppress(OSError):  # the agent has ended
            worker_transport.send(link, worker_protocol.Leaving(waits_for=waits_for))

    tell("")
    leaving.tell_if_it_lingers(tell)
    leaving.leave()
    streams.flush()
    return code


def _print_traceback(error: BaseException) -> None:
    # A full disk or a closed stream does not keep the report back.
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exception(error)
    streams.flush()


def _report_failure(link: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, so this process ends too
        worker_transport.send(link, failure_report(error))


def failure_report(error: BaseException) -> worker_protocol.Failed:
    """The message about `error`. An exception of any kind has one: half of a surrogate pair, which
    UTF-8 cannot hold, is escaped, and a failing `__str__` is named."""
    text = encodable("".join(traceback.format_exception(error))).encode()
    return worker_protocol.Failed(
        error_type=encodable(type(error).__qualname__),
        message=encodable(text_of(error))[: limits.MAX_TRACEBACK_BYTES // 4],
        traceback=text[-limits.MAX_TRACEBACK_BYTES :].decode(errors="replace"),
        secondary=is_secondary(error),
        out_of_memory=is_out_of_memory(error),
    )


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
