"""Standbys of a script have its libraries from one import per node, through a real forkserver."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.workers import worker_transport
from holdfast.workers.agent.pool import fork_protocol, preload
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.local.local_rig import spec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

FORKSERVER = """
import sys
from holdfast.orchestrator import limits
from holdfast.workers.agent.pool import forkserver
forkserver.IMPORT_TIME_S = float(sys.argv.pop(1))
limits.IMPORT_WAIT_S = float(sys.argv.pop(1))
forkserver.main(sys.argv[1:])
"""
NOTED = """
import os, pathlib
TUNED = os.environ["TUNED"]  # of the job's environment
with open(pathlib.Path(__file__).with_suffix(".pids"), "a") as file:
    file.write(f"{os.getpid()}\\n")
"""
"""A module that notes which processes import it."""
THREADED = NOTED + (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)
SLOW_AT_FIRST = NOTED + (
    "import time\n"
    "if len(open(pathlib.Path(__file__).with_suffix('.pids')).readlines()) == 1: time.sleep(600)\n"
)
PAUSED = NOTED + (
    "import time\nwhile not pathlib.Path(__file__).with_suffix('.go').exists(): time.sleep(0.02)\n"
)


class Node:
    """The agent's side of one forkserver."""

    def __init__(self, place: Path, import_time_s: float, ranks_wait_s: float) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(120)
        path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._place = place
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKSERVER, str(import_time_s), str(ranks_wait_s),
             str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **preload.SINGLE_THREADED, "PYTHONPATH": path},
        )  # fmt: skip
        theirs.close()
        document = spec(
            "learned", 1, entrypoint={"script": "train.py"}, parallelism={}, env={"TUNED": "yes"}
        )
        configure = fork_protocol.ConfigureForkserver(spec=document, directory=str(place))
        fork_protocol.send(self.link, configure)
        self.wires: dict[int, socket.socket] = {}
        """Worker number -> our end; a standby ends when it is closed."""

    def fork(
        self, worker: int, *modules: str, rank: bool = False, left_out: tuple[str, ...] = ()
    ) -> None:
        """A standby, or a worker that has a rank already."""
        self.wires[worker], theirs = worker_transport.pair()
        asked, asks = worker_transport.pair()
        stack = os.memfd_create("stack")
        request = fork_protocol.ForkWorker(
            worker=worker, local_rank=-1 if rank else worker, modules=modules, left_out=left_out
        )
        fork_protocol.send(self.link, request, (theirs.fileno(), stack, asks.fileno()))
        os.close(stack)
        for end in (theirs, asked, asks):
            end.close()

    def answer(self) -> fork_protocol.ForkMessage:
        message, _fds = fork_protocol.receive(self.link)
        assert message is not None, "the forkserver has ended"
        return message

    def forked(self, *workers: int) -> list[psutil.Process]:
        """Forked processes, children of the forkserver."""
        answers = [self.answer() for _ in workers]
        assert all(isinstance(a, fork_protocol.Forked) for a in answers), answers
        pids = {a.worker: a.pid for a in answers if isinstance(a, fork_protocol.Forked)}
        started = [psutil.Process(pids[worker]) for worker in workers]
        assert {process.ppid() for process in started} == {self.process.pid}
        return started

    def template(self) -> psutil.Process | None:
        children = psutil.Process(self.process.pid).children()
        return next((child for child in children if child.name() == "hf-imports"), None)

    def imported_in(self, module: str) -> list[int]:
        """The processes that imported it."""
        with contextlib.suppress(FileNotFoundError):
            return [int(pid) for pid in (self._place / f"{module}.pids").read_text().split()]
        return []

    def end(self) -> None:
        self.link.close()
        for wire in self.wires.values():
            wire.close()
        assert self.process.wait(60) == 0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    modules = {"quiet": NOTED, "threaded": THREADED, "slow": SLOW_AT_FIRST, "paused": PAUSED}
    for name, text in modules.items():
        (tmp_path / f"hf_{name}.py").write_text(text)
    return tmp_path


@contextlib.contextmanager
def node(place: Path, import_time_s: float = 60, ranks_wait_s: float = 60) -> Iterator[Node]:
    started = Node(place, import_time_s, ranks_wait_s)
    try:
        yield started
    finally:
        started.end()


