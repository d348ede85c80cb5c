"""Reports about a main thread without progress: real process groups and sockets."""

from __future__ import annotations

import os
import socket
import sys
import threading
import types
from collections.abc import Callable

import pytest
import torch.distributed as dist

from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.session import inspection
from holdfast.workers.session.agent_channel import AgentChannel


def test_a_dump_gives_the_newest_collective_of_each_group() -> None:
    entry = (
        '{"process_group":["%s","%s"],"collective_seq_id":%d,"profiling_name":"nccl:%s",'
        '"is_p2p":%s,"retired":%s,"state":"%s"}'
    )
    entries = [
        entry % ("0", "default_pg", 1, "all_reduce", "false", "true", "completed"),
        entry % ("1", "mesh_shard", 4, "all_gather", "false", "false", "scheduled"),
        entry % ("0", "default_pg", 2, "all_reduce", "false", "false", "started"),
        entry % ("0", "default_pg", 2, "send", "true", "false", "started"),
    ]
    groups = inspection.parse('{"entries":[' + ",".join(entries) + "]}")
    assert [(g.group, g.label, g.sequence, g.operation, g.done) for g in groups] == [
        ("1", "mesh_shard", 4, "nccl:all_gather", False),
        ("0", "default_pg", 2, "nccl:all_reduce", False),
    ]
    assert inspection.parse('{"pg_status":{}}') == ()


def test_a_missing_or_unreadable_dump_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise RuntimeError("the recorder is off")

    monkeypatch.setattr(inspection, "recorders", lambda: [broken])
    assert inspection.collectives() == ()
    assert "the recorder is off" in capsys.readouterr().err
    monkeypatch.setattr(inspection, "recorders", list)
    assert inspection.collectives() == ()


def test_collectives_of_gloo_and_of_nccl_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    native = sys.modules["torch._C._distributed_c10d"]
    entry = (
        '{"entries":[{"process_group":["%s",""],"collective_seq_id":7,"state":"started",'
        '"profiling_name":"%s:all_reduce"}]}'
    )
    for name, backend in (("_dump_fr_trace_json", "gloo"), ("_dump_nccl_trace_json", "nccl")):
        monkeypatch.setattr(native, name, lambda b=backend: entry % (b, b), raising=False)
    names = [one.operation for one in inspection.collectives()]
    assert names == ["gloo:all_reduce", "nccl:all_reduce"]


def test_the_pulse_thread_answers_while_the_main_thread_waits() -> None:
    other, waits = socket.socketpair()
    threading.Thread(target=socket.recv_fds, args=(waits, 1, 1), daemon=True).start()
    link, worker_end = worker_transport.pair()
    asks, asked = worker_transport.pair()
    with link, worker_end, asks, asked, other:
        channel = AgentChannel(worker_end, inspection_socket=asked)
        channel.start_pulse()
        asks.send(b"?")
        link.settimeout(30)
        while not isinstance(
            report := worker_transport.receive(link)[0], worker_protocol.StackReport
        ):
            pass
        assert isinstance(worker_transport.receive(link)[0], worker_protocol.CollectivesReport)
        channel.stop_pulse()
        assert "test_the_pulse_thread_answers_while_the_main_thread_waits" in report.text
        assert report.text.startswith("Current thread")
        assert report.text.count("\nThread ") >= 1 and "recv_fds" in report.text
        assert "_send_pulses" not in report.text


def _rank(rank: int, port: int, answers: socket.socket, wait: Callable[[], object]) -> None:
    """Rank 1 never begins the third all-reduce."""
    import torch

    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.ones(1)
    for _ in range(2):
        dist.all_reduce(value)
    if rank == 0:
        blocked = threading.Thread(target=dist.all_reduce, args=(value,), daemon=True)
        blocked.start()
        while inspection.collectives()[0].sequence < 3:
            os.sched_yield()
    # The recorder learns of an end a moment after the caller.
    while rank == 1 and not inspection.collectives()[0].done:
        os.sched_yield()
    (group,) = inspection.collectives()
    answers.send(f"{group.sequence} {group.done} {group.operation}".encode())
    wait()


def test_the_flight_recorder_of_gloo_shows_who_has_not_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pairs = [socket.socketpair() for _ in range(2)]
    children = []
    for rank, (ours, theirs) in enumerate(pairs):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(rank, port, theirs, lambda end=theirs: end.recv(1))
            finally:
                os._exit(0)
        ours.settimeout(60)
        children.append(pid)
    shown = [ours.recv(200).decode() for ours, _theirs in pairs]
    for pid, (ours, theirs) in zip(children, pairs, strict=True):
        with ours, theirs:
            ours.send(b"x")
        os.waitpid(pid, 0)
    assert shown == ["3 False gloo:all_reduce", "2 True gloo:all_reduce"]


def test_no_collectives_are_counted_while_the_script_imports_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = types.ModuleType("torch.distributed.distributed_c10d")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", begun)
    assert inspection.num_collectives() == 0
