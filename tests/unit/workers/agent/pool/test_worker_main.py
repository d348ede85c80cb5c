"""Secondary errors of a worker, and what its stacks show."""

from __future__ import annotations

import traceback

import pytest

from holdfast.orchestrator.errors import UserError
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool.failures import is_out_of_memory, is_secondary
from holdfast.workers.agent.pool.stack_activity import activity
from holdfast.workers.agent.pool.stacks import shorten
from holdfast.workers.agent.pool.worker_main import failure_report, script_part
from holdfast.workers.session.distributed import rank_env


class DistNetworkError(RuntimeError):
    pass


class DistBackendError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
            "[127.0.0.1]:40912"
        ),
        RuntimeError(
            "[gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:1: Connection reset by peer"
        ),
        DistNetworkError("The client socket has failed to connect to any network address"),
        DistBackendError(
            "NCCL error: remote process exited or there was a network error, NCCL 2.28"
        ),
    ],
)
def test_the_loss_of_a_peer_is_secondary(error: Exception) -> None:
    assert is_secondary(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad shape"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ConnectionResetError("Connection reset by peer"),
        RuntimeError("loading the dataset failed: Connection reset by peer"),
        DistBackendError("Tensors must be CUDA and dense"),
    ],
)
def test_an_error_of_the_code_itself_is_not_secondary(error: Exception) -> None:
    assert not is_secondary(error)


class NoText(Exception):
    """An exception class with a mistake in its own `__str__`."""

    def __str__(self) -> str:
        raise KeyError("code")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(ValueError("file \udcff.txt"), r"file \udcff.txt", id="lone-surrogate"),
        pytest.param(NoText(3), "<no text: __str__ raised KeyError>", id="str-fails"),
    ],
)
def test_an_exception_without_a_proper_text_reaches_the_agent(error: Exception, text: str) -> None:
    try:
        raise error
    except type(error) as raised:
        report = failure_report(raised)
    ours, theirs = worker_transport.pair()
    with ours, theirs:
        worker_transport.send(theirs, report)
        got = worker_transport.receive(ours)[0]
    assert isinstance(got, worker_protocol.Failed)
    assert (got.error_type, got.message) == (type(error).__qualname__, text)
    assert "raise error" in got.traceback


def test_the_traceback_of_a_users_mistake_ends_in_the_script() -> None:
    try:
        rank_env_of_a_script()
    except UserError as error:
        error.__traceback__ = script_part(error.__traceback__)
        text = "".join(traceback.format_exception(error))
    assert "in rank_env_of_a_script" in text and "expected a number" in text
    assert "distributed.py" not in text


def rank_env_of_a_script() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "first")
        rank_env()


FAULTHANDLER = """Thread 0x00007f12 (most recent call first):
  File "/x/session/link.py", line 68 in _beat

Current thread 0x00007f34 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 2800 in all_reduce
  File "/x/train.py", line 10 in <module>
"""
PY_SPY = """Process 12: python -m holdfast.workers.agent.process.node_launcher
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (idle): "MainThread"
    load (train.py:12)
    <module> (train.py:20)
Thread 14 (idle): "holdfast-pulse"
    barrier (torch/distributed/distributed_c10d.py:4000)
"""


def test_a_main_thread_in_a_collective_is_recognised() -> None:
    assert activity(FAULTHANDLER) == "peers"


def test_only_the_main_thread_counts_as_in_a_collective() -> None:
    assert activity(PY_SPY) == "nothing"
    peers = PY_SPY.replace("load (train.py:12)", "barrier (torch/distributed/c.py:1)")
    assert activity(peers) == "peers"


def test_a_stack_shows_the_users_frames_without_those_that_start_a_worker() -> None:
    text = PY_SPY.replace(
        "Thread 14",
        "    _run_code (<frozen runpy>:88)\n"
        "    _run_entrypoint (workers/agent/pool/worker_main.py:119)\n"
        "    serve (workers/agent/process/node_launcher.py:95)\n"
        "Thread 13 (idle)\n"
        "Thread 14",
    )
    assert shorten(text).splitlines()[2:] == [
        'Thread 12 (idle): "MainThread"',
        "    load (train.py:12)",
        "    <module> (train.py:20)",
        'Thread 14 (idle): "holdfast-pulse"',
        "    barrier (torch/distributed/distributed_c10d.py:4000)",
    ]


class OutOfMemoryError(RuntimeError):
    """The name of torch's error for a device."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_a_lack_of_memory_is_reported_as_such(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    assert failure_report(error).out_of_memory is expected