def test_one_import_serves_all_standbys_and_the_forkserver_reports_their_ends(place: Path) -> None:
    with node(place) as host:
        for worker in range(3):
            host.fork(worker, "hf_quiet")
        first, second, third = host.forked(0, 1, 2)
        template = host.template()
        assert template is not None and host.imported_in("hf_quiet") == [template.pid]
        assert os.getpgid(first.pid) == first.pid, "it can be signalled with its children"
        host.wires.pop(0).close()
        assert host.answer() == fork_protocol.ProcessEnded(worker=0, code=0, signal=None)
        fork_protocol.send(host.link, fork_protocol.SignalWorker(worker=1, signal=signal.SIGKILL))
        assert host.answer() == fork_protocol.ProcessEnded(worker=1, code=None, signal=9)
        assert third.is_running() and not second.is_running()
        assert host.template() == template, "no orphan was taken for it, nor it for an orphan"


def test_workers_that_end_while_others_are_forked_take_none_of_them_along(place: Path) -> None:
    count = 60
    with node(place) as host:
        for worker in range(count):
            host.fork(worker, "hf_quiet")
        host.forked(*range(count))
        for worker in range(count):
            kill = fork_protocol.SignalWorker(worker=worker, signal=signal.SIGKILL)
            fork_protocol.send(host.link, kill)
            host.fork(count + worker, "hf_quiet")
        answers = [host.answer() for _ in range(2 * count)]
        ended = {a.worker for a in answers if isinstance(a, fork_protocol.ProcessEnded)}
        new = {a.worker: a.pid for a in answers if isinstance(a, fork_protocol.Forked)}
        assert ended == set(range(count)) and set(new) == set(range(count, 2 * count))
        host.fork(2 * count, "hf_quiet")
        host.forked(2 * count)  # the forkserver goes on, and has reported no other end
        assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in new.values())


def test_what_starts_a_thread_is_left_to_the_standbys(place: Path) -> None:
    (place / "hf_outer.py").write_text("import hf_threaded\n")
    with node(place) as host:
        for worker in range(2):
            host.fork(worker, "hf_quiet", "hf_outer", "hf_threaded")
        left_out = host.answer()
        assert isinstance(left_out, fork_protocol.ImportLeftOut), "the agent remembers it"
        assert left_out.modules == ("hf_outer", "hf_threaded")
        standbys = host.forked(0, 1)
        template = host.template()
        assert template is not None
        until(lambda: len(host.imported_in("hf_threaded")) == 3, "both imports", timeout_s=60)
        attempt, *by_standbys = host.imported_in("hf_threaded")
        assert set(by_standbys) == {standby.pid for standby in standbys}
        assert host.imported_in("hf_quiet") == [attempt, template.pid]


def test_what_opens_cuda_is_left_to_the_standbys(place: Path) -> None:
    """CUDA's driver opens this file; torch counts devices without it if the variable is set."""
    opens = "import os\nos.open('nvidia-uvm', os.O_RDWR | os.O_CREAT)\n"
    counts = "import os\nopen('checks', 'a').write(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])\n"
    for name, text in {"opens": opens, "counts": counts}.items():
        (place / f"hf_{name}.py").write_text(text.replace("('", f"('{place}/"))
    with node(place) as host:
        host.fork(0, "hf_counts", "hf_opens")
        answer = host.answer()
        assert isinstance(answer, fork_protocol.ImportLeftOut)
        assert (answer.modules, answer.problem) == (("hf_opens",), "opened CUDA")
        host.forked(0)
        assert (place / "checks").read_text() == "11", "of two templates; no standby has it"


def test_a_signal_reaches_a_worker_that_is_forked_later(place: Path) -> None:
    with node(place) as host:
        host.fork(0, "hf_quiet")
        fork_protocol.send(host.link, fork_protocol.SignalWorker(worker=0, signal=signal.SIGKILL))
        host.forked(0)
        assert host.answer() == fork_protocol.ProcessEnded(worker=0, code=None, signal=9)


