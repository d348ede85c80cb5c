"""A real machine host with real agents, and a small controller in the test's own process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.orchestrator.protocol import launcher_protocol as h
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Membership, Restore, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh

TOKEN = "0123456789abcdef"
PATIENCE_S = 60.0
T = TypeVar("T")


class Timeout(AssertionError):
    """What the test waits for did not come."""


class FakeController:
    """Speaks protocol.messages with any number of agents; keeps all it hears."""

    def __init__(
        self, directory: Path, welcome: m.Welcome, context: ssl.SSLContext | None = None
    ) -> None:
        self._directory = directory
        self._welcome = welcome
        self._context = context
        self._condition = threading.Condition()
        self.heard: list[tuple[float, str, m.Message]] = []
        self._links: dict[str, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._next_action = 0
        self.address = ("", 0)

    def open(self) -> None:
        listener = self._listener = socket.create_server(("127.0.0.1", 0))
        endpoint = self._directory / "controller.json"
        temporary = endpoint.with_suffix(".tmp")
        address, port = self.address = listener.getsockname()
        temporary.write_text(json.dumps({"address": address, "port": port}))
        temporary.rename(endpoint)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """As if it had been killed."""
        with self._condition:
            links = [*self._links.values(), *([self._listener] if self._listener else [])]
            self._links = {}
            self.heard = []
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(sock,), daemon=True).start()

    def _hear(self, sock: socket.socket) -> None:
        node = ""
        try:
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            with sock.makefile("rb") as stream:
                while len(header := stream.read(4)) == 4:
                    message = m.decode(stream.read(m.frame_length(header)))
                    with self._condition:
                        if isinstance(message, m.Hello):
                            node = message.node
                            self._links[node] = sock
                            sock.sendall(m.encode(self._welcome))
                        assert isinstance(message, m.Message)
                        self.heard.append((time.monotonic(), node, message))
                        self._condition.notify_all()
        except (OSError, ValueError):
            return

    def send(self, node: str, message: m.Message) -> None:
        with self._condition:
            self._links[node].sendall(m.encode(message))

    def action(self) -> int:
        self._next_action += 1
        return self._next_action

    def wait(self, kind: type[T], node: str = "", where: Callable[[T], bool] = lambda _: True) -> T:
        """The first message of a kind that fits, heard already or yet to come."""
        deadline = time.monotonic() + PATIENCE_S
        with self._condition:
            while True:
                for _, sender, message in self.heard:
                    if isinstance(message, kind) and node in ("", sender) and where(message):
                        return message
                if not self._condition.wait(deadline - time.monotonic()):
                    seen = "\n".join(repr(x)[:300] for x in self.heard[-10:])
                    raise Timeout(f"no {kind.__name__} from {node or 'anybody'}; heard:\n{seen}")

    def forget(self) -> None:
        with self._condition:
            self.heard = []


class Rig:
    """A job directory, a host, agents and the controller."""

    def __init__(self, directory: Path, entrypoint: dict[str, Any], **spec: Any) -> None:
        self.directory = directory
        (directory / "token").write_text(TOKEN)
        (directory / "logs").mkdir()
        document = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "test"},
            "spec": {
                "entrypoint": entrypoint,
                "nodes": {"min": 1, "max": 2},
                "workersPerNode": 2,
                **spec,
            },
        }
        self.controller = FakeController(
            directory,
            m.Welcome(
                spec=document,
                spec_directory=str(directory),
                checkpoint_path=str(directory / "checkpoints"),
                log_directory=str(directory / "logs"),
                heartbeat_interval_s=0.2,
            ),
        )
        self.controller.open()
        self.nodes: dict[str, int] = {}
        self.host: subprocess.Popen[bytes] | None = None

    # -- the host -----------------------------------------------------------------------------
    def start_host(self) -> None:
        log = (self.directory / "logs" / "host.log").open("wb")
        self.host = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "holdfast.workers.agent.process.node_launcher",
                "--socket",
                str(self.socket_path),
            ],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    @property
    def socket_path(self) -> Path:
        return self.directory / "host.sock"

    def connect_host(self) -> socket.socket:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(self.socket_path))
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                assert self.host is not None and self.host.poll() is None, self.host_log()
                assert time.monotonic() < deadline, self.host_log()
                select.select([], [], [], 0.02)
                continue
            sock.settimeout(PATIENCE_S)
            first = hear_host(sock)
            assert isinstance(first, h.NodeList)
            return sock

    def host_log(self) -> str:
        return (self.directory / "logs" / "host.log").read_text()

    def start_node(self, sock: socket.socket, node: str, **more: Any) -> int:
        """Returns the pid of the agent, once it has said Hello."""
        self.ask_for_node(sock, node, **more)
        while True:
            message = hear_host(sock)
            if isinstance(message, h.NodeList) and node in message.nodes:
                break
        self.nodes[node] = message.nodes[node]
        self.controller.wait(m.Hello, node)
        return self.nodes[node]

    def ask_for_node(self, sock: socket.socket, node: str, **more: Any) -> None:
        start = h.StartNode(
            node=node,
            job="test",
            slots=2,
            token_file=str(self.directory / "token"),
            endpoint_file=str(self.directory / "controller.json"),
            log_file=str(self.directory / "logs" / f"agent-{node}.log"),
            **more,
        )
        tell_host(sock, start)

    # -- generations --------------------------------------------------------------------------
    def launch(
        self,
        node: str,
        generation: int,
        *,
        restore: Restore | None = None,
        buddy: tuple[str, int] = ("", 0),
        persist_every_steps: int = 0,
        mesh: Mesh | None = None,
    ) -> m.Launched:
        action = self.controller.action()
        membership = Membership(
            generation=generation,
            mesh=mesh or Mesh(shard=2),
            num_nodes=1,
            workers_per_node=2,
            master_address="127.0.0.1",
            master_port=1,
            restart_count=generation - 1,
            restore=restore,
        )
        message = m.LaunchWorkers(
            action_id=action,
            membership=membership,
            node_rank=0,
            seats=tuple(WorkerSeat(rank, rank, rank, True) for rank in range(2)),
            buddy=buddy[0],
            buddy_address="127.0.0.1",
            buddy_port=buddy[1],
            persist_every_steps=persist_every_steps,
        )
        self.controller.send(node, message)
        return self.controller.wait(m.Launched, node, lambda x: x.action_id == action)

    def stop(self, node: str, generation: int, **more: Any) -> m.Stopped:
        action = self.controller.action()
        self.controller.send(node, m.StopWorkers(action_id=action, generation=generation, **more))
        return self.controller.wait(m.Stopped, node, lambda x: x.action_id == action)

    def pids(self, node: str) -> dict[str, list[int]]:
        """Processes below an agent: its forkserver and the forkserver's children."""
        servers = children_of(self.nodes[node])
        return {"server": servers, "workers": [p for s in servers for p in children_of(s)]}

    def log(self, generation: int, rank: int) -> str:
        path = self.directory / "logs" / f"gen-{generation:04d}" / f"rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        """Kill what is left; tests that look for orphans have done so before."""
        if self.host is not None:
            for pid in [self.host.pid, *self.nodes.values()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.host.wait()
        self.controller.close()


def hear_host(sock: socket.socket) -> h.FromHost:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))
            assert part, "the host closed the connection"
            data += part
        return data

    body = exactly(int.from_bytes(exactly(4), "big"))
    return msgspec.msgpack.decode(body, type=h.FromHost)


def tell_host(sock: socket.socket, message: h.LauncherMessage) -> None:
    body = msgspec.msgpack.encode(message)
    sock.sendall(len(body).to_bytes(4, "big") + body)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


@contextlib.contextmanager
def watched(pids: list[int]) -> Iterator[Callable[[], None]]:
    """Yields a function that waits until all of these processes are gone."""
    fds = [os.pidfd_open(pid) for pid in pids]

    def gone() -> None:
        deadline = time.monotonic() + PATIENCE_S
        for pid, fd in zip(pids, fds, strict=True):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            assert poll.poll(left_ms), f"process {pid} is still there"

    try:
        yield gone
    finally:
        for fd in fds:
            os.close(fd)