@pytest.mark.parametrize("ending", ["killed", "too long"])
def test_without_a_template_each_standby_imports_by_itself(place: Path, ending: str) -> None:
    with node(place, import_time_s=60 if ending == "killed" else 1) as host:
        host.fork(0, "hf_slow")
        until(lambda: host.imported_in("hf_slow"), "the import to begin", timeout_s=60)
        (pid,) = host.imported_in("hf_slow")
        if ending == "killed":
            os.kill(pid, signal.SIGKILL)
        (standby,) = host.forked(0)
        until(lambda: len(host.imported_in("hf_slow")) == 2, "the second import", timeout_s=60)
        assert host.imported_in("hf_slow") == [pid, standby.pid]
        until(
            lambda: not psutil.pid_exists(pid) and host.template() is None,
            "the template's end, for which no worker waits",
            timeout_s=60,
        )


def test_more_modules_get_another_template(place: Path) -> None:
    with node(place) as host:
        host.fork(0, "hf_quiet")
        host.forked(0)
        first = host.template()
        host.fork(1, "hf_quiet", "json.tool")
        host.forked(1)
        second = host.template()
        assert first is not None and second is not None and not first.is_running()
        assert host.imported_in("hf_quiet") == [first.pid, second.pid]
        host.fork(2, "hf_quiet")
        host.forked(2)
        assert host.template() == second


def test_a_worker_with_a_rank_takes_part_in_an_import_that_has_begun(place: Path) -> None:
    with node(place) as host:
        host.fork(0, "hf_paused")
        until(lambda: host.imported_in("hf_paused"), "the import to begin", timeout_s=60)
        host.fork(1, "hf_paused", rank=True)
        (place / "hf_paused.go").touch()
        first = host.answer()
        assert isinstance(first, fork_protocol.Forked) and first.worker == 1, "ranks come first"
        host.forked(0)
        template = host.template()
        assert template is not None and host.imported_in("hf_paused") == [template.pid]


def test_a_worker_with_a_rank_does_not_wait_for_long(place: Path) -> None:
    with node(place, ranks_wait_s=0.5) as host:
        host.fork(0, "hf_slow", rank=True)
        (worker,) = host.forked(0)
        until(lambda: len(host.imported_in("hf_slow")) == 2, "the second import", timeout_s=60)
        template = host.template()
        assert template is not None, "it goes on, for the standbys"
        assert host.imported_in("hf_slow") == [template.pid, worker.pid]


def test_a_worker_with_a_rank_can_be_stopped_while_it_waits(place: Path) -> None:
    with node(place) as host:
        host.fork(0, "hf_slow", rank=True)
        until(lambda: host.imported_in("hf_slow"), "the import to begin", timeout_s=60)
        kill = fork_protocol.SignalWorker(worker=0, signal=signal.SIGKILL)
        fork_protocol.send(host.link, kill)
        answer = host.answer()
        assert isinstance(answer, fork_protocol.NotForked) and "stopped" in answer.detail
        assert len(host.imported_in("hf_slow")) == 1, "the import goes on meanwhile"


def test_a_worker_with_a_rank_does_not_wait_for_a_second_import(place: Path) -> None:
    with node(place) as host:
        host.fork(0, "hf_threaded", rank=True)
        assert isinstance(host.answer(), fork_protocol.ImportLeftOut)
        (worker,) = host.forked(0)
        until(lambda: len(host.imported_in("hf_threaded")) == 2, "both imports", timeout_s=60)
        assert host.imported_in("hf_threaded")[1] == worker.pid
        # The forkserver ends the template after it has forked the worker.
        until(lambda: host.template() is None, "the template's end", timeout_s=60)
        host.fork(1)
        host.forked(1)
        assert host.template() is None and len(host.imported_in("hf_threaded")) == 2


def test_a_module_that_was_left_out_before_is_left_out_at_once(place: Path) -> None:
    with node(place) as host:
        host.fork(0, "hf_quiet", "hf_threaded", left_out=("hf_threaded",))
        (standby,) = host.forked(0)
        until(lambda: host.imported_in("hf_threaded"), "the standby's import", timeout_s=60)
        template = host.template()
        assert template is not None and host.imported_in("hf_quiet") == [template.pid]
        assert host.imported_in("hf_threaded") == [standby.pid]
